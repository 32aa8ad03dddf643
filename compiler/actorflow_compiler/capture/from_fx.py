"""Convert a traced and functionalised fx graph into our logical graph, without identities and dead code."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from actorflow_compiler.capture.pair_rows import pair_rows
from actorflow_compiler.capture.unsort import unsort
from actorflow_compiler.core.errors import CaptureError
from actorflow_compiler.core.garbage_collection import instances
from actorflow_compiler.core.ops import Arg, Meta, Phase, Ref, Symbol
from actorflow_compiler.core.tensor_bytes import contents
from actorflow_compiler.core.torch_internals import DATA_DEPENDENT, OpOverload, constant_of, real_tensors, schema_of
from actorflow_compiler.core.user_code import traced_line
from actorflow_compiler.custom_ops.optimizers import IN_PLACE, SCALARS, arguments
from actorflow_compiler.custom_ops.random import DRAW, SEED, UNIFORM, uniform_arguments
from actorflow_compiler.graph.graph import CALL_INPUTS, Graph, Input, InputKind, Node, merge_equal, prune, verify
from actorflow_compiler.numbers.ops import NUMBER, TAKES_PLAIN_NUMBER
from actorflow_compiler.plan.plan import Constant
from actorflow_compiler.substitutes.random_table import is_random
from actorflow_compiler.values.checks import CHECKED, Check
from actorflow_compiler.values.gradients import KEPT_GRADIENT, LOST_GRADIENT, GradientEffects
from actorflow_compiler.values.host_programs import ValueDecisions
from actorflow_compiler.values.predicated_updates import predicate_updates
from actorflow_compiler.values.reads import DEPENDS_ON_VALUES, LOOKS_AT_A_VALUE
from actorflow_compiler.values.variables import WITH_PARAMETERS

IDENTITIES = frozenset(
    {
        "aten.detach.default",
        "aten.alias.default",
        "aten.lift_fresh_copy.default",
        "aten.lift_fresh.default",
        "aten.lift.default",
    }
)
FILLS: Mapping[str, Callable[[tuple[Arg, ...]], Arg]] = {
    "aten.ones_like.default": lambda _: 1,
    "aten.zeros_like.default": lambda _: 0,
    "aten.full_like.default": lambda args: args[1],
    "aten.new_ones.default": lambda _: 1,
    "aten.new_zeros.default": lambda _: 0,
    "aten.new_full.default": lambda args: args[2],
    "aten.zeros.default": lambda _: 0,
    "aten.zero.default": lambda _: 0,
    "aten.ones.default": lambda _: 1,
    "aten.empty_like.default": lambda _: 0,
    "aten.new_empty.default": lambda _: 0,
    "aten.empty.memory_format": lambda _: 0,
    "aten.scalar_tensor.default": lambda args: args[0],
}
Kwargs = tuple[tuple[str, Arg], ...]
LARGEST_CONSTANT = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class PlaceholderNames:
    """What the trace's placeholders are, in order."""

    state: tuple[tuple[str, str], ...]  # (name, kind of variable, or LOST for the gradient of the parameter so named)
    arguments: tuple[tuple[str, str], ...]  # (name, "batch" | "argument")


@dataclass(frozen=True, slots=True)
class Capture:
    """The logical graph of a step and what its inputs stand for."""

    graph: Graph
    kinds: Mapping[str, str]  # variable → "parameter" | "buffer" | "optimizer" | "gradient" | "tensor"
    constants: tuple[Constant, ...]
    parameter: Mapping[str, str]  # optimizer's state or gradient → its parameter
    gradients: GradientEffects = field(default_factory=GradientEffects)  # of the step on gradients
    decisions: ValueDecisions = field(default_factory=ValueDecisions)  # that depend on small variables
    checks: tuple[Check, ...] = ()  # if there are any, the last result says for each whether it raises


def to_graph(
    module: torch.fx.GraphModule, names: PlaceholderNames, parameter: Mapping[str, str], fresh: bool
) -> Capture:
    """Convert a trace.

    ``parameter`` maps optimizer state to parameters; ``fresh`` says that no optimizer has stepped yet.
    """
    return _Converter(module, names, parameter, fresh).run()


