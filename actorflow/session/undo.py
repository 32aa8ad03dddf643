"""Undo a call's changes in the script after the line where an op failed.

A call changes the script as soon as it is issued.  A call that is given up first restores the earlier values, then
repeats the changes that the step makes before the failed line, as PyTorch would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from actorflow.script_state.key_encoding import decode_key
from actorflow.script_state.side_effects import SideEffect, apply_side_effects, is_applied
from actorflow.script_state.sources import ParamGroupSource, StateSource
from actorflow_compiler.core.expressions import Known

__all__ = ["StopPoints", "Undo"]

_NOTHING = object()


@dataclass(frozen=True, slots=True)
class StopPoints:
    """The lines at which a step may fail, and the changes that it has made before each."""

    lines: Mapping[str, Sequence[SideEffect]] = field(default_factory=dict)  # line of an op → changes before it
    begins: Sequence[
        SideEffect
    ] = ()  # earlier values of places that the step may have set; see ``SideEffectRecorder.begun``

    def depend_on(self, change: SideEffect) -> bool:
        """Whether, at some line, a step may have set a place back to its earlier value, or not yet changed it."""
        place = change.at, change.where
        unseen = any((one.at, one.where) == place for one in self.begins)
        return unseen and any(place not in {(one.at, one.where) for one in there} for there in self.lines.values())

    def to_json(self) -> dict[str, Any]:
        """As JSON data."""
        lines = {line: [asdict(change) for change in changes] for line, changes in self.lines.items()}
        return {"lines": lines, "begins": [asdict(change) for change in self.begins]}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> StopPoints:
        """The stop points that ``to_json`` encoded."""
        lines = {line: tuple(SideEffect(**change) for change in changes) for line, changes in data["lines"].items()}
        return StopPoints(lines, tuple(SideEffect(**change) for change in data["begins"]))


@dataclass(frozen=True, slots=True)
class Undo:
    """A call's changes in the script, with the earlier values that undo them."""

    changes: Sequence[SideEffect]
    lines: Mapping[str, Sequence[SideEffect]]  # line at which the call can be undone → the step's changes before it
    _sources: Sequence[StateSource]
    _before: Sequence[tuple[StateSource, Any, Any]]  # (source of the container, key in it, earlier value)
    _known: Known

    @staticmethod
    def of(changes: Sequence[SideEffect], stops: StopPoints, sources: Sequence[StateSource], known: Known) -> Undo:
        """The undo of a call that is about to be issued; ``known`` has the numbers at its beginning."""
        places = [(sources[change.at], decode_key(change.key, sources)) for change in changes]
        before = [(one, key, one.values().get(key, _NOTHING)) for one, key in places]
        others = {(one.at, one.where) for one in stops.begins if not is_applied(one, sources)}
        lines = {line: there for line, there in stops.lines.items() if others <= {(one.at, one.where) for one in there}}
        filled = any(isinstance(one, ParamGroupSource) and isinstance(old, Tensor) for one, _, old in before)
        return Undo(changes, {} if filled else lines, sources, before, known)

    @property
    def places(self) -> list[str]:
        """Text for people: the places that the call changes."""
        return [change.where for change in self.changes]

    def carry_out(self, line: str) -> None:
        """Leave the script in the state in which PyTorch leaves it if an op of this line fails."""
        for one, key, old in self._before:
            if old is not _NOTHING:
                one.put(key, old)
            elif key in one.values():
                one.drop(key)
        apply_side_effects(self.lines[line], self._sources, (), self._known)
