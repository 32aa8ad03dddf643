"""torch.distributed's collectives, with its signatures, over all ranks of the run.

The ranks find each other at the first call: no ``init_process_group`` is needed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, ParamSpec, TypeVar

import numpy as np
from torch import Tensor
from torch import distributed as dist

from actorflow.distributed.all_to_all import all_to_all_lists
from actorflow.distributed.contiguous import with_contiguous
from actorflow.distributed.group import default_group
from actorflow.support.collective_waits import in_collective
from actorflow_compiler.core.errors import CallError, GlobalInCollective

__all__ = [
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object", "get_backend",
    "get_rank", "get_world_size", "irecv", "isend", "new_group", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
]  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T")


def _with_default_group(function: Callable[P, T]) -> Callable[P, T]:
    """The same function; it refuses global tensors, and makes the default group first where there is none."""
    name = function.__name__
    signature = inspect.signature(function) if name in _MEETINGS else None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        check_arguments(name, *args, **kwargs)
        default_group()
        if signature is None:
            given: tuple[Any, ...] = (*args, *kwargs.values()) if name == "batch_isend_irecv" else ()
            batch = [op for ops in given for op in ops]
            for op in batch:
                check_peers(op.op.__name__, _of_batch(op))
            found = function(*args, **kwargs)
            for op in batch:  # they have been issued
                with in_collective(*_meeting(op.op.__name__, _of_batch(op))):
                    pass
            return found
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:  # which the function tells
            return function(*args, **kwargs)
        check_peers(name, bound.arguments)
        write_back = with_contiguous(name, bound.arguments)
        with in_collective(*_meeting(name, bound.arguments)):
            found = function(*bound.args, **bound.kwargs)
        write_back()
        return found

    return call


# functions that other ranks must call, too: most return when these have, others are counted
_MEETINGS = frozenset({
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "new_group", "recv",
    "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
})  # fmt: skip


def _of_batch(op: Any) -> dict[str, Any]:
    """The arguments of one operation of a batch."""
    return {"dst" if op.op.__name__ == "isend" else "src": op.peer, "group": op.group, "tag": op.tag}


def check_peers(name: str, given: Mapping[str, Any]) -> None:
    """Raise CallError where a rank that a call names is none of its group's; torch would wait for it, or crash."""
    group: Any = given.get("group") or dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    for way in ("dst", "src", "group_dst", "group_src"):
        peer = given.get(way)
        among = [*range(len(ranks))] if way.startswith("group") else ranks
        if peer is not None and (not isinstance(peer, Integral) or peer not in among):
            raise CallError(
                f"rank {dist.get_rank()} called {name} with {way}={peer!r}; one of the ranks {among} was expected"
            )


def _meeting(name: str, given: Mapping[str, Any]) -> tuple[str, tuple[int, ...], str, str]:
    """A call in words, the ranks that it needs, what is equal on all that are in it, and its channel."""
    me = dist.get_rank()
    group: Any = given.get("group") or dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    if name in ("send", "isend", "recv", "irecv"):
        sends = name.endswith("send")
        other = given.get("dst" if sends else "src")
        if (in_group := given.get("group_dst" if sends else "group_src")) is not None:
            other = dist.get_global_rank(group, in_group)
        if other is None:  # of any rank
            return name, (), "", ""
        way = f"{me}>{other}" if sends else f"{other}>{me}"
        return f"{name} with rank {other}", (other,), way, f"{way}, tag {given.get('tag') or 0}"
    text = f"{name} of ranks {ranks}"
    return text, tuple(rank for rank in ranks if rank != me), text, f"ranks {ranks}"


def check_arguments(name: str, *args: object, **kwargs: object) -> None:
    """Raise LayoutError for a global tensor among the arguments of a collective, CallError for what is no tensor."""
    for value in (*args, *kwargs.values()):
        for t in value if isinstance(value, list | tuple) else (value,):
            if getattr(t.tensor if isinstance(t, dist.P2POp) else t, "has_parts", False):
                raise GlobalInCollective(name)
    if name not in _OF_TENSORS or not args:
        return
    first = args[0]
    for t in first if isinstance(first, list | tuple) and first else (first,):
        if not isinstance(t, Tensor):
            array = isinstance(t, np.ndarray)
            what = f"an array of {t.dtype}" if array else f"{t!r:.60}"
            instead = "torch.from_numpy(array), which shares its memory" if array else "torch.tensor(…)"
            raise CallError(
                f"the collective {name} was given {what}; a tensor was expected, in whose memory values are read or "
                f"written: {instead}"
            )


_OF_TENSORS = frozenset({
    "all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all", "all_to_all_single",
    "broadcast", "gather", "irecv", "isend", "recv", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_tensor", "scatter", "send",
})  # fmt: skip


def _renamed(name: str, before: Callable[P, T]) -> Callable[P, T]:
    """A function under its old name, for which newer versions of torch warn: they call it ``name``."""
    function: Callable[P, T] = getattr(dist, name, before)
    made = _with_default_group(function)
    made.__name__ = made.__qualname__ = before.__name__
    return made


all_gather = _with_default_group(dist.all_gather)
all_gather_into_tensor = _renamed("all_gather_single", dist.all_gather_into_tensor)
all_gather_object = _with_default_group(dist.all_gather_object)
all_reduce = _with_default_group(dist.all_reduce)
all_to_all = _with_default_group(all_to_all_lists)
all_to_all_single = _with_default_group(dist.all_to_all_single)
barrier = _with_default_group(dist.barrier)
batch_isend_irecv = _with_default_group(dist.batch_isend_irecv)
broadcast = _with_default_group(dist.broadcast)
broadcast_object_list = _with_default_group(dist.broadcast_object_list)
gather = _with_default_group(dist.gather)
gather_object = _with_default_group(dist.gather_object)
get_backend = _with_default_group(dist.get_backend)
get_rank = _with_default_group(dist.get_rank)
get_world_size = _with_default_group(dist.get_world_size)
irecv = _with_default_group(dist.irecv)
isend = _with_default_group(dist.isend)
new_group = _with_default_group(dist.new_group)
recv = _with_default_group(dist.recv)
reduce = _with_default_group(dist.reduce)
reduce_scatter = _with_default_group(dist.reduce_scatter)
reduce_scatter_tensor = _renamed("reduce_scatter_single", dist.reduce_scatter_tensor)
scatter = _with_default_group(dist.scatter)
scatter_object_list = _with_default_group(dist.scatter_object_list)
send = _with_default_group(dist.send)
