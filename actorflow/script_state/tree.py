"""Describe the value that a step returns as plain JSON and a list of tensors, from which every rank rebuilds it."""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Coroutine, Generator, Mapping, Sequence
from typing import Any

from torch import Tensor

from actorflow_compiler.core.errors import CallError
from actorflow_compiler.core.expressions import Known, NumberSource, Value, evaluate, from_json, to_json
from actorflow_compiler.numbers.symbolic import expression_of, is_sym_number
from actorflow_compiler.numbers.unbacked import is_unbacked

__all__ = ["Description", "describe", "rebuild"]

# JSON: {"tensor": 0}, {"value": 3.5}, {"number": …} (an expression), {"list": […]}, {"tuple": […]},
# {"dict": [[key, …], …]}, {"ordered": …} (an OrderedDict), {"class": …, "fields": …}
Description = Any


def nothing(source: NumberSource) -> Value:
    """A ``Known`` function that knows no numbers."""
    raise CallError(f"{source} is not known here")


def describe(value: Any, tensors: list[Tensor]) -> Description:
    """The description of ``value``; its tensors are appended to ``tensors`` in order.

    Raises CallError for anything but a tensor, number, string, None, or a list, tuple, dictionary or dataclass of
    these.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if is_unbacked(value):
        value = value.known_value()
    if value is None or isinstance(value, bool | int | float | str):
        return {"number": to_json(expression_of(value))} if is_sym_number(value) else {"value": value}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [[f.name, describe(getattr(value, f.name), tensors)] for f in dataclasses.fields(value) if f.init]
        return {"class": _class_name(type(value)), "fields": fields}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = [[name, describe(item, tensors)] for name, item in zip(value._fields, value, strict=True)]
        return {"class": _class_name(type(value)), "fields": fields}
    if isinstance(value, Mapping):
        keys = [k for k in value if not isinstance(k, str | int | float | bool)]
        if keys:
            key = "a tensor" if isinstance(keys[0], Tensor) else repr(keys[0])
            raise CallError(f"a job returned a dictionary with the key {key}; strings or numbers were expected")
        form = "ordered" if type(value) is OrderedDict else "dict"
        return {form: [[key, describe(item, tensors)] for key, item in value.items()]}
    for kind in (list, tuple):
        if isinstance(value, kind):
            return {kind.__name__: [describe(item, tensors) for item in value]}
    why = ", of which nothing has run" if isinstance(value, Generator | Coroutine) else ""
    raise CallError(
        f"a job returned an object of type {type(value).__name__}{why}; expected: tensors, numbers, strings, None, and "
        f"lists, tuples, dictionaries and dataclasses of them"
    )


def rebuild(
    shape: Description, tensors: Sequence[Tensor], scope: Mapping[str, Any] = {}, known: Known = nothing
) -> Any:
    """Rebuild the value that was described, with these ``tensors``.

    Numbers that are expressions are computed from the numbers that ``known`` returns.  ``scope`` are the globals of the
    job's own file.
    """
    ((kind, content),) = ((k, v) for k, v in shape.items() if k != "fields")
    if kind == "tensor":
        return tensors[content]
    if kind == "value":
        return content
    if kind == "number":
        return evaluate(from_json(content), known)
    if kind in ("dict", "ordered"):
        items = {key: rebuild(item, tensors, scope, known) for key, item in content}
        return OrderedDict(items) if kind == "ordered" else items
    if kind == "class":
        return _class(content, scope)(**{name: rebuild(item, tensors, scope, known) for name, item in shape["fields"]})
    listed = [rebuild(item, tensors, scope, known) for item in content]
    return tuple(listed) if kind == "tuple" else listed


def _class_name(owner: type) -> str:
    if "<locals>" in owner.__qualname__:
        raise CallError(
            f"a job returned a {owner.__qualname__}, which other ranks cannot find; a class at the top of a module was "
            f"expected"
        )
    return f"{owner.__module__}:{owner.__qualname__}"


def _class(name: str, scope: Mapping[str, Any]) -> type:
    """A dataclass or named tuple by name, from a module that this script has imported itself."""
    module, _, path = name.partition(":")
    first, *rest = path.split(".")
    spaces = [vars(sys.modules[module])] if module in sys.modules else []
    for space in [scope, *spaces] if module == scope.get("__name__") else spaces:
        found = space.get(first)
        for part in rest:
            found = getattr(found, part, None)
        if isinstance(found, type) and (dataclasses.is_dataclass(found) or hasattr(found, "_fields")):
            return found
    raise CallError(
        f"a job returned a {name}, which this rank cannot find; a dataclass or named tuple at the top of a module that "
        f"every rank imports was expected"
    )
