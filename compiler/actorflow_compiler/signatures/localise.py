"""The op that one device runs on its parts, for an op instance and one of its signatures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from actorflow_compiler.core.op_call import OpCall, Signature, argument, bind, first_out, put, rebind
from actorflow_compiler.core.ops import Arg, Meta, Symbol
from actorflow_compiler.core.sbp import Parts, Sbp, Split, local_shape, spans
from actorflow_compiler.custom_ops import random as random_ops
from actorflow_compiler.custom_ops.causal_attention import CAUSAL, CAUSAL_BACKWARD, Rows, rows_of
from actorflow_compiler.custom_ops.ring_attention import (
    CUT_BACK,
    EVEN_OUT,
    PASS_ON,
    RING,
    RING_BACKWARD,
    own_blocks,
)
from actorflow_compiler.custom_ops.split_classes import parts_on
from actorflow_compiler.signatures.notation import ArgumentKind, DimsTerm, parse
from actorflow_compiler.signatures.shaped_views import arange_of, start_of
from actorflow_compiler.signatures.table import term_of
from actorflow_compiler.signatures.term_matching import IndexedCall, index_call, match_term, ranked

QUERIES = 2  # the dim of attention's queries that is the sequence

Kwargs = tuple[tuple[str, Arg], ...]
Local = tuple[str, tuple[Arg, ...], Kwargs]


def local_op(
    call: OpCall, signature: Signature, parts: Parts, index: int
) -> tuple[str, tuple[Arg, ...], Kwargs, tuple[Meta, ...]]:
    """The op, arguments and keyword arguments for device ``index`` of ``parts``, and the Metas of the used outputs.

    Refs keep their numbers; sizes among the arguments become local ones.  Only the layouts of the
    signature are used, so a signature of another instance of the same op works, too, if its
    layouts fit.  Raises LayoutError if they do not.
    """
    device = _DeviceView(call, signature, parts, index)
    rule = _RULES.get(call.op)
    local = rule(device) if rule else None
    return (*(local or _sizes(device)), device.outs())


def is_placed(call: OpCall, signature: Signature) -> bool:
    """Whether devices that have equally much of all operands and outputs may still run this op differently.

    They do where it matters which elements they have: the rows of a table, positions, parts of random numbers.
    """
    if call.op in _BY_PLACE:
        return True
    text = signature.term or term_of(call)
    return any(entry.kind == ArgumentKind.PARTS for entry in (parse(text).arguments if text else ()))


def local_call(call: OpCall, signature: Signature, parts: Parts, index: int) -> OpCall:
    """The op instance that device ``index`` of ``parts`` runs; raises LayoutError as ``local_op`` does."""
    op, args, kwargs, metas = local_op(call, signature, parts, index)
    ins = tuple(
        Meta(local_shape(m.shape, s, parts, index), m.dtype) for m, s in zip(call.ins, signature.ins, strict=True)
    )
    rest = iter(metas)
    return OpCall(op, args, kwargs, ins, tuple(next(rest) if m is not None else None for m in call.outs))


@dataclass(frozen=True, slots=True)
class _DeviceView:
    """An op instance as one device sees it."""

    call: OpCall
    signature: Signature
    parts: Parts
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

    def instance(self) -> IndexedCall:
        """The op instance with its indices."""
        term = self.signature.term
        op = match_term(self.call, term) if term else index_call(self.call)
        assert op is not None
        return op

    def cuts(self, letter: str) -> bool:
        """Whether this index is the split one."""
        op = self.instance()
        return any(
            isinstance(layout, Split) and (at := x.where(letter, op.size)) is not None and at[0] == layout.dim
            for x, layout in zip(op.ins, self.signature.ins, strict=True)
        )

    def size(self, letter: str) -> int:
        """The size of an index on this device."""
        op = self.instance()
        layouts = (*self.signature.ins, *self.signature.outs)
        for x, layout in zip((*op.ins, *op.outs), layouts, strict=False):
            if x is not None and isinstance(layout, Split) and x.cut_in(layout, op.size) == letter:
                whole = x.meta.shape[layout.dim]
                return op.size[letter] * self._local(x.meta, layout)[layout.dim] // whole
        return op.size[letter]

    def sizes(self, dims: DimsTerm, value: Arg) -> Arg:
        """The local sizes of dims, in place of ``value``, which has those of the whole."""
        whole = value if isinstance(value, tuple) else (value,)
        here = tuple(
            math.prod(map(self.size, dim)) if isinstance(dim, tuple) and dim else n
            for dim, n in zip(ranked(dims, len(whole)), whole, strict=True)
        )
        return here if isinstance(value, tuple) else here[0]

    def share(self) -> int:
        """The local size of a dim that is split without blocks and units."""
        tensors = ((*self.call.ins, *self.call.outs), (*self.signature.ins, *self.signature.outs))
        return next(
            self._local(meta, layout)[layout.dim]
            for meta, layout in zip(*tensors, strict=True)
            if meta is not None and isinstance(layout, Split) and layout.blocks == layout.unit == 1
        )

    def _local(self, meta: Meta, sbp: Sbp) -> tuple[int, ...]:
        return local_shape(meta.shape, sbp, self.parts, self.index)

    def begin(self, meta: Meta, layout: Split) -> int:
        """The first index of the split dim that this device holds."""
        ((first, _),) = spans(meta.shape[layout.dim], layout, self.parts, self.index)
        return first

    def rows(self, table: Meta, sbp: Sbp | None) -> tuple[int, int] | None:
        """First row and number of rows that this device holds of a table split by rows; None if it is not split so."""
        if not isinstance(sbp, Split) or sbp.dim != 0:
            return None
        ((first, count),) = spans(table.shape[0], sbp, self.parts, self.index)
        return first, count


def _sizes(device: _DeviceView) -> Local:
    """The same op, with those arguments made local that its notation calls sizes."""
    call = device.call
    text = device.signature.term or term_of(call)
    new: dict[int, Arg] = {}
    for path in device.signature.sizes:
        new[path[0]] = put(new.get(path[0], bind(call)[path[0]]), path[1:], device.share())
    for i, entry in enumerate(parse(text).arguments if text else ()):
        if entry.kind == ArgumentKind.SHAPE:
            new[i] = device.shape()
        elif entry.kind == ArgumentKind.SIZES and bind(call)[i] is not None:
            new[i] = device.sizes(entry.operands[0].dims, bind(call)[i])
        elif entry.kind == ArgumentKind.PARTS and device.cuts(entry.index):
            new[i] = parts_on(bind(call)[i], device.index)
    return (call.op, *rebind(call, new))


def _reshape(device: _DeviceView) -> Local:
    """Ops that only change the shape: local parts may have other strides, and sizes that happen to be 1."""
    return "aten.reshape.default", (device.call.args[0], device.shape()), ()


def _slice(device: _DeviceView) -> Local | None:
    """One block of a dim whose blocks are all split in the same way."""
    _, dim, start, *_ = bind(device.call)
    whole, part = first_out(device.call).shape, device.shape()
    d = dim % len(whole)
    if part[d] == whole[d]:
        return None
    block = start_of(start, device.call.ins[0].shape[d]) // whole[d]
    return (device.call.op, *rebind(device.call, {2: block * part[d], 3: (block + 1) * part[d]}))


def _slice_backward(device: _DeviceView) -> Local | None:
    """The gradient of ``_slice``: one block put back among zeros."""
    full = first_out(device.call).shape
    _, _, dim, start, *_ = bind(device.call)
    whole, part = device.call.ins[0].shape, device.operand(0)
    d = dim % len(whole)
    if part[d] == whole[d]:
        return None
    block = start_of(start, full[d]) // whole[d]
    return (device.call.op, *rebind(device.call, {1: device.shape(), 3: block * part[d], 4: (block + 1) * part[d]}))


def _split(device: _DeviceView) -> Local:
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


def _embedding(device: _DeviceView) -> Local | None:
    """Rows split: look up the rows that this device holds; others give zeros."""
    found = device.rows(device.call.ins[0], device.signature.ins[0])
    if found is None:
        return None
    weight, indices, *rest = bind(device.call)
    first, whole = rest if device.call.op.startswith("actorflow.") else (0, device.call.ins[0].shape[0])
    return "actorflow.embedding_part", (weight, indices, first + found[0], whole), ()


def _embedding_backward(device: _DeviceView) -> Local | None:
    """Rows split: sum the gradients of the rows that this device holds."""
    found = device.rows(first_out(device.call), device.signature.outs[0])
    if found is None:
        return None
    grad, indices, *rest = bind(device.call)
    first, skip = (rest[0], rest[2]) if device.call.op.startswith("actorflow.") else (0, rest[1])
    return "actorflow.embedding_part_backward", (grad, indices, first + found[0], found[1], skip), ()


def _grouped(device: _DeviceView) -> Local | None:
    """Groups split: multiply by the matrices that this device holds; rows of other groups give zeros."""
    found = device.rows(device.call.ins[1], device.signature.ins[1])
    if found is None:
        return None
    *operands, first, groups = device.call.args
    return device.call.op, (*operands, first + found[0], groups), ()


def _grouped_weight(device: _DeviceView) -> Local | None:
    """Groups split: the sums for the groups that this device holds."""
    found = device.rows(first_out(device.call), device.signature.outs[0])
    if found is None:
        return None
    *operands, first, _, groups = device.call.args
    return device.call.op, (*operands, first + found[0], found[1], groups), ()


def _attention(device: _DeviceView) -> Local | None:
    """Queries split, causal: which rows this device has says which keys they see.  Around a ring it is a step."""
    backward = "backward" in device.call.op
    queries, layout = device.call.ins[backward], device.signature.ins[backward]
    if not isinstance(layout, Split) or layout.dim != QUERIES:
        return None
    if device.signature.inner:  # so that other axes split neither queries nor keys
        keys, scale = device.operand(backward + 1)[QUERIES], argument(device.call, "scale")[1]
        operands, mask = bind(device.call)[: 6 if backward else 3], argument(device.call, "attn_mask")[1]
        given = (None, mask) if backward else (None, None, mask, None)
        return RING_BACKWARD if backward else RING, (*operands, *given, (keys, 0, 0), scale), ()
    rows: Rows
    if device.call.op in (CAUSAL, CAUSAL_BACKWARD):
        *tensors, rows, scale = device.call.args
    elif argument(device.call, "is_causal")[1]:
        tensors = list(bind(device.call)[: 6 if backward else 3])
        rows, scale = ((0, queries.shape[QUERIES]),), argument(device.call, "scale")[1]
    else:
        return None
    held = spans(queries.shape[QUERIES], layout, device.parts, device.index)
    return CAUSAL_BACKWARD if backward else CAUSAL, (*tensors, rows_of(rows, held), scale), ()


def _ring(device: _DeviceView) -> Local | None:
    """Around a ring: what is said of this device's keys."""
    if not device.signature.inner:
        return None
    *operands, blocks, scale = device.call.args
    assert isinstance(blocks, tuple)
    return device.call.op, (*operands, own_blocks(blocks, device.index), scale), ()


