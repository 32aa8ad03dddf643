"""A request goes in; the step's logical graph, with what is known of its state, comes out."""

from __future__ import annotations

from dataclasses import replace

from actorflow_compiler.capture.capture import capture
from actorflow_compiler.capture.from_fx import Capture
from actorflow_compiler.capture.mirrored import on_each_device
from actorflow_compiler.capture.request import StepRequest
from actorflow_compiler.core.torch_internals import traced_on
from actorflow_compiler.graph.graph import verify
from actorflow_compiler.substitutes.decompositions import join_norms


def capture_request(request: StepRequest) -> Capture:
    """Trace the step as ``request`` says, and tell its listener what it does with gradients and values.

    Raises CaptureError and StateError, as ``capture`` does.
    """
    step, listeners, mirrored = request.step, request.listeners, request.mirrored
    function = step.function if step.own is None else on_each_device(step.function, step.own, request.devices.world)
    captured = capture(
        function,
        step.arguments,
        step.state,
        train=step.train,
        hints=request.preferences.hints,
        fresh=request.history.fresh,
        standing=request.history.standing,
        mirrored=mirrored,
        device=traced_on(request.devices.type),
        numbers=listeners.numbers,
        value=None if mirrored else listeners.value,
        checks=None if mirrored else listeners.checks,
    )
    listeners.learn(captured.gradients, captured.decisions, captured.checks)
    return replace(captured, graph=verify(join_norms(captured.graph)))
