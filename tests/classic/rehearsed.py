"""Rehearse the body of a job function, and run it eagerly, as a job does but without a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from actorflow.classic.variables import RehearsalRecord, rehearsing, running
from actorflow_compiler.core.torch_internals import fake_mode


def rehearse(
    body: Callable[..., Any], *args: Tensor, job: str = "job", again: RehearsalRecord | None = None
) -> RehearsalRecord:
    """What one rehearsal of ``body`` finds."""
    mode = fake_mode()
    with mode, rehearsing(mode, job, again=again or RehearsalRecord(job)) as rehearsal:
        body(*(torch.empty(a.shape, dtype=a.dtype) for a in args))
    return rehearsal.recording


def play(recording: RehearsalRecord, body: Callable[..., Any], *args: Tensor) -> Any:
    """One call of a job whose body was rehearsed."""
    with recording.call(), running(recording):
        return body(*args)


def run(body: Callable[..., Any], *args: Tensor) -> Any:
    """The first call of a job."""
    return play(rehearse(body, *args), body, *args)
