"""Run a function on ranks that are threads, and return what it returned on the first."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import actorflow as flow
from actorflow.eager.global_tensor import GlobalTensor
from actorflow.eager.layout import local_shape
from actorflow.testing.thread_ranks import ThreadRanks
from actorflow_compiler.core.placement import Placement

S, B, P = flow.sbp.split, flow.sbp.broadcast, flow.sbp.partial_sum
PAIR = flow.placement("cpu", [0, 1])
MESH = flow.placement("cpu", [[0, 1], [2, 3]])


def on(threads: ThreadRanks, function: Callable[[], Any]) -> Any:
    """What a function returns on rank 0."""
    return threads.run(function)[0]


def spread(x: Tensor, placement: Placement, sbp: Any) -> Tensor:
    """A tensor that every rank has, as a leaf that lies as asked."""
    made = x.detach().to_global(placement, [B] * len(placement.hierarchy)).to_global(sbp=sbp).detach()
    return made.requires_grad_(x.requires_grad)


def value(x: Any) -> Any:
    """The whole of a global tensor, whose parts have to be of the sizes that its layout says."""
    if not isinstance(x, GlobalTensor):
        return x
    assert tuple(x._local.shape) == local_shape(x._spec.layout, tuple(x.shape), x._spec.comm.rank)
    return torch.from_numpy(x.numpy(force=True))


def check_equal(
    threads: ThreadRanks,
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    placement: Placement,
    layouts: Sequence[Any],
) -> None:
    """A function of tensors gives the same results and gradients on global tensors as on plain ones."""
    plain = copy.deepcopy(list(inputs))
    wanted = function(*plain)
    leaves = [x for x in plain if x.requires_grad]
    wanted_grads = torch.autograd.grad(wanted.square().sum(), leaves) if leaves else ()

    def on_a_rank() -> tuple[Tensor, list[Tensor]]:
        given = [spread(x, placement, sbp) for x, sbp in zip(inputs, layouts, strict=True)]
        made = function(*given)
        assert made.is_global
        needed = [x for x in given if x.requires_grad]
        grads = torch.autograd.grad(made.square().sum(), needed) if needed else ()
        return value(made), [value(g) for g in grads]

    made, grads = on(threads, on_a_rank)
    torch.testing.assert_close(made, wanted.detach())
    for grad, wanted_grad in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(grad, wanted_grad)
