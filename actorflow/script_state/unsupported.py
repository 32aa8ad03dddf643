"""Refuse modules and optimizers that jobs do not support, where the search reaches them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from actorflow_compiler.core.errors import CaptureError
from actorflow_compiler.core.torch_internals import script_attributes

__all__ = ["refuse_disguised", "refuse_unsupported", "unwrap_prepared"]


def refuse_disguised(path: str, value: Any) -> None:
    """Raise CaptureError for an object that answers with no class when it is asked for its class."""
    if not isinstance(value.__class__, type):
        kind = type(value)
        raise CaptureError(
            f"{path} is an object of {kind.__name__} whose __getattribute__ answers every name, also __class__, "
            f"which is {value.__class__!r}; expected: a __getattr__, which is called for names that nothing else has"
        )


def refuse_unsupported(path: str, root: nn.Module) -> None:
    """Raise CaptureError if a module, or one below it, has packed weights, or tensors that cannot be replaced.

    torch.jit modules return copies of their lists and dictionaries, so tensors in dictionaries cannot be replaced.
    """
    for name, module in root.named_modules():
        where = f"{path}.{name}" if name else path
        values = vars(module)
        if isinstance(module, torch.jit.ScriptModule):
            program, names = script_attributes(module)
            values = {name: program.getattr(name) for name in names}
            for attribute, value in values.items():
                inner = () if isinstance(value, Tensor | list) else pytree.tree_leaves(value)
                if any(isinstance(leaf, Tensor) for leaf in inner):
                    raise CaptureError(
                        f"{where}.{attribute} of a module of torch.jit holds tensors in a {type(value).__name__}, "
                        f"which a job cannot follow; expected: a parameter or a buffer for each"
                    )
        if any(isinstance(value, torch.ScriptObject) for name, value in values.items() if name != "_c"):
            kind = getattr(module, "original_name", type(module).__name__)
            raise CaptureError(
                f"{where} ({kind}) holds quantized weights in a form that only torch knows; expected: "
                f"the plain module in the job, or the quantized one outside of it"
            )


def unwrap_prepared(path: str, optimizer: Any) -> Any:
    """The optimizer that accelerate has wrapped; None for any other optimizer.

    Raises CaptureError for an optimizer that is prepared for several processes.
    """
    if type(optimizer).__module__.partition(".")[0] != "accelerate":
        return None
    state: Any = getattr(optimizer, "accelerator_state", None)
    if getattr(state, "num_processes", 1) > 1:
        raise CaptureError(
            f"{path} was prepared by accelerate for {state.num_processes} processes, each with batches of its own and "
            f"a copy of the model, and a job takes whole batches and lays them out itself; expected: the plain model, "
            f"optimizer and loader, without accelerator.prepare (for accumulation, see docs/steps.md)"
        )
    return getattr(optimizer, "optimizer", None)
