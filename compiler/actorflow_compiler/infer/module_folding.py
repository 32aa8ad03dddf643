"""Fold a graph with layouts by module, for people: parts (module, phase, placement) and the tensors between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from actorflow_compiler.boxing.linked_routes import LinkedRoutes
from actorflow_compiler.boxing.routes import HopKind, bytes_of
from actorflow_compiler.core.garbage_collection import kept_while_compiling
from actorflow_compiler.core.ops import ITEM_BYTES, Phase
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.runs import stretches
from actorflow_compiler.core.sbp import NdSbp, show
from actorflow_compiler.graph.graph import CALL_INPUTS, InputKind, Node, call_of
from actorflow_compiler.infer import FREE_KINDS
from actorflow_compiler.infer.layout_assignment import StepLayouts
from actorflow_compiler.plan.origins import Flow, ModulePart, Origins, PartPhase, SourceLocation

WRITTEN = 16  # of more ranks of a placement, not all are written

_PartKey = tuple[str, PartPhase, str]  # module, phase, placement
INPUTS = "inputs"  # the name of the part that stands for the arguments of a step


@dataclass(slots=True)
class _PartDraft:
    """A mutable part, to which ops are still added."""

    count: int = 0
    ops: dict[str, None] = field(default_factory=dict)
    places: dict[int, None] = field(default_factory=dict)


def fold_by_module(step: StepLayouts, modules: Sequence[str], parameter: Mapping[str, str]) -> Origins:
    """Fold a step's graph; ``modules`` are the names that ops may carry, ``parameter`` maps state to parameters."""
    return _Folding(step, modules, parameter).run()


class _Folding:
    def __init__(self, step: StepLayouts, modules: Sequence[str], parameter: Mapping[str, str]) -> None:
        self.graph, self.layouts, self.pieces, self.parameter = step.graph, step.layouts, step.pieces, parameter
        self.routes = LinkedRoutes(step.hardware)
        self.modules = frozenset(modules)
        self.places: dict[SourceLocation, int] = {}
        self.drafts: dict[_PartKey, _PartDraft] = {}
        self.number: dict[_PartKey, int] = {}
        self.keys: list[_PartKey] = []  # of each part
        self.maker: dict[int, tuple[int, str]] = {}  # value → its part, and the op that made it
        self.flows: dict[tuple[int, int, int, str], Flow] = {}  # (value, source, target, read as)
        self.kind = {i.value: i.kind for i in self.graph.inputs}
        self.boxed: set[tuple[int, Placement, NdSbp, str]] = set()  # boxed already; variables for each phase
        self.often: set[int] = set()  # values that exist once for each micro-batch

    def run(self) -> Origins:
        graph, layouts = self.graph, self.layouts
        names = {i.value: i.name for i in graph.inputs}
        homes = {i.name: i.value for i in graph.inputs if i.kind == InputKind.VARIABLE}
        for i in graph.inputs:
            if i.kind == InputKind.VARIABLE and i.name not in self.parameter:
                where = _text(layouts.placement[i.value])
                self.maker[i.value] = self.part(self.module_of(i.name), PartPhase.VARIABLE, where, i.name, None), i.name
            elif i.kind in CALL_INPUTS:
                self.maker[i.value] = self.part(INPUTS, PartPhase.INPUT, "", i.name, None), i.name
        for k, n in enumerate(graph.nodes):
            assert n.placement is not None
            _, operands = call_of(n, graph.metas)
            module = n.where or self.optimized(n, names) or self.added_up(n)
            place = self.places.setdefault(SourceLocation(module, n.line), len(self.places))
            target = self.part(module, PartPhase(n.phase), _text(n.placement), n.op.removesuffix(".default"), place)
            for value, need in zip(operands, layouts.operands[k], strict=True):
                self.flow(value, target, n.placement, need)
            for o in n.outs:
                if o >= 0:
                    self.maker[o] = target, n.op.split(".")[1]
                    self.often.update((o,) if n.pieces else ())
        for old, new in graph.updates:
            name = self.parameter.get(names[old], names[old])
            if name in homes and names[old] == name:
                self.flow(new, self.maker[homes[name]][0], layouts.placement[old], layouts.value[old], only_boxed=True)
        parts = tuple(
            ModulePart(*key, draft.count, tuple(draft.ops), tuple(draft.places)) for key, draft in self.drafts.items()
        )
        return Origins(tuple(self.places), (), parts, tuple(self.flows.values()))

    def part(self, module: str, phase: PartPhase, placement: str, op: str, place: int | None) -> int:
        """The part with this op added to it."""
        key = (module, phase, placement)
        draft = self.drafts.setdefault(key, _PartDraft())
        draft.count += 1
        draft.ops[op] = None
        if place is not None:
            draft.places[place] = None
        if key not in self.number:
            self.number[key] = len(self.keys)
            self.keys.append(key)
        return self.number[key]

    def flow(self, value: int, target: int, where: Placement, need: NdSbp, only_boxed: bool = False) -> None:
        """Note that a part reads a value in a layout."""
        if value not in self.maker:
            return
        source, name = self.maker[value]
        key = (value, source, target, show(need))
        if source == target or key in self.flows:
            return
        meta, moved, made = self.graph.metas[value], 0, need
        boxing: tuple[str, ...] = ()
        if self.kind.get(value) not in FREE_KINDS:  # every rank has these whole
            made = self.layouts.value[value]
            hops = self.routes.find(meta, self.layouts.placement[value], made, where, need)
            boxing = tuple(hop.kind if hop.kind != HopKind.LOCAL else "slice" for hop in hops)
            once = (value, where, need, self.keys[target][1] if self.kind.get(value) == InputKind.VARIABLE else "")
            if once not in self.boxed:  # further readers in this layout share the boxed value
                moved = bytes_of(hops, ITEM_BYTES[meta.dtype]) * (self.pieces if value in self.often else 1)
            self.boxed.add(once)
        if only_boxed and not boxing:
            return
        self.flows[key] = Flow(source, target, name, meta.shape, meta.dtype, show(made), show(need), boxing, moved)

    def module_of(self, variable: str) -> str:
        """The module that a variable belongs to, from its name, which begins with that of its root module."""
        owner = variable.rpartition(".")[0]
        while owner and owner not in self.modules:
            owner = owner.partition(".")[2]
        return owner

    def added_up(self, n: Node) -> str:
        """The module of a gradient accumulation, which has no line in the user's script: that of the later operand."""
        if n.phase != Phase.BACKWARD or n.line:
            return ""
        made = [self.keys[self.maker[v][0]] for v in n.reads() if v in self.maker][::-1]  # the later one was made last
        here = None if n.placement is None else _text(n.placement)
        return next((module for module, _, where in made if where == here), "")

    def optimized(self, n: Node, names: Mapping[int, str]) -> str:
        """The module whose parameter an op of the optimizer updates."""
        for value in n.reads():
            name = names.get(value)
            if name is not None and self.kind[value] == InputKind.VARIABLE:
                return self.module_of(self.parameter.get(name, name))
        return ""


@kept_while_compiling(1 << 8)
def _text(placement: Placement) -> str:
    """A placement for people: ``cpu:[0,1]``, ``cpu:[0,2,…,8190](512,8)``."""
    if placement.size <= WRITTEN:
        return str(placement)
    ranks = (
        f"{first},{first + step},…,{first + (count - 1) * step}"
        if count > 3
        else ",".join(str(first + k * step) for k in range(count))
        for first, step, count in stretches(placement.ranks)
    )
    return str(placement).replace(",".join(map(str, placement.ranks)), ",".join(ranks), 1)
