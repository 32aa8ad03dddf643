"""Find a launcher's settings: by the engine that has started it (Slurm, torchrun, Ray), else by the command line.

Flags go before the engine's variables, and must not contradict them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from actorflow.launch import slurm
from actorflow.rendezvous.engines import RAY, SLURM, TORCHRUN, EngineProcess, find_process
from actorflow.rendezvous.options import (
    FORK,
    JOIN_TIMEOUT,
    LOCAL,
    MAX_RESTARTS,
    ON,
    TLS_CA,
    DeviceType,
    LiveMode,
    NodeCount,
    read_user_variables,
)
from actorflow.rendezvous.secret import why_not_inherited
from actorflow.rendezvous.settings import Settings
from actorflow.rendezvous.tls import FLAGS, tls_files
from actorflow_compiler.core.errors import ClusterError

__all__ = ["LaunchFlags", "launcher_settings"]


@dataclass(frozen=True, slots=True)
class LaunchFlags:
    """The options of ``actorflow run`` as the command line gives them, and the secret; None where it says nothing."""

    devices: int | None = None
    nnodes: NodeCount | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    ctrl_port: int | None = None
    join_timeout: float = JOIN_TIMEOUT.default  # seconds
    max_restarts: int = MAX_RESTARTS.default
    lost_after: float | None = None  # seconds
    token_file: str | None = None
    insecure: bool = False
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    on: str = ON.default
    interface: str | None = None
    log_dir: str | None = None
    auto: bool = False
    live: bool = False
    bar: bool | None = None
    trace: str | None = None
    local: bool = LOCAL.default
    fork: bool = FORK.default
    device_type: str | None = None
    oversubscribe: bool = False
    token: str = field(default="", repr=False)  # of the token file, or of ACTORFLOW_TOKEN

    @property
    def port(self) -> int:
        """The port on node 0 at which nodes find each other; 0 for any."""
        return (self.master_port if self.restarts else None) or self.ctrl_port or self.master_port or 0

    @property
    def least_nodes(self) -> int:
        """With how many nodes the run goes on where others are missing; 0: none may be."""
        return self.nnodes.least if self.nnodes is not None and self.elastic else 0

    @property
    def elastic(self) -> bool:
        """Whether the run goes on with fewer nodes."""
        return self.nnodes is not None and self.nnodes.least < self.nnodes.most

    @property
    def restarts(self) -> bool:
        """Whether there may be several attempts."""
        return self.max_restarts > 0 or self.elastic

    @property
    def gpus(self) -> bool:
        """Whether devices are GPUs, where there are any."""
        return self.device_type != DeviceType.CPU

    @property
    def live_mode(self) -> LiveMode:
        """What the terminal is to show while the run goes on."""
        if self.live:
            return LiveMode.RANKS
        return {None: LiveMode.AUTO, True: LiveMode.BAR, False: LiveMode.NONE}[self.bar]


def launcher_settings(
    flags: LaunchFlags, environ: Mapping[str, str], warn: Callable[[str], object] = lambda _: None
) -> Settings:
    """The settings of this launcher's first rank, without its script; ``warn`` gets texts about what is unwise.

    ``devices`` is 0 where neither a flag nor an engine says how many, and ``world`` and ``rank`` are not set yet:
    ``Settings.with_shape`` does it once the devices have been counted.  With torchrun it is collective, when there
    are several launchers.  Raises ClusterError where the flags or the variables make no sense, or contradict each
    other, and where several launchers have no secret.
    """
    read_user_variables(environ)  # each rank reads them: what makes no sense is to be said once, before there are any
    process = None if flags.on == "none" else find_process(environ, flags.on)
    if flags.insecure and flags.token:
        raise ClusterError(
            "--insecure contradicts the token that --token-file or ACTORFLOW_TOKEN gives; drop one of them"
        )
    tls = tls_files(flags.tls_ca, flags.tls_cert, flags.tls_key)
    if tls is not None:
        if flags.insecure:
            raise ClusterError(f"--insecure contradicts {TLS_CA.flag}, which keeps strangers out; drop one of them")
        tls.check(warn)
    if flags.restarts and process is not None and (process.tasks > 1 or process.engine is not SLURM):
        name = "--nnodes MIN:MAX" if flags.elastic else "--max-restarts"
        raise ClusterError(
            f"{name} needs one launcher on each node, and {process.engine.name} starts one for each device and "
            "restarts them itself: give its own options, or start `actorflow run` on each node (srun "
            "--ntasks-per-node 1)"
        )
    if flags.restarts and flags.ctrl_port and flags.ctrl_port == flags.master_port:
        raise ClusterError(
            f"--ctrl-port {flags.ctrl_port} is --master-port as well, at which the launchers of a run with restarts "
            "meet; give another one, or drop it"
        )
    placed = _by_flags(flags, environ) if process is None else _by_engine(flags, process, environ)
    return replace(
        placed,
        join_timeout=flags.join_timeout,
        max_restarts=flags.max_restarts,
        least_nodes=flags.least_nodes,
        most_nodes=placed.nnodes if flags.elastic else 0,
        ctrl_port=flags.ctrl_port or 0 if flags.restarts and flags.master_port else 0,
        lost_after=flags.lost_after,
        interface=flags.interface or "",
        tls_ca=_absolute(flags.tls_ca),
        tls_cert=_absolute(flags.tls_cert),
        tls_key=_absolute(flags.tls_key),
        log_dir=flags.log_dir or "",
        live=flags.live_mode,
        trace=_absolute(flags.trace),
        local=flags.local,
        fork=flags.fork,
        device_type=DeviceType(flags.device_type or ""),
        oversubscribe=flags.oversubscribe,
        auto=flags.auto,
    )


def _absolute(path: str | None) -> str:
    return os.path.abspath(path) if path else ""


def _by_flags(flags: LaunchFlags, environ: Mapping[str, str]) -> Settings:
    nnodes, node = 1 if flags.nnodes is None else flags.nnodes.most, flags.node_rank or 0
    if node >= nnodes:
        raise ClusterError(f"--node-rank {node} is not below --nnodes {nnodes}")
    if nnodes > 1:
        if flags.master_addr is None or not flags.port:
            raise ClusterError(
                f"{nnodes} nodes need --master-addr (of node 0, as the others reach it) and --master-port (free there)"
            )
        if not flags.token and not flags.insecure and not flags.tls_cert:
            raise ClusterError(
                "several nodes need a shared secret, so that nobody else can join: set ACTORFLOW_TOKEN to the same "
                f"value on every node, or give --token-file, or certificates ({FLAGS}). On a network that you trust "
                f"wholly, --insecure does without.{why_not_inherited(environ)}".removesuffix(".")
            )
    return Settings(
        devices=flags.devices or 0,
        nnodes=nnodes,
        node=node,
        master_host=(flags.master_addr if nnodes > 1 else None) or "127.0.0.1",
        master_port=flags.port,
        token=flags.token,
        numbered=flags.node_rank is not None or not flags.elastic,
        given=_names({"devices": flags.devices, "nodes": flags.nnodes, "port": flags.port}),
    )


def _by_engine(flags: LaunchFlags, process: EngineProcess, environ: Mapping[str, str]) -> Settings:
    _check(flags, process)
    p = process
    master, port, reserved, token = "127.0.0.1", flags.port, False, flags.token
    if p.nnodes * p.tasks > 1:
        master, port, reserved, token = _meet(flags, p, environ)
    return Settings(
        devices=p.tasks if p.tasks > 1 else flags.devices or (p.gpus if flags.gpus else None) or 0,
        nnodes=p.nnodes,
        node=p.node,
        local_rank=p.task,
        master_host=master,
        master_port=port,
        reserved_port=reserved,
        token=token,
        tasks=p.tasks,
        own_cores=p.tasks > 1 and p.cores is not None and len(os.sched_getaffinity(0)) * p.tasks <= p.cores,
        given=_names({"devices": flags.devices or p.tasks > 1, "nodes": True, "port": flags.port}),
    )


def _names(given: Mapping[str, object]) -> frozenset[str]:
    """The names that have a value."""
    return frozenset(name for name, value in given.items() if value)


def _check(flags: LaunchFlags, process: EngineProcess) -> None:
    """Raise ClusterError where a flag says what the engine says otherwise."""
    p = process
    said = (
        ("--nnodes", flags.nnodes and flags.nnodes.most, p.nnodes, f"{p.engine.nnodes}={p.nnodes}"),
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


def _meet(flags: LaunchFlags, process: EngineProcess, environ: Mapping[str, str]) -> tuple[str, int, bool, str]:
    """The master's address and port, whether that port is held for it, and the secret, equal for all launchers."""
    one = process.nnodes == 1
    insecure = flags.insecure
    if process.engine is SLURM:
        master = flags.master_addr or ("127.0.0.1" if one else slurm.address(process.master))
        token = flags.token or ("" if insecure else slurm.token(process, environ))
        return "127.0.0.1" if one else master, flags.port or slurm.port(process), False, token
    master = "127.0.0.1" if one else flags.master_addr or process.master
    if process.engine is RAY:
        return master, flags.port or process.port, not flags.port, flags.token
    assert process.engine is TORCHRUN
    from actorflow.rendezvous.elastic import agree_on_port

    settings = Settings(
        rank=process.rank, world=process.world, local_rank=process.task, node=process.node, nnodes=process.nnodes,
        devices=process.tasks, master_host=master, join_timeout=flags.join_timeout,
    )  # fmt: skip
    port, token = agree_on_port(settings, flags.port, flags.token)
    return master, port, not flags.port and process.rank == 0, "" if insecure else flags.token or token
