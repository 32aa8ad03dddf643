"""Trace an op that is like an earlier one without interpreting it again.

An op of a step passes through torch's tracer, which adds it to the graph, and through its interpreter for tensors
without memory, which finds the shapes of its results; both together take about a millisecond.  Models repeat their
layers, and nearly all of their ops are like an earlier one: the same op, over tensors of the same shapes, strides,
dtypes and devices, with the same other arguments.  The first is interpreted, and what came of it is noted: one node of
the graph, and for each result its shape, or which argument it is, or shares its memory with.  Later ones get a node and
results like these at once.  The step's own Python code, autograd and its hooks run for each as ever.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from actorflow_compiler.core.torch_internals import (
    FakeTensor,
    OpOverload,
    OpTracer,
    PlainDispatchMode,
    TensorSpec,
    current_tracer,
    forward_mode,
    is_interpreted_alike,
    schema_of,
    settings_of_tensors,
    tensor_spec,
    without_meta,
)

__all__ = ["RepeatedOps"]

Before = Callable[[Any, tuple[Any, ...]], None]
_Asked = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]  # an op, and its arguments with nodes in place of tensors
PLAIN = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)  # types of arguments that are equal for the interpreters where they are equal for Python
DEVICE = torch.ops.prim.device.default
VARIES = ("as_strided", "set_", "resize")  # in names of ops whose result depends on how large the memory is


class _Unlike(Exception):
    """An argument by which ops cannot be told apart."""


@dataclass(frozen=True, slots=True)
class _New:
    """A result in memory of its own, or in that of an argument."""

    spec: TensorSpec
    viewed: int | None  # the argument with whose memory it is made, counted among the tensors


@dataclass(frozen=True, slots=True)
class _Same:
    """A result that is an argument, which the op may have changed."""

    spec: TensorSpec
    position: int  # among the tensors of the arguments


@dataclass(frozen=True, slots=True)
class _Known:
    """What has come of an op."""

    results: tuple[_New | _Same | None, ...]  # None: no tensor
    kind: type | None  # of the collection that holds several results; None: there is one result
    positions: int  # how many arguments the node has by position, and
    names: tuple[str, ...]  # by name: torch leaves out what is as by default


_NEW = _Known((), None, 0, ())  # stands for what has come of an op that is the first of its kind


class RepeatedOps(PlainDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """A mode below all others of a trace that answers repeated ops itself.

    It also calls what ``before`` adds for each op, and keeps forward-mode AD off the meta device, on which that finds
    the shapes of sums with tangents of zeros: the sum of a tensor that is traced without memory would stay there.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self._before: list[Before] = []
        self._known: dict[tuple[Any, ...], _Known | None] = {}  # None: such an op must be interpreted each time
        self._names: dict[OpOverload, str] = {}  # how nodes of an op are called; "": it must be interpreted each time
        self._tracer: OpTracer | None = None  # of the first op
        self._in_forward_mode = False  # since then; tangents may be zeros in a backward pass, too
        self.repeated = 0  # how many ops were not interpreted

    @contextlib.contextmanager
    def before(self, call: Before) -> Iterator[None]:
        """Call ``call(op, args)`` before each op inside."""
        self._before.append(call)
        try:
            yield
        finally:
            self._before.remove(call)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Trace an op."""
        if func is DEVICE and type(args[0]) is FakeTensor:  # autograd asks for it several times in each op
            return args[0].device
        for before in self._before:
            before(func, args)
        kwargs = kwargs or {}
        self._in_forward_mode = self._in_forward_mode or forward_mode()
        if self._in_forward_mode:
            args, kwargs = without_meta(args, kwargs)
            return func(*args, **kwargs)
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = _name_of(func)
        tracer = self._tracer = self._tracer or (current_tracer() if name else None)
        if tracer is None or not name or not tracer.interprets(func):
            return func(*args, **kwargs)
        call = _Call(tracer)
        known: _Known | None = None
        with contextlib.suppress(_Unlike, TypeError):  # TypeError: one of them cannot be hashed
            read = call.argument(args)
            named = {given: call.argument(value) for given, value in kwargs.items()}
            key = (func, settings_of_tensors(), *kwargs, *call.key)
            known = self._known.get(key, _NEW)
        if known is None:
            return func(*args, **kwargs)
        asked = (func, read, named)
        if known is _NEW:
            last = tracer.last_node()
            result = func(*args, **kwargs)
            self._known[key] = _observe(tracer, call, tracer.nodes_after(last), asked, result)
            return result
        self.repeated += 1
        return _repeat(tracer, call, known, asked, name)


class _Call:
    """The arguments of an op: its tensors, and a key that is equal for ops whose results are alike."""

    def __init__(self, tracer: OpTracer) -> None:
        self._tracer = tracer
        self.key: list[Any] = []
        self.tensors: list[FakeTensor] = []
        self.specs: list[TensorSpec] = []  # of the tensors, as they are before the op

    def argument(self, given: Any) -> Any:
        """Add an argument to the key; returns it with the trace's nodes in place of tensors.

        Raises _Unlike, or TypeError for a tensor that is sparse or of symbolic sizes.
        """
        kind = type(given)
        if kind is FakeTensor:
            node = self._tracer.node(given)
            if node is None:
                raise _Unlike
            for i, tensor in enumerate(self.tensors):  # whether it is the same as another argument
                if tensor is given:
                    self.key.append(i)
                    break
            spec = tensor_spec(given)
            self.key.append(spec)
            self.tensors.append(given)
            self.specs.append(spec)
            return node
        self.key.append(kind)
        if kind in PLAIN:
            self.key.append(given)
            return given
        if kind is tuple or kind is list:
            self.key.append(len(given))
            return kind([self.argument(one) for one in given])
        raise _Unlike


def _name_of(op: Any) -> str:
    """How nodes of an op are called; "" if an op like it must be interpreted, too, whatever its arguments are."""
    if not isinstance(op, OpOverload) or not is_interpreted_alike(op):
        return ""
    name = schema_of(op).name.partition("::")[2]
    return "" if any(part in name for part in VARIES) or name.startswith("_foreach_") else name


def _observe(tracer: OpTracer, call: _Call, nodes: list[Node], asked: _Asked, result: Any) -> _Known | None:
    """What has come of an op, if that can be repeated: ``nodes`` of the graph, and ``result``."""
    op, read, named = asked
    several = isinstance(result, tuple | list)
    results = [*result] if several else [result]
    if len(nodes) != (1 + len(results) if several else 1) or nodes[0].target is not op:
        return None
    made, positions, names = nodes[0], len(nodes[0].args), tuple(nodes[0].kwargs)
    if made.args != read[:positions] or made.kwargs != {name: named.get(name) for name in names}:
        return None
    if any(n.target is not operator.getitem or n.args != (made, i) for i, n in enumerate(nodes[1:])):
        return None
    if [*map(tensor_spec, call.tensors)] != call.specs:  # such as of ``out=``, which is made as large as the result
        return None
    found: list[_New | _Same | None] = []
    memory: set[int] = set()
    for one in results:
        if one is None and several:
            found.append(None)
            continue
        if type(one) is not FakeTensor or not tracer.is_plain(one):
            return None
        spec, own = tensor_spec(one), tracer.memory(one)
        at = next((i for i, tensor in enumerate(call.tensors) if tensor is one), None)
        if at is not None:
            found.append(_Same(spec, at))
            continue
        viewed = next((i for i, tensor in enumerate(call.tensors) if tracer.memory(tensor) == own), None)
        if viewed is None and own in memory:  # results that share memory
            return None
        memory.add(own)
        like, _ = tracer.make(spec, None if viewed is None else call.tensors[viewed])
        if tensor_spec(like) != spec or tracer.memory_size(like) != tracer.memory_size(one):
            return None
        found.append(_New(spec, viewed))
    return _Known(tuple(found), type(result) if several else None, positions, names)


def _repeat(tracer: OpTracer, call: _Call, known: _Known, asked: _Asked, name: str) -> Any:
    """Add the node of an op to the graph, and return its results."""
    op, read, named = asked
    node = tracer.add_node(op, read[: known.positions], {key: named[key] for key in known.names}, name)
    results: list[Any] = []
    values: list[Any] = []
    for i, result in enumerate(known.results):
        own = node if known.kind is None else tracer.add_node(operator.getitem, (node, i), {}, "getitem")
        if result is None:
            results.append(None)
            values.append(None)
            continue
        if isinstance(result, _Same):
            tensor = call.tensors[result.position]
            _, value = tracer.make(result.spec, tensor)
        else:
            tensor, value = tracer.make(result.spec, None if result.viewed is None else call.tensors[result.viewed])
        tracer.track(tensor, own, value)
        results.append(tensor)
        values.append(value)
    if known.kind is None:
        return results[0]
    node.meta["val"] = known.kind(values)
    return known.kind(results)
