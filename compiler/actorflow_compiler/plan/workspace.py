"""Compute the workspace of an actor's body: the memory that one firing needs beside operands and target registers.

It consists of the values that live and die within the firing.  Temporary buffers inside of ops (of a convolution, say)
are not part of it, as their sizes are not known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from actorflow_compiler.core.views import is_view
from actorflow_compiler.plan.plan import Body

INTO = {"aten.mm.default": "aten.addmm_.default", "aten.bmm.default": "aten.baddbmm_.default"}
"""Matrix products → the op that adds the product to a sum in place."""


def products(body: Body, outputs: Collection[int]) -> tuple[int, ...]:
    """Which of ``outputs`` (positions) are products that nothing else uses, so that they can go into sums in place."""
    read = {value for step in body.steps for value in step.reads()}
    made = {step.outs[0] for step in body.steps if step.op in INTO}
    times = Counter(body.outputs)
    once = {value for value in made - read if times[value] == 1}
    return tuple(at for at in sorted(outputs) if body.outputs[at] in once)


def workspace_bytes(body: Body, nbytes: Sequence[int], room: Sequence[int], joined: int = 0) -> int:
    """The most bytes that values of a body occupy at a time, without its operands and without room in registers.

    ``nbytes[v]`` is the size of value v.  ``room[i]`` is the room for output i in the register that it goes to: its
    size, or 0 for what is added to a sum or copied into a variable.  ``joined`` is how many bytes are concatenated by
    a copy when the body has run.  A value lives from the step that makes it to the last one that reads it or a view of
    it; outputs live to the end.

    >>> workspace_bytes(Body(1, (Step("aten.relu.default", (Ref(0),), (), (1,)), …), (2,)), (8, 8, 8), (8,))
    8
    """
    owner = list(range(len(nbytes)))  # value → the value in whose memory it lies
    last: dict[int, int] = {}  # value with memory of its own → the last step that needs it
    end = len(body.steps)
    for number, step in enumerate(body.steps):
        reads = [*step.reads()]
        for out in step.outs:
            if out >= 0 and reads and is_view(step.op):
                owner[out] = owner[reads[0]]
        for value in (*reads, *step.outs):
            if value >= 0:
                last[owner[value]] = number
    size = list(nbytes)
    for at, value in enumerate(body.outputs):
        last[owner[value]] = end
        size[owner[value]] -= room[at]
    dying: dict[int, list[int]] = {}
    for value, number in last.items():
        if value >= body.inputs:
            dying.setdefault(number, []).append(value)
    live = most = 0
    for number, step in enumerate(body.steps):
        live += sum(max(0, size[out]) for out in step.outs if out >= 0 and owner[out] == out)
        most = max(most, live)
        live -= sum(max(0, size[value]) for value in dying.get(number, ()))
    return max(most, live + joined)
