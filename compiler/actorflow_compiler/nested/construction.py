"""Replace functions of ``torch.nested`` in a step by functions that make ``NestedRows``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.core.torch_internals import DATA_DEPENDENT, replaced_nesting
from actorflow_compiler.masked.tensor import MaskedRows
from actorflow_compiler.nested.tensor import NestedRows, SequenceLengths, refuse_step
from actorflow_compiler.substitutes.packed_sequences import KnownSizes
from actorflow_compiler.values.library_code import NESTED

__all__ = ["replaced_nested_tensors"]


@contextlib.contextmanager
def replaced_nested_tensors() -> Iterator[None]:
    """Let the functions of ``torch.nested`` make ``NestedRows``."""
    made: dict[str, Callable[..., Any]] = {
        "nested_tensor": _copied, "_nested_tensor_from_tensor_list": _listed,
        "_nested_compute_contiguous_strides_offsets": lambda sizes: (), "_nested_view_from_buffer": _whole,
        "jagged_from_list": _jagged, "nested_view_from_values_offsets": _view_of,
        "nested_view_from_values_offsets_lengths": _view, "jagged_from_tensor_and_lengths": _narrowed,
        "is_fx_tracing": lambda: False,  # torch refuses while tracing
    }  # fmt: skip
    with replaced_nesting(made):
        yield


def _copied(
    tensors: Sequence[Any], *, dtype: Any = None, device: Any = None, requires_grad: bool = False,
    pin_memory: bool = False,
) -> NestedRows:  # fmt: skip
    """``torch.nested.nested_tensor``: a copy, through which no gradient flows."""
    with torch.no_grad():
        made = _packed([torch.as_tensor(t) for t in tensors], False, dtype, device)
    return made.requires_grad_(requires_grad)  # type: ignore[return-value]


def _listed(tensors: Sequence[Tensor], dtype: Any, layout: Any, device: Any, pin_memory: Any) -> NestedRows:
    return _packed(tensors, False, dtype, device)


def _jagged(
    tensors: Sequence[Tensor], offsets: Any, dtype: Any = None, device: Any = None
) -> tuple[NestedRows, Tensor]:
    made = _packed(tensors, True, dtype, device)
    return made, made.offsets()


def _whole(buffer: Tensor, sizes: Tensor, *_: Any) -> NestedRows:
    """A nested tensor over a flattened tensor with a batch dim, whose sequences have equal lengths."""
    each = _known(sizes)
    rest = each[0][1:]
    return NestedRows(buffer.reshape(-1, *rest), 0, SequenceLengths([size[0] for size in each]), False)


def _view_of(
    values: Tensor, offsets: Tensor, ragged_idx: int = 1, min_seqlen: int | None = None, max_seqlen: int | None = None
) -> NestedRows:
    at = ragged_idx - 1
    if min_seqlen is not None and min_seqlen == max_seqlen and min_seqlen > 0:
        of = [min_seqlen] * (values.shape[at] // min_seqlen)
        return NestedRows(values, at, SequenceLengths.over(offsets, of), True)
    return _view(values, offsets, None, ragged_idx)


def _view(
    values: Tensor, offsets: Tensor, lengths: Tensor | None, ragged_idx: int = 1, min_seqlen: Any = None,
    max_seqlen: Any = None,
) -> NestedRows:  # fmt: skip
    if lengths is not None:
        refuse_step(f"a nested tensor with holes (offsets and lengths) is made here; {NESTED}")
    ends = _known(offsets)
    of = [end - begin for begin, end in pairwise(ends)]
    size = values.shape[ragged_idx - 1]
    if ends[0] != 0 or ends[-1] != size or min(of, default=0) < 0:
        refuse_step(f"offsets {ends} were found for {size} rows; expected: rising ones from 0 to {size}")
    return NestedRows(values, ragged_idx - 1, SequenceLengths.over(offsets, of), True)


def _narrowed(*_: Any) -> NestedRows:
    refuse_step("torch.nested.narrow makes a nested tensor with holes here; expected: "
         "torch.nested.as_nested_tensor([x[i, a:b], …], layout=torch.jagged)")  # fmt: skip


def _known(numbers: Tensor) -> Any:
    """The values of lengths or offsets.  Raises CaptureError if they are not constants."""
    try:
        return numbers.tolist()
    except DATA_DEPENDENT:
        refuse_step(NESTED)


def _packed(tensors: Sequence[Tensor], jagged: bool, dtype: Any, device: Any) -> NestedRows:
    if not tensors:
        refuse_step("a nested tensor of nothing is made here; expected: a list with a tensor at least")
    for tensor in tensors:
        if isinstance(tensor, MaskedRows):
            refuse_step(f"{NESTED}; what a mask selects has no constant length")
    if any(isinstance(tensor, NestedRows) for tensor in tensors):
        refuse_step("a nested tensor of nested tensors is made here; expected: plain tensors in the list")
    if len({(tensor.dim(), tensor.dtype) for tensor in tensors}) > 1 or not tensors[0].dim():
        found = ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors[:4])
        refuse_step(f"a nested tensor is made of {found} here; expected: as many dims, one at least, and one dtype")
    plain = [tensor.as_subclass(Tensor) if isinstance(tensor, KnownSizes) else tensor for tensor in tensors]
    ragged = [d for d in range(plain[0].dim()) if len({tensor.shape[d] for tensor in plain}) > 1] or [0]
    if len(ragged) > 1:
        found = ", ".join(str(list(tensor.shape)) for tensor in plain[:4])
        refuse_step(
            f"a nested tensor of shapes {found} is made here, which differ in {len(ragged)} dims; expected: one dim in "
            f"which they differ, or a loop over the tensors"
        )
    (at,) = ragged
    rows = torch.cat(plain, at)
    to = {name: value for name, value in (("dtype", dtype), ("device", device)) if value is not None}
    return NestedRows(
        rows.to(**to) if to else rows, at, SequenceLengths([tensor.shape[at] for tensor in plain]), jagged
    )
