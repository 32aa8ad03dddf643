"""A call in a script that is run for the plan of another job, and what stands for its results where it cannot run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from actorflow.deferred import DeferredTensor
from actorflow.script_state import tree
from actorflow.script_state.arguments import CallArguments
from actorflow.script_state.search_result import SearchResult
from actorflow.script_state.side_effects import apply_side_effects
from actorflow.session.number_reads import numbers_now
from actorflow.session.step_effects import StepEffects
from actorflow.transport.redistribution import dtype_of
from actorflow_compiler.plan.plan import Plan, Result

__all__ = ["PretendedPlan"]


@dataclass(frozen=True, slots=True)
class PretendedPlan:
    """What of the plan of a job that nobody asked for its calls need."""

    variables: frozenset[str]
    results: tuple[Result, ...]
    effects: StepEffects

    @staticmethod
    def of(plan: Plan, effects: StepEffects) -> PretendedPlan:
        """That of a plan and the effects of its step."""
        return PretendedPlan(frozenset(v.name for v in plan.variables), plan.results, effects)

    def can_run(self, found: SearchResult, arguments: CallArguments) -> bool:
        """Whether a call has values to compute with: none of its tensors is deferred."""
        held = [h.tensor for h in found.state.held.values() if h.name in self.variables]
        return not any(isinstance(tensor, DeferredTensor) for tensor in (*held, *arguments.tensors))

    def zeros(self, found: SearchResult, arguments: CallArguments, scope: Mapping[str, Any]) -> Any:
        """What a call returns, with zeros for all its values; what it changes in Python is changed.

        ``scope`` are the globals of the job's own file.
        """
        known = numbers_now(arguments, found.state, found.sources)
        tensors = [torch.zeros(one.shape, dtype=dtype_of(one.dtype)) for one in self.results]
        apply_side_effects(self.effects.changes, found.sources, tensors, known)
        return tree.rebuild(self.effects.shape, tensors, scope, known)
