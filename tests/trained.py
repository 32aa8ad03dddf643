"""Models, plans and two ways to train that must agree: eagerly on one device, by a plan on all ranks of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actorflow.find import find
from actorflow.runtime.local import LocalCluster
from actorflow_compiler.capture import Argument
from actorflow_compiler.compile import compile_step
from actorflow_compiler.hints import distribute, place, resolve
from actorflow_compiler.placement import Placement
from actorflow_compiler.plan import Plan
from actorflow_compiler.random_ops import SEED
from actorflow_compiler.sbp import Sbp
from actorflow_compiler.variables import real_optimizer_state
from actorflow_scheduler.schedule import schedule

VOCABULARY, LENGTH = 64, 16


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.b(F.relu(self.a(x)))))


class DropoutMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.relu(self.a(x)), 0.3)
        return self.head(F.dropout(F.relu(self.b(x)), 0.5))


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_1, self.norm_1 = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6)
        self.conv_2, self.norm_2 = nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 3 * 3, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm_1(self.conv_1(x.view(-1, 1, 8, 8))))
        x = F.relu(self.norm_2(self.conv_2(x)))
        return self.head(F.max_pool2d(x, 2).flatten(1))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm_2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm_1(x))
            .view(batch, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Case:
    """A model with its optimizer, its data, and its cut into two pipeline stages."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    stages: tuple[str, str]  # regular expressions of module names
    batch_norm: bool = False
    clip: float | None = None


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def labelled(width: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (torch.randn(n, width), torch.randint(0, 10, (n,)))


def texts(n: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, VOCABULARY, (n, LENGTH)), torch.randint(0, VOCABULARY, (n, LENGTH))


DROPOUT = Case(DropoutMLP, adamw, labelled(8), ("a", "b|head"))
CASES = {
    "mlp": Case(MLP, adamw, labelled(8), ("a", "b|head")),
    "cnn": Case(CNN, momentum, labelled(64), (r".*_1", r".*_2|head"), batch_norm=True),
    "gpt": Case(GPT, adamw, texts, (r"embed|positions|blocks\.[01]", r"blocks\.[23]|norm|head")),
    "clipped gpt": Case(GPT, adamw, texts, (r"embed|positions|blocks\.[01]", r"blocks\.[23]|norm|head"), clip=0.5),
}


@dataclass(frozen=True)
class Layout:
    """How a case is laid out."""

    world: int
    micro_batches: int = 1
    hints: dict[str, Sbp] = field(default_factory=dict)
    pipeline: bool = False


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def train_eagerly(case: Case, sizes: list[int], micro_batches: int) -> tuple[list[float], dict[str, Tensor]]:
    """The reference: the full batch; with batch norm, the loop that accumulates over micro-batches."""
    torch.manual_seed(0)
    model = case.model()
    optimizer = case.optimizer(model)
    torch.manual_seed(1)
    losses = []
    for size in sizes:
        x, y = case.batch(size)
        pieces = micro_batches if case.batch_norm else 1
        total = 0.0
        for a, b in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
            loss = loss_of(model, a, b) / pieces
            loss.backward()
            total += loss.item()
        if case.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model.state_dict()


def plan_of(case: Case, layout: Layout, size: int) -> tuple[Plan, dict[str, Tensor], torch.optim.Optimizer]:
    """The plan of a case, the values its variables start from, and the optimizer whose settings it reads."""
    torch.manual_seed(0)
    model = case.model()
    optimizer = case.optimizer(model)
    if layout.hints:
        distribute(model, layout.hints)
    if layout.pipeline:
        half = layout.world // 2
        first, second = (Placement("cpu", tuple(r), (half,)) for r in (range(half), range(half, 2 * half)))
        place(model, dict(zip(case.stages, (first, second), strict=True)))

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        if case.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    state = find(step, model=model, optimizer=optimizer)
    arguments = [Argument(name, tuple(t.shape), t.dtype, True) for name, t in zip("xy", case.batch(size), strict=True)]
    plan = compile_step(
        "train", lambda tensors: [step(*tensors)], arguments, state, train=True, world=layout.world, device_type="cpu",
        micro_batches=layout.micro_batches, hints=resolve(state.modules), fixed={},
    )  # fmt: skip
    values = {h.name: h.tensor.detach().clone() for h in state.held.values()} | real_optimizer_state(state)
    for v in plan.variables:
        values.setdefault(v.name, torch.zeros(v.shape, dtype=getattr(torch, v.dtype)))
    return schedule(plan), values, optimizer


def train_planned(case: Case, layout: Layout, sizes: list[int]) -> tuple[list[float], dict[str, Tensor], Plan]:
    """The same training by a plan, all ranks in this process; sizes must be equal."""
    plan, values, optimizer = plan_of(case, layout, sizes[0])
    group = optimizer.param_groups[0]
    scalars: dict[str, float] = {"optimizer.0.lr": group["lr"], "optimizer.0.weight_decay": group["weight_decay"]}
    torch.manual_seed(1)
    losses = []
    with LocalCluster(plan, variables=values) as cluster:
        for number, size in enumerate(sizes):
            x, y = case.batch(size)
            scalars[SEED] = number
            losses.append(cluster.run({"x": x, "y": y}, scalars)[0].item())
        state = {
            v.name.removeprefix("model."): cluster.variable(v.name) for v in plan.variables if v.kind != "optimizer"
        }
    return losses, state, plan
