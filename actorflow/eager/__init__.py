"""Plain PyTorch code goes in; it runs on tensors that lie over ranks, op by op, once this is imported."""

from __future__ import annotations

from actorflow.eager import calls as calls  # completes the class
from actorflow.eager import special as special  # fills the table of ops
from actorflow.eager import tensor as tensor  # completes the class
from actorflow.eager.held import GlobalTensor

__all__ = ["GlobalTensor"]
