"""Layouts of variables from hints, ZeRO and earlier plans, and the constraints by which the graph keeps to ZeRO."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from types import MappingProxyType

from actorflow_compiler.capture.from_fx import Capture
from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.core.ops import ITEM_BYTES, Meta, Phase, Ref
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, NdSbp, Sbp, Split, check_fits, largest, local_shape, numel, show
from actorflow_compiler.core.views import CHEAP_OPS
from actorflow_compiler.graph.graph import Graph, InputKind, Node, prune, verify
from actorflow_compiler.hints.constrain import CONSTRAIN, Wish, show_wish
from actorflow_compiler.hints.goal import WHOLE_VARIABLES, Goal
from actorflow_compiler.hints.hints import LayoutHint, ResolvedHints, ZeroHint
from actorflow_compiler.hints.zero import GRADIENT, is_constrained
from actorflow_compiler.infer.zero_split import zero_split
from actorflow_compiler.plan.plan import Variable, VariableKind
from actorflow_compiler.plan.region import device_shape
from actorflow_compiler.values.gradients import KEPT_GRADIENT
from actorflow_compiler.values.variables import WITH_PARAMETERS

NOTHING: Mapping[str, NdSbp] = MappingProxyType({})
CASTS = frozenset({"aten._to_copy.default"})  # casts of autocast, done on a part before it is gathered

# ---- variables


def assign_variable_layouts(
    captured: Capture,
    graph: Graph,
    owners: Mapping[str, Placement],
    hints: ResolvedHints,
    fixed: Mapping[str, Variable],
    hardware: Hardware,
    inferred: Mapping[str, NdSbp] = NOTHING,
) -> tuple[Variable, ...]:
    """Placement and layout of every variable: as an earlier plan has fixed it, as hinted, or broadcast.

    Optimizer state and gradients of a parameter's shape have the parameter's layout, and are also split over ZeRO's
    axis where the parameter is not.  The links of ``hardware``, and the layouts that were ``inferred`` for parameters
    before, decide which dim ZeRO splits.  Raises LayoutError for a hint that does not fit its tensor, its placement's
    mesh, or what an earlier plan has fixed.
    """
    found: dict[str, Variable] = {}
    metas: dict[str, Meta] = {i.name: graph.metas[i.value] for i in graph.inputs if i.kind == InputKind.VARIABLE}
    for name in sorted(metas, key=lambda n: captured.kinds[n] in WITH_PARAMETERS):
        meta, kind = metas[name], captured.kinds[name]
        placement = fixed[name].placement if name in fixed else owners[name]
        if kind not in WITH_PARAMETERS:
            refuse_moving(name, placement, hints)
            zero = hints.zero.get(name)
            hint = hints.layouts.get(name)
            wish = fit_hint(name, meta, hint, placement)
            if zero is not None and zero.stage == 3:
                wish = _with_zero(wish, meta.shape, zero, placement, hardware, fixed.get(name), inferred.get(name, ()))
        else:
            parameter = found[captured.parameter[name]]
            zero, hint = hints.zero.get(parameter.name), hints.optimizer.get(parameter.name)
            same_shape = parameter.shape == meta.shape
            placement = parameter.placement
            wish = fit_hint(name, meta, hint if same_shape else None, placement)
            if same_shape and (
                kind != KEPT_GRADIENT or name not in fixed
            ):  # a plan takes variables in the layout that the plan before left
                lies = fixed.get(name, parameter).sbp  # state and parameter differ if inference chose both
                wish = tuple(e if e or lie == B else lie for e, lie in zip(wish, lies, strict=True))
                if zero is not None:
                    beside = inferred.get(parameter.name, ())
                    wish = _with_zero(wish, meta.shape, zero, placement, hardware, fixed.get(name), beside)
        if name in fixed:
            found[name] = check_fixed(fixed[name], wish, hint, zero)
        else:
            found[name] = Variable(
                name, meta.shape, meta.dtype, placement, tuple(e or B for e in wish), VariableKind(kind)
            )
    return tuple(found[name] for name in metas)


def refuse_moving(name: str, placement: Placement, hints: ResolvedHints) -> None:
    """Raise LayoutError if a hint gives a parameter another home than an earlier plan did."""
    hint = hints.layouts.get(name)
    if hint is not None and hint.home not in (None, placement):
        raise LayoutError(
            f"{hint.origin}: {hint.home} was found for {name}, which an earlier job has put on {placement}; the first "
            f"job that uses a variable decides where it lives: give the hint before that job is called"
        )


def fit_hint(name: str, meta: Meta, hint: LayoutHint | None, placement: Placement) -> Wish:
    """A hint with one entry for each axis of a placement; raises LayoutError where it does not fit."""
    axes = len(placement.hierarchy)
    if hint is None:
        return (None,) * axes
    if len(hint.wish) > axes:
        raise LayoutError(
            f"{hint.origin}: {show_wish(hint.wish)} was found for {name} of shape {meta.shape}; its placement "
            f"{placement} has {axes} mesh ax{'i' if axes == 1 else 'e'}s, so at most {axes} "
            f"entr{'y was' if axes == 1 else 'ies were'} expected; place the module on a mesh, or leave entries out"
        )
    out: list[Sbp | None] = []
    shape = meta.shape
    for axis, parts in enumerate(placement.axes):
        wanted = hint.wish[axis] if axis < len(hint.wish) else None
        if wanted is not None:
            wanted = check_fits(wanted, shape, parts, f"{hint.origin}: {name}")
            shape = local_shape(shape, wanted, parts, largest(parts))
        out.append(wanted)
    return tuple(out)


def _with_zero(
    wish: Wish, shape: Sequence[int], zero: ZeroHint, placement: Placement, hardware: Hardware,
    fixed: Variable | None, inferred: NdSbp,
) -> Wish:  # fmt: skip
    """As ``add_zero``; a variable that an earlier plan has split along ZeRO's axis stays so, along whichever dim."""
    if fixed is not None and wish[zero.axis : zero.axis + 1] == (None,) and isinstance(fixed.sbp[zero.axis], Split):
        return (*wish[: zero.axis], fixed.sbp[zero.axis], *wish[zero.axis + 1 :])
    return add_zero(wish, shape, zero, placement, hardware, inferred)


