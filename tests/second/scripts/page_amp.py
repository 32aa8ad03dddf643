"""Mixed precision with a gradient scaler, and activations computed again, by ``nn.Graph`` over plain modules."""

from __future__ import annotations

from typing import Any

import actorflow as flow
import actorflow.nn as nn

model_part1 = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
model_part2 = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
loss_fn = nn.CrossEntropyLoss()
optimizer = flow.optim.SGD([{"params": model_part1.parameters()}, {"params": model_part2.parameters()}], lr=0.1)


class CustomGraph(nn.Graph):
    """A training step."""

    def __init__(self, amp: bool) -> None:
        super().__init__()
        self.model_part1: Any = model_part1
        self.model_part2: Any = model_part2
        self.model_part1.config.activation_checkpointing = True
        self.model_part2.config.activation_checkpointing = True
        self.loss_fn = loss_fn
        self.add_optimizer(optimizer)
        self.config.enable_amp(amp)
        if amp:
            self.set_grad_scaler(flow.amp.GradScaler("cpu", init_scale=3000, growth_factor=2.0, growth_interval=1000))

    def build(self, x: Any, y: Any) -> Any:
        """The logits and the loss of a batch."""
        y_pred = self.model_part2(self.model_part1(x))
        loss = self.loss_fn(y_pred, y)
        loss.backward()
        return y_pred, loss


def steps(graph: CustomGraph) -> list[float]:
    """The losses of some batches."""
    losses = []
    for _ in range(3):
        x, y = flow.randn(8, 16), flow.ones(8, dtype=flow.int64)
        _, loss = graph(x, y)
        losses.append(float(loss))
    return losses


told = {"losses": steps(CustomGraph(False)), "amp": steps(CustomGraph(True))}
