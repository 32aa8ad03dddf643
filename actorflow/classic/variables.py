"""``flow.get_variable``: make and find the variables of job functions.

Before a job function is captured it runs once over tensors without memory (``rehearsing``), which makes its
variables and its optimizer.  In every later run (``running``), ``get_variable`` returns the existing variables.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from actorflow.classic.initializers import Initializer
from actorflow.classic.minimizer import Minimizer
from actorflow.classic.registry import REGISTRY, Registry
from actorflow.deferred import DeferredTensor, materialize
from actorflow.regularizers import Regularizer
from actorflow.script_state.user_code import user_line
from actorflow_compiler.core.errors import CallError, LayoutError, StateError
from actorflow_compiler.core.sbp import Broadcast, Sbp, Split
from actorflow_compiler.core.torch_internals import real_tensors

__all__ = [
    "REGISTRY",
    "RehearsalRecord",
    "Registry",
    "Rehearsal",
    "current_recording",
    "get_variable",
    "is_rehearsing",
    "rehearsing",
    "running",
]


@dataclass(frozen=True, slots=True)
class RehearsalRecord:
    """The variables and the optimizer that a rehearsal of a job function found."""

    job: str = "job"
    variables: tuple[str, ...] = ()  # variables that it uses, in the order of their first use
    optimizers: tuple[Minimizer, ...] = ()  # one or none
    dtype: torch.dtype = torch.float32  # default dtype of its variables

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """A context around each call of the job on this rank: sets learning rates before it, and counts it afterwards.

        A call that raises is not counted.
        """
        for minimizer in self.optimizers:
            minimizer.before_call()
        yield
        for minimizer in self.optimizers:
            minimizer.after_call()


class _FunctionRun:
    """One run of a job function, over stand-ins or real tensors."""

    def __init__(self, recording: RehearsalRecord) -> None:
        self.recording = recording
        self.counts: dict[str, int] = {}  # default name → how often it was given
        self.used: set[str] = set()  # names of the variables that were used

    def unique(self, prefix: str) -> str:
        """A name that is unique in the job, such as ``Dense`` or ``Dense_1``; the same in every run of the job."""
        count = self.counts[prefix] = self.counts.get(prefix, -1) + 1
        return f"{prefix}_{count}" if count else prefix

    def variable(self, name: str) -> Tensor:
        """An existing variable, made real if it is deferred; while the function is captured, its stand-in."""
        found = REGISTRY[name]
        return materialize(found) if isinstance(found, DeferredTensor) else found

    def minimize(self, losses: Sequence[Tensor], names: Sequence[str] | None, make: MakeMinimizer) -> None:
        """Run one step of the recorded optimizer."""
        if not self.recording.optimizers:
            raise CallError(
                f"{user_line()}\n  minimize was found, which this job did not come to at its first call; the same "
                f"minimize in every call was expected: an if around it has to be one for all calls of a job"
            )
        variables = {name: self.variable(name) for name in self.recording.optimizers[0].variables}
        self.recording.optimizers[0].run(losses, variables)


class Rehearsal(_FunctionRun):
    """A run of a job function over tensors without memory; ``recording`` is its result."""

    def __init__(self, mode: AbstractContextManager[Any], job: str, dtype: torch.dtype, again: RehearsalRecord) -> None:
        super().__init__(RehearsalRecord(job, dtype=dtype))
        self.mode, self.again = mode, again
        self.fakes: dict[str, Tensor] = {}
        self.minimized: list[str] = []  # lines of the script that called ``minimize``

    def variable(self, name: str) -> Tensor:
        """The fake tensor for a variable; the same one for the same name."""
        if name not in self.fakes:
            real = REGISTRY[name]
            with self.mode, torch.enable_grad():
                empty = torch.empty(tuple(real.shape), dtype=real.dtype, device=real.device)
                self.fakes[name] = nn.Parameter(empty) if real.requires_grad else empty
            self.recording = replace(self.recording, variables=tuple(self.fakes))
        return self.fakes[name]

    def minimize(self, losses: Sequence[Tensor], names: Sequence[str] | None, make: MakeMinimizer) -> None:
        """Make the optimizer for the variables that the losses depend on."""
        where = user_line()
        if not torch.is_grad_enabled():
            raise CallError(f'{where}\n  minimize in a job that makes predictions; type="train" was expected')
        if self.minimized:
            raise CallError(
                f"{where}\n  a second minimize was found in job {self.recording.job!r}; the first is\n"
                f"{self.minimized[0]}\n  one was expected: minimize([loss_a, loss_b]) takes several losses, and "
                f"another optimizer has a job of its own"
            )
        self.minimized.append(where)
        below = _leaves(losses)
        trained = [n for n, fake in self.fakes.items() if id(fake) in below and (names is None or n in names)]
        unknown = [n for n in names or () if n not in trained]
        if unknown:
            raise StateError(
                f"{where}\n  minimize is to train {', '.join(map(repr, unknown))}, on which the loss does not depend; "
                f"it depends on {', '.join(n for n, f in self.fakes.items() if id(f) in below) or 'no variable'}"
            )
        if not trained:
            raise StateError(
                f"{where}\n  the loss depends on no trainable variable; one that is computed from "
                f"flow.get_variable(…) or flow.layers was expected, without detach and outside of no_grad"
            )
        if self.again.optimizers:
            made = self.again.optimizers[0]
            if set(made.variables) != set(trained):
                raise StateError(
                    f"{where}\n  job {self.recording.job!r} trains {_few(trained)} with these arguments, and at its "
                    f"first call {_few(made.variables)}; the same was expected: make another job for it"
                )
        else:
            with real_tensors():
                made = make({n: REGISTRY[n] for n in trained}, self.recording.job, where)
                REGISTRY.keep(made)
        self.recording = replace(self.recording, optimizers=(made,))


MakeMinimizer = Callable[[Mapping[str, Tensor], str, str], Minimizer]  # trained variables by name, job, line
_now: ContextVar[_FunctionRun | None] = ContextVar("actorflow_classic_run", default=None)


@contextlib.contextmanager
def rehearsing(
    mode: AbstractContextManager[Any],
    job: str = "job",
    dtype: torch.dtype = torch.float32,
    again: RehearsalRecord = RehearsalRecord(),
) -> Iterator[Rehearsal]:
    """A context for the run of a job function that makes its variables and its optimizer.

    ``mode`` is the mode in which tensors have no memory; the caller has entered it.  ``again`` is the result of an
    earlier rehearsal of the same job (with arguments of other shapes), whose optimizer is kept.
    """
    run = Rehearsal(mode, job, dtype, again)
    token = _now.set(run)
    try:
        yield run
    finally:
        _now.reset(token)


@contextlib.contextmanager
def running(recording: RehearsalRecord) -> Iterator[None]:
    """A context for each later run of a job function, whether captured or eager."""
    token = _now.set(_FunctionRun(recording))
    try:
        yield
    finally:
        _now.reset(token)


def is_rehearsing() -> bool:
    """Whether a job function is being rehearsed, which finds its variables."""
    return isinstance(_now.get(), Rehearsal)


def current_recording() -> RehearsalRecord | None:
    """The rehearsal record of the job function that is running; None outside first-generation job functions."""
    run = _now.get()
    return None if run is None else run.recording


def current_run(what: str) -> _FunctionRun:
    """The current run of a job function; raises CallError outside of one.

    ``what`` is the function that was called, for the error message.
    """
    run = _now.get()
    if run is None:
        raise CallError(
            f"{user_line()}\n  {what} was called outside of a job function; variables of the first generation belong "
            f"to jobs: call it inside of a function with @flow.global_function, or use torch.nn"
        )
    return run


def get_variable(
    name: str,
    shape: int | Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    initializer: Initializer | None = None,
    regularizer: Regularizer | None = None,
    trainable: bool | None = None,
    model_name: str | None = None,
    random_seed: int | None = None,
    distribute: Sbp | None = None,
    reuse: bool = True,
) -> Tensor:
    """The variable of this name, which all jobs share; the first call makes it.

    The first call needs ``shape`` and ``initializer``.  ``dtype`` is the job's (float32) by default.  A variable that
    is not ``trainable`` is a buffer.  ``distribute`` is its layout on the devices (``flow.distribute.split(axis)`` or
    ``.broadcast()``); by default, and with ``.auto()``, the job's ``parallel=`` decides: with "data" every device holds
    the whole variable.  With ``reuse=False`` a second call with this name in one job is an error.  The initial value
    depends only on the name and the seed (``random_seed``, or else the seed of ``flow.manual_seed``, or else torch's),
    so it is equal on every rank.  ``model_name`` has no effect.

    Raises CallError outside a job function.  Raises StateError if shape, dtype or trainability differ from those of the
    existing variable, and for a new variable without shape or initializer.  Raises LayoutError for a layout that does
    not fit.
    """
    run = current_run(f"get_variable({name!r})")
    if not isinstance(name, str) or not name:
        raise StateError(f"{user_line()}\n  get_variable({name!r}) was found; a name that is not empty was expected")
    if distribute is not None and not isinstance(distribute, Split | Broadcast):
        raise LayoutError(
            f"{user_line()}\n  get_variable({name!r}, distribute={distribute}) was found; flow.distribute.split(axis), "
            f".broadcast() or .auto() was expected"
        )
    for what, given, kind, example in (
        ("initializer", initializer, Initializer, "flow.truncated_normal(0.1)"),
        ("regularizer", regularizer, Regularizer, "flow.regularizers.l2(0.01)"),
    ):
        if given is not None and not isinstance(given, kind):
            raise StateError(
                f"{user_line()}\n  get_variable({name!r}, {what}={given!r}) was found; one such as {example} was "
                f"expected"
            )
    dims = None if shape is None else (shape,) if isinstance(shape, int) else tuple(int(d) for d in shape)
    if not reuse and name in run.used:
        raise StateError(
            f"{user_line()}\n  a second variable {name!r} was found in one job, and reuse=False; another name was "
            f"expected, or reuse=True to share the variable"
        )
    run.used.add(name)
    if isinstance(run, Rehearsal):
        default = run.recording.dtype if dtype is None and name not in REGISTRY else dtype
        REGISTRY.make(name, dims, default, initializer, regularizer, trainable, random_seed, distribute)
    elif name not in REGISTRY:
        raise StateError(
            f"{user_line()}\n  variable {name!r} was not there at this job's first call; the same variables in every "
            f"call were expected"
        )
    return run.variable(name)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "")


def _leaves(losses: Sequence[Tensor]) -> set[int]:
    """The ids of the leaf tensors from which the losses were computed."""
    found: set[int] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn for loss in losses]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # this node accumulates the gradient of a leaf
            found.add(id(node.variable))
        waiting.extend(next_node for next_node, _ in node.next_functions)
    return found
