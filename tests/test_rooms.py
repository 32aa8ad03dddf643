"""What each room of the house may import (``rooms.toml``), and that nothing goes past that, in a circle, or unseen."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping

import networkx as nx
import pytest

from house import FLOORS, HOUSE, Modules, outline, read

FRONT_DOOR = "actorflow"  # looks its own names up when they are used; its files are above all rooms


def allowed(table: str) -> dict[str, frozenset[str]]:
    """A room → what it may import, by full names, in the order of the table."""
    floors = tomllib.loads(table)

    def full(name: str, floor: str) -> str:
        first, _, rest = name.partition(".")
        package = FLOORS[first if first in FLOORS else floor][0]
        inside = rest if first in FLOORS else name
        return f"{package}.{inside}" if inside and name != "." else package

    return {
        full(room, floor): frozenset(full(name, floor) for name in names)
        for floor, rooms in floors.items()
        for room, names in rooms.items()
    }


def imported(name: str, text: str, modules: Modules) -> Iterator[tuple[int, str]]:
    """The modules of the house that a module imports anywhere in it, also for types alone, by line."""
    for node in outline(text).imports:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in modules)
        else:
            assert not node.level, f"{name}:{node.lineno}: a relative import; imports are absolute here"
            for alias in node.names:
                found = [m for m in (f"{node.module}.{alias.name}", str(node.module)) if m in modules]
                yield from ((node.lineno, m) for m in found[:1])


def unseen(text: str) -> Iterator[tuple[int, str]]:
    """Modules of ours that a module looks up by their names: ``import_module("…")``, ``sys.modules["…"]``."""
    for line, name in outline(text).lookups:
        first = name.values[0] if isinstance(name, ast.JoinedStr) and name.values else name
        if isinstance(first, ast.Constant) and str(first.value).startswith("actorflow"):
            yield line, ast.unparse(name)


def room_of(module: str, may: Mapping[str, frozenset[str]], modules: Modules) -> str:
    """The room that a module is in; a file of the front door is its own."""
    if module in may or module == FRONT_DOOR:
        return module
    room = module.rpartition(".")[0]
    return module if room == FRONT_DOOR or room not in may else room


def complaints(modules: Modules, table: str) -> list[str]:
    """What is wrong with a house: nothing, if all walls hold."""
    may = allowed(table)
    above = {room: n for n, room in enumerate(may)}
    wrong = [
        f"rooms.toml: {room} may import {name}, which does not stand above it"
        for room, names in may.items()
        for name in sorted(names)
        if above.get(name, len(above)) >= above[room]
    ]
    used: set[tuple[str, str]] = set()
    files: nx.DiGraph[str] = nx.DiGraph()
    for module, text in modules.items():
        room = room_of(module, may, modules)
        if room not in may and room.rpartition(".")[0] not in ("", FRONT_DOOR):
            wrong.append(f"{module} is in no room of rooms.toml")
        for line, name in imported(module, text, modules):
            target = room_of(name, may, modules)
            if module != FRONT_DOOR and name != FRONT_DOOR:
                files.add_edge(module, name)
            used.add((room, target))
            if room in may and room != target and target not in may[room]:
                wrong.append(f"{module}:{line} imports {name}; rooms.toml does not let {room} use {target}")
        if module != FRONT_DOOR:
            wrong += [f"{module}:{line} looks {name} up by its name; import it" for line, name in unseen(text)]
    wrong += [
        f"these files import each other in a circle: {', '.join(sorted(circle))}"
        for circle in nx.strongly_connected_components(files)
        if len(circle) > 1
    ]
    stale = sorted((room, name) for room, names in may.items() for name in names if (room, name) not in used)
    return wrong + [f"rooms.toml: {room} no longer imports {name}; take it out" for room, name in stale]


def test_every_room_imports_only_what_it_may() -> None:
    assert complaints(read(HOUSE), (HOUSE / "tests" / "rooms.toml").read_text()) == []


TABLE = """
[compiler]
core = []
plan = ["core"]
[scheduler]
"." = ["compiler.plan"]
[actorflow]
runtime = ["scheduler"]
session = ["runtime"]
"""
SMALL = {
    "actorflow": "from actorflow import job",
    "actorflow.job": "from actorflow.session import calls",
    "actorflow.runtime": "",
    "actorflow.runtime.worker": "import actorflow_scheduler.order",
    "actorflow.session": "",
    "actorflow.session.calls": "from actorflow.runtime.worker import Worker",
    "actorflow_compiler": "",
    "actorflow_compiler.core": "",
    "actorflow_compiler.core.sbp": "",
    "actorflow_compiler.plan": "",
    "actorflow_compiler.plan.plan": "from actorflow_compiler.core import sbp",
    "actorflow_scheduler": "",
    "actorflow_scheduler.order": "from actorflow_compiler.plan.plan import Plan",
}


def test_a_house_as_its_table_says_has_no_complaints() -> None:
    assert complaints(SMALL, TABLE) == []


@pytest.mark.parametrize(
    ("module", "text", "complaint"),
    [
        ("actorflow_compiler.core.ops", "from actorflow_compiler.plan.plan import Plan", "does not let"),
        ("actorflow_compiler.core.ops", "def f():\n    import actorflow_compiler.plan.plan", "core.ops:2 imports"),
        ("actorflow_compiler.core.ops", "if TYPE_CHECKING:\n    from actorflow_scheduler import order", "does not let"),
        ("actorflow.runtime.call", "from actorflow import job", "does not let actorflow.runtime use actorflow.job"),
        ("actorflow.runtime.call", "import actorflow", "does not let actorflow.runtime use actorflow"),
        ("actorflow.config", "from actorflow import env\n", ""),
        ("actorflow.runtime.call", "import_module('actorflow.session.calls')", "by its name"),
        ("actorflow.runtime.call", "importlib.import_module(f'actorflow.{x}')", "by its name"),
        ("actorflow.runtime.call", "sys.modules['actorflow.session.calls']", "by its name"),
        ("actorflow.runtime.call", "sys.modules.get('actorflow.session.calls')", "by its name"),
        ("actorflow.runtime.call", "sys.modules.get('torch')", ""),
        ("actorflow.attic.box", "", "is in no room"),
        ("actorflow.runtime.worker", "", "no longer imports"),
    ],
)
def test_a_wrong_import_is_told(module: str, text: str, complaint: str) -> None:
    found = complaints({**SMALL, module: text}, TABLE)
    assert len(found) == bool(complaint), found
    assert complaint in "".join(found)


def test_files_that_import_each_other_are_told() -> None:
    circle = {
        "actorflow.runtime.call": "from actorflow.runtime.worker import Worker",
        "actorflow.runtime.worker": "import actorflow_scheduler.order\ndef f(): from actorflow.runtime import call",
    }
    assert complaints({**SMALL, **circle}, TABLE) == [
        "these files import each other in a circle: actorflow.runtime.call, actorflow.runtime.worker"
    ]


def test_a_table_in_which_rooms_use_each_other_is_told() -> None:
    table = TABLE.replace("core = []", 'core = ["plan"]')
    found = complaints({**SMALL, "actorflow_compiler.core.sbp": "from actorflow_compiler.plan import plan"}, table)
    assert "may import actorflow_compiler.plan, which does not stand above it" in found[0]


def test_the_picture_for_contributors_shows_every_room() -> None:
    picture = (HOUSE / "CONTRIBUTING.md").read_text().partition("## The house")[2].partition("| to change")[0]
    rooms = {room.split(".")[1] for room in allowed((HOUSE / "tests" / "rooms.toml").read_text()) if "." in room}
    rooms -= {"regularizers", "typing"}  # files of the front door
    assert [room for room in sorted(rooms) if f"{room}/" not in picture and f"{room}.py" not in picture] == []


def test_every_path_that_contributors_are_sent_to_is_there() -> None:
    text = (HOUSE / "CONTRIBUTING.md").read_text()
    begins = (*(package for package, _ in FLOORS.values()), "tests/", "docs/", "docker/")
    paths = [path for path in text.split("`")[1::2] if path.startswith(begins) and " " not in path]
    folders = [HOUSE / folder for _, folder in FLOORS.values()]
    assert paths
    assert [path for path in paths if not any((folder / path).exists() for folder in folders)] == []
