"""Layouts are priced by the hardware that the plan is for, as its forecast is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actorflow_compiler.boxing.linked_routes import link_along
from actorflow_compiler.core.hardware import CPU_CORE, GPU, Hardware, Link
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import Split
from actorflow_compiler.hints.goal import goal_of
from actorflow_compiler.hints.hints import zero
from actorflow_compiler.infer import layout_assignment
from actorflow_compiler.infer.prices import prices_of
from actorflow_compiler.infer.reports import AxisReport
from actorflow_compiler.plan.plan import Plan
from actorflow_scheduler.cost import seconds
from comms import communications
from compiler.test_infer import VOCABULARY, gpt_2, megatron
from models import CASES, CONTEXT
from trained import Layout, plan_of

TENSOR = goal_of("tensor", None)
BATCH = 64
# communication takes its bytes only, a megabyte in a second
SLOW = Hardware(bytes_per_s=1e6, latency_s=0.0, fire_overhead_s=0.0)


def kinds(plan: Plan, at_least: int) -> set[tuple[str, str]]:
    """(kind, phase) of what moves that many bytes."""
    return {(c.kind, c.phase) for c in communications(plan) if c.nbytes >= at_least}


@pytest.mark.parametrize(
    ("network", "gathered"),
    [
        (Hardware(bytes_per_s=1e8, latency_s=1e-6), False),  # a few more messages are nothing
        (Hardware(bytes_per_s=1e11, latency_s=1e-3), True),  # bytes are nothing
    ],
)
def test_a_loss_gathers_its_logits_where_bytes_cost_less_than_messages(network: Hardware, gathered: bool) -> None:
    layout = Layout(2, prepare=megatron, goal=TENSOR, hardware=network)
    plan = plan_of(gpt_2(1), layout, 4)[0]
    logits = 4 * CONTEXT * VOCABULARY * 4  # bytes
    assert (("all_gather", "forward") in kinds(plan, logits)) is gathered


@pytest.mark.slow
def test_the_links_of_nodes_decide_between_the_axes_of_a_mesh() -> None:
    """Two nodes of two: what is split along the axis within a node costs what the node's link does."""
    nodes = replace(SLOW, node_size=2, inside=Link(1e12, 0.0))
    reports = {}
    for name, hardware in {"nodes": nodes, "one network": SLOW}.items():
        reports[name] = found(Layout(4, goal=goal_of({"data": 2, "tensor": 2}, None), hardware=hardware))[1]
    within, between = reports["nodes"][1].seconds, reports["nodes"][0].seconds
    assert within < 1e-3 * reports["one network"][1].seconds
    assert between == pytest.approx(reports["one network"][0].seconds)


def test_the_link_of_an_axis_is_the_slowest_of_its_groups() -> None:
    inside = Link(100.0, 1e-6)
    hardware = Hardware(bytes_per_s=10.0, latency_s=1e-3, node_size=4, inside=inside)
    mesh = Placement("cpu", tuple(range(8)), (2, 4))
    assert link_along(hardware, mesh, 0) == Link(10.0, 1e-3)
    assert link_along(hardware, mesh, 1) == inside
    across = Placement("cpu", (0, 1, 2, 3, 4, 6, 5, 8), (2, 2, 2))  # the last group of the last axis leaves its node
    assert link_along(hardware, across, 2) == Link(10.0, 1e-3)
    assert link_along(Hardware(bytes_per_s=10.0, latency_s=1e-3), mesh, 1) == Link(10.0, 1e-3)


def found(layout: Layout, name: str = "gpt", size: int = BATCH) -> tuple[Plan, tuple[AxisReport, ...]]:
    """The plan of a case, and what inference says of its axes."""
    reports: list[tuple[AxisReport, ...]] = []

    def heard(said: tuple[AxisReport, ...]) -> tuple[str, ...]:
        reports.append(tuple(said))
        return ()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_assignment, "report_lines", heard)
        plan = plan_of(CASES[name], layout, size)[0]
    return plan, reports[0]


PRICED = {
    "data": Layout(2),
    "data over 4": Layout(4),
    "micro-batches": Layout(2, micro_batches=4),
    "ZeRO 1": Layout(2, prepare=lambda m: zero(m, 1)),
    "ZeRO 3": Layout(2, prepare=lambda m: zero(m, 3)),
    "tensor": Layout(2, goal=TENSOR),
    "tensor and micro-batches": Layout(2, micro_batches=4, goal=TENSOR),
}


@pytest.mark.parametrize("model", ["gpt", "mlp", "cnn"])
@pytest.mark.parametrize("title", PRICED)
@pytest.mark.parametrize("bandwidth", [1e6, 3e5])
@pytest.mark.matrix(every=8)
def test_what_inference_reckons_with_is_what_the_forecast_does(model: str, title: str, bandwidth: float) -> None:
    hardware = replace(SLOW, bytes_per_s=bandwidth)
    plan, (report,) = found(replace(PRICED[title], hardware=hardware), model)
    firings = [a for a in plan.actors if a.comm is not None and a.rank == 0]
    assert firings
    forecast = sum(a.rate * seconds(plan, a, hardware) for a in firings)
    # a batch norm is written out after inference: in micro-batches a few of its sums travel once more
    share = 0.05 if model == "cnn" and PRICED[title].micro_batches > 1 else 0.01
    assert report.seconds == pytest.approx(forecast, rel=share, abs=1e-4)


EXTREMES = {
    "no latency": Hardware(latency_s=0.0),
    "a modem": Hardware(bytes_per_s=5e3, latency_s=0.3),
    "a light year": Hardware(latency_s=3e7),
    "no bytes": Hardware(bytes_per_s=1.0),
    "a bus": Hardware(bytes_per_s=1e15, latency_s=1e-9),
    "GPUs": GPU,
    "GPUs of two nodes": replace(GPU, bytes_per_s=5e9, node_size=1, inside=Link(4e11, 1e-6)),
}


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("title", EXTREMES)
def test_what_a_way_of_working_excludes_stays_excluded_on_any_hardware(title: str) -> None:
    hardware = EXTREMES[title]
    tensor = plan_of(CASES["mlp"], Layout(2, goal=TENSOR, hardware=hardware), 8)[0]
    stored = {v.name.removeprefix("model.") for v in tensor.variables if v.kind == "parameter" and len(v.shape) > 1}
    assert stored
    for v in tensor.variables:
        if v.name.removeprefix("model.") in stored:
            assert isinstance(v.sbp[0], Split), v
    assert not {c.name for c in communications(tensor)} & stored  # weights are used as they are stored


def test_prices_are_those_of_the_link() -> None:
    prices = prices_of(Link(1e9, 1e-3))
    assert (prices.bandwidth, prices.latency) == (1e9, 1e-3)
    assert prices.grouped == pytest.approx(1e-4)
    assert prices_of(CPU_CORE.slowest).forbidden == 1.0
    assert prices_of(Link(CPU_CORE.bytes_per_s / 50, 0.0)).forbidden == pytest.approx(50.0)
    assert prices_of(GPU.slowest).forbidden == 1.0
    assert prices_of(Link(1e12, 0.0)).latency > 0  # less would make communication as cheap as none
