"""Names of functions of torch go in; a table of what each does to selected rows comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["RULES", "Rule", "called", "named", "rule"]

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]  # function, args, kwargs
RULES: dict[Any, Rule] = {}
OWNERS = (torch, Tensor, torch.nn.functional, torch.special, torch.linalg)


def named(name: str) -> list[Any]:
    """The functions of torch with a name."""
    found = [getattr(owner, name, None) for owner in OWNERS]
    return [f for f in found if f is not None and callable(f)]


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enter a rule for all functions with these names."""

    def enter(function: Rule) -> Rule:
        for name in names:
            found = named(name)
            assert found, name
            RULES.update(dict.fromkeys(found, function))
        return function

    return enter


def called(func: Any) -> str:
    """How people call a function."""
    name = getattr(func, "__name__", str(func))
    return getattr(func.__self__, "__name__", name) if name in ("__get__", "__set__") else name


def bound(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name; ``axis`` is ``dim``, and the tensor ``input``."""
    same = {"axis": "dim", "keepdims": "keepdim", "self": "input"}
    if len(args) > len(names):
        raise TypeError(f"{len(args)} arguments were found where at most {len(names)} were expected")
    return {**dict(zip(names, args, strict=False)), **{same.get(k, k): v for k, v in kwargs.items()}}
