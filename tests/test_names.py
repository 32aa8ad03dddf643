"""What a name or a module's first sentence must not be: taken twice, or made by a formula."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from house import HOUSE, Modules, outline, read

# Every first sentence was of this form once, "A plan goes in; slot counts come out.", and told a reader nothing.
FORMULA = re.compile(r"\b(goes?|comes?) (in|out)\b|\b(enters?|leaves?)\b(?! (it|them|the|a)\b)")


def taken_twice(modules: Modules) -> list[str]:
    """Public classes whose name another module has for a class of its own."""
    owners: dict[str, list[str]] = defaultdict(list)
    for module, text in modules.items():
        for name in outline(text).public_classes:
            owners[name].append(module)
    return [f"class {name}: {', '.join(found)}" for name, found in sorted(owners.items()) if len(found) > 1]


def ends(word: str) -> set[str]:
    """A word and its plural, participles and agent, as English builds them."""
    stem = word.removesuffix("e")
    doubled = stem + stem[-1]
    endings = ("s", "es", "ed", "er", "ers", "ing")
    return {word, word + "s", *(stem + end for end in endings), *(doubled + end for end in endings)}


def differ_by_an_ending(modules: Modules) -> list[str]:
    """Modules of one room, such as ``call.py`` beside ``calls.py``, that nobody can tell apart by their names."""
    rooms: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        room, _, name = module.rpartition(".")
        rooms[room].add(name)
    return [
        f"{room}: {name}.py and {other}.py"
        for room, names in rooms.items()
        for name in sorted(names)
        for other in sorted(names & ends(name) - {name})
    ]


IRREGULAR = {"bind": "bound", "find": "found", "hold": "held", "keep": "kept", "lay": "laid", "make": "made"}


def told_apart_by_an_ending(modules: Modules) -> list[str]:
    """Public functions, or public classes, of one room, such as ``call`` beside ``called``."""
    rooms: dict[str, set[str]] = defaultdict(set)
    for module, text in modules.items():
        rooms[module.rpartition(".")[0]].update(outline(text).public_names)
    return [
        f"{room}: {name} and {other}"
        for room, names in rooms.items()
        for name in sorted(names)
        for other in sorted(names & (ends(name) | {IRREGULAR.get(name, name)}) - {name})
    ]


def made_by_a_formula(modules: Modules) -> list[str]:
    """First sentences of modules that say what goes in and comes out, in place of what the module does."""
    found = []
    for module, text in modules.items():
        first = outline(text).docstring.partition("\n\n")[0]
        if FORMULA.search(first) and re.search("; | in, ", first):
            found.append(f"{module}: {first}")
    return found


def test_no_public_class_has_the_name_of_another() -> None:
    assert taken_twice(read(HOUSE)) == []


def test_no_two_modules_of_a_room_differ_by_an_ending() -> None:
    assert differ_by_an_ending(read(HOUSE)) == []


def test_no_two_names_of_a_room_differ_by_an_ending() -> None:
    assert told_apart_by_an_ending(read(HOUSE)) == []


def test_modules_say_what_they_do() -> None:
    assert made_by_a_formula(read(HOUSE)) == []


def test_every_module_has_a_docstring() -> None:
    assert [name for name, text in read(HOUSE).items() if not outline(text).docstring] == []


@pytest.mark.parametrize(
    ("complaints", "modules"),
    [
        (taken_twice, {"a": "class Plan: ...", "b": "def f():\n    class Plan: ..."}),
        (differ_by_an_ending, {"room.call": "", "room.calls": ""}),
        (differ_by_an_ending, {"room.cut": "", "room.cutting": ""}),
        (differ_by_an_ending, {"room.schedule": "", "room.scheduler": ""}),
        (told_apart_by_an_ending, {"room.a": "def call(): ...", "room.b": "def called(): ..."}),
        (told_apart_by_an_ending, {"room.a": "class Draft: ...\nclass Drafts: ..."}),
        (told_apart_by_an_ending, {"room.a": "def lay(): ...", "room.b": "async def laid(): ..."}),
        (made_by_a_formula, {"a": '"""A plan goes in; slot counts come out."""'}),
        (made_by_a_formula, {"a": '"""Messages enter; what they\nsay leaves."""'}),
        (made_by_a_formula, {"a": '"""The compiler: a step goes in, a plan comes out."""'}),
    ],
)
def test_a_bad_name_is_found(complaints: object, modules: dict[str, str]) -> None:
    assert callable(complaints)
    assert len(complaints(modules)) == 1
