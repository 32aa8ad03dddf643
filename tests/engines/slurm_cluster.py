"""A private Slurm of this machine: munged, slurmctld and several slurmd, in a folder of their own, with an own key."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

LIMIT = 60.0  # seconds for the daemons to be there
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo", "scancel", "squeue")

_CONF = """
ClusterName=actorflow
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=5
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes={prefix}[1-{count}] Default=YES State=UP OverSubscribe=FORCE:4
"""


@dataclass(frozen=True, slots=True)
class Slurm:
    """A cluster that runs; its nodes are called n1, n2 …, and none of these names can be looked up."""

    folder: Path
    nodes: int
    env: dict[str, str]  # for Slurm's commands

    def run(
        self, *command: str, env: dict[str, str] | None = None, limit: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands to its end, both outputs in one text."""
        return subprocess.run(
            command,
            env={**self.env, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
        )


@contextmanager
def slurm(folder: Path, nodes: int = 3, cores: int = 4) -> Iterator[Slurm]:
    """Start a cluster and end all its processes; skips the test where Slurm is not installed."""
    missing = [program for program in _PROGRAMS if shutil.which(program, path=_path()) is None]
    if missing:
        pytest.skip(f"Slurm is not installed ({', '.join(missing)}); apt install munge slurmctld slurmd slurm-client")
    processes: list[subprocess.Popen[bytes]] = []
    conf = _write(folder, nodes, cores)
    env = {**os.environ, "PATH": _path(), "SLURM_CONF": str(conf)}
    cluster = Slurm(folder, nodes, env)
    try:
        munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={folder}/key"]
        files = [f"--log-file={folder}/munged.log", f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/seed"]
        processes.append(_start(folder, env, [*munge, *files]))
        _wait(cluster, processes, lambda: (folder / "munge.socket").exists(), "munged's socket")
        processes.append(_start(folder, env, ["slurmctld", "-D", "-f", str(conf)]))
        slurmd = ["slurmd", "-D", "-f", str(conf), "-N"]
        processes += [_start(folder, env, [*slurmd, f"n{k}"]) for k in range(1, nodes + 1)]
        _wait(cluster, processes, lambda: _idle(cluster) == nodes, "the nodes")
        yield cluster
    finally:
        subprocess.run(["scancel", "--full", f"--user={getpass.getuser()}"], env=env, capture_output=True, timeout=30)
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _write(folder: Path, nodes: int, cores: int) -> Path:
    """The cluster's files; returns its configuration."""
    (folder / "state").mkdir()
    for k in range(1, nodes + 1):
        (folder / f"spool.n{k}").mkdir()
    key = folder / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    ports = _free_ports(nodes + 1)
    lines = [
        f"NodeName=n{k} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs={cores} "
        f"CoresPerSocket={cores} RealMemory=4000 State=UNKNOWN"
        for k, port in enumerate(ports[1:], 1)
    ]
    conf = folder / "slurm.conf"
    conf.write_text(
        _CONF.format(
            host=socket.gethostname(), port=ports[0], user=getpass.getuser(), folder=folder, nodes="\n".join(lines),
            prefix="n", count=nodes,
        )
    )  # fmt: skip
    return conf


def _start(folder: Path, env: dict[str, str], command: list[str]) -> subprocess.Popen[bytes]:
    with (folder / f"{command[0]}.out").open("ab") as out:
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)


def _idle(cluster: Slurm) -> int:
    done = cluster.run("sinfo", "--noheader", "--Node", "--format=%N %t", limit=30.0)
    return sum(line.endswith(" idle") for line in done.stdout.splitlines())


def _wait(cluster: Slurm, processes: list[subprocess.Popen[bytes]], there: object, what: str) -> None:
    assert callable(there)
    deadline = time.monotonic() + LIMIT
    while not there():
        ended = [process.args for process in processes if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            files = [*cluster.folder.glob("*.log"), *cluster.folder.glob("*.out")]
            logs = "\n".join(f"{file.name}:\n{file.read_text(errors='replace')[-2000:]}" for file in files)
            raise AssertionError(f"{what} did not come ({ended=})\n{logs}")
        time.sleep(0.1)  # Slurm's daemons tell nobody when they are there


def _free_ports(count: int) -> list[int]:
    holders = [socket.socket() for _ in range(count)]
    for holder in holders:
        holder.bind(("127.0.0.1", 0))
    ports = [int(holder.getsockname()[1]) for holder in holders]
    for holder in holders:
        holder.close()
    return ports


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
