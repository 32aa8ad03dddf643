"""Run a script on a Ray cluster with one actor for each rank, and return the exit status.

A placement group has one bundle for each node of the run; rank 0's output comes to this terminal, the other ranks'
to files beside it, as on any cluster.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from actorflow.rendezvous.engines import RAY
from actorflow.rendezvous.options import TOKEN
from actorflow.support.terminal import say
from actorflow_compiler.core.errors import ClusterError

__all__ = ["RayRun", "RayNode", "run_on_ray", "shape_on_ray"]

PATIENCE = 15.0  # seconds for the other ranks to end by themselves after one has failed
TAIL = 15  # lines of a failed launcher's errors that are shown
_PASSED = ("ACTORFLOW_", "GLOO_", "NCCL_", "OMP_", "PYTHONHASHSEED", "TORCH_")  # variables passed on to ranks
_DROPPED = ("OMP_NUM_THREADS",)  # Ray sets it to 1; the launcher chooses a better value


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node of the cluster that is alive."""

    name: str
    cpus: int
    gpus: int


@dataclass(frozen=True, slots=True)
class RayRun:
    """The options of a run on Ray; ``shape_on_ray`` checks them."""

    script: str
    argv: tuple[str, ...]
    options: tuple[str, ...]  # of `actorflow run`, for each rank's launcher
    devices: int | None  # on each node; None: its GPUs, else 1
    nnodes: int | None  # None: all that have these devices
    gpus: bool = True  # use GPUs where there are any
    token: str = field(default="", repr=False)  # empty: a new one
    timeout: float = 300.0  # seconds to wait for the cluster's devices


@dataclass(slots=True)
class _RankState:
    """The state of a rank's launcher."""

    node: str
    status: int | None = None
    lost: str = ""  # why its actor is gone
    errors: list[bytes] = field(default_factory=list)  # the last pieces of the launcher's standard error


def shape_on_ray(
    nodes: Sequence[RayNode], devices: int | None, nnodes: int | None, gpus: bool
) -> tuple[int, int, bool]:
    """(Number of nodes, devices on each, whether these are GPUs); ClusterError if the cluster lacks them."""
    gpus = gpus and any(node.gpus for node in nodes)
    kind = "GPU" if gpus else "CPU"
    has = [(node.name, node.gpus if gpus else node.cpus) for node in nodes]
    listed = ", ".join(f"{name} has {count}" for name, count in has) or "it has no node"
    if devices is None:
        counts = {count for _, count in has if count} if gpus else {1}
        if len(counts) > 1:
            raise ClusterError(
                f"the nodes of the Ray cluster have different numbers of GPUs ({listed}), and every node of a run "
                "needs the same number of devices: give --devices"
            )
        devices = counts.pop()
    fitting = sum(count >= devices for _, count in has)
    if fitting < (nnodes or 1):
        raise ClusterError(
            f"the Ray cluster has {fitting} node{'s' * (fitting != 1)} with {devices} {kind}{'s' * (devices > 1)}, and "
            f"{nnodes or 1} {'is' if (nnodes or 1) == 1 else 'are'} needed, one {kind} for each device of a node "
            f"({listed}). Give smaller --devices or --nnodes, or add nodes (`ray start`)."
        )
    return nnodes or fitting, devices, gpus


def run_on_ray(run: RayRun) -> int:
    """Run to the end; returns the exit status: 0, or that of rank 0 or of a failed rank.

    130 after Ctrl-C and 143 after SIGTERM.  Raises ClusterError where Ray is not installed, there is no cluster, or
    it lacks the devices.
    """
    ray = _connected()
    try:
        nodes = [
            RayNode(n["NodeName"], int(n["Resources"].get("CPU", 0)), int(n["Resources"].get("GPU", 0)))
            for n in ray.nodes()
            if n["Alive"]
        ]
        nnodes, devices, gpus = shape_on_ray(nodes, run.devices, run.nnodes, run.gpus)
        group = _placed(ray, nnodes, devices, gpus, run.timeout)
        try:
            return asyncio.run(_follow_all(ray, group, run, nnodes, devices, gpus))
        except (KeyboardInterrupt, asyncio.CancelledError) as e:
            number = signal.SIGINT if isinstance(e, KeyboardInterrupt) else signal.SIGTERM
            say(f"ended by {number.name}")
            return 128 + number
        finally:
            ray.util.remove_placement_group(group)  # ends the remaining actors
    finally:
        ray.shutdown()


def _connected() -> Any:
    """The module ray, connected to the cluster."""
    try:
        ray: Any = import_module("ray")
        import_module("ray.util")
    except ImportError as e:
        raise ClusterError(f"--on ray needs Ray, which is not installed ({e}): pip install 'actorflow[ray]'") from e
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as e:
        raise ClusterError(
            "--on ray found no Ray cluster to run on: start one (`ray start --head`, and `ray start --address` on the "
            f"other nodes), or say where it is: RAY_ADDRESS=10.0.0.1:6379 ({str(e).partition('.')[0]})"
        ) from e
    return ray


