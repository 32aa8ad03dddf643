"""The request to compile a plan, and the user's step as capture runs it, which finds the step's effects."""

from __future__ import annotations

import contextlib
import enum
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from actorflow.rendezvous.device_assignment import (
    NO_DEFAULTS,
    DeviceDefaults,
)
from actorflow.runtime.measured_costs import HERE, Target
from actorflow.script_state import tree
from actorflow.script_state.arguments import CallArguments
from actorflow.script_state.nondeterminism import StandIns
from actorflow.script_state.search_result import SearchResult
from actorflow.script_state.seeds import SeedEffect, record_seed_effect
from actorflow.script_state.side_effect_recorder import SideEffectRecorder
from actorflow.script_state.side_effects import MANY_VALUES, Rebinding, SideEffect, takes_many_values
from actorflow.session.number_reads import reads_as_constants, reads_of_capture
from actorflow.session.planes import RankLocation
from actorflow.session.step_effects import StepEffects
from actorflow.session.undo import StopPoints
from actorflow.standins.owned_tensor import real_value
from actorflow.support.progress import Progress
from actorflow_compiler.capture.failure_points import FailurePoints
from actorflow_compiler.capture.request import History, Listeners, Preferences, StepRequest, TargetDevices, UserStep
from actorflow_compiler.core.errors import (
    ActorflowError,
    CaptureError,
)
from actorflow_compiler.core.expressions import NumberSource, SourceKind
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.schedule_names import ScheduleName
from actorflow_compiler.core.user_code import calls_the_step, with_code
from actorflow_compiler.hints.goal import Goal
from actorflow_compiler.hints.hints import ResolvedHints
from actorflow_compiler.numbers.symbolic import NumberEnv
from actorflow_compiler.plan.modes import Mode
from actorflow_compiler.plan.plan import Variable
from actorflow_compiler.values.checks import BranchExplorer, Check
from actorflow_compiler.values.gradients import NO_GRADIENTS, GradientEffects, GradientState
from actorflow_compiler.values.host_programs import ValueDecisions
from actorflow_compiler.values.reads import LOOKS_AT_A_VALUE
from actorflow_compiler.values.variables import ScriptState, StateTensor

__all__ = ["CapturedStep", "CompileRequest", "LookedAt", "line_of", "located"]

E = TypeVar("E", bound=ActorflowError)


class LookedAt(enum.StrEnum):
    """What people want of a plan that is not to be run."""

    FORECAST = "forecast"  # only what each rank will do: one rank of each class is enough
    CLASSES = "classes"  # the plan of one rank of each class, with where in the script it comes from
    PLAN = "plan"
    ALL = "all"  # the plan, and those that it is chosen among


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """A job's call for which a plan is to be compiled, and the options of the compilation."""

    name: str
    function: Callable[..., object]
    arguments: CallArguments
    state: ScriptState
    hints: ResolvedHints
    train: bool
    micro_batches: int | None  # None: left to the compiler
    goal: Goal
    fixed: Mapping[str, Variable]  # layouts that earlier plans decided
    fresh: bool  # this is an optimizer's first step, which differs from later ones
    later: bool = False  # the job has run with another batch
    explain: str | None = None  # a regular expression of names; the plan's notes explain their layouts
    target: Target = HERE  # the hardware that the plan is for
    schedule: ScheduleName = ScheduleName.AUTO
    mode: Mode = Mode.EAGER  # how bodies are to run
    own: tuple[bool, ...] | None = None  # in the mirrored view, for each argument whether every device has its own
    kinds: frozenset[str] = frozenset()  # of devices that the script names for the function
    places: frozenset[Placement] = frozenset()  # that the function's own scopes name, as far as that is known
    defaults: DeviceDefaults = NO_DEFAULTS  # further settings of kinds of devices
    found: SearchResult | None = None  # the state that the function can reach
    changed: Mapping[str, Collection[str]] = field(default_factory=dict)  # place that plans change → the values
    standing: GradientState = NO_GRADIENTS  # which gradients exist now
    opens: bool = True  # whether numbers may be inputs of the plan; not if they decided what the function made
    beside: bool = True  # whether collectives run while ranks compute, as they do not in memory that CPUs share
    locations: tuple[RankLocation, ...] = ()  # of the ranks, by which plans are compared; (): they are not known
    looked_at: LookedAt | None = None  # what is wanted of a plan that is not to be run
    value: Callable[[StateTensor], Tensor] | None = None  # reads the current value of a tensor of the script

    @property
    def compared_on(self) -> tuple[object, ...]:
        """What of ``locations`` and ``beside`` plans depend on: their orders, and a choice if one is left to it."""
        return self.locations, self.beside if self.goal.search or self.micro_batches is None else None

    @property
    def beside_in_budget(self) -> bool:
        """What of ``beside`` plans depend on: it counts where memory is known, in a run by the budget."""
        return self.beside and self.goal.budget is not None


