"""Generate a straight-line Python function from the body of a plan.

A plan is data, so an op can only be one that this process already knows: an ATen op, an op of
``actorflow_compiler.library``, or one of a namespace that the script's own imports registered.
"""

from __future__ import annotations

import keyword
import math
import re
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.ops import Arg, Ref, Symbol
from actorflow_compiler.core.torch_internals import OpOverload, schema_of
from actorflow_compiler.custom_ops.native_kernels import native_kernel
from actorflow_compiler.plan.plan import Body, Step

Kernel = Callable[[list[Any]], tuple[Any, ...]]
"""Takes the operands in a list and returns the outputs.  Empties the list, so that operands die at their last use."""

# Namespaces of torch that print, raise, read files or talk to other ranks behind the runtime's back.
_REFUSED = frozenset({"prim", "profiler", "c10d", "_c10d_functional", "symm_mem", "rpc", "inductor", "higher_order"})
_REFUSED_OPS = frozenset({"aten.from_file", "aten.save", "aten.warn"})
_NAME = re.compile(r"[A-Za-z_]\w*")
_SYMBOLS = (torch.dtype, torch.layout, torch.memory_format)


class Kernels:
    """Generates the kernel of each distinct body once, for one device, and forgets it when nothing holds it any more.

    ``library`` holds the ops named ``actorflow.NAME``; each takes tensors and plain Python
    arguments (tuples for lists) and returns a tensor, or a tuple where its step has several outputs.
    """

    def __init__(self, device: torch.device, library: Mapping[str, Callable[..., Any]]) -> None:
        self._device = device
        self.library = library
        self._made: MutableMapping[Body, Kernel] = weakref.WeakValueDictionary()

    def kernel(self, body: Body) -> Kernel:
        """The function of a body.

        It must run with gradients off.  Raises PlanError for an op or a symbol that is not allowed.
        """
        found = self._made.get(body)
        if found is None:
            found = self._made[body] = _Writer(self._device, self.library).write(body)
        return found


