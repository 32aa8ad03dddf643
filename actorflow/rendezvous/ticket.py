"""Make this process's ticket, with which it joins the run at the master."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import socket
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from actorflow.rendezvous.roster import Ticket
from actorflow.rendezvous.settings import Settings
from actorflow_compiler.core.errors import ClusterError

_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")


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
        lost_after=s.silence_limit,
        fan_out=s.fan_out,
    )


@cache
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


def communication() -> str:
    """The communication library and its version: "NCCL 2.27.3 and CUDA 12.8 of torch 2.13.0+cu128", or "Gloo of …".

    Ranks whose libraries differ may wait for each other for ever, so this is compared when they join.
    """
    version, cuda = _torch_and_cuda()
    for package in _NCCL if cuda else ():
        try:
            return f"NCCL {metadata.version(package)} and CUDA {cuda} of torch {version}"
        except metadata.PackageNotFoundError:
            continue
    return f"{f'NCCL of CUDA {cuda}' if cuda else 'Gloo'} of torch {version}"


def _torch_and_cuda() -> tuple[str, str]:
    """Torch's full version and its CUDA version (empty without CUDA), read from files without importing torch."""
    spec = find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        try:
            text = Path(folder, "version.py").read_text()
        except OSError:
            continue
        found = {m[1]: m[2] for m in re.finditer(r"^(\w+)\b[^=\n]*= *['\"]([^'\"]*)['\"]", text, re.MULTILINE)}
        return found.get("__version__", "?"), found.get("cuda", "")
    return "?", ""
