"""The rewriting pass: cut a placed step into micro-batches, decompose batch norms, and merge equal ops."""

from __future__ import annotations

from dataclasses import replace

from actorflow_compiler.capture.from_fx import Capture
from actorflow_compiler.capture.request import StepRequest
from actorflow_compiler.core.errors import CaptureError
from actorflow_compiler.graph.graph import Graph, merge_equal, verify
from actorflow_compiler.hints.constrain import check_constraints
from actorflow_compiler.placing.place import PlacedStep
from actorflow_compiler.rewriting.expand import expand
from actorflow_compiler.rewriting.micro_batches import MicroBatchedStep, cut_in_time
from actorflow_compiler.substitutes.decompositions import BATCH_NORM
from actorflow_compiler.substitutes.random_table import is_random


def rewrite(placed: PlacedStep, captured: Capture, request: StepRequest) -> MicroBatchedStep:
    """Cut the step in time, decompose batch norms that several devices share, and merge equal ops.

    Raises CallError for a batch that does not divide, CaptureError for random ops that would depend on the plan, and
    LayoutError for constraints that contradict each other.
    """
    step, micro_batches = request.step, request.preferences.micro_batches
    asked = f"micro_batches={micro_batches} of job {step.name!r}" + (f" ({step.defined})" if step.defined else "")
    pieces = cut_in_time(placed.graph, micro_batches, asked, request.history.later)
    if request.devices.world > 1 or pieces.count > 1:
        refuse_random(captured.graph)
    graph = expand(pieces.graph, BATCH_NORM, lambda p: p.size > 1 and not request.mirrored)
    graph = verify(merge_equal(graph, is_random))
    check_constraints(graph)
    return replace(pieces, graph=graph)


def refuse_random(graph: Graph) -> None:
    """Raise CaptureError for an op that draws random numbers, which would differ when cut over devices or time."""
    for n in graph.nodes:
        if is_random(n):
            where = f" in {n.where}" if n.where else ""
            raise CaptureError(
                f"the step draws random numbers with {n.op}{where}, which would be others on several devices or in "
                f"micro-batches than on one; expected: random ops of PyTorch itself, which are drawn alike under every "
                f"plan. Write it with those (torch.rand, torch.randn, …), or draw outside the job and pass the tensor"
            )
