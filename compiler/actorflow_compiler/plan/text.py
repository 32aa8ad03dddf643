"""Write a plan as JSON, which can be read back to an equal plan, or as text for people; both begin with the summary."""

from __future__ import annotations

import inspect
import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.ops import Meta
from actorflow_compiler.core.runs import Runs
from actorflow_compiler.core.sbp import show
from actorflow_compiler.core.units import bytes_text, columns, flop_text, ranges_text, rows_text, seconds_text
from actorflow_compiler.plan.modes import Mode
from actorflow_compiler.plan.plan import (
    LAST,
    Actor,
    ConsideredPlan,
    OfInput,
    OfPiece,
    OfScalar,
    OfVariable,
    Operand,
    Order,
    Plan,
    Register,
    Send,
    Target,
    TensorSpec,
    ToResult,
)
from actorflow_compiler.plan.proto import from_proto, to_proto
from actorflow_compiler.plan.source_rows import rows_taken
from actorflow_protos import plan_pb2 as pb

WIDTH = 120  # columns of the text form
LONGEST = 32  # firings of the longest repeated block that is searched for in an order
LONG = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
_ALL_FIELDS = (  # an option of protobuf that had another name before 5.26
    "always_print_fields_with_no_presence"
    if "always_print_fields_with_no_presence" in inspect.signature(json_format.MessageToDict).parameters
    else "including_default_value_fields"
)


# ---- JSON


