"""Checkpoints (``flow.checkpoint``): each rank writes the parts that it owns, and reads its parts under any plan.

A checkpoint is a folder of safetensors files and one JSON manifest, which is written last.  All functions must be
called on every rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actorflow.classic import checkpoints as classic
from actorflow.classic.registry import REGISTRY
from actorflow.persistence.keeper import Keeper
from actorflow.persistence.loading import Loaded, load_checkpoint
from actorflow.persistence.saving import Saving, begin_save
from actorflow.support.nearest_names import answer_with_nearest
from actorflow_compiler.core.errors import StateError

__all__ = ["Keeper", "Loaded", "Saving", "get", "get_all_variables", "load", "load_variables", "save"]


def save(
    path: str | os.PathLike[str],
    /,
    *,
    step: int | None = None,
    wait: bool = False,
    random: bool = True,
    **objects: Any,
) -> Saving:
    """Save objects and plain values, as the calls of jobs that were made so far leave them.

    Every rank writes the parts that it owns, and nothing is gathered; what several ranks hold is written once, a piece
    by each.  It happens in the background: later calls of jobs run meanwhile, and a part is copied before a call
    changes it.  The handle that is returned waits for the end, or raises; so do the next save and the script's end.

    ``objects`` are modules, optimizers, schedules, scalers, loaders, whatever else has ``state_dict()`` and
    ``load_state_dict()``, and ``torch.Generator``; and values, of which rank 0's are saved: tensors, arrays, numbers,
    texts, None, and lists, tuples, sets and dictionaries of them.  ``random``: the state of torch's, Python's and
    NumPy's random generators, and of jobs' random ops, is saved, too, so that a run goes on exactly.

    With ``step``, the checkpoint is the folder ``step-…`` in ``path``, else ``path`` itself.  One that is there is
    replaced, as a whole or not at all.  ``path`` may be a URL that fsspec knows.  All nodes must see the folder.

    Without objects, the variables and optimizers of first-generation jobs are saved, before it returns.

    Raises StateError, on every rank, before anything is written: for a value that has no form in JSON, a folder that
    cannot be written, or one that another run writes to.

    >>> flow.checkpoint.save("runs/a", model=model, optimizer=optimizer, step=step, epoch=3)
    """
    step = _checked(step, wait=wait, random=random)
    if not objects:
        if step is not None:
            raise StateError("flow.checkpoint.save was called without objects; model=model, for example, was expected")
        return classic.save(path)
    saving = begin_save(path, objects, step, random)
    if wait:
        saving.wait()
    return saving


def load(
    path: str | os.PathLike[str],
    /,
    *,
    step: int | None = None,
    random: bool = True,
    verify: bool = True,
    strict: bool = True,
    trusted: bool = False,
    **objects: Any,
) -> Loaded:
    """Load objects from a checkpoint, before or after the first call of a job, under any plan and number of devices.

    Every rank reads the parts that it needs: a module that was built in ``flow.deferred_init()``, what optimizers keep,
    and what jobs have taken over are never whole in its memory.  Returns the values that were saved beside the objects,
    as a mapping, with the ``step``.

    ``path`` is a checkpoint, or a folder of them: then that of ``step``, or the newest whole one.  It may also be a
    file of ``torch.save``, a safetensors file or a folder of them, as Hugging Face's, for one module; or, if
    ``trusted``, a folder that torch.distributed.checkpoint has written, whose metadata is a pickle.

    ``random``: the state of random generators is restored, too.  ``verify``: all files are read, each block by one
    rank, and compared with their checksums, before anything is changed; without it, blocks are checked as they are
    read.  ``strict``: a module's names must be those of the checkpoint.

    Without objects, the variables and optimizers of first-generation jobs are loaded.

    Raises StateError, on every rank and before anything is changed: for a checkpoint that is not there, not whole or
    damaged, or of another model.
    """
    step = _checked(step, random=random, verify=verify, strict=strict, trusted=trusted)
    if not objects:
        return classic.load(path)
    return load_checkpoint(path, objects, step, random, verify, strict, trusted)


def _checked(step: Any, **flags: Any) -> int | None:
    """The step as a number.  Raises StateError if it is none, or a flag is neither True nor False."""
    for name, flag in flags.items():
        if type(flag) is not bool:
            raise StateError(
                f"{name}={type(flag).__name__} was found; True or False was expected: a value needs another name"
            )
    if step is None:
        return None
    if isinstance(step, bool) or not isinstance(step, int | np.integer) or step < 0:
        raise StateError(f"step={step!r} was found; a number from 0 on, or None, was expected")
    return int(step)


def get(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The variables of a checkpoint of first-generation jobs, by name; they may be changed and given to load_variables.

    Raises StateError if the folder does not exist or holds no such checkpoint.
    """
    return classic.variables_in(path)


def load_variables(values: Mapping[str, Tensor | np.ndarray[Any, Any]], ignore_mismatch: bool = True) -> None:
    """Set values of variables, by name, on every rank; a variable that does not exist yet takes its value when made.

    With ``ignore_mismatch``, values of another shape than their variable's are left out; without it they raise
    StateError.
    """
    tensors = {name: torch.as_tensor(value).detach().clone() for name, value in values.items()}
    if ignore_mismatch:
        tensors = {n: t for n, t in tensors.items() if n not in REGISTRY or t.shape == REGISTRY[n].shape}
    REGISTRY.write(tensors)


def get_all_variables() -> dict[str, Tensor]:
    """Copies of the values of all variables of all jobs, by name, on this rank."""
    values = REGISTRY.values()
    return {name: values[name] for name in REGISTRY.names()}


answer_with_nearest(__name__, "docs/checkpoints.md")
