"""Results of jobs as global tensors, for calls over global modules or tensors; they wait for their values when read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actorflow.eager.current import current
from actorflow.eager.global_tensor import GlobalSpec, GlobalTensor, spec_of
from actorflow.eager.layout import NOWHERE, Layout, local_shape
from actorflow.script_state.arguments import GlobalArgument
from actorflow.standins.lazy_tensor import LazyTensor, TensorFuture
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, Split
from actorflow_compiler.core.torch_internals import make_wrapper
from actorflow_compiler.plan.plan import Result
from actorflow_compiler.plan.region import region

__all__ = ["ResultTensor", "global_result"]

ROWS = Split(0)


class ResultTensor(GlobalTensor):
    """A global tensor whose part on this rank is not there yet: it is waited for where it is read."""

    __slots__ = ("_future", "_part")
    _future: LazyTensor | None  # None: the part is there
    _part: Tensor

    @property
    def _local(self) -> Tensor:  # the slot of a part that is there
        if self._future is not None:
            self._part = self._future._promise.value()
            self._future = None  # whose end tells the owners of the parts that they are not needed any more
        return self._part

    @_local.setter
    def _local(self, part: Tensor) -> None:
        self._part, self._future = part, None

    def pending(self) -> LazyTensor | None:
        """This rank's part as a tensor that waits for its values; None where it is there."""
        return self._future


def global_result(handle: LazyTensor, result: Result, like: Sequence[GlobalArgument]) -> GlobalTensor:
    """A job's result as a global tensor; nothing is moved, and nothing waited for.

    Its rows lie as those of the last tensor in ``like`` that has as many and is split by them.  Any other result is
    whole on all ranks of the run, so that each of them may read it by itself.
    """
    comm = current()
    for one in reversed(like):
        if handle.dim() and one.rows == handle.shape[0] and ROWS in one.sbp:
            layout = Layout(one.placement, tuple(ROWS if entry == ROWS else B for entry in one.sbp))
            return _made(_rows(handle, result, layout, comm.rank), _spec(handle, layout, comm))
    everywhere = Placement(result.placement.type, comm.all_ranks, (comm.world,))
    return _made(handle, _spec(handle, Layout(everywhere, (B,)), comm))


def _rows(handle: LazyTensor, result: Result, layout: Layout, rank: int) -> Tensor:
    """This rank's rows of a result, which are not waited for; empty outside of the placement."""
    shape = tuple(handle.shape)
    if rank not in layout.placement:
        return torch.empty(NOWHERE, dtype=handle.dtype, device=handle.device)
    part = local_shape(layout, shape, rank)
    if handle.part is not None and layout is Layout(result.placement, tuple(result.sbp)):  # no other part is needed
        return LazyTensor.of(handle.part, part, handle.dtype, handle.device)
    runs = region(shape, layout.sbp, layout.placement, layout.placement.index(rank))[0]
    begin, end = runs[0] if runs else (0, 0)
    cut = TensorFuture(lambda: handle._promise.value()[begin:end].clone())
    return LazyTensor.of(cut, part, handle.dtype, handle.device)


def _spec(handle: LazyTensor, layout: Layout, comm: Any) -> GlobalSpec:
    return spec_of(comm, layout, tuple(handle.shape), None, handle.dtype, comm.device(layout.placement))


def _made(part: Tensor, spec: GlobalSpec) -> GlobalTensor:
    made: ResultTensor = make_wrapper(ResultTensor, spec.shape, dtype=spec.dtype, device=spec.device)
    made._spec, made._lineage = spec, spec.lineage
    if isinstance(part, LazyTensor):
        made._future = part
    else:
        made._local = part
    return made
