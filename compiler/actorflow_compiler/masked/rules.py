"""Tables of rules that say what a function of torch does to our tensor subclasses, and helpers that rules share.

A rule gets a function, its args and its kwargs, as ``__torch_function__`` does.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.core.errors import CaptureError
from actorflow_compiler.core.monkey_patches import original
from actorflow_compiler.values.reads import place_of

__all__ = ["RULES", "FunctionRules", "Rule", "bound", "named", "op_name", "refusal", "refusal_makers", "rule"]

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]  # function, args, kwargs
OWNERS = (torch, Tensor, torch.nn.functional, torch.special, torch.linalg)


class FunctionRules:
    """The rules of functions of torch for tensors of one class."""

    def __init__(self) -> None:
        self._rules: dict[Any, Rule] = {}

    def __getitem__(self, function: Any) -> Rule:
        return self._rules[function]

    def get(self, function: Any) -> Rule | None:
        """The rule of a function; None where there is none."""
        return self._rules.get(function)

    def add(self, functions: Iterable[Any], rule: Rule) -> None:
        """Let ``rule`` handle these functions."""
        self._rules.update(dict.fromkeys(functions, rule))

    def register(self, *names: str) -> Callable[[Rule], Rule]:
        """Decorate the rule of all functions with these names."""

        def enter(rule: Rule) -> Rule:
            for name in names:
                found = named(name)
                assert found, name
                self.add(found, rule)
            return rule

        return enter


RULES = FunctionRules()  # for selected rows
rule = RULES.register
refusal_makers: list[Callable[[str], Exception]] = []
"""For each current capture: makes the error of a refusal, which is raised again if the step catches it."""


def refusal(text: str) -> Exception:
    """The error that refuses the operation at the user's line; the current capture makes it, if there is one."""
    if refusal_makers:
        return refusal_makers[-1](text)
    return CaptureError(f"{place_of(traceback.extract_stack())}\n  {text}")


def named(name: str) -> list[Any]:
    """The functions of torch with this name, also where others have replaced them."""
    found = [getattr(owner, name, None) for owner in OWNERS]
    return [original(f) for f in found if callable(f)]


def op_name(func: Any) -> str:
    """The public name of a function; for the getter or setter of an attribute, the attribute's name."""
    name = getattr(func, "__name__", str(func))
    return getattr(func.__self__, "__name__", name) if name in ("__get__", "__set__") else name


def bound(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, with ``axis`` renamed to ``dim``, ``keepdims`` to ``keepdim`` and ``self`` to ``input``."""
    same = {"axis": "dim", "keepdims": "keepdim", "self": "input"}
    if len(args) > len(names):
        raise TypeError(f"{len(args)} arguments were found where at most {len(names)} were expected")
    return {**dict(zip(names, args, strict=False)), **{same.get(k, k): v for k, v in kwargs.items()}}
