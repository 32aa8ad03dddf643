"""Hooks that a library would install in the first call of a step, installed before it is captured.

A model of transformers records hidden states, attentions or router logits by forward hooks, which its ``forward``
installs when they are first asked for.  A captured step must find them as every later call does.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from inspect import getattr_static
from typing import Any

from actorflow.script_state.arguments import CallArguments
from actorflow.script_state.search_result import SearchResult
from actorflow.script_state.sources import MappingSource

__all__ = ["install_lazy_hooks"]

INSTALLER = "maybe_install_capturing_hooks"  # the function of transformers.utils.output_capturing


def install_lazy_hooks(found: SearchResult, arguments: CallArguments) -> None:
    """Install the hooks of those modules whose outputs are asked for.

    They are asked for by the module's configuration, by a keyword that code of the script names, or by a dictionary
    that it may pass on as keyword arguments.
    """
    modules = [module for root in found.state.modules.values() for module in root.modules()]  # outer ones first
    able = [
        (module, function)
        for module in modules
        if (function := _installing(getattr_static(type(module), "forward", None))) is not None
    ]
    if not able:
        return
    named = {text for code in found.codes for text in _texts(code)}
    args, kwargs = arguments.restore(arguments.tensors)
    given = [kwargs, *args, *kwargs.values(), *(one.holder for one in found.sources if isinstance(one, MappingSource))]
    named.update(key for one in given if isinstance(one, Mapping) for key in [*one] if isinstance(key, str))
    for module, function in able:
        asked = {f"output_{name}" for name in getattr(module, "_can_record_outputs", None) or ()}
        config = getattr(module, "config", None)
        if not named.isdisjoint(asked) or any(getattr(config, name, False) for name in asked):
            function.__globals__[INSTALLER](module)


def _installing(function: Any) -> types.FunctionType | None:
    """The function that installs hooks, among one and those that it wraps."""
    while isinstance(function, types.FunctionType):
        if INSTALLER in function.__code__.co_names and INSTALLER in function.__globals__:
            return function
        function = getattr(function, "__wrapped__", None)
    return None


def _texts(code: types.CodeType) -> Iterable[str]:
    """The strings in a function and its nested functions; names of keyword arguments of calls are among them."""
    pending: list[Any] = [*code.co_consts]
    for constant in pending:
        if isinstance(constant, tuple | frozenset):
            pending += constant
        elif isinstance(constant, types.CodeType):
            pending += constant.co_consts
        elif isinstance(constant, str):
            yield constant
