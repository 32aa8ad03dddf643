"""Calls of a worker: their order, what holds them back, how they fail and how they end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from actorflow.runtime import early_messages
from actorflow.runtime.worker import Worker
from actorflow.support.refusals import MessageRefused
from actorflow.testing.local_cluster import LocalCluster, MemoryTransport
from actorflow.transport import abandon
from actorflow.transport.abandon import Decision, Failed, Vote, Word
from actorflow.transport.memory import MemoryPlane, Switchboard
from actorflow.transport.messages import Credit, Message, Ready
from actorflow_compiler.core.errors import ActorError, CallError, ClusterError, PlanError
from actorflow_compiler.core.sbp import B
from actorflow_compiler.plan.origins import Origins, SourceLocation, StepsOf
from actorflow_compiler.plan.plan import Collective, CollectiveKind, OfInput, OfPiece, OfScalar, OfVariable, Plan
from runtime.programs import V0, V1, Program, body, on, spec, step

HERE = on(0)
SOON = 60.0  # seconds in which anything must happen


class Wire:
    """A transport that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Message]] = []
        self.more = threading.Condition()

    def send(self, peer: int, message: Message) -> None:
        with self.more:
            self.sent.append((peer, message))
            self.more.notify_all()

    def wait_for(self, count: int) -> list[tuple[int, Message]]:
        with self.more:
            assert self.more.wait_for(lambda: len(self.sent) >= count, SOON), f"{self.sent} were sent"
            return list(self.sent)


class Hold:
    """An op that waits until it is let go; ``begun`` counts the firings that came to it."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.go = threading.Semaphore(0)

    def __call__(self, x: Tensor) -> Tensor:
        self.begun.release()
        assert self.go.acquire(timeout=SOON)
        return x + 1


@pytest.fixture
def make() -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def worker(rank: int = 0, gated: bool = False, wire: Wire | None = None, **options: Any) -> Worker:
        transport = wire or MemoryTransport(rank, made)
        found = Worker(rank, transport, {"memory": Switchboard().plane(rank)}, gated=gated, **options)
        made.append(found)
        return found

    yield worker
    for found in made:
        found.close()


def until_said(worker: Worker, text: str) -> None:
    """Wait until ``explain`` has the text: the thread that has done a call's last task still has to say so."""
    end = time.monotonic() + SOON
    while text not in worker.explain():
        assert time.monotonic() < end, worker.explain()
        time.sleep(0.001)


def single(op: str = "actorflow.hold", name: str = "single", slots: int = 1) -> Plan:
    p = Program(name=name)
    (x,) = p.actor("x", OfInput("x"), out=[spec(1)], kind="source", queue="source", slots=slots)
    (y,) = p.actor("F", x, body=body(1, step(op, V0, outs=[1]), outputs=[1]), out=[spec(1)], slots=slots)
    p.result(y, HERE, (B,), (1,))
    return p.plan()


def x(value: float = 0.0) -> dict[str, Tensor]:
    return {"x": torch.full((1,), value)}


def test_issue_returns_at_once_until_as_many_calls_as_allowed_are_unfinished(make: Callable[..., Worker]) -> None:
    hold = Hold()
    worker = make(in_flight=2, library={"hold": hold})
    worker.install(0, single())
    first, second = worker.issue(0, x(1)), worker.issue(0, x(2))
    third: list[object] = []
    thread = threading.Thread(target=lambda: third.append(worker.issue(0, x(3))), daemon=True)
    thread.start()
    assert hold.begun.acquire(timeout=SOON)
    thread.join(0.05)
    assert thread.is_alive()
    assert not first.done
    assert not third
    hold.go.release()
    first.wait(SOON)
    thread.join(SOON)
    assert third
    assert not second.done
    hold.go.release()
    hold.go.release()
    worker.wait_all(SOON)
    assert [call.result(0).item() for call in (first, second, third[0])] == [2.0, 3.0, 4.0]  # type: ignore[attr-defined]


