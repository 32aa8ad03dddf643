"""Along a data axis every device takes its own rows of the batch, whether communication is dear or cheap."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from actorflow_compiler.core.hardware import CPU_CORE, GPU, Hardware
from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.plan.source_rows import argument_rows
from models import CASES, Case
from trained import Layout, in_float64, plan_of, trained_as_eagerly

BATCH = 16
COMMUNICATION = {
    "dear messages": Hardware(latency_s=0.3),
    "dear bytes": Hardware(bytes_per_s=1e3, latency_s=0.0),
    "as on CPUs": CPU_CORE,
    "as on GPUs": GPU,
    "cheap": Hardware(bytes_per_s=1e15, latency_s=0.0, fire_overhead_s=0.0),
}
LAYOUTS = {"2": Layout(2), "4": Layout(4), "2, micro-batches": Layout(2, micro_batches=2)}


def rows_taken(plan: Plan, case: Case) -> dict[str, list[list[int]]]:
    """Argument → the rows of it that the sources of each rank take; none where no source of a rank reads it."""
    shapes = {name: tuple(t.shape) for name, t in zip(case.names, case.batches([BATCH])[0], strict=True)}
    taken: dict[str, list[list[int]]] = {name: [] for name in shapes}
    for rank in range(plan.world):
        found = argument_rows([a for a in plan.actors if a.rank == rank], plan.bodies, shapes)
        for name, runs in found.items():
            taken[name].append([row for lo, hi in runs for row in range(lo, hi)])
    return taken


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("title", COMMUNICATION)
@pytest.mark.parametrize("devices", LAYOUTS)
@pytest.mark.parametrize("name", ["gpt", "mlp", "cnn"])
def test_every_row_is_taken_by_one_device(name: str, devices: str, title: str) -> None:
    case = CASES[name]
    plan = plan_of(case, replace(LAYOUTS[devices], hardware=COMMUNICATION[title]), BATCH)[0]
    for ranks in rows_taken(plan, case).values():
        assert sorted(row for rows in ranks for row in rows) == list(range(BATCH))
        assert {len(rows) for rows in ranks} == {BATCH // plan.world}


def ranked(model: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
    """A loss whose weights are the ranks of the targets in the batch, which no part of them tells."""
    weights = (targets.argsort(stable=True).argsort(stable=True) + 1).double()
    return (F.cross_entropy(model(images), targets, reduction="none") * weights).mean()


@pytest.mark.parametrize("title", ["dear messages", pytest.param("cheap", marks=pytest.mark.slow)])
def test_what_cannot_be_told_from_some_rows_is_read_whole(title: str) -> None:
    case = in_float64(replace(CASES["mlp"], loss=ranked))
    layout = Layout(2, hardware=COMMUNICATION[title])
    plan = trained_as_eagerly(case, layout, BATCH)
    taken = rows_taken(plan, case)
    assert taken["y"] == [list(range(BATCH))] * 2
    assert sorted(row for rows in taken["x"] for row in rows) == list(range(BATCH))
