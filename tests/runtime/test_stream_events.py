"""On a device that runs ahead nothing is read, overwritten or freed early, in whatever order queues finish."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actorflow.runtime import installed_plan
from actorflow.runtime.call import Call
from actorflow.runtime.stream_events import ActorStream, EventWaits, RegisterEvents, StreamEvents
from actorflow.testing.local_cluster import LocalCluster
from actorflow_compiler.capture.optimizer_state import FUSABLE
from actorflow_compiler.core.sbp import B
from actorflow_compiler.custom_ops.optimizers import SCALARS
from actorflow_compiler.custom_ops.random import SEED
from actorflow_compiler.hints.hints import zero
from actorflow_compiler.plan.plan import FromRegister, OfInput, OfPiece, OfVariable, Plan, Variable
from fewer import fewer
from gpt import GPT
from models import CASES, CONTEXT, setting
from runtime.fake_device import Bench, FakeMark, staged
from runtime.programs import ADD, V0, V1, V2, V3, V4, Program, body, on, spec, step
from runtime.trainings import LIBRARY, TAKE, batches, training, weights
from trained import LAYOUTS, Layout, plan_of

CALLS = 4
SECONDS = 60.0  # for a call
TANH = body(2, step("aten.mm.default", V0, V1, outs=[2]), step("aten.tanh.default", V2, outs=[3]), outputs=[3])
SAME = body(1, step("aten.view.default", V0, (2, 3), outs=[1]), outputs=[1])  # a view of what it takes
STEP = body(
    2,
    step("aten.t.default", V1, outs=[2]),
    step("aten.mm.default", V2, V1, outs=[3]),
    step("aten.mul.Tensor", V3, 0.001, outs=[4]),
    step("aten.sub.Tensor", V0, V4, outs=[5]),
    outputs=[5],
)

eagerness = st.sampled_from([0.0, 0.5, 3.0])


@dataclass(frozen=True)
class Ran:
    """What came out of some calls."""

    results: list[list[Tensor]]
    variables: list[Tensor]

    def tensors(self) -> list[Tensor]:
        """All of it."""
        return [*(t for results in self.results for t in results), *self.variables]


def run(
    *plans: Plan,
    calls: Sequence[dict[str, Any]],
    bench: Bench | None = None,
    library: dict[str, Callable[..., Any]] | None = LIBRARY,
    **values: Tensor,
) -> Ran:
    """Issue all calls, of each plan in turn, and read what came out when they are issued."""
    options: dict[str, Any] = {} if bench is None else {"device": bench.device, "stage": staged}
    with LocalCluster(*plans, variables=values, library=library, timeout=SECONDS, **options) as cluster:
        issued = [(cluster.issue(plan=n % len(plans), **call), n % len(plans)) for n, call in enumerate(calls)]
        results = [cluster.results(handles, plan) for handles, plan in issued]
        for worker in cluster.workers:
            worker.wait_all(SECONDS)
        return Ran(results, [cluster.variable(v.name) for v in plans[0].variables])


def same(found: Ran, expected: Ran) -> None:
    """Kernels may add in another order where memory begins elsewhere; nothing else may differ."""
    for a, b in zip(found.tensors(), expected.tensors(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def steps(count: int = CALLS) -> list[dict[str, Any]]:
    return [{"inputs": {"x": x, "t": t}, "scalars": {"step": -0.01}} for x, t in batches(count)]


def train(bench: Bench | None, plane: str = "memory", calls: int = CALLS) -> Ran:
    return run(training(plane=plane), calls=steps(calls), bench=bench, w0=weights()[0], w1=weights()[1])


@functools.cache
def trained_at_once() -> Ran:
    return train(None)


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("plane", ["memory", "inline", "shared"])
@given(seed=st.integers(0, 1 << 30), eager=eagerness)
@settings(max_examples=fewer(4), deadline=None)
def test_a_pipeline_trains_alike_in_whatever_order_queues_finish(plane: str, seed: int, eager: float) -> None:
    bench = Bench(seed, eager)
    same(train(bench, plane), trained_at_once())
    assert not bench.wrongs
    assert not bench.syncs


@st.composite
def programs(draw: st.DrawFn) -> Plan:
    """Actors on several queues of two ranks, micro-batch by micro-batch, with slots that are used again."""
    pieces = draw(st.integers(1, 3))
    p = Program(pieces)
    plane = draw(st.sampled_from(["memory", "inline", "shared"]))
    slots = st.integers(1, 3)
    orders: dict[tuple[int, str], list[str]] = {}
    readers: dict[int, list[str]] = {0: [], 1: []}  # of each rank's variable
    values: dict[int, list[FromRegister]] = {0: [], 1: []}
    p.variables += [Variable(f"w{r}", (3, 3), "float32", on(r), (B,), "parameter") for r in (0, 1)]

    def ordered(queue: str, rank: int) -> None:
        orders.setdefault((rank, queue), []).append(p.actors[-1].name)

    for rank in (0, 1):
        x = p.actor(
            f"x{rank}", OfInput("x"), OfPiece(), body=TAKE, out=[spec(2, 3)], kind="source", queue="source", rank=rank,
            rate=pieces, slots=draw(slots),
        )  # fmt: skip
        ordered("source", rank)
        values[rank] += x
    sent: set[FromRegister] = set()
    for number in range(draw(st.integers(1, 7))):
        rank = draw(st.integers(0, 1))
        one, other = (draw(st.sampled_from(values[rank])) for _ in range(2))
        what = draw(st.sampled_from(["add", "tanh", "same", "send"]))
        if what == "send" and one not in sent and p.actors[p.registers[one.register]["producer"]].rank == rank:
            sent.add(one)
            values[1 - rank] += p.send(one, to=1 - rank, rate=pieces, slots=draw(slots), plane=plane)
            ordered(f"send:{1 - rank}", rank)
            continue
        queue = draw(st.sampled_from(["compute", "comm", "side"]))
        operands: tuple[Any, ...] = {"add": (one, other), "tanh": (one, OfVariable(f"w{rank}"))}.get(what, (one,))
        made = p.actor(
            f"a{number}", *operands, body={"add": ADD, "tanh": TANH}.get(what, SAME), out=[spec(2, 3)], rank=rank,
            queue=queue, rate=pieces, slots=draw(slots),
        )  # fmt: skip
        ordered(queue, rank)
        values[rank] += made
        if what == "tanh":
            readers[rank].append(f"a{number}")
    tail: dict[tuple[int, str], list[str]] = {}
    for rank in (0, 1):
        last = values[rank][-1]
        (total,) = p.actor(
            f"sum{rank}", last, out=[spec(2, 3, combine="sum")], rank=rank, rate=pieces, fill=pieces, queue="side",
            slots=draw(slots),
        )  # fmt: skip
        ordered("side", rank)
        queue = draw(st.sampled_from(["compute", "side", "comm"]))
        w = f"w{rank}"
        p.actor(f"step{rank}", OfVariable(w), total, body=STEP, into=[OfVariable(w)], rank=rank, queue=queue)
        tail.setdefault((rank, queue), []).append(f"step{rank}")
        p.result(total, on(rank), (B,), (2, 3), rank=rank)
        tail.setdefault((rank, "sink"), []).append(p.actors[-1].name)
        for reader in readers[rank]:
            p.order(f"step{rank}", reader, firings=pieces, initial=1)
    return p.plan({key: orders.get(key, []) * pieces + tail.get(key, []) for key in {*orders, *tail}})


@given(plan=programs(), seed=st.integers(0, 1 << 30), eager=eagerness)
@settings(max_examples=fewer(20), deadline=None)
def test_random_plans_compute_alike_in_whatever_order_queues_finish(plan: Plan, seed: int, eager: float) -> None:
    calls = [{"inputs": {"x": x}} for x, _ in batches(CALLS)]
    values = {"w0": weights()[0], "w1": weights()[1]}
    bench = Bench(seed, eager)
    same(run(plan, calls=calls, bench=bench, **values), run(plan, calls=calls, **values))
    assert not bench.wrongs
    assert not bench.syncs


SMALL = {**CASES, "clipped gpt": replace(CASES["clipped gpt"], make=lambda: GPT(1, 32, 4, CONTEXT))}


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("mlp", Layout(2)),
        ("mlp", LAYOUTS["pipeline 2"]),
        pytest.param("cnn", Layout(2, 2), marks=pytest.mark.slow),
        # test_nccl_runs.py has a quicker one
        pytest.param("clipped gpt", Layout(2, 2, prepare=lambda model: zero(model, 3)), marks=pytest.mark.slow),
    ],
    ids=["data", "pipeline", "cnn", "zero"],
)
def test_real_trainings_are_alike_in_whatever_order_queues_finish(name: str, layout: Layout) -> None:
    case = SMALL[name]
    plan, values, optimizer = plan_of(case, layout, 12)
    group = optimizer.param_groups[0]
    read = SCALARS["actorflow.sgd" if "momentum" in group else "actorflow.adam"] if type(optimizer) in FUSABLE else ()
    scalars = {f"optimizer.0.{key}": setting(group, key) for key in read}
    calls = [
        {"inputs": dict(zip(case.names, batch, strict=True)), "scalars": {**scalars, SEED: number}}
        for number, batch in enumerate(case.batches([12] * 3))
    ]
    expected = run(plan, calls=calls, library=None, **values)
    for seed in range(2):
        bench = Bench(seed)
        same(run(plan, calls=calls, bench=bench, library=None, **values), expected)
        assert not bench.wrongs
        assert not bench.syncs  # the host decides nothing in the middle of a step


def test_plans_that_take_turns_see_each_others_variables() -> None:
    """Nothing but the turn of calls is between the training's writing of a variable and the reading of another plan."""
    reading = Program(name="reading")
    reading.variables += training().variables
    for rank in (0, 1):
        (y,) = reading.actor(
            f"y{rank}",
            OfVariable(f"w{rank}"),
            OfVariable(f"w{rank}"),
            body=ADD,
            out=[spec(3, 3)],
            rank=rank,
            queue="side",
        )
        reading.result(y, on(rank), (B,), (3, 3), rank=rank)
    calls = steps(6)
    values = {"w0": weights()[0], "w1": weights()[1]}
    expected = run(training(), reading.plan(), calls=calls, **values)
    for seed in range(4):
        bench = Bench(seed, 0.5 * (seed % 2))
        same(run(training(), reading.plan(), calls=calls, bench=bench, **values), expected)
        assert not bench.wrongs


