"""Gathers of parameters (ZeRO 3) run as far ahead as is faster and fits the memory, and change no number."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from actorflow.session.compiling import room_beside_variables
from actorflow.session.planes import computes_beside
from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.core.placement import placement
from actorflow_compiler.core.sbp import B, Split
from actorflow_compiler.cutting import buckets, gathers, segment
from actorflow_compiler.cutting.lowered_step import LoweredStep
from actorflow_compiler.hints.hints import zero
from actorflow_compiler.plan.plan import Collective, CollectiveKind, OfVariable, Plan, Variable
from actorflow_compiler.plan.variant import AHEAD, PLAIN, Variant
from actorflow_scheduler.cost import max_workspace_bytes
from actorflow_scheduler.forecast import forecast
from actorflow_scheduler.schedule import WORTH, _Search, schedule
from actorflow_scheduler.slots import SlotPlanner
from actorflow_scheduler.timeline import simulate
from models import CASES
from plans import pipeline
from trained import Layout, laid_of, train

SLOW = Hardware(  # ops beside products take next to no time
    flops_per_s=3e9, bytes_per_s=3e8, latency_s=0.0, fire_overhead_s=0.0, memory_bytes_per_s=1e12
)
FAST = replace(SLOW, bytes_per_s=1e12)
GAINING = replace(SLOW, flops_per_s=2e9)  # more of four micro-batches' computing can hide their gathers
IN_TURNS = "data 2, micro-batches"
AMPLE = dict.fromkeys(range(4), 1 << 30)
LAYERS, SIZE = 8, 64


class FatInTheMiddle(nn.Module):
    """Pixels float32[n, 64] through thin layers, with a table in between that is as large as sixteen of them."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(LAYERS))
        self.table = nn.Embedding(1024, 64)
        self.after = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(LAYERS))
        self.head = nn.Linear(64, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = (x[:, 10] * 16).long()
        for layer in self.before:
            x = torch.tanh(layer(x))
        x = x + self.table(at)
        for layer in self.after:
            x = torch.tanh(layer(x))
        logits: torch.Tensor = self.head(x)
        return logits


CASE = replace(
    CASES["mlp"],
    make=FatInTheMiddle,
    loss=lambda m, x, y: nn.functional.cross_entropy(m(x), y),
    stages=(r"before|table", r"after|head"),
)
LAYOUTS = {
    "data 2": Layout(2, prepare=lambda m: zero(m, 3)),
    "data 2, micro-batches": Layout(2, 4, prepare=lambda m: zero(m, 3)),
    "data 2, pipeline 2": Layout(4, 4, pipeline=True, prepare=lambda m: zero(m, 3)),
}
FEW = {"data 2, micro-batches": 1}  # with two, the backward pass of a micro-batch hides the next one's first gathers
SLOWER = {"data 2, pipeline 2": replace(SLOW, flops_per_s=1.5e9)}  # where computing can hide a table


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter is a chunk, and each large gradient a bucket."""
    monkeypatch.setattr(gathers, "CHUNK", 1)
    monkeypatch.setattr(buckets, "BUCKET", 1 << 14)
    monkeypatch.setattr(segment, "BUCKET", 1 << 14)


@functools.cache
def laid(name: str = "data 2", hardware: Hardware = SLOW) -> LoweredStep:
    return laid_of(CASE, replace(LAYOUTS[name], hardware=hardware), SIZE)[0]


def with_ahead(ahead: int | None, name: str = "data 2") -> Plan:
    return schedule(laid(name).cut(Variant(ahead=ahead)), SLOW)


def period(plan: Plan) -> float:
    return forecast(plan, SLOW).period


def most_at_a_time(plan: Plan) -> int:
    """How many gathered chunks one rank has at a time, if chunks come at once and computing takes long."""
    spans = simulate(plan, 1, replace(SLOW, bytes_per_s=1e15)).spans
    begins, ends = {s.actor: s.start for s in spans}, {s.actor: s.end for s in spans}
    made = [r for r in plan.registers if r.tensors and r.producer in set(chunks(plan))]
    lives = [(begins[r.producer], max(ends[read.actor] for read in r.readers)) for r in made]
    return max(sum(start <= at < end for start, end in lives) for at, _ in lives)


def chunks(plan: Plan) -> Iterator[int]:
    """The actors that gather parameters on rank 0."""
    for a in plan.actors:
        gathers_ = isinstance(a.comm, Collective) and a.comm.kind == CollectiveKind.ALL_GATHER
        if gathers_ and a.rank == 0 and all(isinstance(o, OfVariable) for o in a.operands):
            yield a.id


def chosen(plan: Plan) -> tuple[str, str]:
    """How many chunks may be in memory, as the note of a plan says, and the rest of the note."""
    (note,) = (n for n in plan.notes if n.startswith("gathers"))
    found = re.fullmatch(r"gathers of parameters run ahead: (?:at most )?(all|\d+) .* at a time(.*)", note)
    assert found is not None, note
    return found[1], found[2]


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    "name", ["data 2", "data 2, micro-batches", pytest.param("data 2, pipeline 2", marks=pytest.mark.slow)]
)
def test_a_slow_link_is_kept_busy_where_there_is_memory(name: str) -> None:
    hardware = SLOWER.get(name, SLOW)
    few = FEW.get(name, AHEAD)
    plain = schedule(laid(name, hardware).cut(Variant(ahead=few)), hardware)
    plan = schedule(laid(name, hardware).cut, hardware, room=AMPLE)
    number, why = chosen(plan)
    assert int(number) > few
    assert why.startswith(", with which a step takes " if few == AHEAD else "; more would not be faster")
    assert "do not fit" not in why
    assert forecast(plan, hardware).period < forecast(plain, hardware).period * (1 - WORTH)


@pytest.mark.slow
def test_no_more_chunks_than_are_of_use_are_in_memory() -> None:
    plan = schedule(laid().cut, SLOW, room=AMPLE)
    number, _ = chosen(plan)
    assert period(plan) <= period(with_ahead(None)) * (1 + WORTH)
    assert period(with_ahead(int(number) // 2)) > period(plan) * (1 + WORTH)


def test_the_fat_layer_is_on_its_way_several_layers_before_it_is_used() -> None:
    def begun(plan: Plan) -> int:
        """The actors that have computed when the table's gather begins."""
        table = next(
            a
            for a in chunks(plan)
            if any(o.name == "model.table.weight" for o in plan.actor(a).operands)  # type: ignore[union-attr]
        )
        spans = simulate(plan, 1, SLOW).spans
        start = next(s.start for s in spans if s.actor == table)
        return sum(s.rank == 0 and s.queue == "compute" and s.end <= start for s in spans)

    assert begun(schedule(laid().cut, SLOW, room=AMPLE)) < begun(with_ahead(AHEAD)) - 3


def test_less_memory_means_fewer_chunks_and_the_plan_fits() -> None:
    free = schedule(laid().cut, SLOW, room=AMPLE)
    most = peak(free)
    found = []
    for share in (1.0, 0.94, 0.88, 0.5):
        room = dict.fromkeys(range(2), int(share * most))
        plan = schedule(laid().cut, SLOW, room=room)
        number, why = chosen(plan)
        found.append((int(number), period(plan)))
        if int(number) > AHEAD:
            assert peak(plan) <= room[0]
            assert peak(plan, replace(SLOW, bytes_per_s=1e15)) <= room[0]  # also if the link is fast
        else:
            assert plan.actors == with_ahead(AHEAD).actors
            assert plan.registers == with_ahead(AHEAD).registers
            assert why in ("; there is no memory for more", "; more would be faster, and do not fit the memory")
    numbers, periods = zip(*found, strict=True)
    assert numbers[0] > AHEAD == numbers[-1]
    assert list(numbers) == sorted(numbers, reverse=True)
    assert list(periods) == sorted(periods)
    assert len({*numbers}) > 2  # there is a number between all that are of use and the fewest


@pytest.mark.parametrize("share", [2.0, 1.0, 0.9, pytest.param(0.8, marks=pytest.mark.slow), 0.7])
def test_slots_are_planned_for_the_delays_that_are_chosen_and_for_those_that_may_not_fit(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    solved: list[int] = []
    most, exact_always, place = share * ample_peak(), _Search.further_ahead, SlotPlanner.place
    monkeypatch.setattr(SlotPlanner, "place", lambda *args: solved.append(1) or place(*args))
    quick = of_micro_batches(share)
    of_quick = len(solved)
    monkeypatch.setattr(
        _Search, "further_ahead", lambda self, found, room: exact_always(self, self.sized(found), room, exact=True)
    )
    thorough = of_micro_batches(share)
    assert forecast(quick, GAINING).period <= forecast(thorough, GAINING).period * (1 + WORTH)
    assert peak(quick, GAINING) <= max(most, peak(thorough, GAINING))
    if share == 2.0:
        assert int(chosen(quick)[0]) > AHEAD
        assert of_quick == 1  # of the delays that are chosen
        assert len(solved) - of_quick > of_quick


def test_slots_are_planned_where_there_is_no_memory_for_other_delays() -> None:
    few = of_micro_batches(0.1)
    assert chosen(few) == (str(AHEAD), "; there is no memory for more")
    assert few.registers == schedule(laid(IN_TURNS, GAINING).cut, GAINING, beside=False).registers


def test_delays_between_are_tried_where_all_chunks_at_a_time_do_not_fit() -> None:
    """With all of them no order of the four micro-batches fits the budget."""
    budget = dict.fromkeys(range(2), int(0.8 * ample_peak()))
    plan = schedule(laid(IN_TURNS, GAINING).cut, GAINING, memory=budget, room=budget)
    assert int(chosen(plan)[0]) > AHEAD
    assert peak(plan, GAINING) <= budget[0]


def test_delays_that_do_not_fit_with_the_slots_that_they_get_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Search, "fits_early", lambda _, sized, room: sized.variant == PLAIN or not sized.exact)
    assert chosen(of_micro_batches(2.0)) == (str(AHEAD), "; more would be faster, and do not fit the memory")


def of_micro_batches(share: float) -> Plan:
    """A plan of four micro-batches whose ranks have a share of the memory that they would like to have."""
    return schedule(laid(IN_TURNS, GAINING).cut, GAINING, room=dict.fromkeys(range(2), int(share * ample_peak())))


@functools.cache
def ample_peak() -> int:
    return peak(schedule(laid(IN_TURNS, GAINING).cut, GAINING, room=AMPLE), GAINING)


def peak(plan: Plan, hardware: Hardware = SLOW) -> int:
    """The bytes of registers and workspace on rank 0."""
    return simulate(plan, 4, hardware).peak_bytes[0] + max_workspace_bytes(plan)[0]


def test_a_fast_link_gains_nothing_and_no_other_variant_is_made() -> None:
    made: list[Variant] = []

    def make(variant: Variant) -> Plan:
        made.append(variant)
        return laid("data 2", FAST).cut(variant)

    plan = schedule(make, FAST, room=AMPLE)
    assert chosen(plan) == ("2", "; more would not be faster")
    assert made == [PLAIN]


def test_where_ranks_compute_nothing_meanwhile_more_gains_nothing() -> None:
    plan = schedule(laid().cut, SLOW, room=AMPLE, beside=False)  # as in memory that CPUs of one host share
    assert chosen(plan) == ("2", "; more would not be faster")
    assert plan.registers == with_ahead(AHEAD).registers


def test_ranks_compute_nothing_beside_collectives_where_all_are_cpus_of_one_machine() -> None:
    assert not computes_beside(["a", "a"], ["cpu", "cpu"])
    assert computes_beside(["a", "b"], ["cpu", "cpu"])
    assert computes_beside(["", ""], ["cpu", "cpu"])  # --no-local
    assert computes_beside(["a", "a"], ["cuda", "cuda"])


def test_where_memory_is_not_known_gathers_run_ahead_as_far_as_always() -> None:
    plan = schedule(laid().cut, SLOW)
    assert chosen(plan) == ("2", "; whether there is memory for more is not known")
    assert plan.registers == with_ahead(AHEAD).registers


@pytest.mark.slow
def test_where_memory_is_not_known_micro_batches_may_gather_twice_as_many_chunks_if_that_is_faster() -> None:
    hardware = replace(SLOW, flops_per_s=5e8)
    step = laid("data 2, micro-batches", hardware)
    plan = schedule(step.cut, hardware)
    assert chosen(plan) == ("4", "; whether there is memory for more is not known")
    plain = schedule(step.cut(PLAIN), hardware)
    assert forecast(plan, hardware).period < forecast(plain, hardware).period * (1 - WORTH)


def test_gradients_of_micro_batches_do_not_pile_up_behind_gathers_over_a_slow_link() -> None:
    plan = schedule(laid("data 2, micro-batches").cut(PLAIN), SLOW)
    scattered = [
        register
        for a in plan.actors
        if isinstance(a.comm, Collective) and a.comm.kind == CollectiveKind.REDUCE_SCATTER and a.rate > 2
        for register in plan.inputs_of[a.id]
        if register.tensors
    ]
    assert scattered
    assert max(register.slots for register in scattered) <= 2


def test_a_plan_without_gathers_says_nothing_of_them() -> None:
    plan = schedule(laid_of(CASE, Layout(2, hardware=SLOW), SIZE)[0].cut, SLOW, room=AMPLE)
    assert not any("gathers" in note for note in plan.notes)


@pytest.mark.parametrize("ahead", [2, 3, 5])
def test_so_many_chunks_are_in_memory_as_the_variant_says(ahead: int) -> None:
    assert most_at_a_time(with_ahead(ahead)) == ahead
    assert most_at_a_time(with_ahead(None)) > 8


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    "name", ["data 2", pytest.param("data 2, micro-batches", marks=pytest.mark.slow), "data 2, pipeline 2"]
)
def test_no_number_changes_however_far_gathers_run_ahead(name: str) -> None:
    step, values, optimizer = laid_of(CASE, LAYOUTS[name], 16)

    def trained(ahead: int | None) -> tuple[list[float], dict[str, torch.Tensor]]:
        plan = schedule(step.cut(Variant(ahead=ahead)), SLOW)
        return train(CASE, plan, {k: v.clone() for k, v in values.items()}, optimizer, [16, 16])

    losses, state = trained(AHEAD)
    for ahead in (5, None):
        again, found = trained(ahead)
        assert again == losses
        assert found.keys() == state.keys()
        assert all(torch.equal(found[key], value) for key, value in state.items())


def test_variables_of_all_jobs_leave_room_in_the_budget_or_most_of_the_memory() -> None:
    place = placement("cpu", [0, 1])
    whole = Variable("w", (100,), "float32", place, (B,), "parameter")
    parts = Variable("m", (100,), "float32", place, (Split(0),), "optimizer")
    plan = replace(pipeline(2, 1), variables=(whole,))
    assert room_beside_variables(plan, None, None, ()) is None
    assert room_beside_variables(plan, 1000.0, None, (whole, parts)) == {0: 400, 1: 400}
    assert room_beside_variables(plan, None, 1000, ()) == {0: 500, 1: 500}
    assert room_beside_variables(plan, 800.0, 1000, ()) == {0: 400, 1: 400}
