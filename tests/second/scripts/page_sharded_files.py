"""A pipeline by ``nn.Graph`` whose state is saved in a file for each of two ranks, and goes on from them."""

from __future__ import annotations

from typing import Any

import actorflow as flow
from actorflow import nn

world, rank = flow.env.get_world_size(), flow.env.get_rank()
model_file_placement = flow.placement("cpu", ranks=[0, 1])
P0, P1 = flow.placement("cpu", ranks=[0]), flow.placement("cpu", ranks=[world - 1])
state_dict_dir = f"graph_save_load_global_{rank}"


def get_sbp(state_dict: Any, tensor: Any) -> Any:
    """How a tensor of the state is cut into files."""
    if tensor is state_dict["module_pipeline"]["m_stage1.weight"]:
        return flow.sbp.split(1)
    if tensor is state_dict["module_pipeline"]["m_stage1.bias"]:
        return flow.sbp.broadcast
    return flow.sbp.split(0)


class PipelineModule(nn.Module):
    """Two layers on devices of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.m_stage0, self.m_stage1 = nn.Linear(16, 8), nn.Linear(8, 1)
        self.m_stage0.to_global(placement=P0, sbp=flow.sbp.broadcast)  # type: ignore[operator]
        self.m_stage1.to_global(placement=P1, sbp=flow.sbp.broadcast)  # type: ignore[operator]

    def forward(self, x: Any) -> Any:
        hidden = flow.relu(self.m_stage0(x))
        return self.m_stage1(hidden.to_global(placement=P1, sbp=flow.sbp.broadcast))


class PipelineGraph(nn.Graph):
    """A training step."""

    def __init__(self, module_pipeline: PipelineModule) -> None:
        super().__init__()
        self.module_pipeline = module_pipeline
        self.module_pipeline.m_stage0.to(nn.graph.GraphModule).set_stage(0, P0)
        self.module_pipeline.m_stage1.to(nn.graph.GraphModule).set_stage(1, P1)
        self.config.set_gradient_accumulation_steps(2)
        self.add_optimizer(flow.optim.SGD(self.module_pipeline.parameters(), lr=0.1))

    def build(self, x: Any) -> Any:
        """The loss of a batch."""
        out = self.module_pipeline(x).square().mean()
        out.backward()
        return out


x: Any = flow.arange(32.0).reshape(2, 16) / 32
global_x = x.to_global(P0, flow.sbp.broadcast)

first = PipelineGraph(PipelineModule())
losses = [float(first(global_x).to_local())]
state = {"module_pipeline": first.state_dict()["module_pipeline"]}
file_state = flow.utils.global_view.to_global(state, placement=model_file_placement, sbp=get_sbp)
if rank in model_file_placement.ranks:
    flow.save(flow.utils.global_view.to_local(file_state), state_dict_dir)
losses.append(float(first(global_x).to_local()))

second = PipelineGraph(PipelineModule())
local_state = flow.load(state_dict_dir) if rank in model_file_placement.ranks else None
shapes = {} if local_state is None else {k: list(v.shape) for k, v in local_state["module_pipeline"].items()}
global_state = flow.utils.global_view.to_global(local_state, placement=model_file_placement, sbp=get_sbp)
second.load_state_dict(global_state, strict=False)
losses.append(float(second(global_x).to_local()))

told = {"losses": losses, "shapes": shapes}
