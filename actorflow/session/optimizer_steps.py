"""Turn an optimizer's step outside of jobs, over parameters that plans own, into a call of a job."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from actorflow import deferred
from actorflow.deferred import DeferredTensor
from actorflow.script_state.guards import summarize
from actorflow.session.process import started
from actorflow.standins.beside import beside
from actorflow.standins.owned_tensor import OwnedTensor
from actorflow_compiler.core.errors import StateError
from actorflow_compiler.core.step_watchers import watch_steps
from actorflow_compiler.core.torch_internals import step_hooks, users_step_hooks

__all__ = ["read_before_steps", "step_in_jobs"]

_may_be_deferred = False  # a checkpoint was loaded
_examined: weakref.WeakKeyDictionary[Optimizer, object] = weakref.WeakKeyDictionary()  # what they kept in the last step
_JOB = "the job of its step"
_HOOKS = "its hooks"  # its own hooks, removed until torch has run the step that does nothing


def step_in_jobs(make: Callable[..., Callable[[], object]]) -> None:
    """Run optimizer steps outside of jobs as calls of a job, into which ``make`` turns a function."""

    def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _is_ours(optimizer, args, kwargs):
            return None
        kept = beside(optimizer)
        assert kept is not None
        restore(kept)
        if _JOB not in kept:
            kept[_JOB] = make(lambda: optimizer.step(), name=f"{type(optimizer).__name__}.step", optimizer=optimizer)
        kept[_JOB]()  # with its hooks
        kept[_HOOKS] = [(hooks, {**hooks}) for hooks in step_hooks(optimizer)]
        for hooks, _ in kept[_HOOKS]:
            hooks.clear()
        return (_with_nothing_to_do(optimizer),), {}  # torch now runs the step of this copy, which does nothing

    def after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        restore(beside(optimizer) or {})

    def restore(kept: dict[Any, Any]) -> None:
        for hooks, before in kept.pop(_HOOKS, ()):
            hooks.update(before)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def read_before_steps() -> None:
    """What optimizers keep may be deferred from now on; a step reads it, if the script has the parameters itself."""
    global _may_be_deferred
    _may_be_deferred = True


def _read_state(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not _may_be_deferred or _examined.get(optimizer) is optimizer.state:
        return
    session = started()
    if session is not None and session.context.capturing:
        return
    _examined[optimizer] = optimizer.state  # loading puts another one there
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(isinstance(p, DeferredTensor | OwnedTensor) for p in parameters):
        deferred.materialize(optimizer)


watch_steps(_read_state)


def _is_ours(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a step is outside of jobs and over parameters of plans; StateError if no job could run it."""
    session = started()
    if session is None or session.context.capturing:
        return False
    if not any(isinstance(p, OwnedTensor) for group in optimizer.param_groups for p in group["params"]):
        return False
    if others := users_step_hooks():
        hook = summarize(next(iter(others.values())))
        raise StateError(
            f"{type(optimizer).__name__}.step was called outside of a job, over parameters that plans own, and a hook "
            f"of all optimizers, {hook}, would run twice; expected: optimizer.register_step_pre_hook or "
            f"register_step_post_hook, or the optimizer's step in the job"
        )
    if len(args) > 1 or any(value is not None for value in kwargs.values()):
        raise StateError(
            f"{type(optimizer).__name__}.step was called with a closure outside of a job, over parameters that a plan "
            f"owns; expected: the closure's forward and backward pass in a job, and optimizer.step() without it"
        )
    return True


def _with_nothing_to_do(optimizer: Optimizer) -> Optimizer:
    """A copy of the optimizer without parameters."""
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.state = defaultdict(dict)
    twin.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    return twin
