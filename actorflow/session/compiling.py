"""Compile a job's step on the master, and send every rank its part of the plan."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from actorflow.auto_parallel.comparison import SHOWN, again_notes, choice_note, considered
from actorflow.auto_parallel.follow import following
from actorflow.auto_parallel.search import ALIKE, REFUSALS, Choice, Compared, PlanSearch
from actorflow.auto_parallel.space import marked_for_zero, may_split_state, open_choices
from actorflow.auto_parallel.strategy import UNMARKED
from actorflow.rendezvous.device_assignment import (
    NO_DEVICES,
    RankDevices,
    check_devices,
    kinds_of,
    look_at_devices,
)
from actorflow.rendezvous.settings import Settings
from actorflow.script_state.arguments import shapes_text
from actorflow.script_state.side_effect_recorder import RestartCapture
from actorflow.script_state.side_effects import scheduler_counts
from actorflow.session.agreement import StateReport, check_agreement, differing_variables, unused_on_all_ranks
from actorflow.session.compile_request import CapturedStep, CompileRequest, LookedAt, located
from actorflow.session.kept_capture import CaptureKey, Outspoken, find_capture, keep_capture, key_of_capture
from actorflow.session.number_reads import every_number
from actorflow.session.plan_keys import torch_modes
from actorflow.session.plan_store import CAPTURES, KEPT, WHERE, KeptPlan, PlanKey, PlanStore
from actorflow.session.plan_summary import summary_lines
from actorflow.session.planes import choose_planes, computes_beside, numbered, rank_locations
from actorflow.session.step_effects import StepEffects
from actorflow.support.progress import Progress, show_progress
from actorflow_compiler.capture.from_fx import Capture
from actorflow_compiler.capture.request import StepRequest, TargetDevices
from actorflow_compiler.compile import capture_step, fold_captured, lower_captured
from actorflow_compiler.core import errors
from actorflow_compiler.core.digest import NoDigest
from actorflow_compiler.core.errors import (
    ActorflowError,
    CallError,
    CaptureError,
    DeadlockError,
    LayoutError,
    PlanError,
    StateError,
)
from actorflow_compiler.core.expressions import NumberSource
from actorflow_compiler.core.garbage_collection import forgotten_at_the_end, young_only
from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.core.linear_program import expect_programs, solver_apart
from actorflow_compiler.core.schedule_names import ScheduleName
from actorflow_compiler.core.torch_internals import DATA_DEPENDENT
from actorflow_compiler.hints.hints import ResolvedHints, resolve
from actorflow_compiler.numbers.symbolic import NumberEnv
from actorflow_compiler.plan.folded import FoldedPlan, Partners
from actorflow_compiler.plan.plan import OfVariable, Plan, Variable, VariableKind
from actorflow_compiler.plan.rank_differences import UnlikeError
from actorflow_compiler.plan.rank_location import with_planes
from actorflow_compiler.plan.rank_parts import join, split
from actorflow_compiler.plan.shown_plan import ShownPlan
from actorflow_compiler.plan.stamping import begins_freely
from actorflow_compiler.plan.text import to_text
from actorflow_compiler.plan.variant import PLAIN, Variant
from actorflow_compiler.plan.verify import verify
from actorflow_compiler.reuse import StepInterface, check_fits, step_parts
from actorflow_compiler.values.gradients import GRADIENT_SUFFIX
from actorflow_compiler.values.reads import LOOKS_AT_A_VALUE
from actorflow_compiler.values.variables import ScriptState
from actorflow_scheduler.cost import variable_bytes
from actorflow_scheduler.fewer_pieces import forecast_draft
from actorflow_scheduler.forecast import Forecast, forecast
from actorflow_scheduler.proof import prove
from actorflow_scheduler.rank_classes import every_rank
from actorflow_scheduler.schedule import schedule, schedule_folded

__all__ = [
    "GatherScatter", "RankPlan", "compile_on_all_ranks", "compile_pretended", "hints_of", "kinds",
    "make_plan", "own_devices", "written_by",
]  # fmt: skip

USABLE = 0.9  # of a device's memory: the buffers that ops need inside are not known
LOG = logging.getLogger("actorflow.plans")  # says, on INFO, why a step is captured though its plan is kept
PARTS = (  # the parts of compiling, in order, and their names for people
    ("capture", "capturing the step as a graph of ops"),
    ("place", "placing the ops"),
    ("infer", "choosing layouts"),
    ("box and lower", "inserting what moves data between them"),
    ("cut", "cutting it into actors"),
    ("schedule", "ordering the actors, and proving that they never wait for ever"),
)


class GatherScatter(Protocol):
    """The collectives of a cluster that compiling uses."""

    rank: int
    world: int

    @property
    def machines(self) -> Sequence[str]:
        """For each rank, an id that is equal for ranks that can share memory; empty where a rank cannot."""

    def gather(self, tag: str, payload: bytes) -> list[bytes] | None:
        """Every rank's payload, on the master."""

    def scatter(self, tag: str, payloads: Sequence[bytes] | None) -> bytes:
        """Give each rank its payload."""


