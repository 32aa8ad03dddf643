"""A tensor for each rank goes in; one from each rank comes out, on every backend that torch has."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist

__all__ = ["exchange"]


@functools.wraps(dist.all_to_all)
def exchange(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """``torch.distributed.all_to_all``; where the backend has it of one tensor only, as Gloo of torch 2.11, by that."""
    try:
        work: dist.Work | None = dist.all_to_all(output_tensor_list, input_tensor_list, group, async_op)
    except RuntimeError as error:  # of each rank, before anything is sent
        if "does not support alltoall" not in str(error):
            raise
    else:
        return work
    sent = torch.cat([tensor.detach().reshape(-1) for tensor in input_tensor_list])
    sizes = [tensor.numel() for tensor in output_tensor_list]
    joined = sent.new_empty(sum(sizes))
    work = dist.all_to_all_single(joined, sent, sizes, [t.numel() for t in input_tensor_list], group, async_op=True)
    received = _Received(work, output_tensor_list, torch.split(joined, sizes))
    if async_op:
        return received
    received.wait()
    return None


class _Received(dist.Work):
    """Work that is over once what it received is in the tensors that it was to be in."""

    def __init__(self, work: dist.Work, wanted: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        super().__init__()
        self._work = work
        self._future = work.get_future().then(lambda done: _spread(done, wanted, parts))

    def wait(self, timeout: timedelta = timedelta()) -> bool:  # as torch's own: zero for the group's
        """Block until the tensors are there; raises what went wrong."""
        self._work.wait(timeout)
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Whether the tensors are there, or something went wrong."""
        return bool(self._future.done())

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """The tensors."""
        return self._future


def _spread(done: torch.futures.Future[object], wanted: Sequence[Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
    done.value()  # raises what went wrong
    with torch.no_grad():
        for tensor, part in zip(wanted, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
    return list(wanted)
