"""A module that the search has come to goes in; a refusal leaves where nobody can see what it does."""

from __future__ import annotations

import torch
from torch import nn

from actorflow_compiler.errors import CaptureError

__all__ = ["refuse_compiled"]


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
