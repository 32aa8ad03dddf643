"""A step compiled for one rank of each class is the plan of all ranks, scheduled and folded."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import actorflow as flow
from actorflow.script_state.search import find_state
from actorflow_compiler.boxing.aligned import AlignedHop, aligned_route
from actorflow_compiler.boxing.group_exchanges import GroupExchanges
from actorflow_compiler.boxing.routes import Hop, HopKind, route
from actorflow_compiler.capture.capture import TensorArgument
from actorflow_compiler.capture.request import Preferences, StepRequest, TargetDevices, UserStep
from actorflow_compiler.compile import capture_step, fold_captured, lower_captured
from actorflow_compiler.core.errors import ActorflowError, LayoutError
from actorflow_compiler.core.hardware import Hardware, Link
from actorflow_compiler.core.placement import Placement, placement
from actorflow_compiler.core.sbp import B, NdSbp, P, Sbp, Split
from actorflow_compiler.cutting.listed_ranks import RankClasses
from actorflow_compiler.hints.goal import goal_of
from actorflow_compiler.hints.hints import resolve
from actorflow_compiler.plan.folded import FoldedPlan
from actorflow_compiler.plan.plan import Exchange, FromRegister, Plan, Send
from actorflow_compiler.plan.rank_differences import UnlikeError
from actorflow_compiler.plan.unfold import unfold_ranks
from actorflow_scheduler.cost import max_workspace_bytes, moved_bytes, variable_bytes
from actorflow_scheduler.forecast import forecast, run_until_steady
from actorflow_scheduler.rank_classes import fold
from actorflow_scheduler.schedule import schedule, schedule_folded
from actorflow_scheduler.timeline import Timeline, nanoseconds
from models import small_gpt

NODES = Hardware(flops_per_s=1e12, bytes_per_s=1e9, node_size=4, inside=Link(1e10, 1e-6), name="nodes of four")


def request_of(
    model: nn.Module, loss: Callable[..., Tensor], batch: Sequence[TensorArgument], world: int, **options: object
) -> StepRequest:
    """A training step of a model, with hints as the options say."""
    mode, stages, zero = options.get("mode", "data"), options.get("stages", 1), options.get("zero", 0)
    if stages != 1:
        flow.place(model, stages=stages)
    if "placement" in options:
        flow.place(model, {"": options["placement"]})
    if zero:
        flow.zero(model, stage=zero)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(*arguments: Tensor) -> Tensor:
        value = loss(model, *arguments)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value

    state = find_state(step, model=model, optimizer=optimizer)
    return StepRequest(
        UserStep("train", lambda given: [step(*given)], batch, state, train=True),
        TargetDevices(world, "cpu", options.get("hardware", NODES)),
        Preferences(resolve(state.modules), options.get("pieces", 1), goal_of(mode, None)),
    )


class _Experts(nn.Module):
    """A mixture of four experts, each sample weighted over all of them, behind a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.gate = nn.Linear(16, 4)
        self.weight = nn.Parameter(torch.randn(4, 16, 32))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        each = torch.einsum("bi,eio->beo", x, self.weight).relu()
        return self.head((each * self.gate(x).softmax(-1)[:, :, None]).sum(1))


def _text(size: int) -> list[TensorArgument]:
    return [TensorArgument(name, (size, 8), torch.int64, True) for name in ("tokens", "targets")]


def _rows(size: int) -> list[TensorArgument]:
    return [TensorArgument("x", (size, 16), torch.float32, True), TensorArgument("y", (size,), torch.int64, True)]


