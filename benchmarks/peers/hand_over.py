"""Two ranks of actorflow, one of which passes tensors of 64 bytes to the other: suite.py starts them."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from pathlib import Path

import torch
from ray_graph import PASSED, token

sys.path.extend(str(Path(__file__).resolve().parents[1] / name) for name in (".", "pipelines"))

from transport import passing
from turns import Steps, take_turns

from actorflow.control.cluster import Cluster
from actorflow.rendezvous.settings import Settings, cores_of
from actorflow.runtime.worker import Worker
from actorflow.session.planes import share
from actorflow.transport.gloo import GlooPlane


def serve(rank: int, address: str, port: int) -> None:
    """Be one rank; contenders are plans with "1 slot", "8 slots" and so on."""
    torch.set_num_threads(1)
    cluster = Cluster(Settings(rank, rank, 2, devices=2, master_port=port, token="benchmark", local=True))
    cluster.join()
    worker = Worker(rank, cluster, {"gloo": GlooPlane(rank, cluster.store())}, gated=False, cores=cores_of(rank, 2))
    cluster.on_message(worker.deliver)
    cluster.on_line(worker.attach)
    cluster.connect([1 - rank])
    plans = 0

    def made(name: str) -> Steps:
        nonlocal plans
        number = plans
        plans += 1
        plan = passing(token().numel() * 4, int(name.split()[0]), PASSED)
        worker.install(number, share(plan, cluster.machines).for_rank(rank))
        x = token()

        def steps(count: int) -> float | None:
            for _ in range(count):
                call = worker.issue(number, {"x": x} if rank == 0 else {})
                call.wait(60)
            return float(call.result(0)) if rank else None  # of what rank 1 took of each, the mean

        return steps

    take_turns(address, rank, lambda name: (made(name), dict))
    cluster.goodbye()
    worker.close()


def main() -> None:
    """Start rank 1, and be rank 0."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = int(found.getsockname()[1])
    other = multiprocessing.get_context("spawn").Process(target=serve, args=(1, sys.argv[1], port), daemon=True)
    other.start()
    serve(0, sys.argv[1], port)
    other.join(20)
    os._exit(0)


if __name__ == "__main__":
    main()
