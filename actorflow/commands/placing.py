"""The flags of ``actorflow run`` and the place that an engine gave this process go in; this launcher's place comes out.

Flags go before the engine's variables, and must not contradict them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from actorflow.launch import slurm
from actorflow.rendezvous.engines import BY_OPTION, RAY, SLURM, TORCHRUN, Place, find_place
from actorflow.rendezvous.settings import Settings
from actorflow_compiler.core.errors import ClusterError

__all__ = ["ON", "Flags", "Placing", "placing"]

ON = ("auto", "none", *BY_OPTION)  # what --on takes


@dataclass(frozen=True, slots=True)
class Flags:
    """What the command line says; None and 0 for what it does not."""

    devices: int | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    port: int = 0
    token: str = ""
    insecure: bool = False
    join_timeout: float = 300.0  # seconds
    gpus: bool = True  # devices are GPUs, where there are any


@dataclass(frozen=True, slots=True)
class Placing:
    """Where this launcher is in its run, and how its ranks meet the others."""

    devices: int | None  # on each node; None: what the machine has
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    port: int = 0  # of the master; 0: any
    reserved: bool = False  # held for the master
    token: str = ""
    tasks: int = 1  # launchers on each node
    task: int = 0
    own_cores: bool = False
    given: frozenset[str] = frozenset()  # of "devices", "nodes" and "port", those that a script cannot change


def placing(flags: Flags, environ: Mapping[str, str], on: str = "auto") -> Placing:
    """Where this launcher is: as the engine says that has started it, else as the flags say.

    With torchrun it is collective, when there are several launchers.  Raises ClusterError where the flags or the
    variables make no sense, or contradict each other, and where several launchers have no secret.
    """
    place = None if on == "none" else find_place(environ, on)
    if flags.insecure and flags.token:
        raise ClusterError(
            "--insecure contradicts the token that --token-file or ACTORFLOW_TOKEN gives; drop one of them"
        )
    return _by_flags(flags) if place is None else _by_engine(flags, place, environ)


def _by_flags(flags: Flags) -> Placing:
    nnodes, node = flags.nnodes or 1, flags.node_rank or 0
    if node >= nnodes:
        raise ClusterError(f"--node-rank {node} is not below --nnodes {nnodes}")
    if nnodes > 1:
        if flags.master_addr is None or not flags.port:
            raise ClusterError(
                f"{nnodes} nodes need --master-addr (of node 0, as the others reach it) and --master-port (free there)"
            )
        if not flags.token and not flags.insecure:
            raise ClusterError(
                "several nodes need a shared secret, so that nobody else can join: set ACTORFLOW_TOKEN to the same "
                "value on every node, or give --token-file. On a network that you trust wholly, --insecure does without"
            )
    given = {"devices": flags.devices, "nodes": flags.nnodes, "port": flags.port}
    return Placing(
        devices=flags.devices,
        nnodes=nnodes,
        node_rank=node,
        master_addr=(flags.master_addr if nnodes > 1 else None) or "127.0.0.1",
        port=flags.port,
        token=flags.token,
        given=frozenset(name for name, value in given.items() if value),
    )


def _by_engine(flags: Flags, place: Place, environ: Mapping[str, str]) -> Placing:
    _check(flags, place)
    p = place
    several = p.nnodes * p.tasks > 1
    master, port, reserved, token = "127.0.0.1", flags.port, False, flags.token
    if several:
        master, port, reserved, token = _meet(flags, p, environ)
    given = {"devices": flags.devices or p.tasks > 1, "nodes": True, "port": flags.port}
    return Placing(
        devices=p.tasks if p.tasks > 1 else flags.devices or (p.gpus if flags.gpus else None) or None,
        nnodes=p.nnodes,
        node_rank=p.node,
        master_addr=master,
        port=port,
        reserved=reserved,
        token=token,
        tasks=p.tasks,
        task=p.task,
        own_cores=p.tasks > 1 and p.cores is not None and len(os.sched_getaffinity(0)) * p.tasks <= p.cores,
        given=frozenset(name for name, value in given.items() if value),
    )


def _check(flags: Flags, place: Place) -> None:
    """Raise ClusterError where a flag says what the engine says otherwise."""
    p = place
    said = (
        ("--nnodes", flags.nnodes, p.nnodes, f"{p.engine.nnodes}={p.nnodes}"),
        ("--node-rank", flags.node_rank, p.node, f"{p.engine.node}={p.node}"),
        ("--devices", flags.devices if p.tasks > 1 else None, p.tasks, f"{p.tasks} processes on each node"),
    )
    for flag, value, found, variable in said:
        if value is not None and value != found:
            raise ClusterError(
                f"{flag} {value} contradicts {p.engine.name}, which has started this process ({variable}"
                f"{', each of which is one device' if flag == '--devices' else ''}). Drop {flag}; or, to be told by "
                "flags alone, give --on none"
            )


def _meet(flags: Flags, place: Place, environ: Mapping[str, str]) -> tuple[str, int, bool, str]:
    """The master's address and port, whether that port is held for it, and the secret, equal for all launchers."""
    one = place.nnodes == 1
    insecure = flags.insecure
    if place.engine is SLURM:
        master = flags.master_addr or ("127.0.0.1" if one else slurm.address(place.master))
        token = flags.token or ("" if insecure else slurm.token(place, environ))
        return "127.0.0.1" if one else master, flags.port or slurm.port(place), False, token
    master = "127.0.0.1" if one else flags.master_addr or place.master
    if place.engine is RAY:
        return master, flags.port or place.port, not flags.port, flags.token
    assert place.engine is TORCHRUN
    from actorflow.rendezvous.elastic import agree

    settings = Settings(
        rank=place.rank, world=place.world, local_rank=place.task, node=place.node, nnodes=place.nnodes,
        devices=place.tasks, master_host=master, join_timeout=flags.join_timeout,
    )  # fmt: skip
    port, token = agree(settings, flags.port)
    return master, port, not flags.port and place.rank == 0, "" if insecure else flags.token or token
