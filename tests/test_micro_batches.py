"""Steps in micro-batches do what the whole batch does; what users say of them, and what bad input is answered with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import actorflow as flow
from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.plan.variant import Variant
from hf import PROMISED
from micro_steps import (
    NORMED,
    SIZE,
    STEPS,
    Net,
    Normed,
    Step,
    digits,
    minimised,
    normed_step,
    plan_of,
    run_eagerly,
    run_planned,
    unpacked,
    unpacked_inside,
)
from models import DROPOUT
from trained import Layout, laid_of, train_planned

LAYOUTS = {"one device": (1, 8, False), "pipeline 2": (2, 4, True), "data 2": (2, 2, False)}
PACKED = "cannot be split into micro-batches"

eagerly = functools.cache(lambda name: run_eagerly(STEPS[name]))


def check(found: Any, expected: Any, bound: float = 1e-9) -> None:
    """Compare results of all calls and the state that is left."""
    for results, wanted in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(results, wanted, rtol=bound, atol=bound)
    used = {name: value for name, value in expected[1].items() if name in found[1]}
    assert used
    torch.testing.assert_close(found[1], used, rtol=bound, atol=bound)


def packed(plan: Plan) -> list[str]:
    return [note for note in plan.notes if PACKED in note]


def actors(plan: Plan, kind: str) -> list[tuple[str, int]]:
    return [(a.name.split("@")[0], a.rate) for a in plan.actors if a.kind == kind and a.rank == 0]


# ---- the same mathematics


ALSO_DATA = (
    "weighted mean",
    "several terms",
    "clipped norm",
    "results for each sample",
)  # those that the default run has on two devices


@pytest.mark.matrix(every=24)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=pytest.mark.slow if layout == "data 2" and name not in ALSO_DATA else ())
        for name in STEPS
        for layout in LAYOUTS
    ],
)
def test_a_step_in_micro_batches_does_what_the_whole_batch_does(name: str, layout: str) -> None:
    world, micro_batches, pipeline = LAYOUTS[layout]
    planned = plan_of(STEPS[name], world, micro_batches, pipeline)
    assert planned.plan.pieces == micro_batches
    assert not packed(planned.plan)
    check(run_planned(STEPS[name], planned), eagerly(name))


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NORMED)
def test_batch_norm_does_what_an_eager_loop_over_micro_batches_does(name: str, layout: str) -> None:
    world, micro_batches, pipeline = LAYOUTS[layout]
    step, loop = normed_step(NORMED[name], micro_batches)
    planned = plan_of(step, world, micro_batches, pipeline)
    assert not packed(planned.plan)
    assert any("each micro-batch by itself" in note for note in planned.plan.notes)
    check(run_planned(step, planned), run_eagerly(loop))


def test_statistics_that_are_read_in_the_step_are_those_after_the_last_micro_batch() -> None:
    class Watched(Normed):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(24))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def step_of(pieces: int) -> Step:
        def run(m: Any, optimizer: Any) -> Any:
            def step(x: Tensor, y: Tensor) -> Tensor:
                for a, b in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
                    (F.cross_entropy(m(a), b) / pieces).backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    m.mean.mul_(0.5).add_(m.norm.running_mean)
                    m.count.copy_(m.norm.num_batches_tracked)
                return m.norm.running_var * 1

            return step

        return Step(run, Watched)

    found = run_planned(step_of(1), plan_of(step_of(1), 1, 4))
    assert found[1]["count"] == 8
    check(found, run_eagerly(step_of(4)))


OF_THE_WHOLE: dict[str, Callable[[Tensor], Tensor]] = {  # losses whose gradient is not split as the batch is
    "mean": lambda z: -z.mean(),
    "halves": lambda z: z[: SIZE // 2].exp().mean() - z[SIZE // 2 :].mean(),
    "pairs": lambda z: F.mse_loss(z[: SIZE // 2], z[SIZE // 2 :]),
    "all with all": lambda z: (z @ z.T).logsumexp(1).sum(),
    "column": lambda z: z[:, 0].sum(),
}


@pytest.mark.parametrize("last", [False, True], ids=["", "batch norm last"])
@pytest.mark.parametrize(
    "layout", [(1, 4, False), (2, 2, False), (2, 4, True)], ids=["one device", "data 2", "pipeline 2"]
)
@pytest.mark.parametrize("loss", OF_THE_WHOLE)
def test_batch_norm_has_statistics_of_each_micro_batch_whatever_gradient_comes(
    loss: str, layout: tuple[int, int, bool], last: bool
) -> None:
    world, micro_batches, pipeline = layout

    def step_of(pieces: int) -> Step:
        def run(m: Any, optimizer: Any) -> Any:
            def step(x: Tensor, y: Tensor) -> Tensor:
                z = torch.cat([m.norm(m.first(c)) if last else m(c) for c in x.chunk(pieces)])
                found = OF_THE_WHOLE[loss](z) + 0 * y.sum()
                found.backward()
                optimizer.step()
                optimizer.zero_grad()
                return found

            return step

        return Step(run, Normed)

    planned = plan_of(step_of(1), world, micro_batches, pipeline)
    check(run_planned(step_of(1), planned), run_eagerly(step_of(micro_batches)), 1e-7)


class Counting(nn.BatchNorm1d):
    """Batch norm with buffers of its own: sums, a moving average, and a counter that is no whole number."""

    seen: Tensor
    mean: Tensor
    count: Tensor

    def __init__(self, size: int) -> None:
        super().__init__(size)
        for name, value in (("seen", torch.zeros(size)), ("mean", torch.zeros(size)), ("count", torch.tensor(0.0))):
            self.register_buffer(name, value)

    def note(self, x: Tensor, count: float) -> None:
        self.seen += x.detach().sum(0)
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.count += count

    def forward(self, x: Tensor) -> Tensor:
        self.note(x, 1.0)
        return super().forward(x)


class NormedCounting(Normed):
    """With such a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Counting(24)


