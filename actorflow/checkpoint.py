"""Save and load the variables and optimizers of first-generation jobs (``flow.checkpoint``).

Every rank must call ``flow.checkpoint.save`` and ``load``.  The master writes the file and every rank reads it, so all
nodes must see the folder.  The format is torch's own (``torch.save``, read with ``weights_only``).
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actorflow.classic.registry import REGISTRY
from actorflow.control import cluster as clusters
from actorflow_compiler.core.errors import StateError

__all__ = ["FILE", "get", "get_all_variables", "load", "load_variables", "save"]

FILE = "variables.pt"  # name of the file in a checkpoint's folder
_saved = count()


def save(path: str | os.PathLike[str]) -> None:
    """Write all variables, and the state of all optimizers and learning-rate schedules, to the folder ``path``.

    Returns, on every rank, when the file has been written.  An existing file is replaced as a whole or not at all.
    Raises StateError, on every rank, if the master cannot write it.
    """
    cluster = clusters.current()
    tag = f"checkpoint {next(_saved)}"
    if cluster.rank:
        answer = cluster.scatter(tag, None).decode()
        if answer:
            raise StateError(answer)
        return
    answer, folder = "", Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as file:
            try:
                torch.save({"variables": REGISTRY.values(), "optimizers": REGISTRY.saved()}, file)
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).replace(folder / FILE)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        answer = f"the checkpoint {str(folder)!r} could not be written on the master: {error}; choose another folder"
        raise StateError(answer) from error
    except BaseException as error:
        answer = f"the checkpoint {str(folder)!r} could not be written on the master: {type(error).__name__}: {error}"
        raise
    finally:
        cluster.scatter(tag, [answer.encode()] * cluster.world)


def load(path: str | os.PathLike[str]) -> None:
    """Load variables, optimizers and schedules from the folder ``path``; every rank must call it.

    Existing variables take their values at once, others when the first call of their job makes them.  Variables that
    the checkpoint does not contain keep their values, and the master prints their names.  Raises StateError if the
    folder does not exist or holds no checkpoint and, before anything is changed, if a variable has another shape.
    """
    found = _read(path)
    REGISTRY.write(found["variables"])
    REGISTRY.restore(found["optimizers"])
    missing = [name for name in REGISTRY.names() if name not in found["variables"]]
    if missing and clusters.current().rank == 0:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        print(
            f"actorflow: the checkpoint {os.fspath(path)!r} has no {', '.join(missing[:5])}{more}, which keep their "
            f"values",
            file=sys.stderr,
            flush=True,
        )


def get(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The variables of a checkpoint, by name, on this rank; they may be changed and passed to ``load_variables``.

    Raises StateError if the folder does not exist or holds no checkpoint.
    """
    variables: dict[str, Tensor] = _read(path)["variables"]
    return variables


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


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    folder = Path(path)
    if not (folder / FILE).is_file():
        what = f"no file {FILE!r} in it" if folder.is_dir() else "no such folder"
        raise StateError(
            f"the checkpoint {str(folder)!r} ({folder.absolute()}): {what} was found on rank "
            f"{clusters.current().rank}; a folder that flow.checkpoint.save has written, and that all nodes see, was "
            f"expected"
        )
    try:
        found = torch.load(folder / FILE, map_location="cpu", mmap=True, weights_only=True)
        values = {name: value.clone() for name, value in found["variables"].items()}  # copied: the file may be replaced
        return {"variables": values, "optimizers": found["optimizers"]}
    except Exception as error:
        raise StateError(
            f"the checkpoint {str(folder / FILE)!r} cannot be read: {type(error).__name__}: {error}; a file that "
            f"flow.checkpoint.save has written was expected"
        ) from error
