"""The mirrored view: turn a step for one device into a program that every device runs on values of its own.

Values that differ between devices have no logical value.  So all ops of the step get broadcast signatures, and three
casts convert between such values and logical ones.  On n devices:

===========================  ==============  =========================================================
cast                         layouts         what it is
===========================  ==============  =========================================================
``actorflow.mine(x)``        S(0) → B        each device's own item of a logical list (n, …) → (…)
``actorflow.each(y)``        B → S(0)        each device's own result as its item of such a list
``actorflow.term(g, n)``     B → P           each device's own term, over n, of their mean
===========================  ==============  =========================================================

Gradients and the new values of buffers (batch norm's statistics) are averaged, so that the state stays equal on all
devices.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from actorflow_compiler.core.errors import CaptureError, LayoutError
from actorflow_compiler.core.ops import Phase, Ref
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, show
from actorflow_compiler.custom_ops.mirrored import MINE, TERM, TRACED
from actorflow_compiler.custom_ops.random import UNIFORM
from actorflow_compiler.graph.graph import Graph, InputKind, prune, verify
from actorflow_compiler.hints.constrain import CONSTRAIN, show_wish
from actorflow_compiler.hints.hints import ResolvedHints
from actorflow_compiler.hints.packing import MARKERS
from actorflow_compiler.plan.plan import Variable
from actorflow_compiler.substitutes.random_table import is_random

__all__ = ["average_gradients", "average_updates", "on_each_device", "refuse_parallel"]

Step = Callable[[list[Tensor]], list[Tensor]]


def on_each_device(step: Step, own: Sequence[bool], devices: int) -> Step:
    """The step over logical lists: arguments marked in ``own``, and all results, have one item per device along dim 0.

    Other arguments are equal on every device.
    """

    def run(tensors: list[Tensor]) -> list[Tensor]:
        given = [TRACED.mine(t) if o else t for t, o in zip(tensors, own, strict=True)]
        return [TRACED.each(result.detach(), devices) for result in step(given)]

    return run


@contextlib.contextmanager
def average_gradients(parameters: Mapping[str, Tensor], devices: int) -> Iterator[None]:
    """While a step is traced, replace each gradient of a parameter by its mean over all devices."""
    with contextlib.ExitStack() as hooks:
        for parameter in parameters.values():
            if parameter.requires_grad:
                tensor: Any = parameter  # its stub lacks the types of register_hook
                hooks.enter_context(tensor.register_hook(partial(_mean, devices=devices)))
        yield


def _mean(gradient: Tensor, devices: int) -> Tensor:
    found: Tensor = TRACED.term(gradient, devices)
    return found


def average_updates(graph: Graph, devices: int) -> Graph:
    """The captured graph, with new values of variables averaged over the devices where they would differ.

    Raises CaptureError for such a value that is not floating point.
    """
    names = {i.value: i.name for i in graph.inputs}
    differs: set[int] = set()
    for n in graph.nodes:
        if n.op != TERM and (n.op in (MINE, UNIFORM) or is_random(n) or any(v in differs for v in n.reads())):
            differs.update(o for o in n.outs if o >= 0)
    metas, nodes, updates = dict(graph.metas), list(graph.nodes), []
    maker = {o: n for n in graph.nodes for o in n.outs}
    for old, new in graph.updates:
        mean = new
        if new in differs:
            if not metas[new].is_float:
                raise CaptureError(
                    f"{names[old]} ({metas[new]}) would become different on each device: what the step makes of it "
                    f"depends on the device's own batch; in the mirrored view state is equal on all devices, for which "
                    f"floating numbers are averaged. Keep this state outside of the job, or use the consistent view"
                )
            mean = max(metas) + 1
            metas[mean] = metas[new]
            args = (Ref(new), devices)  # the optimizer's phase: nothing in the step waits for it
            nodes.append(replace(maker[new], op=TERM, args=args, kwargs=(), outs=(mean,), phase=Phase.OPTIMIZER))
        updates.append((old, mean))
    return verify(prune(replace(graph, nodes=tuple(nodes), metas=metas, updates=tuple(updates))))


def refuse_parallel(
    name: str, graph: Graph, hints: ResolvedHints, fixed: Mapping[str, Variable], everywhere: Placement
) -> None:
    """Raise LayoutError for anything but data parallelism over all devices."""
    read = {v for n in graph.nodes for v in n.reads()}
    used = {i.name for i in graph.inputs if i.kind == InputKind.VARIABLE and i.value in read}
    parallel = itertools.chain(
        _parallel_hints(hints, used), _parallel_ops(graph, everywhere), _laid_out(fixed, used, everywhere)
    )
    found = next(parallel, None)
    if found is not None:
        raise LayoutError(
            f"job {name!r} has the mirrored view, and {found} was found; the mirrored view is data parallelism only: "
            f"every device has the whole model. Leave it out, or use the consistent view (the default)"
        )


def _parallel_hints(hints: ResolvedHints, used: Set[str]) -> Iterator[str]:
    """Yield a description of each hint that asks for more than data parallelism, for the ``used`` variables."""
    of_variables = [(n, h) for of in (hints.layouts, hints.optimizer) for n, h in of.items() if n in used]
    for what, hint in (*of_variables, *(("an output", h) for h in hints.outputs.values())):
        if any(e is not None and e != B for e in hint.wish):
            yield f"{show_wish(hint.wish)} for {what} ({hint.origin})"
    yield from (hints.layouts[variable].origin for variable in hints.homes.keys() & used)
    yield from (zero.origin for variable, zero in hints.zero.items() if variable in used)
    yield from (pattern.origin for pattern in hints.patterns)
    if hints.stages is not None:
        yield hints.stages.origin


def _parallel_ops(graph: Graph, everywhere: Placement) -> Iterator[str]:
    """Yield a description of each op that splits a tensor or is not placed on all devices."""
    for n in graph.nodes:
        if n.op == CONSTRAIN:
            yield n.args[2]
        if n.op in MARKERS:
            yield "flow.unpack or flow.pack"
        if n.placement is not None and n.placement != everywhere:
            yield f"a placement of ops on {n.placement}"


def _laid_out(fixed: Mapping[str, Variable], used: Set[str], everywhere: Placement) -> Iterator[str]:
    """Yield a description of each of the ``used`` variables that an earlier job has split or placed elsewhere."""
    for laid in fixed.values():
        if laid.name in used and any(e != B for e in laid.sbp):
            yield f"{laid.name}, which an earlier job has laid out as {show(laid.sbp)}"
        if laid.name in used and laid.placement != everywhere:
            yield f"{laid.name}, which an earlier job has put on {laid.placement}"