def add_zero(
    wish: Wish, shape: Sequence[int], zero: ZeroHint, placement: Placement, hardware: Hardware, inferred: NdSbp = ()
) -> Wish:
    """The wish with ZeRO's split on its axis, if that axis is free and a dim is large enough.

    ``inferred`` are layouts along other axes which the wish leaves open.  Raises LayoutError if the placement has no
    such axis.
    """
    axes = placement.hierarchy
    if zero.axis >= len(axes):
        raise LayoutError(
            f"{zero.origin}: mesh axis {zero.axis} was found, but a parameter's placement {placement} has "
            f"{len(axes)} mesh ax{'i' if len(axes) == 1 else 'e'}s; place the model on a mesh, or use another axis"
        )
    if wish[zero.axis] is not None or axes[zero.axis] == 1:
        return wish
    beside = tuple(e or other for e, other in zip_longest(wish, inferred))
    split = zero_split(beside, shape, zero.axis, placement, hardware)
    return (*wish[: zero.axis], split, *wish[zero.axis + 1 :])


def better_for_zero(
    variables: Sequence[Variable],
    parameter: Mapping[str, str],
    hints: ResolvedHints,
    fixed: Mapping[str, Variable],
    hardware: Hardware,
) -> dict[str, NdSbp]:
    """The layouts of parameters beside which ZeRO would rather split another dim than it does; empty if there are none.

    ``variables`` have the layouts that were inferred; ``parameter`` says of optimizer state whose it is.
    """
    by_name = {v.name: v for v in variables}
    found: dict[str, NdSbp] = {}
    for v in variables:
        of = by_name.get(parameter.get(v.name, v.name))
        zero = hints.zero.get(of.name) if of is not None and v.name not in fixed and v.shape == of.shape else None
        if of is None or zero is None:
            continue
        hint = hints.layouts.get(v.name) if v is of else hints.optimizer.get(of.name)
        asked = hint is not None and any(hint.wish[zero.axis : zero.axis + 1])
        if isinstance(now := v.sbp[zero.axis], Split) and not asked:
            beside = tuple(None if k == zero.axis else e for k, e in enumerate(of.sbp))
            if zero_split(beside, v.shape, zero.axis, v.placement, hardware) != now:
                found[of.name] = of.sbp
    return found


