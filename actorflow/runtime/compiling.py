"""A job and what the search found for it go in; the plan, made by the master and sent to every rank, comes out."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch
from torch import Tensor

from actorflow import tree
from actorflow.arguments import Arguments, shapes_text
from actorflow.runtime.agreement import Report, compare, differing
from actorflow.runtime.costs import HERE, Target
from actorflow.runtime.planes import share
from actorflow.runtime.progress import working
from actorflow_compiler import errors
from actorflow_compiler.automatic import Rates
from actorflow_compiler.compile import compile_step
from actorflow_compiler.errors import ActorflowError, CallError, CaptureError, LayoutError, StateError
from actorflow_compiler.gradients import Gradients
from actorflow_compiler.hints import Hints, resolve
from actorflow_compiler.infer import Goal
from actorflow_compiler.plan import OfVariable, Plan, Variable, verify
from actorflow_compiler.plan_proto import from_bytes, to_bytes
from actorflow_compiler.torch_internals import DATA_DEPENDENT
from actorflow_compiler.variables import State
from actorflow_compiler.variant import PLAIN, Variant
from actorflow_scheduler.cost import variable_bytes
from actorflow_scheduler.schedule import schedule

__all__ = ["Common", "Made", "Order", "device_type", "hints_of", "make_everywhere", "make_plan"]


class Common(Protocol):
    """What of a cluster is used here."""

    rank: int
    world: int

    @property
    def machines(self) -> Sequence[str]:
        """For each rank what those have in common that can share memory; empty where it cannot."""

    def gather(self, tag: str, payload: bytes) -> list[bytes] | None:
        """Every rank's payload, on the master."""

    def scatter(self, tag: str, payloads: Sequence[bytes] | None) -> bytes:
        """Each rank its payload."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be compiled."""

    name: str
    function: Callable[..., object]
    arguments: Arguments
    state: State
    hints: Hints
    train: bool
    micro_batches: int
    goal: Goal
    fixed: Mapping[str, Variable]  # layouts that earlier plans decided
    fresh: bool  # an optimizer's first step differs, and comes now
    later: bool = False  # the job has run with another batch
    explain: str | None = None  # a regular expression of what the plan's notes are to explain
    target: Target = HERE  # the hardware that the plan is for
    schedule: str = "auto"


@dataclass(frozen=True, slots=True)
class Made:
    """A plan on one rank and what goes with it."""

    plan: Plan  # whole on the master, else this rank's part
    shape: tree.Shape  # of what the step returns
    lent: frozenset[str]  # variables that stay with the script
    differing: Mapping[str, Sequence[int]]  # new variable → the ranks that must take the master's value
    seed: int  # that torch has on the master
    gradients: Gradients  # of the step and of other calls


def make_everywhere(cluster: Common, tag: str, order: Order, report: Report) -> Made:
    """Compile on the master and send every rank its part; collective.

    Raises what compiling raised, on every rank, and CallError where the ranks' scripts hold different things.
    """
    reports = cluster.gather(f"state {tag}", report.to_bytes())
    if reports is None:
        return _unpack(cluster.scatter(f"plan {tag}", None), order.name)
    try:
        found = [Report.from_bytes(data) for data in reports]
        compare(order.name, found)
        plan, shape, gradients = make_plan(order, cluster.world)
        if device_type(order.state, order.hints, cluster.world) == "cpu":
            plan = verify(share(plan, cluster.machines))
        written = _written(plan)
        lent = {v.name for v in plan.variables if v.kind == "tensor" and v.name not in written}
        new = {v.name for v in plan.variables} - order.fixed.keys()
        differ = {name: ranks for name, ranks in differing(found).items() if name in new}
        seed = torch.initial_seed()
        of_gradients = {f.name: sorted(getattr(gradients, f.name)) for f in fields(Gradients)}
        head = {"shape": shape, "lent": sorted(lent), "differing": differ, "seed": seed, "gradients": of_gradients}
        packages = [_pack(head, to_bytes(plan.for_rank(rank))) for rank in range(cluster.world)]
    except BaseException as error:
        kind = type(error).__name__ if isinstance(error, ActorflowError) else "ClusterError"
        failed = _pack({"error": kind, "text": str(error) or type(error).__name__}, b"")
        with contextlib.suppress(ActorflowError):  # a run that is over has an error of its own
            cluster.scatter(f"plan {tag}", [failed] * cluster.world)
        raise
    cluster.scatter(f"plan {tag}", packages)
    return Made(plan, shape, frozenset(lent), differ, seed, gradients)


