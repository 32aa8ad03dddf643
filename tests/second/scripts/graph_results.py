"""Use the results of graphs and jobs over global tensors as OneFlow's programs do; write what each case comes to.

usage: graph_results.py FOLDER
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import actorflow as flow
import actorflow.nn as nn

S, B, P = flow.sbp.split, flow.sbp.broadcast, flow.sbp.partial_sum
WORLD, RANK = flow.env.get_world_size(), flow.env.get_rank()
LINE = flow.placement("cpu", list(range(WORLD)))
HALVES = [flow.placement("cpu", list(range(n * WORLD // 2, (n + 1) * WORLD // 2))) for n in (0, 1)]
X, Y = torch.randn(8, 8, generator=torch.Generator().manual_seed(5)), torch.arange(8) % 4


class Net(nn.Module):
    """Two layers; the second may be on other devices."""

    def __init__(self, placement: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.placement = nn.Linear(8, 8), nn.Linear(8, 4), placement

    def forward(self, x: Any) -> Any:
        """Logits."""
        hidden = torch.tanh(self.first(x))
        return self.second(hidden if self.placement is None else hidden.to_global(placement=self.placement, sbp=B))


class Evaluate(nn.Graph):
    """Logits, and the mean loss, of a batch."""

    def __init__(self, model: Any, steps: int = 1) -> None:
        super().__init__()
        self.model = model
        self.config.set_gradient_accumulation_steps(steps)

    def build(self, x: Any, y: Any) -> Any:
        """A dictionary of both."""
        logits = self.model(x)
        return {"logits": logits, "loss": F.cross_entropy(logits, y)}


def lying(placement: Any, sbp: Any) -> tuple[Any, Any]:
    """The batch as global tensors."""
    everywhere: list[Any] = [t.to_global(placement, [B] * len(placement.hierarchy)) for t in (X, Y)]  # type: ignore[operator]
    return everywhere[0].to_global(sbp=sbp), everywhere[1].to_global(sbp=sbp)


def used(found: Any, expected: torch.Tensor) -> dict[str, Any]:
    """What programs come to that use logits and loss in one way or another; rank 0 reads the first three alone."""
    logits, loss = found["logits"], found["loss"]
    alone = [float(loss), loss.item(), float(loss.to_local())] if RANK == 0 else []
    on_all = logits.to_global(placement=LINE, sbp=B)
    first = logits[0]
    joined = first.to_global(placement=LINE, sbp=S(0))
    derived = (logits * 2).softmax(1)[1:3].to_global(placement=LINE, sbp=S(1))
    return {
        "lies": [list(logits.placement.ranks), ",".join(map(str, logits.sbp))],
        "loss lies": [list(loss.placement.ranks), ",".join(map(str, loss.sbp))],
        "part": list(logits.to_local().shape),
        "losses": [*alone, float(loss.numpy()), float(loss.to_global(placement=LINE, sbp=B).to_local())],
        "expected": float(F.cross_entropy(expected, Y)),
        "far": {
            "numpy": abs(logits.numpy() - expected.numpy()).max().item(),
            "broadcast": float((on_all.to_local() - expected).abs().max()),
            "derived": float((torch.tensor(derived.numpy()) - (expected * 2).softmax(1)[1:3]).abs().max()),
            "row": abs(joined.numpy() - expected[0].numpy()).max().item(),
            "sum": abs(float(logits.sum()) - float(expected.sum())),
        },
        "shapes": [list(joined.shape), list(derived.shape), list(joined.to_local().shape)],
    }  # fmt: skip


def counted(found: Any, y: Any) -> int:
    """How many predictions are right, each rank counting in its part of the batch."""
    right = (found["logits"].to_local().argmax(1) == y.to_local()).sum()
    flow.comm.all_reduce(right)
    return int(right)


def correct() -> int:
    return int((Net()(X).argmax(1) == Y).sum())


def expected() -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = Net()(X)
    return logits


def data() -> dict[str, Any]:
    model: Any = Net()
    x, y = lying(LINE, S(0))
    graph = Evaluate(model.to_global(LINE, B))
    told = used(graph(x, y), expected()) | {"counted": [counted(graph(x, y), y), correct()]}
    return told | {"again": used(Evaluate(model)(X, Y), expected())}


def micro_batches() -> dict[str, Any]:
    model: Any = Net()
    x, y = lying(LINE, S(0))
    graph = Evaluate(model.to_global(LINE, B), 2)
    return used(graph(x, y), expected()) | {"counted": [counted(graph(x, y), y), correct()]}


def tensor() -> dict[str, Any]:
    model: Any = Net()
    model.first.to_global(placement=LINE, sbp=S(0))
    model.second.to_global(placement=LINE, sbp={"weight": S(1), "bias": B})
    return used(Evaluate(model)(*lying(LINE, B)), expected())


def pipeline() -> dict[str, Any]:
    model: Any = Net(HALVES[1])
    model.first.to_global(placement=HALVES[0], sbp=B)
    model.second.to_global(placement=HALVES[1], sbp=B)
    return used(Evaluate(model)(*lying(HALVES[0], S(0))), expected())


def mesh() -> dict[str, Any]:
    grid = flow.placement("cpu", [[0, 1], [2, 3]] if WORLD == 4 else [[0], [1]])
    model: Any = Net()
    model.first.to_global(placement=grid, sbp=[B, S(0)])
    model.second.to_global(placement=grid, sbp={"weight": [B, S(1)], "bias": [B, B]})
    return used(Evaluate(model)(*lying(grid, [S(0), B])), expected())


def plain_batch() -> dict[str, Any]:
    model: Any = Net()
    return used(Evaluate(model.to_global(LINE, B))(X, Y), expected())


def plain_modules() -> dict[str, Any]:
    return used(Evaluate(Net())(*lying(LINE, S(0))), expected())


def a_job() -> dict[str, Any]:
    model: Any = Net()
    model.to_global(LINE, B)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @flow.global_function(type="train")
    def step(x: Any, y: Any) -> Any:
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"logits": logits.detach(), "loss": loss.detach()}

    first = used(step(*lying(LINE, S(0))), expected())
    second = step(*lying(LINE, S(0)))
    return first | {"falls": float(second["loss"]) < first["expected"]}


def all_plain() -> dict[str, Any]:
    found = Evaluate(Net())(X, Y)
    far = float((found["logits"] - expected()).abs().max())
    return {"global": [one.is_global for one in found.values()], "far": {"plain": far}}


def changed() -> dict[str, Any]:
    """Results that a program changes in place, keeps, and gives back."""
    model: Any = Net()
    x, y = lying(LINE, S(0))
    graph = Evaluate(model.to_global(LINE, B))
    one, two = graph(x, y)["logits"], graph(x, y)["logits"]
    part = one.to_local()
    one.mul_(2.0)
    two[1] = 0.0
    zeroed = expected()
    zeroed[1] = 0.0
    again = graph(graph(x, y)["logits"].repeat(1, 2) * 0 + x, y)
    return {"far": {
        "doubled": abs(one.numpy() - 2 * expected().numpy()).max().item(),
        "set": abs(two.numpy() - zeroed.numpy()).max().item(),
        "given": abs(again["logits"].numpy() - expected().numpy()).max().item(),
    }, "shared": float((part - one.to_local()).abs().sum())}  # fmt: skip


CASES: tuple[Callable[[], dict[str, Any]], ...] = (
    data, micro_batches, tensor, pipeline, mesh, plain_batch, plain_modules, a_job, all_plain, changed,
)  # fmt: skip

if __name__ == "__main__":
    told: dict[str, Any] = {}
    for case in CASES:
        try:
            told[case.__name__] = case()
        except Exception:
            told[case.__name__] = traceback.format_exc()
        (Path(sys.argv[1]) / f"{RANK}.json").write_text(json.dumps(told))
