"""A job as its callers know it goes in; what a session keeps of it, of its plans and of one call comes out: values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from actorflow.script_state import tree
from actorflow.script_state.guards import Guards, StandsFor
from actorflow.script_state.key_encoding import decode_key
from actorflow.script_state.name_registry import NameRegistry
from actorflow.script_state.search import SearchResult
from actorflow.script_state.seeds import SeedEffect
from actorflow.script_state.side_effects import Rebinding, SideEffect, place_key
from actorflow.script_state.sources import StateSource
from actorflow.session.body import JobBody
from actorflow.session.keys import Keys
from actorflow.session.known import Known
from actorflow.session.numbers import Reading
from actorflow.session.undo import Stops
from actorflow.variables.rebinding import RebindingSite
from actorflow.variables.weak_guards import WeakGuards
from actorflow_compiler.hints.goal import Goal
from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.values.checks import Check
from actorflow_compiler.values.gradients import GradientEffects
from actorflow_compiler.values.host_programs import ValueDecisions

__all__ = ["Compiled", "JobLike", "bound"]


class JobLike(Protocol):
    """What a session needs to know of a job."""

    name: str
    type: str
    micro_batches: int
    goal: Goal
    schedule: str
    mode: str  # how bodies are to run
    function: Any
    signature: Any
    body: JobBody
    model: Any
    optimizer: Any
    plans: Known[Compiled]
    keys: Keys | None
    last: Compiled | None


@dataclass(slots=True)
class Bound:
    """What of the script a plan was made with: this holds all that the plan works on."""

    optimizers: tuple[torch.optim.Optimizer, ...]
    keys: Keys
    guards: Guards
    found: SearchResult


@dataclass(slots=True, weakref_slot=True, eq=False)
class Compiled:
    """A plan that is installed, and how a call feeds it."""

    spoken: str  # a call of it as people write it
    number: int
    plan: Plan
    shape: tree.Description
    inputs: frozenset[str]  # arguments that this rank's sources read
    bound: Bound  # there unless it is parked
    reading: Reading  # what it reads of numbers of the script, and what they have to be
    gradients: GradientEffects
    mirrored: bool  # devices draw random numbers of their own
    key: tuple[Any, ...]
    changes: tuple[SideEffect, ...]  # that each call makes in the script
    decisions: ValueDecisions  # by values of small variables
    rebound: tuple[Rebinding, ...]  # places that its step gives other tensors
    checks: tuple[Check, ...]  # its last result says which of them raise
    seeding: SeedEffect | None  # how it leaves torch's random numbers, where it seeds them
    stops: Stops  # where its step may fail, and what it has changed in the script there
    sites: tuple[RebindingSite, ...] = ()  # those of these places that are seen to
    holders: frozenset[int] = frozenset()  # of what it is looked at, by id
    calls: int = 0
    parked: WeakGuards | None = None  # in place of ``bound``, while the job works on something else
    _aside: tuple[bool, StandsFor] = (False, lambda old, new: False)

    def park(self, names: NameRegistry, died: Callable[[object], None]) -> None:
        """Hold nothing of the script any more."""
        self.parked = WeakGuards(self.bound.found, self.bound.guards.read, names, died)
        self._aside = bool(self.bound.optimizers), self.bound.guards.stands_for
        self.sites = ()
        del self.bound

    def unpark(self, found: SearchResult) -> bool:
        """Take hold of what a search has found, if it is what the plan was made with."""
        if self.parked is None or not self.parked.is_there(found):
            return False
        steps, stands_for = self._aside
        self.bound = bound(steps, Guards(found, stands_for), found, self.reading, self.changes, self.stops)
        self.parked = None
        return True

    @property
    def places(self) -> list[tuple[StateSource, Any]]:
        """The places that its step gives other tensors."""
        looked = self.bound.found.looked
        return [(looked[one.at], decode_key(one.key, looked)) for one in self.rebound]

    def take_places(self, sites: tuple[RebindingSite, ...]) -> None:
        """See to what these places hold instead of their guards."""
        self.sites, self.holders = sites, frozenset(id(one.holder) for one in self.bound.found.looked)
        self.bound.guards.without((site.looked, site.key) for site in sites)
        self.bound.guards.renew()

    def leave(self, results: Sequence[Tensor]) -> None:
        """A call was issued: what its step has changed before it put others there is the script's."""
        looked = self.bound.found.looked
        for one in self.rebound if any(site.left for site in self.sites) else ():
            key = decode_key(one.key, looked)
            for site in self.sites:
                if one.changed and site.looked.holder is looked[one.at].holder and site.key == key:
                    site.changed([results[number] for number in one.changed])

    @property
    def leaves(self) -> tuple[str, ...]:
        """What a call changes in the script at once beside ``changes``, whatever becomes of it, for people."""
        first = ("which step of the optimizer comes next",) if self.key[-1] else ()
        counts = ("what an optimizer counts",) if self.reading.written else ()
        return (*first, *counts)


def bound(
    steps: bool, guards: Guards, found: SearchResult, reading: Reading, changes: Sequence[SideEffect], stops: Stops
) -> Bound:  # fmt: skip
    """What a plan with this reading of numbers and these changes, of a job that ``steps`` or not, was made with.

    Where it may stop, and cannot tell what it has changed there, its changes depend on what there is before, too.
    """
    state, looked = found.state, found.looked
    own = [(looked[int(source.at)], place_key(source)) for source in reading.own]
    guards.without((one, key) for one, key in own if not one.counts)
    left = [change for change in changes if not stops.depend_on(change)]
    guards.stays(found, [*own, *((looked[change.at], decode_key(change.key, looked)) for change in left)])
    return Bound(tuple(state.optimizers.values()) if steps else (), Keys(state), guards, found)