def test_calls_of_one_plan_overlap_as_registers_allow(make: Callable[..., Worker]) -> None:
    """The source of call 2 fires while call 1 waits for a credit that never comes."""
    p = Program()
    seen: list[float] = []
    show = body(1, step("actorflow.show", V0, outs=[1]), outputs=[1])
    (a,) = p.actor("x", OfInput("x"), body=show, out=[spec(1)], kind="source", queue="source", slots=2)
    p.send(a, to=1, plane="inline")
    p.actor("elsewhere", kind="sink", queue="sink", rank=1)
    third = threading.Event()

    def note(x: Tensor) -> Tensor:
        seen.append(x.item())
        if len(seen) == 3:
            third.set()
        return x

    worker = make(wire=Wire(), library={"show": note})
    worker.install(0, p.plan().for_rank(0))
    calls = [worker.issue(0, x(i)) for i in range(3)]
    assert third.wait(SOON)
    assert seen == [0.0, 1.0, 2.0]
    calls[0].wait(SOON)
    assert not calls[1].done


def test_plans_share_one_state_and_run_in_the_order_of_issue(make: Callable[..., Worker]) -> None:
    train = Program(name="train")
    train.actor(
        "O",
        OfVariable("w"),
        OfScalar("a"),
        body=body(2, step("aten.add_.Tensor", V0, V1, outs=[2]), outputs=[]),
        kind="optimizer",
    )
    test = Program(name="test")
    (y,) = test.actor(
        "F", OfVariable("w"), body=body(1, step("aten.mul.Tensor", V0, 10, outs=[1]), outputs=[1]), out=[spec(1)]
    )
    test.result(y, HERE, (B,), (1,))
    worker = make(in_flight=8, library={})
    worker.install(0, train.plan(), {"w": torch.zeros(1)})
    worker.install(1, test.plan(), {"w": torch.full((1,), 99.0)})  # known already: the state stays
    calls = []
    for a in (1, 2, 3):
        worker.issue(0, scalars={"a": a})
        calls.append(worker.issue(1))
    assert [c.result(0, SOON).item() for c in calls] == [10.0, 30.0, 60.0]


def test_a_call_of_another_plan_waits_until_the_running_one_is_done(make: Callable[..., Worker]) -> None:
    hold = Hold()
    other: list[float] = []

    def note(x: Tensor) -> Tensor:
        other.append(x.item())
        return x

    p = Program(name="other")
    p.actor(
        "x",
        OfInput("x"),
        body=body(1, step("actorflow.note", V0, outs=[1]), outputs=[1]),
        out=[spec(1)],
        kind="source",
        queue="source",
    )
    worker = make(library={"hold": hold, "note": note})
    worker.install(0, single())
    worker.install(1, p.plan())
    first, second = worker.issue(0, x()), worker.issue(1, x(7))
    assert hold.begun.acquire(timeout=SOON)
    assert "call 1 of plan 1 'other' waits for the calls before it" in worker.explain()
    assert not other
    hold.go.release()
    second.wait(SOON)
    assert first.done
    assert other == [7.0]


def test_a_call_starts_when_it_is_permitted_and_not_before(make: Callable[..., Worker]) -> None:
    worker = make(gated=True, library={})
    worker.install(0, single("aten.neg.default"))
    calls = [worker.issue(0, x(i)) for i in range(3)]
    assert "call 0 of plan 0 'single' waits for the permit of all ranks" in worker.explain()
    assert not calls[0].begun
    worker.permit(1)
    assert [calls[i].result(0, SOON).item() for i in (0, 1)] == [0.0, -1.0]
    assert not calls[2].begun
    worker.permit(3)  # before it is issued
    assert calls[2].result(0, SOON).item() == -2.0
    assert worker.issue(0, x(3)).result(0, SOON).item() == -3.0


def test_a_result_can_be_had_before_its_call_is_done(make: Callable[..., Worker]) -> None:
    """The credit that the rest of the call waits for never comes."""
    p = Program()
    (a,) = p.actor("x", OfInput("x"), out=[spec(1)], kind="source", queue="source", slots=2)
    p.send(a, to=1, plane="inline")
    p.result(a, HERE, (B,), (1,))
    p.actor("elsewhere", kind="sink", queue="sink", rank=1)
    worker = make(wire=Wire(), library={})
    worker.install(0, p.plan().for_rank(0))
    first, second = worker.issue(0, x(5)), worker.issue(0, x(6))
    assert second.result(0, SOON).item() == 6.0
    first.wait(SOON)  # its token has left: the one credit was its own
    assert not second.done


