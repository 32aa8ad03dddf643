"""What a plan was made with is compared by identity first, and by value where that says nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from actorflow.script_state.guards import Guards
from actorflow.script_state.search_result import SearchResult
from actorflow.script_state.sources import Getter, StateSource
from actorflow_compiler.values.variables import ScriptState


class Computed(StateSource):
    """A holder that makes its values when they are asked for, as attributes of objects of C do."""

    def values(self) -> dict[Any, Any]:
        return dict(enumerate(self._made()))

    def fast_getters(self, read: Mapping[Any, Any]) -> tuple[Getter, ...] | None:
        return (lambda holder: self._made(),)

    def _made(self) -> Iterable[Any]:
        return [number + 0.0 for number in self.holder]


@pytest.mark.parametrize("count", [1, 2, 50])
def test_a_value_that_is_made_anew_is_no_other_and_another_at_its_address_is(count: int) -> None:
    before, after = [0.5 + n for n in range(count)], [100.5 + n for n in range(count)]
    numbers = [*before]
    one = Computed("numbers", numbers)
    guards = Guards(SearchResult(ScriptState(), (one,), (one,), ()), lambda old, new: False)
    for at in range(count):
        numbers[at] = after[at]  # nothing is made here that would take a place in memory which is free again
        said = guards.difference()
        assert said == f"numbers.{at} changed from {before[at]} to {after[at]}"
        numbers[at] = before[at]
        assert guards.difference() == ""


def test_a_value_more_or_less_is_a_difference() -> None:
    numbers = [1.5, 2.5]
    one = Computed("numbers", numbers)
    guards = Guards(SearchResult(ScriptState(), (one,), (one,), ()), lambda old, new: False)
    numbers.append(3.5)
    assert guards.difference() == "numbers.2 changed from nothing to 3.5"
    del numbers[1:]
    assert guards.difference() == "numbers.1 changed from 2.5 to nothing"
