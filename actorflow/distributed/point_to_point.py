"""``send`` and ``recv`` of ``flow.comm``: PyTorch's signatures, and OneFlow's, where the receiver needs no tensor."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actorflow.distributed import collectives
from actorflow.distributed.group import DATA_TIMEOUT, default_group
from actorflow.support.collective_waits import in_collective
from actorflow_compiler.core.errors import CallError
from actorflow_compiler.core.torch_internals import store_of_default_group

__all__ = ["recv", "send"]

_sent: Counter[int] = Counter()  # tensors sent so far, by rank
_received: Counter[int] = Counter()


def send(
    tensor: Tensor, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None, *,
    send_meta: bool = True,
) -> None:  # fmt: skip
    """``torch.distributed.send``; by default it also tells shape and dtype, for a ``recv(src)`` without a tensor.

    Nothing is told with ``send_meta=False``, in a ``group``, and with a ``tag``.  Of a tensor that is not contiguous a
    copy is sent.
    """
    if not isinstance(send_meta, bool):
        raise CallError(f"send(send_meta={send_meta!r}) was found; True or False was expected")
    if group is None and not tag and isinstance(dst, int) and isinstance(tensor, Tensor):
        collectives.check_arguments("send", tensor)
        default_group()
        collectives.check_peers("send", {"dst": dst})
        tensor = tensor.contiguous()  # torch refuses others, and the receiver would wait with what it has been told
        if send_meta and dst != collectives.get_rank():
            meta = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
            _store().set(_key(collectives.get_rank(), dst, _sent[dst]), json.dumps(meta))
        _sent[dst] += 1
    collectives.send(tensor, dst, group, tag, group_dst)


def recv(
    tensor: Tensor | int | None = None, src: Any = None, group: Any = None, tag: Any = 0, group_src: int | None = None,
    *, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None, device: Any = None,
    out: Tensor | None = None,
) -> Any:  # fmt: skip
    """``torch.distributed.recv(tensor, src, …)``, or OneFlow's ``recv(src, shape, dtype, device, *, out)``.

    The second form begins with a rank.  It returns the tensor that it has received, but where ``out`` is given, which
    then has the values.  Shape and dtype are those that the sender tells; where it tells none (``send_meta=False``),
    they have to be given.  Raises CallError where only one of them is, and for an ``out`` of another shape or dtype.
    """
    if isinstance(tensor, int) or (tensor is None and isinstance(src, int)):  # recv(0, …), recv(src=0, …)
        sender, places = (tensor, (src, group, tag)) if isinstance(tensor, int) else (src, (None, group, tag))
        named = zip((shape, dtype, device), places, strict=True)
        asked = [by_name if place in (None, 0) else place for by_name, place in named]
        return _received_from(sender, asked[0], asked[1], asked[2], out)
    if shape is not None or dtype is not None or device is not None or out is not None:
        raise CallError(
            "recv(tensor, …) fills its tensor, and shape, dtype, device and out are for recv(src, …) without one: a "
            "rank, flow.comm.recv(0), was expected first"
        )
    given: Any = tensor
    found = collectives.recv(given, src, group, tag, group_src)
    if group is None and not tag:
        _count(found)
    return found


def _received_from(src: int, shape: Any, dtype: Any, device: Any, out: Tensor | None) -> Tensor | None:
    default_group()
    if (shape is None) != (dtype is None):
        raise CallError(
            f"recv({src}, shape={shape}, dtype={dtype}) was found; both were expected where the sender tells neither "
            f"(send_meta=False), and none where it does"
        )
    target = out
    if target is None and shape is not None:
        target = torch.empty(tuple(shape), dtype=dtype, device=device)
    elif target is None:
        target = _told_by(src, device)
    elif shape is not None and (tuple(target.shape), target.dtype) != (tuple(shape), dtype):
        raise CallError(
            f"recv({src}, shape={tuple(shape)}, dtype={dtype}, out=…) was found, and out is a tensor of "
            f"{tuple(target.shape)}, {target.dtype}; one of that shape and dtype was expected"
        )
    collectives.recv(target, src)
    _count(src)
    return None if out is not None else target


def _told_by(src: int, device: Any) -> Tensor:
    """A tensor for what rank ``src`` sends next, as it has told shape and dtype; waits for it."""
    me, last = collectives.get_rank(), collectives.get_world_size() - 1
    if not 0 <= src <= last or src == me:
        raise CallError(f"rank {me} called recv({src}); another rank of 0 to {last} was expected")
    key = _key(src, me, _received[src])
    store = _store()
    with in_collective(f"recv with rank {src}", (src,), f"{src}>{me}", f"{src}>{me}, told"):
        store.wait([key], DATA_TIMEOUT)  # a sender that is lost ends this process
    meta = json.loads(store.get(key))
    return torch.empty(meta["shape"], dtype=getattr(torch, meta["dtype"]), device=device)


def _count(src: int) -> None:
    """Note that a tensor of rank ``src`` has come, and drop what it has told of it."""
    _store().delete_key(_key(src, collectives.get_rank(), _received[src]))
    _received[src] += 1


def _key(src: int, dst: int, number: int) -> str:
    return f"actorflow/sent/{src}>{dst}/{number}"


def _store() -> Any:
    found = store_of_default_group()
    assert found is not None  # the group has been made
    return found[0]
