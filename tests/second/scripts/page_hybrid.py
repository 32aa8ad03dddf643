"""Data parallelism in a first stage and model parallelism in a second one, op by op and by ``nn.Graph``."""

from __future__ import annotations

from typing import Any

import actorflow as flow
import actorflow.nn as nn

half = flow.env.get_world_size() // 2
P01 = flow.placement(type="cpu", ranks=list(range(half)))
P23 = flow.placement(type="cpu", ranks=list(range(half, 2 * half)))


class StageModule(nn.Module):
    """A product with a weight of its own."""

    def __init__(self, in_dims: int, out_dims: int, placement: Any = None, sbp: Any = None) -> None:
        super().__init__()
        self.w = nn.Parameter(flow.randn(in_dims, out_dims, placement=placement, sbp=sbp))

    def forward(self, x: Any) -> Any:
        return flow.matmul(x, self.w)


class ModuleModel(nn.Module):
    """Two stages on devices of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.m_stage0 = StageModule(5, 8, placement=P01, sbp=flow.sbp.broadcast)
        self.m_stage1 = StageModule(8, 3, placement=P23, sbp=flow.sbp.split(dim=1))

    def forward(self, x: Any) -> Any:
        out_stage0 = self.m_stage0(x)
        in_stage1 = out_stage0.to_global(placement=P23, sbp=flow.sbp.broadcast)
        out_stage1 = self.m_stage1(in_stage1)
        return out_stage0, out_stage1


class GraphModel(nn.Graph):
    """The stages as those of a pipeline."""

    def __init__(self, model: ModuleModel) -> None:
        super().__init__()
        self.model = model
        self.model.m_stage0.to(nn.graph.GraphModule).set_stage(stage_id=0, placement=P01)
        self.model.m_stage1.to(nn.graph.GraphModule).set_stage(stage_id=1, placement=P23)

    def build(self, x: Any) -> Any:
        """What both stages give."""
        return self.model(x)


class TrainGraph(GraphModel):
    """A training step of it, in two pieces."""

    def __init__(self, model: ModuleModel) -> None:
        super().__init__(model)
        self.config.set_gradient_accumulation_steps(2)
        self.add_optimizer(flow.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))

    def build(self, x: Any) -> Any:
        loss = self.model(x)[1].square().mean()
        loss.backward()
        return loss


model = ModuleModel()
in_stage0: Any = flow.randn(4, 5, placement=P01, sbp=flow.sbp.split(dim=0))
weights = [w.detach().numpy().tolist() for w in model.parameters()]  # type: ignore[attr-defined]
eager = [out.detach().numpy().tolist() for out in model(in_stage0)]
graph = GraphModel(model)
by_graph = [out.to_local().tolist() for out in graph(in_stage0)]
train = TrainGraph(model)
losses = [float(train(in_stage0).to_local()) for _ in range(3)]

told = {"x": in_stage0.numpy().tolist(), "weights": weights, "eager": eager, "graph": by_graph, "losses": losses}