def test_a_failing_actor_is_named_with_its_rank_and_op_and_everybody_is_told(make: Callable[..., Worker]) -> None:
    heard: list[BaseException] = []
    p = Program()
    (a,) = p.actor("x", OfInput("x"), out=[spec(1)], kind="source", queue="source")
    p.actor("U", a, into=[OfVariable("w")])
    (b,) = p.actor("F3", a, body=body(1, step("aten.view.default", V0, (3,), outs=[1]), outputs=[1]), out=[spec(3)])
    p.result(b, HERE, (B,), (3,))
    worker = make(library={})
    worker.on_failure(heard.append)
    worker.install(0, p.plan(), {"w": torch.zeros(1)})
    call = worker.issue(0, x())
    with pytest.raises(
        ActorError,
        match=r"rank 0, actor F3, firing 0, aten\.view\.default: RuntimeError: .*shape.* The call had changed w before",
    ) as caught:
        call.result(0, SOON)
    assert isinstance(caught.value.__cause__, RuntimeError)
    for later in (call.wait, worker.wait_all, lambda: worker.issue(0, x()), lambda: worker.install(1, p.plan())):
        with pytest.raises(ActorError):
            later()
    assert len(heard) == 1
    worker.on_failure(heard.append)
    assert len(heard) == 2
    assert heard[0] is heard[1]


def summing(pieces: int) -> Plan:
    """The sum over the pieces of an op of x is added to w; results: that sum, and w as it was before."""
    p = Program(pieces=pieces)
    (a,) = p.actor("x", OfInput("x"), out=[spec(1)], kind="source", queue="source", rate=pieces, slots=2)
    picky = body(2, step("actorflow.picky", V0, V1, outs=[2]), outputs=[2])
    (b,) = p.actor("F", a, OfPiece(), body=picky, out=[spec(1, combine="sum")], rate=pieces, fill=pieces, slots=2)
    both = body(2, step("aten.add.Tensor", V0, V1, outs=[2]), outputs=[2])
    p.actor("U", OfVariable("w"), b, body=both, into=[OfVariable("w")])
    p.result(b, HERE, (B,), (1,))
    return p.plan()


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_call_that_fails_before_it_changed_anything_is_given_up_alone(
    make: Callable[..., Worker], pieces: int
) -> None:
    def picky(x: Tensor, piece: int) -> Tensor:
        if x.item() < 0 and piece == pieces - 1:
            raise IndexError("below 0")
        return x + 1

    heard: list[BaseException] = []
    worker = make(in_flight=8, gated=True, library={"picky": picky})
    worker.on_failure(heard.append)
    w = torch.zeros(1)
    worker.install(0, summing(pieces), {"w": w})
    calls = [worker.issue(0, x(value)) for value in (1.0, -1.0, 2.0, 3.0)]
    for call in calls:
        worker.permit(call.number)
    calls[3].wait(SOON)
    good = [pieces * (value + 1) for value in (1.0, 2.0, 3.0)]
    assert [calls[i].result(0, SOON).item() for i in (0, 2, 3)] == good
    for _ in range(2):
        with pytest.raises(ActorError, match=r"F, firing \d, actorflow\.picky: IndexError: below 0.* changed nothing"):
            calls[1].result(0, SOON)
    worker.wait_all(SOON)  # the script knows
    last = worker.issue(0, x(4.0))
    worker.permit(last.number)
    assert last.result(0, SOON).item() == pieces * 5.0
    worker.wait_all(SOON)
    assert worker.variables["w"].item() == sum(good) + pieces * 5.0
    assert heard == []


class Undone:
    """What a call has changed in a script; ``at`` are the lines where it was taken back."""

    places, lines = ("count",), ("train.py:7",)

    def __init__(self) -> None:
        self.at: list[str] = []

    def carry_out(self, line: str) -> None:
        self.at.append(line)


def with_lines(plan: Plan) -> Plan:
    (actor,) = (actor.id for actor in plan.actors if actor.name == "F")
    return replace(plan, origins=Origins((SourceLocation("", "train.py:7"),), (StepsOf(actor, (0,)),)))


def failing_when_told(hold: Hold) -> Callable[[Tensor, int], Tensor]:
    def picky(x: Tensor, _: int) -> Tensor:
        hold(x)
        if x.item() < 0:
            raise IndexError("below 0")
        return x + 1

    return picky


