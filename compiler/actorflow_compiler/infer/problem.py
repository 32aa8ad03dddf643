"""The layout problem of one mesh axis: the items to decide, their options, and all prices.

An *item* is an op, or a variable, which reads its new value and makes its old one.  An *option* is a
signature.  Layouts and needs are numbered, so that prices are looked up and not computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from actorflow_compiler.boxing.linked_routes import are_linked_one_to_one, link_along, seconds_in_parts
from actorflow_compiler.boxing.routes import busiest_bytes
from actorflow_compiler.core.ops import Phase
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, PartialSum, Sbp, Split, largest, numel, share
from actorflow_compiler.graph.flops import flops_of
from actorflow_compiler.hints.constrain import CONSTRAIN
from actorflow_compiler.hints.goal import ALONG_SEQUENCE, ParallelMode
from actorflow_compiler.infer.axis_request import AxisRequest, CutGraph, RequiredLayout
from actorflow_compiler.infer.legal_options import LegalOptions, cuts_of
from actorflow_compiler.infer.prices import BLOCKS, BYTE_HELD, LOCAL, REDUNDANT, Prices, prices_of
from actorflow_compiler.infer.ring_decompositions import ring_cost
from actorflow_compiler.infer.sequence_axis import SequenceOptions, along_sequence, around_ring
from actorflow_compiler.signatures import OpCall, Signature
from actorflow_compiler.signatures.ring_signatures import WRITTEN_OUT

HELD_BETWEEN = ((Phase.FORWARD, Phase.BACKWARD), (Phase.BACKWARD, Phase.OPTIMIZER))  # phases of maker and reader


@dataclass(frozen=True, slots=True)
class LayoutItem:
    """An op or a variable, which gets one of its options."""

    name: str  # module or variable
    kind: int  # of op or variable; equal for items that may be tied, also on other devices: they have the same options
    placement: Placement
    phase: Phase
    reads: tuple[int, ...]
    outs: tuple[int, ...]  # -1 where nobody uses an output
    options: tuple[Signature, ...]
    own: tuple[float, ...]  # s of each option by itself: redundant work, inner communication
    node: int  # in graph order; -1 of a variable
    work: float = 0.0  # floating-point operations in an iteration


class Problem:
    """The items of one axis, and the prices of their options."""

    def __init__(self, cut: CutGraph, asked: AxisRequest) -> None:
        self.asked = asked
        self.inner_cost, self.hinted, self.mirrored = asked.inner_cost, asked.hinted, asked.mirrored
        self.hardware, self.experts = asked.hardware, asked.experts
        self.graph, self.placement, self.metas = cut.graph, cut.placement, cut.metas
        self.axis, self.mode, self.free, self.targets = asked.axis, asked.mode, asked.free, asked.targets
        graph, pieces, variables = cut.graph, asked.pieces, asked.variables
        self._prices: dict[tuple[Placement, Placement], Prices] = {}
        self.forbidden = prices_of(self.hardware.slowest).forbidden  # s that exclude an option
        self.layouts: list[Sbp] = []
        self._layout_ids: dict[Sbp, int] = {}
        self.needs: list[tuple[Sbp, Placement, str]] = []
        self.layout_of_need: list[int] = []
        self._need_ids: dict[tuple[Sbp, Placement, str], int] = {}
        self.rate = {o: pieces if n.pieces else 1 for n in graph.nodes for o in n.outs}
        stages = len({n.placement for n in graph.nodes})
        self.alive = {v: min(r, stages) if r > 1 else 1 for v, r in self.rate.items()}  # pieces in flight
        self.variables = set(variables)
        self.weights = set(variables)  # and views and casts of them
        for n, values in zip(graph.nodes, cut.reads, strict=True):
            one = n.phase != Phase.OPTIMIZER and len(set(values)) == len(n.outs) == 1 and values[0] in self.weights
            if one and numel(self.metas[values[0]].shape) == numel(self.metas[n.outs[0]].shape):
                self.weights.add(n.outs[0])
        self.phase = {o: n.phase for n in graph.nodes for o in n.outs}
        self.split_later = self._of_weights(cut) if asked.later > 1 else set()  # values that further axes split
        self.items: list[LayoutItem] = []
        numbers: dict[Hashable, int] = {}
        self.value_kind = {  # value → a number; equal for values whose boxings and memory have the same prices
            v: numbers.setdefault(self._value_kind(v), len(numbers)) for v in self.placement
        }
        self._edges: dict[tuple[int, int], _Edges] = {}
        self._bytes: dict[tuple[int, int], float] = {}
        self.along: list[SequenceOptions] = []  # of each node, where the axis is for the sequence
        self._collect(cut, asked)
        self.possible = {item.outs[0]: {s.outs[0] for s in item.options} for item in self.items if item.node < 0}
        self.readers: dict[int, list[int]] = {}
        for i, item in enumerate(self.items):
            for v in set(item.reads):
                self.readers.setdefault(v, []).append(i)
        self.producer = {o: i for i, item in enumerate(self.items) for o in item.outs if o >= 0}
        alike: dict[Hashable, int] = {}
        self.item_kind = [  # equal for items whose options have the same prices in equal surroundings
            alike.setdefault((item.kind, item.placement, item.own), len(alike)) for item in self.items
        ]
        self.touched = [  # the values that each item reads or makes
            tuple(dict.fromkeys(v for v in (*item.reads, *item.outs) if v >= 0)) for item in self.items
        ]
        made: dict[int, list[list[int]]] = {}  # by kind
        self.makes: list[list[list[int]]] = []
        self.wants: list[list[list[tuple[int, int]]]] = []
        self.kept: list[list[list[tuple[int, int]]]] = []
        wanted_at: dict[Hashable, list[list[int]]] = {}  # for items alike: the need of each operand, option by option
        for item in self.items:
            if item.kind not in made:
                made[item.kind] = [[self.layout_id(o) for o in s.outs] for s in item.options]
            self.makes.append(made[item.kind])
            key = (item.kind, item.placement, tuple(v in self.variables for v in item.reads))
            if key not in wanted_at:
                pairs = [zip(item.reads, s.ins, strict=True) for s in item.options]
                wanted_at[key] = [[self.need_id(v, sbp, item) for v, sbp in pair] for pair in pairs]
            self.wants.append([sorted({*zip(item.reads, needs, strict=True)}) for needs in wanted_at[key]])
            waits = [self.waits(v, item) for v in item.reads]
            self.kept.append([
                sorted({(v, self.layout_id(sbp)) for v, sbp, w in zip(item.reads, s.ins, waits, strict=True) if w})
                for s in (item.options if any(waits) else ())
            ] or [[] for _ in item.options])  # fmt: skip

    def _of_weights(self, cut: CutGraph) -> set[int]:
        """The weights of several dims with what is computed of them alone, and their gradients."""
        metas, found = self.metas, {v for v in self.weights if len(self.metas[v].shape) > 1}
        sizes = {numel(metas[v].shape) for v in found}
        for n, call, values in reversed(list(zip(self.graph.nodes, cut.calls, cut.reads, strict=True))):
            if n.phase == Phase.OPTIMIZER:
                found.update(v for v in (*values, *n.outs) if v >= 0 and numel(metas[v].shape) in sizes)
            elif len(n.outs) == 1 and n.outs[0] in found and not flops_of(call):  # casts, views and sums of gradients
                found.update(v for v in values if v >= 0 and numel(metas[v].shape) == numel(metas[n.outs[0]].shape))
        return found

    def state(self, i: int) -> bool:
        """Whether an item is optimizer state: a variable that only ops of the optimizer's phase read."""
        item = self.items[i]
        read = self.readers.get(item.outs[0], ())
        return item.node < 0 and all(self.items[r].phase == Phase.OPTIMIZER for r in read)

    def is_use(self, i: int) -> bool:
        """Whether an item is the op by which a phase reads a variable, and at which the variable may be gathered."""
        item = self.items[i]
        return item.node >= 0 and self.graph.nodes[item.node].op == CONSTRAIN and item.reads[0] in self.variables

    def _value_kind(self, value: int) -> Hashable:
        """What the prices of a value's boxings and memory depend on."""
        return (
            self.metas[value], self.placement[value], self.rate.get(value, 1), self.alive.get(value, 1),
            value in self.variables, value in self.weights, value in self.experts.weights, value in self.split_later,
            value in self.free, self.free.get(value),
        )  # fmt: skip

    def _alike(self, placement: Placement) -> Hashable:
        """Equal for placements on which an op has the same options at the same prices, as on stages of one size."""
        return placement.type, placement.hierarchy, placement.weights, self.prices(placement, placement)

    def size(self, placement: Placement) -> int:
        """The number of devices of a placement along this axis."""
        return placement.hierarchy[self.axis] if self.axis < len(placement.hierarchy) else 1

    def layout_id(self, sbp: Sbp | None) -> int:
        """The number of a layout; -1 for none."""
        if sbp is None:
            return -1
        if sbp not in self._layout_ids:
            self._layout_ids[sbp] = len(self.layouts)
            self.layouts.append(sbp)
        return self._layout_ids[sbp]

    def need_id(self, value: int, sbp: Sbp, item: LayoutItem) -> int:
        """The number of a need; variables are gathered for each phase, others once, and once more for the optimizer."""
        apart = value in self.variables or item.phase == Phase.OPTIMIZER
        return self._need((sbp, item.placement, item.phase if apart else ""))

    def target_need(self, target: RequiredLayout) -> int:
        """The number of the need of a required layout."""
        return self._need((target.sbp, target.placement, "result" if target.value in self.variables else ""))

    def whole_need(self, need: int) -> int:
        """The number of the same need, but for the whole (broadcast) value."""
        _, where, phase = self.needs[need]
        return self._need((B, where, phase))

    def _need(self, key: tuple[Sbp, Placement, str]) -> int:
        if key not in self._need_ids:
            self._need_ids[key] = len(self.needs)
            self.needs.append(key)
            self.layout_of_need.append(self.layout_id(key[0]))
        return self._need_ids[key]

    def waits(self, value: int, reader: LayoutItem) -> bool:
        """Whether a value is held until a later phase: activations for backward, gradients for the optimizer."""
        return (self.phase.get(value), reader.phase) in HELD_BETWEEN

    def _collect(self, cut: CutGraph, asked: AxisRequest) -> None:
        calls, reads, variables = cut.calls, cut.reads, asked.variables
        new = dict(self.graph.updates)
        names = {i.value: i.name for i in self.graph.inputs}
        legal = LegalOptions(cut, asked, cuts_of(variables))
        found, natural = legal.run(), legal.natural
        parts = max(map(self.size, {n.placement for n in self.graph.nodes if n.placement is not None}), default=1)
        if self.mode in ALONG_SEQUENCE and parts > 1 and not self.mirrored:
            uneven = any(cut.ragged)
            given = (self.graph, calls, reads, self.metas, found, self.weights, parts, uneven, self.mode.value)
            self.along = along_sequence(*given)
            if self.mode == ParallelMode.RING:
                self.along = [around_ring(of) for of in self.along]
            found = [of.options for of in self.along]
        if self.experts.grouped and not self.mirrored:
            found = [
                self.experts.options(n, legal) if n.placement is not None and self.size(n.placement) > 1 else legal
                for n, legal in zip(self.graph.nodes, found, strict=True)
            ]
        found = [self._of_own_rows(options, values) for options, values in zip(found, reads, strict=True)]
        numbers: dict[Hashable, int] = {}
        for value, layouts in variables.items():
            if len(layouts) > 1:
                layouts += tuple(natural.get(value, ()))
            updated = (new[value],) if value in new else ()
            options = tuple(Signature((s,) * len(updated), (s,), None) for s in layouts)
            kind: Hashable = ("variable", self.metas[value], layouts)
            where, costs = self.placement[value], tuple(_in_blocks(s) * BLOCKS for s in options)
            number = numbers.setdefault(kind, len(numbers))
            item = LayoutItem(names[value], number, where, Phase.OPTIMIZER, updated, (value,), options, costs, -1)
            self.items.append(item)
        priced: dict[tuple[int, int], tuple[float, tuple[float, ...]]] = {}  # (kind, rate) → work, price of each option
        for k, (n, call) in enumerate(zip(self.graph.nodes, calls, strict=True)):
            assert n.placement is not None
            rate = self.rate.get(n.outs[0], 1)
            kind = (call, n.phase, self._alike(n.placement), found[k])
            number = numbers.setdefault(kind, len(numbers))
            if (number, rate) not in priced:
                work = flops_of(call) * rate
                own = tuple(self._own(call, s, n.placement, work, rate) for s in found[k])
                priced[(number, rate)] = work, own
            work, own = priced[(number, rate)]
            self.items.append(
                LayoutItem(n.where, number, n.placement, n.phase, reads[k], n.outs, found[k], own, k, work)
            )

    def _of_own_rows(self, options: tuple[Signature, ...], reads: Sequence[int]) -> tuple[Signature, ...]:
        """The options by which each device takes its own rows of a batch from its source, or all if there is none.

        That is a rule of data axes and no price: a few bytes may be cheaper to read whole than to agree on later, but a
        device then reads what is not its own.  Where hints split something, the batch may be better left whole.
        """
        cut = [(j, self.free.get(v)) for j, v in enumerate(reads)]
        if self.mode != ParallelMode.DATA or self.hinted or self.mirrored or not any(rows for _, rows in cut):
            return options
        return tuple(s for s in options if all(s.ins[j] == rows for j, rows in cut if rows)) or options

    def _own(self, call: OpCall, s: Signature, where: Placement, work: float, rate: int) -> float:
        """Seconds of an option by itself."""
        parts, count = self.asked.parts(where), self.size(where)
        if count == 1:
            return 0.0
        held = sum(m.nbytes for m, layout in zip(call.outs, s.outs, strict=True) if m and not isinstance(layout, Split))
        total = held * BYTE_HELD
        if s.inner and call.op in WRITTEN_OUT:
            total += rate * self._ring(call, where)
        elif s.inner and self.inner_cost is not None:
            moved, times = self.inner_cost(call, s, parts)
            prices = self.prices(where, where)
            total += rate * (moved / count / prices.bandwidth + times * prices.latency)
        if s.letter is None and not self.mirrored:
            total += work * (1 - 1 / count) * REDUNDANT
        return total

    def _ring(self, call: OpCall, where: Placement) -> float:
        """Seconds of attention around a ring beside its arithmetic, during which most of its communication is done."""
        count, prices, hardware = self.size(where), self.prices(where, where), self.hardware
        cost = ring_cost(call, count)
        seconds = cost.moved / count / prices.bandwidth + cost.times * prices.latency
        computing = flops_of(call) / count / hardware.flops_on({call.ins[0].dtype: 1}) * (count - 1) / count
        shown = max(seconds * (1 - cost.hidden), seconds - computing)
        return shown + cost.joined / hardware.memory_bytes_per_s + cost.times * hardware.fire_overhead_s

    def prices(self, source: Placement, target: Placement) -> Prices:
        """What communication along this axis costs, or from one placement to another."""
        key = (source, target)
        if key not in self._prices:
            along = source == target and self.axis < len(source.hierarchy)
            both = tuple(dict.fromkeys((*source.ranks, *target.ranks)))
            link = link_along(self.hardware, source, self.axis) if along else self.hardware.link(both)
            self._prices[key] = prices_of(link)
        return self._prices[key]

    def edge(self, value: int, have: int, need: int) -> float:
        """Seconds of boxing from layout ``have`` of a value to ``need``."""
        return self.edges(value, have)[need]

    def edges(self, value: int, have: int) -> Mapping[int, float]:
        """Need → seconds of boxing a value from layout ``have``; computed when it is first asked for."""
        key = (self.value_kind[value], have)
        found = self._edges.get(key)
        if found is None:
            found = self._edges[key] = _Edges(lambda need: self._edge(value, self.layouts[have], self.needs[need]))
        return found

    def _edge(self, value: int, have: Sbp, need: tuple[Sbp, Placement, str]) -> float:
        sbp, target, phase = need
        if value in self.free:
            taken = self.free[value]
            return 0.0 if sbp in (B, taken) or (taken is None and self.mode != ParallelMode.TENSOR) else self.forbidden
        source = self.placement[value]
        p, c = self.asked.parts(source), self.asked.parts(target)
        same = source == target
        if same and have == sbp:
            return 0.0
        nbytes = self.metas[value].nbytes / (self.asked.later if value in self.split_later else 1)
        moved = busiest_bytes(have, sbp, nbytes, p, c, same)
        if not moved:
            return LOCAL
        if not same and have == sbp and p == c and not isinstance(have, PartialSum) and have != B:
            moved *= 0.99  # one sender for each receiver: nothing to join
        prices = self.prices(source, target)
        waits = prices.grouped if phase else prices.latency
        each = moved / prices.bandwidth + waits
        if not same:
            each = min(each, self._in_parts(value, have, sbp, target))
        seconds = self.rate.get(value, 1) * each
        stored = self.mode == ParallelMode.TENSOR and value in self.weights and len(self.metas[value].shape) > 1
        if same and (stored or value in self.experts.weights):
            seconds += self.forbidden  # a weight has to be used in the layout it is stored in
        return seconds

    def _in_parts(self, value: int, have: Sbp, sbp: Sbp, target: Placement) -> float:
        """Seconds from a value's placement to another one over its parts; infinite where they are not linked so."""
        source = self.placement[value]
        count, near = self.size(source), self.prices(source, source)
        if count == 1 or not are_linked_one_to_one(source, target):
            return math.inf
        far = self.prices(source, target)
        return seconds_in_parts(have, sbp, self.metas[value].nbytes, count, near.link, far.link)

    def held_bytes(self, value: int, layout: int) -> float:
        """Bytes on one device of a value in a layout."""
        key = (self.value_kind[value], layout)
        found = self._bytes.get(key)
        if found is None:
            meta, parts, sbp = self.metas[value], self.asked.parts(self.placement[value]), self.layouts[layout]
            size = float(meta.nbytes * self.alive.get(value, 1))
            if isinstance(sbp, Split):  # of the size that earlier axes leave, in the maker's layout
                along = meta.shape[sbp.dim]
                start, stop = share(along, parts, largest(parts))
                size *= (stop - start) / max(1, along)
            found = self._bytes[key] = size
        return found


class _Edges(dict[int, float]):
    """Need → seconds, computed when it is first asked for."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        super().__init__()
        self.seconds = seconds

    def __missing__(self, need: int) -> float:
        found = self[need] = self.seconds(need)
        return found


def _in_blocks(s: Signature) -> int:
    """How many outputs of a signature are cut in more than one piece for each device."""
    return sum(isinstance(layout, Split) and (layout.blocks > 1 or layout.unit > 1) for layout in s.outs)
