"""An op instance goes in; its legal SBP signatures for one mesh axis come out, and its arguments as one device runs it.

Three rules give the signatures: everything broadcast; one letter split (an output without the
letter becomes a partial sum, for which the ``+`` operands without it must be partial sums, and, if
no ``*`` operand has it, one ``*`` operand too); and pure linearity, partial sums in and out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator

import torch

from actorflow_compiler.ops import Arg, Meta, Ref
from actorflow_compiler.sbp import B, P, Sbp, Split, canonical, local_shape, local_size, spans
from actorflow_compiler.signatures import rules
from actorflow_compiler.signatures.model import OpCall, Signature
from actorflow_compiler.signatures.notation import Dims, Spec, apply, arguments, schema_name, tags_of
from actorflow_compiler.signatures.table import TABLE

__all__ = ["OpCall", "Signature", "localise", "notation", "signatures"]


def signatures(call: OpCall, parts: int, *, wanted: Iterable[Split] = ()) -> tuple[Signature, ...]:
    """All legal signatures for an axis of ``parts`` devices; the first is all-broadcast.

    ``wanted`` are further cuts (with outer blocks or units) that its operands or outputs have, so
    that signatures with that granularity are found too.
    """
    return _signatures(call, parts, frozenset(s for s in wanted if s.blocks > 1 or s.unit > 1))


def notation(call: OpCall) -> str:
    """The rule of an op as text; ``->`` where there is none and the op is broadcast."""
    rule = TABLE.get(schema_name(call.op))
    if rule is None:
        tags = tags_of(call.op)
        return rules.pointwise(call) if torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags else "->"
    return rule if isinstance(rule, str) else rule(call)


@functools.cache
def spec_of(call: OpCall) -> Spec:
    """The rule applied to the op's shapes."""
    text = notation(call)
    return apply("->" if text == "->" else text, call) if text != "->" else _broadcast_only(call)


def _broadcast_only(call: OpCall) -> Spec:
    return apply(",".join(["_"] * len(arguments(call))) + "->" + ",".join(["_"] * len(call.outs)), call)


@functools.cache
def _signatures(call: OpCall, parts: int, wanted: frozenset[Split]) -> tuple[Signature, ...]:
    broadcast = Signature((B,) * len(call.ins), tuple(None if m is None else B for m in call.outs), None)
    if parts == 1:
        return (broadcast,)
    spec = spec_of(call)
    found = [broadcast]
    for letter, size in spec.sizes.items():
        if letter.isupper() or letter in spec.fixed:
            continue
        indexed = any(o.indexes == letter for o in spec.operands)
        for blocks, unit in sorted(_granularities(spec, letter, wanted)) if not indexed else [(1, 1)]:
            if size % (blocks * unit) == 0 and size // (blocks * unit) >= parts:
                found += _split(spec, call, letter, blocks, unit, parts)
    found += _pure(spec, call)
    return tuple(dict.fromkeys(found))


