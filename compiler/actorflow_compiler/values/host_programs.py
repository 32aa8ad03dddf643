"""Find the small program that computes a tensor of a trace from state alone, so that the host can run it.

A step may thus read a counter or a flag that it keeps in a tensor, as if it were a Python number.  The plan holds while
the value is the same.  The host computes how calls change the tensor, so it knows the value without waiting for them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from actorflow_compiler.core.torch_internals import OpOverload, constant_of, node_of, real_tensors, schema_of

__all__ = ["EQUAL_TABLE", "VALUE_METHODS", "ValueGuard", "ValueDecisions", "HostProgram", "HostProgramFinder"]

MAX_ELEMENTS = 1024  # of a tensor that the host computes
MAX_STEPS = 200  # at most, in one program
VALUE_METHODS: Mapping[str, Callable[[Tensor], Any]] = MappingProxyType({  # methods by which Python reads a value
    "__bool__": bool, "__float__": float, "__index__": int, "__int__": int, "item": Tensor.item,
    "tolist": Tensor.tolist,
})  # fmt: skip
GETITEM = "getitem"
Step = tuple[str, list[Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class HostProgram:
    """Ops in order, over variables and results of earlier ops; ``result`` is the position of the program's result."""

    inputs: tuple[str, ...]  # variables, at the first positions
    steps: tuple[Step, ...]
    result: int

    def run(self, values: Sequence[Tensor]) -> Tensor:
        """Compute the result from the values of the inputs, which are not changed."""
        with torch.no_grad():
            made: list[Any] = [value.detach().clone() for value in values]
            for name, args, kwargs in self.steps:
                given = [_decoded(a, made) for a in args]
                made.append(_op(name)(*given, **{k: _decoded(v, made) for k, v in kwargs.items()}))
        found: Tensor = made[self.result]
        return found


@dataclass(frozen=True, slots=True)
class ValueGuard:
    """A value that a step read while it was captured: the plan holds while the value is the same."""

    where: str  # the line
    method: str  # a key of ``VALUE_METHODS``
    program: HostProgram
    found: Any

    def now(self, values: Sequence[Tensor]) -> Any:
        """The value for the given values of the program's inputs."""
        return VALUE_METHODS[self.method](self.program.run(values))


