"""Group the items of a problem that are repetitions of each other, so that each group is decided once.

Repeated blocks of a model (``blocks.0`` … ``blocks.47``) hold the same ops in the same order.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

ROUNDS = 2  # how many items back an item without a module is compared


def group_repeated(names: Sequence[tuple[str, Hashable]], producers: Sequence[Sequence[int]]) -> list[list[int]]:
    """Classes of equal items, in order of their first members.

    An item's name is (module or variable, what it is); ``producers`` are the items that it reads from.
    Items are equal if they have the same kind at the same position in repeated modules; items without
    a module, if they have the same kind and read equal items.
    """
    blocks = repeated_modules(name for name, _ in names)
    plain = {name: without_numbers(name, blocks) for name in {name for name, _ in names}}
    seen: Counter[tuple[str, Hashable]] = Counter()
    colours: list[Hashable] = []
    for name, kind in names:
        number = seen[(name, kind)]
        seen[(name, kind)] += 1
        colours.append((plain[name], kind, number if name else -1))
    nameless = [i for i, (name, _) in enumerate(names) if not name]
    for _ in range(ROUNDS):
        numbers: dict[Hashable, int] = {}
        ids = [numbers.setdefault(c, len(numbers)) for c in colours]
        for i in nameless:
            colours[i] = ("", names[i][1], tuple(ids[j] for j in producers[i]))
    classes: dict[Hashable, list[int]] = {}
    for i, colour in enumerate(colours):
        classes.setdefault(colour, []).append(i)
    return list(classes.values())


def repeated_modules(names: Iterable[str]) -> frozenset[str]:
    """Modules named by a number that have children: ``blocks.3`` of ``blocks.3.up``."""
    found: set[str] = set()
    for name in set(names):
        parts = name.split(".")
        found.update(".".join(parts[:i]) for i in range(1, len(parts)) if parts[i - 1].isdigit())
    return frozenset(found)


def without_numbers(name: str, blocks: frozenset[str]) -> str:
    """``blocks.3.up`` → ``blocks.#.up`` if ``blocks.3`` is one of the repeated modules."""
    parts = name.split(".")
    return ".".join(
        "#" if re.fullmatch(r"\d+", part) and ".".join(parts[: i + 1]) in blocks else part
        for i, part in enumerate(parts)
    )
