"""Train a PyTorch script that was written for one device on many devices.

``import actorflow as flow``: ``@flow.global_function`` compiles a training step into a job.
``flow.placement``, ``flow.sbp``, ``flow.distribute``, ``flow.constrain``, ``flow.zero`` and ``flow.place`` control how
it is distributed over the devices.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from actorflow.attached import attach_with_torch
from actorflow.support.imports import without_collections
from actorflow.support.nearest_names import answer_with_nearest, unknown_name
from actorflow.support.script_error import print_uncaught_errors
from actorflow.support.version import __version__
from actorflow.torch_names import __all__ as TORCH_NAMES

if TYPE_CHECKING:
    from actorflow import amp as amp
    from actorflow import autograd as autograd
    from actorflow import checkpoint as checkpoint
    from actorflow import comm as comm
    from actorflow import config as config
    from actorflow import cuda as cuda
    from actorflow import data as data
    from actorflow import distributed as distributed
    from actorflow import env as env
    from actorflow import layers as layers
    from actorflow import linalg as linalg
    from actorflow import math as math
    from actorflow import nn as nn
    from actorflow import optim as optim
    from actorflow import optimizer as optimizer
    from actorflow import regularizers as regularizers
    from actorflow import sbp as sbp
    from actorflow import scope as scope
    from actorflow import train as train
    from actorflow import typing as typing
    from actorflow import utils as utils
    from actorflow.checkpoint import get_all_variables as get_all_variables
    from actorflow.checkpoint import load_variables as load_variables
    from actorflow.classic.config import function_config as function_config
    from actorflow.classic.distribute import distribute as distribute
    from actorflow.classic.initializers import constant_initializer as constant_initializer
    from actorflow.classic.initializers import glorot_normal_initializer as glorot_normal_initializer
    from actorflow.classic.initializers import glorot_uniform_initializer as glorot_uniform_initializer
    from actorflow.classic.initializers import kaiming_initializer as kaiming_initializer
    from actorflow.classic.initializers import ones_initializer as ones_initializer
    from actorflow.classic.initializers import random_normal_initializer as random_normal_initializer
    from actorflow.classic.initializers import random_uniform_initializer as random_uniform_initializer
    from actorflow.classic.initializers import truncated_normal as truncated_normal
    from actorflow.classic.initializers import truncated_normal_initializer as truncated_normal_initializer
    from actorflow.classic.initializers import variance_scaling_initializer as variance_scaling_initializer
    from actorflow.classic.initializers import xavier_normal_initializer as xavier_normal_initializer
    from actorflow.classic.initializers import xavier_uniform_initializer as xavier_uniform_initializer
    from actorflow.classic.initializers import zeros_initializer as zeros_initializer
    from actorflow.classic.ops import cast as cast
    from actorflow.classic.ops import concat as concat
    from actorflow.classic.ops import constant as constant
    from actorflow.classic.ops import expand_dims as expand_dims
    from actorflow.classic.ops import flatten as flatten
    from actorflow.classic.ops import identity as identity
    from actorflow.classic.ops import matmul as matmul
    from actorflow.classic.ops import reshape as reshape
    from actorflow.classic.ops import transpose as transpose
    from actorflow.classic.variables import get_variable as get_variable
    from actorflow.deferred import deferred_init as deferred_init
    from actorflow.deferred import materialize as materialize
    from actorflow.eager.constructors import arange as arange
    from actorflow.eager.constructors import empty as empty
    from actorflow.eager.constructors import empty_like as empty_like
    from actorflow.eager.constructors import eye as eye
    from actorflow.eager.constructors import full as full
    from actorflow.eager.constructors import full_like as full_like
    from actorflow.eager.constructors import normal as normal
    from actorflow.eager.constructors import ones as ones
    from actorflow.eager.constructors import ones_like as ones_like
    from actorflow.eager.constructors import rand as rand
    from actorflow.eager.constructors import rand_like as rand_like
    from actorflow.eager.constructors import randint as randint
    from actorflow.eager.constructors import randint_like as randint_like
    from actorflow.eager.constructors import randn as randn
    from actorflow.eager.constructors import randn_like as randn_like
    from actorflow.eager.constructors import tensor as tensor
    from actorflow.eager.constructors import zeros as zeros
    from actorflow.eager.constructors import zeros_like as zeros_like
    from actorflow.eager.dtensors import from_dtensor as from_dtensor
    from actorflow.eager.dtensors import to_dtensor as to_dtensor
    from actorflow.eager.modules import to_global as to_global
    from actorflow.eager.modules import to_local as to_local
    from actorflow.eager.whole_constructors import as_tensor as as_tensor
    from actorflow.eager.whole_constructors import bartlett_window as bartlett_window
    from actorflow.eager.whole_constructors import blackman_window as blackman_window
    from actorflow.eager.whole_constructors import hamming_window as hamming_window
    from actorflow.eager.whole_constructors import hann_window as hann_window
    from actorflow.eager.whole_constructors import kaiser_window as kaiser_window
    from actorflow.eager.whole_constructors import linspace as linspace
    from actorflow.eager.whole_constructors import logspace as logspace
    from actorflow.eager.whole_constructors import randperm as randperm
    from actorflow.eager.whole_constructors import tril_indices as tril_indices
    from actorflow.eager.whole_constructors import triu_indices as triu_indices
    from actorflow.jobs.job import Job as Job
    from actorflow.jobs.job import global_function as global_function
    from actorflow.live.observer import progress as progress
    from actorflow.placements import placement as placement
    from actorflow.plan_files import load_plan as load_plan
    from actorflow.plan_files import save_plan as save_plan
    from actorflow.plan_view import plan as plan
    from actorflow.saved_files import load as load
    from actorflow.saved_files import save as save
    from actorflow.script_state.seeds import manual_seed as manual_seed
    from actorflow.session.process import explain as explain
    from actorflow.session.process import explain_recompiles as explain_recompiles
    from actorflow.torch_names import *  # noqa: F403 -- it states its names
    from actorflow_compiler.core.errors import ActorError as ActorError
    from actorflow_compiler.core.errors import ActorflowError as ActorflowError
    from actorflow_compiler.core.errors import CallError as CallError
    from actorflow_compiler.core.errors import CaptureError as CaptureError
    from actorflow_compiler.core.errors import ClusterError as ClusterError
    from actorflow_compiler.core.errors import DataError as DataError
    from actorflow_compiler.core.errors import DeadlockError as DeadlockError
    from actorflow_compiler.core.errors import LayoutError as LayoutError
    from actorflow_compiler.core.errors import PlanError as PlanError
    from actorflow_compiler.core.errors import SignatureError as SignatureError
    from actorflow_compiler.core.errors import StateError as StateError
    from actorflow_compiler.core.errors import TraceError as TraceError
    from actorflow_compiler.hints.constrain import constrain as constrain
    from actorflow_compiler.hints.hints import place as place
    from actorflow_compiler.hints.hints import zero as zero
    from actorflow_compiler.hints.packing import pack as pack
    from actorflow_compiler.hints.packing import unpack as unpack
    from actorflow_compiler.signatures.registration import register_signature as register_signature

_ERRORS = (
    "ActorError", "ActorflowError", "CallError", "CaptureError", "ClusterError", "DataError", "DeadlockError",
    "LayoutError", "PlanError", "SignatureError", "StateError", "TraceError",
)  # fmt: skip
_INITIALIZERS = (
    "constant_initializer", "glorot_normal_initializer", "glorot_uniform_initializer", "kaiming_initializer",
    "ones_initializer", "random_normal_initializer", "random_uniform_initializer", "truncated_normal",
    "truncated_normal_initializer", "variance_scaling_initializer", "xavier_normal_initializer",
    "xavier_uniform_initializer", "zeros_initializer",
)  # fmt: skip
_OPS = ("cast", "concat", "constant", "expand_dims", "flatten", "identity", "matmul", "reshape", "transpose")
_CONSTRUCTORS = (
    "arange", "empty", "empty_like", "eye", "full", "full_like", "normal", "ones", "ones_like", "rand", "rand_like",
    "randint", "randint_like", "randn", "randn_like", "tensor", "zeros", "zeros_like",
)  # fmt: skip
_WHOLE_CONSTRUCTORS = (
    "as_tensor", "bartlett_window", "blackman_window", "hamming_window", "hann_window", "kaiser_window", "linspace",
    "logspace", "randperm", "tril_indices", "triu_indices",
)  # fmt: skip
_HOMES = {
    "Job": "actorflow.jobs.job",
    **dict.fromkeys(("deferred_init", "materialize"), "actorflow.deferred"),
    "global_function": "actorflow.jobs.job",
    **dict.fromkeys(("explain", "explain_recompiles"), "actorflow.session.process"),
    "progress": "actorflow.live.observer",
    "manual_seed": "actorflow.script_state.seeds",
    "plan": "actorflow.plan_view",
    **dict.fromkeys(("load_plan", "save_plan"), "actorflow.plan_files"),
    **dict.fromkeys(("load", "save"), "actorflow.saved_files"),
    "constrain": "actorflow_compiler.hints.constrain",
    "distribute": "actorflow.classic.distribute",
    "place": "actorflow_compiler.hints.hints",
    "zero": "actorflow_compiler.hints.hints",
    **dict.fromkeys(("pack", "unpack"), "actorflow_compiler.hints.packing"),
    "placement": "actorflow.placements",
    **dict.fromkeys(_CONSTRUCTORS, "actorflow.eager.constructors"),
    **dict.fromkeys(_WHOLE_CONSTRUCTORS, "actorflow.eager.whole_constructors"),
    **dict.fromkeys(("from_dtensor", "to_dtensor"), "actorflow.eager.dtensors"),
    **dict.fromkeys(("to_global", "to_local"), "actorflow.eager.modules"),
    "register_signature": "actorflow_compiler.signatures.registration",
    **dict.fromkeys(_ERRORS, "actorflow_compiler.core.errors"),
    **dict.fromkeys(TORCH_NAMES, "torch"),
    "get_variable": "actorflow.classic.variables",
    "function_config": "actorflow.classic.config",
    **dict.fromkeys(_INITIALIZERS, "actorflow.classic.initializers"),
    **dict.fromkeys(_OPS, "actorflow.classic.ops"),
    **dict.fromkeys(("get_all_variables", "load_variables"), "actorflow.checkpoint"),
}
_MODULES = (
    "amp", "autograd", "checkpoint", "comm", "config", "cuda", "data", "distributed", "env", "layers", "linalg", "math",
    "nn", "optim", "optimizer", "regularizers", "sbp", "scope", "train", "typing", "utils",
)  # fmt: skip

__all__ = [*_HOMES, *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that a rank can join its run while torch is still being imported."""
    if name not in _HOMES and name not in _MODULES:
        raise unknown_name(__name__, name)
    with without_collections():
        if name in _MODULES:
            return import_module(f"actorflow.{name}")
        found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


answer_with_nearest(__name__)
attach_with_torch()
print_uncaught_errors()