@dataclass(frozen=True, slots=True)
class CompileResult:
    """The result of compiling, on the master."""

    plan: Plan  # scheduled, of all ranks
    effects: StepEffects
    key: PlanKey | None = None  # what the plan was made from; None: it cannot be compared, or was not asked for
    others: tuple[Plan | None, ...] = ()  # those after the first of ``plan.considered``; None: there is none
    # listed rank → the ranks of its class, where the plan lists one of each, as for a forecast; None: it lists all
    rank_classes: Mapping[int, Sequence[int]] | None = None
    partners: tuple[Partners, ...] = ()  # of such a plan: which ranks communicate
    hardware: Hardware | None = None  # that it was made for; None: it was kept, and not made now


@dataclass(frozen=True, slots=True)
class RankPlan:
    """A plan as one rank receives it, with further decisions of the master."""

    plan: Plan  # whole on the master, else this rank's part
    effects: StepEffects
    lent: frozenset[str]  # variables that stay with the script
    differing: Mapping[str, Sequence[int]]  # new variable → the ranks that must take the master's value
    seed: int  # torch's seed on the master
    kinds: tuple[str, ...]  # of device, for each rank
    written: frozenset[str]  # loose tensors and buffers that it changes
    gone: tuple[Sequence[int], Sequence[str]]  # plans and variables that no rank needs any more
    begins_freely: bool  # see ``stamping.begins_freely``
    made: CompileResult | None = None  # on the master: what was compiled, or found

    def to_messages(self, world: int) -> tuple[bytes, list[bytes]]:
        """A message to all ranks, and one to each rank, equal for ranks that are alike; rank 0 has all."""
        head = {
            "effects": self.effects.to_json(),
            "lent": sorted(self.lent),
            "differing": self.differing,
            "seed": self.seed,
            "kinds": self.kinds,
            "written": sorted(self.written),
            "gone": self.gone,
            "freely": self.begins_freely,
        }
        parts = split(self.plan, range(1, world))
        return _pack(head, parts.shared), [b"", *(parts.of(rank) for rank in range(1, world))]


@forgotten_at_the_end()
def compile_on_all_ranks(cluster: GatherScatter, tag: str, request: CompileRequest, report: StateReport) -> RankPlan:
    """Compile on the master and send every rank its part; collective.

    What all ranks share is sent to all, then each gets the rest, which is one message for all ranks that are alike.

    An error of compiling is raised on every rank; CallError if the ranks' scripts are in different states.
    """
    reports = cluster.gather(f"state {tag}", report.to_bytes())
    if reports is None:
        head, shared = _unpack(cluster.scatter(f"plan {tag}", None), request.name)
        return _received(head, shared, cluster.scatter(f"part of plan {tag}", None), cluster.rank)
    try:
        found = _compile_for(cluster, request, [StateReport.from_bytes(data) for data in reports])
        to_all, to_each = found.to_messages(cluster.world)
    except BaseException as error:
        kind = type(error).__name__ if isinstance(error, ActorflowError) else "ClusterError"
        failed = _pack({"error": kind, "text": str(error) or type(error).__name__}, b"")
        with contextlib.suppress(ActorflowError):  # a failed run has an error of its own
            cluster.scatter(f"plan {tag}", [failed] * cluster.world)
        raise
    cluster.scatter(f"plan {tag}", [to_all] * cluster.world)
    cluster.scatter(f"part of plan {tag}", to_each)
    return found


