"""ZeRO's stages train as the eager script does, and keep and move no more than they promise."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from actorflow_compiler.core.hardware import CPU_CORE
from actorflow_compiler.core.placement import placement
from actorflow_compiler.core.sbp import B, Split
from actorflow_compiler.cutting import gathers
from actorflow_compiler.hints.goal import goal_of
from actorflow_compiler.hints.hints import distribute, zero
from actorflow_compiler.plan.plan import SUM, Collective, CollectiveKind, OfVariable, Plan, Register
from actorflow_compiler.plan.summary import summarise
from actorflow_scheduler.timeline import simulate
from gpt import GPT
from models import CASES, CONTEXT, Case
from trained import Layout, plan_of, train_eagerly, train_planned

STEPS = 3
SMALL = {**CASES, "clipped gpt": replace(CASES["clipped gpt"], make=lambda: GPT(1, 32, 4, CONTEXT))}


def laid(stage: int, world: int = 2, micro_batches: int = 1, axis: int = 0) -> Layout:
    return Layout(world, micro_batches, prepare=lambda model: zero(model, stage, axis=axis))


def check(case: Case, layout: Layout, size: int) -> None:
    expected, parameters = train_eagerly(case, [size] * STEPS, layout.micro_batches)
    losses, found, _ = train_planned(case, layout, [size] * STEPS)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
    assert set(parameters) == set(found)
    for key, value in parameters.items():
        scale = value.abs().max().double().clamp(min=1e-6)
        assert (found[key].double() - value.double()).abs().max() / scale <= 1e-4, key


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("name", "world", "micro_batches"),
    [("mlp", 2, 1), ("mlp", 3, 4), ("cnn", 2, 1), ("cnn", 3, 2), ("clipped gpt", 2, 2)],
)
def test_every_stage_trains_as_the_eager_script_does(name: str, world: int, micro_batches: int, stage: int) -> None:
    check(SMALL[name], laid(stage, world, micro_batches), 12)


@pytest.mark.slow
def test_it_composes_with_tensor_parallelism_on_another_mesh_axis() -> None:
    mesh = placement("cpu", [[0, 1], [2, 3]])

    def prepare(model: nn.Module) -> None:
        zero(model, 3)
        distribute(model, {r".*(qkv|up)\.weight": (None, Split(0)), r".*(projection|down)\.weight": (None, Split(1))})

    layout = Layout(4, mesh=mesh, prepare=prepare)
    check(SMALL["clipped gpt"], layout, 8)
    plan, *_ = plan_of(SMALL["clipped gpt"], layout, 8)
    lies = {v.name: v.sbp for v in plan.variables}
    assert lies["model.blocks.0.up.weight"] == (Split(1), Split(0))  # not the dim that the other axis splits
    assert lies["model.blocks.0.down.weight"] == (Split(0), Split(1))
    assert lies["optimizer.model.blocks.0.down.weight.exp_avg"] == (Split(0), Split(1))


class Uneven(nn.Sequential):
    """Pixels float32[n, 64] through layers whose sizes divide by nothing to the logits of ten digits."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 33), nn.ReLU(), nn.Linear(33, 31), nn.ReLU(), nn.Linear(31, 10))


BESIDE = {  # case → its weights that are split along a tensor axis, where that is not found
    "mlp": {r"(first|head)\.(weight|bias)": (None, Split(0)), r"second\.weight": (None, Split(1))},
    "clipped gpt": {r".*(qkv|up)\.weight": (None, Split(0)), r".*(projection|down)\.weight": (None, Split(1))},
    "uneven": {r"0\.(weight|bias)": (None, Split(0)), r"2\.weight": (None, Split(1)), r"4\.weight": (None, Split(0))},
}
CROSSED = {**SMALL, "uneven": replace(CASES["mlp"], make=Uneven)}


