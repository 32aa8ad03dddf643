"""Parameters that live on other devices than their ops train as on one, and travel once there and back in a step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adamax, AdamW

from actorflow.devices import Cpu, Device
from actorflow.session.planes import RankLocation, choose_planes
from actorflow.testing.local_cluster import LocalCluster
from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.hardware import CPU_CORE
from actorflow_compiler.core.placement import Placement, placement
from actorflow_compiler.core.sbp import B, Sbp, Split
from actorflow_compiler.hints.goal import Goal
from actorflow_compiler.hints.hints import distribute, place, resolve, zero
from actorflow_compiler.plan.plan import OfVariable, Plan
from actorflow_compiler.plan.summary import sent_bytes, summarise
from actorflow_scheduler.forecast import forecast
from gpt import GPT
from models import CASES, CONTEXT, Case
from runtime.fake_device import Bench, staged
from trained import Layout, plan_of, train, train_eagerly, train_planned

STEPS = 3
FIRST, SECOND = placement("cpu", [0]), placement("cpu", [1])


class Tied(nn.Module):
    """Bytes to the logits of those that follow, with one matrix for both."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, 256, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.middle(self.embed(x))))
        return logits


SMALL: dict[str, Case] = {
    "mlp": CASES["mlp"],
    "cnn": CASES["cnn"],
    "clipped gpt": replace(CASES["clipped gpt"], make=lambda: GPT(2, 32, 4, CONTEXT)),
    "momentum": replace(CASES["mlp"], optimizer=lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9), clip=0.1),
    "adamax": replace(CASES["mlp"], optimizer=lambda m: Adamax(m.parameters())),
    "tied": replace(
        CASES["gpt"],
        make=Tied,
        optimizer=lambda m: AdamW(m.parameters(), lr=1e-3, eps=1e-6),
        stages=("embed", "middle|head"),
    ),
}
STAGES = {
    "mlp": CASES["mlp"].stages,
    "clipped gpt": (r"embed|positions|blocks\.0", r"blocks\.1|norm|head"),
    "tied": SMALL["tied"].stages,
}


def at(home: list[int], sbp: Sbp = B, pattern: str = ".*") -> Callable[[nn.Module], None]:
    """Parameters live on these ranks."""
    return lambda model: distribute(model, {pattern: sbp}, placement=placement("cpu", home))


def in_two_stages(name: str, home: list[int], sbp: Sbp = B) -> Callable[[nn.Module], None]:
    """The same of a pipeline on ranks 0 and 1."""

    def prepare(model: nn.Module) -> None:
        place(model, dict(zip(STAGES[name], (FIRST, SECOND), strict=True)))
        at(home, sbp)(model)

    return prepare


def check(case: Case, layout: Layout, size: int = 8) -> Plan:
    expected, parameters = train_eagerly(case, [size] * STEPS, layout.micro_batches)
    losses, found, plan = train_planned(case, layout, [size] * STEPS)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
    assert set(parameters) >= set(found)  # a tied parameter has several names
    for key, value in found.items():
        scale = parameters[key].abs().max().double().clamp(min=1e-6)
        assert (value.double() - parameters[key].double()).abs().max() / scale <= 1e-4, key
    return plan


def kept(plan: Plan, rank: int) -> set[str]:
    """The variables that the actors of a rank work with."""
    own = [a for a in plan.actors if a.rank == rank]
    return {x.name for a in own for x in (*a.operands, *a.targets) if isinstance(x, OfVariable)}


