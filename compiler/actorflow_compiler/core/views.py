"""The name of an op goes in; whether what it makes lies in the memory of what it reads comes out."""

from __future__ import annotations

import functools

import torch

# ops that cost nothing to do again: views, and small constants
VIEWS = frozenset({
    "aten.t.default", "aten.transpose.int", "aten.permute.default", "aten.view.default", "aten.reshape.default",
    "aten.unsqueeze.default", "aten.squeeze.dim", "aten.squeeze.default", "aten.squeeze.dims", "aten.expand.default",
    "aten.slice.Tensor", "aten.select.int", "aten.full.default", "aten.arange.default", "aten.arange.start",
    "aten.arange.start_step", "actorflow.carve", "actorflow.unpack",
})  # fmt: skip

# ops of actorflow, and one of torch whose schema does not say so, whose result lies in their first operand's memory
_VIEWS = frozenset({
    "actorflow.carve", "actorflow.unpack", "actorflow.identity", "actorflow.constrain", "actorflow.accumulate",
    "actorflow.last", "actorflow.mine", "actorflow.each", "aten._unsafe_view.default",
})  # fmt: skip
_SOMETIMES = frozenset({"actorflow.first"})


@functools.cache
def is_view(op: str) -> bool:
    """Whether an op's results lie in the memory of its first operand."""
    namespace, _, rest = op.partition(".")
    if namespace == "actorflow" or op in _VIEWS:
        return op in _VIEWS
    name, _, overload = rest.partition(".")
    returns = getattr(getattr(getattr(torch.ops, namespace), name), overload)._schema.returns
    return bool(returns) and returns[0].alias_info is not None


def may_be_view(op: str) -> bool:
    """Whether they can lie there."""
    return op in _SOMETIMES or is_view(op)
