"""``flow.global_function``: make a job of a function, which is compiled at its first call and runs on all devices."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, overload

from torch import Tensor

from actorflow.classic.callbacks import CallbackObserver
from actorflow.classic.config import FunctionConfig
from actorflow.classic.job_body import ClassicJobBody
from actorflow.live.observer import LiveObserver
from actorflow.session.body import JobBody
from actorflow.session.context import adopt_with
from actorflow.session.jobs import CompiledPlan, JobOptions, JobType
from actorflow.session.optimizer_steps import step_in_jobs
from actorflow.session.plan_cache import PlanCache
from actorflow.session.plan_keys import PlanKeyMaker
from actorflow.session.process import current, observed_by
from actorflow.standins.beside import beside, beside_parts
from actorflow.tracing.observer import TracingObserver
from actorflow_compiler.core.errors import CallError
from actorflow_compiler.core.schedule_names import ScheduleName, schedule_name
from actorflow_compiler.hints.goal import goal_of
from actorflow_compiler.plan.modes import Mode, mode_of
from actorflow_compiler.plan.plan import Plan

__all__ = ["Job", "global_function"]


class Job:
    """A compiled function.

    A call returns at once, with the function's results as tensors that wait for their values when they are used.
    Every rank must make the same calls in the same order.  Attributes that the script gives it, or asks it for, are
    those of its function, as they would be without the decorator.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        type: str = "train",
        micro_batches: int | str | None = None,
        parallel: str | Mapping[str, int] | None = None,
        memory_budget: float | str | None = None,
        schedule: str = "auto",
        compile: bool | str | None = None,
        model: Any = None,
        optimizer: Any = None,
        name: str | None = None,
        function_config: FunctionConfig | None = None,
    ) -> None:
        if type not in ("train", "predict"):
            raise CallError(f'a job of type {type!r} was found; "train" or "predict" was expected')
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self.type = JobType(type)
        _check_count(micro_batches)
        self.micro_batches, self.parallel, self.memory_budget = micro_batches, parallel, memory_budget
        self.goal = goal_of(parallel, memory_budget)
        self.schedule = schedule_name(schedule)
        self.mode = mode_of(compile)
        self.model, self.optimizer = model, optimizer
        self.name: str = name or getattr(function, "__name__", None) or "job"
        self.signature = inspect.signature(function)
        self.function_config = function_config
        body = ClassicJobBody(function, self.name, self.type == JobType.TRAIN, function_config)
        self.body: JobBody = body
        self.mirrored = body.mirrored
        if body.mirrored:
            self._check_mirrored()
        self.plans: PlanCache[CompiledPlan] = PlanCache(self.name)
        self.keys: PlanKeyMaker | None = None  # of the state that the last search found
        self.last: CompiledPlan | None = None
        self._bound: dict[int, Job] = {}  # by id, for objects to which nothing can be attached

    def __getattr__(self, name: str) -> Any:
        """An attribute of the function; called for what the job has not itself."""
        return (
            getattr(vars(self)["function"], name) if "function" in vars(self) else object.__getattribute__(self, name)
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the function, but for what the job has itself."""
        own = not self._is_made() or name in vars(self) or hasattr(type(self), name)
        if own or not isinstance(self.function, types.FunctionType):
            object.__setattr__(self, name, value)
        else:
            setattr(self.function, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the function, but for what the job has itself."""
        if name in vars(self):
            object.__delattr__(self, name)
        else:
            delattr(self.function, name)

    def _is_made(self) -> bool:
        return "_bound" in vars(self)

    def _check_mirrored(self) -> None:
        """Raise CallError for options that the mirrored view does not support."""
        given: list[tuple[str, object, object]] = [
            ("micro_batches", self.micro_batches or 1, 1),
            ("parallel", self.parallel, None),
            ("memory_budget", self.memory_budget, None),
            ("schedule", str(self.schedule), ScheduleName.AUTO),
            ("compile", str(self.mode), Mode.EAGER),
        ]
        for option, found, default in given:
            if found != default:
                raise CallError(
                    f"job {self.name!r} has the mirrored view, and {option}={found!r} was found; the mirrored view is "
                    f"data parallelism only, of whole batches: leave it out, or use the consistent view (the default)"
                )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the job with logical (whole) arguments; returns the results of the function.

        In the mirrored view arguments and results are lists with one item for each device.  If the function's result is
        annotated with a form of ``actorflow.typing``, it has that form.
        """
        return current().call(self, args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Job:
        """The job of a method, bound to one object; each object has its own plans, which are freed with it."""
        if instance is None:
            return self
        kept = beside(instance)
        if kept is None:
            return self._of_slots(instance)
        if self not in kept:
            kept[self] = self._of(instance)
        found: Job = kept[self]
        return found

    def _of_slots(self, instance: Any) -> Job:
        """The bound job for an object without ``__dict__``; it lives as long as the object's models and optimizers."""
        key = self, id(instance)  # this id stays the object's own, because the job holds the object
        known = self._bound.get(id(instance))
        if known is not None:
            return known
        parts = beside_parts(instance)
        found: Job | None = next((kept[key] for kept in parts if key in kept), None)
        if found is None:
            found = self._of(instance)
            if parts:
                parts[0][key] = found
            else:
                self._bound[id(instance)] = found
        return found

    def _of(self, instance: Any) -> Job:
        """Make the job of this method for one object."""
        return Job(
            types.MethodType(self.function, instance),
            type=self.type,
            micro_batches=self.micro_batches,
            parallel=self.parallel,
            memory_budget=self.memory_budget,
            schedule=self.schedule,
            compile=self.mode,
            model=self.model,
            optimizer=self.optimizer,
            name=self.name,
            function_config=self.function_config,
        )

    def options(self, auto: bool) -> JobOptions:
        """How the job is to be parallel; ``auto``: what it does not say is left to the compiler."""
        if self.mirrored:
            return JobOptions(self.goal, 1)
        goal = goal_of("auto", self.memory_budget) if auto and self.parallel is None else self.goal
        count = "auto" if auto and self.micro_batches is None else self.micro_batches
        return JobOptions(goal, None if count == "auto" else int(count or 1))

    @property
    def plan(self) -> Plan | None:
        """The plan of the last call (on the master: of all ranks); None before the first call."""
        return None if self.last is None else self.last.plan

    def __repr__(self) -> str:
        return f"<{self.type} job {self.name}, {len(self.plans)} plan{'s' * (len(self.plans) != 1)}>"


@overload
def global_function(function: Callable[..., Any], /) -> Job: ...


@overload
def global_function(
    type: str = "train",
    function_config: FunctionConfig | None = None,
    *,
    micro_batches: int | str | None = None,
    parallel: str | Mapping[str, int] | None = None,
    memory_budget: float | str | None = None,
    schedule: str = "auto",
    compile: bool | str | None = None,
    model: Any = None,
    optimizer: Any = None,
    name: str | None = None,
) -> Callable[[Callable[..., Any]], Job]: ...


def global_function(
    first: str | Callable[..., Any] | None = None,
    second: FunctionConfig | None = None,
    /,
    *,
    type: str = "train",
    function_config: FunctionConfig | None = None,
    micro_batches: int | str | None = None,
    parallel: str | Mapping[str, int] | None = None,
    memory_budget: float | str | None = None,
    schedule: str = "auto",
    compile: bool | str | None = None,
    model: Any = None,
    optimizer: Any = None,
    name: str | None = None,
) -> Job | Callable[[Callable[..., Any]], Job]:
    """Make a job of a function: one training step (``type="train"``) or one prediction (``"predict"``).

    The function is ordinary PyTorch over whole (logical) batches.  The modules, optimizers and tensors that it uses are
    found automatically; ``model`` and ``optimizer`` (one, a list or a dictionary of them) name those that are not
    found. ``micro_batches`` is the number of equal micro-batches into which the batch is split, 1 by default; "auto"
    chooses it.  The first batch must be divisible by it; a later batch of another size, such as a shorter last one, is
    split into the largest possible number up to it.  A predict job runs without gradients.

    ``parallel`` controls the layout of the step where hints leave it open.  "data" (the default) splits the batch and
    keeps parameters whole; "tensor" keeps the batch whole and splits weights; "sequence" splits the positions of each
    sample (the dim along which attention looks, of any length) and keeps parameters whole; "ring" is "sequence" with
    keys and values that are passed on from device to device where attention allows it; "expert" is "data" with the
    experts of a mixture (stacked matrices) split over the devices; "pipeline" cuts the step into a stage for each
    device; "auto" compares whole plans and takes the one whose step is forecast to be shortest: mesh, pipeline stages,
    layouts and ZeRO, where hints leave them open; a dictionary such as ``{"data": 2, "tensor": 4}`` makes a mesh with
    one axis for each entry, and with "pipeline" in it so many stages that are each such a mesh.  ``memory_budget``
    limits the memory of each device ("20GB", or a number of bytes); with it, "auto" is the default.

    ``schedule`` is the order in which the stages of a pipeline process the micro-batches.  "auto" (the default)
    searches for the fastest schedule, among the published ones ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2",
    "zb-v") and beyond; one of their names selects that one.  If it does not fit the memory budget, a slower schedule
    that needs less memory is used.

    ``compile`` is how each rank runs the ops between communications.  By default they run one by one.  True or
    "inductor" fuses them with torch's inductor, which takes a while before the first step; "reduce-overhead" also
    replays them as CUDA graphs on GPUs; "max-autotune" and "max-autotune-no-cudagraphs" also try several kernels for
    each matrix product; "cudagraphs" only replays CUDA graphs.  The names, and the effects on rounding, are those of
    ``torch.compile``.

    ``function_config`` (``flow.function_config()``) sets the view of the job (consistent, or mirrored: data parallelism
    over lists with one item for each device), where its ops run, and its dtype.  ``type`` and ``function_config`` may
    be given by position, as ``("train", func_config)``.  Annotations of ``actorflow.typing`` state the form of
    arguments and of the result.  Raises CallError or LayoutError for invalid values.

    >>> @global_function(type="train", micro_batches=8)
    ... def train_step(x, y):
    ...     loss = F.mse_loss(model(x), y)
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     return loss
    """
    kind = first if isinstance(first, str) else type
    config = second if second is not None else function_config

    def make(function: Callable[..., Any]) -> Job:
        return Job(
            function,
            type=kind,
            micro_batches=micro_batches,
            parallel=parallel,
            memory_budget=memory_budget,
            schedule=schedule,
            compile=compile,
            model=model,
            optimizer=optimizer,
            name=name,
            function_config=config,
        )

    return make if first is None or isinstance(first, str) else make(first)


def _check_count(micro_batches: object) -> None:
    """Raise CallError unless this is what ``micro_batches`` may be."""
    if micro_batches is None or micro_batches == "auto":
        return
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise CallError(f'micro_batches={micro_batches!r} was found; a number, 1 or more, or "auto" was expected')


def _adopt(*state: Any) -> Mapping[int, Tensor]:
    """``eager.adoption.adopt_global_state``; a script that has global tensors has imported its room."""
    from actorflow.eager.adoption import adopt_global_state

    return adopt_global_state(*state)


def _as_global(*result: Any) -> Tensor:
    """``eager.job_results.global_result``; see ``_adopt``."""
    from actorflow.eager.job_results import global_result

    return global_result(*result)


step_in_jobs(Job)
adopt_with(_adopt, _as_global)
observed_by(lambda cluster, _: (LiveObserver(cluster), CallbackObserver()))
observed_by(lambda cluster, barrier: (TracingObserver(cluster, barrier),) if cluster.settings.trace else ())