class _Converter:
    def __init__(
        self,
        module: torch.fx.GraphModule,
        names: PlaceholderNames,
        parameter: Mapping[str, str],
        fresh: bool,
    ) -> None:
        self.module, self.names, self.parameter, self.fresh = module, names, parameter, fresh
        self.metas: dict[int, Meta] = {}
        self.value: dict[torch.fx.Node, Any] = {}  # fx node → value number, or a list of them
        self.inputs: list[Input] = []
        self.nodes: list[Node] = []
        self.updates: dict[int, int] = {}
        self.constants: list[Constant] = []
        self.scalars: dict[tuple[str, str], int] = {}  # (name, dtype) → the scalar input
        self.numbers: dict[int, int] = {}  # output of actorflow.number → its scalar input
        self.after_backward: set[int] = set()
        self.lost: set[int] = set()  # gradients of earlier calls that were not kept
        self.kept: set[int] = set()  # kept gradients of earlier calls, and sums of these with new ones
        self.made: dict[int, tuple[str, tuple[Arg, ...]]] = {}
        self.checks: list[tuple[int, dict[str, int]]] = []  # (whether it raises, variable → its value there)

    def new(self, meta: Meta) -> int:
        number = len(self.metas)
        self.metas[number] = meta
        return number

    def run(self) -> Capture:
        for fx_node in self.module.graph.nodes:
            if fx_node.op == "placeholder":
                self.placeholder(fx_node)
            elif fx_node.op == "get_attr":
                self.constant(fx_node)
            elif fx_node.op == "call_function":
                try:
                    self.call(fx_node)
                except DATA_DEPENDENT:
                    raise CaptureError(f"{traced_line(fx_node.meta)}\n  {DEPENDS_ON_VALUES}") from None
        output: Any = self.module.graph.output_node().args[0]
        results = tuple(self.value[r] for r in (output if isinstance(output, list | tuple) else [output]))
        nodes = _recompute_as_forward(self.nodes, set(self.updates.values()))
        graph = Graph(tuple(self.inputs), nodes, self.metas, results, tuple(self.updates.items()))
        graph = predicate_updates(graph, self.checks)
        graph = self.without_idle_gradients(pair_rows(unsort(verify(prune(merge_equal(graph, is_random))))))
        used = {i.name for i in graph.inputs if i.kind == InputKind.CONSTANT}
        return Capture(
            graph, dict(self.names.state), tuple(c for c in self.constants if c.name in used), self.parameter
        )

    def without_idle_gradients(self, graph: Graph) -> Graph:
        """The graph without gradients of earlier calls that it neither reads nor writes."""
        used = {v for n in graph.nodes for v in n.reads()} | {*graph.roots()} | {old for old, _ in graph.updates}
        idle = self.kept - used
        inputs = tuple(i for i in graph.inputs if i.value not in idle)
        return replace(graph, inputs=inputs, metas={v: m for v, m in graph.metas.items() if v not in idle})

    def placeholder(self, fx_node: torch.fx.Node) -> None:
        index = len(self.inputs)
        value = self.new(meta_of(fx_node.meta["val"]))
        if index < len(self.names.state):
            name, kind = self.names.state[index]
            if kind in WITH_PARAMETERS:
                self.after_backward.add(value)
            if kind == KEPT_GRADIENT:
                self.kept.add(value)
            if kind == LOST_GRADIENT:
                self.lost.add(value)
            self.inputs.append(Input(value, name, InputKind.LOST if kind == LOST_GRADIENT else InputKind.VARIABLE))
        else:
            name, kind = self.names.arguments[index - len(self.names.state)]
            self.inputs.append(Input(value, name, InputKind(kind)))
        self.value[fx_node] = value

    def constant(self, fx_node: torch.fx.Node) -> None:
        tensor = getattr(self.module, str(fx_node.target))
        if not isinstance(tensor, Tensor):
            raise CaptureError(f"the step holds {tensor!r}, which is not a tensor and cannot be part of a plan")
        if isinstance(tensor, nn.Parameter) or tensor.requires_grad:
            raise CaptureError(
                f"the step uses the parameter {_names_of(tensor)} of shape {tuple(tensor.shape)} that belongs to "
                f"no module, optimizer or variable that the search from the job found; "
                f"expected: reachable from the function, or given as global_function(model=…)"
            )
        values = constant_of(tensor)
        if values is None:
            raise CaptureError(f"the step made a constant of shape {tuple(tensor.shape)} whose values are not known")
        meta = meta_of(tensor)
        if meta.nbytes > LARGEST_CONSTANT:
            raise CaptureError(
                f"the step holds a tensor of {meta.nbytes} bytes (shape {meta.shape}) that the search did not find; "
                f"a constant in a plan may have {LARGEST_CONSTANT}; make it a buffer of the module or an argument"
            )
        self.value[fx_node] = self.held(values)

    def held(self, values: Tensor) -> int:
        """Add a constant with these values; returns the number of its value."""
        meta = meta_of(values)
        number = self.new(meta)
        name = f"constant.{len(self.constants)}"
        data = contents(values).tobytes()
        self.constants.append(Constant(name, meta.shape, meta.dtype, data))
        self.inputs.append(Input(number, name, InputKind.CONSTANT))
        return number

    def call(self, fx_node: torch.fx.Node) -> None:
        """Add what a call does: usually a node."""
        op, args = str(fx_node.target), fx_node.args
        if fx_node.target is operator.getitem:
            self.value[fx_node] = self.value[args[0]][args[1]]  # type: ignore[index]  # a node and a number
        elif op in IDENTITIES:
            self.value[fx_node] = self.arg(args[0]).index
        elif op == "aten.copy_.default":
            self.assign(fx_node)
        elif op == CHECKED:
            self.check(fx_node)
        elif op.startswith("aten.") and fx_node.meta.get("val") is None:
            pass  # it only looks at values and may raise (linalg's check of errors), and there are no values yet
        else:
            self.compute(fx_node)

    def assign(self, fx_node: torch.fx.Node) -> None:
        """Note the new value of the input that an op writes."""
        target, source = (self.value[a] for a in fx_node.args[:2])  # type: ignore[index]  # both are nodes
        if target not in self.lost:
            self.refuse_argument(target, fx_node)
            self.updates[target] = source
        self.value[fx_node] = source

    def check(self, fx_node: torch.fx.Node) -> None:
        """Note a check that may raise, and the values of variables there."""
        raises, held, names = fx_node.args
        self.value[fx_node] = self.value[raises]  # type: ignore[index]  # a node
        values = [self.value[node] for node in held]  # type: ignore[union-attr,index]  # a list of nodes
        self.checks.append((self.value[fx_node], dict(zip(str(names).splitlines(), values, strict=True))))

    def compute(self, fx_node: torch.fx.Node) -> None:
        """Add the node of an op, unless its result is one of its arguments or a number of the script."""
        op, args, kwargs = self.simplify(*self.call_of(fx_node), fx_node)
        if op == "":
            self.value[fx_node] = args[0].index
            return
        if op == NUMBER:
            self.number(fx_node, args, dict(kwargs))
            return
        if op == DRAW:
            op, args, kwargs = UNIFORM, self.draw_arguments(args, dict(kwargs)), ()
        elif op.startswith("actorflow."):
            op = op.removesuffix(".default")
        if op in IN_PLACE:
            args = self.read_scalars(op, args)
        args = self.as_they_are(op, args)
        outs = self.outs(fx_node)
        custom = fx_node.meta.get("custom") or {}
        node = Node(
            op, args, kwargs, outs, Phase.FORWARD, custom.get("placement"), custom.get("where", ""),
            visit=custom.get("visit", -1), again=custom.get("again", False), line=custom.get("line", ""),
        )  # fmt: skip
        self.made[outs[0]] = (op, args)
        self.nodes.append(replace(node, phase=self.phase(node, custom.get("phase") == Phase.BACKWARD)))

    def call_of(self, fx_node: torch.fx.Node) -> tuple[str, tuple[Arg, ...], Kwargs]:
        """The op of a node and its arguments, in the graph's terms."""
        try:
            if any(isinstance(a, complex) for a in fx_node.args):
                op, args = self.with_constants(fx_node)
            else:
                op, args = str(fx_node.target), tuple(self.arg(a) for a in fx_node.args)
            return op, args, tuple((k, self.arg(v)) for k, v in fx_node.kwargs.items())
        except CaptureError as error:
            raise CaptureError(f"{traced_line(fx_node.meta)}\n  {error}") from None

    def outs(self, fx_node: torch.fx.Node) -> tuple[int, ...]:
        """New values for the results of an op; -1 for a result that is no tensor."""
        result: Any = fx_node.meta.get("val")
        if isinstance(result, list | tuple):
            outs = [self.new(meta_of(r)) if isinstance(r, Tensor) else -1 for r in result]
            self.value[fx_node] = outs
        elif isinstance(result, Tensor):
            outs = [self.new(meta_of(result))]
            self.value[fx_node] = outs[0]
        else:  # a number: .item() of a tensor without values
            raise CaptureError(f"{traced_line(fx_node.meta)}\n  {LOOKS_AT_A_VALUE}")
        return tuple(outs)

    def phase(self, node: Node, backward: bool) -> Phase:
        """The phase of a node, and note what it makes; ``backward``: the backward pass has called the op."""
        added = node.op == "aten.add.Tensor" and not self.kept.isdisjoint(node.reads())
        if added:  # this adds to a gradient of earlier calls, once for all micro-batches
            self.kept.update(node.outs)
        phase = Phase.FORWARD
        if backward and not added:
            phase = Phase.BACKWARD
        elif node.op in IN_PLACE or any(v in self.after_backward for v in node.reads()):
            phase = Phase.OPTIMIZER
        if phase != Phase.FORWARD:
            self.after_backward.update(node.outs)
        return phase

    def number(self, fx_node: torch.fx.Node, args: tuple[Arg, ...], given: Mapping[str, Arg]) -> None:
        """Add an op that makes a tensor of a number of the script, which the plan reads at each call."""
        meta = meta_of(fx_node.meta["val"])
        plain = self.scalar(args[0], meta.dtype)
        self.value[fx_node] = self.new(meta)
        self.numbers[self.value[fx_node]] = plain
        made = Node("actorflow.number", (Ref(plain), given["dtype"], given["device"]), (), (self.value[fx_node],))
        self.nodes.append(made)

    def with_constants(self, fx_node: torch.fx.Node) -> tuple[str, tuple[Arg, ...]]:
        """The name and arguments of an op that takes complex numbers, as constants of its result's dtype."""
        target, result = fx_node.target, fx_node.meta.get("val")
        assert isinstance(target, OpOverload)
        if schema_of(target).overload_name == "Scalar":
            target = getattr(target.overloadpacket, "Tensor", target)
        args: list[Arg] = []
        for a, argument in zip(fx_node.args, schema_of(target).arguments, strict=False):
            takes_tensor = isinstance(argument.type, torch.TensorType)
            if isinstance(a, complex) and takes_tensor and isinstance(result, Tensor) and result.is_complex():
                with real_tensors():
                    args.append(Ref(self.held(torch.tensor(a, dtype=result.dtype))))
            else:
                args.append(self.arg(a))
        return str(target), tuple(args)

    def refuse_argument(self, target: int, copy: torch.fx.Node) -> None:
        """Raise CaptureError if the step writes into one of its arguments."""
        found = next((i for i in self.inputs if i.value == target and i.kind in CALL_INPUTS), None)
        if found is None:
            return
        made: Any = copy.args[1]
        raise CaptureError(
            f"{traced_line(made.meta)}\n  the step changes its argument {found.name} in place, which in PyTorch "
            f"changes the caller's tensor; a call of a job works on a copy of it. Expected: a new tensor "
            f"({found.name} = {found.name} * 2), or {found.name} = {found.name}.clone() before"
        )

    def simplify(
        self, op: str, args: tuple[Arg, ...], kwargs: Kwargs, fx_node: torch.fx.Node
    ) -> tuple[str, tuple[Arg, ...], Kwargs]:
        """The same op without needless inputs; an empty name says that the result is the first argument."""
        result: Any = fx_node.meta.get("val")
        if op == "aten.copy.default" and self.metas[args[0].index] == self.metas[args[1].index]:
            return "", args[1:], ()
        if op == "aten.cat.default":  # torch lets (0,)-shaped tensors join anything, as empty caches do
            full = tuple(a for a in args[0] if self.metas[a.index].shape != (0,))
            if len(full) == 1 and self.metas[full[0].index] == meta_of(result):
                return "", full, ()
            args = (full or args[0], *args[1:])
        if op in ("aten.as_strided.default", "aten.as_strided_scatter.default"):
            memory: Any = fx_node.args[0]
            scatters = op == "aten.as_strided_scatter.default"
            if _is_plain_view(memory.meta["val"], *args[1 + scatters :]):
                op, args = "aten.view.default", (args[int(scatters)], tuple(result.shape))
        if op in ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"):
            source = self.made.get(args[0].index)
            if source and source[0] == op:  # a view of a view
                args = (source[1][0], args[1])
            if self.metas[args[0].index].shape == meta_of(result).shape:
                return "", args, ()
            return "aten.view.default", args, ()
        if op == "aten.native_batch_norm_backward.default" and args[7] is True:  # ignores running statistics
            return op, (*args[:3], None, None, *args[5:]), kwargs
        if op == "aten.t.default":
            source = self.made.get(args[0].index)
            if source and source[0] == op:
                return "", source[1], ()
        if op in FILLS and isinstance(result, Tensor):  # a constant depends on no tensor, only on its shape
            fill = FILLS[op](args)
            dtype = Symbol(str(result.dtype))
            return (
                "aten.full.default",
                (tuple(result.shape), fill),
                (("dtype", dtype), ("device", Symbol(f"device:{result.device.type}"))),
            )
        return op, args, kwargs

    def draw_arguments(self, args: tuple[Arg, ...], given: Mapping[str, Arg]) -> tuple[Arg, ...]:
        """The arguments of ``actorflow.uniform``; a stream without a seed of its own uses the seed of the call."""
        seed = Ref(self.scalar(SEED)) if given["seed"] is None else given["seed"]
        return uniform_arguments(args[0], given["stream"], seed, given["dtype"], given["device"])

    def read_scalars(self, op: str, args: tuple[Arg, ...]) -> tuple[Arg, ...]:
        """Replace the settings that schedulers change by scalars that are read at each call."""
        names = arguments(op)
        given = dict(zip(names, args, strict=False))
        group = given.pop("group")
        for key in SCALARS[op]:
            given[key] = Ref(self.scalar(f"{group}.{key}"))
        if "first" in given:
            given["first"] = self.fresh and given["dampening"] != 0
        return tuple(given.values())

    def scalar(self, name: str, dtype: str = "float64") -> int:
        if (name, dtype) not in self.scalars:
            self.scalars[name, dtype] = self.new(Meta((), dtype))
            self.inputs.append(Input(self.scalars[name, dtype], name, InputKind.SCALAR))
        return self.scalars[name, dtype]

    def as_they_are(self, op: str, args: tuple[Arg, ...]) -> tuple[Arg, ...]:
        """The arguments of an op, with the script's numbers as scalar inputs if the op takes scalars beside tensors."""
        if op not in TAKES_PLAIN_NUMBER or all(a.index in self.numbers for a in args if isinstance(a, Ref)):
            return args
        return tuple(Ref(self.numbers.get(a.index, a.index)) if isinstance(a, Ref) else a for a in args)

    def arg(self, value: Any) -> Arg:
        if isinstance(value, torch.fx.Node):
            number = self.value[value]
            return tuple(Ref(n) for n in number) if isinstance(number, list) else Ref(number)
        if isinstance(value, list | tuple):
            return tuple(self.arg(v) for v in value)
        if isinstance(value, torch.device):
            return Symbol(f"device:{value.type}")
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return Symbol(str(value))
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.SymInt | torch.SymFloat):
            raise CaptureError(DEPENDS_ON_VALUES)
        raise CaptureError(
            f"the step passes {value!r} to an op; a plan can hold tensors, real numbers, strings and dtypes. Give a "
            f"complex number as a tensor: torch.tensor({value!r})"
            if isinstance(value, complex)
            else f"the step passes {value!r} to an op; a plan can hold tensors, numbers, strings and dtypes"
        )