class CapturedStep:
    """The user's step as capture runs it, once or several times, and the effects that the last run has shown."""

    def __init__(self, request: CompileRequest, numbers: NumberEnv | None, own: Sequence[NumberSource]) -> None:
        self.numbers = numbers  # None: the script's numbers are constants
        self.checks = BranchExplorer()
        self._request, self._own = request, own
        self._learnt: list[tuple[GradientEffects, ValueDecisions, Sequence[Check]]] = []
        self._shape: tree.Description = None
        self._changes: list[SideEffect] = []
        self._rebound: list[Rebinding] = []
        self._seeding: list[SeedEffect] = []
        self._stops = StopPoints()

    def request(self, devices: TargetDevices, doing: Progress) -> StepRequest:
        """The request to the compiler."""
        r = self._request
        line = line_of(r.function)
        return StepRequest(
            UserStep(r.name, self.run, r.arguments.specs, r.state, r.train, line, r.own),
            devices,
            Preferences(r.hints, r.micro_batches or 1, r.goal, r.schedule, r.explain),
            History(r.fixed, r.fresh, r.later, r.standing),
            Listeners(doing, self.learn, self.numbers, self.value, self.checks),
        )

    @calls_the_step
    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        """Run the function on these tensors in place of its arguments'; returns the tensors among its results."""
        request, numbers, found = self._request, self.numbers, self._request.found
        stand_ins = StandIns()
        args, kwargs = request.arguments.restore(tensors, self._stand_in, partial(_refusing, stand_ins))
        results: list[Tensor] = []
        tracked = (
            contextlib.nullcontext()
            if found is None
            else SideEffectRecorder(request.name, found, request.changed, numbers, self._own, stand_ins)
        )
        with tracked as run:
            lines = None if run is None else FailurePoints(run.so_far)
            if run is not None:
                self.checks.changed = partial(_so_far, run)
            watched = contextlib.nullcontext() if lines is None else lines.watching()
            with record_seed_effect() as left, self.checks.running(), watched:
                returned = request.function(*args, **kwargs)
            self._seeding = left
            if numbers is not None:
                numbers.end()
            self._shape = tree.describe(returned, results)
            self._changes = [] if run is None else run.changes(results)
            self._rebound = [] if run is None else run.rebound
            left_at = {} if lines is None or not self._changes else lines.changed()
            self._stops = StopPoints(left_at, () if run is None else run.begun(self._changes))
        return results

    def learn(self, gradients: GradientEffects, decisions: ValueDecisions, checks: Sequence[Check]) -> None:
        """Record the gradient effects, value decisions and checks that capture has found."""
        for asked in decisions.numbers:
            if takes_many_values(self._request.changed.get(asked.where, ()), repr(asked.found)):
                raise CaptureError(
                    f"{asked.where}\n  {LOOKS_AT_A_VALUE} ({MANY_VALUES} plans for other values are there)"
                )
        self._learnt.append((gradients, decisions, checks))

    def value(self, name: str) -> Tensor:
        """The current value of a tensor of the script."""
        held = self._request.state.held[name]
        return real_value(held.tensor) if self._request.value is None else self._request.value(held)

    def effects(self) -> StepEffects:
        """The effects of the step, once it has been captured."""
        request = self._request
        if self.numbers is None:
            reading = reads_as_constants(request.arguments, request.state, request.train, request.found)
        else:
            reading = reads_of_capture(self.numbers, self._own)
        gradients, decisions, checks = self._learnt[0]
        return StepEffects(
            self._shape,
            gradients,
            tuple(self._changes),
            reading,
            decisions,
            tuple(self._rebound),
            tuple(checks),
            self._seeding[0] if self._seeding else None,
            self._stops,
        )

    def _stand_in(self, path: str, value: int | float) -> Any:
        return value if self.numbers is None else self.numbers.stand_in(NumberSource(SourceKind.ARGUMENT, path), value)


def _so_far(run: SideEffectRecorder) -> tuple[list[dict[str, Any]], str]:
    """The changes in Python that a run of the step has made so far, as JSON; see ``BranchExplorer``."""
    changes, lost = run.so_far()
    return [change.to_json() for change in changes], lost


def located(error: E, function: Callable[..., object]) -> E:
    """The error with the first line of the job's function in front, unless it names a line itself."""
    line = line_of(function)
    if not line or re.search(r":\d+\b", str(error)):
        return error
    return type(error)(f"{with_code(line)}\n  {error}")


def line_of(function: Callable[..., object]) -> str:
    """The file:line where a function begins; empty for a function that is not written in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _refusing(stand_ins: StandIns, path: str, argument: Any) -> Any:
    """What a capture is given for an argument: it refuses to be an iterator's next item, or the time."""
    stand_in = stand_ins.of(argument, path)
    return argument if stand_in is None else stand_in
