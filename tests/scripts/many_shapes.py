"""Train with more shapes than plans are kept ready, on every rank, and compare with PyTorch."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import actorflow as flow
from actorflow.session.process import started

SHAPES = (4, 6, 8, 10, 12, 4, 6, 12, 14, 16, 4)  # of batches, in the order of the calls


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) - 1).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    eager = torch.optim.Adam(plain.parameters(), lr=0.01)

    @flow.global_function(type="train")
    def train(x: Tensor) -> Tensor:
        return step_of(model, optimizer, x)

    @flow.global_function(type="predict")
    def judge(x: Tensor) -> Tensor:
        out: Tensor = model(x).sum()
        return out

    wrong = 0.0
    for number, rows in enumerate(SHAPES):
        x = torch.randn(rows, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        wrong = max(wrong, abs(float(train(x)) - float(step_of(plain, eager, x))))
        wrong = max(wrong, abs(float(judge(x)) - float(plain(x).sum())))
    session = started()
    assert session is not None
    assert session.worker is not None
    print(f"plans {len(session.worker.plans)}, of the job {len(train.plans)} and {len(judge.plans)}, wrong {wrong:.1e}")
    print(flow.explain_recompiles())


if __name__ == "__main__":
    main()
