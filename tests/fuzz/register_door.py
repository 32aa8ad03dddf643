"""A rank of three whose plan takes tokens in every way there is: what comes for it, and what a refusal leaves alone.

The ranks are threads of this process (``LocalCluster``) and run real calls before and after; between calls, no token is
on its way and no slot is taken.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from actorflow.runtime.installed_plan import InstalledPlan
from actorflow.support.refusals import MessageRefused
from actorflow.testing.local_cluster import LocalCluster, MemoryTransport
from actorflow.transport.messages import Contributed, Credit, Filled, Message, Ready, Region
from actorflow.transport.small_tensors import encode
from actorflow_compiler.core.sbp import B
from actorflow_compiler.plan.plan import OfInput, Plan
from runtime.programs import V0, V1, V2, V3, Program, body, on, spec, step

LIMIT = 100.0
SUM = body(
    3, step("aten.add.Tensor", V0, V1, outs=[3]), step("aten.add.Tensor", V3, V2, outs=[4]), outputs=[4]
)  # fmt: skip
ME = 1  # the rank that is attacked


def meeting_of_all_ways() -> Plan:
    """Rank 0 sends x to rank 1 inside a message, on a data plane and in shared memory; the sum, added to x, goes on."""
    p = Program()
    coming = []
    for plane, slots in (("inline", 2), ("memory", 1), ("shared", 2)):
        (x,) = p.actor(f"x {plane}", OfInput("x"), out=[spec(4)], kind="source", queue="source")
        coming += p.send(x, to=1, plane=plane, slots=slots)
    (own,) = p.actor("x own", OfInput("x"), out=[spec(4)], kind="source", queue="source")
    (total,) = p.actor("F", *coming, body=SUM, out=[spec(4)], rank=1)
    meet = replace(p.collective("all_reduce", (0, 1)), plane="shared")
    p.actor("meet 0", own, out=[spec(4)], kind="boxing", queue="comm", comm=meet)
    (both,) = p.actor("meet 1", total, out=[spec(4)], kind="boxing", queue="comm", comm=meet, rank=1)
    (there,) = p.send(both, to=2, plane="inline", slots=2)
    p.result(there, on(2), (B,), (4,), rank=2)
    return p.plan()


INLINE, MEMORY, SHARED, AWAY = 1, 3, 5, 10  # registers that rank 1 gets in these ways, and one that it fills on rank 2


class RegisterDoor:
    """The rank, what has been sent to it so far, and ways to send it more."""

    def __init__(self, cluster: LocalCluster, traffic: list[tuple[int, Message]]) -> None:
        self.cluster = cluster
        self.traffic = traffic  # (sender, message) in the order in which they came; regions without descriptors
        self._compute = cluster.workers[ME]._compute
        self._calls = 0

    @property
    def job(self) -> InstalledPlan:
        return self._compute._jobs[0]

    def call(self) -> list[float]:
        """Run the plan once more."""
        self._calls += 1
        (found,) = self.cluster.run({"x": torch.full((4,), float(self._calls))})
        assert found.tolist() == [4.0 * self._calls] * 4
        return found.tolist()

    def say(self, peer: int, message: Message) -> MessageRefused | None:
        """Have the rank take in a message, on the thread that takes it in; returns why it is refused."""
        found: list[MessageRefused | None] = []
        done = threading.Event()

        def take() -> None:
            try:
                if isinstance(message, Ready) and message.payload is None:  # up to where a thread waits for its data
                    job = self._compute._transfers._jobs.get(message.plan)
                    if job is None:
                        self._compute.deliver(peer, message)
                    else:
                        job.expect(peer, message)
                else:
                    self._compute._take_in(peer, message)
                found.append(None)
            except MessageRefused as error:
                found.append(error.of(peer))
            finally:
                done.set()

        self._compute._inbox.put(take)
        assert done.wait(LIMIT), "the compute thread hangs"
        assert found, "the compute thread has failed"
        return found[0]

    def fits(self, peer: int, message: Message) -> bool:
        """Whether a rank could send this now: the next token of a call that has not begun here, for one."""
        if not isinstance(message, Ready | Filled | Contributed) or message.plan != 0:
            return isinstance(message, Credit | Region | Ready | Filled | Contributed) and 0 < message.plan < 65
        if isinstance(message, Contributed):
            group = self.job.groups.get(message.group)
            return group is not None and peer == 0 and message.step == group._heard[0]
        ways: dict[int, type] = {INLINE: tuple, MEMORY: type(None), SHARED: Filled}
        way = type(message.payload) if isinstance(message, Ready) else Filled
        if peer != 0 or ways.get(message.register) is not way or message.sequence != self.job.due[message.register]:
            return False
        return isinstance(message, Filled) or (
            message.nbytes == 16 and (message.payload is None or [len(one) for one in message.payload] == [16])
        )

    def state(self) -> Any:
        """All that a message could have changed, as plain data; taken on the thread that owns it."""
        found: list[Any] = []
        done = threading.Event()

        def look() -> None:
            job, compute = self.job, self._compute
            machine = job.machine
            found.append((
                {id: (r.begun, r.complete, r.released, [e.done for e in r.readers])
                 for id, r in machine._registers.items()},
                {id: (a.fired, a.limit, a.missing) for id, a in machine._actors.items()},
                {id: ([value is not None for value in slots._values], list(slots._left))
                 for id, slots in job.slots.items()},
                dict(job.due), dict(job._announced), sorted(job._borrowed), {*job.shared},
                {id: (dict(g._heard), g._steps, g._done, g._read) for id, g in job.groups.items()},
                compute._early.plans, dict(compute._early._counts), dict(compute._stamps._heard),
                compute._transfers._early.plans, dict(compute._transfers._early._counts),
                dict(compute._stamps._matched), dict(compute._stamps.differing), sorted(compute._early._dropped),
                {name: encode([value]) for name, value in compute._variables.items()}, len(compute._pending),
                sorted(compute._jobs), compute.active,
            ))  # fmt: skip
            done.set()

        self._compute._inbox.put(look)
        assert done.wait(LIMIT), "the compute thread hangs"
        return found[0]


@contextmanager
def rank_of_three() -> Iterator[RegisterDoor]:
    """The rank, after two calls; a call after the last message must still come out right."""
    traffic: list[tuple[int, Message]] = []
    send = MemoryTransport.send

    def record(self: MemoryTransport, peer: int, message: Message) -> None:
        if peer == ME:
            traffic.append((self._rank, replace(message, descriptor=-1) if isinstance(message, Region) else message))
        send(self, peer, message)

    MemoryTransport.send = record  # type: ignore[method-assign]
    try:
        with LocalCluster(meeting_of_all_ways(), library={}, timeout=LIMIT) as cluster:
            door = RegisterDoor(cluster, traffic)
            door.call()
            door.call()
            yield door
            door.call()
            door.call()
    finally:
        MemoryTransport.send = send  # type: ignore[method-assign]