def _compile_for(cluster: GatherScatter, request: CompileRequest, reports: Sequence[StateReport]) -> RankPlan:
    """Compile the whole plan on the master, for ranks with these reports."""
    check_agreement(request.name, reports)
    on, devices = kinds(request, cluster.world), [one.devices for one in reports]
    check_devices(on, devices, request.defaults.settled)
    beside = computes_beside(cluster.machines, on)
    locations = rank_locations(
        cluster.machines,
        on,
        [one.gpu_of_nccl for one in devices],
        [one.nccl for one in devices],
    )
    target = KEPT.with_costs(request.target, _main(on))
    request = replace(request, target=target, beside=beside, locations=numbered(locations))
    result = make_plan(request, cluster.world, kept=KEPT)
    _check_scopes(result.plan, on)
    plan = verify(choose_planes(result.plan, locations, request.target.hardware(_main(on))))
    written = written_by(plan)
    no_gradient = {v.name for v in plan.variables if v.name + GRADIENT_SUFFIX not in written}  # gradient not kept
    lent = {
        v.name
        for v in plan.variables
        if v.kind == VariableKind.TENSOR and v.name in no_gradient and v.name not in written
    }
    changed = frozenset(
        v.name for v in plan.variables if v.name in written and v.kind in (VariableKind.TENSOR, VariableKind.BUFFER)
    )
    new = {v.name for v in plan.variables} - request.fixed.keys()
    differing = {name: ranks for name, ranks in differing_variables(reports).items() if name in new}
    return RankPlan(
        plan,
        result.effects,
        frozenset(lent),
        differing,
        torch.initial_seed(),
        on,
        changed,
        unused_on_all_ranks(reports),
        begins_freely(plan),
        result,
    )


@solver_apart()
@young_only()
def make_plan(request: CompileRequest, world: int, told: bool = True, kept: PlanStore | None = None) -> CompileResult:
    """The plan, and the step's effects on gradients, numbers and Python state.

    Numbers of the script become inputs of the plan if the step only computes with them.  Slow compilations show their
    progress; with ``told``, they end with a summary of the plan.  If ``kept`` has the capture of the step, it is not
    captured; if it has the plan of what was captured, that is taken, else the plan is compiled, and kept there.
    """
    kept_step = None if kept is None else KeptStep(kept, request, world)
    if kept_step is not None and (found := kept_step.take(told)) is not None:
        return found
    own: list[NumberSource] = [] if request.found is None else scheduler_counts(request.found)
    before: Exception | None = None
    while request.opens:
        numbers = NumberEnv()
        try:
            return _make_plan(request, world, told, kept_step, numbers, own)
        except RestartCapture as counting:
            own += counting.places
        except Exception as error:  # the code may not work with stand-ins: retry with the numbers themselves
            if not own and not any(every_number(request.arguments, request.state, request.train, request.found)):
                raise
            before = error
            break
        finally:
            numbers.closed = True
    try:
        return _make_plan(request, world, told, kept_step, None, ())
    except CaptureError as error:
        if isinstance(before, ActorflowError) and not isinstance(before, CaptureError):
            raise before from None  # with constants the step could be captured, so the first error has another cause
        if isinstance(before, CaptureError) and LOOKS_AT_A_VALUE in str(error) and LOOKS_AT_A_VALUE not in str(before):
            raise before from None  # numbers computed from values need stand-ins, too, and were not the cause
        raise


