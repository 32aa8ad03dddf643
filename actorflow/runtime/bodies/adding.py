"""Rewrite a body whose outputs are summed over firings, so that its matrix products are added to the sums directly.

A product that is added to the sum while it is computed (such as ``addmm_``) needs no memory of its own and no second
pass over the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from actorflow_compiler.core.ops import Ref
from actorflow_compiler.plan.plan import Body
from actorflow_compiler.plan.workspace import INTO, products


def adding(body: Body, outputs: Sequence[int]) -> Body:
    """The body with one more operand for each of ``outputs``, in order, to which it adds that output in place.

    >>> adding(Body(2, (Step("aten.mm.default", (Ref(0), Ref(1)), (), (2,)),), (2,)), [0])
    Body(inputs=3, steps=(Step(op='aten.addmm_.default', args=(Ref(index=2), Ref(index=0), Ref(index=1)), ...
    """
    sums = {body.outputs[at]: Ref(body.inputs + i) for i, at in enumerate(outputs)}

    def moved(value: int) -> int:
        return value if value < body.inputs else value + len(sums)

    steps = []
    for step in body.steps:
        into = sums.get(step.outs[0]) if step.op in INTO else None
        new = step.renamed({v: moved(v) for v in (*step.reads(), *step.outs)})
        steps.append(new if into is None else replace(new, op=INTO[step.op], args=(into, *new.args)))
    return Body(body.inputs + len(sums), tuple(steps), tuple(moved(v) for v in body.outputs))


__all__ = ["adding", "products"]
