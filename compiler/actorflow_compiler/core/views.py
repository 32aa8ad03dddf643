"""Which ops return views (results in the memory of an operand), and which are cheap to recompute."""

from __future__ import annotations

import functools

import torch

from actorflow_compiler.core.torch_internals import schema_of

# cheap to run again instead of keeping their results: views, and small constants
CHEAP_OPS = frozenset({
    "aten.t.default", "aten.transpose.int", "aten.permute.default", "aten.view.default", "aten.reshape.default",
    "aten.unsqueeze.default", "aten.squeeze.dim", "aten.squeeze.default", "aten.squeeze.dims", "aten.expand.default",
    "aten.slice.Tensor", "aten.select.int", "aten.full.default", "aten.arange.default", "aten.arange.start",
    "aten.arange.start_step", "actorflow.carve", "actorflow.unpack",
})  # fmt: skip

# ops of actorflow, and one of torch whose schema does not say so, whose result lies in their first operand's memory
_ALIASING = frozenset({
    "actorflow.carve", "actorflow.unpack", "actorflow.identity", "actorflow.constrain", "actorflow.accumulate",
    "actorflow.last", "actorflow.mine", "actorflow.each", "aten._unsafe_view.default",
})  # fmt: skip
_SOMETIMES_ALIASING = frozenset({"actorflow.first"})


@functools.cache
def is_view(op: str) -> bool:
    """Whether an op's results lie in the memory of its first operand."""
    namespace, _, rest = op.partition(".")
    if namespace == "actorflow" or op in _ALIASING:
        return op in _ALIASING
    name, _, kind = rest.partition(".")
    returns = schema_of(getattr(getattr(getattr(torch.ops, namespace), name), kind)).returns
    return bool(returns) and returns[0].alias_info is not None


def may_be_view(op: str) -> bool:
    """Whether an op's results lie, always or sometimes, in the memory of its first operand."""
    return op in _SOMETIMES_ALIASING or is_view(op)
