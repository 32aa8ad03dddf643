"""ZeRO 1, 2 and 3 with gradients of several batches added up, a schedule, and prediction in between."""

from __future__ import annotations

from typing import Any

import actorflow as flow
from actorflow import nn

P = flow.placement("cpu", ranks=list(range(flow.env.get_world_size())))
B = flow.sbp.broadcast
S0 = flow.sbp.split(0)


class CustomGraph(nn.Graph):
    """A training step."""

    def __init__(self, model: Any, stage: int) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = nn.CrossEntropyLoss()
        optimizer = flow.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.add_optimizer(optimizer, lr_sch=flow.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4))
        self.config.enable_zero(True, stage=stage, shard_min_size=8)
        self.config.set_gradient_accumulation_steps(2)

    def build(self, x: Any, y: Any) -> Any:
        """The logits and the loss."""
        preds = self.model(x)
        loss = self.loss_fn(preds, y)
        loss.backward()
        return preds, loss


class EvalGraph(nn.Graph):
    """The logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def build(self, x: Any) -> Any:
        """The logits of a batch."""
        return self.model(x)


def train(stage: int) -> dict[str, Any]:
    """The losses with one of the stages, and the last logits."""
    flow.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    model.train()
    model = model.to_global(placement=P, sbp=B)
    graph_model = CustomGraph(model, stage)
    losses = []
    for _ in range(4):
        x: Any = flow.randn(8, 16)
        y: Any = flow.randint(0, 10, (8,))
        global_x = x.to_global(placement=P, sbp=B).to_global(placement=P, sbp=S0)
        global_y = y.to_global(placement=P, sbp=B).to_global(placement=P, sbp=S0)
        preds, loss = graph_model(global_x, global_y)
        losses.append(loss.to_local().item())
    logits = EvalGraph(model)(global_x)
    return {"losses": losses, "preds": preds.numpy().tolist(), "logits": logits.numpy().tolist()}


told = {str(stage): train(stage) for stage in (1, 2, 3)}
