"""A compilation request (step, devices, preferences, history, listeners), and the capture of its step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from torch import Tensor

from actorflow_compiler.capture.capture import StepToTrace, TensorArgument, capture
from actorflow_compiler.capture.from_fx import Capture
from actorflow_compiler.capture.mirrored import on_each_device
from actorflow_compiler.core.hardware import CPU_CORE, Hardware
from actorflow_compiler.core.schedule_names import ScheduleName
from actorflow_compiler.core.torch_internals import traced_on
from actorflow_compiler.graph.graph import verify
from actorflow_compiler.hints.goal import DATA, Goal
from actorflow_compiler.hints.hints import ResolvedHints
from actorflow_compiler.numbers.symbolic import NumberEnv
from actorflow_compiler.plan.plan import Variable
from actorflow_compiler.substitutes.decompositions import join_norms
from actorflow_compiler.values.checks import BranchExplorer, Check
from actorflow_compiler.values.gradients import NO_GRADIENTS, GradientEffects, GradientState
from actorflow_compiler.values.host_programs import ValueDecisions
from actorflow_compiler.values.variables import ScriptState


@dataclass(frozen=True, slots=True)
class UserStep:
    """The step that is compiled."""

    name: str  # of the job
    function: Callable[[list[Tensor]], list[Tensor]]  # argument tensors → result tensors
    arguments: Sequence[TensorArgument]
    state: ScriptState  # what the function reads and changes
    train: bool  # False: the step only predicts
    defined: str = ""  # its first line, as "train.py:12", for errors
    own: Sequence[bool] | None = None  # mirrored view: for each argument, whether dim 0 is for the devices' own items


@dataclass(frozen=True, slots=True)
class TargetDevices:
    """The devices that a step is compiled for."""

    world: int  # ranks
    type: str = "cpu"  # "cpu" | "cuda"
    hardware: Hardware = CPU_CORE  # by which layouts are priced and stages cut


@dataclass(frozen=True, slots=True)
class Preferences:
    """The options of a compilation."""

    hints: ResolvedHints
    micro_batches: int = 1
    goal: Goal = DATA
    schedule: ScheduleName = ScheduleName.AUTO
    explain: str | None = None  # a regular expression of ops, modules and variables to explain


@dataclass(frozen=True, slots=True)
class History:
    """What earlier plans and calls have fixed."""

    fixed: Mapping[str, Variable] = field(default_factory=lambda: MappingProxyType({}))  # variables with a layout
    fresh: bool = False  # no optimizer has stepped yet
    later: bool = False  # the job has run with another batch size: this one may be cut into fewer pieces
    standing: GradientState = NO_GRADIENTS  # the state of gradients that other calls have left


@dataclass(frozen=True, slots=True)
class Listeners:
    """Callbacks and recorders that are used while the step is compiled."""

    doing: Callable[[str], None] = lambda _: None  # called with the name of each pass as it begins
    learn: Callable[[GradientEffects, ValueDecisions, Sequence[Check]], None] = lambda *_: (
        None
    )  # called with what the step does with gradients and values, and with its checks
    numbers: NumberEnv | None = None  # records what the step does with Python numbers; None: they are constants
    value: Callable[[str], Tensor] | None = None  # returns the value of a variable; None: no value is known
    checks: BranchExplorer | None = None  # explores branches of which one side raises; None: all are refused


@dataclass(frozen=True, slots=True)
class StepRequest:
    """Everything that one compilation depends on."""

    step: UserStep
    devices: TargetDevices
    preferences: Preferences
    history: History = field(default_factory=History)
    listeners: Listeners = field(default_factory=Listeners)

    @property
    def mirrored(self) -> int:
        """The number of devices that each run the step on values of their own; 0: values are logical."""
        return 0 if self.step.own is None else self.devices.world


def capture_request(request: StepRequest) -> Capture:
    """Trace the step of a request, and report to its listeners what the step does with gradients and values.

    Raises CaptureError and StateError, as ``capture`` does.
    """
    step, listeners, mirrored = request.step, request.listeners, request.mirrored
    function = step.function if step.own is None else on_each_device(step.function, step.own, request.devices.world)
    captured = capture(StepToTrace(
        function,
        step.arguments,
        step.state,
        step.train,
        hints=request.preferences.hints,
        fresh=request.history.fresh,
        standing=request.history.standing,
        mirrored=mirrored,
        device=traced_on(request.devices.type),
        numbers=listeners.numbers,
        value=None if mirrored else listeners.value,
        checks=None if mirrored else listeners.checks,
    ))  # fmt: skip
    listeners.learn(captured.gradients, captured.decisions, captured.checks)
    return replace(captured, graph=verify(join_norms(captured.graph)))