def check_fixed(variable: Variable, wish: Wish, hint: LayoutHint | None, zero: ZeroHint | None) -> Variable:
    """The variable in its layout of an earlier plan; raises LayoutError if a hint asks for another one."""
    for axis, (wanted, fixed) in enumerate(zip(wish, variable.sbp, strict=True)):
        if wanted is None or wanted == fixed:
            continue
        hinted = hint is not None and axis < len(hint.wish) and hint.wish[axis] is not None
        origin = hint.origin if hinted and hint else zero.origin if zero else "a hint"
        raise LayoutError(
            f"{origin}: {show_wish(wish)} was found for {variable.name}, which an earlier job has laid out as "
            f"{show(variable.sbp)} on {variable.placement}; the first job that uses a variable decides how it lies: "
            f"give the hint before that job is called"
        )
    return variable


def taken_by_others(graph: Graph, fixed: Mapping[str, Variable]) -> float:
    """The most bytes that a device holds of variables that earlier plans have fixed and this graph does not use."""
    used = {i.name for i in graph.inputs if i.kind == InputKind.VARIABLE}
    held: Counter[int] = Counter()
    for v in fixed.values():
        for index, rank in enumerate(v.placement.ranks if v.name not in used else ()):
            held[rank] += numel(device_shape(v.shape, v.sbp, v.placement, index)) * ITEM_BYTES[v.dtype]
    return max(held.values(), default=0)


def open_axes(
    variable: Variable, parameter: str | None, hints: ResolvedHints, fixed: Mapping[str, Variable], goal: Goal
) -> tuple[Sbp | None, ...]:
    """The layout of a variable with None for the axes on which inference may choose.

    ``parameter`` is the parameter that the variable is optimizer state of, if any.
    """
    hint = hints.layouts.get(variable.name) if parameter is None else hints.optimizer.get(parameter)
    wish = hint.wish if hint else ()
    zero = hints.zero.get(parameter or variable.name)
    at_home = (parameter or variable.name) in hints.homes  # no op runs there that would prefer another layout

    def closed(axis: int) -> bool:
        asked = any(wish[axis : axis + 1]) or (zero is not None and zero.axis == axis) or at_home
        return asked or variable.name in fixed or goal.mode(axis) in WHOLE_VARIABLES

    return tuple(entry if entry != B or closed(axis) else None for axis, entry in enumerate(variable.sbp))


def is_hinted(graph: Graph, hints: ResolvedHints) -> bool:
    """Whether hints split parameters or activations, so that the batch may be better left whole."""
    cut = any(isinstance(e, Split) for wish in hints.wishes for e in wish)
    return cut or is_constrained(graph)


# ---- ZeRO in the graph


