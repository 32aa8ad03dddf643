"""Rewrite a trace so that no op changes a tensor: an in-place change becomes a new value, which later ops read.

Ops that only compute stay as they were traced.  An op that changes tensors, or that has a decomposition, runs once more
on the trace's tensors, which have no memory; the ops that it then calls take its place.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.func import functionalize
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from actorflow_compiler.core.errors import CaptureError
from actorflow_compiler.core.torch_internals import FakeTensor, OpOverload, dispatching_to, is_composed, schema_of
from actorflow_compiler.core.user_code import traced_line
from actorflow_compiler.substitutes.decomposition_table import Decomposition

__all__ = ["Expansion", "rewrite_in_place_ops"]

aten = torch.ops.aten
DEVICE = torch.ops.prim.device.default
FOREACH = "aten::_foreach_"  # of ops over lists of tensors
FUSED = "aten::_fused_"  # of optimizers' ops over lists of tensors
OTHER_NAMES: Mapping[str, Callable[..., Any]] = {"norm": torch.linalg.vector_norm}  # where it is no method of Tensor
RESIZES = (aten.resize_.default, aten.resize_as_.default)
IDENTITIES = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)  # views of all of their argument
Expansion = Callable[[Node, OpOverload], Decomposition | None]


def rewrite_in_place_ops(
    trace: GraphModule,
    table: Mapping[OpOverload, Decomposition],
    expansion: Expansion,
    failed: Callable[[Node, Exception], NoReturn],
) -> None:
    """Rewrite ``trace`` such that only ``aten.copy_`` into its placeholders, at its end, changes tensors.

    - ``table``: decompositions of ops; one that returns NotImplemented leaves the op as it is.
    - ``expansion``: a decomposition of an op of the trace itself, which takes precedence; None if it has none.
    - ``failed``: raises an exception for one that a node of the trace has raised as it ran again.
    """
    _Rewriter(trace, table, expansion, failed).run()


@dataclass(slots=True, eq=False)
class _Storage:
    """The memory that a tensor of the trace shares with its views."""

    version: int = 0  # the number of changes so far


@dataclass(slots=True, eq=False)
class _Value:
    """A tensor of the trace: the node that computes what it holds, which its storage's changes replace."""

    node: Node
    example: Tensor  # without memory
    storage: _Storage
    version: int  # of the storage, for which ``node`` is right
    view: _View | None = None  # how it is made of another tensor of its storage


@dataclass(frozen=True, slots=True, eq=False)
class _View:
    """The op that makes a view."""

    source: _Value
    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    position: int  # of the source among ``args``
    index: int | None  # of the view among the results of the op; None: the op has one result
    result: Any  # of the op, without memory

    def args_for(self, source: Any) -> tuple[Any, ...]:
        """The arguments of the op that make the same view of ``source``."""
        return *self.args[: self.position], source, *self.args[self.position + 1 :]


