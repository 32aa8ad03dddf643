"""Global tensors, op by op: importing this package lets plain PyTorch code run on tensors spread over ranks."""

from __future__ import annotations

from actorflow.eager import optimizer_lineage as optimizer_lineage  # watches steps
from actorflow.eager import optimizer_states as optimizer_states  # watches steps
from actorflow.eager import special_ops as special_ops  # fills the table of ops
from actorflow.eager import tensor_methods as tensor_methods  # completes the class
from actorflow.eager import torch_function as torch_function  # completes the class
from actorflow.eager.global_tensor import GlobalTensor
from actorflow.support.after_import import after_import
from actorflow_compiler.core.torch_internals import leave_to_python

__all__ = ["GlobalTensor"]


def _not_compiled() -> None:
    leave_to_python(__name__)


after_import("torch._dynamo.trace_rules", _not_compiled)  # an op that meets other ranks is no part of a compiled graph