def make_plan(order: Order, world: int) -> tuple[Plan, tree.Shape, Gradients]:
    """The scheduled plan of all ranks, the shape of what the step returns, and what it does with gradients."""
    shapes: list[tree.Shape] = []
    gradients: list[Gradients] = []

    def step(tensors: list[Tensor]) -> list[Tensor]:
        args, kwargs = order.arguments.restore(tensors)
        found: list[Tensor] = []
        shapes.append(tree.describe(order.function(*args, **kwargs), found))
        return found

    what = f"compiling {order.name} for {world} device{'s' * (world != 1)}"
    with working(what, f"compiled {order.name}") as doing:
        kind = device_type(order.state, order.hints, world)
        try:
            laid = compile_step(
                order.name,
                step,
                order.arguments.specs,
                order.state,
                train=order.train,
                world=world,
                device_type=kind,
                micro_batches=order.micro_batches,
                hints=order.hints,
                fixed=order.fixed,
                fresh=order.fresh,
                goal=order.goal,
                explain=order.explain,
                defined=_line_of(order.function),
                later=order.later,
                schedule=order.schedule,
                rates=_rates(order.target, kind),
                doing=doing,
                learn=gradients.append,
            )
        except CaptureError as error:
            cause, specs = error.__cause__, order.arguments.specs
            if cause is None or isinstance(cause, DATA_DEPENDENT) or not specs:
                raise
            with_arguments = f"while {order.name} was captured with these arguments:\n{shapes_text(specs)}"
            raise CallError(f"{error}\n  {with_arguments}") from cause
        doing("cut")

        @functools.cache
        def make(variant: Variant) -> Plan:
            return _only_used(laid.cut(variant))

        plan = make(PLAIN)
        if not order.train:
            _only_predicts(plan)
        hardware = order.target.hardware(kind, lambda: (plan, make(Variant(weights=True))), doing)
        doing("schedule")
        memory = left_for_registers(plan, order.goal.budget)
        return schedule(make, hardware, memory, order.schedule), shapes[0], gradients[0]


def _rates(target: Target, kind: str) -> Rates:
    """What stages that are cut automatically are weighed by: what is known before there is a plan to measure."""
    hardware = replace(target, measure=False).hardware(kind)
    link = hardware.link((0, 1))
    return Rates(hardware.flops_per_s, hardware.memory_bytes_per_s, link.bytes_per_s, hardware.memory_bytes)


def left_for_registers(plan: Plan, budget: float | None) -> dict[int, int] | None:
    """Rank → what its variables leave of a memory budget; None without one.

    None, too, for one piece: the layout was chosen within the budget, and no order would take less.
    """
    if budget is None or plan.pieces == 1:
        return None
    return {rank: int(budget) - taken for rank, taken in variable_bytes(plan).items()}


def _line_of(function: Callable[..., object]) -> str:
    """Where a function begins, as file:line; nothing for what is not written in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def hints_of(state: State) -> Hints:
    """The hints for what the search found, under the names of its variables (tied ones have several)."""
    return resolve(state.modules, {id(h.tensor): h.name for h in state.held.values()})


def device_type(state: State, hints: Hints, world: int) -> str:
    """The kind of devices that the plan is for: what hints name, else where the script's state lies.

    Raises LayoutError for hints that fit no device of the run.
    """
    kinds = {placement.type for placement in hints.placements}
    for placement in hints.placements:
        if max(placement.ranks) >= world:
            raise LayoutError(
                f"a placement {placement} was found, which needs rank {max(placement.ranks)}; the run has {world} "
                f"device{'s' * (world != 1)} (ranks 0 to {world - 1}): start it with more, or place on fewer"
            )
    kinds = kinds or {h.tensor.device.type for h in state.held.values()} - {"meta"} or {"cpu"}
    if len(kinds) > 1:
        raise LayoutError(
            f"a job works on {' and '.join(sorted(kinds))}; one kind of device was expected: move and place all to one"
        )
    kind = kinds.pop()
    if kind == "cuda" and not torch.cuda.is_available():
        raise LayoutError('a placement "cuda" was found, and this machine has no CUDA device; use "cpu"')
    return kind


def _only_used(plan: Plan) -> Plan:
    """The plan with the variables that its actors name."""
    used = {x.name for a in plan.actors for x in (*a.operands, *a.targets) if isinstance(x, OfVariable)}
    return replace(plan, variables=tuple(v for v in plan.variables if v.name in used))


def _only_predicts(plan: Plan) -> None:
    """Raise StateError if a plan that predicts would change state."""
    for name in sorted(_written(plan)):
        raise StateError(
            f'job {plan.name!r} is of type "predict" and changes {name}; expected: it changes nothing. Call '
            f'model.eval() before it (batch norm in training mode counts), or make it of type "train"'
        )


def _written(plan: Plan) -> set[str]:
    """The variables that the plan changes: targets, and what steps without outputs work on in place."""
    found: set[str] = set()
    for actor in plan.actors:
        found.update(t.name for t in actor.targets if isinstance(t, OfVariable))
        for step in plan.bodies[actor.body].steps if actor.body is not None else ():
            if not step.outs:
                operands = [actor.operands[i] for i in step.reads() if i < len(actor.operands)]
                found.update(o.name for o in operands if isinstance(o, OfVariable))
    return found


def _pack(head: Mapping[str, object], plan: bytes) -> bytes:
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "big") + text + plan


def _unpack(data: bytes, name: str) -> Made:
    size = int.from_bytes(data[:8], "big")
    head = json.loads(data[8 : 8 + size])
    if "error" in head:
        kind = getattr(errors, head["error"], errors.ClusterError)
        raise kind(f"rank 0 could not compile {name}: {head['text']}")
    plan = verify(from_bytes(data[8 + size :]))
    gradients = Gradients(**{key: frozenset(names) for key, names in head["gradients"].items()})
    return Made(plan, head["shape"], frozenset(head["lent"]), head["differing"], head["seed"], gradients)