class _Rewriter:
    """See ``rewrite_in_place_ops``."""

    def __init__(
        self,
        trace: GraphModule,
        table: Mapping[OpOverload, Decomposition],
        expansion: Expansion,
        failed: Callable[[Node, Exception], NoReturn],
    ) -> None:
        self._trace, self._graph = trace, trace.graph
        self._table, self._expansion, self._failed = table, expansion, failed
        self._values: dict[Node, _Value] = {}  # of nodes whose storage has views or changes
        self._lists: dict[Node, list[_Value | None]] = {}  # of replaced ops with several results; None: no tensor
        self._views: dict[Node, _View] = {}  # ops whose results are several views
        self._dead: list[Node] = []  # replaced nodes
        self._at: Node = self._graph.output_node()  # the node that is rewritten
        self._running: dict[int, tuple[Tensor, _Value]] = {}  # the tensors of the op that runs, by id
        self._changes: list[tuple[Tensor, Tensor]] = []  # that the op has made: tensors, and what they hold now

    def run(self) -> None:
        """Rewrite all nodes, and write what the placeholders hold at the end."""
        nodes = list(self._graph.nodes)
        with torch.no_grad():
            for self._at in nodes:
                if self._at.op == "call_function":
                    self._rewrite(self._at)
        self._read_current(self._graph.output_node())
        for node in nodes:
            value = self._values.get(node) if node.op == "placeholder" else None
            if value is not None and value.storage.version:
                self._call(aten.copy_.default, (node, self._current(value)), {}, value.example)
        for node in reversed(self._dead):
            self._graph.erase_node(node)

    def _rewrite(self, node: Node) -> None:
        op = node.target
        if op is operator.getitem:
            self._take_item(node, *node.args)
        elif not isinstance(op, OpOverload):
            self._keep(node)
        elif _has_failed(node):
            self._dead.append(node)
        elif (op in IDENTITIES or op is aten.detach_.default) and isinstance(node.args[0], Node):
            self._replace(node, self._value_of(node.args[0]))
        elif op in RESIZES:
            self._resize(node)
        elif op.overloadpacket is aten.set_:
            self._set(node, op)
        elif (view := _without_change(op)) is not None:
            self._view_in_place(node, view, node.args[1:], node.kwargs)
        elif (run := self._run_of(node, op)) is None:
            self._keep(node)
        else:
            try:
                self._run(node, op, run)
            except Exception as error:
                self._failed(node, error)

    # nodes that stay

    def _keep(self, node: Node) -> None:
        """Let a node stay, over what its arguments hold now; it may make views."""
        position = _viewed_argument(node.target) if isinstance(node.target, OpOverload) else None
        viewed = None if position is None else node.args[position]  # a number, for a view of a number
        source = self._value_of(viewed) if isinstance(viewed, Node) else None
        self._read_current(node)
        if source is not None and position is not None:
            self._add_view(node, source, position)

    def _read_current(self, node: Node) -> None:
        """Let a node read what its arguments hold now."""
        if any(self._now(read) is not read for read in node.all_input_nodes):
            node.args, node.kwargs = map_arg(node.args, self._now), map_arg(node.kwargs, self._now)

    def _add_view(self, node: Node, source: _Value, position: int) -> None:
        """Note that the results of a node are views of ``source``."""
        assert isinstance(node.target, OpOverload)
        result, several = node.meta["val"], isinstance(node.meta["val"], list | tuple)
        view = _View(source, node.target, node.args, node.kwargs, position, 0 if several else None, result)
        if several:
            self._views[node] = view
        else:
            self._values[node] = _Value(node, result, source.storage, source.storage.version, view)

    def _take_item(self, node: Node, source: Any, index: Any) -> None:
        """Rewrite a node that takes one result of an op with several."""
        if source in self._lists:
            found = self._lists[source][index]
            self._dead.append(node) if found is None else self._replace(node, found)
        elif (view := self._views.get(source)) is not None:
            view = _View(view.source, view.op, view.args, view.kwargs, view.position, index, view.result)
            storage = view.source.storage
            self._values[node] = _Value(node, node.meta["val"], storage, storage.version, view)

    # nodes that are replaced

    def _replace(self, node: Node, value: _Value) -> None:
        """Let other nodes read ``value`` in place of a node."""
        self._values[node] = value
        self._dead.append(node)

    def _view_in_place(
        self, node: Node, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:  # fmt: skip
        """Replace an op that gives its argument another shape by ``op``, which returns a view."""
        source, result = self._value_of(node.args[0]), node.meta["val"]
        self._refuse_new_shape(node.args[0], result)
        made = self._call(op, (self._current(source), *args), kwargs, result)
        self._add_view(made, source, 0)
        self._replace(node, self._values[made])

    def _resize(self, node: Node) -> None:
        """Replace an op that resizes its argument by a view of what stays, or by an empty tensor if nothing does."""
        source, result = self._value_of(node.args[0]), node.meta["val"]
        old, size = source.example, list(result.shape)
        if (result.shape, result.stride()) == (old.shape, old.stride()):
            self._replace(node, source)
            return
        if result.numel() <= old.numel() and old.is_contiguous():
            self._view_in_place(node, aten.as_strided.default, (size, list(result.stride())), {})
            return
        self._refuse_new_shape(node.args[0], result)
        if old.numel() or source.view is not None:
            raise CaptureError(
                f"{traced_line(node.meta)}\n  {node.target} changes a tensor {list(old.shape)} to {size}, in memory "
                f"that other tensors may share; expected: a new tensor of that size"
            )
        kwargs = {"dtype": result.dtype, "device": result.device}
        self._replace(node, self._value_of(self._call(aten.empty.memory_format, (size,), kwargs, result)))

    def _set(self, node: Node, op: OpOverload) -> None:
        """Let a tensor that the step has made be another one from now on, with which it shares its memory."""
        if op is not aten.set_.source_Tensor or tensor_changed_by(node.args[0]).op == "placeholder":
            raise CaptureError(
                f"{traced_line(node.meta)}\n  set_ gives a tensor the memory of another one, which a plan cannot do to "
                f"a tensor that it keeps, or to a part of one; expected: p.copy_(x) under torch.no_grad()"
            )
        self._replace(node, self._value_of(node.args[1]))

    def _resize_outs(self, node: Node, op: OpOverload) -> None:
        """Give tensors that an op takes as ``out=`` the size that it gives them."""
        results = node.meta.get("val")
        for at, position in _written_arguments(op).items():
            result: Any = results[at] if isinstance(results, list | tuple) else results
            value = self._value_of(_argument(op, node, position))
            if isinstance(result, Tensor) and result.shape != value.example.shape:
                self._refuse_new_shape(_argument(op, node, position), result)
                if value.view is not None:
                    raise CaptureError(
                        f"{traced_line(node.meta)}\n  out= is a view of {list(value.example.shape)}; expected: "
                        f"{list(result.shape)}, the size of the result"
                    )
                value.example = result

    def _refuse_new_shape(self, changed: Any, result: Tensor) -> None:
        """Raise CaptureError if a tensor that outlives the step would have another shape from now on."""
        tensor = tensor_changed_by(changed)
        if tensor.op != "placeholder":
            return
        old = tensor.meta["val"]
        if (old.shape, old.stride()) != (result.shape, result.stride()):
            raise CaptureError(
                f"{traced_line(self._at.meta)}\n  the step changes the shape of a tensor that it did not make from "
                f"{list(old.shape)} to {list(result.shape)}, in place; a plan keeps it. Expected: a view of another "
                f"shape (t() or unsqueeze() in place of t_() or unsqueeze_()), or a new tensor"
            )

    def _run_of(self, node: Node, op: OpOverload) -> Decomposition | None:
        """What runs in place of an op of the trace; None if the op stays."""
        untraced = "val" not in node.meta and bool(schema_of(op).returns)
        found = self._expansion(node, op) or self._table.get(op)
        runs = schema_of(op).is_mutable or untraced or schema_of(op).name.startswith(FOREACH)
        return op if found is None and runs else found

    def _run(self, node: Node, op: OpOverload, run: Decomposition) -> None:
        """Replace a node by the ops that ``run`` calls; it stays if ``run`` returns NotImplemented."""
        self._resize_outs(node, op)
        args, kwargs = map_arg(node.args, self._given), map_arg(node.kwargs, self._given)
        if schema_of(op).name.startswith(FOREACH):
            result = [self._functionalized(*call) for call in _calls_for_each(op, args, kwargs)]
        elif schema_of(op).is_mutable and schema_of(op).name.startswith(FUSED):  # into ops, and copies of their results
            result = self._called(run, args, kwargs)
        else:
            result = self._functionalized(run, args, kwargs)
        if result is NotImplemented:
            self._running.clear()
            self._keep(node)
            return
        written = _written_arguments(op)
        if isinstance(result, list | tuple):
            values = [self._running_value(one) if isinstance(one, Tensor) else None for one in result]
            for at, position in written.items():
                values[at] = self._value_of(_argument(op, node, position))
            self._lists[node] = values
            self._dead.append(node)
        elif 0 in written:
            self._replace(node, self._value_of(_argument(op, node, written[0])))
        elif isinstance(result, Tensor):
            self._replace(node, self._running_value(result))
        else:
            self._dead.append(node)
        self._running.clear()

    # ops that run in place of a node

    def _dispatch(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an op, and add it to the graph; the op may be a decomposition's, or change tensors."""
        if op is DEVICE and type(args[0]) is FakeTensor:  # torch asks for it several times in each op
            return args[0].device
        if op.namespace == "prim":
            return op(*args, **kwargs)
        if (decomposition := self._table.get(op)) is not None:
            with dispatching_to(self._dispatch):
                result = decomposition(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if is_composed(op):
            with dispatching_to(self._dispatch):
                return op.decompose(*args, **kwargs)
        if op is aten.copy_.default:  # by functionalize, at its end, or of a fused optimizer
            assert (args[0].dtype, args[0].shape) == (args[1].dtype, args[1].shape)
            self._changes.append((args[0], args[1]))
            return args[0]
        assert not schema_of(op).is_mutable, op
        if op in IDENTITIES:
            result = op(*args, **kwargs)
            self._running[id(result)] = result, self._running_value(args[0])
            return result
        result = op(*args, **kwargs)
        return self._add(op, args, kwargs, result)

    def _functionalized(self, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function that may change its arguments; afterwards, assign the new values to them."""
        return self._called(functionalize(run, remove="mutations"), args, kwargs)

    def _called(self, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function that changes tensors by copies into them alone; afterwards, assign their new values."""
        with dispatching_to(self._dispatch):
            result = run(*args, **kwargs)
        changes, self._changes = self._changes, []
        for tensor, new in changes:
            self._assign(self._running_value(tensor), new)
        return result

    def _add(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        """Add an op that has run to the graph; returns its result."""
        position = _viewed_argument(op)
        viewed = None if position is None else args[position]
        source = self._running_value(viewed) if isinstance(viewed, Tensor) else None
        read, named = pytree.tree_map_only(Tensor, lambda t: self._current(self._running_value(t)), (args, kwargs))
        node = self._call(op, tuple(read), named, result)
        if source is not None and position is not None:
            self._add_view(node, source, position)
        if isinstance(result, Tensor):
            self._running[id(result)] = result, self._value_of(node)
        elif isinstance(result, list | tuple):
            for index, one in enumerate(result):
                if isinstance(one, Tensor):
                    item = self._call(operator.getitem, (node, index), {}, one)
                    self._take_item(item, node, index)
                    self._running[id(one)] = one, self._value_of(item)
        return result

    def _assign(self, value: _Value, new: Tensor) -> None:
        """Let a tensor hold another one's values from now on."""
        node = self._current(self._running_value(new))
        if value.view is None:
            value.storage.version += 1
        else:
            base = value
            ops: list[_View] = []
            while base.view is not None:
                ops.append(base.view)
                base = base.view.source

            def write(tensor: Tensor, new: Tensor) -> None:
                for view in reversed(ops):
                    made = view.op(*view.args_for(tensor), **view.kwargs)
                    tensor = made if view.index is None else made[view.index]
                tensor.copy_(new)

            self._functionalized(write, (self._tensor_of(base), new), {})
        value.node, value.version = node, value.storage.version

    # values

    def _value_of(self, node: Any) -> _Value:
        """The value of a node that is a tensor."""
        if node not in self._values:
            self._values[node] = _Value(node, self._example_of(node), _Storage(), 0)
        return self._values[node]

    def _running_value(self, tensor: Tensor) -> _Value:
        """The value of a tensor of the op that runs; a tensor that the op has made of Python values is a constant."""
        if id(tensor) not in self._running:
            name = f"_constant{len(self._running)}_of_{self._at.name}"
            setattr(self._trace, name, tensor)
            with self._graph.inserting_before(self._at):
                node = self._graph.get_attr(name)
            node.meta["val"] = tensor
            self._running[id(tensor)] = tensor, self._value_of(node)
        return self._running[id(tensor)][1]

    def _given(self, node: Node) -> Any:
        """The tensor of a node, as an argument of the op that runs."""
        if not isinstance(self._example_of(node), Tensor):
            return self._example_of(node)
        return self._tensor_of(self._value_of(node))

    def _tensor_of(self, value: _Value) -> Tensor:
        """The tensor, without memory, that stands for a value while an op runs."""
        example = value.example
        if example.is_inference():  # such a tensor can be changed in inference mode only
            example = torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device=example.device)
            value.example = example
        self._running[id(example)] = example, value
        return example

    def _example_of(self, node: Node) -> Any:
        """The tensor, without memory, that a node of the trace made."""
        if "val" not in node.meta and node.op == "get_attr":
            return operator.attrgetter(str(node.target))(self._trace)
        return node.meta["val"]

    def _now(self, node: Node) -> Node:
        """The node that computes what ``node`` computes, after the changes so far."""
        value = self._values.get(node)
        return node if value is None else self._current(value)

    def _current(self, value: _Value) -> Node:
        """The node that computes what a tensor holds after the changes so far."""
        if value.version != value.storage.version:
            view = value.view
            assert view is not None
            value.node = self._call(view.op, view.args_for(self._current(view.source)), view.kwargs, view.result)
            if view.index is not None:
                value.node = self._call(operator.getitem, (value.node, view.index), {}, value.example)
            value.version = value.storage.version
        return value.node

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Node:
        """Add a node before the node that is rewritten, as if it were of the same line."""
        with self._graph.inserting_before(self._at):
            node = self._graph.call_function(target, args, dict(kwargs))
        node.meta["val"] = result
        if "custom" in self._at.meta:
            node.meta["custom"] = self._at.meta["custom"]
        return node


def tensor_changed_by(node: Any) -> Node:
    """The node that made the tensor that a node returns, which in-place ops have only changed."""
    while isinstance(node.target, OpOverload) and 0 in _written_arguments(node.target) and node.args:
        position = _written_arguments(node.target)[0]
        node = _argument(node.target, node, position)
    assert isinstance(node, Node)
    return node


def _calls_for_each(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[Callable[..., Any], list[Any], dict[str, Any]]]:
    """The calls, one for each tensor, that an op over lists makes in turn: a list may hold a tensor twice, or views."""
    name, count = schema_of(op).name.removeprefix(FOREACH), len(args[0])
    run = OTHER_NAMES.get(name) or getattr(Tensor, name)

    def part(value: Any, i: int) -> Any:
        return value[i] if isinstance(value, list | tuple) and len(value) == count else value

    return [(run, [part(a, i) for a in args], {k: part(v, i) for k, v in kwargs.items()}) for i in range(count)]


def _has_failed(node: Node) -> bool:
    """Whether torch refused an op while it was traced, and the step went on without its result."""
    assert isinstance(node.target, OpOverload)
    schema = schema_of(node.target)
    return not schema.is_mutable and bool(schema.returns) and not node.users and "val" not in node.meta


@functools.cache
def _without_change(op: OpOverload) -> OpOverload | None:
    """The op that returns a view where ``op`` changes the shape of its argument; None if there is none."""
    packet = getattr(aten, op.overloadpacket.__name__.removesuffix("_"), None)
    if torch.Tag.inplace_view not in op.tags or packet is None:
        return None
    types = [str(a.type) for a in schema_of(op).arguments]
    found = (getattr(packet, name) for name in packet.overloads())
    alike = (o for o in found if [str(a.type) for a in schema_of(o).arguments] == types)
    return next((o for o in alike if _viewed_argument(o) == 0), None)


@functools.cache
def _viewed_argument(op: OpOverload) -> int | None:
    """The position of the argument that the results of an op are views of; None if they are new tensors."""
    results = [r.alias_info for r in schema_of(op).returns if r.alias_info is not None]
    if not results or results[0].is_write:
        return None
    found = (i for i, a in enumerate(schema_of(op).arguments) if a.alias_info is not None and not a.alias_info.is_write)
    return next(found, None)


@functools.cache
def _written_arguments(op: OpOverload) -> dict[int, int]:
    """By the position of a result that is an argument which the op has changed: the position of the argument."""
    schema = schema_of(op)
    arguments = [(i, a.alias_info.before_set) for i, a in enumerate(schema.arguments) if a.alias_info is not None]
    results = [(i, r.alias_info) for i, r in enumerate(schema.returns) if r.alias_info is not None]
    return {at: i for at, info in results if info.is_write for i, names in arguments if names == info.before_set}


def _argument(op: OpOverload, node: Node, position: int) -> Any:
    """An argument of a node, by its position in the op's schema."""
    return node.args[position] if position < len(node.args) else node.kwargs[schema_of(op).arguments[position].name]