def crossed(name: str, mesh: tuple[int, int], stage: int, hinted: bool) -> Layout:
    """ZeRO along the first axis of a mesh, beside a tensor axis by hints or found."""

    def prepare(model: nn.Module) -> None:
        zero(model, stage)
        if hinted:
            distribute(model, BESIDE[name])

    data, tensor = mesh
    if hinted:
        ranks = torch.arange(data * tensor).reshape(mesh).tolist()
        return Layout(data * tensor, mesh=placement("cpu", ranks), prepare=prepare)
    return Layout(data * tensor, goal=goal_of({"data": data, "tensor": tensor}, None), prepare=prepare)


@pytest.mark.slow
@pytest.mark.parametrize("hinted", [True, False], ids=["hinted", "found"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("mesh", [(2, 2), (2, 3), (3, 2)], ids=str)
@pytest.mark.parametrize("name", BESIDE)
def test_every_stage_trains_as_the_eager_script_does_beside_a_tensor_axis(
    name: str, mesh: tuple[int, int], stage: int, hinted: bool
) -> None:
    check(CROSSED[name], crossed(name, mesh, stage, hinted), 12)


@pytest.mark.slow
@pytest.mark.parametrize("hinted", [True, False], ids=["hinted", "found"])
def test_what_zero_moves_beside_a_tensor_axis_stays_in_groups_of_the_data_axis(hinted: bool) -> None:
    layout = crossed("clipped gpt", (2, 2), 3, hinted)
    plan, *_ = plan_of(SMALL["clipped gpt"], layout, 8)
    weights = [v for v in plan.variables if v.name.endswith("weight") and v.kind == "parameter" and len(v.shape) == 2]
    assert all(isinstance(v.sbp[0], Split) and v.sbp[0] != v.sbp[1] for v in weights)
    assert any(v.sbp == (Split(1), Split(0)) for v in weights)
    names = {v.name for v in weights}
    gathered = [
        a.comm.ranks
        for a in plan.actors
        if isinstance(a.comm, Collective) and any(isinstance(o, OfVariable) and o.name in names for o in a.operands)
    ]
    assert {tuple(ranks) for ranks in gathered} == {(0, 2), (1, 3)}


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world", [2, 3])
def test_stages_1_and_2_scatter_every_gradient_and_gather_every_parameter_once(stage: int, world: int) -> None:
    plan, *_ = plan_of(CASES["mlp"], laid(stage, world), 12)
    whole = 4 * sum(p.numel() for p in CASES["mlp"].model().parameters())
    moved = dict(summarise(plan).summary.moved)
    assert moved["reduce_scatter"] == moved["all_gather"] == (world - 1) * whole
    assert moved.keys() <= {"reduce_scatter", "all_gather", "all_reduce"}
    assert moved["all_reduce"] < 100  # the loss and its denominator
    for kind in ("reduce_scatter", "all_gather"):
        actors = [a for a in plan.actors if a.rank == 0 and isinstance(a.comm, Collective) and a.comm.kind == kind]
        assert [len(a.operands) for a in actors] == [6]  # all in one


def test_stage_1_keeps_a_part_of_the_optimizers_state_and_gathers_into_the_parameters() -> None:
    plain, split = (summarise(plan_of(CASES["mlp"], how, 12)[0]).summary for how in (Layout(2), laid(1)))
    for before, after in zip(plain.memory, split.memory, strict=True):
        assert after.parameters == before.parameters
        assert after.optimizer <= before.optimizer / 2 + 100  # step counters are whole
        assert after.activations <= before.activations  # no second copy of the new parameters


def test_stage_2_adds_gradients_up_over_micro_batches_in_parts() -> None:
    whole = sum(p.numel() for p in CASES["mlp"].model().parameters())
    held = {}
    for stage in (1, 2):
        plan, *_ = plan_of(CASES["mlp"], laid(stage, 2, 4), 12)
        sums = [t for r in plan.registers if plan.home(r) == 0 for t in r.tensors if t.combine == SUM]
        held[stage] = sum(t.nbytes for t in sums if t.shape)
        scatters = {a.rate for a in plan.actors if isinstance(a.comm, Collective) and a.comm.kind == "reduce_scatter"}
        assert scatters == ({1} if stage == 1 else {4})
    assert held == {1: 4 * whole, 2: 2 * whole}


def test_stage_3_stores_parts_and_keeps_no_gathered_parameter_for_the_backward_pass() -> None:
    case = SMALL["clipped gpt"]
    plan, *_ = plan_of(case, laid(3), 12)
    parameters = [v for v in plan.variables if v.kind == "parameter"]
    assert all(isinstance(v.sbp[0], Split) for v in parameters)
    made = [r for r in plan.registers if plan.home(r) == 0 and is_gather(plan, r)]
    phases = {tuple({plan.actor(read.actor).kind for read in r.readers}) for r in made}
    assert phases == {("forward",), ("backward",)}
    gathered = Counter(t.name for r in made for t in r.tensors)
    assert set(gathered) == {v.name for v in parameters}
    assert max(gathered.values()) == 2


@pytest.mark.parametrize(
    "layout", [pytest.param(laid(3, 3, 4), marks=pytest.mark.slow), replace(laid(3, 4, 4), pipeline=True)]
)
def test_stage_3_trains_as_well_when_parameters_are_gathered_in_many_chunks(
    monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    monkeypatch.setattr(gathers, "CHUNK", 1)
    check(CASES["mlp"], layout, 12)


def test_stage_3_holds_no_more_than_three_gathered_chunks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = replace(CASES["mlp"], make=Deep, loss=lambda m, x, y: nn.functional.cross_entropy(m(x), y))
    monkeypatch.setattr(gathers, "CHUNK", 1)
    plan, *_ = plan_of(deep, laid(3), 12)
    spans = simulate(plan, 1, CPU_CORE).spans
    begins, ends = {s.actor: s.start for s in spans}, {s.actor: s.end for s in spans}
    made = [r for r in plan.registers if plan.home(r) == 0 and is_gather(plan, r)]
    lives = [(begins[r.producer], max(ends[read.actor] for read in r.readers)) for r in made]
    most = max(sum(start <= at < end for start, end in lives) for at, _ in lives)
    assert len(made) > 20
    assert most <= 3


class Deep(nn.Sequential):
    """Pixels float32[n, 64] through layers of one size to the logits of ten digits."""

    def __init__(self) -> None:
        super().__init__()
        for _ in range(12):
            self.append(nn.Linear(64, 64, bias=False))
            self.append(nn.Tanh())
        self.append(nn.Linear(64, 10, bias=False))


def is_gather(plan: Plan, register: Register) -> bool:
    comm = plan.actor(register.producer).comm
    return isinstance(comm, Collective) and comm.kind == CollectiveKind.ALL_GATHER


def test_the_dim_that_is_split_divides_evenly_if_one_does() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.even = nn.Linear(9, 7)  # weight (7, 9): the second dim divides by 3
            self.odd = nn.Linear(7, 5)  # weight (5, 7): none does, 7 is larger
            self.tiny = nn.Linear(5, 2, bias=True)  # bias (2): smaller than the number of devices

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.tiny(torch.tanh(self.odd(torch.tanh(self.even(x[:, :9])))))

    case = replace(
        CASES["mlp"], make=Odd, loss=lambda model, x, y: nn.functional.cross_entropy(model(x), (y > 4).long())
    )
    plan, *_ = plan_of(case, laid(1, 3), 12)
    lies = {v.name: v.sbp for v in plan.variables if v.name.endswith("exp_avg")}
    assert {n.removeprefix("optimizer.model.").removesuffix(".exp_avg"): str(s[0]) for n, s in lies.items()} == {
        "even.weight": "S(1)", "even.bias": "S(0)", "odd.weight": "S(1)", "odd.bias": "S(0)",
        "tiny.weight": "S(1)", "tiny.bias": "B",
    }  # fmt: skip
    assert all(v.sbp == (B,) for v in plan.variables if v.kind == "parameter")
    check(case, laid(3, 3), 12)