def _ring_rows(device: _DeviceView) -> Local | None:
    """Around a ring: how many rows this device has."""
    if not device.signature.inner:
        return None
    x, rows, most = device.call.args
    assert isinstance(rows, tuple)
    return device.call.op, (x, (rows[device.index],), most), ()


def _pass_on(device: _DeviceView) -> Local | None:
    """Around a ring: a block is no longer passed on by the device itself (``cutting/lower.py`` moves it)."""
    if not device.signature.inner:
        return None
    return device.call.op, (*device.call.args[:2], 1), ()


def _pick(device: _DeviceView) -> Local | None:
    """Classes split: pick among this device's classes, whose first index is not 0."""
    x, target, dim, ignore, first, classes = device.call.args
    layout = device.signature.ins[0]
    if not isinstance(layout, Split) or layout.dim != dim:
        return None
    begin = device.begin(device.call.ins[0], layout)
    return device.call.op, (x, target, dim, ignore, first + begin, classes), ()


def _pick_backward(device: _DeviceView) -> Local | None:
    """As ``_pick``."""
    grad, target, size, dim, ignore, first, classes = device.call.args
    (layout,) = device.signature.outs
    if not isinstance(layout, Split) or layout.dim != dim:
        return None
    begin = device.begin(first_out(device.call), layout)
    size = device.shape()[dim]
    return device.call.op, (grad, target, size, dim, ignore, first + begin, classes), ()


