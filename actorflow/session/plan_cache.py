"""The plans of one job: find one that is valid for a call, or explain why none is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any, Generic, Protocol, TypeVar

from actorflow.script_state.arguments import CallArguments
from actorflow.script_state.guards import Guards
from actorflow.script_state.search_result import SearchResult
from actorflow.session.number_reads import numbers_now
from actorflow.session.plan_keys import PlanKeyMaker
from actorflow.session.step_effects import StepEffects
from actorflow.variables.weak_guards import WeakGuards

__all__ = ["PlanCache"]

OFTEN = 3  # plans caused by one changing value, from which on a note reports it
WORTH = 20  # calls of a plan from which on it no longer counts as a wasted compilation
MOST_VARIABLE = "ACTORFLOW_MOST_PLANS"  # environment variable: how many plans all jobs together keep ready
LET_GO = "its plan had not been used for long, and was let go"
REMEMBERED = 1000  # plans of which it is known why they were made, and that they were there
PARTS = (  # the parts of a key, in order
    "arguments", "which modules train", "which parameters take gradients", "autocast, or a mode or dtype of torch",
    "which parameters the optimizers' groups have", "settings of the optimizers", "settings of the gradient scaler",
    "the optimizer's first step",
)  # fmt: skip


class CachedBinding(Protocol):
    """The objects of the script that a plan was made with."""

    keys: PlanKeyMaker
    guards: Guards
    found: SearchResult


class CachedPlan(Protocol):
    """What the cache needs to know of a plan."""

    @property
    def number(self) -> int:
        """Its number in the session."""

    @property
    def bound(self) -> CachedBinding:
        """The objects of the script that it was made with."""

    @property
    def key(self) -> tuple[Any, ...]:
        """The key of the calls that it fits."""

    @property
    def effects(self) -> StepEffects:
        """Its reads of the script's state, and its changes to it."""

    @property
    def calls(self) -> int:
        """How many calls there were."""

    @property
    def parked(self) -> WeakGuards | None:
        """The guards of a plan that is put aside; None for others."""


P = TypeVar("P", bound=CachedPlan)