def test_other_buffers_of_a_batch_norm_are_those_of_the_whole_batch() -> None:
    """Its counters alone move on with every micro-batch, as its statistics do."""

    def in_turn(m: Any, x: Tensor, y: Tensor) -> Tensor:
        hidden = m.first(x)
        m.norm.note(hidden, 4.0)
        normed = torch.cat([nn.BatchNorm1d.forward(m.norm, c) for c in hidden.chunk(4)])
        return F.cross_entropy(m.head(F.relu(normed)), y)

    step = Step(minimised(lambda m, x, y: F.cross_entropy(m(x), y)), NormedCounting)
    check(run_planned(step, plan_of(step, 1, 4)), run_eagerly(Step(minimised(in_turn), NormedCounting)), 1e-7)


MOVED_LATER: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], Callable[[Any, Tensor, Tensor], object], str]] = {
    # the loss, what comes after the optimizer's step with what went into batch norm, and what is said
    "scaled": (lambda m, h, y: m.head(m.norm(h)), lambda m, x, h: m.norm.running_mean.mul_(0.5), "reads statistics"),
    "second pass": (lambda m, h, y: m.head(m.norm(h)), lambda m, x, h: m(x), "reads statistics"),
    "what was made before": (lambda m, h, y: m.head(m.norm(h)), lambda m, x, h: m.norm(h), "reads statistics"),
    "behind all samples": (
        lambda m, h, y: m.head(m.norm(m.norm(h) + m.norm(h).cumsum(0)[-1:])),
        lambda m, x, h: None,
        "moves the running statistics of a batch norm once more, after all micro-batches",
    ),
}


@pytest.mark.parametrize("case", MOVED_LATER)
def test_statistics_that_would_move_on_after_all_micro_batches_are_refused(case: str) -> None:
    logits_of, more, told = MOVED_LATER[case]

    def run(m: Any, optimizer: Any) -> Any:
        def step(x: Tensor, y: Tensor) -> Tensor:
            hidden = m.first(x)
            loss = F.cross_entropy(logits_of(m, hidden, y), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                more(m, x, hidden)
            return loss

        return step

    with pytest.raises(PlanError, match=rf"{told}.*with micro-batches .*Expected: leave micro_batches out"):
        plan_of(Step(run, Normed), 1, 4)


def test_binary_cross_entropy_of_small_probabilities_keeps_its_digits() -> None:
    x = torch.logspace(-10, -1, SIZE)

    def run(m: Any, optimizer: Any) -> Any:
        return lambda x: F.binary_cross_entropy(x, torch.zeros_like(x), reduction="none")

    step = Step(run, batches=lambda: [(x,)])
    ((found,),) = run_planned(step, plan_of(step, 1, 4))[0]
    torch.testing.assert_close(
        found, F.binary_cross_entropy(x, torch.zeros_like(x), reduction="none"), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize(("world", "pieces"), [(1, 1), (1, 32), (2, 1), (2, 16)])
def test_sums_of_16_bits_are_rounded_once(world: int, pieces: int) -> None:
    """Terms that are rounded before they are added would leave nothing of what is left of large numbers."""

    def run(m: Any, optimizer: Any) -> Any:
        def step(x: Tensor) -> tuple[Tensor, ...]:
            x = x * (0 * m.first.weight[:1, :1] + 1).bfloat16()  # else they would depend on the batch alone
            found = x.mean(), x.mean(0), (x * x).sum(0)
            found[0].backward()
            optimizer.step()
            return found

        return step

    torch.manual_seed(0)
    x = torch.randn(32, 8).bfloat16()
    x[16:] = -x[:16].flip(0) + 0.01 * torch.randn(16, 8)
    step = Step(run, batches=lambda: [(x,)])
    ((of_all, by_column, squares),) = run_planned(step, plan_of(step, world, pieces))[0]
    torch.testing.assert_close(of_all, x.mean(), rtol=0, atol=0)
    torch.testing.assert_close(by_column, x.mean(0), rtol=0, atol=0)
    torch.testing.assert_close(squares, (x * x).sum(0), rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    "layout",
    [*(pytest.param(Layout(1, n), marks=pytest.mark.slow) for n in (2, 8)), Layout(2, 4, pipeline=True)],
    ids=["two", "eight", "four, pipeline 2"],
)
def test_dropout_in_micro_batches_is_that_of_the_one_device_job(layout: Layout) -> None:
    expected, found = (train_planned(DROPOUT, how, [SIZE] * 2) for how in (Layout(1), layout))
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), rtol=1e-5, atol=0)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "t5", "bert"))])
def test_models_of_transformers_flow_in_pieces_altogether(name: str) -> None:
    laid, *_ = laid_of(PROMISED[name](0.1), Layout(1, 4), 8)
    plan = laid.cut(Variant())
    assert not packed(plan)
    work = {1: 0.0, 4: 0.0}  # firings in an iteration → FLOPs of a firing
    for a in plan.actors:
        work[a.rate] += a.flops if a.kind in ("forward", "backward") else 0.0
    assert work[1] <= 0.01 * 4 * work[4]


