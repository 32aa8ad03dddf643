"""Signatures of ops: the layouts that their tensors may have together, and what each device then runs."""

from __future__ import annotations

from actorflow_compiler.core.op_call import OpCall, Signature
from actorflow_compiler.core.shards import shard, unshard
from actorflow_compiler.signatures.derive import signatures
from actorflow_compiler.signatures.localise import is_placed, local_call, local_op
from actorflow_compiler.signatures.registration import find_registration
from actorflow_compiler.signatures.table import has_line, term_of

__all__ = [
    "OpCall", "Signature", "has_line", "is_placed", "local_op", "find_registration", "local_call", "notation", "shard",
    "signatures", "unshard",
]  # fmt: skip


def notation(call: OpCall) -> str:
    """The terms that the signatures of an op instance come from, for people; ``"->"`` where it has none."""
    given = None if has_line(call.op) else find_registration(call.op)
    return (" | ".join(given.terms(call)) if given else term_of(call)) or "->"
