"""List what is wrong with a document that should be in the Chrome trace format (JSON object form)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

HALF = 5e-4  # microseconds: times are whole nanoseconds, which a float of microseconds since the machine's start rounds
NUMBER, TEXT = (int, float), str
COMMON: Mapping[str, Any] = {"name": TEXT, "ph": TEXT, "pid": int, "tid": int}
TIMED = {**COMMON, "cat": TEXT, "ts": NUMBER}
FIELDS: Mapping[str, Mapping[str, Any]] = {  # phase → the fields that it must have
    "X": {**TIMED, "dur": NUMBER},
    "i": {**TIMED, "s": TEXT},
    "b": {**TIMED, "id": (int, str)},
    "e": {**TIMED, "id": (int, str)},
    "s": {**TIMED, "id": (int, str)},
    "f": {**TIMED, "id": (int, str)},
    "M": {**COMMON, "args": dict},
}
METADATA = {
    "process_name": "name",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}


def faults(document: Any) -> Iterator[str]:
    """What the format forbids; nothing for a trace that is right, with all arrows complete."""
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        yield "no object with a list of traceEvents"
        return
    if document.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        yield f"displayTimeUnit {document['displayTimeUnit']}"
    events = document["traceEvents"]
    found = [fault for event in events for fault in _fields(event)]
    yield from found
    if not found:
        yield from _nesting(events)
        yield from _pairs(events)


def _fields(event: Any) -> Iterator[str]:
    """What one event lacks."""
    fields = FIELDS.get(event.get("ph"))
    if fields is None:
        yield f"unknown phase: {event}"
        return
    for name, kind in fields.items():
        if not isinstance(event.get(name), kind) or isinstance(event[name], bool):
            yield f"field {name}: {event}"
    if event["ph"] == "M" and METADATA.get(event["name"]) not in event["args"]:
        yield f"metadata: {event}"
    if event["ph"] == "i" and event["s"] not in ("g", "p", "t"):
        yield f"scope: {event}"
    if event["ph"] == "X" and event["dur"] < 0:
        yield f"it ends before it begins: {event}"
    if isinstance(event.get("id"), int) and not 0 <= event["id"] < 2**53:
        yield f"a number that not every reader takes exactly: {event}"


def _nesting(events: list[dict[str, Any]]) -> Iterator[str]:
    """Slices of a thread lie one after the other, or one in the other."""
    threads = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            threads[e["pid"], e["tid"]].append((e["ts"], -e["dur"], e["name"]))
    for where, slices in threads.items():
        open_until: list[float] = []
        for start, minus, name in sorted(slices):
            end = start - minus
            while open_until and open_until[-1] <= start + HALF:
                open_until.pop()
            if open_until and end > open_until[-1] + HALF:
                yield f"{name} of thread {where} overlaps another slice in part"
            open_until.append(end)


def _pairs(events: list[dict[str, Any]]) -> Iterator[str]:
    """Arrows and asynchronous slices have two ends, and an arrow's ends lie in slices."""
    ends = defaultdict(list)
    slices = defaultdict(list)
    for e in events:
        if e["ph"] in "sfbe":
            ends[e["cat"], e["id"], e["pid"] if e["ph"] in "be" else None].append(e)
        elif e["ph"] == "X":
            slices[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    for key, pair in ends.items():
        if sorted(e["ph"] for e in pair) not in (["f", "s"], ["b", "e"]):
            yield f"{key} has the ends {[e['ph'] for e in pair]}"
    for pair in ends.values():
        for e in pair:
            if e["ph"] in "sf" and not any(a - HALF <= e["ts"] <= b + HALF for a, b in slices[e["pid"], e["tid"]]):
                yield f"an end of an arrow lies in no slice: {e}"
