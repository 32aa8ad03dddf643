"""The body of a job function of the first generation: rehearse it, capture it, run it and convert its results."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from actorflow.classic import layers
from actorflow.classic.annotations import in_annotated_form, is_callback, job_annotations, per_device_lists
from actorflow.classic.callbacks import callbacks
from actorflow.classic.config import FunctionConfig
from actorflow.classic.devices import device_kind
from actorflow.classic.logical_views import MIRRORED, within_view
from actorflow.classic.scope import record_placements
from actorflow.classic.variables import REGISTRY, RehearsalRecord, rehearsing, running
from actorflow.rendezvous.start import script_request
from actorflow.script_state.arguments import CallArguments
from actorflow.session.body import JobArguments, JobBody, PreparedCall, Search
from actorflow_compiler.capture.capture import without_memory
from actorflow_compiler.core.errors import CallError
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.values.variables import ScriptState

__all__ = ["ClassicJobBody", "RehearsedCall"]

# names of what makes state inside of a job function, as the search for state notes them
LAYERS = [f"{where}.{name}" for name in layers.__all__ for where in ("layers", layers.__name__)]
MAKERS = frozenset(["get_variable", "minimize", "actorflow.layers", layers.__name__, *LAYERS])


@dataclass(frozen=True, slots=True)
class RehearsedCall(PreparedCall):
    """A call whose function a rehearsal has run, or found to make nothing by itself."""

    body: ClassicJobBody
    recording: RehearsalRecord

    def captured(self) -> Callable[..., Any]:
        """The function after its rehearsal: what it makes is there."""
        return self.body.playing(self.recording)

    def held(self) -> dict[str, Any]:
        """Variables and the optimizer."""
        return self.body.holds(self.recording)

    def around(self) -> AbstractContextManager[None]:
        """Learning rates are set before it."""
        return self.recording.call()

    def placements(self) -> frozenset[Placement]:
        """Those of scopes in the function, and of its settings."""
        return self.body.placements

    def kinds(self) -> frozenset[str]:
        """What ``flow.config.gpu_device_num`` asks for."""
        return self.body.kinds


class ClassicJobBody(JobBody):
    """A function that may be one of the first generation; for others it does what a plain one does."""

    def __init__(self, function: Callable[..., Any], name: str, train: bool, config: FunctionConfig | None) -> None:
        super().__init__(function)
        settings = config or FunctionConfig()
        self.name, self.train = name, train
        self.view, self.placed, self.dtype = settings.view, settings.placed, settings.dtype
        self.mirrored = self.view is MIRRORED
        self.annotations = job_annotations(function, name, self.view)
        self.first_generation = config is not None or not self.annotations.plain
        self._found: dict[Any, RehearsalRecord] = {}  # by what decides which plan runs, of the arguments
        self.last = RehearsalRecord(name)  # what the last rehearsal has found
        self._entered: set[Placement] = set()  # by scopes in the function

    def copied(self) -> Self:
        """With what its rehearsals have found."""
        other = super().copied()
        other._found, other._entered = dict(self._found), set(self._entered)
        return other

    def take(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], devices: int) -> JobArguments:
        """The arguments as placeholders want them; raises CallError for those that do not fit."""
        return self.annotations.convert(args, kwargs, devices)

    def prepare(
        self,
        arguments: CallArguments,
        given: JobArguments,
        search: Search,
        aside: Callable[[], AbstractContextManager[None]],
    ) -> RehearsedCall:
        """Rehearse a function that may make anything, where no call with such arguments has done so."""
        own = self.own(arguments, given)
        recording = self.recording(arguments)
        if recording is None:
            state = search(self.holds(self.last))
            with aside():
                recording = self.rehearse(arguments, own, state if self.makes_state(state) else None)
            if recording.variables or recording.optimizers:
                search(self.holds(recording))
        return RehearsedCall(arguments, self.function, own, self, recording)

    def own(self, arguments: CallArguments, given: JobArguments) -> tuple[bool, ...] | None:
        """In the mirrored view, for each tensor argument, whether every device has one of its own; else None."""
        return tuple(spec.name in given.own for spec in arguments.specs) if self.mirrored else None

    # -- state that is made inside of the function -----------------------------------------------------

    def makes_state(self, state: ScriptState) -> bool:
        """Whether the function is of the first generation, and is to be rehearsed."""
        return self.first_generation or not MAKERS.isdisjoint(state.named)

    def recording(self, arguments: CallArguments) -> RehearsalRecord | None:
        """What a rehearsal with such arguments has found; None before it."""
        return self._found.get(arguments.key) or self._found.get((arguments.key, arguments.spoken_numbers))

    def rehearse(
        self, arguments: CallArguments, own: Sequence[bool] | None, state: ScriptState | None
    ) -> RehearsalRecord:
        """Run the function once without memory, which makes its variables and its optimizer.

        ``state`` is what the search has found for the function; None says that it makes nothing by itself, and is
        not to be run.
        """
        found = RehearsalRecord(self.name)
        if state is not None:
            alike = [torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in arguments.specs]
            shapes = [t[0] if o else t for t, o in zip(alike, own or [False] * len(alike), strict=True)]
            with (
                without_memory(state, shapes, train=self.train) as (mode, tensors),
                rehearsing(mode, self.name, self.dtype or torch.float32, self.last) as rehearsal,
                record_placements(self._entered),
                self._around(),
            ):
                args, kwargs = arguments.restore(tensors)
                self.function(*args, **kwargs)
            found = self.last = rehearsal.recording
        self._found[arguments.key if state is None else (arguments.key, arguments.spoken_numbers)] = found
        return found

    def holds(self, recording: RehearsalRecord) -> dict[str, Any]:
        """What the job holds besides what a search finds: variables and the optimizer, by names for them."""
        held: dict[str, Any] = {"variables": REGISTRY} if recording.variables else {}
        return held | {f"{self.name}.optimizer": m.optimizer for m in recording.optimizers}

    @property
    def placements(self) -> frozenset[Placement]:
        """Those that the function's scopes and its settings name."""
        return frozenset(self._entered | ({self.placed.placement} if self.placed is not None else set()))

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of devices ("cpu", "cuda") that the script names where the function names no placement."""
        asks = not self.placements and script_request().gpu is not None  # flow.config.gpu_device_num
        return frozenset({device_kind("gpu")} if asks else ())

    # -- running it --------------------------------------------------------------------------------------

    def playing(self, recording: RehearsalRecord) -> Callable[..., Any]:
        """The function as it is captured, or run eagerly, after its rehearsal."""

        @functools.wraps(self.function)
        def play(*args: Any, **kwargs: Any) -> Any:
            with self._around(), running(recording):
                return self.function(*args, **kwargs)

        return play

    def eagerly(self, call: PreparedCall, args: tuple[Any, ...], kwargs: Mapping[str, Any], devices: int) -> Any:
        """In the mirrored view device after device, each with a step of its own."""
        if not self.first_generation:
            return super().eagerly(call, args, kwargs, devices)
        play, arguments, own = call.captured(), call.arguments, call.own
        if own is None:
            args, kwargs = arguments.restore(arguments.tensors)
            return self.give(play(*args, **kwargs))
        found = []
        for device in range(devices):
            args, kwargs = arguments.restore(
                [t[device] if o else t for t, o in zip(arguments.tensors, own, strict=True)]
            )
            found.append(play(*args, **kwargs))
        return self._answer(_listed(found))

    @contextlib.contextmanager
    def _around(self) -> Iterator[None]:
        """What the settings say, around one run of the function."""
        before = torch.get_default_dtype()
        try:
            if self.dtype is not None:
                torch.set_default_dtype(self.dtype)
            with within_view(self.view), self.placed or contextlib.nullcontext():
                yield
        finally:
            torch.set_default_dtype(before)

    # -- its results ---------------------------------------------------------------------------------------

    def give(self, value: Any) -> Any:
        """What a call returns, in the form that the annotation says; ``value`` has handles on logical results."""
        return self._answer(per_device_lists(value) if self.mirrored else value)

    def _answer(self, value: Any) -> Any:
        form = self.annotations.result
        if form is None:
            return value
        if not is_callback(form):
            return in_annotated_form(form, value, self.name)
        (inner,) = form.__args__

        def take(callback: Callable[[Any], object]) -> None:
            """Have ``callback`` called, once, with the result."""
            if not callable(callback):
                raise CallError(f"{self.name}: {callback!r} was given for a callback; a function was expected")
            callbacks.add(callback, lambda: in_annotated_form(inner, value, self.name))

        return take


def _listed(found: Sequence[Any]) -> Any:
    """The results of all devices as one, whose tensors are lists."""
    first = found[0]
    if isinstance(first, Tensor):
        return list(found)
    if isinstance(first, Mapping):
        return {key: _listed([f[key] for f in found]) for key in first}
    if isinstance(first, list | tuple):
        made = [_listed(items) for items in zip(*found, strict=True)]
        return type(first)(*made) if hasattr(first, "_fields") else type(first)(made)
    return first
