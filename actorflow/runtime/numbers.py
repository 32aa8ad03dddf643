"""What a capture has made of numbers of the script goes in; what its plan reads of them at each call comes out.

That are its scalars, and whether it holds: what has decided something has to be what it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from actorflow.arguments import Arguments
from actorflow_compiler.errors import CallError
from actorflow_compiler.expressions import (
    Condition,
    Known,
    Operand,
    Source,
    Value,
    evaluate,
    from_json,
    sources,
    to_json,
)
from actorflow_compiler.numbers import Numbers
from actorflow_compiler.optimizers import setting
from actorflow_compiler.stepping import settings_of
from actorflow_compiler.variables import State

__all__ = ["Reading", "every_number", "known_to", "learned", "settled"]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a plan reads of the numbers of a script, and what they have to be for it."""

    scalars: Mapping[str, Operand]  # of the plan, by name
    conditions: tuple[Condition, ...]

    def difference(self, known: Known) -> str:
        """What is no longer as it has to be, for people; nothing where the plan holds."""
        for condition in self.conditions:
            if not condition.holds(known):
                return _said(condition, known)
        return ""

    def values(self, known: Known) -> dict[str, Value]:
        """The scalars of a call."""
        return {name: evaluate(expression, known) for name, expression in self.scalars.items()}

    def to_json(self) -> dict[str, Any]:
        """As it travels."""
        return {
            "scalars": {name: to_json(expression) for name, expression in self.scalars.items()},
            "conditions": [[to_json(c.expression), c.value] for c in self.conditions],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Reading:
        """What ``to_json`` was given."""
        scalars = {name: from_json(expression) for name, expression in data["scalars"].items()}
        return Reading(scalars, tuple(Condition(from_json(e), value) for e, value in data["conditions"]))


def learned(numbers: Numbers) -> Reading:
    """What a capture has left open, and what not."""
    return Reading(dict(numbers.read), numbers.conditions)


def settled(arguments: Arguments, state: State, train: bool) -> Reading:
    """That all numbers are constants of the plan."""
    return Reading({}, tuple(Condition(source, value) for source, value in every_number(arguments, state, train)))


def every_number(arguments: Arguments, state: State, train: bool) -> Iterator[tuple[Source, Value]]:
    """The numbers that a step can compute with and that are not among what is compared at each call."""
    for path, value in arguments.numbers.items():
        yield Source("argument", path), value
    for title, optimizer in state.optimizers.items() if train else ():
        yield from settings_of(title, optimizer)


def known_to(arguments: Arguments, optimizers: Mapping[str, Optimizer]) -> Known:
    """What gives numbers as they are when a call begins.  Raises CallError for one that is no number any more."""

    def now(source: Source) -> Value:
        if source.kind == "argument":
            return arguments.numbers[source.name]
        group = optimizers[source.name].param_groups[int(source.at)]
        if source.key in ("beta1", "beta2"):
            return setting(group, source.key)
        value = group.get(source.key)
        if source.index >= 0:
            value = value[source.index] if isinstance(value, tuple | list) and len(value) > source.index else None
        if isinstance(value, torch.Tensor):
            value = value.item()
        if not isinstance(value, int | float):
            raise CallError(f"{source} is {value!r}; a number was expected, as it was when the step was captured")
        return value

    return now


def fused(names: Iterable[str]) -> dict[str, Operand]:
    """The scalars that ops of fused optimizers read, by name: settings of groups as they are."""
    parts = ((name, *name.rsplit(".", 2)) for name in names)
    return {name: Source("setting", title, group, key) for name, title, group, key in parts}


def _said(condition: Condition, known: Known) -> str:
    """A condition that does not hold any more, for people."""
    was, expression = condition.value, condition.expression
    try:
        now: Any = evaluate(expression, known)
    except CallError:
        now = "nothing that can be computed"
    if isinstance(expression, Source):
        return f"{expression} changed from {was!r} to {now!r}"
    names = ", ".join(dict.fromkeys(str(source) for source in sources(expression)))
    return f"{names} changed, and with it {expression} from {was!r} to {now!r}"
