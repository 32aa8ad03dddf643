"""Format bytes, seconds, floating-point operations, ranges of ranks and tables as text for people; read bytes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from actorflow_compiler.core.runs import stretches

FOLDED = 5  # so many ranges that are alike are not written one by one


def bytes_text(n: float) -> str:
    """3 B, 1.5 KiB, 2.0 MiB."""
    if n < 1024:
        return f"{n:.0f} B"
    size = float(n)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 1023.95 or unit == "TiB":
            break
    return f"{size:.1f} {unit}"


def bytes_of(text: str) -> float | None:
    """The bytes that a text says, more than 0: "20GB" (powers of 1000), "512MiB" (of 1024), "100"; else None."""
    units: dict[str, int] = {"": 1, "b": 1, **{f"{u}b": 1000**i for i, u in enumerate("kmgt", 1)}}
    units |= {f"{u}ib": 1024**i for i, u in enumerate("kmgt", 1)}
    found = re.fullmatch(r"\s*([\d.]+)\s*([a-z]*)\s*", text.lower())
    if found is None or found[2] not in units:
        return None
    try:
        count = float(found[1]) * units[found[2]]
    except ValueError:
        return None
    return count if count > 0 else None


def flop_text(flops: float) -> str:
    """950 FLOP, 1.20 GFLOP."""
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if flops >= scale:
            return f"{flops / scale:.2f} {prefix}FLOP"
    return f"{flops:g} FLOP"


def seconds_text(seconds: float) -> str:
    """12.3 µs, 4.56 ms, 1.20 s, 12 min 5 s."""
    if seconds >= 99.95:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    scale, unit = next((x for x in ((1.0, "s"), (1e-3, "ms")) if seconds >= 0.99949 * x[0]), (1e-6, "µs"))
    return f"{seconds / scale:.3g} {unit}"


def ranges_text(numbers: Sequence[int]) -> str:
    """Ascending numbers with neighbours folded: 0, 1, 2, 5 → 0-2,5; and five or more alike: 0-1,8-9,…,56-57."""
    ranges: list[tuple[int, int]] = []  # first, how many
    for n in numbers:
        if ranges and sum(ranges[-1]) == n:
            ranges[-1] = ranges[-1][0], ranges[-1][1] + 1
        else:
            ranges.append((n, 1))
    parts: list[str] = []
    for many, alike in itertools.groupby(ranges, key=lambda one: one[1]):
        for first, step, count in stretches([at for at, _ in alike]):
            each = [_range_text(first + k * step, many) for k in range(count)]
            parts += each if count < FOLDED else [*each[:2], "…", each[-1]]
    return ",".join(parts)


def _range_text(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def rows_text(runs: Sequence[tuple[int, int]]) -> str:
    """Half-open ranges of rows for people: ((0, 32), (64, 65)) → rows 0-31,64; ((5, 6),) → row 5; () → no rows."""
    if not runs:
        return "no rows"
    several = len(runs) > 1 or runs[0][1] - runs[0][0] > 1
    return f"row{'s' * several} {','.join(str(a) if b - a == 1 else f'{a}-{b - 1}' for a, b in runs)}"


def columns(table: Sequence[Sequence[str]], align: str) -> list[str]:
    """The lines of a table; ``align`` has one letter for each column, as in a format specification."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)).rstrip()
        for row in table
    ]
