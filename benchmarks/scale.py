"""Measure the control plane of many ranks on one machine: joining, a plan, calls, the end, and a rank that is killed.

python benchmarks/scale.py                      10, 100 and 1,000 ranks, some five minutes
python benchmarks/scale.py --ranks 300          --processes: those that the ranks share, rank 0 has one of its own

Ranks are those of a real run, without a script and without a worker: each has its server, its links and its part in
what all agree on.  The plan is that of a training step of a small GPT on data × 2 tensor-parallel devices: rank 0
compiles it, every rank gets its part and verifies it; nothing is computed.  Those of a process share its thread.  All
of a machine's cores work for all ranks here, so times are upper bounds, and calls come the slower, the more ranks there
are; memory and traffic are what they are.  Traffic is counted without signs of life, which come every other second on
each link.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import psutil
import uvloop
from gpt_request import training_request

import actorflow as flow
from actorflow.control.control_plane import ControlPlane
from actorflow.control.drops import NO_DROPS
from actorflow.control.step_log import CommonStep, StepKind
from actorflow.rendezvous.failure import Failure
from actorflow.rendezvous.network import unused_port
from actorflow.rendezvous.settings import Settings
from actorflow.rendezvous.ticket import own_ticket
from actorflow_compiler.capture.request import TargetDevices
from actorflow_compiler.compile import capture_step, fold_captured
from actorflow_compiler.core.garbage_collection import young_only
from actorflow_compiler.plan.rank_parts import PlanParts, join, split
from actorflow_compiler.plan.verify import verify
from actorflow_protos import runtime_pb2 as pb
from actorflow_scheduler.schedule import schedule

ROOT = Path(__file__).resolve().parents[1]
LAYERS, WIDTH, HEADS, CONTEXT, TENSOR = 2, 64, 4, 32, 2  # of the GPT
STEPS, PACE, FOR_EACH = 40, 0.1, 0.001  # calls, and seconds from one to the next, and for each rank
PATIENCE = 600.0  # seconds for ranks to join, or not to answer
FIGURES = (
    "join s", "CPU s to join", "compile s", "CPU s to compile", "plan s", "CPU s to the plan, all ranks",
    "bytes of plan", "MB of rank 0", "CPU ms a call, rank 0",
    "messages a call, rank 0", "bytes a call, rank 0", "messages a call, others", "bytes a call, others", "agreed s",
    "end s", "killed, known to all s",
)  # fmt: skip
OF_ALL = ("CPU s to join", "CPU s to the plan, all ranks")  # figures of each process that are added up


@click.command()
@click.option("--ranks", multiple=True, type=int, default=(10, 100, 1000), show_default=True)
@click.option("--processes", default=4, show_default=True, help="Processes that ranks other than 0 share.")
@click.option("--part", hidden=True, help="Be a process of a run: its ranks, those of the run, the port, how it ends.")
def main(ranks: Sequence[int], processes: int, part: str | None) -> None:
    """Measure, or be one of the processes."""
    if part is not None:
        own, world, port, ends = json.loads(part)
        gc.freeze()  # as the server does that a run's ranks are forked from
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
        others = [count for one in found[1:] for count in one["traffic"].values()]
        [[messages, size]] = found[0].pop("traffic").values()
        return found[0] | {name: sum(one[name] for one in found) for name in OF_ALL} | {
            "messages a call, rank 0": messages / STEPS, "bytes a call, rank 0": size / STEPS,
            "messages a call, others": sum(count for count, _ in others) / len(others) / STEPS,
            "bytes a call, others": sum(size for _, size in others) / len(others) / STEPS,
        }  # fmt: skip
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
        began, cpu = time.monotonic(), time.process_time()
        joined: list[Future[None]] = [Future() for _ in planes]
        running = [asyncio.ensure_future(plane.run(done)) for plane, done in zip(planes, joined, strict=True)]
        await asyncio.gather(*map(asyncio.wrap_future, joined))
        found: dict[str, Any] = {"join s": time.monotonic() - began, "CPU s to join": time.process_time() - cpu}

        began, cpu = time.monotonic(), time.process_time()
        to_all, to_each = None, None
        if 0 in self.own:
            parts = await loop.run_in_executor(None, parts_of_plan, self.world)
            found["compile s"], found["CPU s to compile"] = time.monotonic() - began, time.process_time() - cpu
            to_all = [parts.shared] * self.world
            to_each = [b"", *(parts.of(rank) for rank in range(1, self.world))]
            found["bytes of plan"] = len(parts.shared) + sum(map(len, parts.classes))
        shared = await asyncio.gather(*(plane.scatter(0, "plan", to_all) for plane in planes))
        own = await asyncio.gather(*(plane.scatter(1, "part of plan", to_each) for plane in planes))
        for plane, common, part in zip(planes, shared, own, strict=True):
            if plane.rank:
                verify(join(common, part, plane.rank))
                await asyncio.sleep(0)  # signs of life of the ranks that share this thread go on
        await asyncio.gather(*(plane.gather(2, "all have it", b"") for plane in planes))
        found["plan s"], found["CPU s to the plan, all ranks"] = time.monotonic() - began, time.process_time() - cpu

        traffic = self.count_traffic(planes)
        cpu = time.process_time()
        for call in range(STEPS):
            for plane in planes:
                plane.steps.announce(CommonStep(StepKind.CALL, "digest", "step(x)", call), NO_DROPS)
            await asyncio.sleep(PACE + FOR_EACH * self.world)  # the work of a step
        began = time.monotonic()
        for plane in planes:
            plane.steps.log.want()
            plane.steps.tell()
        await asyncio.gather(*self.agreed.values())
        found["agreed s"] = time.monotonic() - began
        found["traffic"] = {plane.rank: traffic[plane.rank] for plane in planes}
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

    def count_traffic(self, planes: Sequence[ControlPlane]) -> dict[int, list[int]]:
        """Count from now on what ranks send: rank → messages (each of one or more items) and their bytes."""
        found: dict[int, list[int]] = {}
        for plane in planes:
            counts = found[plane.rank] = [0, 0]
            for link in plane.links.values():
                link._take = partial(counted, link._take, counts)  # type: ignore[method-assign]
        return found

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


@young_only()
def parts_of_plan(world: int) -> PlanParts:
    """The messages to all ranks of a plan that trains a small GPT."""
    sys.path.append(str(ROOT / "examples"))
    from gpt import GPT

    model = GPT(LAYERS, WIDTH, HEADS, CONTEXT)
    by_row, by_column = (None, flow.sbp.split(0)), (None, flow.sbp.split(1))
    flow.distribute(model, {r".*up\.(weight|bias)": by_row, r".*down\.weight": by_column})
    mesh = {"data": world // TENSOR, "tensor": TENSOR}
    request = training_request(model, (world, CONTEXT), TargetDevices(world, "cpu"), mesh)
    folded = fold_captured(capture_step(request), request, runs=True)
    return split(schedule(folded.cut, request.devices.hardware), range(1, world))


def counted(take: Callable[[], tuple[pb.Batch, bool]], counts: list[int]) -> tuple[pb.Batch, bool]:
    """What is written next on a link, counted if it is more than a sign of life."""
    batch, last = take()
    if any(item.WhichOneof("kind") != "beat" for item in batch.items):
        counts[0] += 1
        counts[1] += batch.ByteSize()
    return batch, last


if __name__ == "__main__":
    main()
