"""Trace code that torch.jit has compiled, op by op.

torch runs such code without Python, and fuses its ops after the first runs.  A fresh copy, which runs here, passes each
op to the trace as plain code does.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from actorflow_compiler.core.errors import CaptureError
from actorflow_compiler.core.torch_internals import (
    DATA_DEPENDENT,
    DEPENDENT_SIZE,
    fresh_script,
    is_traced_by_jit,
    memory_of,
    replaced_scripts,
    script_constants,
    script_kinds,
)
from actorflow_compiler.numbers.symbolic import specialized
from actorflow_compiler.numbers.unbacked import is_unbacked
from actorflow_compiler.values.reads import place_of

__all__ = ["TorchScriptCalls", "torchscript_error"]

SCRIPTED = "The following operation failed in the TorchScript interpreter"
OF_VALUES = (
    "the step calls code of torch.jit.script here that depends on the values of tensors; expected: a plain function "
    "with the same ops in every call"
)
UNSEEN = {  # nodes that a trace does not see, or sees only once
    "prim::PythonOp": "calls a function of Python (@torch.jit.ignore, @torch.jit.unused)",
    "prim::fork": "has another thread work (torch.jit.fork)",
    "prim::awaitable": "has something else work (torch.jit._awaitable)",
    "prim::Print": "prints",
    "prim::CallMethod": "calls a method of an interface (torch.jit.interface)",
    "prim::CreateObject": "makes an object of a class (torch.jit.script of a class)",
}
ATTENTION = "aten::scaled_dot_product_attention"
PLAIN: Any = getattr(Tensor.__torch_function__, "__func__", None)
DROPPING = 4  # position of its argument dropout_p


class TorchScriptCalls:
    """Runs code compiled by torch.jit so that its ops are traced; ``held`` are the tensors of the script's state."""

    def __init__(self, held: Sequence[Tensor]) -> None:
        self._memory = {memory_of(tensor) for tensor in held if type(tensor) in (Tensor, nn.Parameter)}
        # id → a compiled function or method, and its runner
        self._known: dict[int, tuple[Any, Callable[..., Any]]] = {}

    def replacing_calls(self) -> contextlib.AbstractContextManager[None]:
        """Use while the step runs."""
        return replaced_scripts(self._call)

    def _call(self, call: Callable[..., Any], script: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a compiled function or method; ``call`` is torch's own way of calling it."""
        if is_traced_by_jit() or any(map(_handles_functions, pytree.tree_leaves((args, kwargs)))):
            return call(script, *args, **kwargs)
        if id(script) not in self._known:
            self._known[id(script)] = script, self._runner(script)
        run = self._known[id(script)][1]
        return run(*pytree.tree_map(_specialized, tuple(args)), **pytree.tree_map(_specialized, dict(kwargs)))

    def _runner(self, script: Any) -> Callable[..., Any]:
        """A runner of a compiled function or method.  Raises CaptureError if a plan cannot repeat what it does."""
        drops = False
        for kind, node in script_kinds(script):
            if kind in UNSEEN:
                self._refuse(script, UNSEEN[kind], "the plain module or function, or one without this")
            if kind == ATTENTION:
                probability = [*node.inputs()][DROPPING].toIValue()
                drops = drops or probability is None or probability > 0
        if not self._memory.isdisjoint(map(memory_of, script_constants(script))):
            self._refuse(
                script, "has a tensor of the script written into it, as a constant",
                "that tensor as an argument, or as a parameter or a buffer of the module that is compiled",
            )  # fmt: skip
        run, arguments = fresh_script(script), script.schema.arguments
        first = [] if isinstance(script, torch.jit.ScriptFunction) else [script.owner]

        def bound(*args: Any, **kwargs: Any) -> Any:
            names = [a.name for a in arguments[len(first) :]]
            left = {a.name: a.default_value for a in arguments[len(first) :] if a.has_default_value()}
            given = dict(zip(names, args, strict=False))
            unknown = [name for name in kwargs if name not in names or name in given]
            values = {**left, **given, **kwargs}
            missing = [name for name in names if name not in values]
            if len(args) > len(names) or unknown or missing:
                raise TypeError(
                    f"{script.name}({', '.join(names)}) of torch.jit was called with {len(args)} arguments"
                    f"{''.join(f', {name}=…' for name in kwargs)}"
                )
            with sdpa_kernel(SDPBackend.MATH) if drops else contextlib.nullcontext():
                try:
                    return run(*first, *(values[name] for name in names))
                except DATA_DEPENDENT as error:
                    if isinstance(error, DEPENDENT_SIZE):
                        raise
                    raise CaptureError(f"{place_of(traceback.extract_stack())}\n  {OF_VALUES}") from error

        return bound

    @staticmethod
    def _refuse(script: Any, what: str, instead: str) -> NoReturn:
        place = place_of(traceback.extract_stack())
        raise CaptureError(f"{place}\n  {script.name}, which torch.jit has compiled, {what}; expected: {instead}")


def torchscript_error(text: str) -> str:
    """A readable text for an error message of code of torch.jit; empty for other messages."""
    if not text.startswith(SCRIPTED):
        return ""
    if any(kind.__name__ in text for kind in DATA_DEPENDENT):
        return OF_VALUES
    said = re.findall(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception): .+)$", text, re.MULTILINE)
    return f"code of torch.jit that the step calls here raises {said[-1] if said else 'an error'}"


def _handles_functions(value: Any) -> bool:
    """Whether a tensor is of a class with a ``__torch_function__`` of its own."""
    rules = getattr(getattr(type(value), "__torch_function__", None), "__func__", None)
    return isinstance(value, Tensor) and rules not in (None, PLAIN)


def _specialized(value: Any) -> Any:
    """The value of a symbolic or unbacked number, to which this specializes the plan; other values unchanged."""
    return value.known_value() if is_unbacked(value) else specialized(value)
