"""The launcher's ACTORFLOW_* variables go in; what this process knows of its run before it joins comes out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from actorflow.runtime.network import is_loopback, route_to
from actorflow_compiler.errors import ClusterError

TRACE = "ACTORFLOW_TRACE"  # folder for the orders in which actors fired
TOKEN = "ACTORFLOW_TOKEN"  # this and the next: variables that users may set themselves
LOCAL = "ACTORFLOW_LOCAL"  # 0: ranks of one machine treat each other as if they were on several


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
    master_host: str = "127.0.0.1"
    master_port: int = 0  # of the master's gRPC server
    reserved_port: bool = False  # the launcher holds the port open for the master
    token: str = ""  # empty: peers need none
    join_timeout: float = 300.0  # seconds
    local: bool = True  # ranks of one machine use Unix sockets and shared memory
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
    trace: str = ""  # folder for the orders in which actors fired; empty: they are not kept

    @property
    def one_node(self) -> bool:
        """Whether all ranks are on this host, so that nothing needs to leave the loopback."""
        return self.nnodes == 1

    @property
    def master_address(self) -> str:
        """Where the master's server is reached."""
        host = f"[{self.master_host}]" if ":" in self.master_host else self.master_host
        return f"{host}:{self.master_port}"

    @property
    def local_host(self) -> str:
        """The address of this host that its peers reach."""
        return self.master_host if self.rank == 0 or self.one_node else route_to(self.master_host)

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
                return cls()
            devices, nnodes = number("ACTORFLOW_DEVICES", 1), number("ACTORFLOW_NNODES", 1)
            node, local_rank = number("ACTORFLOW_NODE_RANK", 0), number("LOCAL_RANK", 0)
            host, _, port = env["ACTORFLOW_MASTER"].rpartition(":")
            return cls(
                rank=node * devices + local_rank,
                local_rank=local_rank,
                world=nnodes * devices,
                node=node,
                nnodes=nnodes,
                devices=devices,
                master_host=host,
                master_port=int(port),
                reserved_port=env.get("ACTORFLOW_RESERVED_PORT") == "1",
                token=env.get(TOKEN, ""),
                join_timeout=float(env.get("ACTORFLOW_JOIN_TIMEOUT", 300.0)),
                local=bool(number(LOCAL, 1)),
                log_dir=env.get("ACTORFLOW_LOG_DIR", ""),
                trace=env.get(TRACE, ""),
                launcher=env.get("ACTORFLOW_LAUNCHER", ""),
                launcher_pid=number("ACTORFLOW_LAUNCHER_PID", 0),
            )
        except ValueError as e:
            found = {k: v for k, v in env.items() if k.startswith("ACTORFLOW_") and k != TOKEN}
            raise ClusterError(
                f"the ACTORFLOW_* variables of this process are malformed ({e}); found {found}. "
                "`actorflow run` sets them; unset them to run the script alone."
            ) from e
