"""Micro-batches gather parameters (ZeRO 3) in turn: few chunks are in memory, fewer where a budget asks for it."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import actorflow as flow
from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.hardware import CPU_CORE
from actorflow_compiler.cutting import buckets, gathers, segment
from actorflow_compiler.cutting.lowered_step import LoweredStep
from actorflow_compiler.hints.hints import zero
from actorflow_compiler.plan.plan import Collective, CollectiveKind, OfVariable, Plan
from actorflow_compiler.plan.variant import Variant
from actorflow_scheduler.cost import max_workspace_bytes
from actorflow_scheduler.forecast import forecast
from actorflow_scheduler.schedule import schedule
from actorflow_scheduler.timeline import simulate
from models import CASES
from trained import Layout, laid_of, train, train_eagerly

PIECES, STEPS = 4, 2
CHUNKS = 7 + 6  # of seven layers in the forward pass; in the backward pass the first one has no gradient to pass on
LINK = replace(CPU_CORE, bytes_per_s=1e15, latency_s=0.0, fire_overhead_s=0.0)  # chunks are there at once


class Thin(nn.Module):
    """Pixels float32[n, 64] through layers of one size to the logits of ten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        logits: Tensor = self.head(x)
        return logits


class Centred(Thin):
    """The same, but in the middle the mean of the whole batch is taken away, for which all micro-batches are waited."""

    def forward(self, x: Tensor) -> Tensor:
        x = flow.unpack(x, PIECES)
        for layer in self.layers[:3]:
            x = torch.tanh(layer(x))
        x = flow.pack(x, PIECES)
        x = flow.unpack(x - x.mean(0), PIECES)
        for layer in self.layers[3:]:
            x = torch.tanh(layer(x))
        return flow.pack(self.head(x), PIECES)


