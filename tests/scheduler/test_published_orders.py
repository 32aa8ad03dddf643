"""Named schedules against the published ones: orders, bubbles, pieces in flight."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from actorflow_compiler.core.errors import CallError, PlanError
from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.plan.variant import Variant
from actorflow_scheduler import Hardware, schedule
from actorflow_scheduler.notation import text
from actorflow_scheduler.pipeline import SCHEDULES, find_pipeline
from actorflow_scheduler.published_orders import interleaved
from actorflow_scheduler.timeline import simulate
from plans import pipeline

TIME = 12.0  # ms of the forward pass of all stages of a rank, and of B, and of W
NO_NETWORK = Hardware(flops_per_s=1e3, bytes_per_s=1e15, latency_s=0.0, fire_overhead_s=0.0)
NETWORK = Hardware(flops_per_s=1e3, bytes_per_s=1e15, latency_s=3e-3, fire_overhead_s=0.0)

# The figures of the papers, with our numbers of stages and pieces, from 0; I and W are the halves of a backward.
FIGURES = {
    "gpipe": """
        0F0 0F1 0F2 0F3 0F4 0F5 0F6 0F7 0B0 0B1 0B2 0B3 0B4 0B5 0B6 0B7
        1F0 1F1 1F2 1F3 1F4 1F5 1F6 1F7 1B0 1B1 1B2 1B3 1B4 1B5 1B6 1B7
        2F0 2F1 2F2 2F3 2F4 2F5 2F6 2F7 2B0 2B1 2B2 2B3 2B4 2B5 2B6 2B7
        3F0 3F1 3F2 3F3 3F4 3F5 3F6 3F7 3B0 3B1 3B2 3B3 3B4 3B5 3B6 3B7""",
    "1f1b": """
        0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7
        1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1F6 1B4 1F7 1B5 1B6 1B7
        2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2F6 2B5 2F7 2B6 2B7
        3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7""",
    "interleaved": """
        0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0 0F7 4B1 4F4 4B2 4F5 4B3 4F6 0B0 4F7 0B1 0B2 0B3 4B4 4B5 4B6 4B7
          0B4 0B5 0B6 0B7
        1F0 1F1 1F2 1F3 5F0 5F1 5F2 5F3 1F4 5B0 1F5 5B1 1F6 5B2 1F7 5B3 5F4 1B0 5F5 1B1 5F6 1B2 5F7 1B3 5B4 5B5 5B6 5B7
          1B4 1B5 1B6 1B7
        2F0 2F1 2F2 2F3 6F0 6F1 6F2 6B0 6F3 6B1 2F4 6B2 2F5 6B3 2F6 2B0 2F7 2B1 6F4 2B2 6F5 2B3 6F6 6B4 6F7 6B5 6B6 6B7
          2B4 2B5 2B6 2B7
        3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 3F4 3B0 3F5 3B1 3F6 3B2 3F7 3B3 7F4 7B4 7F5 7B5 7F6 7B6 7F7 7B7
          3B4 3B5 3B6 3B7""",
    "zb-h1": """
        0F0 0F1 0F2 0F3 0I0 0W0 0F4 0I1 0W1 0F5 0I2 0W2 0F6 0I3 0W3 0F7 0I4 0W4 0I5 0W5 0I6 0W6 0I7 0W7
        1F0 1F1 1F2 1I0 1F3 1I1 1W0 1F4 1I2 1W1 1F5 1I3 1W2 1F6 1I4 1W3 1F7 1I5 1W4 1I6 1W5 1I7 1W6 1W7
        2F0 2F1 2I0 2F2 2I1 2F3 2I2 2W0 2F4 2I3 2W1 2F5 2I4 2W2 2F6 2I5 2W3 2F7 2I6 2W4 2I7 2W5 2W6 2W7
        3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1 3F5 3I5 3W2 3F6 3I6 3W3 3F7 3I7 3W4 3W5 3W6 3W7""",
    "zb-h2": """
        0F0 0F1 0F2 0F3 0F4 0F5 0F6 0I0 0W0 0F7 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5 0I6 0W6 0I7 0W7
        1F0 1F1 1F2 1F3 1F4 1I0 1F5 1I1 1F6 1I2 1W0 1F7 1I3 1W1 1I4 1W2 1I5 1W3 1I6 1W4 1I7 1W5 1W6 1W7
        2F0 2F1 2F2 2I0 2F3 2I1 2F4 2I2 2F5 2I3 2F6 2I4 2W0 2F7 2I5 2W1 2I6 2W2 2I7 2W3 2W4 2W5 2W6 2W7
        3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3F4 3I4 3F5 3I5 3F6 3I6 3W0 3F7 3I7 3W1 3W2 3W3 3W4 3W5 3W6 3W7""",
    "zb-v": """
        0F0 0F1 0F2 0F3 0F4 0F5 0F6 7F0 7I0 7W0 7F1 7I1 7W1 7F2 7I2 7W2 7F3 7I3 7W3 0F7 0I0 0W0 7F4 7I4 7W4 0I1 0W1
          7F5 7I5 7W5 0I2 0W2 7F6 7I6 7W6 0I3 0W3 7F7 7I7 7W7 0I4 0W4 0I5 0W5 0I6 0W6 0I7 0W7
        1F0 1F1 1F2 1F3 1F4 6F0 1F5 6F1 6I0 6W0 6F2 6I1 6W1 6F3 6I2 6W2 1F6 1I0 1W0 6F4 6I3 6W3 1F7 1I1 1W1 6F5 6I4
          6W4 1I2 1W2 6F6 6I5 6W5 1I3 1W3 6F7 6I6 6W6 1I4 6I7 1I5 1W4 1I6 1W5 1I7 1W6 6W7 1W7
        2F0 2F1 2F2 5F0 2F3 5F1 2F4 5F2 5I0 5W0 5F3 5I1 5W1 2F5 2I0 2W0 5F4 5I2 5W2 2F6 2I1 2W1 5F5 5I3 5W3 2F7 2I2
          2W2 5F6 5I4 5W4 2I3 2W3 5F7 5I5 5W5 2I4 5I6 2I5 5I7 2I6 2W4 2I7 2W5 5W6 5W7 2W6 2W7
        3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 4I0 4W0 3F4 3I0 3W0 4F4 4I1 4W1 3F5 3I1 3W1 4F5 4I2 4W2 3F6 3I2 3W2 4F6 4I3
          4W3 3F7 3I3 3W3 4F7 4I4 4W4 3I4 4I5 3I5 4I6 3I6 4I7 3I7 3W4 4W5 4W6 4W7 3W5 3W6 3W7""",
}
NAMED = SCHEDULES[1:]
FEW = ((2, 4), (3, 7), (4, 8), (4, 16))
ALL = [(ranks, pieces) for ranks in range(2, 9) for pieces in range(4, 33)]


def placed(name: str, ranks: int) -> list[int]:
    """The rank of each stage, as the schedule wants them."""
    if name == "interleaved":
        return [*range(ranks)] * 2
    return [*range(ranks), *reversed(range(ranks))] if name == "zb-v" else [*range(ranks)]


def named(name: str, ranks: int, pieces: int, hardware: Hardware = NO_NETWORK) -> Plan:
    """The scheduled plan of a pipeline whose ranks have equal work; F, B and W take the same time."""
    on = placed(name, ranks)
    each = TIME * ranks / len(on)

    def make(variant: Variant) -> Plan:
        backward = each if variant.weights else 2 * each
        return pipeline(len(on), pieces, weights=variant.weights, flops=each, backward=backward, on=on)

    return schedule(make, hardware, name=name)


def words(plan: Plan) -> list[list[str]]:
    """The compute order of each rank, without the optimizer."""
    return [[w for w in line.split()[2:] if "O" not in w] for line in text(plan).splitlines()]


def bubble(plan: Plan, hardware: Hardware) -> float:
    """Milliseconds of a period in which a rank does not work."""
    work = (3 * plan.pieces + 1) * TIME
    return simulate(plan, 6, hardware).period * 1e3 - work


def published_bubble(name: str, ranks: int) -> float:
    """For equal times of F, B and W and enough pieces, without the optimizer."""
    one, two = (ranks - 1) * TIME, (ranks - 1) * TIME * 3
    return {"gpipe": two, "1f1b": two, "interleaved": two / 2, "zb-h1": one, "zb-h2": 0.0, "zb-v": 0.0}[name]


def enough(name: str, ranks: int, pieces: int) -> bool:
    """Whether there are so many pieces that the published bubble holds."""
    return pieces >= (2 * ranks - 1 if name in ("zb-h2", "zb-v") else ranks)


def in_flight(order: list[str], until: str) -> int:
    """The most stages' pieces of a rank that are begun (F) and not taken back (B or I, or W)."""
    now = most = 0
    for word in order:
        _, kind, _ = split(word)
        now += (kind == "F") - (kind in until)
        most = max(most, now)
    return most


