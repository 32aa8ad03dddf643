"""Find the signatures that the ops of a graph may have along a mesh axis: the options of inference.

Most depend on the op alone.  A cut with blocks or units (the heads of fused queries, keys and values, say) is an option
only where a neighbour has it: such cuts begin at joins, hints and variables, and are passed on from op to op.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actorflow_compiler.core.ops import Phase
from actorflow_compiler.core.sbp import Parts, Sbp, Split, all_share
from actorflow_compiler.hints.constrain import CONSTRAIN, honoured, wanted
from actorflow_compiler.hints.goal import ALONG_SEQUENCE, ParallelMode
from actorflow_compiler.infer.axis_request import AxisRequest, CutGraph
from actorflow_compiler.signatures import OpCall, Signature, signatures
from actorflow_compiler.signatures.ring_signatures import WRITTEN_OUT
from actorflow_compiler.signatures.rounded_sums import narrows_sums, rounds_sums

Cuts = dict[Split, None]  # in the order in which they were found
JOINS = frozenset({"aten.split.Tensor", "aten.split_with_sizes.default", "aten.cat.default"})  # blocks side by side
NATURAL = 8  # most cuts with blocks or units that are tried for one value
AROUND = frozenset({*ALONG_SEQUENCE, ParallelMode.AUTO})  # modes in which attention may go around a ring


@dataclass(frozen=True, slots=True)
class _Option:
    layouts: tuple[Sbp | None, ...]  # of operands and outputs
    cuts: tuple[tuple[int, Split], ...]  # those that are passed on: (number of the operand or output, its layout)


@dataclass(slots=True)
class LegalOptions:
    """The options of every op of a graph along one mesh axis, found by ``run``."""

    cut: CutGraph
    asked: AxisRequest
    natural: dict[int, Cuts]  # value → the cuts with blocks or units that it or a neighbour has
    found: list[tuple[Signature, ...]] = field(init=False)
    _seen: list[object] = field(init=False)  # what was known of each node when it was looked at
    _legal: dict[tuple[Any, ...], tuple[tuple[Signature, ...], tuple[_Option, ...]]] = field(default_factory=dict)

    def run(self) -> list[tuple[Signature, ...]]:
        """The signatures of every op; ``natural`` has the cuts of values that were found on the way.

        Cuts are followed forward, then backward, through the graph.
        """
        everything = range(len(self.cut.calls))
        self.found, self._seen = [()] * len(self.cut.calls), [None] * len(self.cut.calls)
        for k in everything:
            self._look(k, self.cut.graph.nodes[k].op in JOINS)
        for begins in (False, True):  # joins and hints first, then views
            for order in (reversed(everything), everything):
                for k in order:
                    if begins or any(v in self.natural for v in (*self.cut.reads[k], *self.cut.graph.nodes[k].outs)):
                        self._look(k, begins)
        return self.found

    def _look(self, k: int, begins: bool) -> None:
        """Find the signatures of an op, and pass cuts of its operands on to its outputs and back."""
        n, call = self.cut.graph.nodes[k], self.cut.calls[k]
        assert n.placement is not None
        parts = self.asked.parts(n.placement)
        if parts == 1 or self.asked.mirrored:
            self.found[k] = signatures(call, parts)[:1]
            return
        values = (*self.cut.reads[k], *n.outs)
        known = (begins, *(len(self.natural.get(v, ())) for v in values))
        if self._seen[k] == known:  # cuts are added, and never taken away
            return
        self._seen[k] = known
        cuts = {s for v in values for s in self.natural.get(v, ())}
        if n.op == CONSTRAIN:
            cuts |= {s for s in [wanted(call, self.asked.axis)] if isinstance(s, Split)}
            begins = True
        key = (call, parts, n.phase == Phase.OPTIMIZER, frozenset(cuts), frozenset(self.cut.ragged[k]))
        if key not in self._legal:
            legal = self._options(*key)
            self._legal[key] = legal, tuple(_Option((*s.ins, *s.outs), _passed_on(call, s, parts)) for s in legal)
        self.found[k], options = self._legal[key]
        for option in options if begins or cuts else ():
            if begins or any(x in self.natural.get(v, ()) for v, x in zip(values, option.layouts, strict=True)):
                self._pass_on(values, option)

    def _pass_on(self, values: Sequence[int], option: _Option) -> None:
        for j, layout in option.cuts:
            if values[j] >= 0:
                known = self.natural.setdefault(values[j], {})
                if len(known) < NATURAL:
                    known[layout] = None

    def _options(
        self, call: OpCall, parts: Parts, optimizer: bool, cuts: frozenset[Split], ragged: frozenset[tuple[int, int]]
    ) -> tuple[Signature, ...]:
        """The signatures that an op may have, of the optimizer's phase or another, where neighbours have these cuts."""
        options = signatures(call, parts, wanted=tuple(cuts), inner=self.asked.inner_cost is not None)
        options = tuple(s for s in options if not _splits_ragged(ragged, s))
        if self.asked.mode not in AROUND:
            options = tuple(s for s in options if not (s.inner and call.op in WRITTEN_OUT))
        rounds = rounds_sums if optimizer else narrows_sums  # products of few bits show in optimizers such as Muon
        options = tuple(s for s in options if not rounds(call, s))
        return honoured(call, self.asked.axis, options)


def cuts_of(variables: Mapping[int, tuple[Sbp, ...]]) -> dict[int, Cuts]:
    """Variable → those of its layouts that are cuts with blocks."""
    return {v: {s: None for s in some if isinstance(s, Split) and s.blocks > 1} for v, some in variables.items()}


def _passed_on(call: OpCall, s: Signature, parts: Parts) -> tuple[tuple[int, Split], ...]:
    """The cuts of a signature that have blocks or units and leave no device without a part."""
    tensors = zip((*call.ins, *call.outs), (*s.ins, *s.outs), strict=True)
    return tuple(
        (j, x)
        for j, (meta, x) in enumerate(tensors)
        if meta is not None and isinstance(x, Split) and (x.blocks > 1 or x.unit > 1)
        if all_share(meta.shape[x.dim] // (x.blocks * x.unit), parts)
    )


def _splits_ragged(ragged: Collection[tuple[int, int]], s: Signature) -> bool:
    """Whether a signature splits a dim whose size an earlier axis has made different on different devices."""
    return any(isinstance(x, Split) and (i, x.dim) in ragged for i, x in enumerate((*s.ins, *s.outs)))
