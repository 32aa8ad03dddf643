"""Measure the control plane of many ranks on one machine: joining, a plan, calls, the end, and a rank that is killed.

python benchmarks/scale.py                      10, 100 and 300 ranks, two minutes
python benchmarks/scale.py --ranks 1000         --processes: those that the ranks share, rank 0 has one of its own

Ranks are those of a real run, without a script and without a worker: each has its server, its links and its part in
what all agree on.  Those of a process share its thread.  All of a machine's cores work for all ranks here, so times are
upper bounds; memory and bytes are what they are.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import click
import psutil
import uvloop

from actorflow.control.control_plane import ControlPlane
from actorflow.control.drops import NO_DROPS
from actorflow.control.step_log import CommonStep, StepKind
from actorflow.rendezvous.failure import Failure
from actorflow.rendezvous.network import unused_port
from actorflow.rendezvous.settings import Settings
from actorflow.rendezvous.ticket import own_ticket

PLAN = 20_000  # bytes of a rank's part of a plan
STEPS, PACE = 40, 0.05  # calls, and seconds from one to the next
PATIENCE = 600.0  # seconds for ranks to join, or not to answer
FIGURES = ("join s", "plan s", "MB of rank 0", "CPU ms a call, rank 0", "bytes a rank and call", "agreed s", "end s",
           "killed, known to all s")  # fmt: skip


@click.command()
@click.option("--ranks", multiple=True, type=int, default=(10, 100, 300), show_default=True)
@click.option("--processes", default=4, show_default=True, help="Processes that ranks other than 0 share.")
@click.option("--part", hidden=True, help="Be a process of a run: its ranks, those of the run, the port, how it ends.")
def main(ranks: Sequence[int], processes: int, part: str | None) -> None:
    """Measure, or be one of the processes."""
    if part is not None:
        own, world, port, ends = json.loads(part)
        uvloop.run(Part(own, world, port).run(ends))
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))
    for world in ranks:
        found = {**run(world, processes, ends=True), **run(world, processes, ends=False)}
        print(f"{world} ranks: " + ", ".join(f"{name} {found[name]:,.2f}" for name in FIGURES), flush=True)


def run(world: int, processes: int, ends: bool) -> dict[str, float]:
    """Figures of a run, which ends as scripts do, or by a rank that is killed."""
    port = unused_port("127.0.0.1")
    shares = [[0], [world - 1], *(list(range(1 + k, world - 1, processes)) for k in range(processes))]
    parts = [
        subprocess.Popen([sys.executable, __file__, "--part", json.dumps([own, world, port, ends])],
                         stdout=subprocess.PIPE, text=True)
        for own in shares if own
    ]  # fmt: skip
    try:
        assert parts[0].stdout is not None
        if not ends:
            parts[0].stdout.readline()  # all calls are made
            killed = time.monotonic()
            parts[1].send_signal(signal.SIGKILL)
        said = [process.communicate(timeout=2 * PATIENCE)[0] for process in parts]
    finally:
        for process in parts:
            process.kill()
            process.wait()
    found = [json.loads(text.splitlines()[-1]) for text in (said if ends else said[:1] + said[2:])]
    if ends:
        return dict(found[0])
    return {"killed, known to all s": max(one["failed at"] for one in found) - killed}


@dataclass
class Part:
    """The ranks of one process."""

    own: Sequence[int]
    world: int
    port: int

    async def run(self, ends: bool) -> None:
        """Print what they measure; rank 0's process measures what is of the whole run."""
        loop = asyncio.get_running_loop()
        self.agreed: dict[int, asyncio.Future[None]] = {rank: loop.create_future() for rank in self.own}
        self.failed: dict[int, asyncio.Future[float]] = {rank: loop.create_future() for rank in self.own}
        planes = [self.plane(rank, loop) for rank in self.own]
        began = time.monotonic()
        joined: list[Future[None]] = [Future() for _ in planes]
        running = [asyncio.ensure_future(plane.run(done)) for plane, done in zip(planes, joined, strict=True)]
        await asyncio.gather(*map(asyncio.wrap_future, joined))
        found = {"join s": time.monotonic() - began}

        began = time.monotonic()
        whole = [bytes(PLAN)] * self.world
        await asyncio.gather(*(plane.scatter(0, "plan", None if plane.rank else whole) for plane in planes))
        found["plan s"] = time.monotonic() - began

        cpu, sent = time.process_time(), psutil.net_io_counters(pernic=True)["lo"].bytes_sent
        for call in range(STEPS):
            for plane in planes:
                plane.steps.announce(CommonStep(StepKind.CALL, "digest", "step(x)", call), NO_DROPS)
            await asyncio.sleep(PACE)  # the work of a step
        began = time.monotonic()
        for plane in planes:
            plane.steps.log.want()
            plane.steps.tell()
        await asyncio.gather(*self.agreed.values())
        found["agreed s"] = time.monotonic() - began
        sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent - sent
        found["bytes a rank and call"] = sent / self.world / STEPS
        found["CPU ms a call, rank 0"] = 1000 * (time.process_time() - cpu) / STEPS
        found["MB of rank 0"] = psutil.Process().memory_info().rss / 1e6

        began = time.monotonic()
        if ends:
            await asyncio.gather(*(plane.goodbye() for plane in planes))
            found["end s"] = time.monotonic() - began
            await asyncio.gather(*running)
        else:
            print("called", flush=True)
            found["failed at"] = max(await asyncio.gather(*self.failed.values()))
        print(json.dumps(found), flush=True)  # here, since hundreds of streams that are cut may end the process

    def plane(self, rank: int, loop: asyncio.AbstractEventLoop) -> ControlPlane:
        """The control plane of a rank that has not joined yet."""
        settings = Settings(
            rank=rank, local_rank=rank, world=self.world, devices=self.world, master_port=self.port, token="scale",
            join_timeout=PATIENCE, lost_after=PATIENCE, local=False,
        )  # fmt: skip
        ticket = own_ticket(settings)

        def on_go(call: int, _: object) -> None:
            if call == STEPS - 1:
                self.agreed[rank].set_result(None)

        def on_failure(_: Failure) -> None:
            self.failed[rank].set_result(time.monotonic())

        return ControlPlane(
            settings, loop, lambda port: replace(ticket, address=f"127.0.0.1:{port}", pid=os.getpid()),
            ("127.0.0.1", 1), on_go, lambda *_: None, lambda _: None, on_failure, lambda _: None,
        )  # fmt: skip


if __name__ == "__main__":
    main()