def _granularities(spec: Spec, letter: str, wanted: frozenset[Split]) -> set[tuple[int, int]]:
    """The (blocks, unit) of a letter that make one of the wanted cuts somewhere."""
    found = {(1, 1)}
    for dims in [*(o.dims for o in spec.operands), *(d for d in spec.outs if d is not None)]:
        for i, group in enumerate(dims):
            if letter not in group:
                continue
            before, after = _around(spec, group, letter)
            for s in wanted:
                if s.dim == i and s.blocks % before == 0 and s.unit % after == 0:
                    found.add((s.blocks // before, s.unit // after))
    return found


def _around(spec: Spec, group: tuple[str, ...], letter: str) -> tuple[int, int]:
    at = group.index(letter)
    return math.prod(spec.sizes.get(x, 1) for x in group[:at]), math.prod(spec.sizes.get(x, 1) for x in group[at + 1 :])


def _lay(spec: Spec, dims: Dims, letter: str, blocks: int, unit: int, parts: int) -> Split | None:
    """How a tensor with these dims lies when the letter is split; None if it does not have it."""
    for i, group in enumerate(dims):
        if letter in group:
            before, after = _around(spec, group, letter)
            size = math.prod(spec.sizes.get(x, 1) for x in group)
            return canonical(Split(i, before * blocks, after * unit), size, parts)
    return None


def _split(spec: Spec, call: OpCall, letter: str, blocks: int, unit: int, parts: int) -> Iterator[Signature]:
    ins = [_lay(spec, o.dims, letter, blocks, unit, parts) for o in spec.operands]
    outs = [None if d is None else _lay(spec, d, letter, blocks, unit, parts) for d in spec.outs]
    summed = any(m is not None and o is None for o, m in zip(outs, call.outs, strict=True))
    partial: list[set[int]] = [set()]
    if summed:
        if not all(m.is_float for o, m in zip(outs, call.outs, strict=True) if m is not None and o is None):
            return
        need = {i for i, o in enumerate(spec.operands) if o.mark == "+" and ins[i] is None}
        star = [i for i, o in enumerate(spec.operands) if o.mark == "*"]
        partial = [need] if not star or any(ins[i] is not None for i in star) else [need | {i} for i in star]
        partial = [p for p in partial if not p or spec.linear and all(call.ins[i].is_float for i in p)]
    for those in partial:
        layout: tuple[Sbp, ...] = tuple(s if s is not None else P if i in those else B for i, s in enumerate(ins))
        yield Signature(
            layout, tuple(None if m is None else o if o is not None else P for o, m in zip(outs, call.outs, strict=True)), letter, blocks, unit
        )  # fmt: skip


def _pure(spec: Spec, call: OpCall) -> Iterator[Signature]:
    """Partial sums through linear ops."""
    plus = {i for i, o in enumerate(spec.operands) if o.mark == "+"}
    star = [i for i, o in enumerate(spec.operands) if o.mark == "*"]
    if not spec.linear or not (plus or star) or all(o is None for o in spec.outs):
        return
    for those in [plus | {i} for i in star] if star else [plus]:
        if not all(call.ins[i].is_float for i in those):
            continue
        layout: tuple[Sbp, ...] = tuple(P if i in those else B for i in range(len(spec.operands)))
        yield Signature(layout, tuple(None if o is None else P for o in spec.outs), None)


def localise(
    call: OpCall, signature: Signature, parts: int, index: int
) -> tuple[str, tuple[Arg, ...], tuple[tuple[str, Arg], ...], tuple[Meta, ...]]:
    """The op as device ``index`` runs it: name, arguments with local sizes, and the metas of the outputs that exist."""
    outs = tuple(
        Meta(local_shape(m.shape, s, parts, index), m.dtype) for m, s in zip(call.outs, signature.outs, strict=True) if m is not None and s is not None
    )
    op, args, kwargs = call.op, call.args, call.kwargs
    if signature.letter is not None:
        spec = spec_of(call)
        names = [name for name, _ in arguments(call)]
        local = {name: _local_size(spec, signature, rule, dict(arguments(call))[name], parts, index) for name, rule in spec.size_args.items()}
        args = tuple(local.get(name, a) for name, a in zip(names, args, strict=False))
        kwargs = tuple((k, local.get(k, v)) for k, v in kwargs)
        if any(o.indexes == signature.letter for o in spec.operands):
            start, stop = _range(spec.sizes[signature.letter], parts, index)
            if op == "aten.embedding.default":
                op, args, kwargs = "actorflow.embedding_part", (args[0], args[1], start), ()
            else:
                op, args, kwargs = "actorflow.embedding_part_backward", (args[0], args[1], stop - start, start, *args[3:]), ()
    if op in ("aten.view.default", "aten._unsafe_view.default") and parts > 1:
        op = "aten.reshape.default"  # parts may have other strides
    return op, args, kwargs, outs


def _range(size: int, parts: int, index: int) -> tuple[int, int]:
    ((start, length),) = spans(size, Split(0), parts, index)
    return start, start + length


def _local_size(spec: Spec, signature: Signature, rule: tuple[str, Dims | str], value: Arg, parts: int, index: int) -> Arg:
    kind, what = rule
    letter = signature.letter
    assert letter is not None
    if kind == "letter":
        return local_size(spec.sizes[letter], Split(0, signature.blocks, signature.unit), parts, index) if what == letter else value
    assert isinstance(what, tuple)
    out = list(value)
    split = _lay(spec, what, letter, signature.blocks, signature.unit, parts)
    if split is not None:
        out[split.dim] = local_size(math.prod(spec.sizes.get(x, 1) for x in what[split.dim]), split, parts, index)
    return tuple(out)

