"""One product of matrices by data, model, pipeline and two-dimensional parallelism."""

from __future__ import annotations

from typing import Any

import actorflow as flow

world = flow.env.get_world_size()
placement = flow.placement(type="cpu", ranks=list(range(world)))
B, S = flow.sbp.broadcast, flow.sbp.split


def product(of_x: Any, of_w: Any, where: Any = placement) -> list[Any]:
    """Random matrices that lie so, and their product."""
    x: Any = flow.randn(4, 5, placement=where, sbp=of_x)
    w: Any = flow.randn(5, 8, placement=where, sbp=of_w)
    out: Any = flow.matmul(x, w)
    assert out.shape == (4, 8)
    return [x.numpy().tolist(), w.numpy().tolist(), out.numpy().tolist(), str(out.sbp)]


P0, P1 = flow.placement(type="cpu", ranks=[0]), flow.placement(type="cpu", ranks=[world - 1])
w0: Any = flow.randn(5, 8, placement=P0, sbp=B)
w1: Any = flow.randn(8, 3, placement=P1, sbp=B)
in_stage0: Any = flow.randn(4, 5, placement=P0, sbp=B)
out_stage0: Any = flow.matmul(in_stage0, w0)
in_stage1 = out_stage0.to_global(placement=P1, sbp=B)
out_stage1: Any = flow.matmul(in_stage1, w1)

mesh = flow.placement("cpu", ranks=[[rank, rank + 1] for rank in range(0, world, 2)])
told = {
    "data": product(S(0), B),
    "model": product(B, S(1)),
    "two": product((B, S(0)), (S(1), B), mesh),
    "stages": [t.numpy().tolist() for t in (in_stage0, w0, w1, out_stage1)],
}
