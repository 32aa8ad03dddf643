"""A run's recordings and plans enter a folder as files; what a folder holds leaves, or an error that says why not."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actorflow_compiler.errors import PlanError, TraceError
from actorflow_compiler.plan import Plan
from actorflow_compiler.plan_proto import from_bytes, to_bytes

__all__ = ["FORMAT", "MERGED", "Ran", "RankInfo", "Traced", "document", "read", "write", "write_rank"]

FORMAT = 1  # changes with the meaning of what is written
MERGED = "trace.json"
_KEY = "actorflow"  # of the merged file; the format lets a file hold more than its events


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Where a rank ran."""

    rank: int
    host: str
    pid: int
    doubt: int  # ns by which its times may be early or late


@dataclass(frozen=True, slots=True)
class Ran:
    """A plan that was run, and what was foretold of it."""

    number: int
    plan: Plan
    hardware: str  # for which it was forecast
    costs: Mapping[int, int]  # actor → ns of a firing, as forecast


@dataclass(frozen=True, slots=True)
class Traced:
    """What a folder holds."""

    script: str
    version: str  # of actorflow, that ran it
    ranks: tuple[RankInfo, ...]
    ran: tuple[Ran, ...]
    events: Sequence[Mapping[str, Any]]


def document(events: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> bytes:
    """A file of the Chrome trace format."""
    found = {"displayTimeUnit": "ms", _KEY: about, "traceEvents": events}
    return json.dumps(found, separators=(",", ":")).encode()


def write_rank(folder: str, rank: int, events: Sequence[Mapping[str, Any]]) -> None:
    """Write ``rankN.json``.  Raises TraceError."""
    _write(Path(folder, f"rank{rank}.json"), document(events, {"format": FORMAT, "rank": rank}))


def write(folder: str, traced: Traced) -> None:
    """Write ``trace.json``, all ranks on one clock, and ``planN.pb``.  Raises TraceError."""
    about = {
        "format": FORMAT,
        "version": traced.version,
        "script": traced.script,
        "ranks": [{"rank": r.rank, "host": r.host, "pid": r.pid, "doubt": r.doubt} for r in traced.ranks],
        "plans": [{"number": r.number, "hardware": r.hardware, "costs": sorted(r.costs.items())} for r in traced.ran],
    }
    for ran in traced.ran:
        _write(_plan_file(folder, ran.number), to_bytes(ran.plan))
    _write(Path(folder, MERGED), document(traced.events, about))


def read(folder: str) -> Traced:
    """What ``write`` wrote.  Raises TraceError where it is not there, cannot be read, or is of another version."""
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
            f"format {FORMAT}: run the script again, or open the file in https://ui.perfetto.dev, which reads any"
        )
    try:
        ran = tuple(
            Ran(p["number"], _read_plan(folder, p["number"]), p["hardware"], {int(a): int(ns) for a, ns in p["costs"]})
            for p in about["plans"]
        )
        ranks = tuple(RankInfo(**r) for r in about["ranks"])
        return Traced(about["script"], about["version"], ranks, ran, found["traceEvents"])
    except (KeyError, TypeError, ValueError) as e:
        raise TraceError(f"{path} is damaged ({type(e).__name__}: {e}); run the script with --trace again") from None


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
        path.write_bytes(data)
    except OSError as e:
        raise TraceError(f"{path} cannot be written: {e.strerror}; name another folder with --trace") from None
