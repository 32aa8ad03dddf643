"""The launcher's ACTORFLOW_* variables go in; what this process knows of its run before it joins comes out."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actorflow.rendezvous.network import address_of, is_loopback, own_address, route_to
from actorflow_compiler.core.errors import ClusterError

TRACE = "ACTORFLOW_TRACE"  # folder for the orders in which actors fired
LIVE = "ACTORFLOW_LIVE"  # what is shown while a run goes on
TOKEN = "ACTORFLOW_TOKEN"  # this and the next: variables that users may set themselves
DEVICE_TYPE = "ACTORFLOW_DEVICE_TYPE"  # "cpu" or "cuda": of what no placement names
OVERSUBSCRIBE = "ACTORFLOW_OVERSUBSCRIBE"  # 1: several ranks may share a GPU
NCCL_TIMEOUT = "ACTORFLOW_NCCL_TIMEOUT"  # seconds after which a transfer that has not ended ends the run
LOCAL = "ACTORFLOW_LOCAL"  # 0: ranks of one machine treat each other as if they were on several
INTERFACE = "ACTORFLOW_INTERFACE"  # the network card that leads to the other nodes
_SECONDS = re.compile(r"\d+(\.\d*)?")
_BOUND = frozenset({"OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"})  # users say where threads run


def threads_of(devices: int) -> int:
    """The threads that each of so many ranks of a machine computes with: OMP_NUM_THREADS, else a share of the cores."""
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(said) if said.isdecimal() and int(said) else max(1, len(os.sched_getaffinity(0)) // devices)


def cores_of(local_rank: int, devices: int) -> frozenset[int]:
    """The cores that a rank of this machine computes on; none where it is left to the kernel.

    Ranks that wake each other all the time are put on one core by a kernel that finds all cores busy, though
    others come free: so each has a share of its own.  The user's OMP_PROC_BIND, GOMP_CPU_AFFINITY or
    KMP_AFFINITY goes before.
    """
    cores = sorted(os.sched_getaffinity(0))
    if devices == 1 or threads_of(devices) * devices > len(cores) or _BOUND & os.environ.keys():
        return frozenset()
    first, end = ((local_rank + k) * len(cores) // devices for k in (0, 1))
    return frozenset(cores[first:end])


@dataclass(frozen=True, slots=True)
class Settings:
    """One process's place in its run.

    Without variables: one rank, no peers.  With ``pretend`` the process plays rank 0 of ``world``
    ranks that do not exist, which is how a plan is made without running it.
    """

    rank: int = 0
    local_rank: int = 0
    world: int = 1  # ranks
    node: int = 0
    nnodes: int = 1
    devices: int = 1  # ranks on each node
    tasks: int = 1  # launchers on each node; several: each has started one rank
    own_cores: bool = False  # the cores that this process may use are no other rank's
    interface: str = ""  # the network card that leads to the other nodes; empty: the one by which the master is reached
    master_host: str = "127.0.0.1"
    master_port: int = 0  # of the master's gRPC server
    reserved_port: bool = False  # the launcher holds the port open for the master
    token: str = ""  # empty: peers need none
    join_timeout: float = 300.0  # seconds
    given: frozenset[str] = frozenset()  # of "devices", "nodes" and "port", those that the command line named
    local: bool = True  # ranks of one machine use Unix sockets and shared memory
    device_type: str = ""  # of what no placement names: "cpu", "cuda"; empty: CUDA where there is one
    oversubscribe: bool = False  # several ranks may share a GPU
    nccl_timeout: float = 600.0  # seconds that a transfer may take
    log_dir: str = ""
    script: str = ""
    argv: tuple[str, ...] = ()
    launcher: str = ""  # path of the socket on which the launcher hears reports
    launcher_pid: int = 0
    pretend: bool = False
    explain: str | None = None  # of a plan that is not run: what its notes are to explain
    plan_job: str = ""  # the job whose plan is asked for; empty: the first train job
    hardware: str = ""  # path of a hardware file that plans are made for; empty: this machine
    measure: bool = False  # what this machine takes, before a plan is made that is not run
    live: str = ""  # "live": the ranks and a bar; "bar"; "none"; empty: a bar where nothing speaks against it
    trace: str = ""  # folder for the orders in which actors fired; empty: they are not kept
    logs_port: int = 0  # where node 0's launcher keeps the logs of all nodes; 0: it does not

    @property
    def one_node(self) -> bool:
        """Whether all ranks are on this host, so that nothing needs to leave the loopback."""
        return self.nnodes == 1

    @property
    def cores(self) -> frozenset[int]:
        """The cores that this rank computes on; none where it is left to the kernel."""
        return frozenset() if self.own_cores else cores_of(self.local_rank, self.devices)

    @property
    def threads(self) -> int:
        """The threads that this rank computes with."""
        return threads_of(1 if self.own_cores else self.devices)

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of its launcher."""
        return self.tasks > 1 or self.local_rank == 0

    @property
    def master_address(self) -> str:
        """Where the master's server is reached."""
        return self.at_master(self.master_port)

    def at_master(self, port: int) -> str:
        """Where another port of the master's host is reached."""
        host = f"[{self.master_host}]" if ":" in self.master_host else self.master_host
        return f"{host}:{port}"

    @property
    def local_host(self) -> str:
        """The address of this host that its peers reach."""
        if self.rank == 0 or self.one_node:
            return self.master_host
        if self.interface:
            return address_of(self.interface, self.master_host)
        return own_address(self.master_host) if self.node == 0 else route_to(self.master_host)

    def bind_host(self) -> str:
        """The address that servers of this rank bind to: the loopback where all peers are on this host."""
        host = self.local_host
        if self.rank or self.one_node or is_loopback(host):
            return host
        return "::" if ":" in host else "0.0.0.0"  # the master's name may be one that only others can use

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the variables that the launcher sets; raises ClusterError where one is malformed."""
        env = os.environ if environ is None else environ

        def number(name: str, default: int) -> int:
            return int(env.get(name, default))

        try:
            if "ACTORFLOW_MASTER" not in env:
                return cls(**said(env))
            devices, nnodes = number("ACTORFLOW_DEVICES", 1), number("ACTORFLOW_NNODES", 1)
            node, tasks = number("ACTORFLOW_NODE_RANK", 0), number("ACTORFLOW_TASKS", 1)
            local_rank = number("LOCAL_RANK" if tasks == 1 else "ACTORFLOW_TASK", 0)
            host, _, port = env["ACTORFLOW_MASTER"].rpartition(":")
            return cls(
                rank=node * devices + local_rank,
                local_rank=local_rank,
                world=nnodes * devices,
                node=node,
                nnodes=nnodes,
                devices=devices,
                tasks=tasks,
                own_cores=env.get("ACTORFLOW_OWN_CORES") == "1",
                interface=env.get(INTERFACE, ""),
                master_host=host,
                master_port=int(port),
                reserved_port=env.get("ACTORFLOW_RESERVED_PORT") == "1",
                token=env.get(TOKEN, ""),
                join_timeout=float(env.get("ACTORFLOW_JOIN_TIMEOUT", 300.0)),
                given=frozenset(filter(None, env.get("ACTORFLOW_GIVEN", "").split(","))),
                local=bool(number(LOCAL, 1)),
                log_dir=env.get("ACTORFLOW_LOG_DIR", ""),
                live=env.get(LIVE, ""),
                trace=env.get(TRACE, ""),
                launcher=env.get("ACTORFLOW_LAUNCHER", ""),
                launcher_pid=number("ACTORFLOW_LAUNCHER_PID", 0),
                logs_port=number("ACTORFLOW_LOGS_PORT", 0),
                **said(env),
            )
        except ValueError as e:
            found = {k: v for k, v in env.items() if k.startswith("ACTORFLOW_") and k != TOKEN}
            raise ClusterError(
                f"the ACTORFLOW_* variables of this process are malformed ({e}); found {found}. "
                "`actorflow run` sets them; unset them to run the script alone."
            ) from e


def said(env: Mapping[str, str]) -> dict[str, Any]:
    """The settings that users may give in variables of their own, however the process was started.

    Raises ClusterError for a value that is none.
    """
    kind, shares, seconds = env.get(DEVICE_TYPE, ""), env.get(OVERSUBSCRIBE) or "0", env.get(NCCL_TIMEOUT) or "600"
    for name, value, fits, expected in (
        (DEVICE_TYPE, kind, kind in ("", "cpu", "cuda"), "cpu or cuda"),
        (OVERSUBSCRIBE, shares, shares in ("0", "1"), "0 or 1"),
        (NCCL_TIMEOUT, seconds, _SECONDS.fullmatch(seconds) and float(seconds) > 0, "a number of seconds"),
    ):
        if not fits:
            raise ClusterError(f"{name}={value} was found in the environment; {expected} was expected")
    return {"device_type": kind, "oversubscribe": shares == "1", "nccl_timeout": float(seconds)}