def _make_plan(
    request: CompileRequest,
    world: int,
    told: bool,
    kept_step: KeptStep | None,
    numbers: NumberEnv | None,
    own: Sequence[NumberSource],
) -> CompileResult:
    """See ``make_plan``; ``numbers`` records how the step uses the script's numbers; None: they are constants.

    ``own`` are places whose numbers the step changes.  Raises RestartCapture if it changes other numbers, too.
    """
    step = CapturedStep(request, numbers, own)
    made: _Made | None = None
    kept, spoken = (None, Outspoken()) if kept_step is None else (kept_step.kept, kept_step.spoken)
    what = f"compiling {request.name} for {world} device{'s' * (world != 1)}"
    with show_progress(what, f"compiled {request.name}", PARTS) as doing:
        kind = _main(kinds(request, world))
        with _located_errors(request):
            known = replace(request.target, measure=False).hardware(kind)  # before there is a plan to measure
            asked = step.request(TargetDevices(world, kind, known), doing)
            with spoken.listening():
                captured = capture_step(marked_for_zero(asked))
        key = None if kept is None else kept.key(request.name, lambda: _plan_depends_on(request, captured, asked))
        found = None if kept is None else _kept(kept, key, request, captured, asked)
        if found is not None:
            plan, hardware = found.plan, known
            doing.say_at_end(f"captured {request.name}, whose plan was kept in {found.folder},")
        else:
            made = _compiled(request, captured, asked, doing)
            plan, hardware = made.plan, made.hardware
            if kept is not None and key is not None:
                kept.add(key, plan, request.target, kind)
        if told:
            doing.sum_up(lambda: summary_lines(_placed(request, plan), hardware))
    result = CompileResult(plan, step.effects(), key)
    if made is not None:
        result = replace(
            result,
            others=made.others,
            rank_classes=made.rank_classes,
            partners=made.partners,
            hardware=made.hardware,
        )
    if kept_step is not None:
        kept_step.keep(captured, result)
    return result


class KeptStep:
    """A step whose capture may be kept: taken, if it is, else kept for the next start."""

    def __init__(self, kept: PlanStore, request: CompileRequest, world: int) -> None:
        self.kept = kept
        self._request, self._world = request, world
        self._kind = _main(kinds(request, world))
        self._key: CaptureKey | None = None
        self.spoken = Outspoken()  # through all the times that the step is run
        self.why = ""  # why it has to be captured at each start; empty if it has not
        if os.environ.get(CAPTURES, "0") in ("", "0"):
            self.why = f"captures are not kept ({CAPTURES}=1 keeps them)"
        elif not kept.is_kept:
            self.why = "plans are not kept"
        elif kept.names_a_plan(request.name):
            self.why = "the script has named a plan"

    def take(self, told: bool) -> CompileResult | None:
        """The plan and the effects of the step, without a capture; None if they are not kept."""
        if self.why:
            return None
        request = self._request
        what = f"looking for the plan of {request.name} for {self._world} device{'s' * (self._world != 1)}"
        with show_progress(what, f"looked for the plan of {request.name}") as doing:
            known = replace(request.target, measure=False).hardware(self._kind)
            asked = CapturedStep(request, None, ()).request(TargetDevices(self._world, self._kind, known), doing)
            try:
                self._key = key_of_capture(request, asked)
            except NoDigest as error:
                self._say(str(error))
                return None
            found = find_capture(self.kept, self._key, request, asked)
            plan = None if found is None else _kept_plan(self.kept, found.key, request, found.interface, asked)
            if found is None or plan is None:
                return None
            doing.say_at_end(f"took the plan of {request.name}, which is as it was, from {plan.folder},")
            if told:
                doing.sum_up(lambda: summary_lines(_placed(request, plan.plan), known))
        self.kept.skipped += 1
        return CompileResult(plan.plan, found.effects, found.key)

    def keep(self, captured: Capture, result: CompileResult) -> None:
        """Keep a capture that was made."""
        if self._key is None or self.why:
            return
        try:
            if result.key is None:
                raise NoDigest(self.kept.why.get(self._request.name, ""))
            if self.spoken.said:
                raise NoDigest(f"{self.spoken.said}, which the capture has shown")
            keep_capture(self.kept, self._key, self._request, captured, result.effects, result.key)
        except NoDigest as error:
            self._say(str(error))

    def _say(self, why: str) -> None:
        self.why = why
        LOG.info("%s is captured at each start: %s", self._request.name, why)


@dataclass(frozen=True, slots=True)
class _Made:
    """What is made of a captured step."""

    plan: Plan  # scheduled
    hardware: Hardware  # that it was scheduled for
    others: tuple[Plan | None, ...] = ()  # see ``CompileResult``
    rank_classes: Mapping[int, Sequence[int]] | None = None  # see ``CompileResult``
    partners: tuple[Partners, ...] = ()  # see ``CompileResult``

    @property
    def folded(self) -> FoldedPlan | None:
        """The plan of one rank of each class; None if it is one of all ranks."""
        if self.rank_classes is None:
            return None
        return FoldedPlan(self.plan, self.rank_classes, partners=self.partners)


