"""The interface of a job to a session, and the job's installed plans."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from actorflow.script_state.arguments import GlobalArgument
from actorflow.script_state.guards import Guards, StandsFor
from actorflow.script_state.key_encoding import decode_key
from actorflow.script_state.name_registry import NameRegistry
from actorflow.script_state.search_result import SearchResult
from actorflow.script_state.side_effects import place_key
from actorflow.script_state.sources import StateSource
from actorflow.session.body import JobBody
from actorflow.session.plan_cache import PlanCache
from actorflow.session.plan_keys import PlanKeyMaker
from actorflow.session.step_effects import StepEffects
from actorflow.standins.beside import WAS_GLOBAL, is_noted
from actorflow.variables.rebinding import RebindingSite
from actorflow.variables.weak_guards import WeakGuards
from actorflow_compiler.core.runs import Runs
from actorflow_compiler.core.sbp import Split
from actorflow_compiler.core.schedule_names import ScheduleName
from actorflow_compiler.hints.goal import Goal
from actorflow_compiler.plan.modes import Mode
from actorflow_compiler.plan.plan import Plan

if TYPE_CHECKING:
    from actorflow.session.compiling import CompileResult

__all__ = ["CompiledPlan", "JobLike", "JobOptions", "JobType", "bind_script"]


class JobType(enum.StrEnum):
    """Whether a job trains or predicts."""

    TRAIN = "train"  # a training step
    PREDICT = "predict"  # changes nothing, and has no gradients


@dataclass(frozen=True, slots=True)
class JobOptions:
    """How a job is to be parallel."""

    goal: Goal
    micro_batches: int | None  # None: left to the compiler


class JobLike(Protocol):
    """The interface of a job to a session."""

    name: str
    type: JobType
    schedule: ScheduleName
    mode: Mode
    function: Any
    signature: Any
    body: JobBody
    model: Any
    optimizer: Any
    plans: PlanCache[CompiledPlan]
    keys: PlanKeyMaker | None
    last: CompiledPlan | None

    def options(self, auto: bool) -> JobOptions:
        """What the job says of how it is to be run; ``auto``: what it does not say is left to the compiler."""


@dataclass(slots=True)
class ScriptBinding:
    """The objects of the script that a plan was made with; this keeps them alive."""

    optimizers: tuple[torch.optim.Optimizer, ...]
    keys: PlanKeyMaker
    guards: Guards
    found: SearchResult
    was_global: bool  # whether a module's tensors were global ones, which a job has taken over


@dataclass(slots=True, weakref_slot=True, eq=False)
class CompiledPlan:
    """A plan that is installed on this rank, and what a call of it needs."""

    call_text: str  # a call of the plan, as source text for messages
    number: int
    plan: Plan
    effects: StepEffects  # with only those number reads that this rank needs
    rows: Mapping[str, Runs]  # arguments that this rank's sources take → the rows of each (none of one without dims)
    bound: ScriptBinding  # set unless the plan is parked
    staged: frozenset[tuple[int, ...]] | None  # the ranks of each placement of modules; None: the stages are chosen
    mirrored: bool  # each device draws its own random numbers
    begins_freely: bool  # a call may begin before it is known that all ranks have made it
    key: tuple[Any, ...]
    written: frozenset[str] = frozenset()  # loose tensors and buffers that it changes
    sites: tuple[RebindingSite, ...] = ()  # the sites of rebound places, if they have one
    holders: frozenset[int] = frozenset()  # ids of the objects that its guards check
    calls: int = 0
    made: CompileResult | None = None  # on the master: what was compiled, or found
    parked: WeakGuards | None = None  # replaces ``bound`` while the job works on other state
    _aside: tuple[bool, StandsFor] = (False, lambda old, new: False)

    def park(self, names: NameRegistry, died: Callable[[object], None]) -> None:
        """Put the plan aside: release all strong references to the script's objects."""
        self.parked = WeakGuards(self.bound.found, self.bound.guards.read, names, died)
        self._aside = bool(self.bound.optimizers), self.bound.guards.stands_for
        self.sites = ()
        del self.bound

    def unpark(self, found: SearchResult) -> bool:
        """Bind the plan again to the objects of a search, if the plan was made with these; returns whether it was."""
        if self.parked is None or not self.parked.is_there(found):
            return False
        steps, stands_for = self._aside
        self.bound = bind_script(steps, Guards(found, stands_for), found, self.effects)
        self.parked = None
        return True

    def batches(self, given: Sequence[GlobalArgument]) -> Sequence[GlobalArgument]:
        """Those of a call's global arguments as whose rows its results may lie.

        None of a pipeline that is given its batch on one placement: its results lie where it ends.
        """
        split = [one for one in given if any(isinstance(entry, Split) for entry in one.sbp)]
        places = frozenset(one.placement.ranks for one in split)
        return split if len(places) > 1 or (self.staged is not None and self.staged <= places) else ()

    @property
    def places(self) -> list[tuple[StateSource, Any]]:
        """The places to which its step assigns other tensors."""
        sources = self.bound.found.sources
        return [(sources[one.at], decode_key(one.key, sources)) for one in self.effects.rebound]

    def take_places(self, sites: tuple[RebindingSite, ...]) -> None:
        """Check these places by their rebinding sites from now on, not by guards."""
        self.sites, self.holders = sites, frozenset(id(one.holder) for one in self.bound.found.sources)
        self.bound.guards.exclude((site.source, site.key) for site in sites)
        self.bound.guards.renew()

    def leave(self, results: Sequence[Tensor]) -> None:
        """After a call was issued: give the script the changed values of tensors that the step then replaced."""
        sources = self.bound.found.sources
        for one in self.effects.rebound if any(site.left for site in self.sites) else ():
            key = decode_key(one.key, sources)
            for site in self.sites:
                if one.changed and site.source.holder is sources[one.at].holder and site.key == key:
                    site.changed([results[number] for number in one.changed])

    @property
    def leaves(self) -> tuple[str, ...]:
        """Text for people: changes of the script, besides ``effects.changes``, that a call makes and cannot undo."""
        first = ("which step of the optimizer comes next",) if self.key[-1] else ()
        counts = ("what an optimizer counts",) if self.effects.reading.written else ()
        return (*first, *counts)


def bind_script(steps: bool, guards: Guards, found: SearchResult, effects: StepEffects) -> ScriptBinding:
    """Bind a plan with these effects to the script; ``steps``: its job steps optimizers.

    If the step may stop at a line and it is unknown what it has changed by then, its changes depend on the earlier
    values, too; guards then compare these.
    """
    state, sources = found.state, found.sources
    own = [(sources[int(source.at)], place_key(source)) for source in effects.reading.own]
    guards.exclude((one, key) for one, key in own if not one.counts)
    left = [change for change in effects.changes if not effects.stops.depend_on(change)]
    guards.watch_stored(found, [*own, *((sources[change.at], decode_key(change.key, sources)) for change in left)])
    return ScriptBinding(
        tuple(state.optimizers.values()) if steps else (), PlanKeyMaker(state), guards, found,
        any(is_noted(m, WAS_GLOBAL) for root in state.modules.values() for m in root.modules()),
    )  # fmt: skip
