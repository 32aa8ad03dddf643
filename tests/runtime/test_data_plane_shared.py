"""Registers in shared memory: tokens are whole, nothing holds on to a slot, and what does not fit is refused."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actorflow.runtime.worker import Worker
from actorflow.session.planes import share, unshare
from actorflow.testing.local_cluster import LocalCluster
from actorflow.transport import shared
from actorflow.transport.messages import Credit, Filled, Message, Ready, Region
from actorflow.transport.redistribution import dtype_of
from actorflow.transport.shared import ALIGN, fill, make_region, map_region, owned, region_bytes
from actorflow_compiler.core.errors import ClusterError, PlanError
from actorflow_compiler.core.sbp import B
from actorflow_compiler.plan.plan import (
    OfInput,
    OfPiece,
    Plan,
    Read,
    Register,
    TensorSpec,
)
from actorflow_compiler.plan.verify import verify
from fewer import fewer
from runtime.programs import V0, V1, Program, body, on, spec, step
from runtime.trainings import LIBRARY, TAKE, training

SPECS = (
    TensorSpec((3, 5), "float32", "B"),
    TensorSpec((), "int64", "B"),
    TensorSpec((0, 4), "float32", "B"),
    TensorSpec((7,), "bool", "B"),
    TensorSpec((2, 3), "bfloat16", "B"),
)


@pytest.fixture
def region() -> Iterator[tuple[tuple[Register, ...], int]]:
    registers = (Register(4, 0, (Read(1),), SPECS, slots=3), Register(9, 0, (Read(1),), SPECS[1:2], slots=2))
    descriptor = make_region(region_bytes(registers), 0, 1)
    yield registers, descriptor
    os.close(descriptor)


def test_two_mappings_of_a_region_are_the_same_aligned_slots(region: tuple[tuple[Register, ...], int]) -> None:
    registers, descriptor = region
    mine, theirs = map_region(descriptor, registers), map_region(descriptor, registers)
    tokens = [[torch.randint(2, t.shape).to(dtype_of(t.dtype)) for t in SPECS] for _ in range(3)]
    for sequence, token in enumerate(tokens):
        fill(mine[4], sequence, token)
    addresses = [tensor.data_ptr() for slot in theirs[4].slots for tensor in slot if tensor.numel()]
    for slot, token in zip(theirs[4].slots, tokens, strict=True):
        assert all(torch.equal(found, wanted) for found, wanted in zip(slot, token, strict=True))
    assert len(set(addresses)) == 12
    assert all(address % ALIGN == 0 and theirs[4].start <= address < theirs[4].stop for address in addresses)
    assert theirs[4].stop <= theirs[9].start


def test_a_region_of_another_size_or_that_could_shrink_is_refused(region: tuple[tuple[Register, ...], int]) -> None:
    registers, descriptor = region
    with pytest.raises(ClusterError, match=r"shared memory of \d+ bytes was found; the plan says \d+"):
        map_region(descriptor, registers[:1])
    loose = os.memfd_create("test")
    os.ftruncate(loose, region_bytes(registers))
    with pytest.raises(ClusterError, match="sealed"):
        map_region(loose, registers)
    os.close(loose)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(descriptor, 0)


def test_too_little_memory_is_an_error_that_says_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < shared.available_memory() < 1 << 50
    monkeypatch.setattr(shared, "available_memory", lambda: 3_000_000)
    with pytest.raises(ClusterError, match=r"rank 2 needs 5\.0 MB .* rank 3, and 3\.0 MB are left"):
        make_region(5_000_000, 2, 3)


def test_copies_of_files_in_a_control_group_are_memory_that_can_be_had() -> None:
    assert shared._cached("anon 7000\ninactive_file 300\nactive_file 20\n") == 320
    assert shared._cached("inactive_file 1\nactive_file 1\ntotal_inactive_file 500\ntotal_active_file 6\n") == 506
    assert shared._cached("") == 0


def test_a_token_that_does_not_fit_its_slot_is_an_error(region: tuple[tuple[Register, ...], int]) -> None:
    registers, descriptor = region
    room = map_region(descriptor, registers)[9]
    for wrong in (torch.zeros(1, dtype=torch.int64), torch.tensor(1.0)):
        with pytest.raises(PlanError, match=r"the plan says torch\.int64"):
            fill(room, 0, [wrong])


def test_only_what_lies_in_a_slot_is_copied(region: tuple[tuple[Register, ...], int]) -> None:
    registers, descriptor = region
    rooms = map_region(descriptor, registers)
    x = rooms[4].slots[1][0]
    other = torch.ones(2)
    outputs = [x, x.t(), x[1:], other, rooms[9].slots[0][0]]
    mine = owned(outputs, [rooms[4]])
    assert mine[3] is other
    assert mine[4] is outputs[4]
    x.fill_(5.0)
    assert [float(t.sum()) for t in mine[:3]] == [0.0, 0.0, 0.0]


def test_ranks_of_one_machine_share_and_those_that_could_not_connect_do_not() -> None:
    plan = training(plane="gloo")

    def planes(plan: Plan) -> list[str]:
        return [a.comm.plane for a in plan.actors if a.comm is not None]

    assert planes(share(plan, ["a", "a"])) == ["shared", "shared"]
    assert planes(share(plan, ["a", "b"])) == planes(share(plan, ["", ""])) == ["gloo", "gloo"]
    both = verify(share(plan, ["a", "a"]))
    for rank in range(2):
        assert planes(unshare(both.for_rank(rank), rank, {1 - rank})) == ["shared", "shared"]
        assert planes(unshare(both.for_rank(rank), rank, ())) == ["gloo", "gloo"]


class Scribbler:
    """Ops of two ranks whose threads interleave as a list of numbers says."""

    def __init__(self, turns: list[int]) -> None:
        self._turns = turns
        self._lock = threading.Lock()
        self._at = 0

    def look(self, x: torch.Tensor) -> torch.Tensor:
        """The smallest and the largest element, looked at with pauses between."""
        with self._lock:
            turn = self._turns[self._at % len(self._turns)]
            self._at += 1
        low, high = x.min(), x.max()
        for _ in range(turn):
            os.sched_yield()
            low, high = torch.minimum(low, x.min()), torch.maximum(high, x.max())
        return torch.stack([low, high])


def keeping(tokens: int, slots: int, hold: int, size: int) -> Plan:
    """Rank 0 sends rows of x; rank 1 looks at each ``hold`` times, and keeps the first of it without computing."""
    p = Program(tokens)
    (x,) = p.actor(
        "x", OfInput("x"), OfPiece(), body=ROW, out=[spec(size)], kind="source", queue="source", rate=tokens, slots=2
    )
    (y,) = p.send(x, to=1, rate=tokens, slots=slots, plane="shared")
    (seen,) = p.actor(
        "look", y, body=LOOK, out=[spec(2 * tokens * hold, combine="cat:0")], rank=1, rate=tokens * hold,
        fill=tokens * hold, firings=hold,
    )  # fmt: skip
    (kept,) = p.actor(
        "keep", y, body=KEEP, out=[spec(3 * tokens, combine="cat:0")], rank=1, rate=tokens, fill=tokens, queue="keep"
    )
    p.result(seen, on(1), (B,), (2 * tokens * hold,), rank=1)
    p.result(kept, on(1), (B,), (3 * tokens,), rank=1)
    return p.plan()


ROW = body(2, step("actorflow.row", V0, V1, outs=[2]), outputs=[2])
LOOK = body(1, step("actorflow.look", V0, outs=[1]), outputs=[1])
KEEP = body(1, step("aten.slice.Tensor", V0, 0, 0, 3, outs=[1]), outputs=[1])  # a view of the slot


@settings(max_examples=fewer(25))
@given(
    tokens=st.integers(1, 12),
    slots=st.integers(1, 5),
    hold=st.integers(1, 3),
    size=st.sampled_from([3, 1000, 400_000]),  # the last is copied on a thread of its own
    turns=st.lists(st.integers(0, 4), min_size=1, max_size=8),
)
def test_tokens_are_never_torn_whatever_the_order_of_firings(
    tokens: int, slots: int, hold: int, size: int, turns: list[int]
) -> None:
    library = {"row": lambda x, piece: x[piece], "look": Scribbler(turns).look}
    with LocalCluster(keeping(tokens, slots, hold, size), library=library) as cluster:
        numbers = torch.arange(1.0, tokens + 1)
        for call in range(2):
            rows = (numbers + 100 * call).view(-1, 1).expand(-1, size).contiguous()
            seen, kept = cluster.run({"x": rows})
            assert torch.equal(seen.view(-1, 2), rows[:, :2].repeat_interleave(hold, 0))
            assert torch.equal(kept.view(-1, 3), rows[:, :3])


class Wire:
    """A transport that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Message]] = []

    def send(self, peer: int, message: Message) -> None:
        self.sent.append((peer, message))


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(1, Wire(), {}, gated=False, library=LIBRARY)
    yield made
    made.close()