def test_what_compares_samples_with_each_other_is_packed_and_the_plan_says_so() -> None:
    step = Step(minimised(lambda m, x, y: F.cross_entropy(m(x) @ m(x).t(), torch.arange(SIZE))))
    planned = plan_of(step, 1, 4)
    assert any("aten.mm" in note for note in packed(planned.plan))
    check(run_planned(step, planned), run_eagerly(step))


def test_what_is_made_of_the_batch_alone_does_not_cut_the_forward_pass_in_two() -> None:
    plan = plan_of(STEPS["ignored targets"], 1, 4).plan  # the number of targets has to be known before the loss
    assert [rate for _, rate in actors(plan, "forward")] == [4, 1]
    assert [rate for _, rate in actors(plan, "backward")] == [1, 4]


# ---- flow.unpack and flow.pack


@pytest.mark.matrix
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("losses", [unpacked, unpacked_inside])
@pytest.mark.parametrize(("world", "pipeline"), [(1, False), (2, True), (2, False)])
def test_unpack_and_pack_change_nothing_but_how_often_ops_run(
    losses: Any, micro_batches: int, world: int, pipeline: bool
) -> None:
    step = Step(minimised(losses))
    planned = plan_of(step, world, micro_batches, pipeline)
    assert planned.plan.pieces == 4
    check(run_planned(step, planned), eagerly("mean"))


def test_ops_between_unpack_and_pack_run_once_for_each_piece_and_the_others_once() -> None:
    plan = plan_of(Step(minimised(unpacked_inside))).plan
    rates: dict[str, list[int]] = {"forward": [], "backward": []}  # kind of actor → firings, for each product
    for a in plan.actors:
        for op in plan.bodies[a.body].steps if a.body is not None else ():
            if op.op in ("aten.addmm.default", "aten.mm.default"):
                rates[a.kind].append(a.rate)
    assert rates["forward"] == [1, 4, 1]
    assert sorted(rates["backward"]) == [1, 1, 1, 4, 4]


def test_after_pack_batch_norm_sees_the_whole_batch() -> None:
    def losses(m: Any, x: Tensor, y: Tensor) -> Tensor:
        x = flow.pack(m.first(flow.unpack(x, 4)), 4)
        return F.cross_entropy(m.head(F.relu(m.norm(x))), y)

    step = Step(minimised(losses), Normed)
    found = run_planned(step, plan_of(step))
    assert found[1]["norm.num_batches_tracked"] == 2
    check(found, run_eagerly(step))


def test_the_gradient_of_one_is_the_other() -> None:
    def losses(m: Any, x: Tensor, y: Tensor) -> Tensor:
        x = flow.unpack(m.first(x), 2)
        (grad,) = torch.autograd.grad(flow.pack(x.square(), 2).sum(), x)
        return F.cross_entropy(m.head(m.second(x)), y) + (grad - 2 * x).square().sum()

    step = Step(minimised(losses))
    check(run_planned(step, plan_of(step)), run_eagerly(step))


