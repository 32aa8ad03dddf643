"""Whole training steps of a user's, each for what it does with its batch, and two ways to run them that must agree."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import actorflow as flow
from actorflow.script_state.search import find_state
from actorflow.testing.local_cluster import LocalCluster
from actorflow_compiler.capture.capture import TensorArgument
from actorflow_compiler.capture.request import History, Preferences, StepRequest, TargetDevices, UserStep
from actorflow_compiler.compile import compile_step
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.custom_ops.optimizers import SCALARS
from actorflow_compiler.custom_ops.random import SEED
from actorflow_compiler.hints.hints import place, resolve
from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.plan.variant import Variant
from actorflow_compiler.values.variables import real_optimizer_state
from actorflow_scheduler.schedule import schedule
from models import Mlp, digit_batches, setting

SIZE = 16  # samples in a batch
CALLS = 2
Batch = tuple[Tensor, ...]
Run = Callable[..., Tensor | tuple[Tensor, ...]]  # one step on the tensors of a batch
Losses = Callable[..., Tensor | tuple[Tensor, ...]]  # of the model and a batch; the first is what is minimised


class Net(Mlp):
    """The small one of ``models``, that shows what is inside."""

    def hidden(self, images: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(images))))


class Tied(Net):
    """One module is used twice, and its weight by another one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 32)
        self.head.weight = self.second.weight

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.second(F.relu(self.second(F.relu(self.first(images))))))
        logits: Tensor = self.head(x)
        return logits


class Student(nn.Module):
    """A network, and a slow copy of it that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.online = Net()
        self.target = copy.deepcopy(self.online).requires_grad_(False)


class Padded(nn.Module):
    """Grey values as words, of which number 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(17, 12, padding_idx=0)
        self.head = nn.Linear(12, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.first((images * 16).long()).mean(1))
        return logits


class Normed(nn.Module):
    """Batch norm between two layers."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.first = nn.Linear(64, 24)
        self.norm = nn.BatchNorm1d(24, **settings)
        self.head = nn.Linear(24, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(F.relu(self.norm(self.first(images))))
        return logits


class NormedTwice(Normed):
    """The same layers see two versions of the batch, one after the other."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + super().forward(images / 2)


class NormedFrozen(Normed):
    """Batch norm that keeps to its statistics while the rest trains."""

    def train(self, mode: bool = True) -> NormedFrozen:
        super().train(mode)
        self.norm.eval()
        return self


class NormedRows(Normed):
    """The sequence first: a batch is not dim 0, and is in it twice once the two are one."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images)
        x = self.norm(torch.stack([x, 0.3 * x + 0.1]).flatten(0, 1)).view(2, -1, 24)
        logits: Tensor = self.head(x.sum(0))
        return logits


class NormedPixels(nn.Module):
    """Instance norm: each sample by itself, whatever the op under it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.InstanceNorm2d(4, affine=True)
        self.head = nn.Linear(256, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.first(images.view(-1, 1, 8, 8))).flatten(1))
        return logits


def digits(*more: Callable[[Tensor, Tensor], Tensor]) -> list[Batch]:
    """Digits and, of images and targets, further arguments; in float64."""
    pairs = [(x.double(), y) for x, y in digit_batches([SIZE] * CALLS)]
    return [(x, y, *(one(x, y) for one in more)) for x, y in pairs]


@dataclass(frozen=True, slots=True)
class Step:
    """What a user writes; ``run(model, optimizer)`` is the function that a job is made of."""

    run: Callable[[Any, Optimizer], Run]
    make: Callable[[], nn.Module] = Net
    batches: Callable[[], list[Batch]] = digits
    stages: tuple[str, str] = ("first", "second|norm|head")


def minimised(losses: Losses, clip: float | None = None) -> Callable[[Any, Optimizer], Run]:
    """The usual step; returns all losses and, where it clips, the norm of the gradients."""

    def of(model: Any, optimizer: Optimizer) -> Run:
        def step(*batch: Tensor) -> tuple[Tensor, ...]:
            found = losses(model, *batch)
            found = found if isinstance(found, tuple) else (found,)
            found[0].backward()
            norm = () if clip is None else (nn.utils.clip_grad_norm_(model.parameters(), clip),)
            optimizer.step()
            optimizer.zero_grad()
            return (*found, *norm)

        return step

    return of


# losses


def mean(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m(x), y)


def some_ignored(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m(x), torch.where(y > 6, -100, y))