def test_what_a_call_that_is_given_up_has_changed_is_taken_back_once_before_the_script_knows(
    make: Callable[..., Worker],
) -> None:
    hold, undo, kept = Hold(), Undone(), Undone()
    worker = make(library={"picky": failing_when_told(hold)})
    worker.install(0, with_lines(summing(1)), {"w": torch.zeros(1)})
    hold.go.release(3)
    good = worker.issue(0, x(1.0), undo=kept)
    good.wait(SOON)
    bad = worker.issue(0, x(-1.0), undo=undo)
    worker.wait_all(SOON, tell=False)
    assert undo.at == []
    for _ in range(2):
        with pytest.raises(ActorError, match="below 0"):
            bad.result(0, SOON)
        assert undo.at == ["train.py:7"]
    worker.issue(0, x(2.0), undo=kept).wait(SOON)
    assert (undo.at, kept.at, good.undo) == (["train.py:7"], [], None)


def test_a_call_that_others_came_after_is_not_given_up_where_it_has_changed_what_they_read(
    make: Callable[..., Worker],
) -> None:
    hold, undo = Hold(), Undone()
    worker = make(in_flight=8, library={"picky": failing_when_told(hold)})
    worker.install(0, with_lines(summing(1)), {"w": torch.zeros(1)})
    bad = worker.issue(0, x(-1.0), undo=undo)
    worker.issue(0, x(1.0), undo=Undone())
    hold.go.release(2)
    with pytest.raises(ActorError, match="The call had changed count before, and no call can follow it"):
        bad.result(0, SOON)
    assert undo.at == []


def test_no_call_is_issued_behind_one_of_which_is_not_decided_whether_it_is_given_up(
    make: Callable[..., Worker],
) -> None:
    """The votes of all ranks decide that; meanwhile a call to come waits, as it was made with what is taken back."""
    said: list[Word] = []
    failed = threading.Semaphore(0)

    def say(word: Word) -> None:
        said.append(word)
        failed.release()

    hold, undo = Hold(), Undone()
    hold.go.release()
    worker = make(library={"picky": failing_when_told(hold)})
    worker.on_lost(say)
    worker.install(0, with_lines(replace(summing(1), world=2)), {"w": torch.zeros(1)})
    worker.issue(0, x(-1.0), undo=undo)
    assert failed.acquire(timeout=SOON)
    later: list[BaseException] = []

    def call() -> None:
        try:
            worker.issue(0, x(1.0), undo=Undone())
        except ActorError as error:
            later.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    (word,) = said
    assert isinstance(word, Failed)
    worker.obey(abandon.Hold(word.call, word.line))
    assert failed.acquire(timeout=SOON)
    assert said[-1] == Vote(word.call, "")
    assert thread.is_alive()
    assert not later
    worker.obey(Decision(word, ""))
    thread.join(SOON)
    assert len(later) == 1
    assert "below 0" in str(later[0])
    assert undo.at == ["train.py:7"]


def test_a_failure_that_nobody_has_read_is_raised_once_by_what_waits_next(make: Callable[..., Worker]) -> None:
    def picky(x: Tensor, _: int) -> Tensor:
        if x.item() < 0:
            raise IndexError("below 0")
        return x + 1

    worker = make(library={"picky": picky})
    worker.install(0, summing(1), {"w": torch.zeros(1)})
    worker.issue(0, x(-1.0))
    worker.wait_all(SOON, tell=False)
    with pytest.raises(ActorError, match="the one that raises it has not been made"):
        worker.issue(0, x(0.0))
    assert worker.issue(0, x(0.0)).result(0, SOON).item() == 1.0
    worker.issue(0, x(-1.0))
    with pytest.raises(ActorError, match="below 0"):
        worker.wait_all(SOON)
    worker.wait_all(SOON)
    assert worker.variables["w"].item() == 1.0


