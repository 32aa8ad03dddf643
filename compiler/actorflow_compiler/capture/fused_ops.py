"""Expand fused optimizers into an op for each parameter, and batch norm into one that returns its statistics."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from actorflow_compiler.capture.functional import tensor_changed_by
from actorflow_compiler.capture.optimizer_state import OPTIMIZER_MARK
from actorflow_compiler.core.expressions import Operand
from actorflow_compiler.core.torch_internals import OpOverload, schema_of
from actorflow_compiler.custom_ops.optimizers import expand_fused, source_of
from actorflow_compiler.numbers.ops import RATES_MARK
from actorflow_compiler.numbers.symbolic import NumberEnv
from actorflow_compiler.substitutes.decomposition_table import Decomposition

__all__ = ["FusedOps"]

aten = torch.ops.aten


class FusedOps:
    """How ops of one trace are expanded; ``expansion`` is an argument of ``rewrite_in_place_ops``.

    ``known`` maps placeholders to variables, ``groups`` maps an optimizer and a parameter to a group of the optimizer.
    """

    def __init__(
        self, known: Mapping[str, str], groups: Mapping[tuple[str, str], str], numbers: NumberEnv | None
    ) -> None:
        self._known, self._groups, self._numbers = known, groups, numbers
        self._changed: dict[tuple[str, str], str] = {}  # (group, its changed rates as text) → its name with these

    def expansion(self, node: Node, op: OpOverload) -> Decomposition | None:
        """What runs in place of a node, with each change as a copy into a tensor; None: the node itself."""
        name = schema_of(op).name
        if name.startswith("aten::_fused_"):
            return partial(self._fused, node, op)
        if name == "aten::native_batch_norm":
            return _batch_norm
        return _nothing if name.startswith("profiler::") else None

    def _fused(self, node: Node, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """A fused optimizer as one op for each parameter."""
        params: Any = node.args[0]
        custom = node.meta.get("custom", {})
        optimizer, rates = custom.get(OPTIMIZER_MARK, ""), custom.get(RATES_MARK)
        names = [self._known.get(tensor_changed_by(p).name, "") for p in params if isinstance(p, Node)]
        owners = [self._rated(self._groups[optimizer, name], rates) for name in names]
        return None if expand_fused(op, args, kwargs, owners) else op(*args, **kwargs)

    def _rated(self, group: str, rates: Mapping[str, Operand] | None) -> str:
        """The name of a group with the rates ``rates``: a name of its own where the step has changed them."""
        if rates is None or all(expression == source_of(group, key) for key, expression in rates.items()):
            return group
        assert self._numbers is not None
        known = self._changed.setdefault((group, repr(rates)), f"{group}, {len(self._changed)}")
        self._numbers.read.update({f"{known}.{key}": expression for key, expression in rates.items()})
        return known


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None,
    training: bool, momentum: float, eps: float,
) -> Any:  # fmt: skip
    """Batch norm that returns its new running statistics, which the op writes although its schema does not say so."""
    if not training or mean is None or var is None:
        return NotImplemented
    *out, new_mean, new_var = aten._native_batch_norm_legit_functional(
        x, weight, bias, mean, var, training, momentum, eps
    )
    mean.copy_(new_mean)
    var.copy_(new_var)
    return tuple(out)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The expansion of marks for profilers."""