def apply_zero(
    graph: Graph,
    variables: Sequence[Variable],
    zero: Mapping[str, ZeroHint],
    parameter: Mapping[str, str],
    hardware: Hardware,
    inferred: Mapping[str, NdSbp] = NOTHING,
) -> Graph:
    """The graph with gradients constrained to ZeRO's split, and parameters of stage 3 gathered at each use.

    A gradient is split as the parameter is, or else as the optimizer's state (``parameter``: of which parameter).
    """
    if not zero:
        return graph
    by_name = {v.name: v for v in variables}
    split: dict[str, Sbp] = {}  # parameter → the split of its optimizer's state along ZeRO's axis
    for v in variables:
        of = by_name.get(parameter.get(v.name, ""))
        entry = v.sbp[zero[of.name].axis] if of is not None and of.name in zero and of.shape == v.shape else B
        if of is not None and isinstance(entry, Split):
            split.setdefault(of.name, entry)
    nodes = []
    for n in graph.nodes:
        if n.op == CONSTRAIN and n.args[1].startswith(GRADIENT):
            variable = by_name[n.args[1].removeprefix(GRADIENT)]
            wish: Wish = (None,)
            if n.placement == variable.placement:
                z = zero[variable.name]
                wish = tuple(e if isinstance(e, Split) else None for e in variable.sbp)
                if wish[z.axis] is None and variable.name in split:
                    wish = (*wish[: z.axis], split[variable.name], *wish[z.axis + 1 :])
                wish = add_zero(wish, variable.shape, z, variable.placement, hardware, inferred.get(variable.name, ()))
                wish = tuple(e if axis == z.axis else None for axis, e in enumerate(wish))
            # gradients are boxed in buckets for readers of the optimizer's phase; this op fires for each micro-batch
            n = replace(n, args=(n.args[0], show_wish(wish), n.args[2]), phase=Phase.OPTIMIZER)
        nodes.append(n)
    used: dict[str, Wish] = {}
    for name, z in zero.items():
        if z.stage == 3 and name in by_name and isinstance(by_name[name].sbp[z.axis], Split):
            used[name] = (*(None,) * z.axis, B)
    return gather_at_use(replace(graph, nodes=tuple(nodes)), used)


def gather_at_use(graph: Graph, used: Mapping[str, Wish]) -> Graph:
    """Make each phase, and each micro-batch, read variables anew, so that no gathered copy outlives its use.

    ``used`` maps a variable to its layout at uses.  Forward and backward pass each read it through a
    constraint of their own.  Views and casts of it that the backward pass shares with the forward
    pass are computed again.
    """
    names = {i.value: i.name for i in graph.inputs if i.kind == InputKind.VARIABLE and i.name in used}
    maker: dict[int, Node] = {}  # views and casts of these variables
    metas = dict(graph.metas)
    fresh = max(metas, default=0) + 1
    nodes: list[Node] = []
    again: dict[tuple[int, str, Placement | None, int, bool], int] = {}

    def emit(n: Node, value: int) -> int:
        nonlocal fresh
        metas[fresh] = graph.metas[value]
        nodes.append(replace(n, outs=(fresh,)))
        fresh += 1
        return fresh - 1

    def here(value: int, reader: Node) -> Ref:
        """The number by which ``reader`` reads a value."""
        if value not in names and value not in maker:
            return Ref(value)
        key = (value, reader.phase, reader.placement, reader.stage, reader.pieces)
        if key not in again:
            if value in names:
                args = (Ref(value), show_wish(used[names[value]]), "flow.zero")
                again[key] = emit(replace(reader, op=CONSTRAIN, args=args, kwargs=()), value)
            else:
                n = maker[value]
                if (n.phase, n.placement, n.stage, n.pieces) == key[1:]:
                    return Ref(value)
                stage = reader.stage if n.placement == reader.placement else n.stage
                copy = replace(n, phase=reader.phase, stage=stage, pieces=reader.pieces)
                again[key] = emit(_reading(copy, here), value)
        return Ref(again[key])

    for n in graph.nodes:
        if n.phase == Phase.OPTIMIZER:
            nodes.append(n)
            continue
        reads = set(n.reads())
        if n.op in CHEAP_OPS | CASTS and len(n.outs) == 1 and len(reads) == 1 and reads <= names.keys() | maker.keys():
            maker[n.outs[0]] = n
        nodes.append(_reading(n, here))
    return verify(prune(replace(graph, nodes=tuple(nodes), metas=metas)))


def _reading(n: Node, here: Callable[[int, Node], Ref]) -> Node:
    """The node with the values that it reads renumbered."""
    return n.reading(lambda value: here(value, n))