def test_a_plan_that_does_nothing_on_a_rank_does_not_break_the_turns_of_those_around_it() -> None:
    values = {"w0": weights()[0], "w1": weights()[1]}
    plans = []
    for name, ranks in (("elsewhere", (0,)), ("reading", (0, 1))):
        p = Program(name=name)
        p.variables += training().variables
        for rank in ranks:
            weight = OfVariable(f"w{rank}")
            (y,) = p.actor(f"y{rank}", weight, weight, body=ADD, out=[spec(3, 3)], rank=rank, queue="side")
            p.result(y, on(rank), (B,), (3, 3), rank=rank)
        plans.append(p.plan())
    for seed in range(4):
        bench = Bench(seed, 0.5 * (seed % 2))
        run(training(), *plans, calls=steps(6), bench=bench, **values)
        assert not bench.wrongs


def forward() -> Plan:
    p = Program()
    (x,) = p.actor("x", OfInput("x"), out=[spec(4, 3)], kind="source", queue="source")
    (y,) = p.actor("F", x, x, body=ADD, out=[spec(4, 3)])
    p.result(y, on(0), (B,), (4, 3))
    return p.plan()


def launched(call: Call) -> None:
    """Wait until all of a call is in the device's queues."""
    call._until(lambda: call.fired, time.monotonic() + SECONDS, SECONDS, "its launch")


