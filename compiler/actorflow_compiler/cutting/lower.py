"""A graph with layouts goes in; what every rank does, op by op, with the communication between, comes out.

A *local value* has one number on all ranks that hold it; its shape may differ from rank to rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from actorflow_compiler.boxing.routes import BoxCopy, Hop, route
from actorflow_compiler.core.ops import Arg, Meta, Ref, Symbol, substitute
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, NdSbp, local_shape, show
from actorflow_compiler.cutting.redundant import Work
from actorflow_compiler.graph.flops import flops_of
from actorflow_compiler.graph.graph import Node, call_of
from actorflow_compiler.hints.constrain import CONSTRAIN
from actorflow_compiler.infer import FREE_KINDS
from actorflow_compiler.infer.lay_out import StepLayouts
from actorflow_compiler.plan.plan import Box, Collective, CollectiveKind, Comm, Exchange, Send, Step
from actorflow_compiler.plan.region import coordinates, device_shape
from actorflow_compiler.signatures import OpCall, Signature, localise, signatures
from actorflow_compiler.signatures.agree import refuse_unfit

JOINS = frozenset({"actorflow.accumulate", "actorflow.pack", "actorflow.last"})
When = tuple[str, int]  # phase and virtual stage


@dataclass(frozen=True, slots=True)
class Item:
    """Something that happens on one or more ranks at the same place of the program.

    kind "compute": ``steps``; "comm": a collective, or a send from one rank to another; "join":
    the pieces of ``reads[0]`` become ``writes[0]``, combined as ``combine`` says.
    """

    kind: str
    phase: str  # "source" | "forward" | "backward" | "weight" (see ``split_backward.py``) | "optimizer"
    placement: Placement
    pieces: bool
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    steps: Mapping[int, tuple[Step, ...]] = field(default_factory=dict)  # rank → steps over local values
    comms: Mapping[int, Comm] = field(default_factory=dict)  # rank → its side; reads[i] moves to writes[i]
    combine: str = ""
    flops: float = 0.0  # of one firing on one rank
    where: str = ""
    bucket: int | None = None  # of a collective: those in the same bucket leave together
    stage: int = 0  # the virtual pipeline stage
    again: bool = False  # a forward op that is repeated for the backward pass
    line: str = ""  # of the user's script


@dataclass(frozen=True, slots=True)
class Program:
    """All items in an order in which they could run."""

    items: tuple[Item, ...]
    metas: Mapping[tuple[int, int], Meta]  # (local value, rank) → shape and dtype
    alias: Mapping[tuple[int, int], int]  # (local value, rank) → the value that it is on that rank
    sbp: Mapping[int, str]  # local value → how it lies, for people
    names: Mapping[int, str]
    inputs: Mapping[int, tuple[str, str]]  # local value → (name, kind) of an input
    updates: tuple[tuple[str, int], ...]  # variable → local value
    results: tuple[tuple[int, Placement, NdSbp, Meta], ...]  # local value, where, how, logical meta
    flops: float  # useful, in an iteration
    flops_done: float
    repeated: Mapping[Work, float] = field(default_factory=dict)  # what of it is done more than once


def lower(step: StepLayouts) -> Program:
    """Lower: every op to what each rank does of it, with the communication that brings its operands into layout."""
    return _Lowering(step).run(step.gathered, step.homes)


class _Lowering:
    def __init__(self, step: StepLayouts) -> None:
        graph, everywhere = step.graph, step.everywhere
        self.graph, self.layouts, self.pieces, self.times = graph, step.layouts, step.pieces, step.times
        self.by_all: tuple[Placement, NdSbp] = (everywhere, (B,) * len(everywhere.hierarchy))
        self.items: list[Item] = []
        self.metas: dict[tuple[int, int], Meta] = {}
        self.alias: dict[tuple[int, int], int] = {}
        self.sbp: dict[int, str] = {}
        self.names: dict[int, str] = {}
        # the last: of the readers, for what is gathered for each phase of each stage
        self.boxed: dict[tuple[int, Placement, NdSbp, tuple[When, bool] | None], int] = {}
        self.kind = {i.value: i.kind for i in graph.inputs}
        self.maker: dict[int, tuple[When, bool]] = {}  # value → phase, stage and rate of its maker
        self.first: dict[Placement, int] = {}  # placement → its first stage, which variables leave from
        for n in sorted(graph.nodes, key=lambda n: n.stage):
            if n.placement is not None:
                self.first.setdefault(n.placement, n.stage)
        made = {o: n.pieces for n in graph.nodes for o in n.outs}
        self.moving = {old for old, new in graph.updates if made.get(new, False)}  # variables that each piece moves on
        self.computed: set[int] = set()  # values that an op makes
        self.collected: set[int] = set()  # values that a collective makes once in an iteration
        self.next = max(graph.metas, default=0) + 1
        self.comm_id = 0
        self.flops = self.flops_done = 0.0
        self.repeated: dict[Work, float] = {}
        self._local: dict[
            tuple[OpCall, tuple[Signature, ...], tuple[int, ...], tuple[int, ...]], tuple[OpCall, tuple[Meta, ...]]
        ] = {}

    def new(self, sbp: NdSbp, name: str) -> int:
        self.sbp[self.next], self.names[self.next] = show(sbp), name
        self.next += 1
        return self.next - 1

    def run(self, gather: Mapping[int, bool], homes: Mapping[str, tuple[Placement, NdSbp]]) -> Program:
        names = {i.value: i.name for i in self.graph.inputs}
        for i in self.graph.inputs:
            where, sbp = homes[i.name] if i.kind == "variable" else self.by_all
            self.begin(i.value, where, sbp, i.name)
            taken = i.kind in ("batch", "argument")  # by sources; a constant is there, as a variable is
            self.maker[i.value] = (("source" if taken else "state", 0), False)
        for k, n in enumerate(self.graph.nodes):
            self.node(k, n)
        news = [
            (names[old], new, self.obtain(new, *homes[names[old]], ("optimizer", self.maker[new][0][1])))
            for old, new in self.graph.updates
        ]
        results = []
        for r in self.graph.results:
            place, sbp = self.by_all if gather[r] else (self.layouts.placement[r], self.layouts.value[r])
            when = ("forward", self.maker[r][0][1])
            results.append((self.obtain(r, place, sbp, when), place, sbp, self.graph.metas[r]))
        read = {v for item in self.items for v in item.reads} | {value for value, *_ in results}
        updates = [(name, self.update(new, value, value in read, *homes[name])) for name, new, value in news]
        inputs = {i.value: (i.name, i.kind) for i in self.graph.inputs}
        return Program(
            tuple(self.items), self.metas, self.alias, self.sbp, self.names, inputs, tuple(updates), tuple(results),
            self.flops, self.flops_done, self.repeated,
        )  # fmt: skip

    def update(self, new: int, value: int, read: bool, where: Placement, sbp: NdSbp) -> int:
        """What a variable becomes: made by an op on its ranks, or by a collective that nobody else reads.

        ``value`` is the new value where and how the variable lies; ``read`` says whether others read it.
        """
        if (value == new and value in self.computed) or (value in self.collected and not read):
            return value
        out = self.new(sbp, self.names[value])
        steps = {}
        for rank in where.ranks:
            self.metas[(out, rank)] = self.metas[(value, rank)]
            steps[rank] = (Step("actorflow.identity", (Ref(value),), (), (out,)),)
        (_, stage), pieces = self.maker[new]  # statistics move on with every micro-batch
        self.items.append(Item("compute", "optimizer", where, pieces, (value,), (out,), steps, stage=stage))
        return out

    def begin(self, value: int, where: Placement, sbp: NdSbp, name: str) -> None:
        """A logical value exists on a placement in a layout."""
        self.boxed[(value, where, sbp, None)] = value
        self.sbp[value], self.names[value] = show(sbp), name
        meta = self.graph.metas[value]
        for index, rank in enumerate(where.ranks):
            self.metas[(value, rank)] = Meta(device_shape(meta.shape, sbp, where, index), meta.dtype)

    def node(self, k: int, n: Node) -> None:
        assert n.placement is not None
        call, operands = call_of(n, self.graph.metas)
        reads = [
            self.obtain(v, n.placement, need, (n.phase, n.stage), n.pieces and n.op == CONSTRAIN)
            for v, need in zip(operands, self.layouts.operands[k], strict=True)
        ]
        for o in n.outs:
            if o >= 0:
                self.begin(
                    o,
                    n.placement,
                    self.layouts.value[o],
                    f"{n.where}:{n.op.split('.')[1]}" if n.where else n.op.split(".")[1],
                )
                self.maker[o] = ((n.phase, n.stage), n.pieces)
        if n.op in JOINS:
            how = {"actorflow.accumulate": "sum", "actorflow.last": ""}
            combine = how[n.op] if n.op in how else f"cat:{n.args[1]}"
            self.items.append(
                Item(
                    "join", n.phase, n.placement, False, (reads[0],), (n.outs[0],), combine=combine, where=n.where,
                    stage=n.stage,
                )
            )  # fmt: skip
            return
        if n.op == CONSTRAIN:  # another name for the same parts
            self.alias.update({(n.outs[0], rank): reads[0] for rank in n.placement.ranks})
            nothing: dict[int, tuple[Step, ...]] = dict.fromkeys(n.placement.ranks, ())
            self.items.append(
                Item("compute", n.phase, n.placement, n.pieces, (reads[0],), n.outs, nothing, stage=n.stage)
            )
            return
        steps, work = {}, 0.0
        for index, rank in enumerate(n.placement.ranks):
            local, metas = self.localised(
                call, self.layouts.chosen[k], coordinates(n.placement, index), n.placement.hierarchy, n.line or n.where
            )
            made = iter(metas)
            for o, meta in zip(n.outs, call.outs, strict=True):
                if meta is not None:
                    self.metas[(o, rank)] = next(made)

            def at(i: int) -> Ref:
                return Ref(reads[i])

            kwargs = tuple((name, substitute(v, at)) for name, v in local.kwargs)
            steps[rank] = (Step(local.op, substitute(local.args, at), kwargs, n.outs),)
            work += flops_of(local)
        times = self.pieces if n.pieces else 1
        useful = self.times * flops_of(call)
        self.flops += times * useful
        self.flops_done += times * work
        if work > useful:
            splits = any(len(signatures(call, parts)) > 1 for parts in n.placement.hierarchy)
            key = Work(n.op, n.where, splits)
            self.repeated[key] = self.repeated.get(key, 0.0) + times * (work - useful)
        outs = tuple(o for o in n.outs if o >= 0)
        self.computed.update(outs)
        self.items.append(
            Item(
                "compute",
                n.phase,
                n.placement,
                n.pieces,
                tuple(reads),
                outs,
                steps,
                flops=work / n.placement.size,
                where=n.where,
                stage=n.stage,
                line=n.line,
            )
        )

    def localised(
        self, call: OpCall, chosen: tuple[Signature, ...], at: tuple[int, ...], hierarchy: tuple[int, ...], line: str
    ) -> tuple[OpCall, tuple[Meta, ...]]:
        """The op as the device at these mesh coordinates runs it, and the metas of its used outputs.

        Raises PlanError, with the user's line, for one whose operands do not fit each other.
        """
        key = (call, chosen, at, hierarchy)
        if key not in self._local:
            whole, outs = call, tuple(m for m in call.outs if m is not None)
            for signature, index, parts in zip(chosen, at, hierarchy, strict=True):
                op, args, kwargs, outs = localise(call, signature, parts, index)
                ins = tuple(
                    Meta(local_shape(m.shape, s, parts, index), m.dtype)
                    for m, s in zip(call.ins, signature.ins, strict=True)
                )
                rest = iter(outs)
                call = OpCall(
                    op, args, tuple(kwargs), ins, tuple(next(rest) if m is not None else None for m in call.outs)
                )
            refuse_unfit(whole, call, line)
            self._local[key] = (call, outs)
        return self._local[key]

    def obtain(self, value: int, where: Placement, sbp: NdSbp, when: When, anew: bool = False) -> int:
        """The local value that is ``value`` on a placement in a layout; boxes it if need be.

        ``when`` is that of the reader; ``anew`` lets a variable be boxed for each micro-batch, as it has to be where
        each one changes it.
        """
        anew = anew or value in self.moving
        if (value, where, sbp, None) in self.boxed:
            return self.boxed[(value, where, sbp, None)]
        apart: tuple[When, bool] | None = None
        if self.kind.get(value) == "variable" and self.layouts.placement[value] == where:
            apart = (when, anew)  # a gathered parameter is not kept for the backward pass, nor for another stage
        key = (value, where, sbp, apart)
        if key in self.boxed:
            return self.boxed[key]
        meta = self.graph.metas[value]
        if self.kind.get(value) in FREE_KINDS:
            if all(entry == B for entry in sbp):
                self.boxed[key] = value
                return value
            source, whole = where, (B,) * len(where.hierarchy)
            hops = route(meta.shape, where, whole, where, sbp)
            here = value
        else:
            source = self.layouts.placement[value]
            hops = route(meta.shape, source, self.layouts.value[value], where, sbp)
            here = self.boxed[(value, source, self.layouts.value[value], None)]
        made_in, pieces = self.maker[value]
        if made_in[0] == "state":
            made_in, pieces = when if source == where else (when[0], self.first.get(source, when[1])), anew
        for k, hop in enumerate(hops):
            after = (value, hop.target, hop.target_sbp, apart)
            if after not in self.boxed:
                done = all(later.kind == "local" for later in hops[k + 1 :])  # the reader's part begins
                to = where if hop.target == where else source  # half-way a value is on devices of the source
                there = (made_in[0], when[1])  # beside the reader it is of the reader's stage
                begins = there if hop.source == where != source else made_in
                ends = when if done else there if to == where != source else made_in
                self.boxed[after] = self.hop(hop, here, meta, source, to, begins, ends, pieces)
            here = self.boxed[after]
        return here

    def hop(
        self, hop: Hop, value: int, meta: Meta, source: Placement, target: Placement, made_in: When, when: When,
        pieces: bool,
    ) -> int:  # fmt: skip
        out = self.new(hop.target_sbp, self.names[value])
        for index, rank in enumerate(hop.target.ranks):
            self.metas[(out, rank)] = Meta(device_shape(meta.shape, hop.target_sbp, hop.target, index), meta.dtype)
        if hop.groups:
            ids = {group: self.count() for group in hop.groups}
            comms = {
                rank: Collective(CollectiveKind(hop.kind), ids[group], group, _exchanges(hop, rank, group))
                for group in hop.groups
                for rank in group
            }
            phase, stage = made_in
            self.items.append(Item("comm", phase, source, pieces, (value,), (out,), comms=comms, stage=stage))
            if not pieces and comms.keys() == set(hop.target.ranks):
                self.collected.add(out)
        else:
            self.copy(hop, value, out, source, target, made_in, when, pieces)
        return out

    def count(self) -> int:
        self.comm_id += 1
        return self.comm_id - 1

    def copy(
        self, hop: Hop, value: int, out: int, source: Placement, target: Placement, made_in: When, when: When,
        pieces: bool,
    ) -> None:  # fmt: skip
        """Local parts, and parts sent from rank to rank, put together at each target."""
        gathered: dict[int, list[tuple[int, BoxCopy]]] = {}
        cuts: dict[int, list[Step]] = {}
        sends: list[tuple[int, int, list[int]]] = []
        for t, row in enumerate(hop.parts):
            to = hop.target.ranks[t]
            for s, parts in enumerate(row):
                origin = hop.source.ranks[s]
                moved = []
                for part in parts:
                    number = self.cut(value, origin, part, cuts)
                    if origin != to:
                        arrived = self.new(hop.target_sbp, self.names[value])
                        self.metas[(arrived, to)] = self.metas[(number, origin)]
                        moved.append((number, arrived))
                        number = arrived
                    gathered.setdefault(to, []).append((number, part))
                if moved:
                    sends.append((origin, to, [n for pair in moved for n in pair]))
        pre = made_in if hop.kind == "send" or made_in[0] == "source" else when
        if cuts:
            writes = tuple(o for steps in cuts.values() for s in steps for o in s.outs)
            self.items.append(
                Item(
                    "compute", pre[0], source, pieces, (value,), writes, {r: tuple(s) for r, s in cuts.items()},
                    stage=pre[1],
                )
            )  # fmt: skip
        for origin, to, pairs in sends:
            comm = Send(self.count(), origin, to)
            self.items.append(
                Item(
                    "comm", made_in[0], source, pieces, tuple(pairs[::2]), tuple(pairs[1::2]), comms={origin: comm},
                    stage=made_in[1],
                )
            )  # fmt: skip
        steps: dict[int, tuple[Step, ...]] = {}
        reads: set[int] = set()
        for to in hop.target.ranks:
            parts_here = gathered.get(to, [])
            reads.update(n for n, _ in parts_here)
            meta = self.metas[(out, to)]
            if len(parts_here) == 1 and parts_here[0][1].target == Box((0,) * len(meta.shape), meta.shape):
                self.alias[(out, to)] = parts_here[0][0]
                steps[to] = ()
                continue
            dtype = Symbol(f"torch.{meta.dtype}")
            if not parts_here:  # another rank has it all: zeros of a sum, which no operand tells the device of
                where = (("dtype", dtype), ("device", Symbol(f"device:{target.type}")))
                steps[to] = (Step("aten.zeros.default", (meta.shape,), where, (out,)),)
                continue
            args: tuple[Arg, ...] = (
                tuple(Ref(n) for n, _ in parts_here), meta.shape, tuple(p.target.start for _, p in parts_here),
                dtype, *((True,) if hop.add else ()),
            )  # fmt: skip
            steps[to] = (Step("actorflow.arrange", args, (), (out,)),)
        phase, stage = when if hop.kind == "send" else pre
        self.items.append(Item("compute", phase, target, pieces, tuple(sorted(reads)), (out,), steps, stage=stage))

    def cut(self, value: int, rank: int, part: BoxCopy, cuts: dict[int, list[Step]]) -> int:
        """The local value that is a rectangle of another one."""
        meta = self.metas[(value, rank)] if (value, rank) in self.metas else self.graph.metas[value]
        if part.source == Box((0,) * len(meta.shape), meta.shape):
            return value
        args = (Ref(value), part.source.start, part.source.size)
        known = next((step.outs[0] for step in cuts.get(rank, ()) if step.args == args), None)
        if known is not None:
            return known
        number = self.new((), self.names[value])
        self.metas[(number, rank)] = Meta(part.source.size, meta.dtype)
        cuts.setdefault(rank, []).append(Step("actorflow.carve", args, (), (number,)))
        return number


def _exchanges(hop: Hop, rank: int, group: tuple[int, ...]) -> tuple[Exchange, ...]:
    """One rank's part in a collective of its group; none for an all_reduce, which takes and gives everything."""
    if not hop.parts:
        return ()
    me, here = hop.source.index(rank), hop.parts[hop.target.index(rank)]
    send = tuple(tuple(p.source for p in hop.parts[hop.target.index(other)][me]) for other in group)
    receive = tuple(tuple(p.target for p in here[hop.source.index(other)]) for other in group)
    return (Exchange(send, receive, hop.add),)


def resolve(value: int, alias: Mapping[tuple[int, int], int], rank: int) -> int:
    """The local value behind an alias."""
    while (value, rank) in alias:
        value = alias[(value, rank)]
    return value