def _compiled(request: CompileRequest, captured: Capture, asked: StepRequest, doing: Progress) -> _Made:
    """The scheduled plan of a captured step.

    It depends on what ``_plan_depends_on`` gives, on ``captured`` and ``asked``, and on nothing else.
    """
    asked = following(captured, asked)
    budget = memory_limit(request.goal.budget, asked.devices.hardware.memory_bytes)
    open_to_choice = open_choices(captured, asked, request.micro_batches is None, budget)
    if may_split_state(asked.preferences, asked) and not open_to_choice.zero:  # they were marked in vain
        captured = UNMARKED.captured(captured)
    if not open_to_choice.any:
        return _made(request, captured, asked, request.schedule, doing)
    silent = replace(asked, listeners=replace(asked.listeners, doing=lambda _: None))
    search = PlanSearch(
        captured,
        silent,
        open_to_choice,
        partial(_drafted, request),
        budget,
        request.beside,
        doing,
        least=1 + SHOWN if request.looked_at else 1,
        may_stop=request.looked_at is not None,
    )
    choice, made = _chosen(request, search, asked, doing)
    notes = (*made.plan.notes, choice_note(choice), *again_notes(choice))
    plan = replace(made.plan, notes=notes, considered=considered(choice))
    if request.looked_at is not LookedAt.ALL:
        return replace(made, plan=plan)
    others: list[Plan | None] = []
    with contextlib.suppress(KeyboardInterrupt):  # which spares people the pages of the others that are left
        for one in choice.others[:SHOWN]:
            doing(f"the page of {one.strategy}")
            others.append(_page_of(request, search, one))
    others += [None] * (len(plan.considered) - 1 - len(others))  # of those that were only estimated
    return replace(made, plan=plan, others=tuple(others))


def _page_of(request: CompileRequest, search: PlanSearch, one: Compared) -> Plan | None:
    """The plan of a strategy that was not chosen; None if there is none, as drafts of a plan may fit that does not."""
    if one.forecast is None:
        return None
    wanted, marked = search.request_of(one.strategy), search.captured_for(one.strategy)
    with contextlib.suppress(*REFUSALS):
        return _scheduled(request, marked, wanted, request.schedule, wanted.listeners.doing)[0]
    return None


def _chosen(request: CompileRequest, search: PlanSearch, asked: StepRequest, doing: Progress) -> tuple[Choice, _Made]:
    """The choice of a search, and its plan.

    One whose forecast is of drafts is kept if the whole plan fits the memory; else the next best takes its place.
    """

    def make(choice: Choice) -> _Made:
        chosen = replace(choice.request, listeners=asked.listeners)
        return _made(request, choice.captured, chosen, choice.schedule, doing)

    with _located_errors(request):
        choice = search.run()
    return search.settled(
        choice, make, lambda made: forecast(made.folded or _placed(request, made.plan), made.hardware)
    )


def _made(
    request: CompileRequest, captured: Capture, asked: StepRequest, name: ScheduleName, doing: Callable[[str], None]
) -> _Made:
    """The scheduled plan of a captured step with nothing left to choose; for a forecast of one rank of each class."""
    if request.looked_at in (LookedAt.FORECAST, LookedAt.CLASSES):
        folded, hardware = _folded(request, captured, asked, name)
        return _Made(folded.plan, hardware, rank_classes=folded.rank_classes, partners=folded.partners)
    return _Made(*_scheduled(request, captured, asked, name, doing))


@dataclass(frozen=True, slots=True)
class _Foldable:
    """What is needed to schedule the plan of one rank of each class, as it would run where the ranks are."""

    make: Callable[[Variant], FoldedPlan]
    hardware: Hardware
    memory: Mapping[int, int] | None
    room: Mapping[int, int] | None


def _folded(
    request: CompileRequest, captured: Capture, asked: StepRequest, name: ScheduleName
) -> tuple[FoldedPlan, Hardware]:
    """The plan of a captured step, of one rank of each class: for a forecast."""
    one = _foldable(request, captured, asked, shown=request.looked_at is LookedAt.CLASSES)
    found = schedule_folded(one.make, one.hardware, one.memory, name, one.room, request.beside)
    return replace(found, plan=found.on_planes), one.hardware


def _drafted(
    request: CompileRequest, captured: Capture, asked: StepRequest, name: ScheduleName
) -> tuple[Forecast, int]:
    """The forecast of ``_folded``, to be compared with others, and the bytes that all ranks send.

    Ranks that differ by little count as alike, and nothing is proved.
    """
    one = _foldable(request, captured, asked, ALIKE)
    return forecast_draft(one.make, one.hardware, one.memory, name, one.room, request.beside)


