"""Find in a captured step what makes special mesh axes worth trying: experts, and attention over long sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from actorflow_compiler.core.op_call import argument
from actorflow_compiler.core.ops import Phase
from actorflow_compiler.custom_ops.grouped_mm import GROUPED
from actorflow_compiler.graph.graph import Graph, InputKind, call_of
from actorflow_compiler.infer.expert_axis import BATCHED, MATRICES, expert_dims
from actorflow_compiler.infer.sequence_axis import POSITIONS, SOFTMAXES

LEAST_POSITIONS = 16  # of each device


@dataclass(frozen=True, slots=True)
class ExpertFacts:
    """The parameters with experts of a step; without any, ``count`` is 0."""

    count: int = 0  # of experts, in the parameter that has the fewest
    parameters: float = 0.0  # bytes of these parameters
    state: float = 0.0  # bytes of what the optimizer keeps of them
    rows: float = 0.0  # bytes of the rows that experts take and give, in the forward pass


NO_EXPERTS = ExpertFacts()


@dataclass(frozen=True, slots=True)
class SequenceFacts:
    """The attention of a step; without any, ``positions`` is 0."""

    positions: int = 0  # of the longest sequence that attention looks along
    keys: float = 0.0  # bytes of keys and values, in the forward pass


NO_SEQUENCE = SequenceFacts()


def find_experts(graph: Graph, parameter_of: Mapping[str, str]) -> ExpertFacts:
    """What there is of experts; ``parameter_of`` maps the names of optimizers' state to parameters."""
    variables = {i.name: graph.metas[i.value] for i in graph.inputs if i.kind == InputKind.VARIABLE}
    if not any(len(meta.shape) >= MATRICES for meta in variables.values()):
        return NO_EXPERTS
    dims, held = expert_dims(graph)
    if not dims:
        return NO_EXPERTS
    rows = 0.0
    for n in graph.nodes:
        if n.phase == Phase.FORWARD and n.op in (GROUPED, *BATCHED) and not held.isdisjoint(n.reads()):
            call, reads = call_of(n, graph.metas)
            rows += sum(m.nbytes for v, m in zip(reads, call.ins, strict=True) if v not in held)
            rows += graph.metas[n.outs[0]].nbytes
    return ExpertFacts(
        min(variables[name].shape[dim] for name, dim in dims.items()),
        sum(variables[name].nbytes for name in dims),
        sum(variables[name].nbytes for name, of in parameter_of.items() if of in dims and name in variables),
        rows,
    )


def find_sequence(graph: Graph) -> SequenceFacts:
    """What there is of attention: kernels of it, or a softmax between batches of products."""
    positions, keys = 0, 0.0
    written_out = any(n.op in BATCHED for n in graph.nodes)
    for n in graph.nodes:
        if n.phase != Phase.FORWARD:
            continue
        kernel = "_scaled_dot_product" in n.op
        if not kernel and not (written_out and n.op in SOFTMAXES):
            continue
        call, _ = call_of(n, graph.metas)
        shape = call.ins[0].shape
        if kernel:
            positions = max(positions, shape[POSITIONS], call.ins[1].shape[POSITIONS])
            keys += call.ins[1].nbytes + call.ins[2].nbytes
        elif len(shape) >= MATRICES:
            positions = max(positions, shape[argument(call, "dim")[1] % len(shape)])
            keys += call.ins[0].nbytes
    return SequenceFacts(positions, keys)
