"""Measure what it costs to pass a token to another process of this machine, over each transport there is.

Two processes run the same plans, a source that sends to a counter, as ranks of two runs at once: one
with Unix sockets and shared memory, one with gRPC and Gloo.  Measurements of both take turns.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import struct
import time
from multiprocessing.connection import Connection
from typing import Any

import click
import torch

from actorflow.control.cluster import Cluster
from actorflow.rendezvous.settings import Settings, cores_of
from actorflow.runtime.worker import Worker
from actorflow.session.planes import share
from actorflow.transport.gloo import GlooPlane
from actorflow_compiler.core.ops import Ref
from actorflow_compiler.plan.plan import (
    Actor,
    ActorKind,
    Body,
    FromRegister,
    OfInput,
    Order,
    Plan,
    Plane,
    Read,
    Register,
    Send,
    Step,
    TensorSpec,
    ToResult,
)

INLINE = 65536  # bytes; what the compiler lets travel inside a message
CREDITS = (1, 2, 8, 64)
SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)  # bytes
FIRST = Body(1, (Step("aten.select.int", (Ref(0), 0, 0), (), (1,)),), (1,))
WAYS = ("gRPC, Gloo", "Unix, shared")


def passing(nbytes: int, slots: int, tokens: int) -> Plan:
    """Rank 0 sends ``tokens`` copies of a tensor to rank 1, which takes the first element of each."""
    tensor, number = TensorSpec((nbytes // 4,), "float32", "B"), TensorSpec((), "float32", "B")
    comm = Send(0, 0, 1, plane=Plane.INLINE if nbytes <= INLINE else Plane.GLOO)
    actors = (
        Actor(0, "x", 0, "source", ActorKind.SOURCE, tokens, None, (OfInput("x"),), (FromRegister(0, 0),)),
        Actor(1, "send", 0, "send:1", ActorKind.SEND, tokens, None, (FromRegister(0, 0),), (FromRegister(1, 0),), comm),
        Actor(2, "take", 1, "compute", ActorKind.FORWARD, tokens, 0, (FromRegister(1, 0),), (FromRegister(2, 0),)),
        Actor(3, "sink", 1, "sink", ActorKind.SINK, 1, None, (FromRegister(2, 0),), (ToResult(0),)),
    )
    registers = (
        Register(0, 0, (Read(1),), (tensor,), slots=2),
        Register(1, 1, (Read(2),), (tensor,), slots=slots),
        Register(2, 2, (Read(3),), (number,), slots=1, fill=tokens),
    )
    orders = (
        Order(0, "source", (0,) * tokens),
        Order(0, "send:1", (1,) * tokens),
        Order(1, "compute", (2,) * tokens),
        Order(1, "sink", (3,)),
    )
    return Plan("passing", 2, tokens, (FIRST,), actors, registers, orders=orders)


def cases() -> list[tuple[str, int, int, int]]:
    """What is measured: its text, the bytes of a token, slots, and tokens in a measurement."""
    small = [(f"{credits} credit{'s' * (credits > 1)}, 64 bytes", 64, credits, 1000) for credits in CREDITS]
    large = [(f"{_text(size)}, 2 credits", size, 2, max(4, min(400, (64 << 20) // size))) for size in SIZES]
    return small + large


def serve(rank: int, ports: tuple[int, int], rounds: int, report: Connection) -> None:
    """Be one rank; rank 0 reports µs for each token, and those of CPU time on both ranks, by case and way."""
    torch.set_num_threads(1)
    workers = []
    for port, local in zip(ports, (False, True), strict=True):
        cluster = Cluster(Settings(rank, rank, 2, devices=2, master_port=port, token="benchmark", local=local))
        cluster.join()
        worker = Worker(rank, cluster, {"gloo": GlooPlane(rank, cluster.store())}, gated=False, cores=cores_of(rank, 2))
        cluster.on_message(worker.deliver)
        cluster.on_line(worker.attach)
        cluster.connect([1 - rank])
        for number, (_, nbytes, slots, tokens) in enumerate(cases()):
            plan = passing(nbytes, slots, tokens)
            worker.install(number, (share(plan, cluster.machines) if local else plan).for_rank(rank))
        workers.append((cluster, worker))
    found: list[list[list[tuple[float, float]]]] = [[[] for _ in WAYS] for _ in cases()]
    for _ in range(rounds + 1):
        for number, (_, nbytes, _, tokens) in enumerate(cases()):
            x = torch.ones(nbytes // 4)
            for way, (cluster, worker) in enumerate(workers):
                cluster.gather("ready", b"")
                cluster.scatter("go", [b"", b""] if rank == 0 else None)
                start, used = time.perf_counter(), time.process_time()
                worker.issue(number, {"x": x} if rank == 0 else {}).wait(60)
                spent = cluster.gather("done", struct.pack("d", time.process_time() - used))
                if spent is not None:
                    clock, cpu = time.perf_counter() - start, sum(struct.unpack("d", s)[0] for s in spent)
                    found[number][way].append((clock / tokens * 1e6, cpu / tokens * 1e6))
    if rank == 0:
        report.send([[times[1:] for times in ways] for ways in found])
    for cluster, _ in workers:
        cluster.goodbye()
    for _, worker in workers:
        worker.close()


def _text(nbytes: int) -> str:
    return f"{nbytes >> 20} MB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KB"


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@click.command()
@click.option("--rounds", default=5, help="Measurements of each.")
def main(rounds: int) -> None:
    """Print the median µs for a token, on the clock and of the CPU time of both processes, and ratios of the two ways.

    On a machine that does other things too, the CPU time says more.
    """
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    ports = (_free_port(), _free_port())
    ranks = [context.Process(target=serve, args=(rank, ports, rounds, theirs), daemon=True) for rank in (0, 1)]
    for process in ranks:
        process.start()
    theirs.close()
    found: list[Any] = mine.recv()
    head = "".join(f"{way:>14}" for way in WAYS) + f"{'ratio':>8}"
    print(f"{'µs for each token':24}{head}   CPU: {head}")
    for (text, *_), ways in zip(cases(), found, strict=True):
        line = f"{text:24}"
        for kind in range(2):
            before, after = (statistics.median(times[kind] for times in way) for way in ways)
            line += f"{before:14.1f}{after:14.1f}{after / before:8.2f}" + ("" if kind else " " * 8)
        print(line)
    for process in ranks:
        process.join(20)


if __name__ == "__main__":
    main()