def test_outside_of_a_job_unpack_and_pack_give_back_the_tensor_itself() -> None:
    x = torch.zeros(6, 2)
    assert flow.unpack(x, 3) is x
    assert flow.pack(x, 2) is x
    with pytest.raises(flow.CallError, match=r"batches\.py:\d+: flow\.unpack\(x, 4\).* 6 samples.*take 3 or 6"):
        flow.unpack(x, 4)
    for n in (0, True, 2.0):
        with pytest.raises(flow.CallError, match=r"flow\.pack.*1 or more"):
            flow.pack(x, n)  # type: ignore[arg-type]
    with pytest.raises(flow.CallError, match="dim 0"):
        flow.unpack(x.sum(), 1)


def test_different_numbers_of_pieces_name_both_lines() -> None:
    def losses(m: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m(flow.unpack(x, 4)), flow.unpack(y, 2))

    line = losses.__code__.co_firstlineno + 1
    with pytest.raises(flow.CallError, match=rf":{line}: flow\.unpack\(x, 4\) and .*:{line}: flow\.unpack\(x, 2\)"):
        plan_of(Step(minimised(losses)))
    with pytest.raises(
        flow.CallError, match=r"micro_batches=8 of job 'train' \(train\.py:1\) and .*py:\d+: flow\.unpack\(x, 4\)"
    ):
        plan_of(Step(minimised(unpacked)), micro_batches=8)


def test_pack_without_anything_in_pieces_is_refused() -> None:
    with pytest.raises(flow.CallError, match=r"flow\.pack\(x, 4\): nothing flows in pieces"):
        plan_of(Step(minimised(lambda m, x, y: F.cross_entropy(flow.pack(m(x), 4), y))))


# ---- batches that do not divide


def of_size(step: Step, size: int) -> Step:
    return replace(step, batches=lambda: [tuple(t[:size] for t in batch) for batch in digits()])


@pytest.mark.parametrize(
    ("size", "near"),
    [
        (15, "take 3 or 5 pieces"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((2, "take 2 pieces"), (7, "take 1 or 7 pieces"))),
    ],
)
def test_a_first_batch_that_does_not_divide_is_refused_with_the_nearest_numbers_that_do(size: int, near: str) -> None:
    with pytest.raises(
        flow.CallError, match=rf"micro_batches=4 of job 'train' \(train\.py:1\).* {size} samples.*{near}"
    ):
        plan_of(of_size(STEPS["mean"], size), micro_batches=4)
    with pytest.raises(flow.CallError, match=rf"flow\.unpack\(x, 4\).* {size} samples.*{near}"):
        plan_of(of_size(Step(minimised(unpacked)), size))


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(("size", "pieces"), [(15, 3), (2, 2), (7, 1)])
@pytest.mark.parametrize("losses", [None, unpacked])
def test_a_later_batch_goes_in_as_many_pieces_as_it_divides_into(size: int, pieces: int, losses: Any) -> None:
    step = of_size(STEPS["mean"] if losses is None else Step(minimised(losses)), size)
    planned = plan_of(step, micro_batches=4 if losses is None else 1, later=True)
    assert planned.plan.pieces == pieces
    assert any(f"a batch of {size} does not divide into 4 equal micro-batches" in n for n in planned.plan.notes)
    check(run_planned(step, planned), run_eagerly(of_size(STEPS["mean"], size)))


def test_a_job_refuses_its_first_batch_and_takes_a_shorter_last_one() -> None:
    torch.manual_seed(0)
    model = Net()
    eager = Net()
    eager.load_state_dict(model.state_dict())
    optimizer, eager_optimizer = SGD(model.parameters(), 0.1), SGD(eager.parameters(), 0.1)

    def step_of(model: nn.Module, optimizer: SGD) -> Any:
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    job = flow.global_function(micro_batches=4)(step_of(model, optimizer))
    eager_step = step_of(eager, eager_optimizer)
    x, y = digits()[0]
    x = x.float()
    with pytest.raises(
        flow.CallError, match=r"micro_batches=4 of job 'step' \(.*test_micro_batches\.py:\d+\).*10 samples"
    ):
        job(x[:10], y[:10])
    for size in (16, 10, 16, 10):
        torch.testing.assert_close(job(x[:size], y[:size]).detach(), eager_step(x[:size], y[:size]).detach())
    assert [compiled.plan.pieces for compiled in job.plans] == [4, 2]


def test_micro_batches_without_a_batch_are_refused() -> None:
    with pytest.raises(flow.CallError, match="no batch to divide"):
        plan_of(Step(minimised(lambda m: m(torch.ones(8, 64).double()).sum()), batches=lambda: [()]), micro_batches=4)


def test_a_predict_job_goes_in_micro_batches_as_well() -> None:
    torch.manual_seed(0)
    model = Net()
    x = digits()[0][0].float()
    expected = model(x).detach()
    predict = flow.global_function(type="predict", micro_batches=4)(lambda x: model(x))
    torch.testing.assert_close(predict(x).detach(), expected)
    assert predict.plan is not None
    assert predict.plan.pieces == 4
