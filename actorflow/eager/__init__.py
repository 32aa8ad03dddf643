"""Global tensors, op by op: importing this package lets plain PyTorch code run on tensors spread over ranks."""

from __future__ import annotations

from actorflow.eager import optimizer_states as optimizer_states  # watches steps
from actorflow.eager import special_ops as special_ops  # fills the table of ops
from actorflow.eager import tensor_methods as tensor_methods  # completes the class
from actorflow.eager import torch_function as torch_function  # completes the class
from actorflow.eager.global_tensor import GlobalTensor

__all__ = ["GlobalTensor"]
