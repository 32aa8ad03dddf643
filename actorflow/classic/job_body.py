"""The body of a job function of the first generation: rehearse it, capture it, run it and convert its results."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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

MOST_FOUND = 1 << 12  # kinds of arguments of which a job keeps what its rehearsal found

# names whose use in a job function may make state, in the form in which the search for state records them
LAYERS = [f"{where}.{name}" for name in layers.__all__ for where in ("layers", layers.__name__)]
MAKERS = frozenset(["get_variable", "minimize", "actorflow.layers", layers.__name__, *LAYERS])


@dataclass(frozen=True, slots=True)
class RehearsedCall(PreparedCall):
    """A call whose function was rehearsed, or makes no variables and no optimizer."""

    body: ClassicJobBody
    recording: RehearsalRecord

    def captured(self) -> Callable[..., Any]:
        """The function to capture, in which the variables and the optimizer of the rehearsal exist."""
        return self.body.playing(self.recording)

    def held(self) -> dict[str, Any]:
        """The variables and the optimizer that the rehearsal made, by name."""
        return self.body.holds(self.recording)

    def around(self) -> AbstractContextManager[None]:
        """A context around the call, which sets learning rates before it and counts it afterwards."""
        return self.recording.call()

    def placements(self) -> frozenset[Placement]:
        """The placements of the scopes in the function and of its settings."""
        return self.body.placements

    def kinds(self) -> frozenset[str]:
        """The kinds of devices that ``flow.config.gpu_device_num`` requests."""
        return self.body.kinds


class ClassicJobBody(JobBody):
    """A function that may be of the first generation; any other function behaves as in ``JobBody``."""

    def __init__(self, function: Callable[..., Any], name: str, train: bool, config: FunctionConfig | None) -> None:
        super().__init__(function)
        settings = config or FunctionConfig()
        self.name, self.train = name, train
        self.view, self.placed, self.dtype = settings.view, settings.placed, settings.dtype
        self.mirrored = self.view is MIRRORED
        self.annotations = job_annotations(function, name, self.view)
        self.first_generation = config is not None or not self.annotations.plain
        # by the key of the arguments, which decides which plan runs, then by the numbers in them (None: any)
        self._found: dict[Any, dict[str | None, RehearsalRecord]] = {}
        self.last = RehearsalRecord(name)  # of the most recent rehearsal
        self._entered: set[Placement] = set()  # placements of the scopes that the function entered

    def copied(self) -> Self:
        """A copy with the results of the rehearsals so far."""
        other = super().copied()
        other._found = {key: dict(found) for key, found in self._found.items()}
        other._entered = set(self._entered)
        return other

    def take(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], devices: int) -> JobArguments:
        """The arguments in the form of their placeholders; raises CallError for an argument that does not fit."""
        return self.annotations.convert(args, kwargs, devices)

    def prepare(
        self,
        arguments: CallArguments,
        given: JobArguments,
        search: Search,
        aside: Callable[[], AbstractContextManager[None]],
    ) -> RehearsedCall:
        """Rehearse the function if it may make state and no call with such arguments has rehearsed it yet."""
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
        """In the mirrored view, for each tensor argument, whether it has one item for each device; otherwise None."""
        return tuple(spec.name in given.own for spec in arguments.specs) if self.mirrored else None

    # -- state that is made inside of the function -----------------------------------------------------

    def makes_state(self, state: ScriptState) -> bool:
        """Whether the function must be rehearsed: it is of the first generation, or uses a name that makes state."""
        return self.first_generation or not MAKERS.isdisjoint(state.named)

    def recording(self, arguments: CallArguments) -> RehearsalRecord | None:
        """The result of an earlier rehearsal with such arguments, or None."""
        found = self._found.get(arguments.key, {})
        return found.get(None) or found.get(arguments.spoken_numbers)

    def forget(self, keys: Collection[Any]) -> None:
        """Forget the rehearsals of calls whose arguments have these keys."""
        for key in keys:
            self._found.pop(key, None)

    def rehearse(
        self, arguments: CallArguments, own: Sequence[bool] | None, state: ScriptState | None
    ) -> RehearsalRecord:
        """Run the function once without memory, which makes its variables and its optimizer.

        ``state`` is the result of the search for the function's state; None if the function makes no state by itself
        and need not run.
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
        self._found.setdefault(arguments.key, {})[None if state is None else arguments.spoken_numbers] = found
        if len(self._found) > MOST_FOUND:  # calls that failed have no plan with which these would go
            del self._found[next(iter(self._found))]
        return found

    def holds(self, recording: RehearsalRecord) -> dict[str, Any]:
        """The state that the job holds beyond what a search finds: variables and the optimizer, by name."""
        held: dict[str, Any] = {"variables": REGISTRY} if recording.variables else {}
        return held | {f"{self.name}.optimizer": m.optimizer for m in recording.optimizers}

    @property
    def placements(self) -> frozenset[Placement]:
        """The placements of the function's scopes and of its settings."""
        return frozenset(self._entered | ({self.placed.placement} if self.placed is not None else set()))

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of devices ("cpu", "cuda") that the script requests, if the function names no placement."""
        asks = not self.placements and script_request().gpu is not None  # flow.config.gpu_device_num
        return frozenset({device_kind("gpu")} if asks else ())

    # -- running it --------------------------------------------------------------------------------------

    def playing(self, recording: RehearsalRecord) -> Callable[..., Any]:
        """The function after its rehearsal, to be captured or to run eagerly."""

        @functools.wraps(self.function)
        def play(*args: Any, **kwargs: Any) -> Any:
            with self._around(), running(recording):
                return self.function(*args, **kwargs)

        return play

    def eagerly(self, call: PreparedCall, args: tuple[Any, ...], kwargs: Mapping[str, Any], devices: int) -> Any:
        """Run the function eagerly; in the mirrored view once per device, each with an optimizer step of its own."""
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
        """A context that applies the job's settings to one run of the function."""
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
        """The result of a call in the form of the annotation; ``value`` holds handles on logical results."""
        return self._answer(per_device_lists(value) if self.mirrored else value)

    def _answer(self, value: Any) -> Any:
        form = self.annotations.result
        if form is None:
            return value
        if not is_callback(form):
            return in_annotated_form(form, value, self.name)
        (inner,) = form.__args__

        def take(callback: Callable[[Any], object]) -> None:
            """Queue ``callback`` to be called once with the result."""
            if not callable(callback):
                raise CallError(f"{self.name}: {callback!r} was given for a callback; a function was expected")
            callbacks.add(callback, lambda: in_annotated_form(inner, value, self.name))

        return take


def _listed(found: Sequence[Any]) -> Any:
    """Merge the results of all devices into one, in which each tensor is a list with one item for each device."""
    first = found[0]
    if isinstance(first, Tensor):
        return list(found)
    if isinstance(first, Mapping):
        return {key: _listed([f[key] for f in found]) for key in first}
    if isinstance(first, list | tuple):
        made = [_listed(items) for items in zip(*found, strict=True)]
        return type(first)(*made) if hasattr(first, "_fields") else type(first)(made)
    return first