def _uniform(device: _DeviceView) -> Local | None:
    (layout,), (out,) = device.signature.outs, device.call.outs
    if not isinstance(layout, Split) or out is None:
        return None
    args = list(device.call.args)
    has = args[random_ops.HAS]
    args[random_ops.HAS] = random_ops.local_elements(has, out.shape[layout.dim], layout, device.parts, device.index)
    return device.call.op, tuple(args), device.call.kwargs


def _arange(device: _DeviceView) -> Local | None:
    """The numbers of this device's part of the range."""
    (layout,), (out,) = device.signature.outs, device.call.outs
    if not isinstance(layout, Split) or out is None:
        return None
    start, step = arange_of(device.call)
    ((first, count),) = spans(out.shape[0], layout, device.parts, device.index)
    begin = start + first * step
    kwargs = (*((k, v) for k, v in device.call.kwargs if k != "dtype"), ("dtype", Symbol(f"torch.{out.dtype}")))
    return "aten.arange.start_step", (begin, begin + count * step, step), kwargs


def _empty(device: _DeviceView) -> Local | None:
    """Parts are dense, whatever the strides of the whole."""
    return "aten.empty.memory_format", (device.shape(),), device.call.kwargs


def _new_empty(device: _DeviceView) -> Local | None:
    """As ``_empty``."""
    return "aten.new_empty.default", (device.call.args[0], device.shape()), device.call.kwargs