def to_json(plan: Plan) -> str:
    """The plan as JSON: names as in ``plan.proto``, one line for each actor, register and so on.

    The first key is ``summary``; ``summary.redundant_flops`` is a fraction.
    """
    message = to_proto(plan)
    fields = _tidy(
        json_format.MessageToDict(message, preserving_proto_field_name=True, **{_ALL_FIELDS: True}), message.DESCRIPTOR
    )
    summary = textwrap.indent(json.dumps(fields.pop("summary"), indent=2), "  ").lstrip()
    lines = [f'  "summary": {summary}']
    for key, value in fields.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            items = ",\n".join(f"    {json.dumps(item)}" for item in value)
            lines.append(f'  "{key}": [\n{items}\n  ]')
        else:
            lines.append(f'  "{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def from_json(text: str) -> Plan:
    """The plan that ``to_json`` was given.  Raises PlanError for text that is no plan."""
    try:
        return from_proto(json_format.Parse(text, pb.Plan()))
    except (json_format.ParseError, RecursionError, TypeError) as error:  # TypeError: a number, to protobuf 4
        raise PlanError(f"JSON of a plan was expected; what was found cannot be read: {error}") from error


def _tidy(value: dict[str, Any], descriptor: Descriptor) -> dict[str, Any]:
    """The fields in the order of the schema, and 64-bit integers as numbers, which protobuf writes as strings."""

    def one(item: Any, field: FieldDescriptor) -> Any:
        if field.message_type is not None:
            return _tidy(item, field.message_type)
        return int(item) if field.cpp_type in LONG else item

    return {
        field.name: [one(i, field) for i in found]
        if isinstance(found := value[field.name], list)
        else one(found, field)
        for field in descriptor.fields
        if field.name in value
    }


# ---- text


def to_text(plan: Plan) -> str:
    """The plan for people: the summary, then rank by rank its queues with their orders, and its actors.

    Each actor comes with its queue, its positions in the queue's order, the registers that it reads and
    writes (slots; dtype, local shape, SBP and bytes of each tensor) and its peers, the actors at the
    registers' other ends or in its collective.
    """
    return "\n".join(line.rstrip() for line in _Text(plan).lines()) + "\n"


def notes_text(plan: Plan) -> str:
    """The plans that were compared and the plan's notes, as lines; empty if there are none."""
    rows = (*_rows("plans", considered_lines(plan)), *_rows("notes", plan.notes))
    return "".join(f"{line.rstrip()}\n" for line in rows)


def considered_lines(plan: Plan) -> list[str]:
    """The table of plans that were compared: time of a step, memory of a device, bytes that move, and why not."""
    rows = [[c.text, *considered_figures(c), c.why or "chosen"] for c in plan.considered]
    return columns([["", "step", "memory", "moved", ""], *rows], "<>>><") if rows else []


def considered_figures(plan: ConsideredPlan) -> tuple[str, str, str]:
    """The time of a step, memory of a device and bytes that move; a dash where there is no such plan."""
    if not plan.seconds:
        return "–", "–", "–"
    if plan.estimated:
        return f"about {seconds_text(plan.seconds)}", f"about {bytes_text(plan.nbytes)}", "–"
    return seconds_text(plan.seconds), bytes_text(plan.nbytes), bytes_text(plan.moved)


class _Text:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        named = Counter(a.name for a in plan.actors)
        self.names = {a.id: a.name if named[a.name] == 1 else f"{a.name}#{a.id}" for a in plan.actors}
        self.members: dict[tuple[int, tuple[int, ...]], list[Actor]] = {}  # of each collective
        for actor in plan.actors:
            if actor.comm is not None:
                self.members.setdefault((actor.comm.id, actor.comm.ranks), []).append(actor)
        self.orders = {(o.rank, o.queue): o for o in plan.orders}
        self.tensors = self.tensor_lines()

    def lines(self) -> Iterator[str]:
        plan = self.plan
        pieces = _count(plan.pieces, "micro-batch", "micro-batches")
        yield f"plan {plan.name}: {_count(plan.world, 'rank')}, {pieces} in an iteration"
        yield ""
        yield from self.summary()
        for rank in plan.ranks or range(plan.world):
            yield ""
            yield from self.rank(rank)
        if plan.variables:
            yield ""
            yield from self.variables()

    # ---- the summary

    def summary(self) -> Iterator[str]:
        plan, found = self.plan, self.plan.summary
        kinds = Counter(a.kind for a in plan.actors)
        yield "summary"
        yield from _rows("stages", [f"{i}  {place or 'no op'}" for i, place in enumerate(found.stages)])
        listed = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
        yield from _rows("actors", [f"{found.actors}: {listed}" if not plan.ranks else str(found.actors)])
        yield from _rows(
            "FLOPs",
            [
                f"{flop_text(found.flops)} useful in an iteration; "
                f"{found.redundant_flops:.2%} of all are done redundantly"
            ],
        )
        memory = [
            (m.rank, m.parameters, m.optimizer, m.activations, m.parameters + m.optimizer + m.activations)
            for m in found.memory
        ]
        table = [["rank", "parameters", "optimizer", "activations", "total"]] if memory else []
        table += [[str(rank), *map(bytes_text, sizes)] for rank, *sizes in memory]
        yield from _rows("memory", columns(table, ">>>>>"))
        if plan.mode is not Mode.EAGER:
            yield from _rows("bodies", [f"{plan.mode}: {plan.mode.text}"])
        yield from _rows("moved", columns([[kind, bytes_text(n)] for kind, n in found.moved], "<>") or ["nothing"])
        yield from _rows("plans", considered_lines(plan))
        yield from _rows("notes", plan.notes)

    def variables(self) -> Iterator[str]:
        """The variables, with logical shapes."""
        yield "variables"
        table = [
            [v.name, v.kind, str(Meta(v.shape, v.dtype)), show(v.sbp), str(v.placement)] for v in self.plan.variables
        ]
        yield from (f"  {line}" for line in columns(table, "<<<<<"))

    # ---- a rank

    def rank(self, rank: int) -> Iterator[str]:
        actors = [a for a in self.plan.actors if a.rank == rank]
        peers = self.plan.peers(rank)
        talks = f"messages with {_ranks(peers)}" if peers else "no messages with other ranks"
        yield f"rank {rank}: {_count(len(actors), 'actor')}, {talks}"
        for queue in dict.fromkeys(a.queue for a in actors):
            order = self.orders.get((rank, queue))
            text = " ".join(_runs([self.names[a] for a in order.actors])) if order else "not frozen yet"
            yield from _rows(queue, [text])
        for made in (order for order in self.plan.calls if order.rank == rank):
            yield from _rows("calls", [f"{made.queue}: {' '.join(_runs([self.names[a] for a in made.actors]))}"])
        for actor in actors:
            yield ""
            yield from self.actor(actor)

    def actor(self, actor: Actor) -> Iterator[str]:
        facts = [actor.kind, f"queue {actor.queue}", f"stage {actor.stage}", self.positions(actor)]
        if actor.body is not None:
            facts.append(_count(len(self.plan.bodies[actor.body].steps), "op"))
        if actor.flops:
            facts.append(f"{flop_text(actor.flops)} a firing")
        if actor.workspace:
            facts.append(f"{bytes_text(actor.workspace)} while it fires")
        yield f"  #{actor.id} {actor.name}: {', '.join(facts)}"
        for label, registers in (("reads", self.plan.inputs_of[actor.id]), ("writes", self.plan.outputs_of[actor.id])):
            lines = [line for register in registers for line in self.register(register, actor)]
            yield from _rows(label, lines, indent=4)
        taken = rows_taken(actor, self.plan.bodies)
        yield from _rows("takes", [", ".join(_outside(actor.operands, taken))], indent=4)
        yield from _rows("gives", [", ".join(_outside(actor.targets, {}))], indent=4)
        if actor.comm is not None:
            comm = actor.comm
            who = (
                f"from rank {comm.from_rank} to rank {comm.to_rank}"
                if isinstance(comm, Send)
                else f"among {_ranks(comm.ranks)}"
            )
            yield from _rows("comm", [f"{comm.label} {comm.id} {who}, {comm.plane}"], indent=4)
        yield from _rows("peers", [self.peers(actor)], indent=4)

    def positions(self, actor: Actor) -> str:
        """How often the actor fires in an iteration, and its positions in the queue's order, from 0."""
        order: Order | None = self.orders.get((actor.rank, actor.queue))
        rate = _count(actor.rate, "firing")
        if order is None:
            return rate
        turns = [i for i, a in enumerate(order.actors) if a == actor.id]
        return f"{rate} (turn{'s' if len(turns) > 1 else ''} {ranges_text(turns)} of {len(order.actors)})"

    def register(self, register: Register, actor: Actor) -> Iterator[str]:
        """A register as one of its actors sees it, followed by a line for each tensor."""
        plan = self.plan
        facts = [
            _count(register.slots, "slot")
            + (f" of {bytes_text(register.nbytes)}" if register.tensors else ", order only")
        ]
        if register.initial:
            facts.append(_count(register.initial, "initial token"))
        if register.fill != 1:
            facts.append(f"{register.fill} firings of the producer fill a token")
        firings = [r.firings for r in register.readers if r.actor == actor.id or register.producer == actor.id]
        if set(firings) - {1}:
            facts.append(f"a token is held for {'/'.join(map(str, dict.fromkeys(firings)))} firings")
        if register.producer == actor.id:
            where = "" if plan.home(register) == actor.rank else f" on rank {plan.home(register)}"
            facts.append(f"to {', '.join(self.name(r.actor) for r in register.readers) or 'nobody'}{where}")
        else:
            facts.append(f"from {self.name(register.producer)}")
        yield f"r{register.id}  {', '.join(facts)}"
        yield from self.tensors[register.id]

    def tensor_lines(self) -> dict[int, list[str]]:
        """Register → a line for each of its tensors; the lines of the whole plan are aligned."""
        tensors = [(r.id, t) for r in self.plan.registers for t in r.tensors]
        lines: dict[int, list[str]] = {r.id: [] for r in self.plan.registers}
        table = [_tensor(t) for _, t in tensors]
        for (id, _), line in zip(tensors, columns(table, "<<><"), strict=True):
            lines[id].append(f"    {line}")
        return lines

    def peers(self, actor: Actor) -> str:
        """The actors at the other ends of its registers and in its collective, by rank."""
        plan = self.plan
        found: dict[int, dict[str, None]] = {}
        for register in plan.inputs_of[actor.id]:
            found.setdefault(plan.actor(register.producer).rank, {})[self.name(register.producer)] = None
        for register in plan.outputs_of[actor.id]:
            for read in register.readers:
                found.setdefault(plan.home(register), {})[self.name(read.actor)] = None
        if actor.comm is not None:
            for member in self.members[(actor.comm.id, actor.comm.ranks)]:
                found.setdefault(member.rank, {})[self.name(member.id)] = None
        found.get(actor.rank, {}).pop(self.name(actor.id), None)
        return "; ".join(f"rank {rank}: {', '.join(names)}" for rank, names in sorted(found.items()) if names)

    def name(self, id: int) -> str:
        return self.names.get(id, f"#{id}")


# ---- words and columns


def _tensor(spec: TensorSpec) -> list[str]:
    note = f"{spec.name} ({spec.combine})" if spec.combine != LAST else spec.name
    return [str(Meta(spec.shape, spec.dtype)), spec.sbp, bytes_text(spec.nbytes), note]


def _outside(ends: Iterable[Operand | Target], taken: Mapping[str, Runs]) -> Iterator[str]:
    """The operands or targets of an actor that are not registers, as text; ``taken``: rows of arguments."""
    for end in ends:
        match end:
            case OfVariable(name):
                yield f"variable {name}"
            case OfScalar(name):
                yield f"scalar {name}"
            case OfInput(name):
                yield f"{rows_text(taken[name])} of {name}" if name in taken else f"input {name}"
            case OfPiece():
                yield "piece number"
            case ToResult(index):
                yield f"result {index}"


def _rows(label: str, texts: Iterable[str], indent: int = 2) -> Iterator[str]:
    """Lines of texts below each other, right of their label; long texts are wrapped, empty ones left out."""
    lead = f"{'':{indent}}{label:<10}"
    for text in texts:
        if text:
            own = len(text) - len(text.lstrip())
            yield from textwrap.wrap(
                text,
                WIDTH,
                initial_indent=lead,
                subsequent_indent=" " * (len(lead) + own + 4),
                break_long_words=False,
                break_on_hyphens=False,
            )
            lead = " " * len(lead)


def _runs(items: Sequence[str]) -> Iterator[str]:
    """A sequence with repetitions folded: F F F B F B F B → F×3 (B F)×2 B; blocks are folded in turn."""
    at = 0
    while at < len(items):
        period, times = 1, 1
        for p in range(1, min((len(items) - at) // 2, LONGEST) + 1):
            k = 1
            while items[at + k * p : at + (k + 1) * p] == items[at : at + p]:
                k += 1
            if k > 1 and k * p > period * times:
                period, times = p, k
        block = items[at] if period == 1 else f"({' '.join(_runs(items[at : at + period]))})"
        yield f"{block}×{times}" if times > 1 else block
        at += period * times


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _count(n: int, one: str, many: str = "") -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"
