"""A graph with layouts goes in; what every rank does, op by op, with the communication between, comes out.

A *local value* has one number on all ranks that hold it; its shape may differ from rank to rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from actorflow_compiler.boxing import Hop, Part, coordinates, device_shape, route
from actorflow_compiler.flops import flops_of
from actorflow_compiler.graph import Graph, Node, call_of
from actorflow_compiler.infer import FREE_KINDS, Layouts
from actorflow_compiler.ops import Arg, Meta, Ref, Symbol, substitute
from actorflow_compiler.placement import Placement
from actorflow_compiler.plan import Box, Comm, Exchange, Step
from actorflow_compiler.sbp import B, NdSbp, local_shape, show
from actorflow_compiler.signatures import OpCall, Signature, localise

JOINS = frozenset({"actorflow.accumulate", "actorflow.pack"})


@dataclass(frozen=True, slots=True)
class Item:
    """Something that happens on one or more ranks at the same place of the program.

    kind "compute": ``steps``; "comm": a collective, or a send from one rank to another; "join":
    the pieces of ``reads[0]`` become ``writes[0]``, combined as ``combine`` says.
    """

    kind: str
    phase: str  # "source" | "forward" | "backward" | "optimizer"
    placement: Placement
    pieces: bool
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    steps: Mapping[int, tuple[Step, ...]] = field(default_factory=dict)  # rank → steps over local values
    comms: Mapping[int, Comm] = field(default_factory=dict)  # rank → its side; reads[i] moves to writes[i]
    combine: str = ""
    flops: float = 0.0  # of one firing on one rank
    where: str = ""


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


def lower(
    graph: Graph,
    layouts: Layouts,
    pieces: int,
    everywhere: Placement,
    gather: Mapping[int, bool],
    homes: Mapping[str, tuple[Placement, NdSbp]],
) -> Program:
    """Lower; ``gather[v]`` says whether result v goes to every rank; ``homes`` says where each variable lies."""
    return _Lowering(graph, layouts, pieces, everywhere).run(gather, homes)


class _Lowering:
    def __init__(self, graph: Graph, layouts: Layouts, pieces: int, everywhere: Placement) -> None:
        self.graph, self.layouts, self.pieces, self.everywhere = graph, layouts, pieces, everywhere
        self.items: list[Item] = []
        self.metas: dict[tuple[int, int], Meta] = {}
        self.alias: dict[tuple[int, int], int] = {}
        self.sbp: dict[int, str] = {}
        self.names: dict[int, str] = {}
        self.boxed: dict[tuple[int, Placement, NdSbp], int] = {}
        self.kind = {i.value: i.kind for i in graph.inputs}
        self.maker: dict[int, tuple[str, bool]] = {}  # value → phase and rate of its maker
        self.computed: set[int] = set()  # values that an op makes
        self.next = max(graph.metas, default=0) + 1
        self.comm_id = 0
        self.flops = self.flops_done = 0.0
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
            where, sbp = homes[i.name] if i.kind == "variable" else (self.everywhere, (B,))
            self.begin(i.value, where, sbp, i.name)
            self.maker[i.value] = ("state" if i.kind == "variable" else "source", False)
        for k, n in enumerate(self.graph.nodes):
            self.node(k, n)
        updates = []
        for old, new in self.graph.updates:
            where, sbp = homes[names[old]]
            updates.append((names[old], self.update(new, where, sbp)))
        results = []
        for r in self.graph.results:
            place, sbp = (self.everywhere, (B,)) if gather[r] else (self.layouts.placement[r], self.layouts.value[r])
            results.append((self.obtain(r, place, sbp, "forward"), place, sbp, self.graph.metas[r]))
        inputs = {i.value: (i.name, i.kind) for i in self.graph.inputs}
        return Program(
            tuple(self.items), self.metas, self.alias, self.sbp, self.names, inputs, tuple(updates), tuple(results),
            self.flops, self.flops_done,
        )  # fmt: skip

    def update(self, new: int, where: Placement, sbp: NdSbp) -> int:
        """The new value of a variable, made by an op on its ranks (not by a communication or by joining pieces)."""
        value = self.obtain(new, where, sbp, "optimizer")
        if value == new and value in self.computed:
            return value
        out = self.new(sbp, self.names[value])
        steps = {}
        for rank in where.ranks:
            self.metas[(out, rank)] = self.metas[(value, rank)]
            steps[rank] = (Step("actorflow.identity", (Ref(value),), (), (out,)),)
        self.items.append(Item("compute", "optimizer", where, False, (value,), (out,), steps))
        return out

    def begin(self, value: int, where: Placement, sbp: NdSbp, name: str) -> None:
        """A logical value exists on a placement in a layout."""
        self.boxed[(value, where, sbp)] = value
        self.sbp[value], self.names[value] = show(sbp), name
        meta = self.graph.metas[value]
        for index, rank in enumerate(where.ranks):
            self.metas[(value, rank)] = Meta(device_shape(meta.shape, sbp, where, index), meta.dtype)

    def node(self, k: int, n: Node) -> None:
        assert n.placement is not None
        call, operands = call_of(n, self.graph.metas)
        reads = [
            self.obtain(v, n.placement, need, n.phase)
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
                self.maker[o] = (n.phase, n.pieces)
        if n.op in JOINS:
            combine = "sum" if n.op == "actorflow.accumulate" else f"cat:{n.args[1]}"
            self.items.append(
                Item("join", n.phase, n.placement, False, (reads[0],), (n.outs[0],), combine=combine, where=n.where)
            )
            return
        steps, work = {}, 0.0
        for index, rank in enumerate(n.placement.ranks):
            local, metas = self.localised(
                call, self.layouts.chosen[k], coordinates(n.placement, index), n.placement.hierarchy
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
        self.flops += times * flops_of(call)
        self.flops_done += times * work
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
            )
        )

    def localised(
        self, call: OpCall, chosen: tuple[Signature, ...], at: tuple[int, ...], hierarchy: tuple[int, ...]
    ) -> tuple[OpCall, tuple[Meta, ...]]:
        """The op as the device at these mesh coordinates runs it, and the metas of its used outputs."""
        key = (call, chosen, at, hierarchy)
        if key not in self._local:
            outs = tuple(m for m in call.outs if m is not None)
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
            self._local[key] = (call, outs)
        return self._local[key]

    def obtain(self, value: int, where: Placement, sbp: NdSbp, phase: str) -> int:
        """The local value that is ``value`` on a placement in a layout; boxes it if need be."""
        key = (value, where, sbp)
        if key in self.boxed:
            return self.boxed[key]
        meta = self.graph.metas[value]
        if self.kind.get(value) in FREE_KINDS:
            if all(entry == B for entry in sbp) or not meta.shape:
                self.boxed[key] = value
                return value
            whole = (B,) * len(where.hierarchy)
            hops: tuple[Hop, ...] = route(meta.shape, where, whole, where, sbp)
            here = value
        else:
            source = self.layouts.placement[value]
            hops = route(meta.shape, source, self.layouts.value[value], where, sbp)
            here = self.boxed[(value, source, self.layouts.value[value])]
        made_in, pieces = self.maker[value]
        if made_in == "state":
            made_in = phase
        for hop in hops:
            after = (value, hop.target, hop.target_sbp)
            if after in self.boxed:
                here = self.boxed[after]
                continue
            here = self.hop(hop, here, meta, made_in, phase, pieces)
            self.boxed[after] = here
        return here

    def hop(self, hop: Hop, value: int, meta: Meta, made_in: str, phase: str, pieces: bool) -> int:
        out = self.new(hop.target_sbp, self.names[value])
        for index, rank in enumerate(hop.target.ranks):
            self.metas[(out, rank)] = Meta(device_shape(meta.shape, hop.target_sbp, hop.target, index), meta.dtype)
        if hop.kind == "all_reduce":
            ids = {group: self.count() for group in hop.groups}
            comms = {rank: Comm("all_reduce", ids[group], group) for group in hop.groups for rank in group}
            self.items.append(Item("comm", made_in, hop.source, pieces, (value,), (out,), comms=comms))
        elif hop.kind in ("all_gather", "all_to_all", "reduce_scatter"):
            number = self.count()
            comms = {
                rank: Comm(hop.kind, number, hop.source.ranks, (_exchange(hop, i),))
                for i, rank in enumerate(hop.source.ranks)
            }
            self.items.append(Item("comm", made_in, hop.source, pieces, (value,), (out,), comms=comms))
        else:
            self.copy(hop, value, out, made_in, phase, pieces)
        return out

    def count(self) -> int:
        self.comm_id += 1
        return self.comm_id - 1

    def copy(self, hop: Hop, value: int, out: int, made_in: str, phase: str, pieces: bool) -> None:
        """Local parts, and parts sent from rank to rank, put together at each target."""
        gathered: dict[int, list[tuple[int, Part]]] = {}
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
        pre = made_in if hop.kind == "send" else phase if made_in != "source" else "source"
        if cuts:
            writes = tuple(o for steps in cuts.values() for s in steps for o in s.outs)
            self.items.append(
                Item("compute", pre, hop.source, pieces, (value,), writes, {r: tuple(s) for r, s in cuts.items()})
            )
        for origin, to, pairs in sends:
            comm = Comm("send", self.count(), (origin, to))
            self.items.append(
                Item("comm", made_in, hop.source, pieces, tuple(pairs[::2]), tuple(pairs[1::2]), comms={origin: comm})
            )
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
            args: tuple[Arg, ...] = (
                tuple(Ref(n) for n, _ in parts_here), meta.shape, tuple(p.target.start for _, p in parts_here),
                Symbol(f"torch.{meta.dtype}"),
            )  # fmt: skip
            steps[to] = (Step("actorflow.arrange", args, (), (out,)),)
        post = phase if hop.kind == "send" else pre
        self.items.append(Item("compute", post, hop.target, pieces, tuple(sorted(reads)), (out,), steps))

    def cut(self, value: int, rank: int, part: Part, cuts: dict[int, list[Step]]) -> int:
        """The local value that is a rectangle of another one."""
        meta = self.metas[(value, rank)] if (value, rank) in self.metas else self.graph.metas[value]
        if part.source == Box((0,) * len(meta.shape), meta.shape):
            return value
        number = self.new((), self.names[value])
        self.metas[(number, rank)] = Meta(part.source.size, meta.dtype)
        cuts.setdefault(rank, []).append(
            Step("actorflow.carve", (Ref(value), part.source.start, part.source.size), (), (number,))
        )
        return number


def _exchange(hop: Hop, me: int) -> Exchange:
    send = tuple(tuple(p.source for p in row[me]) for row in hop.parts)
    receive = tuple(tuple(p.target for p in parts) for parts in hop.parts[me])
    return Exchange(send, receive, hop.add)


def resolve(value: int, alias: Mapping[tuple[int, int], int], rank: int) -> int:
    """The local value behind an alias."""
    while (value, rank) in alias:
        value = alias[(value, rank)]
    return value