_BY_SIZE: dict[str, Callable[[_DeviceView], Local | None]] = {  # what a device runs follows from how much it has
    "aten.empty_permuted.default": _empty,
    "aten.empty_strided.default": _empty,
    "aten.new_empty_strided.default": _new_empty,
    "aten.view.default": _reshape,
    "aten.view_copy.default": _reshape,
    "aten._unsafe_view.default": _reshape,
    "aten.reshape.default": _reshape,
    "aten.squeeze.default": _reshape,
    "aten.squeeze.dim": _reshape,
    "aten.squeeze.dims": _reshape,
    "aten.squeeze_copy.default": _reshape,
    "aten.squeeze_copy.dim": _reshape,
    "aten.squeeze_copy.dims": _reshape,
    "aten.slice.Tensor": _slice,
    "aten.slice_copy.Tensor": _slice,
    "aten.slice_backward.default": _slice_backward,
    "aten.split.Tensor": _split,
    "aten.split.sizes": _split,
    "aten.split_copy.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.split_with_sizes_copy.default": _split,
    "aten.unsafe_split.Tensor": _split,
    "aten.unsafe_split_with_sizes.default": _split,
    PASS_ON: _pass_on,
}
_BY_PLACE: dict[str, Callable[[_DeviceView], Local | None]] = {  # also from where that begins, or which device it is
    random_ops.UNIFORM: _uniform,
    "aten.arange.default": _arange,
    "aten.arange.start": _arange,
    "aten.arange.start_step": _arange,
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "actorflow.embedding_part": _embedding,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention,
    CAUSAL: _attention,
    CAUSAL_BACKWARD: _attention,
    RING: _ring,
    RING_BACKWARD: _ring,
    EVEN_OUT: _ring_rows,
    CUT_BACK: _ring_rows,
    "actorflow.grouped_mm": _grouped,
    "actorflow.grouped_mm_weight": _grouped_weight,
    "actorflow.pick": _pick,
    "actorflow.pick_backward": _pick_backward,
    "actorflow.embedding_part_backward": _embedding_backward,
}
_RULES = _BY_SIZE | _BY_PLACE
