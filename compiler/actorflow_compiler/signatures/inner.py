"""Inner signatures: those by which devices exchange something small inside an op.

``_log_softmax`` over a dim that is split needs a maximum and a sum over all devices, but no device needs
the other parts of that dim.  A signature of this kind is legal if the op is decomposed into simpler
ops (``infer/inner_decompositions.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from actorflow_compiler.core.garbage_collection import kept_while_compiling
from actorflow_compiler.core.op_call import CALLS, CALLS_STAY, OpCall, Signature, bind
from actorflow_compiler.core.sbp import B, Parts, Sbp, all_share, device_count, even_shares
from actorflow_compiler.signatures import shaped_layers as layers
from actorflow_compiler.signatures.notation import parse
from actorflow_compiler.signatures.ring_signatures import ring_signatures
from actorflow_compiler.signatures.term_matching import IndexedTensor, match_term

Line = Callable[[OpCall], str | None]


@kept_while_compiling(CALLS, stay=CALLS_STAY)
def inner_signatures(call: OpCall, parts: Parts) -> tuple[Signature, ...]:
    """The inner signatures for a mesh axis of the devices ``parts``, all of which get some of the dim that is split.

    Attention and its steps have those of a ring (``ring_signatures.py``).
    """
    if around := ring_signatures(call, parts):
        return around
    line = LINES.get(call.op)
    text = line(call) if line and device_count(parts) > 1 else None
    op = match_term(call, text) if text else None
    return tuple(_signatures(call, op.size, op.ins, op.outs, parse(text).letters, parts)) if op and text else ()


def _signatures(
    call: OpCall, size: dict[str, int], ins: tuple[IndexedTensor, ...], outs: tuple[IndexedTensor | None, ...],
    letters: frozenset[str], parts: Parts,
) -> Iterator[Signature]:  # fmt: skip
    def layout(tensor: IndexedTensor | None, letter: str) -> Sbp:
        return (tensor.layout(letter, size, 1, 1, parts) if tensor else None) or B

    fit = (c for c in letters if c.islower() and all_share(size.get(c, 0), parts))
    for letter in sorted(c for c in fit if even_shares(parts) <= size[c]):  # maxima are as many as weights add up to
        made = (None if m is None else layout(o, letter) for o, m in zip(outs, call.outs, strict=True))
        yield Signature(tuple(layout(x, letter) for x in ins), tuple(made), letter, inner=True)


def _along(*, ins: int = 1, reduced: int = 0) -> Line:
    """The line of an op along named dims (v and so on) of ``ins`` operands.

    The output has the dims of the operands; with ``reduced``, there are that many outputs, which are broadcast.
    """

    def line(call: OpCall) -> str | None:
        rank, dims = len(call.ins[0].shape), bind(call)[ins]
        if not rank or not call.ins[0].is_float or (dims is None and call.op in ONE_DIM):
            return None
        named = range(rank) if dims in (None, ()) else [dims] if isinstance(dims, int) else dims
        along = {d % rank: "vwxyzabc"[i] for i, d in enumerate(named)}
        x = "".join(along.get(d, "NMLKJIHG"[d]) for d in range(rank))
        return f"{','.join([x] * ins)}->{','.join(['_'] * reduced) or x}"

    return line


def _normalised(line: Callable[[OpCall], str]) -> Line:
    """The line of a norm, with the dims that are normalised over as dims that may be split."""
    return lambda call: line(call).lower()


ONE_DIM = frozenset({"aten.argmax.default", "aten.argmin.default"})  # without a dim they index the flattened tensor
LINES: Mapping[str, Line] = {
    "aten._softmax.default": _along(),
    "aten._log_softmax.default": _along(),
    "aten._safe_softmax.default": _along(),
    "aten._softmax_backward_data.default": _along(ins=2),
    "aten._log_softmax_backward_data.default": _along(ins=2),
    "aten.logsumexp.default": _along(reduced=1),
    "aten.amax.default": _along(reduced=1),
    "aten.amin.default": _along(reduced=1),
    "aten.argmax.default": _along(reduced=1),
    "aten.argmin.default": _along(reduced=1),
    "aten.max.dim": _along(reduced=2),
    "aten.min.dim": _along(reduced=2),
    "aten.native_layer_norm.default": _normalised(layers.layer_norm),
    "aten.native_layer_norm_backward.default": _normalised(layers.layer_norm_backward),
    "aten._fused_rms_norm.default": _normalised(layers.rms_norm),
    "aten._fused_rms_norm_backward.default": _normalised(layers.rms_norm_backward),
}