def test_the_host_runs_ahead_of_the_device_and_waits_only_for_what_it_reads() -> None:
    bench = Bench(eager=0)
    x = torch.ones(4, 3)
    with LocalCluster(forward(), library={}, device=bench.device, stage=staged) as cluster:
        calls = [cluster.issue({"x": x * n})[0] for n in range(3)]
        for call in calls:
            launched(call)
            assert not call.done
        assert bench.ran == 0
        assert torch.equal(calls[0].result(0), 2 * x * 0)
        assert torch.equal(calls[2].result(0), 2 * x * 2)
        calls[2].wait()
        assert all(call.done for call in calls)


def test_calls_in_flight_bound_how_far_the_host_runs_ahead() -> None:
    """The device does nothing unless somebody waits for it; who issues a call too many waits."""
    bench = Bench(eager=0)
    with LocalCluster(forward(), library={}, device=bench.device, stage=staged, in_flight=3) as cluster:
        calls: list[Call] = []
        for n in range(9):
            calls += cluster.issue({"x": torch.full((4, 3), float(n))})
            launched(calls[-1])
            assert sum(not call.done for call in calls) <= 3
        assert sum(not call.done for call in calls) == 3


def test_memory_does_not_grow_with_how_far_the_host_runs_ahead() -> None:
    """The device does nothing in between: what many calls take is what the slots have room for, not more."""

    def peak(calls: int) -> int:
        bench = Bench(eager=0)
        results = calls * 4 * 4 * 3  # each handle's own
        with LocalCluster(forward(), library={}, device=bench.device, stage=staged, in_flight=100) as cluster:
            handles = [cluster.issue({"x": torch.ones(4, 3)})[0] for _ in range(calls)]
            launched(handles[-1])
            assert bench.ran == 0
            return bench.peak - results

    assert peak(20) == peak(3)


