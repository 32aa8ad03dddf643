"""The script's numbers that a plan reads at each call, and the conditions on them under which the plan is valid.

Scalars of the plan are computed anew for each call.  Numbers on which Python code branched during capture must have
the same values in later calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch

from actorflow.script_state.arguments import CallArguments
from actorflow.script_state.search_result import SearchResult
from actorflow.script_state.side_effects import place_key, scheduler_counts
from actorflow.script_state.sources import StateSource
from actorflow_compiler.capture.optimizer_state import counts_of, is_fused, settings_of
from actorflow_compiler.core.errors import CallError
from actorflow_compiler.core.expressions import (
    Condition,
    Known,
    NumberSource,
    Operand,
    SourceKind,
    Value,
    evaluate,
    from_json,
    of_python,
    sources,
    to_json,
)
from actorflow_compiler.custom_ops.optimizers import source_of
from actorflow_compiler.numbers.symbolic import NumberEnv
from actorflow_compiler.values.variables import ScriptState

__all__ = ["NumberReads", "every_number", "numbers_now", "reads_of_capture", "reads_as_constants", "write"]


@dataclass(frozen=True, slots=True)
class NumberReads:
    """The numbers of the script that a plan reads at each call, and the conditions on numbers under which it holds."""

    scalars: Mapping[str, Operand]  # of the plan, by name
    conditions: tuple[Condition, ...]
    kinds: Mapping[NumberSource, str] = field(default_factory=dict)  # the kinds of numbers required there
    written: Mapping[NumberSource, Operand] = field(default_factory=dict)  # of optimizer state → next value
    own: tuple[NumberSource, ...] = ()  # places of the script that a call changes

    def difference(self, known: Known) -> str:
        """Text for people: the first condition that does not hold; empty if all hold."""
        for source, kind in self.kinds.items():
            try:
                now = known(source)
            except CallError as error:
                return str(error)
            if type(now).__name__ != kind:
                return f"{source} changed from {kind} to {now!r}"
        for condition in self.conditions:
            if not condition.holds(known):
                return _said(condition, known)
        try:
            self.values(known)
        except CallError as error:
            return str(error)
        return ""

    def values(self, known: Known) -> dict[str, Value]:
        """The scalars of a call."""
        return {name: of_python(evaluate(expression, known)) for name, expression in self.scalars.items()}

    def to_json(self) -> dict[str, Any]:
        """The reads as JSON data."""
        return {
            "scalars": {name: to_json(expression) for name, expression in self.scalars.items()},
            "conditions": [[to_json(c.expression), c.value] for c in self.conditions],
            "kinds": [[to_json(source), kind] for source, kind in self.kinds.items()],
            "written": [[to_json(source), to_json(expression)] for source, expression in self.written.items()],
            "own": [to_json(source) for source in self.own],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> NumberReads:
        """The reads that ``to_json`` encoded."""
        scalars = {name: from_json(expression) for name, expression in data["scalars"].items()}
        conditions = tuple(Condition(from_json(e), value) for e, value in data["conditions"])
        written = {_source(source): from_json(expression) for source, expression in data["written"]}
        kinds = {_source(source): kind for source, kind in data["kinds"]}
        return NumberReads(scalars, conditions, kinds, written, tuple(map(_source, data["own"])))


def _source(data: Any) -> NumberSource:
    source = from_json(data)
    assert isinstance(source, NumberSource)
    return source


def reads_of_capture(numbers: NumberEnv, own: Sequence[NumberSource]) -> NumberReads:
    """The numbers that a capture made inputs of the plan, and its conditions; ``own`` are places the step changes."""
    kinds = {
        source: kind for source, kind in numbers.kinds.items() if source.kind in (SourceKind.STATE, SourceKind.PLACE)
    }
    return NumberReads(dict(numbers.read), numbers.conditions, kinds, dict(numbers.written), tuple(own))


def reads_as_constants(
    arguments: CallArguments, state: ScriptState, train: bool, found: SearchResult | None
) -> NumberReads:
    """All numbers as constants, except learning rates that only ops of the plan read, by name."""
    read = {id(one.holder) for one in found.read_sources if one.counts} if found is not None else set()

    def by_name(source: NumberSource) -> bool:
        optimizer = state.optimizers[source.name]
        return is_fused(optimizer) and id(optimizer.param_groups[int(source.at)]) not in read

    numbers = every_number(arguments, state, train, found)
    fixed = ((s, value) for s, value in numbers if s.kind != SourceKind.SETTING or not by_name(s))
    return NumberReads({}, tuple(Condition(s, of_python(value)) for s, value in fixed))


def every_number(
    arguments: CallArguments, state: ScriptState, train: bool, found: SearchResult | None
) -> Iterator[tuple[NumberSource, Value]]:
    """The numbers that a step can compute with, except those that guards and keys already compare at each call."""
    for path, value in arguments.numbers.items():
        yield NumberSource(SourceKind.ARGUMENT, path), value
    if found is not None:
        yield from ((source, _placed(source, found.sources)) for source in scheduler_counts(found))
    for title, optimizer in state.optimizers.items() if train else ():
        yield from settings_of(title, optimizer)
        yield from counts_of(title, optimizer, {id(h.tensor): h.name for h in state.held.values()})


def numbers_now(arguments: CallArguments, state: ScriptState, sources: Sequence[StateSource]) -> Known:
    """A function that returns the numbers as they were when the call began; CallError for one that is no number now."""
    before: dict[NumberSource, Value] = {}  # the call itself may change them

    def now(source: NumberSource) -> Value:
        if source not in before:
            before[source] = _now(source, arguments, state, sources)
        return before[source]

    return now


def write(reading: NumberReads, state: ScriptState, known: Known) -> None:
    """Write the numbers that a call leaves in optimizers' state."""
    values = [(source, evaluate(expression, known)) for source, expression in reading.written.items()]
    for source, value in values:
        state.optimizers[source.name].state[state.held[source.at].tensor][source.key] = value


