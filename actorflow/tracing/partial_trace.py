"""Merge the trace files that the ranks of a failed run have written."""

from __future__ import annotations

from pathlib import Path

from actorflow.rendezvous.settings import threads_of
from actorflow.tracing import folder as folders
from actorflow.tracing.chrome import joined

__all__ = ["merge_rank_traces", "trace_note"]


def trace_note(folder: str, ranks: range) -> str:
    """A line for people after a failure: where the trace is, and which ranks have recorded nothing."""
    there = [rank for rank in ranks if folders.rank_file(folder, rank).exists()]
    if not there or Path(folder, folders.MERGED).exists():
        return ""
    lost = [rank for rank in ranks if rank not in there]
    without = f", without {folders.ranks_text(lost)}, of which nothing is there" if lost else ""
    return f"the trace up to then is in {folder}{without}; look at it with: actorflow trace {folder}"


def merge_rank_traces(folder: str) -> None:
    """Make ``trace.json`` of the ranks' files where a run that was cut short left only these.  Raises TraceError."""
    if Path(folder, folders.MERGED).exists():
        return
    parts = folders.read_ranks(folder)
    cut = [part.cut for part in parts if part.cut]
    if not cut:  # the run did not fail
        return
    from actorflow.runtime.measured_costs import Target  # imported here, since that takes a launcher a second
    from actorflow.tracing.tracer import with_forecast

    ran = tuple(
        with_forecast(number, plan, Target(threads=threads_of(plan.world), ranks=plan.world))
        for number, plan in folders.read_plans(folder)
    )
    events = joined(part.events for part in parts)
    ranks = tuple(part.info for part in parts)
    folders.write(folder, folders.TraceData(parts[0].script, parts[0].version, ranks, ran, events, cut[0]))
