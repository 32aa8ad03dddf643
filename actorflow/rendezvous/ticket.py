"""Make this process's ticket, with which it joins the run at the master."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from importlib import metadata
from pathlib import Path

from actorflow.rendezvous.communication_libraries import communication
from actorflow.rendezvous.roster import Ticket
from actorflow.rendezvous.settings import Settings
from actorflow_compiler.core.errors import ClusterError


def own_ticket(settings: Settings) -> Ticket:
    """The ticket, without the address of its server.  Raises ClusterError if the script cannot be read."""
    s = settings
    return Ticket(
        rank=s.rank,
        node=s.node,
        nnodes=s.nnodes,
        devices=s.devices,
        host=socket.gethostname(),
        pid=os.getpid(),
        address="",
        version=_version("actorflow"),
        python=platform.python_version(),
        torch=_version("torch"),
        script=s.script,
        digest=_digest(s.script),
        argv=s.argv,
        libraries=communication(),
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # not installed, but run from its source folder
        return "source"


def _digest(script: str) -> str:
    if not script:
        return ""
    try:
        return hashlib.sha256(Path(script).read_bytes()).hexdigest()
    except OSError as e:
        raise ClusterError(f"the script {script!r} cannot be read on {socket.gethostname()}: {e}") from e
