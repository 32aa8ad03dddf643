"""Run on four ranks: global tensors become DTensors and the other way round; raises where one is not what it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.testing import assert_close

import actorflow as flow
from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.placement import Placement

S, B, P = flow.sbp.split, flow.sbp.broadcast, flow.sbp.partial_sum
RANK = flow.env.rank()
MESH = flow.placement("cpu", [[0, 1], [2, 3]])
LINE = flow.placement.all("cpu")
WHOLE = torch.arange(24.0).view(4, 6)


def lying(placement: Placement, sbp: Any, whole: Tensor = WHOLE) -> Tensor:
    everywhere = [B] * len(placement.hierarchy)
    return flow.tensor(whole.tolist(), placement=placement, sbp=everywhere).to_global(sbp=sbp).detach()


def refused(call: Callable[[], object], what: str) -> None:
    with pytest.raises(LayoutError) as error:
        call()
    assert what in str(error.value)


def on_a_mesh() -> None:
    x = lying(MESH, (S(0), S(1))).requires_grad_()
    theirs = flow.to_dtensor(x)
    assert theirs.placements == (Shard(0), Shard(1))
    assert theirs.to_local().data_ptr() == x.to_local().data_ptr()
    assert_close(theirs.full_tensor(), WHOLE)
    weight = distribute_tensor(WHOLE.t().contiguous(), theirs.device_mesh, [Replicate(), Shard(0)])
    ours = flow.from_dtensor(theirs @ weight)
    assert ours.sbp == (S(0), P)
    assert_close(torch.from_numpy(ours.numpy(force=True)), WHOLE @ WHOLE.t())
    ours.square().sum().backward()
    plain = WHOLE.clone().requires_grad_()
    (plain @ WHOLE.t()).square().sum().backward()
    assert_close(torch.from_numpy(x.grad.numpy()), plain.grad)


def a_sum_of_terms() -> None:
    x = lying(LINE, P)
    theirs = flow.to_dtensor(x)
    assert theirs.placements == (Partial(),)
    assert_close(theirs.full_tensor(), WHOLE)


def on_some_of_the_ranks() -> None:
    there = flow.placement("cpu", [3, 1])
    x = lying(there, S(0), WHOLE[:3]).requires_grad_()  # two rows on rank 3, one on rank 1
    theirs = flow.to_dtensor(x)
    assert theirs.to_local().shape == {3: (2, 6), 1: (1, 6)}.get(RANK, (0,))
    ours = flow.from_dtensor(theirs * 2)
    assert (ours.placement, ours.sbp) == (there, (S(0),))
    assert_close(torch.from_numpy(ours.numpy(force=True)), 2 * WHOLE[:3])
    ours.sum().backward()
    assert_close(torch.from_numpy(x.grad.numpy()), torch.full((3, 6), 2.0))


def on_the_scripts_own_mesh() -> None:
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    given = distribute_tensor(WHOLE, named, [Shard(0), Replicate()]).requires_grad_()
    ours = flow.from_dtensor(given)
    assert (ours.placement, ours.sbp) == (MESH, (S(0), B))
    assert ours.to_local().data_ptr() == given.to_local().data_ptr()
    (ours * lying(MESH, (B, S(1)))).sum().backward()
    assert given.grad.device_mesh == named
    assert_close(given.grad.full_tensor(), WHOLE)
    both = flow.to_dtensor(ours.detach(), named) + given  # DTensors of two meshes cannot be added
    assert_close(both.full_tensor(), 2 * WHOLE)
    fetched = given.detach().redistribute(named, [Replicate(), Replicate()], async_op=True)
    assert_close(flow.from_dtensor(fetched).to_local(), WHOLE)
    refused(lambda: flow.to_dtensor(lying(LINE, B), named), "given a mesh of cpu:[0,1,2,3](2,2) for a tensor on")


def what_is_cut_otherwise() -> None:
    five = torch.arange(5.0)
    refused(lambda: flow.to_dtensor(lying(LINE, S(0), five)), "uneven")  # 2, 1, 1, 1 here; 2, 2, 1, 0 there
    mesh = init_device_mesh("cpu", (4,))
    refused(lambda: flow.from_dtensor(distribute_tensor(five, mesh, [Shard(0)])), "cut unevenly")
    highest = DTensor.from_local(five, mesh, [Partial("max")])
    refused(lambda: flow.from_dtensor(highest), "for which there is no sbp")


if __name__ == "__main__":
    for check in (on_a_mesh, a_sum_of_terms, on_some_of_the_ranks, on_the_scripts_own_mesh, what_is_cut_otherwise):
        check()
        print(f"rank {RANK}: {check.__name__} is right", flush=True)
