"""Write a run's traces and plans into a folder, and read them back; errors say why a folder has none."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from actorflow_compiler.core.errors import PlanError, TraceError
from actorflow_compiler.core.units import ranges_text
from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.plan.proto import from_bytes, to_bytes
from actorflow_scheduler.cost import Durations
from actorflow_scheduler.notation import observed

__all__ = [
    "FORMAT", "MERGED", "RankInfo", "RankTrace", "TraceData", "TracedPlan", "clear", "document", "rank_file",
    "ranks_text", "read", "read_plans", "read_ranks", "write", "write_order", "write_plan", "write_rank",
]  # fmt: skip

FORMAT = 4  # version of the files' format: since 4, plans name ranks as stretches, and exchanges by number
MERGED = "trace.json"
_WRITTEN = re.compile(r"(rank\d+\.(json|txt)|plan\d+\.pb|trace\.(json|html))(\.part)?")
_KEY = "actorflow"  # of the merged file; the format lets a file hold more than its events


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Where a rank ran."""

    rank: int
    host: str
    pid: int
    doubt: int  # ns, the largest error of its times


@dataclass(frozen=True, slots=True)
class TracedPlan:
    """A plan that was run, and its forecast."""

    number: int
    plan: Plan
    hardware: str  # the hardware it was forecast for
    costs: Durations  # of its actors' firings, as forecast


@dataclass(frozen=True, slots=True)
class TraceData:
    """The contents of a trace folder."""

    script: str
    version: str  # of actorflow, in the run
    ranks: tuple[RankInfo, ...]
    ran: tuple[TracedPlan, ...]
    events: Sequence[Mapping[str, Any]]
    cut: str = ""  # why the run ended early; empty if it did not

    @property
    def lost(self) -> list[int]:
        """The ranks without a recording."""
        known = {r.rank for r in self.ranks}
        return [rank for rank in range(max((r.plan.world for r in self.ran), default=0)) if rank not in known]


@dataclass(frozen=True, slots=True)
class RankTrace:
    """The trace file of one rank."""

    info: RankInfo
    script: str
    version: str  # of actorflow
    cut: str  # as in ``TraceData``
    events: Sequence[dict[str, Any]]


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks for people: "rank 1", "ranks 1-3"."""
    return f"rank{'s' * (len(ranks) > 1)} {ranges_text(ranks)}"


def rank_file(folder: str, rank: int) -> Path:
    """The path of a rank's own events."""
    return Path(folder, f"rank{rank}.json")


def clear(folder: str) -> None:
    """Remove the files of an earlier run, since a folder has the trace of one run."""
    for path in Path(folder).glob("*"):
        if _WRITTEN.fullmatch(path.name):
            path.unlink(missing_ok=True)


