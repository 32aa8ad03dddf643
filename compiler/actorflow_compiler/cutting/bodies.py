"""Build an actor's body from its ops, with fused optimizer steps that update many parameters in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from actorflow_compiler.core.ops import Arg, Ref, Symbol
from actorflow_compiler.core.views import may_be_view
from actorflow_compiler.custom_ops.optimizers import IN_PLACE, SCALARS, arguments
from actorflow_compiler.plan.plan import Body, OfVariable, Step, Target


@dataclass(frozen=True, slots=True)
class BuiltBody:
    """A body, the targets of its outputs, and the variables that it updates in place."""

    body: Body
    targets: tuple[Target, ...]
    updated: tuple[str, ...]
    values: tuple[int, ...]  # for each value of the body the local value that it is, or that it is a copy of


def build_body(
    steps: Sequence[Step],
    inputs: Sequence[int],
    outputs: Sequence[tuple[int, Target]],
    variables: Mapping[int, str],
    find: Callable[[int], int],
) -> BuiltBody:
    """Build the body of an actor.

    ``steps`` read and make local values, ``find`` resolves aliases of these; ``inputs`` are the operands in order;
    ``outputs`` are pairs of a value and its target; ``variables`` gives the names of the inputs that are variables.
    """
    steps = [s.reading(lambda v: Ref(find(v))) for s in steps]
    writer = _InPlaceRewriter(steps, outputs, variables)
    return _number(writer.run(), inputs, writer.outputs, writer.updated, writer.copied)


@dataclass(slots=True)
class _FusedGroup:
    """Optimizer steps with equal settings, run as one fused call over lists of tensors."""

    op: str
    settings: tuple[tuple[str, Arg], ...]
    tensors: dict[str, list[Arg]] = field(default_factory=dict)


class _InPlaceRewriter:
    """Rewrites functional optimizer ops and step counters to ops that update variables in place."""

    def __init__(
        self, steps: Sequence[Step], outputs: Sequence[tuple[int, Target]], variables: Mapping[int, str]
    ) -> None:
        self.steps, self.variables = steps, variables
        self._outputs = dict.fromkeys(outputs)  # but for the variables that are updated in place
        self.outputs: list[tuple[int, Target]] = []  # of the new body
        self.updated: list[str] = []
        self.final: list[Step] = []
        self.alias: dict[int, int] = {}  # new value → the variable that holds it after the update
        self.copied: dict[int, int] = {}  # copy → the value that it is a copy of
        self.counters: dict[tuple[type, Arg], list[int]] = {}  # number that is added (1 is not 1.0) → variables
        self.groups: dict[object, _FusedGroup] = {}
        self.pending: set[int] = set()  # results of optimizer steps whose groups are not flushed yet
        self.fresh = (
            max([0, *(o for s in steps for o in s.outs), *variables, *(v for s in steps for v in s.reads())]) + 1
        )
        self.last_read = _last_reads(steps)

    def run(self) -> list[Step]:
        for k, step in enumerate(self.steps):
            counted = step.op not in IN_PLACE and any(v in self.alias for v in step.reads())
            if counted or not self.pending.isdisjoint(step.reads()):
                self.flush()
            if step.op in IN_PLACE:
                self.optimizer_step(k, step)
            elif not self.counter(k, step):
                self.final.append(self.renamed(step))
        self.flush()
        for value, target in self._outputs:
            if value in self.alias:  # other actors need the new value: give a copy, as the variable itself will change
                copy = self.new(value)
                self.final.append(Step("aten.clone.default", (Ref(self.alias[value]),), (), (copy,)))
                value = copy
            self.outputs.append((value, target))
        return self.final

    def new(self, value: int) -> int:
        """The number of a copy of a value."""
        self.fresh += 1
        self.copied[self.fresh - 1] = value
        return self.fresh - 1

    def renamed(self, step: Step) -> Step:
        return step.reading(lambda v: Ref(self.alias.get(v, v)))

    def take_over(self, k: int, variable: int, new: int) -> bool:
        """Let step k update ``variable`` in place to its result ``new``; False if that is not possible."""
        name = self.variables.get(variable)
        pair = (new, OfVariable(name)) if name is not None else None
        if pair is None or pair not in self._outputs or self.last_read.get(variable, k) > k:
            return False
        del self._outputs[pair]
        self.updated.append(self.variables[variable])
        self.alias[new] = variable
        return True

    def counter(self, k: int, step: Step) -> bool:
        """Take ``variable + number`` as an update of a step counter; False if the step is something else."""
        if (
            step.op != "aten.add.Tensor"
            or step.kwargs
            or not isinstance(step.args[0], Ref)
            or not isinstance(step.args[1], int | float)
        ):
            return False
        variable = step.args[0].index
        if not self.take_over(k, variable, step.outs[0]):
            return False
        self.counters.setdefault((type(step.args[1]), step.args[1]), []).append(variable)
        return True

    def optimizer_step(self, k: int, step: Step) -> None:
        op, lists, changed = IN_PLACE[step.op]
        given = dict(zip((n for n in arguments(step.op) if n != "group"), step.args, strict=True))
        settings = tuple((n, v) for n, v in given.items() if n not in lists)
        group = self.groups.setdefault(
            (op, tuple((n, type(v), v) for n, v in settings), given.get(lists[2]) is None), _FusedGroup(op, settings)
        )
        results = dict(zip(changed, step.outs, strict=False))
        for name in lists:
            operand = given[name]
            if operand is None:
                group.tensors.setdefault(name, [])
                continue
            value = operand.index
            if name in changed and not self.take_over(k, value, results[name]):
                copy = results[name] if results[name] >= 0 else self.new(value)
                # contiguous, as variables are: the fused kernels go through the memory of all tensors in one order
                dense = (("memory_format", Symbol("torch.contiguous_format")),)
                self.final.append(Step("aten.clone.default", (Ref(self.alias.get(value, value)),), dense, (copy,)))
                value = copy
            if name in changed:
                self.pending.add(results[name])
            group.tensors.setdefault(name, []).append(Ref(self.alias.get(value, value)))

    def flush(self) -> None:
        for (_, number), variables in self.counters.items():
            self.final.append(Step("actorflow.add_", (tuple(Ref(v) for v in variables), number), (), ()))
        for group in self.groups.values():
            op = next(n for n, spec in IN_PLACE.items() if spec[0] == group.op)
            scalars = dict(group.settings)
            args = [tuple(group.tensors[n]) for n in IN_PLACE[op][1]] + [scalars.pop(n) for n in SCALARS[op]]
            self.final.append(Step(group.op, (*args, *scalars.values()), (), ()))
        self.counters, self.groups = {}, {}
        self.pending.clear()


def _last_reads(steps: Sequence[Step]) -> dict[int, int]:
    """Value → the last step that reads it or a value that may be a view of it."""
    last: dict[int, int] = {}
    lies_in: dict[int, set[int]] = {}  # view → what it may be a view of
    for k, step in enumerate(steps):
        reads = set(step.reads())
        seen = reads.union(*(lies_in.get(v, set()) for v in reads))
        last.update(dict.fromkeys(seen, k))
        if may_be_view(step.op):
            lies_in.update(dict.fromkeys(step.outs, seen))
    return last


def _number(
    steps: Sequence[Step],
    inputs: Sequence[int],
    outputs: Sequence[tuple[int, Target]],
    updated: Sequence[str],
    copied: Mapping[int, int],
) -> BuiltBody:
    """Number the values from 0, operands first, and drop steps whose results are not used."""
    needed = {v for v, _ in outputs}
    kept: list[Step] = []
    for step in reversed(steps):
        if not step.outs or any(o in needed for o in step.outs):
            kept.append(step)
            needed.update(step.reads())
    number = {v: i for i, v in enumerate(inputs)}
    final = []
    for step in reversed(kept):
        read = step.reading(lambda v: Ref(number[v]))
        outs = []
        for o in step.outs:
            if o in needed:
                number[o] = len(number)
                outs.append(number[o])
            else:
                outs.append(-1)
        final.append(replace(read, outs=tuple(outs)))
    body = Body(len(inputs), tuple(final), tuple(number[v] for v, _ in outputs))
    values = tuple(copied.get(v, v) for v in number)  # numbered in this order
    return BuiltBody(body, tuple(t for _, t in outputs), tuple(updated), values)