def nbytes(case: Case) -> int:
    return sum(p.numel() * p.itemsize for p in case.model().parameters())


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("name", SMALL)
def test_one_rank_computes_and_another_keeps_the_parameters(name: str, micro_batches: int) -> None:
    plan = check(SMALL[name], Layout(2, micro_batches, prepare=at([1])))
    assert {v.placement for v in plan.variables if v.kind != "buffer"} == {SECOND}
    assert {v.placement for v in plan.variables if v.kind == "buffer"} <= {FIRST}
    assert {a.rank for a in plan.actors if a.kind in ("forward", "backward")} == {0}
    assert kept(plan, 0) == {v.name for v in plan.variables if v.kind == "buffer"}


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize(
    ("name", "home", "sbp"), [("mlp", [2, 3], Split(0)), ("clipped gpt", [2], B), ("cnn", [2], B), ("cnn", [2, 3], B)]
)
def test_two_data_parallel_ranks_have_their_parameters_elsewhere(
    name: str, home: list[int], sbp: Sbp, micro_batches: int
) -> None:
    plan = check(SMALL[name], Layout(2 + len(home), micro_batches, prepare=at(home, sbp)))
    assert {(v.placement.ranks, v.sbp) for v in plan.variables if v.shape and v.kind != "buffer"} == {
        (tuple(home), (sbp,))
    }
    assert plan.summary.stages[0] == "cpu:[0,1]"


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("micro_batches", [2, 4])
@pytest.mark.parametrize("home", [[2], [2, 3]])
def test_statistics_that_are_cut_move_on_with_every_micro_batch(home: list[int], micro_batches: int) -> None:
    case = replace(
        SMALL["mlp"],
        make=lambda: nn.Sequential(
            nn.Linear(64, 32, bias=False),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Linear(32, 32),
            nn.ReLU(),
            nn.Linear(32, 10),
        ),
    )
    _, wanted, _ = train_planned(case, Layout(1, micro_batches), [16] * STEPS)
    _, found, _ = train_planned(case, Layout(2 + len(home), micro_batches, prepare=at(home)), [16] * STEPS)
    for name in ("1.running_mean", "1.running_var"):
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-4, atol=1e-5)


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize(
    ("name", "home", "sbp"), [("mlp", [2, 3], Split(0)), ("clipped gpt", [2], B), ("tied", [2], B)]
)
def test_a_pipeline_has_its_parameters_elsewhere(name: str, home: list[int], sbp: Sbp, micro_batches: int) -> None:
    check(SMALL[name], Layout(2 + len(home), micro_batches, prepare=in_two_stages(name, home, sbp)))


@pytest.mark.slow
def test_stages_that_are_found_automatically_are_on_the_ranks_that_compute() -> None:
    def prepare(model: nn.Module) -> None:
        place(model, stages=2)
        at([2])(model)

    plan = check(SMALL["clipped gpt"], Layout(3, 4, prepare=prepare))
    assert plan.summary.stages == ("cpu:[0]", "cpu:[1]", "cpu:[2]")


@pytest.mark.parametrize(
    ("goal", "world"),
    [
        *(pytest.param(Goal((mode,)), 4, marks=pytest.mark.slow) for mode in ("auto", "tensor")),
        (Goal(("data", "tensor"), mesh=(2, 2)), 6),
    ],
    ids=["auto", "tensor", "mesh"],
)
def test_ops_are_laid_out_as_parallel_says_whatever_their_parameters_are(goal: Goal, world: int) -> None:
    home = [world - 2, world - 1]
    plan = check(SMALL["mlp"], Layout(world, 2, goal=goal, prepare=at(home, Split(0))))
    assert {v.placement.ranks for v in plan.variables} == {tuple(home)}


def test_some_parameters_may_stay_with_their_ops() -> None:
    plan = check(SMALL["mlp"], Layout(2, 2, prepare=at([1], pattern=r"second.*")))
    homes = {v.name.split(".")[1]: v.placement for v in plan.variables if v.kind == "parameter"}
    assert homes == {"first": FIRST, "second": SECOND, "head": FIRST}


def test_a_home_may_be_a_rank_that_computes() -> None:
    def prepare(model: nn.Module) -> None:
        place(model, {"first|second|head": placement("cpu", [0, 1])})
        at([1])(model)

    plan = check(SMALL["mlp"], Layout(2, 2, prepare=prepare))
    assert plan.summary.stages == ("cpu:[0,1]", "cpu:[1]")
    check(SMALL["mlp"], Layout(2, prepare=at([0, 1], Split(0))))  # where all ranks are homes, all compute


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("name", ["mlp", "clipped gpt", "adamax"])
def test_a_call_moves_each_parameter_once_and_each_gradient_once(name: str, micro_batches: int) -> None:
    case = SMALL[name]
    plan, *_ = plan_of(case, Layout(2, micro_batches, prepare=at([1])), 8)
    sent = [(plan.actor(a), n) for a, n in sent_bytes(plan).items()]
    assert {a.comm.label for a, _ in sent if a.comm is not None} == {"send"}
    there, back = (sum(n for a, n in sent if a.rank == rank) for rank in (1, 0))
    assert there == nbytes(case)
    assert back == nbytes(case) + 4  # and the loss, for the script of that rank


def test_where_two_ranks_compute_gradients_are_summed_before_they_leave() -> None:
    case = SMALL["mlp"]
    plan, *_ = plan_of(case, Layout(4, 4, prepare=at([2, 3], Split(0))), 512)
    moved = dict(summarise(plan).summary.moved)
    whole = nbytes(case)
    assert moved["reduce_scatter"] == whole
    assert 3 * whole <= moved["send"] <= 3 * whole + 64  # the parameters to both, and half a gradient from each


