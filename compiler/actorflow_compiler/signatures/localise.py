"""An op instance and one of its signatures go in; the op that one device runs on its parts comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from actorflow_compiler import random_ops
from actorflow_compiler.ops import Arg, Meta
from actorflow_compiler.sbp import Sbp, Split, local_shape, spans
from actorflow_compiler.signatures.call import OpCall, Signature, bind, first_out, rebind
from actorflow_compiler.signatures.notation import parse
from actorflow_compiler.signatures.shaped_views import start_of
from actorflow_compiler.signatures.table import term_of

Kwargs = tuple[tuple[str, Arg], ...]
Local = tuple[str, tuple[Arg, ...], Kwargs]


def localise(
    call: OpCall, signature: Signature, parts: int, index: int
) -> tuple[str, tuple[Arg, ...], Kwargs, tuple[Meta, ...]]:
    """The op, arguments and keyword arguments for device ``index`` of ``parts``, and the Metas of the used outputs.

    Refs keep their numbers; sizes among the arguments become local ones.  Only the layouts of the
    signature count, so one that was made for another instance of the same op serves, too, if its
    layouts fit.  Raises LayoutError where they do not.
    """
    device = _Device(call, signature, parts, index)
    rule = _RULES.get(call.op)
    local = rule(device) if rule else None
    return (*(local or _sizes(device)), device.outs())


@dataclass(frozen=True, slots=True)
class _Device:
    """An op instance as one device sees it."""

    call: OpCall
    signature: Signature
    parts: int
    index: int

    def outs(self) -> tuple[Meta, ...]:
        pairs = zip(self.call.outs, self.signature.outs, strict=True)
        return tuple(Meta(self._local(m, s), m.dtype) for m, s in pairs if m is not None and s is not None)

    def shape(self) -> tuple[int, ...]:
        """The local shape of the first output that is used."""
        return self.outs()[0].shape

    def operand(self, i: int) -> tuple[int, ...]:
        """The local shape of an operand."""
        return self._local(self.call.ins[i], self.signature.ins[i])

    def _local(self, meta: Meta, sbp: Sbp) -> tuple[int, ...]:
        return local_shape(meta.shape, sbp, self.parts, self.index)

    def rows(self, table: Meta, sbp: Sbp | None) -> tuple[int, int] | None:
        """First row and number of rows that are here of a table split by rows; None if it is not."""
        if not isinstance(sbp, Split) or sbp.dim != 0:
            return None
        ((first, count),) = spans(table.shape[0], sbp, self.parts, self.index)
        return first, count


def _sizes(device: _Device) -> Local:
    """The same op, with those arguments made local that its notation calls sizes."""
    call = device.call
    text = term_of(call)
    new: dict[int, Arg] = {}
    for i, slot in enumerate(parse(text).slots if text else ()):
        if slot.kind == "shape":
            new[i] = device.shape()
        elif slot.kind == "size":
            new[i] = device.operand(0)[0]
    return (call.op, *rebind(call, new))


def _reshape(device: _Device) -> Local:
    """Ops that only change the shape: local parts may have other strides, and sizes that happen to be 1."""
    return "aten.reshape.default", (device.call.args[0], device.shape()), ()


def _slice(device: _Device) -> Local | None:
    """One block of a dim of which every block is split alike."""
    _, dim, start, *_ = bind(device.call)
    whole, part = first_out(device.call).shape, device.shape()
    d = dim % len(whole)
    if part[d] == whole[d]:
        return None
    block = start_of(start, device.call.ins[0].shape[d]) // whole[d]
    return (device.call.op, *rebind(device.call, {2: block * part[d], 3: (block + 1) * part[d]}))


def _slice_backward(device: _Device) -> Local | None:
    """As ``_slice``, the other way round."""
    full = first_out(device.call).shape
    _, _, dim, start, *_ = bind(device.call)
    whole, part = device.call.ins[0].shape, device.operand(0)
    d = dim % len(whole)
    if part[d] == whole[d]:
        return None
    block = start_of(start, full[d]) // whole[d]
    return (device.call.op, *rebind(device.call, {1: device.shape(), 3: block * part[d], 4: (block + 1) * part[d]}))


def _split(device: _Device) -> Local:
    """Parts by their lengths: the local ones may be 0."""
    x, sizes, dim = bind(device.call)
    whole, part = first_out(device.call).shape, device.shape()
    d = dim % len(whole)
    if isinstance(sizes, int):
        total = device.call.ins[0].shape[d]
        sizes = tuple(min(sizes, total - i * sizes) for i in range(len(device.call.outs)))
    if part[d] != whole[d]:
        sizes = (part[d],) * len(sizes)
    return "aten.split_with_sizes.default", (x, sizes, d), ()


def _embedding(device: _Device) -> Local | None:
    """Rows split: look the rows up that are here, and zeros for others."""
    found = device.rows(device.call.ins[0], device.signature.ins[0])
    if found is None:
        return None
    weight, indices, before, *_ = bind(device.call)
    first = before if device.call.op.startswith("actorflow.") else 0
    return "actorflow.embedding_part", (weight, indices, first + found[0]), ()


def _embedding_backward(device: _Device) -> Local | None:
    """Rows split: sum the gradients of the rows that are here."""
    found = device.rows(first_out(device.call), device.signature.outs[0])
    if found is None:
        return None
    grad, indices, *rest = bind(device.call)
    first, skip = (rest[0], rest[2]) if device.call.op.startswith("actorflow.") else (0, rest[1])
    return "actorflow.embedding_part_backward", (grad, indices, first + found[0], found[1], skip), ()


def _uniform(device: _Device) -> Local | None:
    (layout,), (out,) = device.signature.outs, device.call.outs
    if not isinstance(layout, Split) or out is None:
        return None
    args = list(device.call.args)
    has = args[random_ops.HAS]
    args[random_ops.HAS] = random_ops.local_elements(has, out.shape[layout.dim], layout, device.parts, device.index)
    return device.call.op, tuple(args), device.call.kwargs


_RULES: dict[str, Callable[[_Device], Local | None]] = {
    random_ops.UNIFORM: _uniform,
    "aten.view.default": _reshape,
    "aten._unsafe_view.default": _reshape,
    "aten.reshape.default": _reshape,
    "aten.squeeze.default": _reshape,
    "aten.squeeze.dim": _reshape,
    "aten.squeeze.dims": _reshape,
    "aten.slice.Tensor": _slice,
    "aten.slice_backward.default": _slice_backward,
    "aten.split.Tensor": _split,
    "aten.split.sizes": _split,
    "aten.split_with_sizes.default": _split,
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "actorflow.embedding_part": _embedding,
    "actorflow.embedding_part_backward": _embedding_backward,
}
