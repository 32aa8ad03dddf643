"""Op instances go in; the layouts that their tensors may have together, and what a device then runs, come out."""

from __future__ import annotations

from actorflow_compiler.core.op_call import OpCall, Signature
from actorflow_compiler.core.shards import shard, unshard
from actorflow_compiler.signatures.derive import signatures
from actorflow_compiler.signatures.localise import localise, localised
from actorflow_compiler.signatures.registered import registration
from actorflow_compiler.signatures.table import has_line, term_of

__all__ = [
    "OpCall", "Signature", "has_line", "localise", "localised", "notation", "registration", "shard", "signatures",
    "unshard",
]  # fmt: skip


def notation(call: OpCall) -> str:
    """The terms that the signatures of an op instance come from, for people; ``"->"`` where it has none."""
    given = None if has_line(call.op) else registration(call.op)
    return (" | ".join(given.terms(call)) if given else term_of(call)) or "->"
