"""Global tensors: made, taken from local ones, turned into local ones, laid out anew, and computed with."""

from __future__ import annotations

from typing import Any

import actorflow as flow

world = flow.env.get_world_size()
placement = flow.placement(type="cpu", ranks=list(range(world)))
sbp = flow.sbp.split(dim=0)

made: Any = flow.randn(4, 5, placement=placement, sbp=sbp)

x: Any = flow.full((2, 5), float(flow.env.get_rank()))
x_global = x.to_global(placement=placement, sbp=sbp)
x_whole = x_global.to_global(placement=placement, sbp=flow.sbp.broadcast)

w: Any = flow.randn(5, 8, placement=placement, sbp=flow.sbp.broadcast)
y = flow.matmul(made, w)

mesh = flow.placement("cpu", ranks=[list(range(world // 2)), list(range(world // 2, world))])
a = flow.Tensor([[1, 2], [3, 4]]).to_global(placement=mesh, sbp=(flow.sbp.broadcast, flow.sbp.split(0)))  # type: ignore[operator]

told = {
    "parts": [made.to_local().numpy().tolist(), made.numpy().tolist()],
    "kinds": [x.is_local, x.is_global, x_global.is_local, x_global.is_global],
    "shapes": [list(x_global.shape), list(x_whole.shape), list(x_whole.to_local().shape), list(a.shape)],
    "whole": x_whole.to_local().numpy().tolist(),
    "product": [str(y.sbp), made.numpy().tolist(), w.numpy().tolist(), y.numpy().tolist()],
}
