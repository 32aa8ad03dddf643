"""Settings of a run that Slurm does not provide: node 0's address, a port, and a secret common to all nodes."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from actorflow.rendezvous.addresses import resolve
from actorflow.rendezvous.engines import EngineProcess
from actorflow_compiler.core.errors import ClusterError

__all__ = ["address", "outside_srun", "port", "token"]

_PORTS = range(20000, 32000)  # below the system's ephemeral ports
_STEPS = 16  # steps of a job after which ports repeat


def address(host: str) -> str:
    """The address of a node of Slurm: its name if that resolves, else the address in Slurm's configuration.

    Raises ClusterError if neither is known.
    """
    if resolve(host):
        return host
    try:
        done = subprocess.run(["scontrol", "--oneliner", "show", "node", host], capture_output=True, text=True)
        said, why = done.stdout, done.stderr.strip()
    except OSError as e:
        said, why = "", str(e)
    found = re.search(r"\bNodeAddr=(\S+)", said)
    if found is None or not resolve(found[1]):
        raise ClusterError(
            f"Slurm says that node 0 is {host}, and this machine knows no address of that name; `scontrol show node "
            f"{host}` says {f'NodeAddr={found[1]}, which is unknown, too' if found else why or 'none'}. Give "
            "--master-addr, an address of node 0 that every node can reach."
        )
    return found[1]


def port(process: EngineProcess) -> int:
    """A port for node 0 that all nodes compute in the same way; it differs between recent jobs and their steps."""
    job, step = (int(part) if part.isdecimal() else 0 for part in process.run.split("."))
    return _PORTS[(job * _STEPS + step % _STEPS) % len(_PORTS)]


def token(process: EngineProcess, environ: Mapping[str, str]) -> str:
    """A secret of this step, derived from one in the user's home, which only the user's own processes can read.

    The first run creates the file, readable by the user alone.  Nodes without a common home directory get different
    secrets, and reject each other.  Raises ClusterError if the file cannot be made, or if others may read it.
    """
    path = secret_file(environ)
    key = _secret(path)
    return hmac.new(key, f"actorflow Slurm {process.run}".encode(), hashlib.sha256).hexdigest()


def secret_file(environ: Mapping[str, str]) -> Path:
    """The path of the user's secret."""
    base = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".config")
    return Path(base, "actorflow", "secret")


def _secret(path: Path) -> bytes:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _make(path)
        found = path.stat()
        key = path.read_bytes()
    except OSError as e:
        raise ClusterError(
            f"the nodes of a Slurm job share a secret, so that nobody else can join, which is kept in {path}, and that "
            f"cannot be used ({e.strerror}). Set ACTORFLOW_TOKEN before srun, give --token-file, or --insecure on a "
            "network that you trust wholly."
        ) from e
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ClusterError(
            f"{path}, the secret of your runs, belongs to user {found.st_uid} and has mode {found.st_mode & 0o777:o}; "
            "it must be yours, and nobody else may read it (mode 600). Remove it: the next run makes another one."
        )
    if len(key) < 32:
        raise ClusterError(f"{path}, the secret of your runs, is cut short ({len(key)} bytes); remove it, run again")
    return key


def _make(path: Path) -> None:
    """Create the file atomically; if another node was faster, its file is kept."""
    own = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    handle = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_hex(32).encode())
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(own, path)
    finally:
        own.unlink()


def outside_srun(environ: Mapping[str, str]) -> str:
    """A note if this process runs in a batch script of several nodes, without srun; else empty."""
    nodes = environ.get("SLURM_JOB_NUM_NODES", "")
    if not environ.get("SLURM_JOB_ID") or environ.get("SLURM_STEP_ID") or not nodes.isdecimal() or int(nodes) < 2:
        return ""
    return (
        f"Slurm job {environ['SLURM_JOB_ID']} has {nodes} nodes, and this process is on one of them, outside of srun; "
        "`srun actorflow run` starts one on each"
    )
