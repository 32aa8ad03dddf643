"""What the search has come to goes in; a refusal leaves where nobody can see what it does, or what is not for a job."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from actorflow_compiler.errors import CaptureError

__all__ = ["prepared", "refuse_compiled"]


def refuse_compiled(path: str, root: nn.Module) -> None:
    """Raise CaptureError where a module, or one below it, is a program of torch.jit or holds packed weights."""
    for name, module in root.named_modules():
        where = f"{path}.{name}" if name else path
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{where} is a module of torch.jit (torch.jit.script or trace), whose code and parameters a job cannot "
                f"follow; expected: the plain module that it was made of"
            )
        if any(isinstance(value, torch.ScriptObject) for value in vars(module).values()):
            raise CaptureError(
                f"{where} ({type(module).__name__}) holds quantized weights in a form that only torch knows; expected: "
                f"the plain module in the job, or the quantized one outside of it"
            )


def prepared(path: str, optimizer: Any) -> Any:
    """The optimizer that accelerate has put into another one; None for any other.

    Raises CaptureError for one that is prepared for several processes.
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