@dataclass(frozen=True, slots=True)
class ValueDecisions:
    """How a plan depends on the values of small variables, and how a call changes these variables."""

    asked: tuple[ValueGuard, ...] = ()
    updates: Mapping[str, HostProgram] = field(default_factory=dict)  # variable → its value after a call
    loses: frozenset[str] = frozenset()  # variables that the host cannot compute after a call

    @property
    def numbers(self) -> tuple[ValueGuard, ...]:
        """The guards on more than a bool."""
        return tuple(asked for asked in self.asked if not isinstance(asked.found, bool))

    def to_json(self) -> dict[str, Any]:
        """The decisions as JSON data."""
        return {
            "asked": [[a.where, a.method, _listed(a.program), a.found] for a in self.asked],
            "moves": {name: _listed(program) for name, program in self.updates.items()},
            "loses": sorted(self.loses),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> ValueDecisions:
        """The decisions from data that ``to_json`` made."""
        asked = tuple(
            ValueGuard(where, method, _program(program), found) for where, method, program, found in data["asked"]
        )
        moves = {name: _program(program) for name, program in data["moves"].items()}
        return ValueDecisions(asked, moves, frozenset(data["loses"]))


class HostProgramFinder:
    """Finds host programs in a trace.

    ``names`` are the variables of its first placeholders; those in ``known`` may be inputs of programs.  ``root`` holds
    the constants of the trace.
    """

    def __init__(self, graph: fx.Graph, root: Any, names: Sequence[str], known: Collection[str]) -> None:
        self._root = root
        self._names = dict(zip(graph.find_nodes(op="placeholder"), names, strict=False))
        self._known = known
        self._nodes = [*graph.nodes]
        self._order = {node: at for at, node in enumerate(self._nodes)}
        self._memory: dict[fx.Node, fx.Node] = {}  # view → the node in whose memory it lies
        self._touching: dict[fx.Node, list[fx.Node]] = {}  # that node → its views, and nodes that write its memory
        self._written: set[fx.Node] = set()
        self.writes = 0  # into memory of placeholders
        for node in self._nodes:
            self._record_aliases(node)

    def find_updates(self) -> tuple[dict[str, HostProgram], frozenset[str]]:
        """The ``updates`` and ``loses`` of ``ValueDecisions``, for known variables that the trace writes."""
        written = {n: name for n, name in self._names.items() if n in self._written and name in self._known}
        programs = {name: self.program(node) for node, name in written.items()}
        moves = {name: program for name, program in programs.items() if program is not None}
        return moves, frozenset(programs.keys() - moves.keys())

    def program(self, wanted: fx.Node) -> HostProgram | None:
        """The program that computes a node as it is when the trace ends; None if ``known`` does not suffice."""
        needed: set[fx.Node] = set()
        pending = [wanted]
        while pending:
            node = pending.pop()
            if node in needed:
                continue
            if len(needed) == MAX_STEPS or not self._is_small(node):
                return None
            needed.add(node)
            pending += node.all_input_nodes
            pending += self._touching.get(self._memory.get(node, node), ())
        ordered = sorted(needed, key=self._order.__getitem__)
        inputs = [node for node in ordered if node.op == "placeholder"]
        at = {node: i for i, node in enumerate([*inputs, *(n for n in ordered if n.op != "placeholder")])}
        steps = []
        for node in at:
            if node.op != "placeholder":
                step = self._step_of(node, at)
                if step is None:
                    return None
                steps.append(step)
        return HostProgram(tuple(self._names[node] for node in inputs), tuple(steps), at[wanted])

    def is_outdated(self, copy: fx.Node, whole: fx.Node) -> bool:
        """Whether a copy, or a view of it, is used after its original has changed."""
        mine, memory = self._memory.get(copy, copy), self._memory.get(whole, whole)
        made = self._order[mine]
        changes = [self._order[n] for n in self._touching.get(memory, ()) if _writes(n) and self._order[n] > made]
        ours = [mine, *self._touching.get(mine, ())]
        return bool(changes) and any(self._order[user] > min(changes) for n in ours for user in n.users)

    def _is_small(self, node: fx.Node) -> bool:
        if node.op == "placeholder" and self._names.get(node) not in self._known:
            return False
        values = node.meta.get("val")
        values = values if isinstance(values, tuple | list) else [values]
        return all(not isinstance(v, Tensor) or v.numel() <= MAX_ELEMENTS for v in values)

    def _step_of(self, node: fx.Node, at: Mapping[fx.Node, int]) -> Step | None:
        """A node as a step of a program; None if the host cannot run it."""
        op = node.target
        try:
            if node.op == "get_attr":
                return None if node in self._written else _constant(getattr(self._root, str(op), None))
            if op is operator.getitem:
                return GETITEM, [_encoded(a, at) for a in node.args], {}
            if not isinstance(op, OpOverload) or op.namespace != "aten":
                return None
            if torch.Tag.nondeterministic_seeded in op.tags:
                return None
            return str(op), [_encoded(a, at) for a in node.args], {k: _encoded(v, at) for k, v in node.kwargs.items()}
        except TypeError:
            return None

    def _record_aliases(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            self._record_view(node, node.args[0])
        if not isinstance(node.target, OpOverload):
            return
        schema = schema_of(node.target)
        given = [*zip(schema.arguments, node.args, strict=False)]
        given += [(a, node.kwargs[a.name]) for a in schema.arguments if a.name in node.kwargs]
        aliases = [(a.alias_info, value) for a, value in given if a.alias_info is not None]
        for info, value in aliases:
            for one in value if isinstance(value, list | tuple) else [value]:
                if not isinstance(one, fx.Node):
                    continue
                if info.is_write:
                    memory = self._memory.get(one, one)
                    self._written.add(memory)
                    self.writes += memory.op == "placeholder"
                    self._touching.setdefault(memory, []).append(node)
                if schema.returns:
                    self._record_view(node, one)

    def _record_view(self, node: fx.Node, other: Any) -> None:
        if isinstance(other, fx.Node) and node not in self._memory:
            memory = self._memory[node] = self._memory.get(other, other)
            self._touching.setdefault(memory, []).append(node)


def _equal(one: Tensor, other: Tensor) -> Any:
    """``torch.equal`` of tensors that depend on constants alone, which functions of torch call, too."""
    found = [node_of(tensor) for tensor in (one, other)]
    programs = [at and HostProgramFinder(at[0].graph, at[1], (), ()).program(at[0]) for at in found]
    if None in programs:
        return NotImplemented
    with real_tensors():
        return torch.equal(*(program.run(()) for program in programs if program is not None))


EQUAL_TABLE: Mapping[OpOverload, Callable[..., Any]] = MappingProxyType({torch.ops.aten.equal.default: _equal})


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable


def _constant(tensor: Any) -> Step | None:
    """The step that makes a constant of a trace."""
    value = constant_of(tensor) if isinstance(tensor, Tensor) else None
    if value is None or value.numel() > MAX_ELEMENTS or value.is_complex():
        return None
    with real_tensors():
        return "tensor", [value.tolist()], {"dtype": _encoded(value.dtype, {})}


def _encoded(value: Any, at: Mapping[fx.Node, int]) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case fx.Node():
            return {"step": at[value]}
        case torch.dtype():
            return {"dtype": str(value).removeprefix("torch.")}
        case torch.device():
            return {"device": "cpu"}
        case torch.layout() if value is torch.strided:
            return None
        case torch.memory_format() if value in (torch.preserve_format, torch.contiguous_format):
            return None
        case list() | tuple():
            return [_encoded(v, at) for v in value]
    raise TypeError(f"{value!r} does not travel")


def _decoded(value: Any, made: Sequence[Any]) -> Any:
    if isinstance(value, list):
        return [_decoded(v, made) for v in value]
    if isinstance(value, dict):
        ((kind, what),) = value.items()
        return {"step": lambda: made[what], "dtype": lambda: getattr(torch, what), "device": lambda: what}[kind]()
    return value


def _op(name: str) -> Callable[..., Any]:
    if name == GETITEM:
        return operator.getitem
    if name == "tensor":
        return torch.tensor
    namespace, op, overload = name.split(".")
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), op), overload)
    return found


def _listed(program: HostProgram) -> list[Any]:
    return [program.inputs, program.steps, program.result]


def _program(data: Sequence[Any]) -> HostProgram:
    inputs, steps, result = data
    return HostProgram(tuple(inputs), tuple((name, args, kwargs) for name, args, kwargs in steps), result)