THIN = replace(CASES["mlp"], make=Thin, stages=("layers", "head"))
CENTRED = replace(THIN, make=Centred)
SPLIT = Layout(2, PIECES, prepare=lambda m: zero(m, 3))
FEWER = [Variant(ahead=ahead, shared=shared) for ahead in (1, 2, 3) for shared in (False, True)]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer is a chunk, and its gradients are a bucket."""
    monkeypatch.setattr(gathers, "CHUNK", 1)
    for module in (buckets, segment):
        monkeypatch.setattr(module, "BUCKET", 1 << 12)


@functools.cache
def laid(centred: bool = False) -> LoweredStep:
    return laid_of(CENTRED if centred else THIN, SPLIT, 2 * PIECES)[0]


def chunks(plan: Plan) -> dict[int, str]:
    """The actors that gather parameters on rank 0, and the passes that read them."""
    found = {}
    for a in plan.actors:
        gathered = isinstance(a.comm, Collective) and a.comm.kind == CollectiveKind.ALL_GATHER
        if a.rank == 0 and gathered and all(isinstance(o, OfVariable) for o in a.operands):
            (kind,) = {plan.actor(read.actor).kind for r in plan.outputs_of[a.id] for read in r.readers}
            found[a.id] = str(kind)
    return found


def most_at_a_time(plan: Plan, passes: tuple[str, ...]) -> int:
    """How many gathered chunks of these passes one rank has at a time, of all micro-batches and two iterations."""
    timeline = simulate(plan, 2, LINK)
    changes: list[tuple[int, int]] = []
    for gather, kind in chunks(plan).items():
        if kind in passes:
            (register,) = (r for r in plan.outputs_of[gather] if r.tensors)
            ends = zip(*(timeline.ends[read.actor] for read in register.readers), strict=True)
            changes += [(begin, 1) for begin in timeline.fired[gather]]
            changes += [(max(of_token), -1) for of_token in ends]
    held = most = 0
    for _, change in sorted(changes):
        held += change
        most = max(most, held)
    return most


@pytest.mark.parametrize("variant", FEWER, ids=str)
def test_no_more_chunks_of_all_micro_batches_are_in_memory_than_the_variant_says(variant: Variant) -> None:
    plan = schedule(laid().cut(variant), LINK)
    assert len(chunks(plan)) == CHUNKS
    assert max(most_at_a_time(plan, (kind,)) for kind in ("forward", "backward")) == variant.ahead
    assert most_at_a_time(plan, ("forward", "backward")) <= (variant.ahead or 0) * (1 if variant.shared else 2)


def test_what_one_op_reads_is_gathered_at_once_and_a_chunk_by_one_collective() -> None:
    plan = schedule(laid().cut, LINK)
    read = [
        {r.producer for r in plan.inputs_of[a.id] if r.producer in chunks(plan)}
        for a in plan.actors
        if a.rank == 0 and a.kind in ("forward", "backward")
    ]
    assert all(len(gathered) <= 1 for gathered in read)
    assert sum(map(len, read)) == CHUNKS
    weights = {o.name for a in chunks(plan) for o in plan.actor(a).operands if isinstance(o, OfVariable)}
    assert len(weights) == 14  # each with its bias


@pytest.mark.slow
@pytest.mark.parametrize("variant", [*FEWER[:4], Variant(ahead=None)], ids=str)
@pytest.mark.parametrize("centred", [False, True], ids=["thin", "centred"])
def test_losses_are_those_of_the_eager_script_however_few_chunks_there_are(variant: Variant, centred: bool) -> None:
    case, sizes = CENTRED if centred else THIN, [2 * PIECES] * STEPS
    step, values, optimizer = laid_of(case, SPLIT, sizes[0])
    expected, _ = train_eagerly(case, sizes, 1)
    losses, _ = train(case, schedule(step.cut(variant)), values, optimizer, sizes)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)


def test_a_pass_that_waits_for_all_micro_batches_delays_no_chunk_of_the_pass_before() -> None:
    for variant in FEWER:
        plan = schedule(laid(centred=True).cut(variant), LINK)
        assert most_at_a_time(plan, ("forward",)) <= 2 * (variant.ahead or 0)  # of each of the two parts


def needed(plan: Plan) -> int:
    return simulate(plan, 4, CPU_CORE).peak_bytes[0] + max_workspace_bytes(plan)[0]


@pytest.mark.slow
def test_a_budget_takes_fewer_chunks_and_as_long_as_that_needs() -> None:
    free = schedule(laid().cut)
    found = {}
    for variant in (Variant(), Variant(shared=True), Variant(ahead=1, shared=True)):
        plan = schedule(laid().cut(variant))
        found[needed(plan)] = plan
    assert len(found) == 3
    periods = []
    for cap in found:
        kept = schedule(laid().cut, memory=dict.fromkeys(range(2), cap))
        assert needed(kept) <= cap
        periods.append(forecast(kept, CPU_CORE).period)
    assert periods[0] >= forecast(free, CPU_CORE).period
    assert periods == sorted(periods)
    (note,) = (n for n in kept.notes if n.startswith("gathers"))
    assert re.search(rf": at most 1 of {CHUNKS} chunks of a stage.* at a time; there is no memory for more$", note)
    with pytest.raises(PlanError, match=r"needs \d+ bytes for its registers"):
        schedule(laid().cut, memory=dict.fromkeys(range(2), min(found) // 2))


@pytest.mark.slow
def test_weight_gradients_that_are_actors_of_their_own_delay_no_gather() -> None:
    layout = Layout(4, PIECES, pipeline=True, prepare=lambda m: zero(m, 3))
    step = laid_of(CASES["gpt"], layout, 2 * PIECES)[0]  # what they make of a norm's weight reads the weight
    plan = schedule(step.cut(Variant(weights=True)), CPU_CORE)
    gathered = [r for r in plan.registers if r.tensors and isinstance(plan.actor(r.producer).comm, Collective)]
    assert any(plan.actor(read.actor).kind == "weight" for r in gathered for read in r.readers)
    comms = {a.id for a in plan.actors if isinstance(a.comm, Collective)}
    delays = [r for r in plan.registers if not r.tensors and any(read.actor in comms for read in r.readers)]
    assert {"forward", "backward"} <= {plan.actor(r.producer).kind for r in delays}
    assert "weight" not in {plan.actor(r.producer).kind for r in delays}
