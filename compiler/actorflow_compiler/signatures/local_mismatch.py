"""Check that the operands and arguments of a device's local op fit each other as those of the whole op do.

Many kernels of torch do not check whether operands, and the numbers that describe them, fit each other.  If they do
not, such kernels read and write out of bounds.
"""

from __future__ import annotations

from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.op_call import OpCall, overload
from actorflow_compiler.core.ops import Meta, show
from actorflow_compiler.signatures.discovery.execute import Outs, meta_of, on_meta
from actorflow_compiler.signatures.term_matching import index_call

__all__ = ["find_mismatch", "check_local_call"]


def check_local_call(whole: OpCall, local: OpCall, where: str) -> None:
    """Raise PlanError for a local op that ``find_mismatch`` finds wrong; ``where`` is the user's line."""
    why = find_mismatch(whole, local)
    if why is not None:
        raise PlanError(
            f"{where or 'in the step'}\n  {why}. What is said of how the op may be cut is wrong: correct its "
            f"register_signature, or, if there is none, report it; flow.constrain(x, flow.sbp.broadcast) on what it "
            f"reads keeps it whole"
        )


def find_mismatch(whole: OpCall, local: OpCall) -> str | None:
    """Why the operands, arguments and outputs of a local op do not fit each other as those of the whole do; or None.

    Assumed to fit without a check: actorflow's own ops, parts without elements, ops without a meta kernel.
    """
    if local == whole or overload(local.op) is None or any(0 in m.shape for m in (*local.ins, *local.outs) if m):
        return None
    why = _of_indices(whole, local) or _of_shapes(whole, local)
    if why is None:
        return None
    operands = ", ".join(map(str, local.ins))
    return f"{local.op} of {operands} with {show(local.args)} does not fit together: {why}"


def _of_indices(whole: OpCall, local: OpCall) -> str | None:
    """The error for an index that has one size everywhere in the whole op, but several in the local one."""
    before = index_call(whole) if local.op == whole.op else None
    if before is None:
        return None
    here = index_call(local)
    if here is None:
        return "its sizes are none that its signature can have"
    uneven = sorted(here.uneven - before.uneven)
    return f"index {uneven[0]} of its signature has several sizes" if uneven else None


def _of_shapes(whole: OpCall, local: OpCall) -> str | None:
    """The error for an output whose local shape differs from torch's, if torch's shapes of the whole are right."""
    try:
        if not _is_as_said(whole, on_meta(whole)):
            return None
    except RuntimeError:
        return None
    try:
        made = on_meta(local)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    if made is None or _is_as_said(local, made):
        return None
    given = ", ".join("nothing" if t is None else str(meta_of(t)) for t in made)
    return f"it gives {given} where {', '.join(map(_text, local.outs))} was expected"


def _is_as_said(call: OpCall, made: Outs | None) -> bool:
    pairs = zip(made, call.outs, strict=False) if made is not None and len(made) == len(call.outs) else None
    return pairs is not None and all(said is None or (t is not None and meta_of(t) == said) for t, said in pairs)


def _text(meta: Meta | None) -> str:
    return "nothing" if meta is None else str(meta)
