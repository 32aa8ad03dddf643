"""What a session needs to know of a job, and the plans of it that are installed."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from actorflow.script_state.guards import Guards, StandsFor
from actorflow.script_state.key_encoding import decode_key
from actorflow.script_state.name_registry import NameRegistry
from actorflow.script_state.search import SearchResult
from actorflow.script_state.side_effects import place_key
from actorflow.script_state.sources import StateSource
from actorflow.session.body import JobBody
from actorflow.session.plan_cache import PlanCache
from actorflow.session.plan_keys import PlanKeys
from actorflow.session.step_effects import StepEffects
from actorflow.variables.rebinding import RebindingSite
from actorflow.variables.weak_guards import WeakGuards
from actorflow_compiler.hints.goal import Goal
from actorflow_compiler.plan.plan import Plan

__all__ = ["CompiledPlan", "JobLike", "JobType", "bind_script"]


class JobType(enum.StrEnum):
    """What a job is for."""

    TRAIN = "train"  # a training step
    PREDICT = "predict"  # changes nothing, and has no gradients


class JobLike(Protocol):
    """What a session needs to know of a job."""

    name: str
    type: JobType
    micro_batches: int
    goal: Goal
    schedule: str
    mode: str  # how bodies are to run
    function: Any
    signature: Any
    body: JobBody
    model: Any
    optimizer: Any
    plans: PlanCache[CompiledPlan]
    keys: PlanKeys | None
    last: CompiledPlan | None


@dataclass(slots=True)
class ScriptBinding:
    """The objects of the script that a plan was made with; this keeps them alive."""

    optimizers: tuple[torch.optim.Optimizer, ...]
    keys: PlanKeys
    guards: Guards
    found: SearchResult


@dataclass(slots=True, weakref_slot=True, eq=False)
class CompiledPlan:
    """A plan that is installed on this rank, and what a call of it needs."""

    call_text: str  # a call of it as people write it
    number: int
    plan: Plan
    effects: StepEffects  # whose numbers are those that this rank reads
    inputs: frozenset[str]  # arguments that this rank's sources read
    bound: ScriptBinding  # there unless it is parked
    mirrored: bool  # devices draw random numbers of their own
    key: tuple[Any, ...]
    sites: tuple[RebindingSite, ...] = ()  # of the rebound places, those that have one
    holders: frozenset[int] = frozenset()  # ids of the objects that its guards look at
    calls: int = 0
    parked: WeakGuards | None = None  # in place of ``bound``, while the job works on something else
    _aside: tuple[bool, StandsFor] = (False, lambda old, new: False)

    def park(self, names: NameRegistry, died: Callable[[object], None]) -> None:
        """Put the plan aside: release all that it holds of the script."""
        self.parked = WeakGuards(self.bound.found, self.bound.guards.read, names, died)
        self._aside = bool(self.bound.optimizers), self.bound.guards.stands_for
        self.sites = ()
        del self.bound

    def unpark(self, found: SearchResult) -> bool:
        """Bind the plan again to what a search has found, if that is what it was made with; returns whether it is."""
        if self.parked is None or not self.parked.is_there(found):
            return False
        steps, stands_for = self._aside
        self.bound = bind_script(steps, Guards(found, stands_for), found, self.effects)
        self.parked = None
        return True

    @property
    def places(self) -> list[tuple[StateSource, Any]]:
        """The places to which its step assigns other tensors."""
        sources = self.bound.found.sources
        return [(sources[one.at], decode_key(one.key, sources)) for one in self.effects.rebound]

    def take_places(self, sites: tuple[RebindingSite, ...]) -> None:
        """Check these places by their sites from now on, not by guards."""
        self.sites, self.holders = sites, frozenset(id(one.holder) for one in self.bound.found.sources)
        self.bound.guards.exclude((site.source, site.key) for site in sites)
        self.bound.guards.renew()

    def leave(self, results: Sequence[Tensor]) -> None:
        """A call was issued: give the script the tensors that the step changed before it replaced them."""
        sources = self.bound.found.sources
        for one in self.effects.rebound if any(site.left for site in self.sites) else ():
            key = decode_key(one.key, sources)
            for site in self.sites:
                if one.changed and site.source.holder is sources[one.at].holder and site.key == key:
                    site.changed([results[number] for number in one.changed])

    @property
    def leaves(self) -> tuple[str, ...]:
        """For people, what a call changes in the script at once, besides ``effects.changes``, and cannot take back."""
        first = ("which step of the optimizer comes next",) if self.key[-1] else ()
        counts = ("what an optimizer counts",) if self.effects.reading.written else ()
        return (*first, *counts)


def bind_script(steps: bool, guards: Guards, found: SearchResult, effects: StepEffects) -> ScriptBinding:
    """Bind a plan with these effects to the script; ``steps``: its job steps optimizers.

    Where the step may stop at a line and cannot tell what it has changed before it, its changes depend on the earlier
    values, too, which guards then compare.
    """
    state, sources = found.state, found.sources
    own = [(sources[int(source.at)], place_key(source)) for source in effects.reading.own]
    guards.exclude((one, key) for one, key in own if not one.counts)
    left = [change for change in effects.changes if not effects.stops.depend_on(change)]
    guards.watch_stored(found, [*own, *((sources[change.at], decode_key(change.key, sources)) for change in left)])
    return ScriptBinding(tuple(state.optimizers.values()) if steps else (), PlanKeys(state), guards, found)
