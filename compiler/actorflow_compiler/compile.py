"""Compile a step: run the passes in order, from capture to lowering, each followed by its verifier."""

from __future__ import annotations

from collections.abc import Callable

from actorflow_compiler.capture.from_fx import Capture
from actorflow_compiler.capture.request import StepRequest, capture_request
from actorflow_compiler.core.garbage_collection import young_only
from actorflow_compiler.core.torch_internals import traced_on
from actorflow_compiler.cutting.cut import PlanHeader
from actorflow_compiler.cutting.lower import LoweredProgram, lower, lower_folded
from actorflow_compiler.cutting.lowered_step import FoldedStep, LoweredStep
from actorflow_compiler.cutting.redundant import redundancy_notes
from actorflow_compiler.cutting.verify import verify_program
from actorflow_compiler.infer.layout_assignment import StepLayouts, assign_layouts
from actorflow_compiler.infer.module_folding import fold_by_module
from actorflow_compiler.infer.notes import tell_traced
from actorflow_compiler.infer.verify import verify_layouts
from actorflow_compiler.placing.place import place
from actorflow_compiler.plan.origins import Origins
from actorflow_compiler.rewriting.rewrite import rewrite


@young_only()
def compile_step(request: StepRequest) -> LoweredStep:
    """Compile one step, up to where it is cut into actors (``LoweredStep.cut``).

    Each pass verifies the graph that it makes (``graph.verify``); layouts and program have verifiers of their own.
    Raises CaptureError, CallError, LayoutError, StateError or PlanError.
    """
    return lower_captured(capture_step(request), request)


@young_only()
def capture_step(request: StepRequest) -> Capture:
    """Capture a step, the first of the passes; it runs the step's own code.  Raises CaptureError, CallError."""
    request.listeners.doing("capture")
    return capture_request(request)


@young_only()
def lower_captured(captured: Capture, request: StepRequest) -> LoweredStep:
    """Run the passes after capture.  What they make is a function of ``reuse.step_digest``, and of this code.

    Raises CaptureError, CallError, LayoutError, StateError or PlanError.
    """
    return _lowered(captured, request, lower, shown=True)


@young_only()
def fold_captured(
    captured: Capture, request: StepRequest, alike: float = 0.0, shown: bool = False, runs: bool = False
) -> FoldedStep:
    """Run the passes after capture for one rank of each class of ranks that are alike on the request's hardware.

    What it takes does not grow with the number of ranks that are alike.  ``FoldedStep.cut`` cuts a variant;
    ``schedule_folded(step.cut, hardware)`` and ``forecast`` of the scheduler take it from there, and give what they
    give for the plan of all ranks.  Of a plan that ``runs``, ``schedule(step.cut, hardware)`` gives that of all ranks.

    Ranks whose bodies differ only in numbers (where in a vocabulary they begin, say) are alike, and have the measured
    time of the listed one.  So, with ``alike``, do those whose parts of values differ by no more than this share, as
    the parts of an uneven split do; the listed one has the largest; such a plan never runs.  Its plans have origins
    where they are to be ``shown``.  Raises as ``lower_captured``.
    """
    world = request.devices.world
    return FoldedStep(_lowered(captured, request, lambda step: lower_folded(step, world, alike, runs), shown))


def _lowered(
    captured: Capture, request: StepRequest, lower: Callable[[StepLayouts], LoweredProgram], shown: bool
) -> LoweredStep:
    """The step, lowered by ``lower``, with origins where its plans are to be ``shown``."""
    step, devices, doing = request.step, request.devices, request.listeners.doing
    doing("place")
    placed = place(captured, request)
    pieces = rewrite(placed, captured, request)
    doing("infer")
    laid_out = verify_layouts(assign_layouts(pieces, placed, captured, request), request.history.fixed)
    doing("box and lower")
    program = verify_program(lower(laid_out), laid_out)
    traced = tell_traced(traced_on(devices.type), devices.type)
    repeated = redundancy_notes(program.repeated, program.flops_done)
    modules = [module for root in step.state.modules.values() for module, _ in root.named_modules()]
    header = PlanHeader(
        step.name,
        devices.world,
        pieces.count,
        laid_out.variables,
        captured.constants,
        (*traced, *placed.notes, *pieces.notes, *laid_out.notes, *repeated),
        fold_by_module(laid_out, modules, captured.parameter) if shown else Origins(),
    )
    return LoweredStep(header, program, checkpoints=any(n.again for n in laid_out.graph.nodes))
