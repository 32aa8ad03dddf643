"""A source computes from the rows that it takes what it computes from whole arguments, and takes no more rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from actorflow.runtime.bodies.kernels import Kernels
from actorflow.runtime.source_kernel import SourceKernel
from actorflow_compiler.core.ops import Ref
from actorflow_compiler.library import OPS
from actorflow_compiler.plan.plan import ActorKind, Body, OfInput, Step
from actorflow_compiler.plan.source_rows import argument_rows, over_rows, rows_read
from models import CASES
from trained import LAYOUTS, plan_of

CPU = torch.device("cpu")


def rows_of(tensor: Tensor, runs: tuple[tuple[int, int], ...]) -> Tensor:
    return torch.cat([tensor[:0], *(tensor[lo:hi] for lo, hi in runs)])


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "data 2" else pytest.mark.slow) for n in LAYOUTS])
def test_sources_of_compiled_plans(name: str) -> None:
    case, layout = CASES["gpt"], LAYOUTS[name]
    (batch,) = case.batches([16])
    plan, _, _ = plan_of(case, layout, 16)
    given = dict(zip(case.names, batch, strict=True))
    shapes = {name: tuple(t.shape) for name, t in given.items()}
    kernels = Kernels(CPU, OPS)
    taken: list[set[int]] = []
    for rank in range(plan.world):
        mine = [a for a in plan.actors if a.rank == rank]
        needed = argument_rows(mine, plan.bodies, {n: shapes[n] for n in case.names})
        taken.append({row for runs in needed.values() for lo, hi in runs for row in range(lo, hi)})
        for actor in mine:
            if actor.kind is not ActorKind.SOURCE or actor.body is None:
                continue
            names = [o.name for o in actor.operands if isinstance(o, OfInput)]
            kernel = SourceKernel(kernels, plan.bodies[actor.body], names)
            whole = kernel([*(given[n] for n in names), frozenset()])
            alone = kernel([*(rows_of(given[n], needed[n]) for n in names), frozenset(names)])
            first = rows_of(given[names[0]], needed[names[0]])
            some = kernel([first, *(given[n] for n in names[1:]), frozenset(names[:1])])
            for a, b, c in zip(whole, alone, some, strict=True):
                assert torch.equal(a, b)
                assert torch.equal(a, c)
    split = layout.world > 1 and any(rows != taken[0] for rows in taken)
    assert set().union(*taken) == set(range(16))
    if name == "data 2":
        assert split
        assert sum(map(len, taken)) == 16


def test_only_rectangles_are_taken_in_part() -> None:
    def carve(at: int, row: int, count: int, out: int) -> Step:
        return Step("actorflow.carve", (Ref(at), (row, 0), (count, 2)), (), (out,))

    negated = Step("aten.neg.default", (Ref(1),), (), (7,))
    body = Body(4, (carve(0, 6, 2, 4), carve(0, 2, 1, 5), carve(1, 0, 3, 6), negated), (4, 5, 6, 7, 2))
    assert rows_read(body) == {0: ((2, 3), (6, 8)), 1: None, 2: None, 3: ()}
    first, second, *_ = over_rows(body, {0: ((2, 3), (6, 8))}).steps
    assert (first.args[1], second.args[1]) == ((1, 0), (0, 0))
