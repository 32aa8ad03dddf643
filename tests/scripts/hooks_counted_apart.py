"""Train a model whose hooks count and keep factors, behind another job; ranks have numbered their hooks differently.

python tests/scripts/hooks_counted_apart.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import actorflow as flow


class Factors:
    """What one of its hooks keeps of a layer's inputs, and how often it did."""

    def __init__(self, layer: nn.Linear) -> None:
        self.steps, self.kept = 0, torch.zeros(3, 3).double()
        self.held: dict[nn.Module, Tensor] = {}
        layer.register_forward_pre_hook(self.keep)

    def keep(self, module: nn.Module, inputs: Any) -> None:
        rows = inputs[0].detach()
        self.kept = 0.9 * self.kept + rows.T @ rows
        self.held[module] = self.kept * 2


def trained(job: bool) -> list[Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2).double()
    watch = Factors(layer)

    def step(x: Tensor) -> Tensor:
        loss = layer(x).pow(2).mean()
        layer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        layer.weight.data -= 0.1 * layer.weight.grad @ torch.linalg.inv(watch.kept + torch.eye(3))
        watch.steps += 1
        return loss * watch.steps

    run = flow.global_function(step) if job else step
    losses = [run(torch.linspace(0, i + 1, 12).view(4, 3).double()) for i in range(4)]
    return [
        torch.stack([loss + 0 for loss in losses]).detach(),
        layer.weight.detach(),
        watch.kept,
        watch.held[layer],
    ]


def main() -> None:
    torch.set_default_dtype(torch.float64)
    for _ in range(2):  # the capture of the first registers hooks, on one rank
        other = nn.Linear(3, 2)
        if flow.env.rank() == 0:
            for _ in range(5):
                other.register_forward_hook(lambda *_: None).remove()
        for found, wanted in zip(trained(True), trained(False), strict=True):
            assert torch.allclose(torch.as_tensor(found), wanted, atol=1e-12, rtol=0), (found, wanted)
    print("right")


if __name__ == "__main__":
    main()
