"""Why a port of this machine cannot be listened on, and which process has it."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from actorflow.doctor.finding import Finding
from actorflow.rendezvous.addresses import interfaces, own_addresses_text

if TYPE_CHECKING:
    from actorflow.doctor.machine_facts import MachineFacts


@dataclass(frozen=True, slots=True)
class PortUse:
    """What a port is for, and how another one is named."""

    purpose: str
    flag: str

    @property
    def advice(self) -> str:
        """What to do where the port cannot be had."""
        return f"Choose a free port with {self.flag}."


CONTROL = PortUse(
    "The run's control server needs it for itself.",
    "--ctrl-port, or flow.config.ctrl_port in the script (the same on every node)",
)


def listen(host: str, port: int) -> None:
    """Try to listen there, for a moment; raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended do no harm
        s.bind(address)
        s.listen(1)


def unusable(
    host: str, port: int, listen: Callable[[str, int], None] = listen, use: PortUse = CONTROL
) -> Finding | None:
    """Why a server of the run cannot listen on an address and port of this machine; None where it can."""
    try:
        listen(host, port)
    except OSError as e:
        return _why(host, port, e, use)
    return None


def _why(host: str, port: int, error: OSError, use: PortUse) -> Finding:
    if error.errno == errno.EADDRINUSE:
        holder = owner(port)
        by = f": {holder} listens there" if holder else " by another program (of another user, or in a container)"
        return Finding(
            "port in use", f"Port {port} on {host} is in use{by}.", use.purpose,
            f"End that program, or choose another one. {use.advice}",
        )  # fmt: skip
    if error.errno == errno.EACCES:
        least = _unprivileged()
        return Finding(
            "port without rights",
            f"Port {port} on {host} may not be used by this user (uid {os.geteuid()}).",
            f"Ports below {least} are kept for the administrator.",
            f"Choose one from {least} to 65535 with {use.flag}.",
        )
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return Finding(
            "address of another machine",
            f"{host} is not an address of this machine, whose addresses are {own_addresses_text(interfaces())}.",
            "Node 0 listens on the master's address.",
            "Give node 0's own address as the master's, or start this as another node.",
        )
    return Finding("port cannot be used", f"Port {port} on {host} cannot be used ({error}).", "", use.advice)


def _unprivileged() -> int:
    """The first port that anybody may use."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
    except (OSError, ValueError):
        return 1024


def owner(port: int) -> str:
    """Who listens on a port of this machine: "python3 (pid 4711)"; empty where this user may not know."""
    with suppress(psutil.Error, OSError):  # it has ended, or the system tells nobody
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""


def master_port(here: MachineFacts) -> Finding | None:
    """On node 0: the run's port cannot be listened on."""
    if not here.port or here.node != 0:
        return None
    own = [a for a in here.resolve(here.master) if here.is_own(a)]
    return unusable(own[0] if own else "0.0.0.0", here.port)