def test_everybody_hears_of_a_failure_also_where_a_plane_or_a_listener_fails_as_well() -> None:
    """A device that has failed refuses everything, also what ends the transfers on it."""

    class Broken(MemoryPlane):
        def close(self) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

    heard: list[str] = []
    worker = Worker(0, Wire(), {"broken": Broken(0, Switchboard(), torch.device("cpu"))}, library={})

    def broken(_: BaseException) -> None:
        raise RuntimeError("a listener failed")

    worker.on_failure(lambda error: heard.append("first"))
    worker.on_failure(broken)
    worker.on_failure(lambda error: heard.append("last"))
    with pytest.raises(RuntimeError, match="a listener failed"):
        worker.fail(ClusterError("the cause"))
    assert sorted(heard) == ["first", "last"]
    with pytest.raises(ClusterError, match="the cause"):
        worker.wait_all(SOON)
    worker.close()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 8 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 20 bytes. Error code 12"),
    ],
)
def test_an_actor_without_memory_tells_what_the_plan_needs_and_what_needs_less(
    make: Callable[..., Worker], error: Exception
) -> None:
    def greedy(x: Tensor) -> Tensor:
        raise error

    p = Program()
    (a,) = p.actor("x", OfInput("x"), out=[spec(1)], kind="source", queue="source")
    (b,) = p.actor("F3", a, body=body(1, step("actorflow.greedy", V0, outs=[1]), outputs=[1]), out=[spec(3)])
    p.result(b, HERE, (B,), (3,))
    worker = make(library={"greedy": greedy})
    worker.install(0, p.plan())
    with pytest.raises(ActorError) as caught:
        worker.issue(0, x()).result(0, SOON)
    text = str(caught.value)
    wanted = "20.00 MiB" if isinstance(error, torch.OutOfMemoryError) else "20 bytes"
    assert f"rank 0, actor F3, firing 0, actorflow.greedy: out of memory for {wanted}" in text
    assert "16 B at most on this rank: variables 0 B, registers 16 B, at work 0 B" in text
    assert all(advice in text for advice in ("micro_batches=2 or more", "torch.utils.checkpoint", "memory_budget"))
    assert str(error) in text
    assert caught.value.__cause__ is error


def test_a_failure_on_one_rank_ends_the_others_too() -> None:
    p = Program()
    (a,) = p.actor("x", OfInput("x"), out=[spec(1)], kind="source", queue="source")
    (b,) = p.actor("F", a, body=body(1, step("actorflow.bad", V0, outs=[1]), outputs=[1]), out=[spec(1)])
    (c,) = p.send(b, to=1)
    p.result(c, on(1), (B,), (1,), rank=1)

    def bad(x: Tensor) -> Tensor:
        raise ValueError("no good")

    with LocalCluster(p.plan(), library={"bad": bad}) as cluster:
        calls = cluster.issue(x())
        with pytest.raises(ActorError, match=r"rank 0, actor F, firing 0, actorflow\.bad: ValueError: no good"):
            calls[1].result(0, SOON)


def test_a_failing_collective_is_named(make: Callable[..., Worker]) -> None:
    comm = Collective(CollectiveKind.ALL_GATHER, 5, (0,), plane="memory")  # without its exchanges
    p = Program()
    (a,) = p.actor("x", OfInput("x"), out=[spec(1)], kind="source", queue="source")
    (b,) = p.actor("gather", a, out=[spec(1)], kind="boxing", queue="comm", comm=comm)
    p.result(b, HERE, (B,), (1,))
    worker = make(library={})
    worker.install(0, p.plan())
    with pytest.raises(PlanError, match="all_gather 5: 1 operands, 1 targets and 0 exchanges"):
        worker.issue(0, x()).wait(SOON)


def test_fail_wakes_everyone_who_waits(make: Callable[..., Worker]) -> None:
    hold = Hold()
    worker = make(in_flight=1, library={"hold": hold})
    worker.install(0, single())
    call = worker.issue(0, x())
    raised: list[BaseException] = []

    def attempt(what: Callable[[], object]) -> None:
        try:
            what()
        except BaseException as error:
            raised.append(error)

    waits: list[Callable[[], object]] = [
        call.wait,
        lambda: call.result(0),
        worker.wait_all,
        lambda: worker.issue(0, x()),
    ]
    threads = [threading.Thread(target=attempt, args=(what,), daemon=True) for what in waits]
    for thread in threads:
        thread.start()
    assert hold.begun.acquire(timeout=SOON)
    worker.fail(ClusterError("rank 3 was lost"))
    worker.fail(ClusterError("and another thing"))
    for thread in threads:
        thread.join(SOON)
    assert [(type(e), str(e)) for e in raised] == [(ClusterError, "rank 3 was lost")] * 4
    hold.go.release()


