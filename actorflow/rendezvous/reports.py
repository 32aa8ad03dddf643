"""Reports of a rank to its launcher, one datagram each: it has started, waits, failed, finished, or asks for more."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from actorflow.rendezvous.failure import LAUNCHER, Failure, FailureKind
from actorflow.rendezvous.script_request import RunShape
from actorflow.support.peer_user import receive_from_user
from actorflow.support.refusals import MessageRefused, RefusalReason
from actorflow.support.truncate import truncated


@dataclass(frozen=True, slots=True)
class RankStarted:
    """A rank's process has started."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class RankFinished:
    """A rank has said goodbye; its process may end."""

    rank: int


@dataclass(frozen=True, slots=True)
class Regroup:
    """All ranks end now, so that nodes that wait are taken in."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A text to print on this node's terminal while a rank waits."""

    text: str


@dataclass(frozen=True, slots=True)
class RankSilence:
    """A rank does not answer, or answers again; to print on this node's terminal, once where several ranks say it."""

    rank: int
    text: str
    over: bool  # it answers again


@dataclass(frozen=True, slots=True)
class LogsKept:
    """Where node 0's launcher keeps the logs of all nodes."""

    address: str  # host:port


# a ``RunShape`` asks for more devices or nodes than the run has: the ranks end and are started anew
RankReport = RankStarted | RankFinished | Failure | RunShape | Regroup | Notice | RankSilence | LogsKept

_KINDS: dict[str, type[RankReport]] = {
    "started": RankStarted,
    "finished": RankFinished,
    "failed": Failure,
    "wanted": RunShape,
    "regroup": Regroup,
    "notice": Notice,
    "silent": RankSilence,
    "kept": LogsKept,
}
_CAUSE = "cause"  # the file beside the launcher's socket with the failure by which ranks are told to end
MOST = 1 << 16  # most bytes of a datagram that the launcher reads
MOST_NUMBER = 1 << 31  # of ranks, processes, devices
_TYPES: dict[Any, type] = {"int": int, "str": str, "bool": bool, "FailureKind": str}
_TEXTS = ("cause", "text")  # fields that may be shortened


def report_to_launcher(launcher: str, report: RankReport) -> None:
    """Send a report to the launcher's socket; does nothing without a launcher, or if it is gone.

    A text that is too long for a datagram is shortened.  What only informs is dropped while the launcher does not read
    its socket, as when it is stopped.
    """
    if not launcher:
        return
    flags = socket.MSG_DONTWAIT if isinstance(report, Notice | RankSilence) else 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s, suppress(OSError):  # the launcher is gone
        s.sendto(_datagram(report), flags, launcher)


def next_report(launcher: socket.socket) -> tuple[RankReport, int]:
    """The next report on the launcher's socket, and the process that has sent it.

    Raises BlockingIOError if there is none now, MessageRefused for a datagram that is no report, and ClusterError for
    one of another user; the next call reads the next one.
    """
    datagram, is_longer, sender = receive_from_user(launcher, MOST)
    if is_longer:
        raise MessageRefused(RefusalReason.LIMIT, f"{datagram[:80]!r}…", f"at most {MOST} bytes")
    return parse(datagram), sender


def leave_cause(launcher: str, failure: Failure) -> None:
    """On the launcher: leave word beside its socket of why it tells ranks to end; does nothing where it cannot."""
    path = Path(launcher).with_name(_CAUSE)
    with suppress(OSError):
        path.with_suffix(".part").write_bytes(_datagram(failure))
        path.with_suffix(".part").replace(path)


def cause_left(launcher: str) -> Failure | None:
    """On a rank that is told to end: the failure of which its launcher has left word; None where it has not."""
    try:
        found = parse(Path(launcher).with_name(_CAUSE).read_bytes())
    except (OSError, MessageRefused):  # there is no launcher, or it was interrupted
        return None
    return found if isinstance(found, Failure) else None


def parse(datagram: bytes) -> RankReport:
    """The report in a datagram; raises MessageRefused where there is none."""
    try:
        name, body = json.loads(datagram)
        report = _KINDS[name](**body)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        what = f"{datagram[:80]!r}: {type(error).__name__}: {error}"
        raise MessageRefused(RefusalReason.UNREADABLE, what, "a report") from error
    for field in fields(report):
        value: Any = getattr(report, field.name)
        kind = _TYPES[field.type]
        if type(value) is not kind or (isinstance(value, int) and not LAUNCHER <= value < MOST_NUMBER):
            what = f"{field.name} {value!r} of {name!r}"
            raise MessageRefused(RefusalReason.VALUE, what, f"{field.name}: {field.type}")
    if isinstance(report, Failure):
        try:
            return replace(report, kind=FailureKind(report.kind))
        except ValueError:
            what = f"a failure of the kind {report.kind[:80]!r}"
            raise MessageRefused(RefusalReason.VALUE, what, f"one of {', '.join(FailureKind)}") from None
    return report


def _datagram(report: RankReport) -> bytes:
    """The report as JSON of at most ``MOST`` bytes, in which a character may take 12 of them."""
    name = next(name for name, kind in _KINDS.items() if isinstance(report, kind))
    body = asdict(report)
    for field in _TEXTS:
        if field in body:
            room = MOST - len(json.dumps([name, {**body, field: ""}]))
            body[field] = truncated(body[field], room, lambda text: len(json.dumps(text)) - 2)
    return json.dumps([name, body]).encode()
