"""Constrain the gradients of parameters that ZeRO splits, by tensor hooks, while a step is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from actorflow_compiler.graph.graph import Graph
from actorflow_compiler.hints.constrain import CONSTRAIN, mark
from actorflow_compiler.hints.hints import ZeroHint

GRADIENT = "gradient of "  # begins the layout of a constraint on a gradient, until its parameter's layout is known


@contextlib.contextmanager
def mark_gradients(parameters: Mapping[str, Tensor], zero: Mapping[str, ZeroHint]) -> Iterator[None]:
    """Constrain the gradients of parameters in ZeRO stages 2 and 3; a later pass fills in their layouts."""
    with contextlib.ExitStack() as hooks:
        for name, z in zero.items():
            if z.stage >= 2 and name in parameters and parameters[name].requires_grad:
                tensor: Any = parameters[name]  # its stub lacks the types of register_hook
                hook = tensor.register_hook(partial(mark, layout=f"{GRADIENT}{name}", origin=z.origin))
                hooks.enter_context(hook)
        yield


def is_constrained(graph: Graph) -> bool:
    """Whether users have said how tensors of a step lie, themselves or as what modules return."""
    return any(n.op == CONSTRAIN and not n.args[1].startswith(GRADIENT) for n in graph.nodes)