def _recompute_as_forward(nodes: Sequence[Node], news: set[int]) -> tuple[Node, ...]:
    """The nodes, with optimizer ops that a later backward pass needs marked as forward ops.

    A backward pass needs such ops for a loss that depends on gradients, or on variables that the step has updated.
    ``news`` are the new values of variables; the ops that make them stay ops of the optimizer.
    """
    needed: set[int] = set()
    found = []
    for n in reversed(nodes):
        if n.phase == Phase.OPTIMIZER and not needed.isdisjoint(n.outs) and news.isdisjoint(n.outs):
            n = replace(n, phase=Phase.FORWARD)
            needed.update(n.reads())
        elif n.phase == Phase.BACKWARD:
            needed.update(n.reads())
        found.append(n)
    return tuple(reversed(found))


def meta_of(tensor: Tensor) -> Meta:
    """The shape and dtype of a tensor, as the graph records them."""
    return Meta(tuple(int(n) for n in tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _is_plain_view(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> bool:
    """Whether ``x.as_strided(size, stride, offset)`` is all of ``x`` in order, at most in another shape."""

    def runs(sizes: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for n, step in zip(sizes, strides, strict=True):
            if found and found[-1][1] == n * step:
                found[-1] = (found[-1][0] * n, step)
            elif n != 1:
                found.append((n, step))
        return found

    same_start = offset is None or offset == x.storage_offset()
    return same_start and 0 not in size and runs(size, stride) == runs(x.shape, x.stride())


def _names_of(tensor: Tensor) -> str:
    """The names of a tensor in all modules that hold it, for an error message; this searches the heap."""
    kinds: list[type[nn.Module]] = [nn.Module]
    for kind in kinds:
        kinds += kind.__subclasses__()
    holders = instances(*kinds)
    found = {f"{type(m).__name__}.{n}" for m in holders for n, t in m._parameters.items() if t is tensor}
    found = {name for name in found if "._param_constant" not in name}  # of the trace itself
    return " = ".join(sorted(found)) or "(without a name)"