def check(name: str, ranks: int, pieces: int) -> None:
    plan = named(name, ranks, pieces)
    orders = words(plan)
    assert all(set(Counter(order).values()) == {1} for order in orders)
    if enough(name, ranks, pieces):
        assert bubble(plan, NO_NETWORK) == pytest.approx(published_bubble(name, ranks), abs=0.01)
    slots = {  # (stage, kind of the reader) → slots of what forward saves for it
        (a.stage, plan.actor(read.actor).kind): r.slots
        for r in plan.registers
        if (a := plan.actor(r.producer)).kind == "forward"
        for read in r.readers
        if plan.actor(read.actor).kind in ("backward", "weight")
    }
    for k in range(ranks):
        forward = {
            "gpipe": pieces,
            "1f1b": ranks - k,
            "zb-h1": ranks - k,
            "zb-h2": 2 * (ranks - k) - 1,
        }.get(name)
        if forward is not None:
            assert slots[k, "backward"] == min(pieces, forward)
        weights = {"zb-h1": ranks, "zb-h2": 2 * ranks - 1}.get(name)
        if weights is not None:
            assert slots[k, "weight"] == min(pieces, weights)
        if name == "interleaved" and pieces % ranks == 0:
            assert in_flight(orders[k], "B") == min(2 * pieces, 2 * (ranks - k - 1) + ranks + 1)
        if name == "zb-v":
            assert in_flight(orders[k], "W") <= 2 * ranks  # half as large: no more than 1F1B