def document(events: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> bytes:
    """A file of the Chrome trace format."""
    found = {"displayTimeUnit": "ms", _KEY: about, "traceEvents": events}
    return json.dumps(found, separators=(",", ":")).encode()


def write_rank(folder: str, part: RankTrace) -> None:
    """Write ``rankN.json``.  Raises TraceError."""
    about = {"format": FORMAT, "version": part.version, "script": part.script, "cut": part.cut, **asdict(part.info)}
    _write(rank_file(folder, part.info.rank), document(part.events, about))


def write_order(folder: str, rank: int, fired: Iterable[tuple[Plan, tuple[int, ...]]]) -> None:
    """Write ``rankN.txt``, what fired on a rank, in the notation of pipeline schedules.

    For each plan it has its name, then one line of compute-queue firings for each iteration.
    """
    path = Path(folder, f"rank{rank}.txt")
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [line for plan, actors in fired for line in (f"plan {plan.name}", *observed(plan, rank, actors))]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_ranks(folder: str) -> list[RankTrace]:
    """The trace files of the ranks, in order; incomplete files are skipped."""
    found = []
    for path in Path(folder).glob("rank*.json"):
        try:
            data = json.loads(path.read_bytes())
            about = data[_KEY]
            info = RankInfo(**{f.name: about[f.name] for f in fields(RankInfo)})
            found.append(RankTrace(info, about["script"], about["version"], about["cut"], data["traceEvents"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return sorted(found, key=lambda part: part.info.rank)


def write_plan(folder: str, number: int, plan: Plan) -> None:
    """Write ``planN.pb``.  Raises TraceError."""
    _write(_plan_file(folder, number), to_bytes(plan))


def read_plans(folder: str) -> list[tuple[int, Plan]]:
    """The plans of a folder, by number.  Raises TraceError for one that cannot be read."""
    numbers = sorted(int(path.stem.removeprefix("plan")) for path in Path(folder).glob("plan*.pb"))
    return [(number, _read_plan(folder, number)) for number in numbers]


def write(folder: str, traced: TraceData) -> None:
    """Write ``trace.json``, all ranks on one clock, and ``planN.pb``.  Raises TraceError."""
    about = {
        "format": FORMAT,
        "version": traced.version,
        "script": traced.script,
        "cut": traced.cut,
        "ranks": [asdict(r) for r in traced.ranks],
        "plans": [
            {
                "number": r.number,
                "hardware": r.hardware,
                "costs": sorted(r.costs.firing.items()),
                "ways": sorted(r.costs.latency.items()),
            }
            for r in traced.ran
        ],
    }
    for ran in traced.ran:
        write_plan(folder, ran.number, ran.plan)
    _write(Path(folder, MERGED), document(traced.events, about))


def read(folder: str) -> TraceData:
    """Read the files of ``write``.  Raises TraceError if they are missing, unreadable or of another version."""
    path = Path(folder, MERGED)
    if not path.exists():
        raise TraceError(f"{_missing(folder)}; a trace is written by: actorflow run SCRIPT --trace {folder}")
    try:
        found = json.loads(path.read_bytes())
        about = found[_KEY]
        written = about["format"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is not one of actorflow's, or was cut off"
        raise TraceError(f"{path} cannot be read as a trace: {why}; run the script with --trace again") from None
    if written != FORMAT:
        raise TraceError(
            f"{path} is of format {written}, written by actorflow {about.get('version', '?')}; this version reads "
            f"format {FORMAT}: run the script again, or open the file in https://ui.perfetto.dev, which "
            f"reads any"
        )
    try:
        ran = tuple(
            TracedPlan(p["number"], _read_plan(folder, p["number"]), p["hardware"], _costs(p["costs"], p["ways"]))
            for p in about["plans"]
        )
        ranks = tuple(RankInfo(**r) for r in about["ranks"])
        return TraceData(about["script"], about["version"], ranks, ran, found["traceEvents"], about.get("cut", ""))
    except (KeyError, TypeError, ValueError) as e:
        raise TraceError(f"{path} is damaged ({type(e).__name__}: {e}); run the script with --trace again") from None


def _costs(firing: Sequence[Sequence[int]], way: Sequence[Sequence[int]]) -> Durations:
    return Durations({int(a): int(ns) for a, ns in firing}, {int(a): int(ns) for a, ns in way})


def _missing(folder: str) -> str:
    path = Path(folder)
    if not path.is_dir():
        return f"{folder} is no folder"
    names = sorted(os.listdir(folder))
    if not names:
        return f"the folder {folder} is empty"
    if any(name.startswith("rank") and name.endswith(".json") for name in names):
        return f"{folder} holds files of ranks, but no {MERGED}, which rank 0 writes at the end of a run that went well"
    return f"{folder} holds no {MERGED}, but {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"


def _plan_file(folder: str, number: int) -> Path:
    return Path(folder, f"plan{number}.pb")


def _read_plan(folder: str, number: int) -> Plan:
    path = _plan_file(folder, number)
    try:
        return from_bytes(path.read_bytes())
    except OSError as e:
        raise TraceError(f"{path}, which belongs to the trace, cannot be read: {e.strerror}") from None
    except PlanError as e:
        raise TraceError(f"{path} is no plan that this version reads: {e}; run the script with --trace again") from None


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        part.write_bytes(data)
        part.replace(path)  # atomic, since a failed process may be killed while it writes
    except OSError as e:
        raise TraceError(f"{path} cannot be written: {e.strerror}; name another folder with --trace") from None
