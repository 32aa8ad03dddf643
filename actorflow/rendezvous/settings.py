"""The settings of a process before it joins its run, and their form as environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from actorflow.rendezvous.addresses import is_own, resolve
from actorflow.rendezvous.engines import MASTER_VARIABLE
from actorflow.rendezvous.network import address_of, is_loopback, own_address, route_to
from actorflow.rendezvous.options import (
    FAN_OUT,
    FORK,
    JOIN_TIMEOUT,
    LOCAL,
    LOST_AFTER,
    NCCL_TIMEOUT,
    RANK_OPTIONS,
    TASK_VARIABLE,
    TOKEN,
    DeviceType,
    LiveMode,
    read_rank_options,
    read_user_variables,
)
from actorflow.rendezvous.tls import TlsFiles, tls_files
from actorflow_compiler.core.errors import ClusterError

ONE_HOST, SEVERAL_HOSTS = 15.0, 30.0  # seconds of silence after which a rank is lost, by where the ranks are
_BOUND = frozenset({"OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"})  # users bind threads to cores


def threads_of(devices: int) -> int:
    """The threads that each of so many ranks of a machine computes with: OMP_NUM_THREADS, else a share of the cores."""
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(said) if said.isdecimal() and int(said) else max(1, len(os.sched_getaffinity(0)) // devices)


def cores_of(local_rank: int, devices: int) -> frozenset[int]:
    """The cores that a rank of this machine computes on; empty if the kernel decides.

    When all cores are busy, a kernel puts ranks that often wake each other on one core, even if others become
    free.  So each rank gets cores of its own.  The user's OMP_PROC_BIND, GOMP_CPU_AFFINITY or KMP_AFFINITY takes
    precedence.
    """
    cores = sorted(os.sched_getaffinity(0))
    if devices == 1 or threads_of(devices) * devices > len(cores) or _BOUND & os.environ.keys():
        return frozenset()
    first, end = ((local_rank + k) * len(cores) // devices for k in (0, 1))
    return frozenset(cores[first:end])


@dataclass(frozen=True, slots=True)
class Settings:
    """One process's place in its run, and the options of the run.

    Without variables: one rank, no peers.  A launcher's settings are those of the first rank that it starts.  With
    ``pretend`` the process plays rank 0 of ``world`` ranks that do not exist, which is how a plan is made without
    running it.
    """

    rank: int = 0
    local_rank: int = 0
    world: int = 1  # ranks
    node: int = 0
    nnodes: int = 1
    devices: int = 1  # ranks on each node; 0 while a launcher has not counted its GPUs
    tasks: int = 1  # launchers on each node; several: each has started one rank
    own_cores: bool = False  # no other rank uses the cores of this process
    interface: str = ""  # network card to the other nodes; empty: the one that reaches the master
    master_host: str = "127.0.0.1"
    master_port: int = 0  # of the master's gRPC server
    reserved_port: bool = False  # the launcher holds the port open for the master
    token: str = field(default="", repr=False)  # empty: not required
    tls_ca: str = ""  # paths of this node's files for TLS; empty: none is used
    tls_cert: str = ""
    tls_key: str = ""
    join_timeout: float = JOIN_TIMEOUT.default  # seconds
    lost_after: float | None = None  # seconds of silence after which a rank is lost; None: see ``silence_limit``
    fan_out: int = FAN_OUT.default  # ranks that each one passes the run's messages on to
    given: frozenset[str] = frozenset()  # of "devices", "nodes" and "port", those that the command line named
    local: bool = LOCAL.default  # ranks of one machine use Unix sockets and shared memory
    fork: bool = FORK.default  # a launcher's ranks are forks of one process that has imported torch
    device_type: DeviceType = DeviceType.AUTO
    auto: bool = False  # whole plans are chosen for jobs that do not say how they are to be parallel
    oversubscribe: bool = False  # several ranks may share a GPU
    nccl_timeout: float = NCCL_TIMEOUT.default  # seconds that a transfer may take
    log_dir: str = ""  # of the logs of ranks other than 0; empty, for a launcher: a new temporary folder
    script: str = ""
    module: str = ""  # by whose name the script is run, as by python -m; empty: as a file
    argv: tuple[str, ...] = ()
    launcher: str = ""  # path of the socket on which the launcher receives reports
    launcher_pid: int = 0
    pretend: bool = False
    explain: str | None = None  # for ``actorflow plan``: names whose layouts its notes explain
    looked_at: str = ""  # for ``actorflow plan``: what is wanted of the plan ("forecast", "classes", "plan" or "all")
    plan_job: str = ""  # the job whose plan is asked for; empty: the first train job
    hardware: str = ""  # path of a hardware file that plans are made for; empty: this machine
    measure: bool = False  # for ``actorflow plan``: measure this machine's costs first
    live: LiveMode = LiveMode.AUTO
    trace: str = ""  # folder for traces; empty: none are recorded
    least_nodes: int = 0  # with which the run goes on where others are missing; 0: none may be
    most_nodes: int = 0  # that the run may grow to; 0: it keeps its number
    numbered: bool = True  # this launcher's node has its number from the command line or an engine
    ctrl_port: int = 0  # of the master's server, where ``master_port`` is that of the launchers' meeting; 0: any
    meeting_port: int = 0  # at which the launchers of this attempt have met, as the run was asked to; 0: they have not
    max_restarts: int = 0  # how often all ranks start again after a failure
    attempt: int = 0  # which start of the ranks this is
    held_files: str = ""  # where the launcher holds files in memory for its ranks; empty: nowhere
    logs_port: int = 0  # on which node 0's launcher receives the logs of all nodes; 0: it does not

    @property
    def one_node(self) -> bool:
        """Whether all ranks are on this host, so that nothing needs to leave the loopback."""
        return self.nnodes == 1

    @property
    def tls(self) -> TlsFiles | None:
        """The files with which this node speaks to others; None where it uses no TLS, or nothing leaves the host."""
        return None if self.one_node else tls_files(self.tls_ca, self.tls_cert, self.tls_key)

    @property
    def silence_limit(self) -> float:
        """The seconds after which a rank that does not answer is lost."""
        if self.lost_after is not None:
            return self.lost_after
        return ONE_HOST if self.one_node else SEVERAL_HOSTS

    @property
    def transfer_limit(self) -> float:
        """The seconds that a transfer over NCCL may take; a rank that is silent meanwhile may come back."""
        if self.nccl_timeout != NCCL_TIMEOUT.default:
            return self.nccl_timeout
        return max(self.nccl_timeout, 2 * self.silence_limit)

    @property
    def cores(self) -> frozenset[int]:
        """The cores that this rank computes on; empty if the kernel decides."""
        return frozenset() if self.own_cores else cores_of(self.local_rank, self.devices)

    @property
    def sharing(self) -> int:
        """The ranks that share the cores that this process may use."""
        return 1 if self.own_cores else self.devices

    @property
    def threads(self) -> int:
        """The threads that this rank computes with."""
        return threads_of(self.sharing)

    @property
    def launcher_number(self) -> int:
        """The number of this process's launcher in the run."""
        return self.node * self.tasks + (self.local_rank if self.tasks > 1 else 0)

    @property
    def launchers(self) -> int:
        """The launchers of the run."""
        return self.nnodes * self.tasks

    @property
    def launcher_ranks(self) -> range:
        """The ranks that this process's launcher starts."""
        count = self.devices // self.tasks
        return range(self.launcher_number * count, (self.launcher_number + 1) * count)

    @property
    def restarts(self) -> bool:
        """Whether there may be several attempts."""
        return self.max_restarts > 0 or 0 < self.least_nodes < self.nnodes

    @property
    def meets(self) -> bool:
        """Whether the launchers of the run meet before each attempt."""
        return self.nnodes > 1 and self.restarts

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of its launcher."""
        return self.tasks > 1 or self.local_rank == 0

    @property
    def master_address(self) -> str:
        """The host:port of the master's server."""
        return self.at_master(self.master_port)

    def at_master(self, port: int) -> str:
        """The host:port of another port on the master's host."""
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
        """The address that servers of this rank bind to: the loopback where all peers are on this host.

        On node 0 of several it is the one that the master's name means here.  Where that is the loopback, or no address
        of this host, as behind a router that hands packets on, only others can use the name: then it is all addresses.
        """
        host = self.local_host
        if self.rank or self.one_node or is_loopback(host):
            return host
        known = resolve(host)
        if known and is_own(known[0]) and not any(map(is_loopback, known)):
            return known[0]
        return "::" if any(":" in address for address in known) else "0.0.0.0"

    def with_shape(self, devices: int, nnodes: int, node: int) -> Settings:
        """These settings in a run of so many devices on each of so many nodes, on this one of them."""
        return replace(
            self,
            devices=devices,
            nnodes=nnodes,
            node=node,
            world=nnodes * devices,
            rank=node * devices + self.local_rank,
        )

    def to_env(self) -> dict[str, str]:
        """The variables from which each rank of this launcher reads its settings, with its own LOCAL_RANK."""
        variables = {option.variable: option.to_text(getattr(self, option.field)) for option in RANK_OPTIONS}
        variables[LOST_AFTER.variable] = str(self.silence_limit)
        variables[MASTER_VARIABLE] = f"{self.master_host}:{self.master_port}"
        variables[TASK_VARIABLE] = str(self.local_rank if self.tasks > 1 else 0)
        return variables

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the variables that the launcher sets; raises ClusterError where one is malformed."""
        env = os.environ if environ is None else environ
        if MASTER_VARIABLE not in env:
            return cls(**read_user_variables(env))
        try:
            host, _, port = env[MASTER_VARIABLE].rpartition(":")
            found = cls(master_host=host, master_port=int(port), **(read_rank_options(env) | read_user_variables(env)))
            local_rank = int(env.get("LOCAL_RANK" if found.tasks == 1 else TASK_VARIABLE, 0))
        except ValueError as e:
            shown = {k: v for k, v in env.items() if k.startswith("ACTORFLOW_") and k != TOKEN.variable}
            raise ClusterError(
                f"the ACTORFLOW_* variables of this process are malformed ({e}); found {shown}. "
                "`actorflow run` sets them; unset them to run the script alone."
            ) from e
        return replace(found, local_rank=local_rank).with_shape(found.devices, found.nnodes, found.node)
