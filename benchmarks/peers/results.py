"""What the raw figures of a workload say: ratios of ours to theirs, and whether targets are kept.  Needs no torch."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))

from workloads import WORKLOADS, Workload

RESULTS = Path(__file__).resolve().parents[1] / "results"
median = statistics.median


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one workload; ratios are ours : theirs."""

    workload: Workload
    ours: str  # the contenders that are compared: the fastest of each side
    theirs: str
    rounds: int
    time: float  # the median of the rounds' ratios of time; of an idle run, its share of a core
    low: float  # … the least
    high: float  # … the most
    cpu: float | None  # the median of the rounds' ratios of CPU time
    memory: float | None  # of the peaks of the rank that needs most, of all that happened since before the model
    memory_of_steps: float | None  # … of later steps alone
    busy: tuple[float, float] | None = None  # how many cores each side keeps busy, ours first; of training alone

    @property
    def kept(self) -> bool:
        """Whether all targets are."""
        most = self.workload.memory_target
        within = most is None or (self.memory is not None and self.memory <= most)
        return within and self.time <= self.workload.target


def figures(workload: Workload, record: dict[str, Any]) -> Figures:
    """Of what ``contest`` or ``idle`` found."""
    contenders = record["contenders"]
    if workload.kind == "idle":
        ((name, found),) = contenders.items()
        shares = [cpu / seconds for cpu, seconds in zip(found["cpu"], found["seconds"], strict=True)]
        return Figures(
            workload, _plain(name), "–", len(shares), median(shares), min(shares), max(shares), None, None, None
        )
    ours, theirs = (
        min(
            (name for name in contenders if name.startswith(side)), key=lambda name: median(contenders[name]["seconds"])
        )
        for side in ("ours: ", "theirs: ")
    )
    a, b = contenders[ours], contenders[theirs]
    times = _ratios(a["seconds"], b["seconds"])
    return Figures(
        workload,
        _plain(ours),
        _plain(theirs),
        len(times),
        median(times),
        min(times),
        max(times),
        median(_ratios(a["cpu"], b["cpu"])) if all(b["cpu"]) else None,
        _memory_ratio(a["memory"], b["memory"], "first", "turns"),
        _memory_ratio(a["memory"], b["memory"], "turns"),
        (_busy(a), _busy(b)) if workload.kind == "training" else None,
    )


def write(record: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Keep what was found of a workload, in place of what was found before; a list of numbers is one line."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['workload']}.json"
    path.write_text(_text(record, 0) + "\n", encoding="utf-8")
    return path


def read_all(folder: Path = RESULTS) -> list[Figures]:
    """Of all workloads that are in a folder, in the suite's order."""
    paths = ((workload, folder / f"{workload.name}.json") for workload in WORKLOADS)
    return [figures(workload, json.loads(path.read_text("utf-8"))) for workload, path in paths if path.exists()]


def _ratios(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x / y for x, y in zip(a, b, strict=True)]


def _busy(contender: dict[str, Any]) -> float:
    return median(_ratios(contender["cpu"], contender["seconds"]))


def _memory_ratio(a: Sequence[dict[str, int]], b: Sequence[dict[str, int]], *of: str) -> float | None:
    if not a or not b:
        return None
    mine, other = (max(max(rank[name] for name in of) - rank["before"] for rank in ranks) for ranks in (a, b))
    return mine / other if other > 0 else None


def _plain(name: str) -> str:
    return name.partition(": ")[2]


def _text(value: Any, depth: int) -> str:
    """JSON with an entry a line, but for what holds no other dictionary or list."""
    flat = json.dumps(value, ensure_ascii=False)
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not any(isinstance(one, dict | list) and one for one in inside):
        return flat
    pad = " " * (depth + 1)
    if isinstance(value, dict):
        lines = [f"{pad}{json.dumps(key)}: {_text(one, depth + 1)}" for key, one in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{pad[1:]}}}"
    return "[\n" + ",\n".join(pad + _text(one, depth + 1) for one in value) + f"\n{pad[1:]}]"


__all__ = ["RESULTS", "Figures", "figures", "median", "read_all", "write"]
