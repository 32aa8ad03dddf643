"""Compare collectives of one machine's ranks in shared memory with torch.distributed's over Gloo.

Each rank is a process that takes part in the same collectives in three ways, which take turns: as an actor of a plan
through shared memory, as the same actor over Gloo, and by a call of torch.distributed, in place where it can.  Actors
come with all that a plan needs around them: a source before, and one after that takes an element of the result.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import click
import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from actorflow.control.cluster import Cluster
from actorflow.rendezvous.settings import Settings
from actorflow.runtime.worker import Worker
from actorflow.session.planes import share
from actorflow.transport.gloo import GlooPlane
from actorflow_compiler.core.ops import Ref
from actorflow_compiler.plan.plan import (
    Actor,
    ActorKind,
    Body,
    Box,
    Collective,
    CollectiveKind,
    Exchange,
    FromRegister,
    OfInput,
    Order,
    Plan,
    Read,
    Register,
    Step,
    TensorSpec,
    ToResult,
)

KINDS = tuple(kind.value for kind in CollectiveKind)
SIZES = tuple(1 << n for n in range(10, 27, 2))  # bytes of the whole tensor: 1 KB … 64 MB
FIRST = Body(1, (Step("aten.select.int", (Ref(0), 0, 0), (), (1,)),), (1,))
WAYS = ("shared", "actor over Gloo", "torch.distributed")


@dataclass(frozen=True, slots=True)
class Case:
    """One collective on a float32 vector."""

    kind: CollectiveKind
    nbytes: int  # of the vector that is reduced, gathered, scattered or exchanged
    times: int  # in one measurement

    @property
    def text(self) -> str:
        """What is done, in short."""
        size = f"{self.nbytes >> 20} MB" if self.nbytes >= 1 << 20 else f"{self.nbytes >> 10} KB"
        return f"{self.kind} {size}"

    def sizes(self, ranks: int) -> tuple[int, int]:
        """The elements that a rank puts in, and those that it gets."""
        whole = self.nbytes // 4 // ranks * ranks
        part = whole // ranks
        return (part if self.kind == "all_gather" else whole), (part if self.kind == "reduce_scatter" else whole)

    def plan(self, ranks: int) -> Plan:
        """Every rank takes part ``times`` times, and takes the first element of each result."""
        given, got = self.sizes(ranks)
        part = self.nbytes // 4 // ranks
        actors: list[Actor] = []
        registers: list[Register] = []
        orders: list[Order] = []
        for rank in range(ranks):
            comm = Collective(self.kind, 0, tuple(range(ranks)), self._exchanges(rank, ranks, part))
            a, r = len(actors), len(registers)
            actors += [
                Actor(
                    a, "x", rank, "source", ActorKind.SOURCE, self.times, None, (OfInput("x"),), (FromRegister(r, 0),)
                ),
                Actor(
                    a + 1,
                    "meet",
                    rank,
                    "comm",
                    ActorKind.BOXING,
                    self.times,
                    None,
                    (FromRegister(r, 0),),
                    (FromRegister(r + 1, 0),),
                    comm,
                ),
                Actor(
                    a + 2,
                    "take",
                    rank,
                    "compute",
                    ActorKind.FORWARD,
                    self.times,
                    0,
                    (FromRegister(r + 1, 0),),
                    (FromRegister(r + 2, 0),),
                ),
                Actor(
                    a + 3, "sink", rank, "sink", ActorKind.SINK, 1, None, (FromRegister(r + 2, 0),), (ToResult(rank),)
                ),
            ]
            registers += [
                Register(r, a, (Read(a + 1),), (TensorSpec((given,), "float32", "B"),), slots=2),
                Register(r + 1, a + 1, (Read(a + 2),), (TensorSpec((got,), "float32", "B"),)),
                Register(r + 2, a + 2, (Read(a + 3),), (TensorSpec((), "float32", "B"),), fill=self.times),
            ]
            orders += [
                Order(rank, "source", (a,) * self.times),
                Order(rank, "comm", (a + 1,) * self.times),
                Order(rank, "compute", (a + 2,) * self.times),
                Order(rank, "sink", (a + 3,)),
            ]
        return Plan("meeting", ranks, self.times, (FIRST,), tuple(actors), tuple(registers), orders=tuple(orders))

    def _exchanges(self, rank: int, ranks: int, part: int) -> tuple[Exchange, ...]:
        parts = tuple((Box((m * part,), (part,)),) for m in range(ranks))
        first = ((Box((0,), (part,)),),) * ranks
        match self.kind:
            case CollectiveKind.ALL_GATHER:
                return (Exchange(first, parts),)
            case CollectiveKind.REDUCE_SCATTER:
                return (Exchange(parts, first, add=True),)
            case CollectiveKind.ALL_TO_ALL:
                return (Exchange(parts, parts),)
        return ()

    def call(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """The same by torch.distributed."""
        if self.kind == CollectiveKind.ALL_REDUCE:
            distributed.all_reduce(x)
        elif self.kind == CollectiveKind.ALL_GATHER:
            distributed.all_gather_into_tensor(out, x)
        elif self.kind == CollectiveKind.REDUCE_SCATTER:
            distributed.reduce_scatter_tensor(out, x)
        else:
            distributed.all_to_all_single(out, x)


def cases(kinds: tuple[str, ...], sizes: tuple[int, ...]) -> list[Case]:
    """What is measured."""
    return [Case(CollectiveKind(kind), size, max(3, min(100, (16 << 20) // size))) for kind in kinds for size in sizes]


def serve(rank: int, ranks: int, ports: tuple[int, int], rounds: int, made: list[Case], report: Connection) -> None:
    """Be one rank; rank 0 reports µs for each collective, on the clock and of the CPU of all ranks, by case and way."""
    torch.set_num_threads(1)
    cluster = Cluster(Settings(rank, rank, ranks, devices=ranks, master_port=ports[0], token="benchmark", local=True))
    cluster.join()
    store = TCPStore("127.0.0.1", ports[1], ranks, rank == 0, timeout=timedelta(seconds=60))
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    worker = Worker(rank, cluster, {"gloo": GlooPlane(rank, cluster.store())}, gated=False)
    cluster.on_message(worker.deliver)
    cluster.on_line(worker.attach)
    cluster.connect([other for other in range(ranks) if other != rank])
    found: list[list[list[tuple[float, float]]]] = []
    for at, case in enumerate(made):
        plan = case.plan(ranks)
        worker.install(2 * at, share(plan, cluster.machines).for_rank(rank))
        worker.install(2 * at + 1, plan.for_rank(rank))
        given, got = case.sizes(ranks)
        x, out = torch.zeros(given), torch.empty(got)

        def by_torch(case: Case = case, x: torch.Tensor = x, out: torch.Tensor = out) -> None:
            for _ in range(case.times):
                case.call(x, out)

        def by_plan(number: int, x: torch.Tensor = x) -> None:
            worker.issue(number, {"x": x}).wait(60)

        ways: list[Callable[[], None]] = [
            lambda at=at: by_plan(2 * at),  # type: ignore[misc]
            lambda at=at: by_plan(2 * at + 1),  # type: ignore[misc]
            by_torch,
        ]
        found.append([[] for _ in ways])
        for turn in range(rounds + 1):
            for way, run in enumerate(ways):
                cluster.gather("ready", b"")
                cluster.scatter("go", [b""] * ranks if rank == 0 else None)
                start, used = time.perf_counter(), time.process_time()
                run()
                spent = cluster.gather("done", struct.pack("d", time.process_time() - used))
                if spent is not None and turn:
                    clock, cpu = time.perf_counter() - start, sum(struct.unpack("d", s)[0] for s in spent)
                    found[-1][way].append((clock / case.times * 1e6, cpu / case.times * 1e6))
        worker.drop({2 * at, 2 * at + 1})
    if rank == 0:
        report.send(found)
    cluster.goodbye()
    worker.close()
    distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def measure(ranks: int, rounds: int, made: list[Case]) -> list[Any]:
    """Start the ranks and return what rank 0 reports."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    ports = (_free_port(), _free_port())
    processes = [
        context.Process(target=serve, args=(rank, ranks, ports, rounds, made, theirs), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    theirs.close()
    found: list[Any] = mine.recv()
    for process in processes:
        process.join(20)
    return found


@click.command()
@click.option("--rounds", default=5, help="Measurements of each.")
@click.option("--ranks", default=(2, 4), multiple=True, help="Numbers of ranks.")
@click.option("--kind", "kinds", default=KINDS, multiple=True, type=click.Choice(KINDS), help="Collectives.")
@click.option("--size", "sizes", default=SIZES, multiple=True, help="Bytes of the whole vector.")
def main(rounds: int, ranks: tuple[int, ...], kinds: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    """Print the median µs for a collective, on the clock and of the CPU time of all ranks, and ratios to torch's.

    On a machine that does other things too, the CPU time says more.
    """
    made = cases(kinds, sizes)
    for count in ranks:
        head = "".join(f"{way:>18}" for way in WAYS) + f"{'ratio':>8}"
        print(f"{f'{count} ranks, µs for each':24}{head}   CPU: {head}")
        for case, ways in zip(made, measure(count, rounds, made), strict=True):
            line = f"{case.text:24}"
            for kind in range(2):
                medians = [statistics.median(times[kind] for times in way) for way in ways]
                line += "".join(f"{m:18.1f}" for m in medians) + f"{medians[0] / medians[2]:8.2f}"
                line += "" if kind else " " * 8
            print(line, flush=True)


if __name__ == "__main__":
    main()
