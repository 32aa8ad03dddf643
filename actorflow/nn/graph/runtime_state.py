"""The runtime state of a graph: the plans of its calls, all values, and where the run is, as plain data for a file."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from actorflow.eager.global_tensor import GlobalTensor
from actorflow.jobs.job import Job
from actorflow.persistence.random_states import random_states, set_random_states
from actorflow.session.plan_store import KEPT, file_of
from actorflow.session.process import current
from actorflow.support.version import __version__
from actorflow_compiler.core.errors import CallError, PlanError
from actorflow_compiler.plan.plan import VariableKind

__all__ = ["offer_plans", "refuse_loose_state", "restore_random_states", "runtime_state", "said_by", "whole_tree"]

FORMAT = 1  # increase it when the form changes
KEY = "actorflow_runtime_state"


def runtime_state(job: Job, values: Mapping[str, Any], with_modules: bool) -> OrderedDict[str, Any]:
    """The runtime state of the graph of this job, whose values these are; tensors are copied.

    Plans are there on rank 0, which alone has them.
    """
    runtime = current().runtime
    return OrderedDict(
        [
            (KEY, FORMAT),
            ("actorflow_version", __version__),
            ("graph_name", job.name),
            ("with_eager", with_modules),
            ("values", pytree.tree_map_only(Tensor, _copy, dict(values))),
            ("random", json.dumps(random_states(None if runtime is None else runtime.seed))),
            ("plans", _plans(job)),
        ]
    )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _plans(job: Job) -> list[Tensor]:
    """The job's plans as the bytes of their files, that of the last call first, but for those that cannot be kept."""
    found = []
    for plan in sorted(job.plans, key=lambda one: (one is job.last, one.number), reverse=True):
        if plan.made is None or plan.made.key is None:
            continue
        try:
            data = file_of(plan.made.key, plan.made.plan)
        except PlanError:  # too large for protobuf
            continue
        found.append(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return found


def refuse_loose_state(job: Job) -> None:
    """Raise CallError if a call changes a tensor that is in no module, whose value would not be in the state."""
    for compiled in job.plans:
        if compiled.parked is not None:
            continue
        state = compiled.bound.found.state
        of_scalers = {id(value) for scaler in state.scalers.values() for value in vars(scaler).values()}
        for name in sorted(compiled.written & state.held.keys()):
            held = state.held[name]
            if held.kind is VariableKind.TENSOR and id(held.tensor) not in of_scalers:
                raise CallError(
                    f"the runtime state of {job.name} was asked for, and its calls change {name}, a tensor that is in "
                    f"no module and would be left out; a buffer was expected: module.register_buffer(name, tensor)"
                )


def said_by(state: Any) -> str:
    """The name of the graph whose runtime state this is.  Raises CallError for anything else."""
    if not isinstance(state, Mapping) or KEY not in state:
        raise CallError(
            f"load_runtime_state_dict was given a {type(state).__name__} that is no runtime state; what "
            f"graph.runtime_state_dict() returns was expected; graph.load_state_dict takes a state_dict()"
        )
    if state[KEY] != FORMAT or not {"graph_name", "with_eager", "values", "random", "plans"} <= state.keys():
        raise CallError(
            f"a runtime state of actorflow {state.get('actorflow_version', 'unknown')} was found, whose form this "
            f"version ({__version__}) does not know; graph.load_state_dict(state['values']) takes its values"
        )
    return str(state["graph_name"])


def restore_random_states(state: Mapping[str, Any]) -> None:
    """Put the random generators where they were.  Raises StateError for a state that is none of them."""
    set_random_states(json.loads(state["random"]))


def whole_tree(state: Any) -> Any:
    """The state with plain whole tensors in place of global ones, such as ``flow.load(…, global_src_rank=0)`` makes."""
    return pytree.tree_map_only(GlobalTensor, lambda x: x.detach().whole().clone(), state)


def offer_plans(name: str, plans: Iterable[Tensor], rank: int) -> None:
    """Have the graph's first call use one of these plans, if one fits; rank 0 alone looks at them."""
    if rank == 0:
        KEPT.offer(name, [bytes(one.cpu().numpy()) for one in plans], f"the runtime state of {name}")