class PlanCache(Generic[P]):
    """The plans of one job, each with the key and conditions of the calls it is valid for."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._of: dict[Any, list[P]] = {}  # by the arguments' key; the last used plan is at the end
        self._all: list[P] = []
        self._aside: list[tuple[Any, P]] = []  # parked plans, with their arguments' keys
        self._costs: dict[str, int] = {}  # place of a changing value → number of plans made because of it
        self._made = 0
        self._told: deque[tuple[int, str]] = deque(maxlen=REMEMBERED)  # number of a plan → why it was made
        self._forgotten: deque[Any] = deque(maxlen=REMEMBERED)  # arguments' keys of plans that were forgotten
        self._said = False  # that plans are made again
        self.why = ""  # why the last call had no plan

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[P]:
        return iter(self._all)

    def find(
        self, arguments: CallArguments, fresh: Callable[[PlanKeyMaker], bool], misfit: Callable[[P], str]
    ) -> P | None:
        """The valid plan for a call with these arguments in the script's present state; if None, ``why`` says why.

        ``misfit`` returns a plan's assumption about gradients or values that does not hold, or an empty text.
        """
        alike = self._of.get(arguments.key, [])
        self.why = "" if alike else self._why_none(arguments.key)
        for at in range(len(alike) - 1, -1, -1):
            plan = alike[at]
            key = plan.bound.keys.key(arguments, fresh(plan.bound.keys))
            if key == plan.key:
                bound = plan.bound
                numbers = numbers_now(arguments, bound.found.state, bound.found.sources)
                changed = plan.effects.reading.difference(numbers) or bound.guards.difference() or misfit(plan)
                if not changed:
                    if at != len(alike) - 1:
                        alike.append(alike.pop(at))
                    return plan
            else:
                parts = [said for said, a, b in zip(PARTS, key, plan.key, strict=True) if a != b]
                changed = f"{', '.join(parts)} changed"
            self.why = self.why or changed  # compared with the last used plan
        return None

    def add(self, arguments: CallArguments, plan: P) -> None:
        """Add the plan that was made for the last call that ``find`` had no plan for."""
        self._of.setdefault(arguments.key, []).append(plan)
        self._all.append(plan)
        self._made += 1
        self._told.append((self._made, self.why or "the first call"))

    def forget(self, numbers: Collection[int]) -> list[Any]:
        """Forget plans that are dropped though calls may still want them, by their numbers in the session.

        Returns the arguments' keys that have no plan any more.
        """
        leaving = {
            plan for plan in self._all if plan.number in numbers and not (plan.parked is not None and plan.parked.gone)
        }
        if not leaving:
            return []
        gone = []
        self._all = [plan for plan in self._all if plan not in leaving]
        self._aside = [(key, plan) for key, plan in self._aside if plan not in leaving]
        for key, plans in [*self._of.items()]:
            if leaving.intersection(plans):
                self._forgotten.append(key)
                plans[:] = [plan for plan in plans if plan not in leaving]
                if not plans:
                    del self._of[key]
                    gone.append(key)
        return gone

    def _why_none(self, key: Any) -> str:
        """Why no plan has these arguments; empty before the first plan."""
        if key in self._forgotten:
            return LET_GO
        return "other arguments" if self._made else ""

    def park(self, stays: Callable[[P], bool]) -> list[P]:
        """Put aside the plans for which ``stays`` is false; returns them."""
        found = []
        for key, plans in [*self._of.items()]:
            leaving = [plan for plan in plans if not stays(plan)]
            if leaving:
                plans[:] = [plan for plan in plans if plan not in leaving]
                self._aside += [(key, plan) for plan in leaving]
                if not plans:
                    del self._of[key]
                found += leaving
        return found

    def unpark(self, binds: Callable[[P], bool]) -> bool:
        """Take back parked plans for which ``binds`` is true, and forget those for which it never can be."""
        found = False
        for key, plan in self._aside:
            if plan.parked is not None and plan.parked.gone:
                self._all.remove(plan)
            elif binds(plan):
                self._of.setdefault(key, []).append(plan)
                found = True
        self._aside = [(key, plan) for key, plan in self._aside if plan in self._all and plan.parked is not None]
        return found

    @property
    def aside(self) -> int:
        """How many are put aside."""
        return len(self._aside)

    def changed(self) -> dict[str, set[str]]:
        """Place → values, for places that plans change and may read, and for numbers of tensors that plans depend on.

        A value computed from numbers counts as another one in each plan.  Plans that have run often are left out:
        a curriculum has many stages, and each is worth a plan.
        """
        values: dict[str, set[str]] = {}
        for number, plan in enumerate(self._all):
            if plan.calls >= WORTH:
                continue
            for change in plan.effects.changes:
                if change.read and change.plain:
                    said = repr(change.value)
                    values.setdefault(change.where, set()).add(f"{said} {number}" if "'number'" in said else said)
            for asked in plan.effects.decisions.numbers:
                values.setdefault(asked.where, set()).add(repr(asked.found))
        return values

    def note(self) -> str:
        """A note for people if one changing value has caused several plans, or a plan is made again; else empty."""
        if self.why == LET_GO and not self._said:
            self._said = True
            return (
                f"{self._name} is compiled again: {LET_GO}, as so many others were called since. If that goes on, let "
                f"more of them stay: {MOST_VARIABLE}=1000 (each takes some megabytes), or pad batches to fewer shapes"
            )
        where, changed, _ = self.why.partition(" changed from ")
        if not changed:
            return ""
        self._costs[where] = self._costs.get(where, 0) + 1
        if self._costs[where] != OFTEN:
            return ""
        return (
            f"{self._name} is compiled again: {self.why}, the {OFTEN}rd plan for another value of it. Keep it in a "
            f"tensor, or pass a tensor as an argument of {self._name}, and it is data; flow.explain_recompiles() lists "
            f"all plans"
        )

    def explain(self) -> str:
        """A line for each plan: why it was made."""
        return "\n".join(f"{self._name}, plan {n}: {told}" for n, told in self._told)