def _foldable(
    request: CompileRequest, captured: Capture, asked: StepRequest, alike: float = 0.0, shown: bool = False
) -> _Foldable:
    devices, budget = asked.devices, asked.preferences.goal.budget
    with _located_errors(request):
        folded = fold_captured(captured, asked, alike, shown)

    @functools.cache
    def make(variant: Variant) -> FoldedPlan:
        made = folded.cut(replace(variant, joined=request.mode.inductor))
        return replace(made, plan=replace(_only_used(made.plan), mode=request.mode), spots=request.locations)

    plan = make(PLAIN).plan
    if not request.train:
        _only_predicts(plan, request.function)
    hardware = devices.hardware
    if request.target.measure:
        hardware = request.target.hardware(devices.type, lambda: (plan, make(Variant(weights=True)).plan))
    room = room_beside_variables(plan, budget, hardware.memory_bytes, request.fixed.values())
    return _Foldable(make, hardware, left_for_registers(plan, budget), room)


def _scheduled(
    request: CompileRequest, captured: Capture, asked: StepRequest, name: ScheduleName, doing: Callable[[str], None]
) -> tuple[Plan, Hardware]:
    """The plan of a captured step in a schedule, with nothing left to choose, and the hardware that it is for."""
    devices, budget = asked.devices, asked.preferences.goal.budget
    if asked.preferences.micro_batches > 1:
        expect_programs()  # which say how many slots registers have that hold several tokens of a step
    with _located_errors(request):
        folded = fold_captured(captured, asked, shown=True, runs=True)
    try:
        return _scheduled_variants(request, folded.cut, devices, budget, name, doing)
    except UnlikeError:
        LOG.info("%s: ranks that hold equally much communicate otherwise: each is compiled by itself", request.name)
    with _located_errors(request):
        whole = lower_captured(captured, asked)
    return _scheduled_variants(request, whole.cut, devices, budget, name, doing)


def _scheduled_variants(
    request: CompileRequest,
    cut: Callable[[Variant], Plan | FoldedPlan],
    devices: TargetDevices,
    budget: float | None,
    name: ScheduleName,
    doing: Callable[[str], None],
) -> tuple[Plan, Hardware]:
    """The best variant of a step that is cut by ``cut``, and the hardware that it is for."""
    doing("cut")

    @functools.cache
    def make(variant: Variant) -> FoldedPlan:
        made = cut(replace(variant, joined=request.mode.inductor))
        folded = made if isinstance(made, FoldedPlan) else every_rank(made)
        return replace(folded, plan=replace(_only_used(folded.plan), mode=request.mode), spots=request.locations)

    plan = make(PLAIN).plan
    if not request.train:
        _only_predicts(plan, request.function)
    hardware = devices.hardware
    if request.target.measure:
        variants = (PLAIN, Variant(weights=True))
        hardware = request.target.hardware(devices.type, lambda: tuple(make(v).plan for v in variants), doing)
    doing("schedule")
    memory = left_for_registers(plan, budget)
    room = room_beside_variables(plan, budget, hardware.memory_bytes, request.fixed.values())
    try:
        return schedule(make, hardware, memory, name, room, request.beside), hardware
    except DeadlockError as error:
        raise _deadlock_error(plan, error) from error


def _placed(request: CompileRequest, plan: Plan) -> Plan:
    """A plan with the data planes that its communications have where the ranks are, to be forecast."""
    return with_planes(plan, request.locations) if request.locations else plan


def _plan_depends_on(request: CompileRequest, captured: Capture, asked: StepRequest) -> dict[str, tuple[Any, str]]:
    """All that ``_compiled`` depends on, beside code; torch's modes are in force where passes trace decompositions."""
    target = request.target
    measured = (target.measure, target.threads or torch.get_num_threads()) if target.measure else None
    return {
        **step_parts(captured, asked),
        "how the job is to run": (
            (request.train, request.goal, request.micro_batches, request.schedule, request.mode, measured),
            f"compile={str(request.mode)!r}",
        ),
        "whether collectives run while ranks compute": (request.beside_in_budget, ""),
        WHERE: (request.compared_on, ""),
        "modes of torch": (torch_modes(), ""),
    }  # fmt: skip