def _placed(ray: Any, nnodes: int, devices: int, gpus: bool, timeout: float) -> Any:
    """Wait for a placement group, and return it."""
    bundle = {"CPU": devices, **({"GPU": devices} if gpus else {})}
    group = ray.util.placement_group([bundle] * nnodes, strategy="STRICT_SPREAD" if nnodes > 1 else "STRICT_PACK")
    shown = f"{nnodes} node{'s' * (nnodes > 1)} with {devices} free {'GPU' if gpus else 'CPU'}s"
    if not group.wait(min(5.0, timeout)):
        say(f"waiting for {shown}: others use the cluster")
        if not group.wait(timeout):
            free = ray.available_resources()
            ray.util.remove_placement_group(group)
            raise ClusterError(
                f"the Ray cluster had no {shown} for {timeout:g} s (--join-timeout); free in all: "
                f"{free.get('CPU', 0):g} CPUs, {free.get('GPU', 0):g} GPUs. Wait for what runs there, or end it."
            )
    return group


async def _follow_all(ray: Any, group: Any, run: RayRun, nnodes: int, devices: int, gpus: bool) -> int:
    """Start the actors, show rank 0's output, and see all to their end."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    world = nnodes * devices
    actors = _actors(ray, group, world, devices, gpus)
    try:
        places = await asyncio.gather(*(actor.where.remote(nnodes) for actor in actors))
    except ray.exceptions.RayError as e:
        raise ClusterError(
            f"Ray could not start an actor for each device: {_short(e)}. actorflow and what it needs have to be "
            "installed on every node of the cluster."
        ) from e
    _, address, port = places[0]
    seen = [_RankState(f"{host} ({ip})") for host, ip, _ in places]
    say(f"{world} Ray actor{'s' * (world > 1)} on {nnodes} node{'s' * (nnodes > 1)}; rank 0 is on {seen[0].node}")
    passed = {name: value for name, value in os.environ.items() if name.startswith(_PASSED)}
    passed[TOKEN.variable] = run.token or secrets.token_hex(16)
    command = ["-P", "-m", "actorflow", "run", run.script, "--on", "ray", "--devices", str(devices), *run.options]
    follows = []
    for rank, actor in enumerate(actors):
        place = {
            RAY.rank: rank, RAY.world: world, RAY.task: rank % devices, RAY.tasks: devices,
            RAY.node: rank // devices, RAY.nnodes: nnodes, RAY.master: address, RAY.port: port,
        }  # fmt: skip
        variables = passed | {name: str(value) for name, value in place.items()}
        pieces = actor.run.options(num_returns="streaming").remote(
            [*command, "--", *run.argv], os.getcwd(), variables, _DROPPED
        )
        follows.append(asyncio.ensure_future(_follow(ray, rank, pieces, seen[rank])))
    try:
        await _until_one_fails(follows, seen)
        await asyncio.wait(follows, timeout=PATIENCE)
        ended_itself = seen[0].status is not None
        for rank, actor in enumerate(actors):
            if seen[rank].status is None and not seen[rank].lost:
                actor.stop.remote()
        await asyncio.wait(follows, timeout=PATIENCE)
    except asyncio.CancelledError:  # Ctrl-C, SIGTERM
        for actor in actors:
            actor.stop.remote()
        await asyncio.wait(follows, timeout=PATIENCE)
        raise
    return _report(seen, ended_itself)


def _actors(ray: Any, group: Any, world: int, devices: int, gpus: bool) -> list[Any]:
    """Start an actor for each rank, those of a node in one bundle of the placement group."""
    strategies: Any = import_module("ray.util.scheduling_strategies")
    from actorflow.launch.ray_rank import RayRank

    remote = ray.remote(RayRank)
    return [
        remote.options(
            num_cpus=1,
            num_gpus=int(gpus),
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=rank // devices
            ),
        ).remote()
        for rank in range(world)
    ]


async def _until_one_fails(follows: Sequence[asyncio.Future[None]], seen: Sequence[_RankState]) -> None:
    waiting: set[asyncio.Future[None]] = set(follows)
    while waiting and not any(rank.status or rank.lost for rank in seen):
        _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)


async def _follow(ray: Any, rank: int, pieces: Any, seen: _RankState) -> None:
    """Print or keep the output of a rank's launcher, until it has ended or its actor is lost."""
    try:
        async for piece in pieces:
            name, data = await piece
            if name == "ended":
                seen.status = data
            elif rank == 0:
                stream = sys.stdout if name == "stdout" else sys.stderr
                stream.buffer.write(data)
                stream.buffer.flush()
            elif name == "stderr":
                seen.errors = [*seen.errors[-TAIL:], data]
    except ray.exceptions.RayError as e:
        seen.lost = _short(e)
    if seen.status is None and not seen.lost:
        seen.lost = "it ended without a word"


def _report(seen: Sequence[_RankState], told: bool) -> int:
    """Print the failures that rank 0's launcher has not printed; returns the exit status.

    ``told``: rank 0's launcher ended by itself, and has printed its failures.
    """
    for rank, one in enumerate(seen):
        if one.lost:
            say(f"the Ray actor of rank {rank} on {one.node} was lost: {one.lost}")
    failed = next((rank for rank, one in enumerate(seen) if one.status), None)
    if failed and not told:
        lines = b"".join(seen[failed].errors).decode(errors="replace").splitlines()
        say(f"rank {failed} on {seen[failed].node} ended with {seen[failed].status}:")
        print("\n".join(f"  {line}" for line in lines[-TAIL:]), file=sys.stderr)
    codes = [one.status for one in seen if one.status]
    if seen[0].status and not any(one.lost for one in seen):
        return seen[0].status
    return 1 if any(one.lost for one in seen) else next(iter(codes), 0)


def _short(error: BaseException) -> str:
    """The informative lines of one of Ray's errors."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(line for line in lines if not line.startswith(("class_name:", "namespace:", "pid:")))[:1000]
