"""Op instances go in; the layouts that their tensors may have together, and what a device then runs, come out."""

from __future__ import annotations

from actorflow_compiler.signatures.call import OpCall, Signature
from actorflow_compiler.signatures.derive import signatures
from actorflow_compiler.signatures.localise import localise
from actorflow_compiler.signatures.shards import shard, unshard
from actorflow_compiler.signatures.table import term_of

__all__ = ["OpCall", "Signature", "localise", "notation", "shard", "signatures", "unshard"]


def notation(call: OpCall) -> str:
    """The term that the signatures of an op instance come from, for people; ``"->"`` where it has none."""
    return term_of(call) or "->"
