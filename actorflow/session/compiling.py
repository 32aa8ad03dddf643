"""A job and what the search found for it go in; the plan, made by the master and sent to every rank, comes out."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from actorflow.rendezvous.device_assignment import NOTHING_SAID, NOWHERE, Seat, Wishes, check, kinds_of, seat
from actorflow.rendezvous.settings import Settings
from actorflow.runtime.measured_costs import HERE, Target
from actorflow.script_state import tree
from actorflow.script_state.arguments import CallArguments, shapes_text
from actorflow.script_state.search import SearchResult
from actorflow.script_state.seeds import SeedEffect, record_seed_effect
from actorflow.script_state.side_effects import (
    MANY_VALUES,
    Rebinding,
    RestartCapture,
    SideEffect,
    SideEffectRecorder,
    scheduler_counts,
    takes_many_values,
)
from actorflow.session.agreement import Report, compare, differing, let_go
from actorflow.session.five_lines import five_lines
from actorflow.session.numbers import Reading, every_number, learned, settled
from actorflow.session.planes import choose, spots_of
from actorflow.session.refused import refused
from actorflow.session.undo import Stops
from actorflow.standins.owned_tensor import real_value
from actorflow.support.progress import working
from actorflow_compiler.capture.failure_points import FailurePoints
from actorflow_compiler.capture.request import History, Listeners, Preferences, StepRequest, TargetDevices, UserStep
from actorflow_compiler.compile import compile_step
from actorflow_compiler.core import errors
from actorflow_compiler.core.collector import young_only
from actorflow_compiler.core.errors import (
    ActorflowError,
    CallError,
    CaptureError,
    DeadlockError,
    LayoutError,
    StateError,
)
from actorflow_compiler.core.expressions import Source
from actorflow_compiler.core.lines import with_code
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.torch_internals import DATA_DEPENDENT
from actorflow_compiler.hints.goal import Goal
from actorflow_compiler.hints.hints import Hints, resolve
from actorflow_compiler.numbers.symbolic import NumberEnv
from actorflow_compiler.plan.modes import EAGER, MODES
from actorflow_compiler.plan.plan import OfVariable, Plan, Variable
from actorflow_compiler.plan.proto import from_bytes, to_bytes
from actorflow_compiler.plan.variant import PLAIN, Variant
from actorflow_compiler.plan.verify import verify
from actorflow_compiler.values.checks import BranchExplorer, Check
from actorflow_compiler.values.gradients import GRADIENT_SUFFIX, NO_GRADIENTS, GradientEffects, GradientState
from actorflow_compiler.values.host_programs import ValueDecisions
from actorflow_compiler.values.reads import LOOKS_AT_A_VALUE
from actorflow_compiler.values.variables import ScriptState, StateTensor
from actorflow_scheduler.cost import variable_bytes
from actorflow_scheduler.schedule import schedule

__all__ = [
    "Common", "Made", "Order", "hints_of", "kinds", "located", "make_everywhere", "make_plan", "make_pretended",
    "own_seat", "written_by",
]  # fmt: skip

E = TypeVar("E", bound=ActorflowError)
PARTS = (  # of compiling, in order, and what they are to people
    ("capture", "capturing the step as a graph of ops"),
    ("place", "placing the ops"),
    ("infer", "choosing layouts"),
    ("box and lower", "inserting what moves data between them"),
    ("cut", "cutting it into actors"),
    ("schedule", "ordering the actors, and proving that they never wait for ever"),
)


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
    arguments: CallArguments
    state: ScriptState
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
    mode: str = EAGER  # how bodies are to run
    own: tuple[bool, ...] | None = None  # the mirrored view: for each argument, whether each device has one of its own
    kinds: frozenset[str] = frozenset()  # of devices that the script names for the function
    places: frozenset[Placement] = frozenset()  # that the function's own scopes name, as far as that is known
    wishes: Wishes = NOTHING_SAID  # what else is said about kinds of devices
    found: SearchResult | None = None  # what holds the values that the function can reach
    changed: Mapping[str, Collection[str]] = field(default_factory=dict)  # where plans change a value → to what
    standing: GradientState = NO_GRADIENTS  # how gradients stand
    opens: bool = True  # whether numbers may be left open: not where they have decided what the function has made
    value: Callable[[StateTensor], Tensor] | None = None  # gives what a tensor of the script has now


@dataclass(frozen=True, slots=True)
class Made:
    """A plan on one rank and what goes with it."""

    plan: Plan  # whole on the master, else this rank's part
    shape: tree.Description  # of what the step returns
    lent: frozenset[str]  # variables that stay with the script
    differing: Mapping[str, Sequence[int]]  # new variable → the ranks that must take the master's value
    seed: int  # that torch has on the master
    gradients: GradientEffects  # what the step takes and leaves of them
    kinds: tuple[str, ...]  # of device, for each rank
    changes: tuple[SideEffect, ...]  # that each call makes in the script
    reading: Reading  # what it does with numbers of the script
    decisions: ValueDecisions  # by values of small variables
    rebound: tuple[Rebinding, ...]  # places that the step gives other tensors
    checks: tuple[Check, ...]  # of values: its last result says which of them raise
    seeding: SeedEffect | None  # how it seeds torch's random numbers
    stops: Stops  # where it may fail, and what it has changed in the script there
    written: frozenset[str]  # loose tensors and buffers that it changes
    gone: tuple[Sequence[int], Sequence[str]]  # plans and variables that no rank needs any more


@dataclass(frozen=True, slots=True)
class Planned:
    """What compiling gives on the master."""

    plan: Plan  # scheduled, of all ranks
    shape: tree.Description  # of what the step returns
    gradients: GradientEffects
    changes: tuple[SideEffect, ...]
    reading: Reading
    decisions: ValueDecisions
    rebound: tuple[Rebinding, ...]  # see ``Made``
    checks: tuple[Check, ...]
    seeding: SeedEffect | None
    stops: Stops


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
        on, seats = kinds(order, cluster.world), [one.seat for one in found]
        check(on, seats, order.wishes.settled)
        planned = make_plan(order, cluster.world)
        plan, gradients = planned.plan, planned.gradients
        _check_scopes(plan, on)
        spots = spots_of(cluster.machines, on, [seat.gpu for seat in seats], [seat.nccl for seat in seats])
        plan = verify(choose(plan, spots, order.target.hardware(_main(on))))
        written = written_by(plan)
        alone = {v.name for v in plan.variables if v.name + GRADIENT_SUFFIX not in written}  # no gradient of it is kept
        lent = {v.name for v in plan.variables if v.kind == "tensor" and v.name in alone and v.name not in written}
        changed = frozenset(v.name for v in plan.variables if v.name in written and v.kind in ("tensor", "buffer"))
        new = {v.name for v in plan.variables} - order.fixed.keys()
        differ = {name: ranks for name, ranks in differing(found).items() if name in new}
        seed = torch.initial_seed()
        of_gradients = {f.name: sorted(getattr(gradients, f.name)) for f in fields(GradientEffects)}
        head = {
            "shape": planned.shape, "lent": sorted(lent), "differing": differ, "seed": seed, "gradients": of_gradients,
            "kinds": on, "changes": [change.to_json() for change in planned.changes], "gone": let_go(found),
            "reading": planned.reading.to_json(), "decisions": planned.decisions.to_json(),
            "rebound": [asdict(one) for one in planned.rebound], "written": sorted(changed),
            "checks": [check.to_json() for check in planned.checks],
            "seeding": None if planned.seeding is None else asdict(planned.seeding), "stops": planned.stops.to_json(),
        }  # fmt: skip
        packages = [_pack(head, to_bytes(plan.for_rank(rank))) for rank in range(cluster.world)]
    except BaseException as error:
        kind = type(error).__name__ if isinstance(error, ActorflowError) else "ClusterError"
        failed = _pack({"error": kind, "text": str(error) or type(error).__name__}, b"")
        with contextlib.suppress(ActorflowError):  # a run that is over has an error of its own
            cluster.scatter(f"plan {tag}", [failed] * cluster.world)
        raise
    cluster.scatter(f"plan {tag}", packages)
    return Made(
        plan, planned.shape, frozenset(lent), differ, seed, gradients, on, planned.changes, planned.reading,
        planned.decisions, planned.rebound, planned.checks, planned.seeding, planned.stops, changed, let_go(found),
    )  # fmt: skip


@young_only()
def make_plan(order: Order, world: int, told: bool = True) -> Planned:
    """The plan, and what the step does with gradients, numbers and Python.

    Numbers of the script are left open as far as the step only computes with them.  Where that takes long it is shown
    how far it is, and at the end, unless not ``told``, what was made.
    """
    own: list[Source] = [] if order.found is None else scheduler_counts(order.found)
    before: Exception | None = None
    while order.opens:
        numbers = NumberEnv()
        try:
            return _make_plan(order, world, told, numbers, own)
        except RestartCapture as counting:
            own += counting.places
        except Exception as error:  # whatever code cannot do with stand-ins: it gets the numbers themselves
            if not own and not any(every_number(order.arguments, order.state, order.train, order.found)):
                raise
            before = error
            break
        finally:
            numbers.closed = True
    try:
        return _make_plan(order, world, told, None, ())
    except CaptureError as error:
        if isinstance(before, ActorflowError) and not isinstance(before, CaptureError):
            raise before from None  # the step could be captured: what was wrong is something else
        if isinstance(before, CaptureError) and LOOKS_AT_A_VALUE in str(error) and LOOKS_AT_A_VALUE not in str(before):
            raise before from None  # what is computed of values needs stand-ins, too, and was not what was wrong
        raise


def _make_plan(order: Order, world: int, told: bool, numbers: NumberEnv | None, own: Sequence[Source]) -> Planned:
    """See ``make_plan``; ``numbers`` takes what the step does with those of the script, None: they are constants.

    ``own`` are places whose numbers the step changes.  Raises Counting where it changes others, too.
    """
    shapes: list[tree.Description] = []
    learnt: list[tuple[GradientEffects, ValueDecisions, Sequence[Check]]] = []
    checks = BranchExplorer()
    changes: list[list[SideEffect]] = []
    rebound: list[list[Rebinding]] = []
    seeded: list[list[SeedEffect]] = []
    stops: list[Stops] = []

    def stand_in(path: str, value: int | float) -> Any:
        return value if numbers is None else numbers.stand_in(Source("argument", path), value)

    def step(tensors: list[Tensor]) -> list[Tensor]:
        args, kwargs = order.arguments.restore(tensors, stand_in)
        results: list[Tensor] = []
        found = order.found
        with (
            contextlib.nullcontext()
            if found is None
            else SideEffectRecorder(order.name, found, order.changed, numbers, own) as run
        ):
            lines = None if run is None else FailurePoints(run.so_far)
            if run is not None:
                checks.changed = partial(_so_far, run)
            with (
                record_seed_effect() as left,
                checks.running(),
                contextlib.nullcontext() if lines is None else lines.watching(),
            ):
                returned = order.function(*args, **kwargs)
            seeded.append(left)
            if numbers is not None:
                numbers.end()
            shapes.append(tree.describe(returned, results))
            changes.append([] if run is None else run.changes(results))
            rebound.append([] if run is None else run.rebound)
            left_at = {} if lines is None or not changes[-1] else lines.changed()
            stops.append(Stops(left_at, () if run is None else run.begun(changes[-1])))
        return results

    def learn(gradients: GradientEffects, decisions: ValueDecisions, checks: Sequence[Check]) -> None:
        for asked in decisions.numbers:
            if takes_many_values(order.changed.get(asked.where, ()), repr(asked.found)):
                raise CaptureError(
                    f"{asked.where}\n  {LOOKS_AT_A_VALUE} ({MANY_VALUES} plans for other values are there)"
                )
        learnt.append((gradients, decisions, checks))

    def value(name: str) -> Tensor:
        held = order.state.held[name]
        return real_value(held.tensor) if order.value is None else order.value(held)

    what = f"compiling {order.name} for {world} device{'s' * (world != 1)}"
    with working(what, f"compiled {order.name}", PARTS) as doing:
        kind = _main(kinds(order, world))
        try:
            known = replace(order.target, measure=False).hardware(kind)  # before there is a plan to measure
            lowered = compile_step(
                StepRequest(
                    UserStep(
                        order.name,
                        step,
                        order.arguments.specs,
                        order.state,
                        order.train,
                        _line_of(order.function),
                        order.own,
                    ),
                    TargetDevices(world, kind, known),
                    Preferences(order.hints, order.micro_batches, order.goal, order.schedule, order.explain),
                    History(order.fixed, order.fresh, order.later, order.standing),
                    Listeners(doing, learn, numbers, value, checks),
                )
            )
        except (CaptureError, CallError) as error:
            cause, specs = error.__cause__, order.arguments.specs
            error = located(error, order.function)
            if isinstance(error, CallError) or cause is None or isinstance(cause, DATA_DEPENDENT) or not specs:
                raise error from cause
            with_arguments = f"while {order.name} was captured with these arguments:\n{shapes_text(specs)}"
            raise CallError(f"{error}\n  {with_arguments}") from cause
        doing("cut")

        @functools.cache
        def make(variant: Variant) -> Plan:
            plan = lowered.cut(replace(variant, joined=MODES[order.mode].inductor))
            return replace(_only_used(plan), mode=order.mode)

        plan = make(PLAIN)
        if not order.train:
            _only_predicts(plan, order.function)
        hardware = order.target.hardware(kind, lambda: (plan, make(Variant(weights=True))), doing)
        doing("schedule")
        memory = left_for_registers(plan, order.goal.budget)
        try:
            scheduled = schedule(make, hardware, memory, order.schedule)
        except DeadlockError as error:
            raise refused(plan, error) from error
        if told:
            doing.sum_up(lambda: five_lines(scheduled, hardware))
    if numbers is None:
        reading = settled(order.arguments, order.state, order.train, order.found)
    else:
        reading = learned(numbers, own)
    gradients, decisions, found = learnt[0]
    return Planned(
        scheduled, shapes[-1], gradients, tuple(changes[-1]), reading, decisions, tuple(rebound[-1]), tuple(found),
        seeded[-1][0] if seeded[-1] else None, stops[-1],
    )  # fmt: skip


def _so_far(run: SideEffectRecorder) -> tuple[list[dict[str, Any]], str]:
    """What a run of a step has changed in Python so far, as it travels; see ``BranchExplorer``."""
    changes, lost = run.so_far()
    return [change.to_json() for change in changes], lost


def make_pretended(order: Order, world: int) -> Plan:
    """The plan for ranks that do not exist: those of a node, as the hardware says, are taken to share memory."""
    plan = make_plan(order, world, told=False).plan
    on = kinds(order, world)
    hardware = replace(order.target, measure=False).hardware(_main(on))
    size = hardware.node_size or world
    gpus = [f"GPU {rank}" * (kind == "cuda") for rank, kind in enumerate(on)]
    spots = spots_of([f"node {rank // size}" for rank in range(world)], on, gpus, gpus)
    return verify(choose(plan, spots, hardware))


def left_for_registers(plan: Plan, budget: float | None) -> dict[int, int] | None:
    """Rank → what its variables leave of a memory budget; None without one.

    None, too, for one piece: the layout was chosen within the budget, and no order would take less.
    """
    if budget is None or plan.pieces == 1:
        return None
    return {rank: int(budget) - taken for rank, taken in variable_bytes(plan).items()}


def located(error: E, function: Callable[..., object]) -> E:
    """An error that names a line as it is, any other behind the line that a job's function begins in."""
    line = _line_of(function)
    if not line or re.search(r":\d+\b", str(error)):
        return error
    return type(error)(f"{with_code(line)}\n  {error}")


