"""How a rank tells its launcher that it has started, failed or finished: one datagram each."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass

from actorflow.runtime.failure import Failure


@dataclass(frozen=True, slots=True)
class Started:
    """A rank's process runs."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A rank has said goodbye; its process may end."""

    rank: int


Report = Started | Finished | Failure

_KINDS: dict[str, type[Started] | type[Finished] | type[Failure]] = {
    "started": Started,
    "finished": Finished,
    "failed": Failure,
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
