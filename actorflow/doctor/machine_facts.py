"""The facts that checks look at: this machine, its environment, and the run that it is to take part in."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from actorflow.rendezvous.addresses import Interface, interfaces, is_own, resolve

_MARKS = ("/.dockerenv", "/run/.containerenv")  # files that Docker and Podman put into theirs
SHM = "/dev/shm"
_GROUPS = ("docker", "containerd", "kubepods", "libpod", "lxc")


def container(root: str = "/") -> str:
    """What shows that this process runs in a container: a file or a control group; empty where nothing does."""
    for mark in _MARKS:
        if Path(root, mark[1:]).exists():
            return mark
    try:
        groups = Path(root, "proc/1/cgroup").read_text()
    except OSError:
        return ""
    return next((f"control group {name!r} in /proc/1/cgroup" for name in _GROUPS if name in groups), "")


def shm(folder: str = SHM) -> int | None:
    """The bytes that all files of /dev/shm together can have; None where there is none."""
    try:
        return int(psutil.disk_usage(folder).total)
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The facts that checks are functions of; tests make others."""

    nodes: tuple[str, ...]  # names or addresses of the run's nodes that are known, node 0 first
    node: int | None = None  # which of them this machine is, where that is known
    port: int = 0  # of the master's control server; 0: any
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    interfaces: tuple[Interface, ...] = field(default_factory=interfaces)
    container: str = field(default_factory=container)  # what shows that this is one; empty: nothing does
    shm: int | None = field(default_factory=shm)  # bytes that /dev/shm can hold; None: there is none
    resolve: Callable[[str], tuple[str, ...]] = resolve
    is_own: Callable[[str], bool] = is_own

    @property
    def master(self) -> str:
        """Node 0."""
        return self.nodes[0]