@pytest.mark.parametrize("under_way", [True, False])
def test_a_forked_process_has_what_is_done_and_never_waits(make: Callable[..., Worker], under_way: bool) -> None:
    """What the hooks of a fork do, without one: the child's worker is told that it has no threads."""
    hold = Hold()
    hold.go.release()
    worker = make(library={"hold": hold})
    worker.install(0, single())
    done = worker.issue(0, {"x": torch.ones(1)})
    done.wait(SOON)
    late = worker.issue(0, {"x": torch.ones(1)}) if under_way else None
    with worker.lock:
        worker.at_fork()
    assert done.result(0, SOON).tolist() == [2.0]
    with pytest.raises(ClusterError, match="that the script has forked uses a job"):
        worker.issue(0, {"x": torch.ones(1)})
    with pytest.raises(ClusterError, match="that the script has forked uses a job"):
        worker.install(1, single())
    if late is None:
        worker.wait_all(SOON)
        return
    with pytest.raises(ClusterError, match="1 calls were under way"):
        late.result(0, SOON)
    with pytest.raises(ClusterError, match="1 calls were under way"):
        worker.wait_all(SOON)
    hold.go.release()
    worker._failure = None  # here it has its threads, which end with it


def test_arguments_that_are_missing_are_named(make: Callable[..., Worker]) -> None:
    worker = make(library={})
    worker.install(0, single("aten.neg.default"))
    with pytest.raises(CallError, match=r"rank 0: .*'single' came without x"):
        worker.issue(0, {"y": torch.ones(1)})
    with pytest.raises(CallError, match=r"plan number 4 was called; installed are \[0\]"):
        worker.issue(4)
    with pytest.raises(CallError, match=r"result 1 .* this rank gets \[0\]"):
        worker.issue(0, x()).result(1)


def test_a_variable_that_is_not_here_is_named(make: Callable[..., Worker]) -> None:
    p = Program(name="needy")
    p.actor("F", OfVariable("w"), body=body(1, step("aten.neg.default", V0, outs=[1]), outputs=[1]), out=[spec(1)])
    with pytest.raises(PlanError, match=r"'needy', rank 0, actor F: variable 'w' is not on this rank"):
        make(library={}).install(0, p.plan())


def receiving(plane: str = "memory") -> Plan:
    """Rank 0 sends two numbers to rank 1."""
    p = Program(name="receiving")
    (a,) = p.actor("x", OfInput("x"), out=[spec(2)], kind="source", queue="source")
    (b,) = p.send(a, to=1, plane=plane)
    p.result(b, on(1), (B,), (2,), rank=1)
    return p.plan()


@pytest.mark.parametrize("payload", [None, (b"\0" * 12,)])
def test_the_size_of_a_token_is_checked_before_it_moves(
    make: Callable[..., Worker], payload: tuple[bytes, ...] | None
) -> None:
    worker = make(rank=1, library={})
    worker.install(0, receiving().for_rank(1))
    call = worker.issue(0)
    worker.deliver(0, Ready(0, 1, 0, 12, payload))
    with pytest.raises(
        MessageRefused,
        match=r"rank 0 sent .* on rank 1: 12 bytes for register 1, filled by send x; expected 8 bytes: float32\[2\]",
    ):
        call.wait(SOON)


def test_a_register_that_a_peer_does_not_fill_is_refused(make: Callable[..., Worker]) -> None:
    worker = make(rank=1, library={})
    worker.install(0, receiving().for_rank(1))
    worker.deliver(5, Ready(0, 1, 0, 8, None))
    with pytest.raises(MessageRefused, match=r"rank 5 sent .* register 1, which it does not fill on rank 1"):
        worker.issue(0).wait(SOON)


