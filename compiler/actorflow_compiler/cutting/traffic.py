"""Compute how many bytes the ops of a body read and write beside its products, one by one or fused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from networkx.utils import UnionFind

from actorflow_compiler.core.views import is_view
from actorflow_compiler.graph.flops import is_product
from actorflow_compiler.plan.plan import Body, Step

LOOKUPS = frozenset({"embedding", "gather", "index", "index_select"})  # read no more of an operand than they give


@dataclass(frozen=True, slots=True)
class MemoryTraffic:
    """Bytes that the ops of a body without FLOPs read and write in one firing."""

    each: int  # if they run one by one
    fused: int  # if those that hand values to each other are one kernel, and nothing is fused with a product


def memory_traffic(body: Body, nbytes: Sequence[int]) -> MemoryTraffic:
    """The traffic of a body; ``nbytes[v]`` is the size of value v.

    An op reads each operand once and writes each result that is in use once; views touch nothing.
    """
    owner = list(range(len(nbytes)))  # value → the value in whose memory it lies
    made: dict[int, int] = {}  # value → the step that makes it, if it has no FLOPs
    kernels = UnionFind()  # of steps
    reads: dict[int, set[int]] = {}  # step without FLOPs → what it reads
    leaving: set[int] = set()  # values that products read
    each = 0
    for k, step in enumerate(body.steps):
        operands, outs = step.reads(), [out for out in step.outs if out >= 0]
        if operands and is_view(step.op):
            for out in outs:
                owner[out] = owner[operands[0]]
            continue
        taken_in = {owner[value] for value in operands}
        if is_product(step.op):
            leaving |= taken_in
            continue
        each += _touched(step, nbytes)
        reads[k] = taken_in
        made.update(dict.fromkeys(outs, k))
        for value in taken_in & made.keys():
            kernels.union(made[value], k)
    leaving.update(owner[value] for value in body.outputs)
    fused = sum(nbytes[value] for value in leaving & made.keys())
    taken = {(kernels[k], value) for k, values in reads.items() for value in values - made.keys()}
    fused += sum(nbytes[value] for _, value in taken)
    return MemoryTraffic(each, min(each, fused))


def _touched(step: Step, nbytes: Sequence[int]) -> int:
    read = [nbytes[value] for value in step.reads()]
    written = sum(nbytes[out] for out in step.outs if out >= 0)
    if read and step.op.split(".")[1] in LOOKUPS:
        read[0] = min(read[0], written)
    return written + sum(read)
