"""Measure what one firing of an actor costs in a worker: in chains that pass a tensor on, or add to it."""

from __future__ import annotations

import time

import click
import torch

from actorflow.testing.local_cluster import LocalCluster
from actorflow_compiler.core.ops import Ref
from actorflow_compiler.plan.plan import (
    Actor,
    ActorKind,
    Body,
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

ADD = Body(1, (Step("aten.add.Tensor", (Ref(0), 1), (), (1,)),), (1,))


def chain(length: int, slots: int, body: bool) -> Plan:
    """A source, ``length`` actors in a row and a sink, on one rank."""
    spec = TensorSpec((1,), "float32", "B")
    last = length + 1
    actors = [
        Actor(0, "source", 0, "source", ActorKind.SOURCE, operands=(OfInput("x"),), targets=(FromRegister(0, 0),))
    ]
    for i in range(1, last):
        part = {"operands": (FromRegister(i - 1, 0),), "targets": (FromRegister(i, 0),)}
        actors.append(Actor(i, f"f{i}", 0, "compute", ActorKind.FORWARD, body=0 if body else None, **part))  # type: ignore[arg-type]
    actors.append(
        Actor(last, "sink", 0, "sink", ActorKind.SINK, operands=(FromRegister(length, 0),), targets=(ToResult(0),))
    )
    registers = tuple(Register(i, i, (Read(i + 1),), (spec,), slots=slots) for i in range(last))
    orders = (Order(0, "source", (0,)), Order(0, "compute", tuple(range(1, last))), Order(0, "sink", (last,)))
    return Plan("chain", 1, 1, (ADD,), tuple(actors), registers, orders=orders)


def measure(plan: Plan, calls: int, in_flight: int) -> tuple[float, float]:
    """µs per fire over some calls, on the clock and of the process's CPU time, each best of five."""
    x = torch.zeros(1)
    fires = calls * len(plan.actors)
    clock, cpu = [], []
    with LocalCluster(plan, in_flight=in_flight, library={}) as cluster:
        worker = cluster.workers[0]
        for _ in range(6):
            start, used = time.perf_counter(), time.process_time()
            for _ in range(calls):
                worker.issue(0, {"x": x})
            worker.wait_all(60)
            clock.append((time.perf_counter() - start) / fires * 1e6)
            cpu.append((time.process_time() - used) / fires * 1e6)
    return min(clock[1:]), min(cpu[1:])


def add_alone(count: int) -> tuple[float, float]:
    """µs of the add that the actors of the second chain do, as for ``measure``."""
    x = torch.zeros(1)
    clock, cpu = [], []
    for _ in range(5):
        start, used = time.perf_counter(), time.process_time()
        for _ in range(count):
            torch.ops.aten.add.Tensor(x, 1)
        clock.append((time.perf_counter() - start) / count * 1e6)
        cpu.append((time.process_time() - used) / count * 1e6)
    return min(clock), min(cpu)


@click.command()
@click.option("--length", default=50, help="Actors in the chain.")
@click.option("--calls", default=40, help="Calls in a measurement.")
@click.option("--slots", default=2, help="Slots of each register.")
def main(length: int, calls: int, slots: int) -> None:
    """Print µs per fire."""
    torch.set_num_threads(1)
    for what, (clock, cpu) in {
        "an actor that passes a tensor on": measure(chain(length, slots, False), calls, 4),
        "an actor that adds": measure(chain(length, slots, True), calls, 4),
        "the add alone": add_alone(5000),
    }.items():
        print(f"{what:34} {clock:6.2f} µs, {cpu:6.2f} µs of CPU time")


if __name__ == "__main__":
    main()
