"""Cut the graph of a whole step into micro-batches over the time axis.

Time is one more axis of the mesh: a value that is split on it comes in pieces, a partial sum on it
adds up over the pieces.  ``actorflow.unpack`` takes piece i of a whole value, ``actorflow.pack``
joins the pieces, ``actorflow.accumulate`` adds them, ``actorflow.last`` takes the last one.  The
layouts come from the same signatures as those of devices, so means, sums and masked losses are exact.
Only batch norm works on each piece by itself (``piecewise.py``).  Values that depend on the batch alone
and are not split (counts of tokens, a permuted batch) are computed once, before all pieces.  Values that
depend on no input (random numbers, masks, constants) take the layout that their readers want.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.ops import Arg, Meta, Phase, Ref, substitute_all
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, P, Sbp, Split, local_shape
from actorflow_compiler.custom_ops.random import UNIFORM, in_pieces
from actorflow_compiler.graph.graph import (
    CALL_INPUTS,
    Graph,
    Input,
    InputKind,
    Node,
    call_of,
    prune,
    verify,
    with_other_reads,
)
from actorflow_compiler.hints.packing import (
    IN_PIECES,
    MARKERS,
    count_pieces,
    marker_of,
    without_markers,
)
from actorflow_compiler.rewriting.piecewise import (
    BACKWARD,
    PER_PIECE,
    PIECEWISE,
    S0,
    PerPiece,
    TimeLayout,
    reads_pieces,
    split_of_batch,
)
from actorflow_compiler.signatures import OpCall, Signature, local_call, signatures
from actorflow_compiler.signatures.local_mismatch import check_local_call
from actorflow_compiler.signatures.rounded_sums import narrows_sums
from actorflow_compiler.substitutes.random_table import is_random

IMPOSSIBLE = 1000  # the cost of an operand that cannot be brought to what a signature needs
CONSTANTS = (InputKind.CONSTANT, InputKind.SCALAR)
STATELESS = frozenset({*CALL_INPUTS, *CONSTANTS})  # inputs that are no state


@dataclass(frozen=True, slots=True)
class MicroBatchedStep:
    """A step in micro-batches."""

    graph: Graph
    count: int  # micro-batches
    notes: tuple[str, ...]


def cut_in_time(
    graph: Graph, micro_batches: int, asked: str = "micro_batches", later: bool = False
) -> MicroBatchedStep:
    """Split the step into pieces: as many as ``micro_batches`` and the user's markers say.

    With ``micro_batches`` 1 only values passed to ``flow.unpack`` are in pieces, else the batch is, too.  ``asked``
    says who asked for ``micro_batches``, for an error.  ``later``: the job has run with another batch; this one goes in
    the largest number of equal pieces up to that which it divides into.  Raises CallError where markers and
    ``micro_batches`` contradict each other, and where the batch does not divide.
    """
    count, notes = count_pieces(graph, micro_batches, asked, later)
    if count == 1:
        return MicroBatchedStep(without_markers(graph), 1, notes)
    walk = _MicroBatching(graph, count, of_batch=micro_batches > 1)
    result = verify(prune(walk.run()))
    return MicroBatchedStep(result, count, (*notes, *walk.notes))


class _MicroBatching:
    def __init__(self, graph: Graph, count: int, of_batch: bool) -> None:
        self.graph, self.count = graph, count
        self.metas: dict[int, Meta] = {i.value: graph.metas[i.value] for i in graph.inputs}
        self.next = max(graph.metas, default=0) + 1
        self.nodes: list[Node] = []
        self.notes: list[str] = []
        self.piece: dict[int, tuple[int, TimeLayout]] = {}  # original value → (its number as a piece, layout over time)
        self.whole: dict[int, int] = {i.value: i.value for i in graph.inputs}  # original value → its number as a whole
        self.kind = {i.value: i.kind for i in graph.inputs}
        self.maker = {o: n for n in graph.nodes for o in n.outs if o >= 0}
        self.stateless = {i.value for i in graph.inputs if i.kind in STATELESS}
        batch = {i.value for i in graph.inputs if i.kind == InputKind.BATCH}
        self.early = batch if of_batch else set()  # computed whole before any piece, and in pieces where possible
        self.computed = set() if of_batch else batch  # whole, as are values that depend on these alone
        self.stays: set[int] = set()  # values that a user keeps whole beside others in pieces
        self.same: dict[int, int] = {}  # result of a marker without effect → the marked value
        self.idle: set[int] = set()  # numbers of markers without effect; their gradients have none either
        self.narrowed: dict[tuple[int, int, Split], int] = {}  # (value, stage, layout) → its piece
        self.free: dict[int, Node] = {}  # original value → its maker, if it does not depend on the batch
        self.free_signatures: dict[tuple[int, Sbp], Signature | None] = {}  # (free value, layout) → its signature
        self.free_pieces: dict[tuple[int, TimeLayout], int] = {}  # (free value, layout) → its number as a piece
        names = {i.value: i.name for i in graph.inputs}
        self.updated = {new: names[old].rpartition(".")[0] for old, new in graph.updates}  # new value → its module
        self.moving: set[str] = set()  # modules whose statistics move on with every piece
        # variables and constants, and values that depend on these alone
        self.of_state = {i.value for i in graph.inputs if i.kind in (*CONSTANTS, InputKind.VARIABLE)}
        self.late: set[int] = set()  # values in pieces that wait for all pieces of others
        self.index = self.new(Meta((), "int64"))

    def new(self, meta: Meta) -> int:
        self.metas[self.next] = meta
        self.next += 1
        return self.next - 1

    def run(self) -> Graph:
        for n in self.graph.nodes:
            n = with_other_reads(n, self.same)
            self.maker.update({o: n for o in n.outs if o >= 0})
            if not is_random(n) and all(v in self.stateless for v in n.reads()):
                self.stateless.update(n.outs)
            if not is_random(n) and all(v in self.of_state for v in n.reads()):
                self.of_state.update(n.outs)
            (self.mark if n.op in MARKERS else self.node)(n)
        updates = [(old, self.update(self.same.get(new, new))) for old, new in self.graph.updates]
        results = [self.as_whole(self.same.get(r, r), None) for r in self.graph.results]
        inputs = (*self.graph.inputs, Input(self.index, "piece", InputKind.PIECE))
        return Graph(inputs, tuple(self.nodes), self.metas, tuple(results), tuple(updates))

    def mark(self, n: Node) -> None:
        """Carry out a marker: from here on the value is in pieces, or whole."""
        mark, (out,) = marker_of(n), n.outs
        value = mark.value
        split = value in self.early or (value in self.piece and self.piece[value][1] == S0)
        once = value in self.whole and value not in self.piece and value not in self.early
        if mark.number in self.idle or (split if n.op == IN_PIECES else once):
            self.idle.add(mark.number)
            self.same[out] = value
        elif n.op == IN_PIECES:
            free = value in self.free and value not in self.whole
            number = self.make_free(value, S0, n) if free else self.narrow(self.as_whole(value, n.placement), S0, n)
            self.piece[out] = (number, S0)
            self.whole[out] = self.as_whole(value, n.placement)
        else:
            self.whole[out] = self.as_whole(value, n.placement)
            self.stays.add(out)

    def update(self, new: int) -> int:
        """The number of a variable's new value: batch-norm statistics are updated by every piece, other state once."""
        return self.piece[new][0] if self._moves(new) else self.as_whole(new, None)

    def _moves(self, value: int) -> bool:
        """Whether a value is a new batch-norm statistic, or another new buffer of its module: a counter of batches."""
        if value not in self.piece or value not in self.updated:
            return False
        counts = value in self.of_state and self.updated[value] in self.moving
        return self.piece[value][1] is PER_PIECE or counts

    def node(self, n: Node) -> None:
        if n.phase != Phase.OPTIMIZER and not is_random(n) and all(self._needs_no_piece(v) for v in n.reads()):
            self.free.update({o: n for o in n.outs if o >= 0})  # its readers decide its layout
            return
        layouts = [self.layout(v) for v in n.reads()]
        split = split_of_batch(n, layouts)
        if split is not None and reads_pieces(n, layouts):
            self.emit_piecewise(n, split)
            return
        if any(v in self.stays for v in n.reads()):
            self.stays.update(o for o in n.outs if o >= 0)
            self.emit_whole(n)
            return
        if n.phase == Phase.OPTIMIZER or (
            any(v in self.computed for v in n.reads()) and not any(self._only_in_pieces(v) for v in n.reads())
        ):
            self.emit_whole(n)
            return
        if split is not None:
            self.notes_once(
                f"{n.op.split('.')[1]} works on each micro-batch by itself, as an eager loop over micro-batches does"
            )
            self.emit_piecewise(n, split)
            return
        if n.phase == Phase.BACKWARD and all(x == P for x in layouts) and any(self._elsewhere(v, n) for v in n.reads()):
            self.emit_whole(n)  # gradients of a tied parameter travel once, added up, not with every piece
            return
        if not is_random(n) and (signature := self.choose(n, layouts)) is not None:
            if all(s == B for s in signature.outs if s is not None) and self._of_batch_alone(n):
                self.recompute_whole(n)
                self.early.update(o for o in n.outs if o >= 0)
            else:
                self.emit_pieces(n, signature)
            return
        if any(layout is None or isinstance(layout, Split) for layout in layouts):  # else it is of sums alone
            where = f" ({n.where})" if n.where else ""
            self.notes_once(
                f"{n.op} cannot be split into micro-batches here{where}: its inputs are packed and it runs once"
            )
        self.emit_whole(n)

    def _only_in_pieces(self, value: int) -> bool:
        """Whether a value exists only in pieces, and is no partial sum, which could be added up first."""
        return value in self.piece and self.piece[value][1] != P

    def _elsewhere(self, value: int, n: Node) -> bool:
        """Whether a value is made in another stage than its reader's."""
        maker = self.maker.get(value)
        return maker is not None and (maker.placement, maker.stage) != (n.placement, n.stage)

    def _of_batch_alone(self, n: Node) -> bool:
        """Whether an op reads only batches, or values computed from them, and no state."""
        reads = set(n.reads())
        return reads <= self.stateless and any(v in self.early or v in self.piece for v in reads)

    def _needs_no_piece(self, value: int) -> bool:
        return value in self.free or self.kind.get(value) in (InputKind.SCALAR, InputKind.CONSTANT)

    def free_signature(self, value: int, need: Sbp) -> Signature | None:
        """The signature that makes a free value in a layout; None if there is none."""
        if (value, need) not in self.free_signatures:
            self.free_signatures[value, need] = self._find_free_signature(value, need)
        return self.free_signatures[value, need]

    def _find_free_signature(self, value: int, need: Sbp) -> Signature | None:
        n = self.free[value]
        call, operands = call_of(n, self.graph.metas)
        at = n.outs.index(value)
        for signature in signatures(call, self.count, wanted=[need] if isinstance(need, Split) else []):
            if signature.outs[at] == need and self._even_outs(n, call, signature):
                needs = zip(operands, signature.ins, strict=True)
                if all(self.free_signature(v, s) if v in self.free else s == B for v, s in needs):
                    return signature
        return None

    def _even_outs(self, n: Node, call: OpCall, signature: Signature) -> bool:
        """Whether all pieces of the outputs have one shape, and one op with the same arguments makes them."""
        cut = [(o, m) for o, m in zip(signature.outs, call.outs, strict=True) if isinstance(o, Split) and m is not None]
        if not all(_even(o, m.shape, self.count) and not (n.op == UNIFORM and o.blocks > 1) for o, m in cut):
            return False
        return n.op == UNIFORM or _made_of(call, signature, self.count, 0) == _made_of(
            call, signature, self.count, self.count - 1
        )

    def notes_once(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def layout(self, value: int) -> TimeLayout | None:
        """A value's layout over time; None for a batch, which is whole and can be unpacked."""
        if value in self.piece:
            return self.piece[value][1]
        return None if value in self.early else B

    def choose(self, n: Node, layouts: list[TimeLayout | None]) -> Signature | None:
        """The cheapest signature for operands in these layouts; None where the op cannot run on pieces of them.

        Batches may be unpacked, and a broadcast value may be one piece's term of a sum.
        """
        call, operands = call_of(n, self.graph.metas)
        wanted = [s for s in layouts if isinstance(s, Split)]
        flows = bool(wanted) or None in layouts
        best: tuple[int, Signature] | None = None
        for signature in signatures(call, self.count, wanted=wanted):
            needs = zip(operands, signature.ins, layouts, call.ins, strict=True)
            cost = sum(self._cost(value, need, have, meta, flows) for value, need, have, meta in needs)
            if cost >= IMPOSSIBLE or narrows_sums(call, signature):
                continue
            if (best is None or cost < best[0]) and self._even_outs(n, call, signature):
                best = (cost, signature)
        return best[1] if best else None

    def _cost(self, value: int, need: Sbp, have: TimeLayout | None, meta: Meta, flows: bool) -> int:
        """A relative cost, without unit, of bringing an operand to the layout that a signature needs.

        ``flows``: another operand comes in pieces anyway.
        """
        if value in self.free and need != P and self.free_signature(value, need):
            return 0
        if isinstance(need, Split) and not _even(need, meta.shape, self.count):
            return IMPOSSIBLE
        if have is None:  # a batch, perhaps several joined into one
            by_sample = isinstance(need, Split) and need.dim == 0
            return 0 if need == S0 else 1 if by_sample else 3 if need == B else IMPOSSIBLE
        if need == have:
            return 0
        if have == B:
            return 2  # every piece slices the whole, or the first piece takes all of it
        if need == B and value in self.stateless:
            return 3  # recomputed for the whole batch
        if have == P and isinstance(need, Split) and value in self.stateless:
            return 5  # recomputed, and every piece takes its slice
        if have == P and flows:
            return 20  # all pieces have to be there first, but then they flow on
        return IMPOSSIBLE

    def emit_pieces(self, n: Node, signature: Signature) -> None:
        self.piece.update(self._emit(n, signature))
        self.wait(n)

    def _emit(self, n: Node, signature: Signature) -> dict[int, tuple[int, TimeLayout]]:
        """Add the node as it runs on a piece; returns its outputs in the form of ``self.piece``."""
        call, operands = call_of(n, self.graph.metas)
        local = local_call(call, signature, self.count, 0)
        check_local_call(call, local, n.line or n.where)
        op, args, kwargs = local.op, local.args, local.kwargs
        values = [self.as_piece(v, need, n) for v, need in zip(operands, signature.ins, strict=True)]
        (layout, *_) = signature.outs
        if op == UNIFORM and isinstance(layout, Split):
            (drawn,) = local.outs
            assert drawn is not None
            args = in_pieces(args, layout.dim, drawn.shape[layout.dim], Ref(len(values)))
            values.append(self.index)
        outs: list[int] = []
        made: dict[int, tuple[int, TimeLayout]] = {}
        for o, meta, layout in zip(n.outs, local.outs, signature.outs, strict=True):
            if o < 0 or meta is None or layout is None:
                outs.append(-1)
                continue
            outs.append(self.new(meta))
            made[o] = (outs[-1], layout)
        self.append(n, op, args, kwargs, values, outs, True)
        return made

    def emit_piecewise(self, n: Node, split: Split) -> None:
        call, _ = call_of(n, self.graph.metas)
        _, ins, layouts = PIECEWISE[n.op]
        layouts = tuple(split if layout == S0 else layout for layout in layouts)
        needs = ((a.index, split if ins[at] == S0 else ins[at]) for at, a in enumerate(n.args) if isinstance(a, Ref))
        values = [self.as_piece(value, need, n) for value, need in needs]
        self.check_statistics(n)
        self.moving.update(self.updated[o] for o in n.outs if o in self.updated)
        outs = []
        for o, layout in zip(n.outs, layouts, strict=True):
            if o < 0:
                outs.append(-1)
                continue
            meta = self.graph.metas[o]
            shape = meta.shape if isinstance(layout, PerPiece) else local_shape(meta.shape, layout, self.count, 0)
            outs.append(self.new(Meta(shape, meta.dtype)))
            self.piece[o] = (outs[-1], layout)
        self.wait(n)
        self.append(n, n.op, call.args, call.kwargs, values, outs, True)

    def wait(self, n: Node) -> None:
        """Note what a node in pieces waits for: all pieces of others, or not."""
        if any(v in self.computed or v in self.late for v in n.reads()):
            self.late.update(o for o in n.outs if o >= 0)

    def check_statistics(self, n: Node) -> None:
        """Raise PlanError for a pass that moves running statistics on which an earlier pass of all pieces has moved."""
        moved = any(self.kind.get(v) is None and isinstance(self.layout(v), PerPiece) for v in n.reads())
        if n.op != BACKWARD and moved and any(v in self.computed or v in self.late for v in n.reads()):
            raise self.no_statistics(
                n, "moves the running statistics of a batch norm once more, after all micro-batches"
            )

    def no_statistics(self, n: Node, what: str) -> PlanError:
        """The error for an op that would need the statistics of a batch norm at a time at which there are none."""
        where = f"{n.line or n.where}: " if n.line or n.where else ""
        return PlanError(
            f"{where}{n.op} {what}; with micro-batches a batch norm has statistics of each, which "
            "move on with every one, as in an eager loop over them. Expected: leave micro_batches out, or do this in a "
            "call of its own"
        )

    def emit_whole(self, n: Node) -> None:
        operands = list(n.reads())
        call, _ = call_of(n, self.graph.metas)
        self.check_whole(n)
        values = [self.as_whole(v, n.placement) for v in operands]
        outs = [o if o < 0 else self.new(self.graph.metas[o]) for o in n.outs]
        for o, value in zip(n.outs, outs, strict=True):
            if o >= 0:
                self.whole[o] = value
                self.computed.add(o)
                self.piece.pop(o, None)
        self.append(n, n.op, call.args, call.kwargs, values, outs, False)

    def check_whole(self, n: Node) -> None:
        """Raise PlanError for an op that reads statistics of each micro-batch, and works on the whole batch."""
        for v in n.reads():
            if v in self.piece and v not in self.whole and isinstance(self.layout(v), PerPiece) and not self._moves(v):
                raise self.no_statistics(n, "reads statistics of a batch norm, for the whole batch")

    def append(
        self,
        n: Node,
        op: str,
        args: tuple[Arg, ...],
        kwargs: tuple[tuple[str, Arg], ...],
        values: list[int],
        outs: list[int],
        pieces: bool,
    ) -> None:
        args, kwargs = substitute_all(args, kwargs, lambda i: Ref(values[i]))
        self.nodes.append(replace(n, op=op, args=args, kwargs=kwargs, outs=tuple(outs), pieces=pieces))

    def as_piece(self, value: int, need: TimeLayout, n: Node) -> int:
        """The number of the value that an op on one piece reads in place of ``value``."""
        if value in self.free and value not in self.whole:
            return self.make_free(value, need, n)
        if value in self.piece:
            number, have = self.piece[value]
            if isinstance(need, PerPiece):
                return number
            if need == P and have == B:
                return self.helper("actorflow.first", (Ref(number), Ref(self.index)), self.metas[number], n)
            if isinstance(need, Split) and need != have:
                return self.narrow(number if have == B else self.as_whole(value, n.placement), need, n)
            return number if need == have else self.as_whole(value, n.placement)
        number = self.whole[value]
        meta = self.metas[number]
        if isinstance(need, Split):
            return self.narrow(number, need, n)
        if need == P:
            return self.helper("actorflow.first", (Ref(number), Ref(self.index)), meta, n)
        return number

    def make_free(self, value: int, need: TimeLayout, n: Node) -> int:
        """The number of a free value in a layout, made for a piece."""
        if (value, need) not in self.free_pieces:
            signature = None if need == P or isinstance(need, PerPiece) else self.free_signature(value, need)
            if signature is None:
                whole = self.make_free(value, B, n)
                if isinstance(need, Split):
                    return self.narrow(whole, need, n)
                return self.helper("actorflow.first", (Ref(whole), Ref(self.index)), self.metas[whole], n)
            made = self._emit(self.free[value], signature)
            self.free_pieces.update({(v, layout): number for v, (number, layout) in made.items()})
        return self.free_pieces[value, need]

    def narrow(self, number: int, need: Split, n: Node) -> int:
        """The current piece of a value that exists as a whole; for a split with blocks, that piece of each block."""
        key = (number, n.stage, need)
        if key not in self.narrowed:
            meta = self.metas[number]

            def add(op: str, args: tuple[Arg, ...], shape: tuple[int, ...]) -> int:
                return self.helper(op, args, Meta(shape, meta.dtype), n)

            def unpack(value: int, dim: int) -> int:
                shape = local_shape(self.metas[value].shape, Split(dim), self.count, 0)
                return add("actorflow.unpack", (Ref(value), dim, self.count, Ref(self.index)), shape)

            if need.blocks == 1:
                self.narrowed[key] = unpack(number, need.dim)
            else:
                before, size, after = meta.shape[: need.dim], meta.shape[need.dim], meta.shape[need.dim + 1 :]
                by_block = (*before, need.blocks, size // need.blocks, *after)
                value = unpack(add("aten.view.default", (Ref(number), by_block), by_block), need.dim + 1)
                shape = (*before, size // self.count, *after)
                self.narrowed[key] = add("aten.view.default", (Ref(value), shape), shape)
        return self.narrowed[key]

    def helper(self, op: str, args: tuple[Arg, ...], meta: Meta, n: Node, pieces: bool = True) -> int:
        value = self.new(meta)
        self.nodes.append(replace(n, op=op, args=args, kwargs=(), outs=(value,), pieces=pieces))
        return value

    def as_whole(self, value: int, placement: Placement | None) -> int:
        """The number of a value as a whole: packed, accumulated, or computed again from whole values."""
        if value not in self.whole and value in self.free:
            self.recompute_whole(self.free[value])
        if value in self.whole:
            return self.whole[value]
        number, layout = self.piece[value]
        maker = self.maker[value]
        if self._moves(value):
            self.whole[value] = self.helper("actorflow.last", (Ref(number),), self.metas[number], maker, False)
            self.computed.add(value)
            return self.whole[value]
        if layout == B or value in self.stateless:
            self.recompute_whole(maker)
            return self.whole[value]
        if layout == P:
            self.whole[value] = self.helper("actorflow.accumulate", (Ref(number),), self.metas[number], maker, False)
        else:
            assert isinstance(layout, Split)
            self.whole[value] = self.packed(number, layout, self.graph.metas[value], maker)
        self.computed.add(value)
        return self.whole[value]

    def packed(self, number: int, layout: Split, meta: Meta, maker: Node) -> int:
        """All pieces joined; for a split with blocks, joined block by block."""
        value = self.helper("actorflow.pack", (Ref(number), layout.dim, self.count), meta, maker, False)
        if layout.blocks == 1:
            return value

        def add(op: str, args: tuple[Arg, ...], shape: tuple[int, ...]) -> int:
            return self.helper(op, args, Meta(shape, meta.dtype), maker, False)

        dim, before, after = layout.dim, meta.shape[: layout.dim], meta.shape[layout.dim + 1 :]
        length = meta.shape[dim] // (self.count * layout.blocks)
        by_piece = (*before, self.count, layout.blocks, length, *after)
        by_block = (*before, layout.blocks, self.count, length, *after)
        value = add("aten.view.default", (Ref(value), by_piece), by_piece)
        value = add("aten.transpose.int", (Ref(value), dim, dim + 1), by_block)
        return add("aten.view.default", (Ref(value), meta.shape), meta.shape)

    def recompute_whole(self, n: Node) -> None:
        """Run an op once more, on whole values."""
        call, operands = call_of(n, self.graph.metas)
        values = [self.as_whole(v, n.placement) for v in operands]
        outs = [o if o < 0 else self.new(self.graph.metas[o]) for o in n.outs]
        self.whole.update({o: v for o, v in zip(n.outs, outs, strict=True) if o >= 0})
        self.append(n, n.op, call.args, call.kwargs, values, outs, False)


def _made_of(call: OpCall, signature: Signature, parts: int, index: int) -> tuple[object, ...]:
    """The op and arguments of part ``index``, without its operands."""
    local = local_call(call, signature, parts, index)
    return local.op, local.args, local.kwargs


def _even(split: Split, shape: tuple[int, ...], parts: int) -> bool:
    return shape[split.dim] % (split.blocks * split.unit * parts) == 0