def _now(source: NumberSource, arguments: CallArguments, state: ScriptState, sources: Sequence[StateSource]) -> Value:
    if source.kind == SourceKind.ARGUMENT:
        return arguments.numbers[source.name]
    value: Any
    if source.kind == SourceKind.PLACE:
        value = _placed(source, sources)
    elif source.kind == SourceKind.STATE:
        value = state.optimizers[source.name].state[state.held[source.at].tensor].get(source.key)
    else:
        group = state.optimizers[source.name].param_groups[int(source.at)]
        value = _item(group.get(source.key), source.index)
        if isinstance(value, torch.Tensor):
            value = value.item()
        elif isinstance(value, Real) and not isinstance(value, bool | int | float):  # of NumPy, say
            value = float(value)
    if not isinstance(value, int | float):
        raise CallError(f"{source} is {value!r}; a number was expected, as it was when the step was captured")
    return value


def _placed(source: NumberSource, sources: Sequence[StateSource]) -> Any:
    """The object at a place of the script."""
    key = place_key(source)
    value = sources[int(source.at)].values().get(key)
    return _item(value, source.index) if key == source.key else value


def _item(value: Any, index: int) -> Any:
    """An item of a tuple or list; the value itself for an index below 0, None for a missing item."""
    if index < 0:
        return value
    return value[index] if isinstance(value, tuple | list) and len(value) > index else None


def fused(names: Iterable[str]) -> dict[str, Operand]:
    """The scalars that ops of fused optimizers read, by name: unmodified settings of parameter groups."""
    return {name: source_of(*name.rsplit(".", 1)) for name in names}


def _said(condition: Condition, known: Known) -> str:
    """A condition that no longer holds, for people."""
    was, expression = condition.value, condition.expression
    try:
        now: Any = evaluate(expression, known)
    except CallError:
        now = "nothing that can be computed"
    if isinstance(expression, NumberSource):
        return f"{expression} changed from {was!r} to {now!r}"
    names = ", ".join(dict.fromkeys(str(source) for source in sources(expression)))
    return f"{names} changed, and with it {expression} from {was!r} to {now!r}"