def _kept(
    kept: PlanStore, key: PlanKey | None, request: CompileRequest, captured: Capture, asked: StepRequest
) -> KeptPlan | None:
    """The plan of this key, if one is kept that is legal, cannot wait for ever, and is one of this step.

    Raises PlanError if the script has named a plan for the job (``flow.load_plan``) that does not fit.
    """
    interface = StepInterface.of(captured)
    named = kept.named(request.name, key, partial(_checked_plan, request, interface, asked))
    return named if named is not None or key is None else _kept_plan(kept, key, request, interface, asked)


def _kept_plan(
    kept: PlanStore, key: PlanKey, request: CompileRequest, interface: StepInterface, asked: StepRequest
) -> KeptPlan | None:
    return kept.find(key, partial(_checked_plan, request, interface, asked))


def _checked_plan(request: CompileRequest, interface: StepInterface, asked: StepRequest, plan: Plan) -> Plan:
    """A plan that was read, if it is legal, cannot wait for ever, and is one of this step; else raises PlanError."""
    prove(check_fits(verify(plan), interface, asked))
    if plan.mode != request.mode or (not request.train and written_by(plan)):
        raise PlanError("it runs otherwise, or changes state")
    return plan


@contextlib.contextmanager
def _located_errors(request: CompileRequest) -> Iterator[None]:
    """Add the function's name to errors of capture, and the arguments if the function's own code failed."""
    try:
        yield
    except (CaptureError, CallError) as error:
        cause, specs = error.__cause__, request.arguments.specs
        error = located(error, request.function)
        if isinstance(error, CallError) or cause is None or isinstance(cause, DATA_DEPENDENT) or not specs:
            raise error from cause
        with_arguments = f"while {request.name} was captured with these arguments:\n{shapes_text(specs)}"
        raise CallError(f"{error}\n  {with_arguments}") from cause


@forgotten_at_the_end()
def compile_pretended(request: CompileRequest, world: int) -> tuple[ShownPlan, StepEffects]:
    """The plan for a pretended cluster, and the effects of the step.

    Ranks of one node, as the hardware says, are assumed to share memory.  Where nothing says on which kind of device it
    computes, it is that of the hardware file, whatever this machine has.
    """
    if request.target.file:
        assumed = request.target.hardware("").device_type
        request = replace(request, defaults=replace(request.defaults, assumed=assumed))
    on = kinds(request, world)
    hardware = replace(request.target, measure=False).hardware(_main(on))
    size = hardware.node_size or world
    gpus = [f"GPU {rank}" * (kind == "cuda") for rank, kind in enumerate(on)]
    spots = rank_locations([f"node {rank // size}" for rank in range(world)], on, gpus, gpus)
    beside = bool(request.target.file) or "cuda" in on
    request = replace(request, beside=beside, locations=numbered(spots))
    made = make_plan(request, world, told=False)
    hardware = made.hardware or hardware  # which may have been measured now
    if made.rank_classes is not None:
        plan = with_planes(made.plan, spots)
        shown = ShownPlan(plan, rank_classes=made.rank_classes, partners=made.partners, hardware=hardware)
        return shown, made.effects
    placed = [None if plan is None else verify(choose_planes(plan, spots, hardware)) for plan in made.others]
    shown = ShownPlan(verify(choose_planes(made.plan, spots, hardware)), tuple(placed), hardware=hardware)
    return shown, made.effects


def left_for_registers(plan: Plan, budget: float | None) -> dict[int, int] | None:
    """Rank → the bytes of the memory budget that its variables leave for registers; None without a budget.

    None also for a single micro-batch: its layout was chosen within the budget, and no order would need less memory.
    """
    if budget is None or plan.pieces == 1:
        return None
    return {rank: int(budget) - taken for rank, taken in variable_bytes(plan).items()}


def memory_limit(budget: float | None, memory: int | None) -> float | None:
    """The bytes that a device may hold: its budget, or all but a part of its ``memory``; None if none is known."""
    limits = [x for x in (budget, None if memory is None else memory * USABLE) if x is not None]
    return min(limits, default=None)


