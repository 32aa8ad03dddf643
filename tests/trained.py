"""Train a model of ``models`` by a plan, with all ranks in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from actorflow.devices import Cpu, Device
from actorflow.script_state.search import find_state
from actorflow.session.planes import RankLocation, choose_planes, share
from actorflow.testing.local_cluster import LocalCluster
from actorflow_compiler.capture.capture import TensorArgument
from actorflow_compiler.capture.optimizer_state import FUSABLE
from actorflow_compiler.capture.request import Preferences, StepRequest, TargetDevices, UserStep
from actorflow_compiler.compile import capture_step, compile_step, fold_captured
from actorflow_compiler.core.hardware import CPU_CORE, Hardware
from actorflow_compiler.core.placement import Placement, placement
from actorflow_compiler.core.sbp import Sbp, Split
from actorflow_compiler.core.schedule_names import schedule_name
from actorflow_compiler.custom_ops.optimizers import SCALARS
from actorflow_compiler.custom_ops.random import SEED
from actorflow_compiler.cutting.lowered_step import LoweredStep
from actorflow_compiler.hints.goal import DATA, Goal
from actorflow_compiler.hints.hints import distribute, place, resolve
from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.plan.variant import Variant
from actorflow_compiler.values.variables import real_optimizer_state
from actorflow_scheduler.schedule import schedule
from models import Batch, Case, reference, setting
from models import step as optimizer_step


@dataclass(frozen=True)
class Layout:
    """How a case is laid out."""

    world: int
    micro_batches: int = 1
    hints: dict[str, Sbp | tuple[Sbp | None, ...]] = field(default_factory=dict)
    pipeline: bool = False
    goal: Goal = DATA
    mesh: Placement | None = None  # of the whole model
    prepare: Callable[[nn.Module], None] = lambda _: None  # gives other hints
    variant: Variant | None = None  # None: the schedule's choice
    schedule: str = "auto"  # by which stages are laid in a V
    kind: str = "cpu"  # of device
    hardware: Hardware = CPU_CORE


LAYOUTS = {
    "one device": Layout(1),
    "four micro-batches": Layout(1, 4),
    "data 2": Layout(2),
    "output layer split": Layout(2, hints={r"(head|5)\.weight": Split(0)}),
    "pipeline 2": Layout(2, 4, pipeline=True),
    "data 2, pipeline 2": Layout(4, 4, pipeline=True),
}
MESH = Layout(4, mesh=placement("cpu", [[0, 1], [2, 3]]))


def train_eagerly(case: Case, sizes: list[int], micro_batches: int) -> tuple[list[float], dict[str, Tensor]]:
    """The reference: the full batch; with batch norm, the loop that accumulates over micro-batches."""
    model = case.model()
    pieces = micro_batches if case.batch_norm else 1
    scaler = case.scaler() if case.scaler else None
    losses, state = reference(model, case.optimizer(model), case.loss, case.batches(sizes), pieces, case.clip, scaler)
    if scaler is not None:
        state |= {"scaler._scale": torch.tensor(scaler.get_scale())}
        state |= {"scaler._growth_tracker": torch.tensor(scaler.state_dict()["_growth_tracker"], dtype=torch.int32)}
    return losses, state


def plan_of(case: Case, layout: Layout, size: int) -> tuple[Plan, dict[str, Tensor], torch.optim.Optimizer]:
    """The plan of a case as jobs have it, what its variables start from, and the optimizer whose settings it reads."""
    request, optimizer = request_of(case, layout, size)
    step = fold_captured(capture_step(request), request, runs=True)
    make = step.cut if layout.variant is None else step.cut(layout.variant)
    return schedule(make, name=layout.schedule), _values(request, step.lowered), optimizer


def laid_of(case: Case, layout: Layout, size: int) -> tuple[LoweredStep, dict[str, Tensor], torch.optim.Optimizer]:
    """What plans of a case can be cut from, each rank by itself; and what ``plan_of`` gives beside a plan."""
    request, optimizer = request_of(case, layout, size)
    laid = compile_step(request)
    return laid, _values(request, laid), optimizer


def _values(request: StepRequest, laid: LoweredStep) -> dict[str, Tensor]:
    state = request.step.state
    values = {h.name: h.tensor.detach().clone() for h in state.held.values()} | real_optimizer_state(state)
    for v in laid.header.variables:
        values.setdefault(v.name, torch.zeros(v.shape, dtype=getattr(torch, v.dtype)))
    return values


def request_of(case: Case, layout: Layout, size: int) -> tuple[StepRequest, torch.optim.Optimizer]:
    """What is asked of the compiler for a case, and the case's optimizer."""
    model = case.model()
    optimizer = case.optimizer(model)
    layout.prepare(model)
    if layout.hints:
        distribute(model, layout.hints)
    if layout.mesh is not None:
        place(model, {name.replace(".", r"\."): layout.mesh for name, _ in model.named_children()})
    if layout.pipeline:
        half = layout.world // 2
        first, second = (Placement(layout.kind, tuple(r), (half,)) for r in (range(half), range(half, 2 * half)))
        place(model, dict(zip(case.stages, (first, second), strict=True)))

    scaler = case.scaler() if case.scaler else None

    loss_of, clip = case.loss, case.clip  # all of the case that the step reads

    def step(*batch: Tensor) -> Tensor:
        loss = loss_of(model, *batch)
        (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        optimizer_step(model, optimizer, clip, scaler)
        return loss

    state = find_state(step, model=model, optimizer=optimizer)
    arguments = [
        TensorArgument(name, tuple(t.shape), t.dtype, True)
        for name, t in zip(case.names, case.batches([size])[0], strict=True)
    ]
    request = StepRequest(
        UserStep("train", lambda tensors: [step(*tensors)], arguments, state, train=True),
        TargetDevices(layout.world, layout.kind, layout.hardware),
        Preferences(
            resolve(state.modules).with_stages(layout.goal, layout.world),
            layout.micro_batches,
            layout.goal,
            schedule_name(layout.schedule),
        ),
    )
    return request, optimizer


def train_planned(case: Case, layout: Layout, sizes: list[int]) -> tuple[list[float], dict[str, Tensor], Plan]:
    """The same training by a plan, all ranks in this process; sizes must be equal."""
    plan, values, optimizer = plan_of(case, layout, sizes[0])
    return *train(case, plan, values, optimizer, sizes), plan


def train(
    case: Case, plan: Plan, values: dict[str, Tensor], optimizer: torch.optim.Optimizer, sizes: list[int],
    device: Callable[[int], Device] = Cpu,
) -> tuple[list[float], dict[str, Tensor]]:  # fmt: skip
    """Losses of all steps, and the state that is not the optimizer's, of a training by this plan on these devices."""
    group = optimizer.param_groups[0]
    read = SCALARS["actorflow.sgd" if "momentum" in group else "actorflow.adam"] if type(optimizer) in FUSABLE else ()
    scalars = {f"optimizer.0.{key}": setting(group, key) for key in read}
    losses = []
    where = device(0).where  # all ranks compute on one device, of one machine
    if where.type == "cuda":
        plan = choose_planes(plan, [RankLocation("here", str(where))] * plan.world)
    else:
        plan = share(plan, ["here"] * plan.world)
    values = {name: value.to(where) for name, value in values.items()}
    with LocalCluster(plan, variables=values, device=device, timeout=200.0) as cluster:
        for number, batch in enumerate(case.batches(sizes)):
            scalars[SEED] = number
            losses.append(cluster.run(dict(zip(case.names, batch, strict=True)), scalars)[0].item())
        state = {
            v.name.removeprefix("model."): cluster.variable(v.name).cpu()
            for v in plan.variables
            if v.kind != "optimizer"
        }
    return losses, state


def in_float64(case: Case) -> Case:
    """The same model on the same data, in float64.

    The gradient of a bias of attention's keys is 0: what float32 makes of it is a rounding error, which
    AdamW turns into full steps.
    """

    def batches(sizes: Sequence[int]) -> list[Batch]:
        return [tuple(t.double() if t.is_floating_point() else t for t in batch) for batch in case.batches(sizes)]

    return replace(case, make=lambda: case.make().double(), batches=batches)


def trained_as_eagerly(case: Case, layout: Layout, size: int, loss: float = 1e-5, bound: float = 1e-9) -> Plan:
    """Train two steps, of batches of ``size``, and compare losses and state with eager training; returns the plan.

    ``loss``: relative tolerance of losses; ``bound``: of parameters and optimizer state, as ``differences`` counts.
    """
    losses, state, plan = train_planned(case, layout, [size] * 2)
    expected, eager = train_eagerly(case, [size] * 2, 1)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=loss, atol=0)
    worst = max(differences(state, eager).items(), key=lambda item: item[1])
    assert worst[1] <= bound, worst
    return plan


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """For each tensor the largest difference, in relation to its largest element; 0.001 for smaller ones.

    A parameter that modules share has one name in ``found`` and several in ``expected``.
    """
    return {
        name: ((found[name].double() - value.double()).abs().max() / value.abs().max().double().clamp(min=1e-3)).item()
        for name, value in expected.items()
        if name in found
    }
