"""Derive all legal signatures of an op instance along one mesh axis.

Three rules: everything broadcast; one index split wherever it occurs; nothing split, but sums of
terms passed through an op that is linear.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from actorflow_compiler.core.errors import SignatureError
from actorflow_compiler.core.garbage_collection import kept_while_compiling
from actorflow_compiler.core.op_call import CALLS, CALLS_STAY, OpCall, Signature, SignatureSource
from actorflow_compiler.core.sbp import B, P, PartialSum, Parts, Sbp, Split, all_share, canonical, device_count
from actorflow_compiler.custom_ops.mirrored import CASTS
from actorflow_compiler.signatures.discovery import discovered
from actorflow_compiler.signatures.discovery.rules import structure
from actorflow_compiler.signatures.inner import inner_signatures
from actorflow_compiler.signatures.notation import Linearity
from actorflow_compiler.signatures.registration import RegisteredSignatures, find_registration
from actorflow_compiler.signatures.table import has_line
from actorflow_compiler.signatures.term_matching import IndexedCall, index_call, match_term
from actorflow_compiler.signatures.verify import find_wrong_signature


def signatures(
    call: OpCall, parts: Parts, *, wanted: Iterable[Split] = (), inner: bool = False
) -> tuple[Signature, ...]:
    """All legal signatures for a mesh axis with the devices ``parts``; the first is all-broadcast, except for casts.

    Every index is cut plainly.  ``wanted`` are further cuts, with blocks or units, that neighbours
    have: where an operand or output can have one of them, it is followed through the op, too.
    An op without a line in the table has the signatures that a user registered, else those found by running it
    (``discovery``).  Raises SignatureError if a registered one is wrong.  ``inner`` also adds inner signatures, for
    which the op has to be decomposed (``inner.py``).
    """
    cuts = tuple(sorted({w for w in wanted if w.blocks > 1 or w.unit > 1}, key=_order))
    found = _signatures(call, parts, cuts, find_registration(call.op))
    return found + inner_signatures(call, parts) if inner else found


def _order(split: Split) -> tuple[int, int, int]:
    return split.dim, split.blocks, split.unit


@kept_while_compiling(CALLS, stay=CALLS_STAY)
def _signatures(
    call: OpCall, parts: Parts, wanted: tuple[Split, ...], given: RegisteredSignatures | None
) -> tuple[Signature, ...]:
    several = device_count(parts) > 1
    if several and call.op in CASTS:  # no op on logical values
        taken, made = CASTS[call.op]
        return (Signature((taken,), (made,), None),)
    found = [Signature((B,) * len(call.ins), tuple(None if o is None else B for o in call.outs), None)]
    if several and (op := index_call(call)) is not None:
        found += _indexed(call, op, parts, wanted)
    elif several and given is not None:
        _verify(call, given)
        found += _registered(call, given, parts, wanted)
    elif several and not has_line(call.op):
        found += discovered(call, parts)
    unique = {(s.ins, s.outs): s for s in reversed(found)}
    return tuple(reversed(unique.values()))


def _indexed(call: OpCall, op: IndexedCall, parts: Parts, wanted: tuple[Split, ...]) -> Iterator[Signature]:
    """The signatures of an op whose indices are known."""
    for letter in op.splittable:
        yield from _split(call, op, letter, 1, 1, parts)
        for blocks, unit in _granularities(op, letter, wanted, parts):
            yield from _split(call, op, letter, blocks, unit, parts)
    yield from _passing_sums(call, op)


def _registered(
    call: OpCall, given: RegisteredSignatures, parts: Parts, wanted: tuple[Split, ...] = ()
) -> Iterator[Signature]:
    """The signatures of an op from the terms that a user registered for it."""
    for text in given.terms(call):
        op = match_term(call, text)
        for signature in _indexed(call, op, parts, wanted) if op is not None else ():
            yield replace(signature, source=SignatureSource.REGISTERED, term=text)


def _verify(call: OpCall, given: RegisteredSignatures) -> None:
    """Raise SignatureError if a term that a user registered is wrong."""
    kind = structure(call)
    if not given.verify or kind in given.checked:
        return
    found = find_wrong_signature(call, lambda small, parts: _registered(small, given, parts))
    if found is not None:
        signature, why = found
        raise SignatureError(
            f"{given.where}: {signature.term!r} was registered for {given.op}, by which it can run as {signature}; "
            f"that is wrong: {why}. Correct the term; uppercase letters are dims that may not be split, and "
            f"only operands in which the op is linear have '+' or '*'"
        )
    given.checked.add(kind)


def _granularities(op: IndexedCall, letter: str, wanted: tuple[Split, ...], parts: Parts) -> set[tuple[int, int]]:
    """The ways to cut one index (blocks, unit) that give an operand or output a wanted layout."""
    found = set()
    indexed = [t for t in (*op.ins, *op.outs) if t is not None]
    for tensor in indexed if wanted else ():
        at = tensor.where(letter, op.size)
        if at is None:
            continue
        dim, before, after = at
        for w in wanted:
            if w.dim != dim or w.blocks % before:
                continue
            cut = (w.blocks // before, w.unit // after if w.unit % after == 0 else 1)
            size = tensor.meta.shape[dim]
            if (
                cut == (1, 1)
                or op.size[letter] % (cut[0] * cut[1])
                or op.size[letter] == cut[0] * cut[1]  # one device would have all of it
                or (cut[0] > 1 and any(t.values == letter for t in indexed))
            ):
                continue
            if tensor.layout(letter, op.size, *cut, parts) == canonical(w, size, parts):
                found.add(cut)
    return found


def _split(call: OpCall, op: IndexedCall, letter: str, blocks: int, unit: int, parts: Parts) -> Iterator[Signature]:
    """Cut one index: an output without it becomes a sum of terms."""
    if letter in op.never_empty and not all_share(op.size[letter] // (blocks * unit), parts):
        return
    if op.parts.get(letter, parts) != parts or (letter in op.parts and blocks * unit > 1):
        return
    cut = [t.layout(letter, op.size, blocks, unit, parts) for t in op.ins]
    made = [None if o is None else o.layout(letter, op.size, blocks, unit, parts) for o in op.outs]
    lacking = [o is not None and layout is None for o, layout in zip(op.outs, made, strict=True)]
    if not any(lacking):
        yield from _legal(call, cut, made, (), letter)
        return
    if op.affine:
        return
    for terms in _summed_operands(op, [layout is not None for layout in cut]):
        if not terms or all(lacking[i] or o is None for i, o in enumerate(op.outs)):
            yield from _legal(
                call, cut, [P if lack else layout for lack, layout in zip(lacking, made, strict=True)], terms, letter
            )


def _passing_sums(call: OpCall, op: IndexedCall) -> Iterator[Signature]:
    """Signatures that cut nothing: partial sums pass if the op is linear in the operands that are partial sums."""
    complete = all(o is not None or meta is None for o, meta in zip(op.outs, call.outs, strict=True))
    if op.affine or not complete:
        return
    nothing: list[Split | None] = [None] * len(op.ins)
    for terms in _summed_operands(op, [False] * len(op.ins)):
        if terms:
            yield from _legal(call, nothing, [P if o is not None else None for o in op.outs], terms, None)


def _summed_operands(op: IndexedCall, has: list[bool]) -> list[tuple[int, ...]]:
    """The sets of operands without the split index that have to be partial sums; ``has`` says which have the index."""
    plus = tuple(i for i, t in enumerate(op.ins) if t.mark == Linearity.ADDEND and not has[i])
    star = [i for i, t in enumerate(op.ins) if t.mark == Linearity.FACTOR]
    if not star or any(has[i] for i in star):
        return [plus]
    return [(*plus, i) for i in star]


def _legal(
    call: OpCall,
    cut: list[Split | None],
    made: Sequence[Split | PartialSum | None],
    terms: tuple[int, ...],
    letter: str | None,
) -> Iterator[Signature]:
    """The signature, if only floating tensors are sums of terms; outputs that the notation ignores are broadcast."""
    ins: list[Sbp] = [P if i in terms else layout or B for i, layout in enumerate(cut)]
    outs: list[Sbp | None] = [
        None if meta is None else layout or B for meta, layout in zip(call.outs, made, strict=False)
    ]
    sums = [m for m, s in zip(call.ins, ins, strict=True) if s == P] + [
        m for m, s in zip(call.outs, outs, strict=True) if s == P and m is not None
    ]
    if all(m.is_float for m in sums):
        yield Signature(tuple(ins), tuple(outs), letter)
