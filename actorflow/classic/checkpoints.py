"""Checkpoints of first-generation jobs: all variables, and the state of all optimizers and schedules."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from actorflow.classic.registry import REGISTRY
from actorflow.control import cluster as clusters
from actorflow.persistence.loading import Loaded, read_checkpoint
from actorflow.persistence.saving import Saving, begin_save
from actorflow.support.terminal import say
from actorflow_compiler.core.errors import StateError

__all__ = ["load", "save", "variables_in"]


def save(path: str | os.PathLike[str]) -> Saving:
    """Write a checkpoint to a folder; returns when it is written.  See ``actorflow.checkpoint.save``."""
    objects = {"variables": REGISTRY.tensors(), "optimizers": REGISTRY.saved()}
    saving = begin_save(path, objects, None, with_random=False)
    saving.wait()
    return saving


def load(path: str | os.PathLike[str]) -> Loaded:
    """Load variables, optimizers and schedules.

    Existing variables take their values at once, others when the first call of their job makes them.  Variables that
    the checkpoint does not have keep their values, and the master prints their names.  Raises StateError and, before
    anything is changed, if a variable has another shape.
    """
    loaded, found = _read(path)
    REGISTRY.write(found["variables"])
    REGISTRY.restore(found["optimizers"])
    missing = [name for name in REGISTRY.names() if name not in found["variables"]]
    if missing and clusters.current().rank == 0:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        say(f"the checkpoint {os.fspath(path)!r} has no {', '.join(missing[:5])}{more}, which keep their values")
    return loaded


def variables_in(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The values of the variables in a checkpoint, whole, by name."""
    loaded, _ = _read(path)
    found: dict[str, Tensor] = loaded["variables"]
    return found


def _read(path: str | os.PathLike[str]) -> tuple[Loaded, dict[str, Any]]:
    """A checkpoint's values, and the same as tensors that are read when they are needed."""
    loaded, found = read_checkpoint(path)
    if not {"variables", "optimizers"} <= found.keys():
        raise StateError(
            f"the checkpoint {os.fspath(path)!r} has {', '.join(found)}; one of first-generation jobs was expected: "
            f"name the objects to load it into (model=model)"
        )
    return loaded, found
