"""Make plans that box values from layout to layout, for tests of boxing on workers."""

from __future__ import annotations

from collections.abc import Sequence

from actorflow_compiler import infer
from actorflow_compiler.core.hardware import CPU_CORE, Hardware
from actorflow_compiler.core.ops import Meta, Ref
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, NdSbp
from actorflow_compiler.cutting.cut import PlanHeader, cut
from actorflow_compiler.cutting.lower import lower
from actorflow_compiler.cutting.segment import segment
from actorflow_compiler.cutting.verify import verify_program, verify_segments
from actorflow_compiler.graph.graph import Graph, Input, Node, verify
from actorflow_compiler.infer.layout_assignment import StepLayouts
from actorflow_compiler.plan.plan import Plan, Variable
from actorflow_compiler.signatures import Signature
from actorflow_scheduler.schedule import schedule

PHASES = ("forward", "backward", "optimizer")
Layouts = list[tuple[Placement, NdSbp]]


def boxed_plan(
    world: int,
    chains: Sequence[tuple[tuple[int, ...], Layouts]],
    dtype: str = "float64",
    hardware: Hardware = CPU_CORE,
) -> Plan:
    """Result i is variable ``vi``, which has the shape of chain i and was negated in each of its layouts.

    The variable lies as the first layout says; the result is whole on all ranks.  The first layouts may
    not be partial sums.
    """
    everywhere = Placement("cpu", tuple(range(world)), (world,))
    inputs, nodes, results, variables = [], [], [], []
    metas: dict[int, Meta] = {}
    value: dict[int, NdSbp] = {}
    placement: dict[int, Placement] = {}
    operands, chosen = [], []
    for i, (shape, layouts) in enumerate(chains):
        name = f"v{i}"
        number = len(metas) + 1
        metas[number], (placement[number], value[number]) = Meta(shape, dtype), layouts[0]
        inputs.append(Input(number, name, "variable"))
        variables.append(Variable(name, shape, dtype, *layouts[0], "tensor"))
        for step, (where, sbp) in enumerate(layouts):
            metas[number + 1], placement[number + 1], value[number + 1] = metas[number], where, sbp
            phase = PHASES[step * len(PHASES) // len(layouts)]
            nodes.append(Node("aten.neg.default", (Ref(number),), (), (number + 1,), phase, where))
            operands.append((sbp,))
            chosen.append(tuple(Signature((entry,), (entry,), None) for entry in sbp))
            number += 1
        results.append(number)
    graph = verify(Graph(tuple(inputs), tuple(nodes), metas, tuple(results), ()))
    decided = infer.GraphLayouts(value, placement, operands, chosen)
    step = StepLayouts(graph, decided, 1, everywhere, dict.fromkeys(results, True), tuple(variables), hardware=hardware)
    program = verify_program(lower(step), step)
    plan = cut(PlanHeader("boxing", world, 1, step.variables), verify_segments(segment(program))).plan(None)
    assert all(r.sbp == (B,) for r in plan.results)
    return schedule(plan)