def failure_of(worker: Worker) -> BaseException:
    failed: list[BaseException] = []
    event = threading.Event()
    worker.on_failure(lambda error: (failed.append(error), event.set()))
    assert event.wait(100)
    return failed[0]


def receiving() -> Plan:
    """Rank 0 sends to rank 1."""
    p = Program()
    (a,) = p.actor("a", OfInput("x"), OfPiece(), body=TAKE, out=[spec(2, 3)], kind="source", queue="source")
    (b,) = p.send(a, to=1, plane="shared")
    p.result(b, on(1), (B,), (2, 3), rank=1)
    return p.plan()


def test_a_token_of_a_register_that_is_not_shared_is_an_error(worker: Worker) -> None:
    worker.install(0, receiving().for_rank(1))
    worker.deliver(0, Filled(0, 77, 0))
    assert "the word that it has filled register 77, which it does not share" in str(failure_of(worker))


def test_shared_memory_of_a_size_that_the_plan_does_not_say_is_an_error(worker: Worker) -> None:
    worker.deliver(0, Region(0, 128, make_region(128, 0, 1)))
    worker.install(0, receiving().for_rank(1))
    assert "on rank 1: shared memory of 128 bytes was found; the plan says 64" in str(failure_of(worker))


def test_a_sender_shares_its_memory_before_its_first_token_and_waits_for_credits() -> None:
    wire = Wire()
    worker = Worker(0, wire, {}, gated=False, library=LIBRARY)
    plan = receiving()
    worker.install(0, plan.for_rank(0))
    calls = [worker.issue(0, {"x": torch.full((2, 3), 1.0 + n)}) for n in range(2)]
    calls[0].wait(100)
    (peer, region), (_, filled) = wire.sent
    assert isinstance(region, Region)
    assert (peer, filled) == (1, Filled(0, 1, 0))
    slot = map_region(region.descriptor, [plan.register(1)])[1].slots[0][0]
    os.close(region.descriptor)
    assert slot.tolist() == [[1.0] * 3] * 2  # the one slot is taken: the second token is not written
    worker.deliver(1, Credit(0, 1))
    calls[1].wait(100)
    assert wire.sent[2:] == [(1, Filled(0, 1, 1))]
    assert slot.tolist() == [[2.0] * 3] * 2
    worker.close()


def test_a_token_inside_a_message_still_has_to_fit_the_plan(worker: Worker) -> None:
    worker.install(0, receiving().for_rank(1))
    worker.deliver(0, Ready(0, 1, 0, 4, (b"abcd",)))
    assert "4 bytes for register 1" in str(failure_of(worker))


def test_a_plan_whose_sends_were_shared_keeps_everything_else() -> None:
    plan = training(plane="gloo")
    shared_plan = share(plan, ["a", "a"])
    assert replace(shared_plan, actors=plan.actors) == plan
