"""Trace ``torch.istft``, which looks at values of its windows, with that look as a check when a call runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.core.torch_internals import answering_equal, is_fake

__all__ = ["replaced_istft"]


@contextlib.contextmanager
def replaced_istft() -> Iterator[None]:
    """Let ``torch.istft`` raise by a branch in Python where windows leave a gap; such a branch becomes a check.

    torch compares tensors in the middle of it, and stops there without their values.
    """
    plain = torch.istft

    def istft(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # the parameter's name is torch's
        if not is_fake(input):
            return plain(input, *args, **kwargs)
        found, asked, fine = _with_answer(lambda: plain(input, *args, **kwargs))
        for equal in asked:
            check: Any = torch._check  # torch has no types there
            check(bool(equal == fine), lambda: "istft: window overlap add min: 1, the windows leave a gap")
        return found

    torch.istft = istft
    try:
        yield
    finally:
        torch.istft = plain


def _with_answer(transform: Any) -> tuple[Tensor, list[Tensor], bool]:
    """The transform, the comparisons in it, and the answer to them with which it does not raise.

    Raises what it raises for invalid arguments.
    """
    asked: list[Tensor] = []
    with contextlib.suppress(RuntimeError), answering_equal(False, asked):
        return transform(), asked, False
    asked.clear()
    with answering_equal(True, asked):
        return transform(), asked, True
