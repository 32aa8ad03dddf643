"""How a rank tells its launcher that it has started, waits, failed, finished or asks for more: one datagram each."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass

from actorflow.rendezvous.failure import Failure


@dataclass(frozen=True, slots=True)
class Started:
    """A rank's process runs."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A rank has said goodbye; its process may end."""

    rank: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """The script asks for more than it was started with: a ``Shape``; the ranks leave, to be started anew."""

    devices: int
    nnodes: int
    node_rank: int
    master_addr: str
    port: int
    insecure: bool
    log_dir: str


@dataclass(frozen=True, slots=True)
class Notice:
    """What people at this node's terminal should know while a rank waits."""

    text: str


@dataclass(frozen=True, slots=True)
class KeptAt:
    """Where node 0's launcher keeps the logs of all nodes."""

    address: str  # host:port


Report = Started | Finished | Failure | Wanted | Notice | KeptAt

_KINDS: dict[str, type[Report]] = {
    "started": Started,
    "finished": Finished,
    "failed": Failure,
    "wanted": Wanted,
    "notice": Notice,
    "kept": KeptAt,
}
_MOST = 32_000  # characters of a cause; a datagram has a limit


def tell(launcher: str, report: Report) -> None:
    """Send a report to the launcher's socket; without a launcher, or when it is gone, nothing happens."""
    if not launcher:
        return
    name = next(name for name, kind in _KINDS.items() if isinstance(report, kind))
    body = asdict(report)
    if "cause" in body:
        body["cause"] = body["cause"][:_MOST]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s, suppress(OSError):  # gone: we end with it
        s.sendto(json.dumps([name, body]).encode(), launcher)


def parse(datagram: bytes) -> Report:
    """The report in a datagram."""
    name, body = json.loads(datagram)
    return _KINDS[name](**body)
