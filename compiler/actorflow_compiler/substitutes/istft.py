"""Trace ``torch.istft``, which reads values of its window, so that this test of the window runs in each call."""

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
    """Let ``torch.istft`` raise in a Python branch where the windows leave a gap; such a branch becomes a check.

    torch itself compares tensors with ``torch.equal``, which fails without values.
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
    """The transform's result, the comparisons in it, and the answer to these for which it does not raise.

    Raises the transform's own errors for invalid arguments.
    """
    asked: list[Tensor] = []
    with contextlib.suppress(RuntimeError), answering_equal(False, asked):
        return transform(), asked, False
    asked.clear()
    with answering_equal(True, asked):
        return transform(), asked, True
