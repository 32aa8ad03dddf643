"""States as bytes that ranks tell each other: JSON and safetensors, never a pickle."""

from __future__ import annotations

import json
from typing import Any

import safetensors.torch
from torch import Tensor

from actorflow.persistence.state_tree import decode, encode

__all__ = ["from_bytes", "to_bytes"]

_LENGTH = 8  # bytes of the number in front


def to_bytes(state: Any, name: str) -> bytes:
    """A state of plain values and tensors.  Raises StateError, with its place below ``name``, for anything else."""
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(encode(state, name, tensors)).encode()
    values = safetensors.torch.save({at: tensor.detach().cpu().contiguous() for at, tensor in tensors.items()})
    return len(tree).to_bytes(_LENGTH, "big") + tree + values


def from_bytes(found: bytes) -> Any:
    """The inverse of ``to_bytes``."""
    end = _LENGTH + int.from_bytes(found[:_LENGTH], "big")
    tensors = safetensors.torch.load(found[end:])
    return decode(json.loads(found[_LENGTH:end]), tensors.__getitem__)