@pytest.mark.parametrize("name", NAMED)
def test_orders_are_those_of_the_published_figures(name: str) -> None:
    rows = [row.split() for row in re.split(r"\n {8}(?! )", FIGURES[name])[1:]]
    assert words(named(name, 4, 8)) == rows


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize(("ranks", "pieces"), FEW)
def test_bubbles_and_slots_are_the_published_ones(name: str, ranks: int, pieces: int) -> None:
    check(name, ranks, pieces)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_bubbles_and_slots_are_the_published_ones_for_all_small_pipelines(name: str) -> None:
    for ranks, pieces in ALL:
        check(name, ranks, pieces)


def split(word: str) -> tuple[int, str, int]:
    """Stage, kind and piece."""
    stage, kind, piece = re.split("([A-Z])", word)
    return int(stage), kind, int(piece)


def alone(guide: list[list[str]], stages: int, times: dict[str, float], network: float) -> float:
    """Milliseconds from a rank's first task to its last, the longest of all ranks, if each keeps to its order.

    What a stage sends arrives ``network`` after it was made, however many are on their way.
    """
    left = {r: [split(word) for word in order] for r, order in enumerate(guide)}
    rank = {stage: r for r, order in left.items() for stage, _, _ in order}
    ends: dict[tuple[int, str, int], float] = {}
    begun: dict[int, float] = {}
    free = dict.fromkeys(range(len(guide)), 0.0)

    def arrived(stage: int, kind: str, piece: int, here: int) -> float | None:
        if not 0 <= stage < stages:
            return 0.0
        end = ends.get((stage, kind, piece))
        return None if end is None else end + network * (rank[stage] != here)

    while any(left.values()):
        before = len(ends)
        for r, order in left.items():
            while order:
                stage, kind, piece = order[0]
                came = {
                    "F": [arrived(stage - 1, "F", piece, r)],
                    "W": [arrived(stage, "I", piece, r)],
                }.get(kind, [arrived(stage, "F", piece, r), arrived(stage + 1, kind, piece, r)])
                if any(t is None for t in came):
                    break
                start = max([free[r], *(t for t in came if t is not None)])
                begun.setdefault(r, start)
                free[r] = ends[stage, kind, piece] = start + times[kind]
                order.pop(0)
        assert len(ends) > before, "the order waits for itself"
    return max(free[r] - begun[r] for r in begun)


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize(("ranks", "pieces"), FEW)
def test_with_communication_no_period_is_longer_than_the_published_orders_take(
    name: str, ranks: int, pieces: int
) -> None:
    plan = named(name, ranks, pieces, NETWORK)
    stages = len(placed(name, ranks))
    each = TIME * ranks / stages
    published = alone(words(plan), stages, {"F": each, "B": 2 * each, "I": each, "W": each}, 3.0)
    assert simulate(plan, 6, NETWORK).period * 1e3 <= published + TIME + 0.01  # and the optimizer


