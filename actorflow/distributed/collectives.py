"""Tensors of this rank go in; torch.distributed's collectives over all ranks, with its signatures, come out.

The ranks find each other at the first call: no ``init_process_group`` is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch import distributed as dist

from actorflow.distributed.exchange import exchange
from actorflow.distributed.group import default_group

__all__ = [
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object", "get_backend",
    "get_rank", "get_world_size", "irecv", "isend", "new_group", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
]  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T")


def _meeting(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, which makes the default group first where there is none."""

    @functools.wraps(function)
    def meet(*args: P.args, **kwargs: P.kwargs) -> T:
        default_group()
        return function(*args, **kwargs)

    return meet


def _renamed(name: str, before: Callable[P, T]) -> Callable[P, T]:
    """A function that newer versions of torch call otherwise, and warn of under its old name, under the old one."""
    function: Callable[P, T] = getattr(dist, name, before)
    meet = _meeting(function)
    meet.__name__ = meet.__qualname__ = before.__name__
    return meet


all_gather = _meeting(dist.all_gather)
all_gather_into_tensor = _renamed("all_gather_single", dist.all_gather_into_tensor)
all_gather_object = _meeting(dist.all_gather_object)
all_reduce = _meeting(dist.all_reduce)
all_to_all = _meeting(exchange)
all_to_all_single = _meeting(dist.all_to_all_single)
barrier = _meeting(dist.barrier)
batch_isend_irecv = _meeting(dist.batch_isend_irecv)
broadcast = _meeting(dist.broadcast)
broadcast_object_list = _meeting(dist.broadcast_object_list)
gather = _meeting(dist.gather)
gather_object = _meeting(dist.gather_object)
get_backend = _meeting(dist.get_backend)
get_rank = _meeting(dist.get_rank)
get_world_size = _meeting(dist.get_world_size)
irecv = _meeting(dist.irecv)
isend = _meeting(dist.isend)
new_group = _meeting(dist.new_group)
recv = _meeting(dist.recv)
reduce = _meeting(dist.reduce)
reduce_scatter = _meeting(dist.reduce_scatter)
reduce_scatter_tensor = _renamed("reduce_scatter_single", dist.reduce_scatter_tensor)
scatter = _meeting(dist.scatter)
scatter_object_list = _meeting(dist.scatter_object_list)
send = _meeting(dist.send)