def masked(m: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return (F.cross_entropy(m(x), y, reduction="none") * mask).sum() / mask.sum()


def smoothed(m: Any, x: Tensor, y: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return F.cross_entropy(m(x) * scale, y, weight=weight, label_smoothing=0.1)


def summed(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    logits = m(x)
    return F.cross_entropy(logits, y, reduction="sum") / x.shape[0], (logits - 1).square().sum() / len(x)


def several(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    hidden = m.hidden(x)
    loss = F.cross_entropy(m.head(hidden), y)
    size = sum(p.square().sum() for p in m.parameters())
    activity = hidden.square().mean()
    return loss + 1e-3 * size + 0.1 * activity, loss, size, activity


def balanced(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """A product of two means over the batch, as where experts are to get equal shares of it."""
    logits = m(x)
    shares = F.one_hot(y, 10).double().mean(0)
    return F.cross_entropy(logits, y) + (logits.softmax(-1).mean(0) * shares).sum()


def standardised(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Statistics of the whole batch come between two layers."""
    hidden = m.hidden(x)
    return F.cross_entropy(m.head((hidden - hidden.mean(0)) / (hidden.std(0) + 0.1)), y)


def mixed(m: Any, x: Tensor, y: Tensor, order: Tensor) -> Tensor:
    """Mixup: every sample with another one."""
    logits = m(0.7 * x + 0.3 * x[order])
    return 0.7 * F.cross_entropy(logits, y) + 0.3 * F.cross_entropy(logits, y[order])


def flipped(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m(x.flip(0)), y.flip(0))


def margins(m: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = m(x)
    one_hot = F.one_hot(y, 10)
    two = torch.cat([torch.stack([y, (y + 1) % 10], 1), torch.full((len(y), 8), -1)], 1)
    several = F.multilabel_margin_loss(logits, two)
    return F.multi_margin_loss(logits, y) + F.soft_margin_loss(logits, 2.0 * one_hot - 1) + several


def measured(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Results for each sample, and counts beside the loss."""
    logits = m(x)
    right = logits.argmax(-1) == y
    return F.cross_entropy(logits, y), logits, right, right.sum(), right.float().mean()


def sloped(m: Any, x: Tensor, y: Tensor) -> Tensor:
    x = m.first(x)
    (slope,) = torch.autograd.grad(x.square().sum(), x)
    return F.cross_entropy(m.head(m.second(x)), y) + (slope - x).square().mean()


def siamese(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Two versions of the batch, one behind the other."""
    return F.cross_entropy(torch.cat([m(x), m(0.5 * x)]), torch.cat([y, y]))


def looped(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """The user's own pieces of the batch."""
    parts = [F.cross_entropy(m(a), b) / 2 for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
    return sum(parts, torch.zeros(()).double())


# whole steps


def two_backward_passes(m: Any, optimizer: Optimizer) -> Run:
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = m(x)
        first = F.cross_entropy(logits, y)
        first.backward(retain_graph=True)
        second = logits.square().mean()
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
        return first, second

    return step


def two_optimizer_steps(m: Any, optimizer: Optimizer) -> Run:
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first = F.cross_entropy(m(x), y)
        first.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        second = F.cross_entropy(m(x.flip(1)), y)
        second.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return first, second

    return step


def values_clipped(m: Any, optimizer: Optimizer) -> Run:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(m(x), y)
        (128 * loss).backward()
        for p in m.parameters():
            p.grad.div_(128)
        nn.utils.clip_grad_value_(m.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def slow_copy(m: Any, optimizer: Optimizer) -> Run:
    def step(x: Tensor, y: Tensor) -> Tensor:
        logits = m.online(x)
        with torch.no_grad():
            wanted = m.target(x).softmax(-1)
        loss = F.cross_entropy(logits, y) + F.mse_loss(logits.softmax(-1), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for new, old in zip(m.online.parameters(), m.target.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
        return loss

    return step


def penalised(m: Any, optimizer: Optimizer) -> Run:
    def step(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        logits = m(x)
        (slope,) = torch.autograd.grad(logits.logsumexp(-1).sum(), x, create_graph=True)
        loss = F.cross_entropy(logits, y) + (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


STEPS = {
    "mean": Step(minimised(mean)),
    "ignored targets": Step(minimised(some_ignored)),
    "weighted mean": Step(minimised(masked), batches=lambda: digits(lambda x, y: (y < 7).double())),
    "label smoothing, arguments that are no batch": Step(
        minimised(smoothed),
        batches=lambda: digits(lambda *_: torch.linspace(0.5, 1.5, 10).double(), lambda *_: torch.tensor(1.5).double()),
    ),
    "sums and the batch size": Step(minimised(summed)),
    "several terms": Step(minimised(several)),
    "clipped norm": Step(minimised(mean, clip=0.3)),
    "clipped values, a scaled loss": Step(values_clipped),
    "tied weights": Step(minimised(mean), Tied),
    "padding": Step(minimised(mean), Padded),
    "balance of means": Step(minimised(balanced)),
    "statistics of the batch": Step(minimised(standardised)),
    "mixup": Step(minimised(mixed), batches=lambda: digits(lambda *_: torch.arange(SIZE).roll(3))),
    "a batch in another order": Step(minimised(flipped)),
    "two versions of a batch joined": Step(minimised(siamese)),
    "margins": Step(minimised(margins)),
    "results for each sample": Step(minimised(measured)),
    "a loop of the user's": Step(minimised(looped)),
    "two backward passes": Step(two_backward_passes),
    "a slow copy": Step(slow_copy, Student, stages=(r".*\.first", r".*\.(second|head)")),
    "gradient penalty": Step(penalised),
    "a loss of gradients": Step(minimised(sloped)),
    "two optimizer steps": Step(two_optimizer_steps),
    "instance norm": Step(minimised(mean), NormedPixels),
    "frozen batch norm": Step(minimised(mean), NormedFrozen),
}
NORMED: dict[str, Callable[[], nn.Module]] = {
    "batch norm": Normed,
    "without statistics": lambda: Normed(track_running_stats=False),
    "without parameters": lambda: Normed(affine=False),
    "called twice": NormedTwice,
    "sequence first": NormedRows,
}


def optimizer_of(model: nn.Module) -> Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return SGD(trained, lr=0.05, momentum=0.9, weight_decay=1e-3)


def model_of(step: Step) -> nn.Module:
    torch.manual_seed(0)
    return step.make().double().train()


def run_eagerly(step: Step) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """What every call returns, and the state that the model ends with."""
    model = model_of(step)
    run = step.run(model, optimizer_of(model))
    found = [_results(run(*batch)) for batch in step.batches()]
    return found, {name: value.detach().clone() for name, value in model.state_dict().items()}


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan of a step, and what it starts from."""

    plan: Plan
    values: dict[str, Tensor]
    scalars: dict[str, float]


def plan_of(
    step: Step, world: int = 1, micro_batches: int = 1, pipeline: bool = False, *, later: bool = False
) -> Planned:
    """Compile a step; ``later`` as in ``History``."""
    model = model_of(step)
    optimizer = optimizer_of(model)
    if pipeline:
        half = world // 2
        halves = (range(half), range(half, world))
        place(model, {name: Placement("cpu", tuple(r), (half,)) for name, r in zip(step.stages, halves, strict=True)})
    run = step.run(model, optimizer)
    state = find_state(run, model=model, optimizer=optimizer)
    tensors = step.batches()[0]
    arguments = [
        TensorArgument(f"x{i}", tuple(t.shape), t.dtype, t.dim() > 0 and len(t) == len(tensors[0]))
        for i, t in enumerate(tensors)
    ]
    laid = compile_step(
        StepRequest(
            UserStep("train", lambda given: _results(run(*given)), arguments, state, train=True, defined="train.py:1"),
            TargetDevices(world),
            Preferences(resolve(state.modules), micro_batches),
            History(later=later),
        )
    )
    plan = schedule(laid.cut(Variant()))
    values = {h.name: h.tensor.detach().clone() for h in state.held.values()} | real_optimizer_state(state)
    for v in plan.variables:
        values.setdefault(v.name, torch.zeros(v.shape, dtype=getattr(torch, v.dtype)))
    group = optimizer.param_groups[0]
    return Planned(plan, values, {f"optimizer.0.{key}": setting(group, key) for key in SCALARS["actorflow.sgd"]})


def run_planned(step: Step, planned: Planned) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """The same by a plan, with all ranks in this process."""
    plan = planned.plan
    with LocalCluster(plan, variables=planned.values) as cluster:
        found = [
            cluster.run({f"x{i}": t for i, t in enumerate(batch)}, {**planned.scalars, SEED: number})
            for number, batch in enumerate(step.batches())
        ]
        state = {
            v.name.removeprefix("model."): cluster.variable(v.name) for v in plan.variables if v.kind != "optimizer"
        }
    return found, state


def normed_step(make: Callable[[], nn.Module], pieces: int) -> tuple[Step, Step]:
    """A step with batch norm, and the eager loop over micro-batches that it has to equal."""

    def accumulated(m: Any, optimizer: Optimizer) -> Run:
        def step(x: Tensor, y: Tensor) -> Tensor:
            total = torch.zeros(()).double()
            for a, b in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
                loss = mean(m, a, b) / pieces
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            return total

        return step

    return Step(minimised(mean), make), Step(accumulated, make)


def unpacked(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m(flow.unpack(x, 4)), y)


def unpacked_inside(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """The first layer sees the whole batch, the second one pieces, the third one the whole again."""
    x = flow.unpack(F.relu(m.first(x)), 4)
    x = flow.pack(F.relu(m.second(x)), 4)
    return F.cross_entropy(m.head(x), y)


def _results(found: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [t.detach().clone() for t in ([found] if isinstance(found, Tensor) else found)]
