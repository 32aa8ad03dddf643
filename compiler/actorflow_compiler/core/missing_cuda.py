"""Say what to do in the error that torch raises for "cuda" on a machine without it.

It uses a private name of torch's, apart from ``torch_internals.py``: it is needed as soon as torch has been imported,
and that file imports much of torch that a script may not need.
"""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["note_missing_cuda"]

NOTE = (
    'actorflow: "cuda" was asked for in a process that has no CUDA device: write "cpu" for "cuda", as in '
    'model.to("cpu") and flow.placement("cpu", …), or start the script where torch.cuda.is_available() is true'
)


def note_missing_cuda() -> None:
    """Let errors of the beginning of ``torch.cuda`` have a note; their type and text stay."""
    import torch

    begin: Any = torch.cuda._lazy_init

    @functools.wraps(begin)
    def noted() -> None:
        try:
            begin()
        except (AssertionError, RuntimeError) as error:
            if NOTE not in getattr(error, "__notes__", ()) and not torch.cuda.is_available():
                error.add_note(NOTE)
            raise

    torch.cuda._lazy_init = noted