def test_a_rank_that_computes_keeps_nothing_of_an_offloaded_parameter_between_calls() -> None:
    case = SMALL["mlp"]
    plain, off = (plan_of(case, how, 8)[0] for how in (Layout(1), Layout(2, prepare=at([1]))))
    assert not kept(off, 0)
    before, after = (forecast(plan, CPU_CORE).ranks for plan in (plain, off))
    assert before[0].variables >= 3 * nbytes(case)
    assert after[0].variables == 0
    assert after[1].variables == before[0].variables


def test_zero_is_for_the_parameters_that_have_no_home() -> None:
    def prepare(model: nn.Module) -> None:
        zero(model, 3)
        at([2], pattern=r"head\..*")(model)

    plan = check(SMALL["mlp"], Layout(3, 2, prepare=prepare))
    lies = {v.name: (v.placement.ranks, v.sbp) for v in plan.variables if v.kind == "parameter"}
    assert lies["model.head.weight"] == ((2,), (B,))
    assert lies["model.first.weight"] == ((0, 1), (Split(0),))


def offloaded(bench: Bench) -> Callable[[int], Device]:
    return lambda rank: Cpu() if rank else bench.device(rank)


@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_device_that_runs_ahead_trains_with_parameters_in_host_memory(
    micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout(2, micro_batches, prepare=at([1]))
    wanted, state, _ = train_planned(CASES["mlp"], layout, [8] * STEPS)
    plan, values, optimizer = plan_of(CASES["mlp"], layout, 8)
    bench = Bench(seed=5)
    monkeypatch.setattr("trained.LocalCluster", functools.partial(LocalCluster, stage=staged))
    locations = RankLocation("here", "GPU 0", nccl=True), RankLocation("here")
    monkeypatch.setattr("trained.share", lambda plan, _: choose_planes(plan, locations))
    losses, found = train(CASES["mlp"], plan, values, optimizer, [8] * STEPS, offloaded(bench))
    assert losses == pytest.approx(wanted, rel=1e-5)
    for key, value in state.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)
    assert not bench.wrongs
    assert not bench.syncs


# ---- what is answered to hints that cannot be


@pytest.mark.parametrize(
    ("layouts", "home", "outputs", "what"),
    [
        ({r"norm_1\.running_mean": B}, SECOND, None, "matches no parameter .buffers stay with the ops. of Cnn"),
        ({"nothing": B}, SECOND, None, "'nothing' matches no parameter"),
        (None, SECOND, None, r"placement=cpu:\[1\]\): .* no parameter was found"),
        ({".*": B}, SECOND, {"head": Split(0)}, "outputs= or optimizer= was found with it"),
        ({".*": B}, "cpu", None, "'cpu' was found; flow.placement"),
    ],
)
def test_a_home_that_says_nothing_is_refused(
    layouts: dict[str, Sbp] | None, home: Placement, outputs: dict[str, Sbp] | None, what: str
) -> None:
    model = CASES["cnn"].model()
    with pytest.raises(LayoutError, match=what):
        distribute(model, layouts, outputs=outputs, placement=home)
    assert not resolve({"model": model}).homes


def test_two_places_for_one_parameter_are_refused_and_the_same_pattern_moves_it() -> None:
    model = CASES["mlp"].model()
    at([1])(model)
    with pytest.raises(LayoutError, match=r"it lies on cpu:\[1\], by .* it lies where its ops are"):
        distribute(model, {r"head\.weight": Split(0)})
    with pytest.raises(LayoutError, match=r"it lies on cpu:\[1\], by .* it lies on cpu:\[0\]"):
        at([0], pattern=r"head\.weight")(model)
    at([0])(model)
    assert set(resolve({"model": model}).homes.values()) == {FIRST}


def test_a_home_outside_of_the_run_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"cpu:\[2\] names rank 2, but this run has 2 devices"):
        plan_of(CASES["mlp"], Layout(2, prepare=at([2])), 8)


def test_a_mesh_is_one_of_the_ranks_that_compute() -> None:
    mesh = Goal(("data", "tensor"), mesh=(2, 2))
    with pytest.raises(
        LayoutError, match=r"the run has 4, 1 of which only keeps parameters. Start it with --devices 5"
    ):
        plan_of(CASES["mlp"], Layout(4, goal=mesh, prepare=at([3])), 8)


def test_a_layout_that_does_not_fit_the_home_is_refused() -> None:
    prepare = functools.partial(distribute, layouts={".*": (B, B)}, placement=SECOND)
    with pytest.raises(LayoutError, match=r"placement=cpu:\[1\]\).* has 1 mesh axis"):
        plan_of(CASES["mlp"], Layout(2, prepare=prepare), 8)
