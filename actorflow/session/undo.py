"""Take back what a call has changed in the script, up to the line where an op failed.

A call changes the script as soon as it is issued.  A call that is given up restores what was there before, and then
makes the changes that the step makes before the line that failed, as PyTorch would.
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
    """The lines at which a step may fail, and what it has changed before each."""

    lines: Mapping[str, Sequence[SideEffect]] = field(default_factory=dict)  # where ops may fail → what it has changed
    begins: Sequence[
        SideEffect
    ] = ()  # what there was before, in places that it may have set to that; see ``SideEffectRecorder.begun``

    def depend_on(self, change: SideEffect) -> bool:
        """Whether a step may have set a place to what there was before a line, or not come to setting it."""
        place = change.at, change.where
        unseen = any((one.at, one.where) == place for one in self.begins)
        return unseen and any(place not in {(one.at, one.where) for one in there} for there in self.lines.values())

    def to_json(self) -> dict[str, Any]:
        """As JSON data."""
        lines = {line: [asdict(change) for change in changes] for line, changes in self.lines.items()}
        return {"lines": lines, "begins": [asdict(change) for change in self.begins]}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> StopPoints:
        """What ``to_json`` was given."""
        lines = {line: tuple(SideEffect(**change) for change in changes) for line, changes in data["lines"].items()}
        return StopPoints(lines, tuple(SideEffect(**change) for change in data["begins"]))


@dataclass(frozen=True, slots=True)
class Undo:
    """What a call changes in the script, and how that is taken back."""

    changes: Sequence[SideEffect]
    lines: Mapping[str, Sequence[SideEffect]]  # at which that can be done → what the step has changed there
    _sources: Sequence[StateSource]
    _before: Sequence[tuple[StateSource, Any, Any]]  # what holds it, its key there, and what it was
    _known: Known

    @staticmethod
    def of(changes: Sequence[SideEffect], stops: StopPoints, sources: Sequence[StateSource], known: Known) -> Undo:
        """The undo of a call that is about to be issued; ``known`` gives numbers as it begins."""
        places = [(sources[change.at], decode_key(change.key, sources)) for change in changes]
        before = [(one, key, one.values().get(key, _NOTHING)) for one, key in places]
        others = {(one.at, one.where) for one in stops.begins if not is_applied(one, sources)}
        lines = {line: there for line, there in stops.lines.items() if others <= {(one.at, one.where) for one in there}}
        filled = any(isinstance(one, ParamGroupSource) and isinstance(old, Tensor) for one, _, old in before)
        return Undo(changes, {} if filled else lines, sources, before, known)

    @property
    def places(self) -> list[str]:
        """Where the call changes something, for people."""
        return [change.where for change in self.changes]

    def carry_out(self, line: str) -> None:
        """Leave the script as PyTorch does where an op of this line fails."""
        for one, key, old in self._before:
            if old is not _NOTHING:
                one.put(key, old)
            elif key in one.values():
                one.drop(key)
        apply_side_effects(self.lines[line], self._sources, (), self._known)