def _cross_entropy(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def _gpt(world: int, size: int = 8, **options: object) -> StepRequest:
    return request_of(small_gpt(), _cross_entropy, _text(size), world, **options)


def _mlp(world: int, size: int = 8, width: int = 32, **options: object) -> StepRequest:
    layers = [nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    return request_of(nn.Sequential(*layers), _cross_entropy, _rows(size), world, **options)


def _wide(world: int) -> StepRequest:
    """ZeRO beside a tensor axis that splits the only dim that ZeRO could split, of a weight of many rows."""
    layers = [nn.Linear(3, 1 << 16), nn.ReLU(), nn.Linear(1 << 16, 10)]
    batch = [
        TensorArgument("x", (world, 3), torch.float32, True), TensorArgument("y", (world,), torch.int64, True),
    ]  # fmt: skip
    mode = {"data": world // 2, "tensor": 2}
    return request_of(nn.Sequential(*layers), _cross_entropy, batch, world, mode=mode, zero=1)


QUICK: dict[str, Callable[[], StepRequest]] = {
    "zero 3, uneven": lambda: _mlp(4, zero=3, width=34),
    "zero 1 of what a tensor axis splits": lambda: _wide(8),
}
LONG: dict[str, Callable[[], StepRequest]] = {
    "stages of meshes": lambda: _mlp(8, 8, mode={"data": 2, "tensor": 2}, stages=2, pieces=4),
    "data, an uneven batch": lambda: _mlp(4, 6),
    "data and tensor on two nodes, zero 1": lambda: _mlp(8, mode={"data": 2, "tensor": 4}, zero=1),
    "stages that do not fit the nodes": lambda: _mlp(12, 12, stages=2, pieces=2),
    "experts": lambda: request_of(_Experts(), _cross_entropy, _rows(8), 4, mode="tensor"),
    "zero 2": lambda: _gpt(4, zero=2),
    "zero 3 in stages": lambda: _gpt(8, stages=2, pieces=2, zero=3),
    "a vocabulary that is split": lambda: _gpt(4, mode="tensor"),
    "data and tensor": lambda: _gpt(8, mode={"data": 2, "tensor": 4}),
    "around a ring": lambda: _gpt(4, mode={"ring": 4}),
    "data, around uneven rings": lambda: _gpt(6, mode={"data": 2, "ring": 3}),
    "auto": lambda: _gpt(4, mode="auto"),
    "stages of meshes, zero 1": lambda: _gpt(8, mode={"data": 2, "tensor": 2}, stages=2, pieces=4, zero=1),
    "four stages": lambda: _gpt(8, stages=4, pieces=4),
    "ranks that differ in speed": lambda: _mlp(4, hardware=dataclasses.replace(NODES, speeds=(1.0, 0.5, 1.0, 0.5))),
    "weights": lambda: _mlp(4, 12, placement=placement("cpu", [0, 1, 2, 3], [2, 1, 2, 1]), zero=3),
    "weights of a mesh": lambda: _gpt(4, 12, placement=placement("cpu", [[0, 1], [2, 3]], [[2, 1], [2, 1]])),
    "experts, data": lambda: request_of(_Experts(), _cross_entropy, _rows(12), 8, stages=1),
    "experts, data and tensor": lambda: request_of(
        _Experts(), _cross_entropy, _rows(12), 6, mode={"data": 3, "tensor": 2}
    ),
}


def content(folded: FoldedPlan) -> object:
    """All of a folded plan that is scheduled and forecast, with numbers in the order of first use."""
    plan = folded.plan
    actor = {a.id: i for i, a in enumerate(plan.actors)}
    register = {r.id: i for i, r in enumerate(plan.registers)}
    comm: dict[object, int] = {}

    def place(one: object) -> object:
        return dataclasses.replace(one, register=register[one.register]) if hasattr(one, "register") else one

    return (
        [
            dataclasses.replace(
                a,
                id=actor[a.id],
                body=None,
                comm=a.comm and dataclasses.replace(a.comm, id=comm.setdefault((type(a.comm), a.comm.id), len(comm))),
                operands=tuple(map(place, a.operands)),
                targets=tuple(map(place, a.targets)),
            )
            for a in plan.actors
        ],
        [
            dataclasses.replace(
                r,
                id=register[r.id],
                producer=actor[r.producer],
                readers=tuple(dataclasses.replace(read, actor=actor[read.actor]) for read in r.readers),
            )
            for r in plan.registers
        ],
        [dataclasses.replace(o, actors=tuple(actor[a] for a in o.actors)) for o in plan.orders],
        (plan.ranks, plan.variables, plan.results, plan.notes, plan.summary.flops, plan.summary.redundant_flops),
        {listed: tuple(ranks) for listed, ranks in folded.rank_classes.items()},
    )


def by_name(plan: Plan) -> dict[str, object]:
    """All of a plan that is run or shown, with actors by their names, and registers by their actors."""
    name = {a.id: a.name for a in plan.actors}
    assert len({*name.values()}) == len(plan.actors)
    ends = {r.id: (name[r.producer], plan.home(r), tuple(t.name for t in r.tensors), r.fill) for r in plan.registers}
    comms: dict[int, list[str]] = {}
    for a in plan.actors:
        if a.comm is not None:
            comms.setdefault(a.comm.id, []).append(a.name)

    def place(one: object) -> object:
        return (ends[one.register], one.index) if isinstance(one, FromRegister) else one

    return {
        "actors": {
            a.name: (
                dataclasses.replace(
                    a, id=0, body=None, operands=(), targets=(), comm=a.comm and dataclasses.replace(a.comm, id=0)
                ),
                None if a.body is None else plan.bodies[a.body],
                [*map(place, a.operands)],
                [*map(place, a.targets)],
            )
            for a in plan.actors
        },
        "registers": Counter(
            (
                dataclasses.replace(r, id=0, producer=0, readers=()),
                ends[r.id],
                tuple(sorted((name[read.actor], read.firings) for read in r.readers)),
            )
            for r in plan.registers
        ),
        "orders": {(o.rank, o.queue): [name[a] for a in o.actors] for o in plan.orders},
        "communications": {frozenset(names) for names in comms.values()},
        "origins": {
            name[s.actor]: [plan.origins.places[p] if p >= 0 else None for p in s.places] for s in plan.origins.steps
        },
        "rest": (plan.world, plan.pieces, plan.ranks, plan.variables, plan.results, plan.constants, plan.notes),
        "summary": plan.summary,
    }  # fmt: skip


def check(request: StepRequest) -> tuple[int, int]:
    """Compare both ways; returns the number of classes, and that of ranks that were listed before times are known."""
    captured, hardware = capture_step(request), request.devices.hardware
    whole = schedule(lower_captured(captured, request).cut, hardware)
    step = fold_captured(captured, request, shown=True, runs=True)
    assert by_name(schedule(step.cut, hardware)) == by_name(whole)
    step = fold_captured(captured, request)
    folded = schedule_folded(step.cut, hardware)
    expected = fold(whole, nanoseconds(whole, hardware))
    assert content(folded) == content(expected)
    ours, theirs = forecast(folded, hardware), forecast(whole, hardware)
    assert [tuple(r.ranks) for r in ours.ranks] == [tuple(r.ranks) for r in theirs.ranks]
    same = [dataclasses.replace(f, ranks=[dataclasses.replace(r, ranks=()) for r in f.ranks]) for f in (ours, theirs)]
    assert same[0] == same[1]
    return len(folded.rank_classes), len(step.cut().rank_classes)


@pytest.mark.parametrize("name", QUICK)
def test_the_folded_compile_is_the_fold_of_the_whole(name: str) -> None:
    check(QUICK[name]())


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_the_folded_compile_of_larger_models_is_the_fold_of_the_whole(name: str) -> None:
    check(LONG[name]())


@dataclasses.dataclass(frozen=True)
class _Drawn:
    """A training step of a small model on some hardware."""

    model: str
    width: int
    rows: int  # of the batch
    options: dict[str, object]
    data: int
    tensor: int
    stages: int

    def request(self) -> StepRequest:
        mode = {"data": self.data, "tensor": self.tensor} if self.tensor > 1 else "data"
        options = {"mode": mode, "stages": self.stages, **self.options}
        world = self.data * self.tensor * self.stages
        if self.model == "gpt":
            return _gpt(world, self.rows, **options)
        return _mlp(world, self.rows, self.width, **options)


@st.composite
def _steps(draw: st.DrawFn) -> _Drawn:
    """Steps on meshes of data × tensor × stages, with nodes that are cut anywhere and may differ in speed."""
    data, tensor, stages = draw(
        st.sampled_from(
            [shape for shape in itertools.product((1, 2, 3, 4), (1, 2, 3), (1, 2)) if 2 <= math.prod(shape) <= 12]
        )
    )
    pieces = draw(st.sampled_from((1, 2, 4) if stages > 1 else (1, 2)))
    world, node = data * tensor * stages, draw(st.sampled_from((2, 3, 4, 8)))
    speeds = draw(st.lists(st.sampled_from((1.0, 1.0, 0.5)), min_size=-(-world // node), max_size=-(-world // node)))
    hardware = dataclasses.replace(
        NODES,
        node_size=draw(st.sampled_from((node, None))),
        speeds=tuple(speeds[rank // node] for rank in range(world)) if draw(st.booleans()) else (),
    )
    return _Drawn(
        draw(st.sampled_from(("mlp", "mlp", "gpt"))),
        draw(st.sampled_from((8, 12, 17, 32, 36))),
        pieces * draw(st.integers(data, 2 * data + 1)),
        {"zero": draw(st.integers(0, 3)), "pieces": pieces, "hardware": hardware},
        data,
        tensor,
        stages,
    )


def _of_every_rank(plan: Plan, hardware: Hardware) -> tuple[float, dict[int, tuple[int, float]]]:
    """Simulate all ranks of a plan: seconds of an iteration; rank → its peak bytes and those that it moves."""
    firings, cycle = run_until_steady(plan, nanoseconds(plan, hardware), plan)
    run = Timeline(plan, firings.iterations, firings.fired, firings.ends, firings.durations)
    over = cycle or max(1, firings.iterations // 2)
    ends = (0, *run.iteration_ends)
    workspace, variables, peaks = max_workspace_bytes(plan), variable_bytes(plan), run.peak_bytes
    moved = _moved_by_rank(plan)
    found = {rank: (peaks[rank] + workspace[rank] + variables[rank], moved[rank]) for rank in range(plan.world)}
    return (ends[-1] - ends[-1 - over]) / over / 1e9, found


def _partners(folded: FoldedPlan) -> set[tuple[str, tuple[int, ...]]]:
    return {(one.label, group) for one in folded.partners for group in one.groups}


def _moved_by_rank(plan: Plan) -> Counter[int]:
    """Rank → the bytes that it sends, or receives if those are more, in an iteration."""
    moved: Counter[int] = Counter()
    for actor in plan.actors:
        moved[actor.rank] += actor.rate * moved_bytes(plan, actor)
    return moved


def check_simulated(drawn: _Drawn) -> None:
    """The forecast of one rank of each class is what a simulation of every rank says of each of them."""
    request = drawn.request()
    captured, hardware = capture_step(request), request.devices.hardware
    try:
        whole = schedule(lower_captured(captured, request).cut, hardware)
    except ActorflowError as error:
        with pytest.raises(type(error)):
            schedule_folded(fold_captured(captured, request).cut, hardware)
        return
    unfolded = schedule(fold_captured(captured, request, shown=True, runs=True).cut, hardware)
    assert by_name(unfolded) == by_name(whole)
    folded = schedule_folded(fold_captured(captured, request).cut, hardware)
    found = forecast(folded, hardware)
    period, ranks = _of_every_rank(whole, hardware)
    assert found.period == period
    moved = _moved_by_rank(folded.plan)
    total = {one.ranks[0]: one.total for one in found.ranks}
    assert {
        rank: (total[listed], moved[listed]) for listed, alike in folded.rank_classes.items() for rank in alike
    } == ranks
    if len(folded.rank_classes) < whole.world:
        assert _partners(folded) == {(a.comm.label, a.comm.ranks) for a in whole.actors if a.comm is not None}


# ranks 0 and 3 move 156 and 180 bytes in a reduce-scatter, which takes about as long
_UNEVEN = _Drawn(
    "mlp",
    width=8,
    rows=4,
    options={"zero": 1, "pieces": 1, "hardware": dataclasses.replace(NODES, node_size=2)},
    data=4,
    tensor=3,
    stages=1,
)


@settings(max_examples=2)
@given(_steps())
@example(_UNEVEN)
def test_the_forecast_of_one_rank_of_each_class_is_that_of_every_rank(drawn: _Drawn) -> None:
    check_simulated(drawn)


@pytest.mark.slow
@settings(max_examples=80)
@given(_steps())
def test_the_forecast_of_one_rank_of_each_class_of_many_steps_is_that_of_every_rank(drawn: _Drawn) -> None:
    check_simulated(drawn)


def test_a_draft_takes_ranks_whose_parts_differ_by_little_for_alike() -> None:
    """Of 1,027 rows, the first three of four ranks hold one more; the listed one holds the most."""
    captured, request = _captured(_mlp(4, width=1027, zero=1))
    drafts, exact = (fold_captured(captured, request, alike) for alike in (0.05, 0.0))
    assert len(drafts.cut().rank_classes) < len(exact.cut().rank_classes)
    ours, theirs = (forecast(schedule_folded(step.cut, NODES, proven=step is exact), NODES) for step in (drafts, exact))
    assert ours.period == pytest.approx(theirs.period, rel=0.05)
    assert max(r.total for r in ours.ranks) == pytest.approx(max(r.total for r in theirs.ranks), rel=0.02)
    assert len(fold_captured(captured, request, 1e-4).cut().rank_classes) == len(exact.cut().rank_classes)


@pytest.mark.slow
def test_ranks_that_are_alike_are_never_made() -> None:
    step = fold_captured(*_captured(_mlp(512, 1024, mode={"data": 64, "tensor": 8}, zero=0)))
    plan = step.cut()
    assert len(plan.rank_classes) <= 2
    assert sorted(r for ranks in plan.rank_classes.values() for r in ranks) == list(range(512))
    assert not any(isinstance(a.comm, Send) for a in plan.plan.actors)


def test_zero_of_what_a_tensor_axis_splits_moves_nothing_between_tensor_groups_however_many_ranks_there_are() -> None:
    ranks = 2048
    plan = fold_captured(*_captured(_wide(ranks))).cut().plan
    assert "S(0,2)" in {str(v.sbp[0]) for v in plan.variables if v.shape == (1 << 16, 3)}
    columns = {range(0, ranks, 2), range(1, ranks, 2)}  # the same part of the tensor axis
    moved = {a.comm.ranks for a in plan.actors if a.comm is not None and a.comm.label != "all_reduce"}
    assert moved
    assert moved <= {tuple(ranks) for ranks in columns}


def test_ranks_that_only_look_alike_are_compiled_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(16, 10)

    @flow.global_function(type="train", parallel="data")
    def train(x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    batch = torch.randn(8, 16), torch.randint(10, (8,))
    expected = flow.plan(train, *batch, devices=4).plan
    listed: list[int] = []

    def unlike(plan: FoldedPlan) -> Plan:
        listed.append(len(plan.rank_classes))
        if len(listed) == 1:
            raise UnlikeError
        return unfold_ranks(plan)

    monkeypatch.setattr(sys.modules["actorflow_scheduler.schedule"], "unfold_ranks", unlike)
    found = flow.plan(train, *batch, devices=4).plan
    assert listed == [1, 4]
    assert by_name(found) == by_name(expected)


def _captured(request: StepRequest) -> tuple[object, StepRequest]:
    return capture_step(request), request


# ---- hops by rules


ENTRIES: list[Sbp] = [B, P, Split(0), Split(1), Split(0, 2), Split(0, 4), Split(1, 3), Split(0, 1, 2)]
MESHES = [(2,), (3,), (4,), (2, 2), (2, 3), (2, 2, 2), (1, 3), (4, 2)]


@st.composite
def _boxings(draw: st.DrawFn) -> tuple[tuple[int, ...], Placement, NdSbp, Placement, NdSbp]:
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), max_size=3)))
    mesh = draw(st.sampled_from(MESHES))
    size = torch.Size(mesh).numel()
    weights = tuple(draw(st.sampled_from([(), tuple(range(n, 0, -1)), (*(1,) * (n - 1), 3)])) for n in mesh)
    source = Placement("cpu", tuple(range(size, 2 * size)), mesh, weights)
    target = draw(
        st.sampled_from(
            [source, Placement("cpu", tuple(range(size)), mesh, weights), placement("cpu", list(range(3 * size)))]
        )
    )
    fitting = [e for e in ENTRIES if not isinstance(e, Split) or e.dim < len(shape)]
    layouts = [tuple(draw(st.sampled_from(fitting)) for _ in place.hierarchy) for place in (source, target)]
    return shape, source, layouts[0], target, layouts[1]


@given(_boxings())
def test_a_hop_by_rules_is_the_hop_that_is_found_device_by_device(
    boxing: tuple[tuple[int, ...], Placement, NdSbp, Placement, NdSbp],
) -> None:
    try:
        expected = route(*boxing)
    except LayoutError:
        with pytest.raises(LayoutError):
            aligned_route(*boxing)
        return
    found = aligned_route(*boxing)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("kind", "source", "target", "target_sbp", "groups", "add", "elements"):
            assert getattr(ours, name) == getattr(theirs, name)
        if isinstance(ours, AlignedHop):
            targets, sources = range(theirs.target.size), range(theirs.source.size)
            assert [[*ours.sources(t)] for t in targets] == [[*theirs.sources(t)] for t in targets]
            assert [[*ours.targets(s)] for s in sources] == [[*theirs.targets(s)] for s in sources]
            for t in targets:
                assert [ours.pair(t, s) for s in sources] == [theirs.pair(t, s) for s in sources]


def _exchange(hop: Hop, rank: int, group: Sequence[int]) -> tuple[Exchange, ...]:
    """What a rank of a group sends and receives in a hop, found pair by pair."""
    if hop.kind is HopKind.ALL_REDUCE:
        return ()
    sources, targets = ([place.index(member) for member in group] for place in (hop.source, hop.target))
    me = group.index(rank)
    send = tuple(tuple(p.source for p in hop.pair(t, sources[me])) for t in targets)
    receive = tuple(tuple(p.target for p in hop.pair(targets[me], s)) for s in sources)
    return (Exchange(send, receive, hop.add),)


@given(_boxings())
def test_exchanges_that_are_made_once_for_ranks_that_are_alike_are_those_of_each_rank(
    boxing: tuple[tuple[int, ...], Placement, NdSbp, Placement, NdSbp],
) -> None:
    try:
        hops = (*route(*boxing), *aligned_route(*boxing))
    except LayoutError:
        return
    for hop in hops:
        found = GroupExchanges(hop, {})
        for group in hop.groups:
            assert [found.of(rank, group) for rank in group] == [_exchange(hop, rank, group) for rank in group]


@pytest.mark.parametrize(("source", "target"), [(Split(0), B), (P, Split(0))], ids=["all-gather", "reduce-scatter"])
def test_the_members_of_a_collective_of_equal_parts_share_one_exchange(source: Sbp, target: Sbp) -> None:
    place = placement("cpu", [list(range(16)), list(range(16, 32))])
    (hop,) = aligned_route((32, 8), place, (B, source), place, (B, target))
    found = GroupExchanges(hop, {})
    assert len(hop.groups) == 2
    assert len({id(one) for group in hop.groups for rank in group for one in found.of(rank, group)}) == 1


@pytest.mark.parametrize("alike", [0.0, 0.05])
def test_what_ranks_move_in_a_collective_divides_no_classes_where_parts_of_about_one_size_count_as_equal(
    alike: float,
) -> None:
    """Splits into three and into two overlap otherwise on each rank; all wait for the one that moves most."""
    place = Placement("cpu", tuple(range(6)), (3, 2))
    (hop,) = (h for h in route((512, 512), place, (P, Split(0)), place, (Split(0), P)) if h.parts)
    assert hop.groups
    classes = RankClasses(6, [place], Hardware().link, Hardware().speed, alike)
    classes.moves(hop)
    assert len(classes.listed().classes(6)) == (1 if alike else 6)