def test_a_result_stays_whole_when_its_reader_lets_go_of_it_early() -> None:
    """Its memory goes back to a queue of the runtime, while the caller's own queue may still read it."""
    bench = Bench(eager=0)
    with LocalCluster(forward(), library={}, device=bench.device, stage=staged) as cluster:
        users = cluster.workers[0].on.queue("the caller's")
        with users.context():
            found = cluster.issue({"x": torch.ones(4, 3)})[0].result(0)
            twice = found * 2
            del found
        cluster.run({"x": torch.zeros(4, 3)})
        mark = users.mark()
        assert isinstance(mark, FakeMark)
        mark.wait_on_host()
        assert torch.equal(twice, torch.full((4, 3), 4.0))
    assert not bench.wrongs


def test_what_the_caller_puts_on_the_device_before_a_call_is_there_when_the_call_reads_it() -> None:
    bench = Bench(eager=0)
    with LocalCluster(forward(), library={}, device=bench.device, stage=staged) as cluster:
        users = cluster.workers[0].on.queue("the caller's")
        with users.context():
            (x,) = cluster.workers[0].on.to_device([torch.ones(4, 3)])
            x = x * 3
            (call,) = cluster.issue({"x": x})
            del x
        launched(call)
        assert bench.ran == 0
        assert torch.equal(call.result(0), torch.full((4, 3), 6.0))
    assert not bench.wrongs


def test_tokens_that_are_there_from_the_start_are_kept_for_those_who_read_them() -> None:
    """Their memory is the installing thread's, which knows nothing of the queues that read it."""
    p = Program()
    (x,) = p.actor("x", OfInput("x"), out=[spec(4, 3)], initial=1, slots=2, queue="source")
    (y,) = p.actor("F", x, x, body=ADD, out=[spec(4, 3)])
    p.result(y, on(0), (B,), (4, 3))
    bench = Bench()
    with LocalCluster(p.plan(), library={}, device=bench.device, stage=staged) as cluster:
        (token,) = cluster.workers[0]._jobs[0].slots[x.register].held(0)
        memory = bench._of(token)
        assert memory is not None
        assert memory.used == {cluster.workers[0].on.queue("compute")}
        assert [cluster.run({"x": torch.ones(4, 3)})[0].sum().item() for _ in range(2)] == [0, 24]
    assert not bench.wrongs


def drop(waits: EventWaits) -> None:
    for holder in waits.dying:
        holder.clear()


def unordered(self: RegisterEvents, sequence: int, whole: Any = RegisterEvents.reuse) -> Any:
    return [], whole(self, sequence)[1]


def too_early(events: StreamEvents) -> None:
    while events.leaving:
        events.leaving.popleft()[1].clear()


LEFT_OUT: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "queues wait for nothing": (EventWaits, "begin", drop),
    "writers do not wait for readers": (RegisterEvents, "reuse", unordered),
    "readers leave no marks": (RegisterEvents, "read", lambda *_: None),
    "tokens are not held": (RegisterEvents, "_hold", lambda *_: None),
    "tokens are let go of at once": (StreamEvents, "sweep", too_early),
    "views live in memory of others": (
        ActorStream, "own", lambda self, outputs, _: self.device.to_device(outputs) if self.prepares else outputs,
    ),
}  # fmt: skip


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("what", LEFT_OUT)
def test_the_fake_device_notices_what_is_left_out(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*LEFT_OUT[what])
    bench = Bench()
    train(bench)
    assert bench.wrongs


def test_the_fake_device_notices_plans_that_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed_plan, "barrier", lambda *_: None)
    with pytest.raises(AssertionError):
        test_plans_that_take_turns_see_each_others_variables()


def test_every_thread_of_a_run_ends_with_it() -> None:
    before = threading.active_count()
    train(Bench())
    assert threading.active_count() <= before
