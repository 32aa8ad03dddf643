"""Refuse steps that can reach a sparse tensor, or two tensors that share memory if the step changes one of them.

Each variable of a plan has memory of its own, so a change of one would not be visible in the other.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from actorflow.script_state.key_encoding import decode_key
from actorflow.script_state.search_result import SearchResult
from actorflow.script_state.sources import ScriptSource
from actorflow.session.compile_request import located
from actorflow.session.compiling import RankPlan, written_by
from actorflow.session.jobs import JobType
from actorflow.standins.memory_spans import MemorySpan, memory_span, overlap
from actorflow.standins.owned_tensor import DetachedTensor, OwnedTensor
from actorflow_compiler.core.errors import CaptureError

__all__ = ["refuse_shared", "refuse_sparse"]


class MemoryOwners(Protocol):
    """The owner of the memory that plans have taken from the script."""

    def taken_from(self, span: MemorySpan) -> str:
        """The name of a variable whose tensor was in this memory, if the script still has a view of it; else empty."""


def refuse_sparse(job: Any, found: SearchResult) -> None:
    """Raise CaptureError if the step can reach a tensor that is not dense."""
    for name, held in found.state.held.items():
        if held.tensor.layout is not torch.strided and not isinstance(held.tensor, OwnedTensor):
            layout = str(held.tensor.layout).removeprefix("torch.")
            raise located(
                CaptureError(
                    f"{name} is a sparse tensor ({layout}, {list(held.tensor.shape)}), and a plan holds dense ones; "
                    f"expected: {name.rpartition('.')[2]}.to_dense() outside of the job, and @ in it; or its indices "
                    f"and values, and index_add: torch.zeros_like(x).index_add(0, rows, values[:, None] * x[columns])"
                ),
                job.function,
            )


def refuse_shared(
    job: Any,
    made: RankPlan,
    found: SearchResult,
    owns: MemoryOwners | None,
    made_of: Mapping[str, weakref.ref[OwnedTensor]],
) -> None:
    """Raise CaptureError if the step changes a tensor that shares memory with another one that it can reach.

    ``made_of`` has the owned tensors from which ``nn.Parameter`` made parameters, by name of the parameter.
    """
    tensors = _reachable(made, found)
    _refuse_overlap(job, made, tensors, owns)
    _refuse_made_of(job, made, tensors, made_of)


def _reachable(made: RankPlan, found: SearchResult) -> dict[str, Tensor]:
    """The tensors that a step can read or change, by name, with the constants of scripted code."""
    sources = found.sources
    replaced = Counter(id(sources[one.at].values().get(decode_key(one.key, sources))) for one in made.effects.changes)
    plans = {v.name for v in made.plan.variables}
    tensors = {
        name: h.tensor
        for name, h in found.state.held.items()
        if name in plans  # else it shows the plan's values, or is not used after the call
        or not (isinstance(h.tensor, DetachedTensor) or replaced[id(h.tensor)] >= len(h.places))
    }
    for script in (one for one in found.sources if isinstance(one, ScriptSource)):
        tensors |= {f"constant {i} of {script.path}": constant for i, constant in enumerate(script.constants)}
    return tensors


def _refuse_overlap(job: Any, made: RankPlan, tensors: Mapping[str, Tensor], owns: MemoryOwners | None) -> None:
    """Raise CaptureError if one tensor is a view of another that the step changes."""
    spans = {name: lies for name, tensor in tensors.items() if (lies := memory_span(tensor)) is not None}
    by_memory: dict[int, list[str]] = {}
    for name, (memory, _, _) in spans.items():
        by_memory.setdefault(memory, []).append(name)
    changed, written = {v.name for v in made.plan.variables} - made.lent, written_by(made.plan)
    for name, where in spans.items():
        other = "" if owns is None else owns.taken_from(where)
        if isinstance(tensors[name], DetachedTensor) and job.type != JobType.TRAIN and other not in written:
            continue  # each call reads it anew
        for beside in by_memory[where[0]]:
            if beside != name and beside in changed and overlap(where, spans[beside]):
                other = beside
        if other:
            raise located(
                CaptureError(
                    f"{name} and {other} share memory, as one is a view of the other, and a step changes {other}: a "
                    f"plan would change only one of them; expected: take the view in the step, or keep a .clone() of it"
                ),
                job.function,
            )


def _refuse_made_of(
    job: Any, made: RankPlan, tensors: Mapping[str, Tensor], made_of: Mapping[str, weakref.ref[OwnedTensor]]
) -> None:
    """Raise CaptureError if a parameter was made from another one, and the step changes one of them."""
    names, written = {id(tensor): name for name, tensor in tensors.items()}, written_by(made.plan)
    for name in tensors.keys() & made_of.keys():
        other = names.get(id(made_of[name]()), "")
        if other and not written.isdisjoint((name, other)):
            raise located(
                CaptureError(
                    f"{name} was made of {other}, with which it would share memory, and a step changes one of them: a "
                    f"plan would change only that one; expected: a new optimizer where the parameters of the model are "
                    f"others, or nn.Parameter({other}.detach().clone())"
                ),
                job.function,
            )
