"""Discover the signatures of ops without a line in the table or a registration, by running them.

    structure → memory → disk → search, in the sandbox or here → rules → signatures

Ops that ``sandbox.py``'s child process can load are searched there; those that only this process knows,
such as a custom op of a script, here.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence

import torch

from actorflow_compiler.core.op_call import OpCall, Signature, overload
from actorflow_compiler.core.sbp import Parts
from actorflow_compiler.core.torch_internals import python_source, runs_python, schema_of
from actorflow_compiler.signatures.discovery import cache
from actorflow_compiler.signatures.discovery.rules import Rule, apply, structure
from actorflow_compiler.signatures.discovery.sandbox import SANDBOX
from actorflow_compiler.signatures.discovery.search import Trials, find_rules, searchable

__all__ = ["discovered", "forget", "learn", "rules_of"]

_known: dict[tuple[str, str], tuple[Rule, ...]] = {}  # by structure and implementation


def discovered(call: OpCall, parts: Parts) -> tuple[Signature, ...]:
    """The signatures of a call on the devices ``parts`` that hold in runs on small operands.

    Empty for an op that is random, cannot be run, or cannot be decided; never an error.  The first search
    for an op takes 20 to 200 ms, after one start of the sandbox; what it finds is kept on disk.
    """
    return tuple(apply(rules_of(call), call, parts))


def rules_of(call: OpCall) -> tuple[Rule, ...]:
    """The rules of all calls with this call's structure."""
    if not searchable(call):
        return ()
    version = implementation(call.op)
    key = (structure(call), version or "")
    if key not in _known:
        found = None if version is None else cache.read(call, version)
        if found is None:
            found = _search(call)
            if found is not None and version is not None:
                cache.write(call, version, found)
        _known[key] = found or ()
    return _known[key]


def learn(call: OpCall, rules: Sequence[Rule]) -> None:
    """Adopt the rules that another process found for calls of this structure."""
    _known[(structure(call), implementation(call.op) or "")] = tuple(rules)


def forget() -> None:
    """Drop the rules in memory; those on disk stay."""
    _known.clear()


def implementation(op: str) -> str | None:
    """A text that changes when an op's implementation changes; None if there is no way to tell.

    For an op of torch it is constant, since the cache records torch's version.  For a custom op it is a hash of
    the schema, the source and the file that defines it.
    """
    if op.startswith("aten."):
        return "torch"
    source = python_source(overload(op))
    if source is None:
        return None
    return hashlib.sha256(f"{schema_of(overload(op))}\n{source}".encode()).hexdigest()


def _search(call: OpCall) -> tuple[Rule, ...] | None:
    """None where the op cannot be run."""
    namespace = call.op.partition(".")[0]
    imports = [namespace] if namespace in sys.modules and namespace not in ("aten", "__main__") else []
    if namespace == "aten" or imports or torch.ops.loaded_libraries:
        found = SANDBOX.search(call, sorted(torch.ops.loaded_libraries), imports)
        if found is not None:
            return found
    if not runs_python(overload(call.op)):
        return None
    return find_rules(call, Trials())
