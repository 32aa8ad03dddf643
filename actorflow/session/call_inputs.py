"""The inputs of a call of a plan on this rank: whole tensors, and the rows of batches that its sources take."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from actorflow.script_state.arguments import CallArguments
from actorflow.standins.logical_batch import (
    ArrivingInput,
    BatchTensor,
    LogicalBatch,
    RowsRead,
)
from actorflow_compiler.core.runs import Runs, union

__all__ = ["inputs_of_call"]


def inputs_of_call(
    arguments: CallArguments, wanted: Mapping[str, Runs], device: torch.device | None
) -> dict[str, Tensor | ArrivingInput]:
    """The inputs by name; those of batches begin to be read here.

    ``wanted`` are the arguments that this rank takes, with the rows of each.  Whole tensors are moved to ``device``
    (None: the plan's sources move them).
    """
    given = [(s.name, t) for s, t in zip(arguments.specs, arguments.tensors, strict=True) if s.name in wanted]
    rows: dict[int, Runs] = {}  # by id of a batch, of which all tensors are read at once
    batches: dict[int, LogicalBatch] = {}
    for name, tensor in given:
        if isinstance(tensor, BatchTensor):
            key = id(tensor.batch)
            batches[key], rows[key] = tensor.batch, union((*rows.get(key, ()), *wanted[name]))
    reads: dict[int, RowsRead] = {key: batch.read(rows[key]) for key, batch in batches.items() if rows[key]}
    inputs: dict[str, Tensor | ArrivingInput] = {}
    for name, tensor in given:
        if not isinstance(tensor, BatchTensor):
            inputs[name] = tensor if device is None else tensor.to(device)
        elif wanted[name]:
            key = id(tensor.batch)
            inputs[name] = ArrivingInput(reads[key], tensor.leaf, tensor.casts, rows[key], wanted[name])
        else:  # a source that takes nothing of it
            inputs[name] = torch.empty((0, *tensor.shape[1:]), dtype=tensor.dtype)
    return inputs