def test_messages_for_a_plan_that_is_not_installed_yet_are_kept() -> None:
    wire = Wire()
    board = Switchboard()
    worker = Worker(1, wire, {"memory": board.plane(1)}, gated=False, library={})
    try:
        worker.deliver(0, Ready(1, 1, 0, 8, (torch.tensor([1.0, 2.0]).numpy().tobytes(),)))
        worker.deliver(0, Ready(0, 1, 0, 8, None))
        board.plane(0).send(1, [torch.tensor([3.0, 4.0])])
        worker.install(0, receiving().for_rank(1))
        assert worker.issue(0).result(0, SOON).tolist() == [3.0, 4.0]
        worker.install(1, receiving("inline").for_rank(1))
        assert worker.issue(1).result(0, SOON).tolist() == [1.0, 2.0]
        assert wire.wait_for(2) == [(0, Credit(0, 1)), (0, Credit(1, 1))]
    finally:
        worker.close()


def test_a_token_of_a_plan_that_does_not_come_keeps_no_thread_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of other plans of the rank come on the same thread; those of the plan later, in the order they came in."""
    board = Switchboard()
    worker = Worker(1, Wire(), {"memory": board.plane(1)}, gated=False, library={})
    try:
        for sequence in range(2):
            worker.deliver(0, Ready(7, 1, sequence, 8, None))
        worker.install(0, receiving().for_rank(1))
        worker.deliver(0, Ready(0, 1, 0, 8, None))
        board.plane(0).send(1, [torch.tensor([3.0, 4.0])])
        assert worker.issue(0).result(0, SOON).tolist() == [3.0, 4.0]
        until_said(worker, "thread receive:0: idle")
        worker.install(7, receiving().for_rank(1))
        for number in range(2):
            board.plane(0).send(1, [torch.full((2,), float(number))])
            assert worker.issue(7).result(0, SOON).tolist() == [float(number)] * 2
        monkeypatch.setattr(early_messages, "MOST", 1)
        worker.deliver(0, Ready(9, 1, 0, 8, None))
        with pytest.raises(MessageRefused, match=r"rank 0 sent .*too much.*: 2 messages for plans that are not here"):
            worker.deliver(0, Ready(9, 1, 1, 8, None))
        with pytest.raises(MessageRefused, match="of a plan below 72"):
            worker.deliver(0, Ready(72, 1, 0, 8, None))
        worker.drop({0})
        dropped = threading.Event()
        worker._compute._inbox.put(dropped.set)
        assert dropped.wait(SOON)
        with pytest.raises(MessageRefused, match="of plan 0, which all ranks have dropped"):
            worker.deliver(0, Ready(0, 1, 1, 8, None))
    finally:
        worker.close()


def test_a_rank_that_is_ahead_of_another_by_plans_and_calls_loses_none_of_its_messages() -> None:
    """What a rank sends of three plans is there before the other has any of them, which installs them in turn."""
    ahead, back = Wire(), Wire()
    sender = Worker(0, ahead, {}, gated=False, library={})
    receiver = Worker(1, back, {}, gated=False, library={})
    try:
        for plan in range(3):
            sender.install(plan, receiving("inline").for_rank(0))
            sender.issue(plan, {"x": torch.full((2,), float(plan))})
        for peer, message in ahead.wait_for(3):
            assert peer == 1
            receiver.deliver(0, message)
        for plan in range(3):
            receiver.install(plan, receiving("inline").for_rank(1))
        calls = [receiver.issue(plan) for plan in range(3)]
        assert [call.result(0, SOON).tolist() for call in calls] == [[float(plan)] * 2 for plan in range(3)]
        for peer, message in back.wait_for(3):
            sender.deliver(1, message) if peer == 0 else pytest.fail(f"{message} went to rank {peer}")
        sender.wait_all(SOON)
        again = [sender.issue(plan, {"x": torch.full((2,), 7.0)}) for plan in range(3)]  # their slots are free again
        ahead.wait_for(6)
        for call in again:
            call.wait(SOON)
    finally:
        sender.close()
        receiver.close()


def test_a_message_that_overtakes_a_plan_which_it_does_not_fit_is_refused_with_the_plan(
    make: Callable[..., Worker],
) -> None:
    worker = make(rank=1, library={})
    worker.deliver(5, Ready(0, 1, 0, 8, (torch.ones(2).numpy().tobytes(),)))
    worker.install(0, receiving("inline").for_rank(1))
    with pytest.raises(MessageRefused, match=r"rank 5 sent .* register 1, which it does not fill on rank 1"):
        worker.issue(0).wait(SOON)


def test_messages_that_come_when_their_plan_is_dropped_are_kept_no_longer(make: Callable[..., Worker]) -> None:
    wire = Wire()
    worker = make(wire=wire, library={})
    for plan in range(2):
        worker.install(plan, receiving("inline").for_rank(0))
    worker.issue(0, {"x": torch.ones(2)}).wait(SOON)
    worker.drop({0})
    worker.deliver(1, Credit(0, 1))  # the last slot that was filled
    worker.deliver(1, Credit(3, 1))  # of a plan that is still to come
    worker.issue(1, {"x": torch.ones(2)}).wait(SOON)
    assert worker._compute._early.plans == [3]


def test_a_sender_waits_for_credit(make: Callable[..., Worker]) -> None:
    wire = Wire()
    worker = make(wire=wire, library={})
    worker.install(0, receiving("inline").for_rank(0))
    values = [torch.tensor([float(i), 0.0]) for i in range(2)]
    calls = [worker.issue(0, {"x": value}) for value in values]
    calls[0].wait(SOON)
    ready = [Ready(0, 1, i, 8, (v.numpy().tobytes(),)) for i, v in enumerate(values)]
    assert wire.wait_for(1) == [(1, ready[0])]
    assert not calls[1].done
    until_said(worker, "waits for a slot of register 1 (full, 1 of 1)")
    worker.deliver(1, Credit(0, 1))
    calls[1].wait(SOON)
    assert wire.wait_for(2) == [(1, ready[0]), (1, ready[1])]


def test_explain_says_what_every_queue_and_thread_is_at(make: Callable[..., Worker]) -> None:
    hold = Hold()
    worker = make(library={"hold": hold})
    worker.install(0, single())
    worker.issue(0, x())
    assert hold.begun.acquire(timeout=SOON)
    text = worker.explain()
    assert "rank 0: 1 unfinished calls, 1 of them begun" in text
    assert "queue compute: F@rank0 is running" in text
    assert "queue sink: sink 0@rank0 waits for register 1 (empty) filled by F@rank0" in text
    assert "thread compute: fires F, firing 0" in text
    hold.go.release()
    worker.wait_all(SOON)


def test_no_thread_is_left_after_close() -> None:
    before = set(threading.enumerate())
    p = Program()
    (a,) = p.actor("x", OfInput("x"), out=[spec(2)], kind="source", queue="source")
    (b,) = p.send(a, to=1)
    reduce = p.collective("all_reduce", (0, 1))
    (c,) = p.actor("reduce", a, out=[spec(2)], kind="boxing", queue="comm", comm=reduce)
    (d,) = p.actor("reduce", b, out=[spec(2)], kind="boxing", queue="comm", rank=1, comm=reduce)
    p.result(c, HERE, (B,), (2,))
    p.result(d, on(1), (B,), (2,), rank=1)
    with LocalCluster(p.plan(), library={}) as cluster:
        assert [r.tolist() for r in cluster.run({"x": torch.ones(2)})] == [[2.0, 2.0], [2.0, 2.0]]
        assert len(set(threading.enumerate()) - before) == 2 + 1 + 2 + 1  # compute; send; comm; receive
    assert set(threading.enumerate()) <= before


def test_close_ends_calls_that_cannot_end_and_their_threads() -> None:
    before = set(threading.enumerate())
    p = Program()
    comm = p.collective("all_reduce", (0, 1))
    (a,) = p.actor("x", OfInput("x"), out=[spec(1)], kind="source", queue="source")
    p.actor("reduce", a, out=[spec(1)], kind="boxing", queue="comm", comm=comm)
    worker = Worker(0, Wire(), {"memory": Switchboard().plane(0)}, gated=False, library={})
    worker.install(0, p.plan().for_rank(0))
    call = worker.issue(0, x())
    until_said(worker, "thread comm: all_reduce 0")
    with pytest.raises(
        TimeoutError,
        match=r"(?s)1 calls were not done .*thread comm: all_reduce 0 with ranks \[0, 1\] for reduce, firing 0",
    ):
        worker.wait_all(0.01)
    worker.close()
    with pytest.raises(ClusterError, match="closed with 1 unfinished calls"):
        call.wait(SOON)
    assert set(threading.enumerate()) <= before
