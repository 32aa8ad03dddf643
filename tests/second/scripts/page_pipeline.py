"""The network of the quick start in two stages, with micro-batches; the labels lie on the second one."""

from __future__ import annotations

from typing import Any

import actorflow as flow

BATCH_SIZE = 16
BROADCAST = [flow.sbp.broadcast]
P0 = flow.placement("cpu", [0])
P1 = flow.placement("cpu", [flow.env.get_world_size() - 1])


class Stage0Module(flow.nn.Module):
    """The first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = flow.nn.Flatten()
        self.linear0 = flow.nn.Linear(8 * 8, 32)
        self.relu0 = flow.nn.ReLU()

    def forward(self, x: Any) -> Any:
        return self.relu0(self.linear0(self.flatten(x)))


class Stage1Module(flow.nn.Module):
    """The other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1 = flow.nn.Linear(32, 32)
        self.relu1 = flow.nn.ReLU()
        self.linear2 = flow.nn.Linear(32, 10)

    def forward(self, x: Any) -> Any:
        return self.linear2(self.relu1(self.linear1(x)))


class PipelineModule(flow.nn.Module):
    """Both, each on its device."""

    def __init__(self) -> None:
        super().__init__()
        self.m_stage0 = Stage0Module()
        self.m_stage1 = Stage1Module()
        self.m_stage0.to_global(placement=P0, sbp=BROADCAST)  # type: ignore[operator]
        self.m_stage1.to_global(placement=P1, sbp=BROADCAST)  # type: ignore[operator]

    def forward(self, x: Any) -> Any:
        out_stage0 = self.m_stage0(x)
        in_stage1 = out_stage0.to_global(placement=P1, sbp=BROADCAST)
        return self.m_stage1(in_stage1)


module_pipeline: Any = PipelineModule()
sgd = flow.optim.SGD(module_pipeline.parameters(), lr=0.1)


class PipelineGraph(flow.nn.Graph):
    """A training step."""

    def __init__(self) -> None:
        super().__init__()
        self.module_pipeline = module_pipeline
        self.module_pipeline.m_stage0.config.set_stage(stage_id=0, placement=P0)
        self.module_pipeline.m_stage1.config.set_stage(stage_id=1, placement=P1)
        self.loss_fn = flow.nn.CrossEntropyLoss()
        self.config.set_gradient_accumulation_steps(2)
        self.add_optimizer(sgd)

    def build(self, x: Any, y: Any) -> Any:
        """The loss of a batch."""
        loss = self.loss_fn(self.module_pipeline(x), y)
        loss.backward()
        return loss


graph_pipeline = PipelineGraph()
x: Any = flow.randn(BATCH_SIZE, 1, 8, 8)
y: Any = flow.randint(0, 10, (BATCH_SIZE,))
global_x, global_y = x.to_global(P0, BROADCAST), y.to_global(P1, BROADCAST)

losses = []
for _ in range(5):
    loss = graph_pipeline(global_x, global_y)
    losses.append(float(loss.to_local()))

told = {"x": x.tolist(), "y": y.tolist(), "losses": losses}