class _Writer:
    """Turns one body into Python source, in which all names are generated, so that a plan cannot inject code."""

    def __init__(self, device: torch.device, library: Mapping[str, Callable[..., Any]]) -> None:
        self._device = device
        self._library = library
        self._globals: dict[str, Any] = {}
        self._names: dict[Any, str] = {}

    def write(self, body: Body) -> Kernel:
        last: dict[int, int] = {}
        for number, step in enumerate(body.steps):
            for value in (*step.reads(), *step.outs):
                last[value] = number
        for value in body.outputs:
            last.pop(value, None)
        names = "".join(f"v{i}, " for i in range(body.inputs))
        unused = [i for i in range(body.inputs) if i not in last and i not in body.outputs]
        lines = ["def kernel(inputs):"]
        lines.append(f" {names}= inputs; inputs.clear(){_forget(unused)}" if names else " inputs.clear()")
        for number, step in enumerate(body.steps):
            dying = {v for v in (*step.reads(), *step.outs) if v >= 0 and last.get(v) == number}
            lines.append(f" {self._step(step)}{_forget(sorted(dying))}")
        outputs = "".join(f"v{i}, " for i in body.outputs)
        lines.append(f" return ({outputs})")
        source = "\n".join(lines)
        exec(compile(source, _source_name(body), "exec"), self._globals)
        kernel: Kernel = self._globals.pop("kernel")  # what it refers to must not refer to it
        return kernel

    def _step(self, step: Step) -> str:
        """The line of source for a step; step 0 is line 3, which ``culprit`` relies on."""
        op, unpack = self._op(step)
        args = [self._arg(a, step) for a in step.args]
        for key, value in step.kwargs:
            if not _NAME.fullmatch(key):
                raise PlanError(f"op {step.op}: argument name {key!r} was found; a Python name was expected")
            text = self._arg(value, step)
            args.append(f"**{{{self._bind(('key', key), key)}: {text}}}" if keyword.iskeyword(key) else f"{key}={text}")
        call = f"{op}({', '.join(args)})"
        if all(out < 0 for out in step.outs):
            return call
        if not unpack:
            return f"v{step.outs[0]} = {call}"
        spare = any(out < 0 for out in step.outs)
        outs = "".join(f"v{out}, " if out >= 0 else "_, " for out in step.outs)
        return f"{outs}= {call}{'; del _' if spare else ''}"

    def _op(self, step: Step) -> tuple[str, bool]:
        """The global that holds a step's op, and whether its result is a tuple to unpack."""
        found = resolve(step.op, self._library)
        unpack = len(step.outs) > 1
        if isinstance(found, OpOverload):
            returns = schema_of(found).returns
            many = len(returns) > 1
            if many and step.outs and len(returns) != len(step.outs):
                raise PlanError(f"op {step.op} returns {len(returns)} values; the plan names {len(step.outs)} outputs")
            unpack = many or (len(returns) == 1 and isinstance(returns[0].type, torch.ListType))
            found = native_kernel(found)
        return self._bind(step.op, found), unpack

    def _bind(self, key: Any, value: Any) -> str:
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"g{len(self._names)}"
            self._globals[name] = value
        return name

    def _arg(self, arg: Arg, step: Step) -> str:
        if isinstance(arg, Ref):
            return f"v{int(arg.index)}"
        if isinstance(arg, tuple):
            return f"({''.join(self._arg(part, step) + ', ' for part in arg)})"
        if arg is None or arg is True or arg is False:
            return str(arg)
        if type(arg) is int or (type(arg) is float and math.isfinite(arg)):
            return repr(arg)  # repr of a float is exact
        if isinstance(arg, Symbol):
            return self._bind(("symbol", arg.text), self._symbol(arg.text, step))
        if type(arg) in (str, float):
            return self._bind((type(arg), repr(arg)), arg)
        raise PlanError(
            f"op {step.op}: an argument of type {type(arg).__name__} was found; "
            "a number, string, None, Symbol, Ref or tuple of these was expected"
        )

    def _symbol(self, text: str, step: Step) -> Any:
        if text.startswith("device:"):
            return self._device
        found = getattr(torch, text.removeprefix("torch."), None) if text.startswith("torch.") else None
        if not isinstance(found, _SYMBOLS):
            raise PlanError(
                f"op {step.op}: symbol {text!r} was found; "
                "a dtype, layout or memory format of torch, or device:NAME, was expected"
            )
        return found


def resolve(op: str, library: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The callable of an op's name.

    >>> resolve("aten.mm.default", {})
    <OpOverload(op='aten.mm', overload='default')>

    Raises PlanError, which says what is allowed, for an op that is unknown or refused.
    """
    namespace, _, rest = op.partition(".")
    if namespace == "actorflow":
        if rest in library:
            return library[rest]
        raise PlanError(f"op {op!r} is not in actorflow's library; known: {', '.join(sorted(library)) or 'none'}")
    name, _, overload = rest.partition(".")
    names = (namespace, name, overload)
    if all(map(_NAME.fullmatch, names)) and namespace not in _REFUSED and f"{namespace}.{name}" not in _REFUSED_OPS:
        try:
            found = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        except (AttributeError, RuntimeError):
            found = None
        if isinstance(found, OpOverload):
            return found
    raise PlanError(
        f"op {op!r} is refused: expected aten.NAME.OVERLOAD, actorflow.NAME, or an op of a namespace that was "
        "registered in torch.ops on this rank; if it comes from a library, import that at the top of the script"
    )


def culprit(body: Body, error: BaseException) -> int | None:
    """The index of the body's step in which ``error`` was raised; None if it was raised elsewhere."""
    name = _source_name(body)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == name:
            number = trace.tb_lineno - 3
            return number if 0 <= number < len(body.steps) else None
        trace = trace.tb_next
    return None


def _source_name(body: Body) -> str:
    return f"<actorflow body of {len(body.steps)} steps>"


def _forget(values: list[int]) -> str:
    return "; del " + ", ".join(f"v{v}" for v in values) if values else ""


__all__ = ["Kernel", "Kernels", "culprit", "resolve"]
