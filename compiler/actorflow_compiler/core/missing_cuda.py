"""Say what to do in the error that torch raises for "cuda" on a machine without it."""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["note_missing_cuda"]

NOTE = (
    'actorflow: "cuda" was asked for in a process that has no CUDA device: write "cpu" for "cuda", as in '
    'model.to("cpu") and flow.placement("cpu", …), or start the script where torch.cuda.is_available() is true'
)


def note_missing_cuda(cuda: Any) -> None:
    """Let errors of the beginning of ``torch.cuda``, which is given, have a note; their type and text stay.

    It may be called while torch is being imported.
    """
    begin = cuda._lazy_init

    @functools.wraps(begin)
    def noted() -> None:
        try:
            begin()
        except (AssertionError, RuntimeError) as error:
            if NOTE not in getattr(error, "__notes__", ()) and not cuda.is_available():
                error.add_note(NOTE)
            raise

    cuda._lazy_init = noted
