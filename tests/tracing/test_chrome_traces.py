"""What ranks record is a Chrome trace that shows every firing once, and arrows for what passes between queues."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actorflow.runtime.recorder import RowsWait, ScriptRead
from actorflow.tracing import folder
from actorflow.tracing.chrome import CREDIT, ROWS, TOKEN, events, joined
from actorflow.tracing.measurement import ReadSpan, measure
from actorflow_compiler.core.errors import TraceError
from tracing.chrome_format import faults
from tracing.traced import CALLS, recorded, trace


def test_a_trace_is_of_the_chrome_format(tmp_path: Path) -> None:
    folder.write(str(tmp_path), trace())
    assert list(faults(json.loads((tmp_path / folder.MERGED).read_bytes()))) == []


@pytest.mark.parametrize(
    ("which", "change"),
    [
        ("X", {"dur": -1.0}),
        ("X", {"ts": "now"}),
        ("s", {"id": 2**60}),
        ("s", {"ph": "t"}),
        ("f", {"ts": -5.0}),
        ("e", {"id": 77}),
        ("M", {"args": {}}),
        ("i", {"s": "x"}),
    ],
)
def test_the_check_of_the_format_finds_what_is_wrong(which: str, change: dict[str, Any]) -> None:
    found = [dict(e) for e in trace().events]
    next(e for e in found if e["ph"] == which).update(change)
    assert list(faults({"traceEvents": found}))


@pytest.mark.parametrize("limit", [100, 3])
def test_every_firing_is_shown_exactly_once(limit: int) -> None:
    plan, _ = recorded(limit)
    shown = Counter((e["pid"], e["args"]["actor"], e["args"]["firing"]) for e in trace(limit).events if e["ph"] == "X")
    steps = min(limit, CALLS)
    assert shown == Counter((a.rank, a.id, n) for a in plan.actors for n in range(steps * a.rate))


def test_an_arrow_joins_each_token_that_changes_its_queue_with_its_first_reader() -> None:
    plan, _ = recorded()
    found = trace().events
    named = {(e["pid"], e["tid"], e["ts"]): e["args"] for e in found if e["ph"] == "X"}
    read = Counter(named[e["pid"], e["tid"], e["ts"]]["actor"] for e in found if e["ph"] == "f" and e["cat"] == TOKEN)
    expected: Counter[int] = Counter()
    for r in plan.registers:
        reader = plan.actor(r.readers[0].actor)
        producer = plan.actor(r.producer)
        if (producer.rank, producer.queue) != (reader.rank, reader.queue):
            expected[reader.id] += CALLS * reader.rate // r.readers[0].firings
    assert read == expected
    starts = {(e["cat"], e["id"]): e["ts"] for e in found if e["ph"] == "s"}
    assert all(starts[e["cat"], e["id"]] <= e["ts"] for e in found if e["ph"] == "f")


def test_no_arrow_goes_back_in_time_where_a_token_is_read_before_its_send_has_returned() -> None:
    plan, parts = recorded()
    sends = {a.id for a in plan.actors if a.kind == "send"}
    late = 10**9  # ns, as where another thread has the core meanwhile
    slow = [
        replace(part, fired=[f._replace(end=f.end + late) if f.actor in sends else f for f in part.fired])
        for part in parts
    ]
    found = joined(map(events, slow))
    starts = {(e["cat"], e["id"]): e["ts"] for e in found if e["ph"] == "s"}
    assert all(starts[e["cat"], e["id"]] <= e["ts"] for e in found if e["ph"] == "f" and e["cat"] == TOKEN)


def test_an_arrow_joins_what_frees_a_slot_on_another_rank_with_the_send_that_takes_it() -> None:
    plan, _ = recorded()
    found = [e for e in trace().events if e["ph"] == "f" and e["cat"] == CREDIT]
    sends = {a.id: a for a in plan.actors if a.kind == "send"}
    slots = {r.producer: r.slots for r in plan.registers if r.producer in sends}
    assert len(found) == sum(CALLS * a.rate - slots[id] for id, a in sends.items())


def test_a_rank_alone_knows_its_own_ends_of_arrows() -> None:
    _, parts = recorded()
    alone = events(parts[0])
    assert {e["pid"] for e in alone} == {0}
    assert len(joined([alone])) < len(alone)  # those to the other rank lack an end


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    written = trace()
    folder.write(str(tmp_path), written)
    assert folder.read(str(tmp_path)) == written


def test_a_trace_of_another_version_is_refused_with_both_versions(tmp_path: Path) -> None:
    folder.write(str(tmp_path), trace())
    path = tmp_path / folder.MERGED
    found = json.loads(path.read_bytes())
    found["actorflow"] |= {"format": 99, "version": "7.5"}
    path.write_text(json.dumps(found))
    with pytest.raises(
        TraceError, match=rf"format 99, written by actorflow 7\.5; this version reads format {folder.FORMAT}:"
    ):
        folder.read(str(tmp_path))


def test_waits_for_rows_are_slices_of_the_queue_of_their_source_and_those_of_the_script_of_its_own() -> None:
    plan, parts = recorded(100)
    source = next(a for a in plan.actors if a.rank == 0 and a.kind == "source")
    lane = {a.id for a in plan.actors if (a.rank, a.queue) == (0, source.queue)}
    ends = [f.end for f in parts[0].fired if f.actor in lane]
    fired = next(f for f in parts[0].fired if f.actor == source.id and f.firing == 1)
    since = max(end for end in ends if end <= fired.start)
    loader = "the loader of train.py:31"
    waited = RowsWait(0, source.id, 1, since, fired.start, "rows 32-63 of epoch 0", loader)
    read = ScriptRead(since, since + 2000, "rows 0-63 of epoch 0", loader)
    found = joined([events(replace(parts[0], waits=[waited], script_reads=[read])), events(parts[1])])
    assert list(faults({"traceEvents": found})) == []
    shown = {e["tid"]: e for e in found if e.get("cat") == ROWS}
    names = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name" and e["pid"] == 0}
    assert {names[tid]: e["args"]["rows"] for tid, e in shown.items()} == {
        source.queue: waited.rows,
        "script": read.rows,
    }
    assert {e["name"] for e in shown.values()} == {"reading rows"}
    traced = replace(trace(), events=found)
    plain, kept = (measure(t, t.ran[0]) for t in (trace(), traced))
    assert kept.late == {0: [ReadSpan(waited.start, waited.end, loader)]}
    assert kept.reads == {0: [ReadSpan(read.start, read.end, loader)]}
    assert (kept.starts, kept.ends) == (plain.starts, plain.ends)  # such a slice is no firing
    assert not plain.late
    assert not plain.reads


def part(rank: int, cut: str = "") -> folder.RankTrace:
    return folder.RankTrace(folder.RankInfo(rank, "here", 1, 0), "train.py", "0.1", cut, [])


def test_a_folder_without_a_trace_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="is empty; a trace is written by: actorflow run SCRIPT --trace"):
        folder.read(str(tmp_path))
    with pytest.raises(TraceError, match="is no folder"):
        folder.read(str(tmp_path / "missing"))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(TraceError, match=r"holds no trace\.json, but notes\.txt"):
        folder.read(str(tmp_path))
    folder.write_rank(str(tmp_path), part(1))
    with pytest.raises(TraceError, match=r"files of ranks, but no trace\.json, which rank 0 writes at the end"):
        folder.read(str(tmp_path))


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"traceEvents": []}'])
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / folder.MERGED).write_text(content)
    with pytest.raises(TraceError, match="cannot be read as a trace"):
        folder.read(str(tmp_path))


def test_a_trace_without_its_plan_is_refused(tmp_path: Path) -> None:
    folder.write(str(tmp_path), trace())
    (tmp_path / "plan0.pb").write_bytes(b"no plan")
    with pytest.raises(TraceError, match=r"plan0\.pb is no plan"):
        folder.read(str(tmp_path))
    (tmp_path / "plan0.pb").unlink()
    with pytest.raises(TraceError, match="which belongs to the trace, cannot be read"):
        folder.read(str(tmp_path))


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TraceError, match=r"cannot be written: .*; name another folder with --trace"):
        folder.write_rank(str(tmp_path / "file"), part(0))