def room_beside_variables(
    plan: Plan, budget: float | None, memory: int | None, known: Iterable[Variable]
) -> dict[int, int] | None:
    """Rank → the bytes that variables, its own and those ``known`` of other jobs, leave of its memory.

    That is the memory budget, or all but a part of the device's ``memory``, whichever is less, in bytes.  None if
    neither is known.
    """
    limit = memory_limit(budget, memory)
    if limit is None:
        return None
    own = {v.name for v in plan.variables}
    others = tuple(v for v in known if v.name not in own)
    ranks = range(plan.world) if others else None  # those that are alike in the plan may hold unlike parts of others
    taken = variable_bytes(replace(plan, variables=(*plan.variables, *others)), ranks)
    return {rank: int(limit) - nbytes for rank, nbytes in taken.items()}


def hints_of(state: ScriptState) -> ResolvedHints:
    """The hints for the modules that the search found, with its names of variables (tied ones have several)."""
    return resolve(state.modules, {id(h.tensor): h.name for h in state.held.values()})


def kinds(request: CompileRequest, world: int) -> tuple[str, ...]:
    """The kind of device of each rank; see ``device_assignment.kinds_of``."""
    held = {h.tensor.device.type for h in request.state.held.values()}
    homes = request.hints.homes.values()
    return kinds_of(request.hints.placements | request.places, request.kinds, held, world, request.defaults, homes)


def own_devices(request: CompileRequest, settings: Settings) -> RankDevices:
    """This rank's devices, as it reports them to the master; it keeps the GPU that an earlier job gave it."""
    try:
        on = kinds(request, settings.world)
        return look_at_devices(on[settings.rank], settings, request.defaults.settled or on)
    except LayoutError:  # the master finds the same error and reports it to all ranks
        return NO_DEVICES


def _check_scopes(plan: Plan, kinds: Sequence[str]) -> None:
    """Raise LayoutError if scopes in the function place ops on a kind of device that no rank has."""
    for placement in [v.placement for v in plan.variables] + [r.placement for r in plan.results]:
        if placement.type not in kinds:
            there = " and ".join(sorted(set(kinds)))
            raise LayoutError(
                f"job {plan.name!r} places on {placement}, and the ranks of this run compute on {there}: "
                f"start with --device-type {placement.type}, or place on what there is"
            )


def _deadlock_error(plan: Plan, why: DeadlockError) -> DeadlockError:
    """The error for a plan whose proof failed, which is a bug; writes the plan's text to a new temporary file."""
    number, path = tempfile.mkstemp(prefix="actorflow-plan-", suffix=".txt")
    with os.fdopen(number, "w") as file:
        file.write(to_text(plan))
    return DeadlockError(
        f"job {plan.name!r} was not started: this is a bug of actorflow, which made a plan that would wait for ever. "
        f"The plan is kept in {path}: please report the bug, and add that file. Its proof says:\n{why}"
    )


def _main(kinds: Sequence[str]) -> str:
    """The kind of device for which costs are estimated, and on which tensors without a placement are."""
    return "cuda" if "cuda" in kinds else "cpu"


def _only_used(plan: Plan) -> Plan:
    """The plan with the variables that its actors name."""
    used = {x.name for a in plan.actors for x in (*a.operands, *a.targets) if isinstance(x, OfVariable)}
    return replace(plan, variables=tuple(v for v in plan.variables if v.name in used))


def _only_predicts(plan: Plan, function: Callable[..., Any]) -> None:
    """Raise StateError if the plan of a predict job changes state."""
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


def _unpack(data: bytes, name: str) -> tuple[dict[str, Any], bytes]:
    """What ``_pack`` was given.  Raises the error of compiling where that failed."""
    size = int.from_bytes(data[:8], "big")
    head = json.loads(data[8 : 8 + size])
    if "error" in head:
        kind = getattr(errors, head["error"], errors.ClusterError)
        raise kind(f"rank 0 could not compile {name}: {head['text']}")
    return head, data[8 + size :]


def _received(head: Mapping[str, Any], shared: bytes, own: bytes, rank: int) -> RankPlan:
    return RankPlan(
        verify(join(shared, own, rank)),
        StepEffects.from_json(head["effects"]),
        frozenset(head["lent"]),
        head["differing"],
        head["seed"],
        tuple(head["kinds"]),
        frozenset(head["written"]),
        tuple(head["gone"]),
        head["freely"],
    )
