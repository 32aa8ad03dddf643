"""A plan step's result structure, and its reads and changes of the script; found on the master, sent to every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from actorflow.script_state import tree
from actorflow.script_state.seeds import SeedEffect
from actorflow.script_state.side_effects import Rebinding, SideEffect
from actorflow.session.number_reads import NumberReads
from actorflow.session.undo import StopPoints
from actorflow_compiler.values.checks import Check
from actorflow_compiler.values.gradients import GradientEffects
from actorflow_compiler.values.host_programs import ValueDecisions

__all__ = ["StepEffects"]


@dataclass(frozen=True, slots=True)
class StepEffects:
    """The effects of a plan's call besides firing its actors."""

    shape: tree.Description  # structure of the step's result
    gradients: GradientEffects  # gradients that the step reads and leaves
    changes: tuple[SideEffect, ...]  # that each call makes in the script
    reading: NumberReads  # the script's numbers that it reads, and conditions on them
    decisions: ValueDecisions  # decisions by values of small variables
    rebound: tuple[Rebinding, ...]  # places to which the step assigns other tensors
    checks: tuple[Check, ...]  # checks of values; the plan's last result says which of them raise
    seeding: SeedEffect | None  # the state in which the step leaves torch's generator, if it seeds it
    stops: StopPoints  # lines where the step may fail, with the script's changes until then

    def to_json(self) -> dict[str, Any]:
        """The effects as JSON data, for other ranks."""
        return {
            "shape": self.shape,
            "gradients": {f.name: sorted(getattr(self.gradients, f.name)) for f in fields(GradientEffects)},
            "changes": [change.to_json() for change in self.changes],
            "reading": self.reading.to_json(),
            "decisions": self.decisions.to_json(),
            "rebound": [asdict(one) for one in self.rebound],
            "checks": [check.to_json() for check in self.checks],
            "seeding": None if self.seeding is None else asdict(self.seeding),
            "stops": self.stops.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepEffects:
        """The effects that ``to_json`` encoded."""
        return cls(
            shape=data["shape"],
            gradients=GradientEffects(**{key: frozenset(names) for key, names in data["gradients"].items()}),
            changes=tuple(SideEffect(**change) for change in data["changes"]),
            reading=NumberReads.from_json(data["reading"]),
            decisions=ValueDecisions.from_json(data["decisions"]),
            rebound=tuple(Rebinding(one["at"], one["key"], tuple(one["changed"])) for one in data["rebound"]),
            checks=tuple(map(Check.from_json, data["checks"])),
            seeding=None if data["seeding"] is None else SeedEffect(**data["seeding"]),
            stops=StopPoints.from_json(data["stops"]),
        )