def _line_of(function: Callable[..., object]) -> str:
    """Where a function begins, as file:line; nothing for what is not written in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def hints_of(state: ScriptState) -> Hints:
    """The hints for what the search found, under the names of its variables (tied ones have several)."""
    return resolve(state.modules, {id(h.tensor): h.name for h in state.held.values()})


def kinds(order: Order, world: int) -> tuple[str, ...]:
    """The kind of device of each rank; see ``seats.kinds_of``."""
    held = {h.tensor.device.type for h in order.state.held.values()}
    homes = order.hints.homes.values()
    return kinds_of(order.hints.placements | order.places, order.kinds, held, world, order.wishes, homes)


def own_seat(order: Order, settings: Settings) -> Seat:
    """What this rank has to compute on, as it tells the master; it keeps the GPU that an earlier job gave it."""
    try:
        on = kinds(order, settings.world)
        return seat(on[settings.rank], settings, order.wishes.settled or on)
    except LayoutError:  # the master finds it, too, and tells everybody
        return NOWHERE


def _check_scopes(plan: Plan, kinds: Sequence[str]) -> None:
    """Raise LayoutError where scopes in the function have placed on a kind of device that no rank is."""
    for placement in [v.placement for v in plan.variables] + [r.placement for r in plan.results]:
        if placement.type not in kinds:
            there = " and ".join(sorted(set(kinds)))
            raise LayoutError(
                f"job {plan.name!r} places on {placement}, and the ranks of this run compute on {there}: "
                f"start with --device-type {placement.type}, or place on what there is"
            )


def _main(kinds: Sequence[str]) -> str:
    """The kind that the plan is reckoned with, and that what nobody places is said to lie on."""
    return "cuda" if "cuda" in kinds else "cpu"


def _only_used(plan: Plan) -> Plan:
    """The plan with the variables that its actors name."""
    used = {x.name for a in plan.actors for x in (*a.operands, *a.targets) if isinstance(x, OfVariable)}
    return replace(plan, variables=tuple(v for v in plan.variables if v.name in used))


def _only_predicts(plan: Plan, function: Callable[..., Any]) -> None:
    """Raise StateError if a plan that predicts would change state."""
    for name in sorted(written_by(plan)):
        error = StateError(
            f'job {plan.name!r} is of type "predict" and changes {name}; expected: it changes nothing. Call '
            f'model.eval() before it (batch norm in training mode counts), or make it of type "train"'
        )
        raise located(error, function)


def written_by(plan: Plan) -> set[str]:
    """The variables that the plan changes."""
    return set().union(*map(plan.changed_by, plan.actors))


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
    gradients = GradientEffects(**{key: frozenset(names) for key, names in head["gradients"].items()})
    on = tuple(head["kinds"])
    changes = tuple(SideEffect(**change) for change in head["changes"])
    reading, decisions = Reading.from_json(head["reading"]), ValueDecisions.from_json(head["decisions"])
    lent, differing, seed, gone = frozenset(head["lent"]), head["differing"], head["seed"], tuple(head["gone"])
    rebound = tuple(Rebinding(one["at"], one["key"], tuple(one["changed"])) for one in head["rebound"])
    written, checks = frozenset(head["written"]), tuple(map(Check.from_json, head["checks"]))
    seeded = None if head["seeding"] is None else SeedEffect(**head["seeding"])
    return Made(
        plan, head["shape"], lent, differing, seed, gradients, on, changes, reading, decisions, rebound, checks,
        seeded, Stops.from_json(head["stops"]), written, gone,
    )  # fmt: skip
