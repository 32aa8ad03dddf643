"""``all_to_all`` of lists of tensors on every backend that torch has."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist

__all__ = ["all_to_all_lists"]


@functools.wraps(dist.all_to_all)
def all_to_all_lists(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """``torch.distributed.all_to_all``, over ``all_to_all_single`` where a backend has only that (Gloo, torch 2.11)."""
    try:
        work: dist.Work | None = dist.all_to_all(output_tensor_list, input_tensor_list, group, async_op)
    except RuntimeError as error:  # raised on each rank, before anything is sent
        if "does not support alltoall" not in str(error):
            raise
    else:
        return work
    sent = torch.cat([tensor.detach().reshape(-1) for tensor in input_tensor_list])
    sizes = [tensor.numel() for tensor in output_tensor_list]
    joined = sent.new_empty(sum(sizes))
    work = dist.all_to_all_single(joined, sent, sizes, [t.numel() for t in input_tensor_list], group, async_op=True)
    received = _UnpackWork(work, output_tensor_list, torch.split(joined, sizes))
    if async_op:
        return received
    received.wait()
    return None


class _UnpackWork(dist.Work):
    """Work that is done once the received data are copied into the output tensors."""

    def __init__(self, work: dist.Work, wanted: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        super().__init__()
        self._work = work
        self._future = work.get_future().then(lambda done: _unpack(done, wanted, parts))

    def wait(self, timeout: timedelta = timedelta()) -> bool:  # as torch's own: zero for the group's
        """Block until the output tensors are filled; raises the error of the transfer."""
        self._work.wait(timeout)
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Whether the output tensors are filled, or the transfer has failed."""
        return bool(self._future.done())

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """The future of the output tensors."""
        return self._future


def _unpack(done: torch.futures.Future[object], wanted: Sequence[Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
    done.value()  # raises the error of the transfer
    with torch.no_grad():
        for tensor, part in zip(wanted, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
    return list(wanted)