@pytest.mark.parametrize(("ranks", "rounds"), [(2, 2), (3, 2), (4, 3), (5, 2), (8, 2)])
def test_interleaving_takes_any_number_of_pieces(ranks: int, rounds: int) -> None:
    for pieces in range(1, 25):
        guide = [[f"{t.stage}{t.kind}{t.piece}" for t in order] for order in interleaved(ranks, pieces, rounds)]
        assert all(len(set(order)) == len(order) == 2 * rounds * pieces for order in guide)
        took = alone(guide, ranks * rounds, {"F": 1 / rounds, "B": 2 / rounds}, 0.0)
        if pieces >= ranks:
            assert took == pytest.approx(3 * pieces + 3 * (ranks - 1) / rounds)


def test_replicas_of_a_stage_keep_the_same_order() -> None:
    plan = schedule(pipeline(4, 8, replicas=2, weights=True, nbytes=1000), NETWORK, name="zb-h1")
    lines = [line.split()[2:] for line in text(plan).splitlines()]
    assert lines[::2] == lines[1::2]
    assert [w for w in lines[0] if "O" not in w] == FIGURES["zb-h1"].split("\n")[1].split()


def test_a_collective_in_the_midst_of_a_stage_does_not_make_a_named_schedule_wait() -> None:
    plan = pipeline(2, 8, replicas=2, statistics=(0, 1))
    slow = Hardware(flops_per_s=1e3, bytes_per_s=1e15, latency_s=2.5e-4, fire_overhead_s=0.0)  # a collective 0.5 ms
    assert simulate(schedule(plan, slow, name="1f1b"), 6, slow).period < 36e-3  # of 32 ms of work, 3 ms in the bubble


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(CallError, match=r"schedule='1b1f' was found; one of 'auto', 'gpipe', '1f1b', .* was expected"):
        schedule(pipeline(2, 4), name="1b1f")


@pytest.mark.parametrize(
    ("name", "on", "message"),
    [
        ("interleaved", [0, 1], r"'interleaved' needs several stages on each rank.* flow\.place\(model, stages=4\)"),
        ("zb-v", [0, 1, 0, 1], r"'zb-v' needs two stages on each rank.* flow\.place\(model, stages=4\)"),
        (
            "interleaved",
            [0, 1, 1, 0],
            r"which go round the ranks.*Stages on each rank were found as \[0, 3\]; \[1, 2\]",
        ),
        ("1f1b", [0, 1, 0, 1], r"'1f1b' needs one stage on each rank: flow\.place\(model, stages=2\)"),
        ("zb-h1", [0, 1, 1, 0], r"'zb-h1' needs one stage on each rank"),
    ],
)
def test_stages_that_do_not_fit_a_schedule_are_refused_with_what_would(name: str, on: list[int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        schedule(pipeline(len(on), 4, on=on), name=name)


def test_the_shape_of_a_pipeline_is_found_with_replicas() -> None:
    assert find_pipeline(pipeline(3, 2, replicas=2)).shape == "straight"
    assert find_pipeline(pipeline(6, 2, replicas=2, on=[0, 1, 2, 0, 1, 2])).shape == "rounds"
    assert find_pipeline(pipeline(6, 2, on=[0, 1, 2, 2, 1, 0])).shape == "v"
    assert find_pipeline(pipeline(4, 2, on=[0, 1, 1, 1])).shape == "none"
