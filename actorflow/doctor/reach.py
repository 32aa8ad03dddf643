"""Try a TCP connection to a host and port, and say what was tried and what stopped it."""

from __future__ import annotations

import enum
import errno
import socket
import time
from dataclasses import dataclass

from actorflow.doctor.finding import Finding

TIMEOUT = 3.0  # seconds for each address


class ReachOutcome(enum.StrEnum):
    """What came of trying to connect."""

    REACHED = "reached"
    REFUSED = "refused"
    SILENT = "silent"  # no answer in time
    NO_ROUTE = "no route"
    UNRESOLVED = "unresolved"  # nobody knows the name


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to connect to a host and port."""

    host: str
    port: int
    outcome: ReachOutcome
    tried: str  # for people: each address with what it answered
    seconds: float = 0.0  # to connect

    @property
    def reached(self) -> bool:
        """Whether something listens there and was reached."""
        return self.outcome == ReachOutcome.REACHED


# outcome → (what it is called, why it happens, what to do); in order: the most telling one of several addresses first
_OUTCOMES = {
    ReachOutcome.REFUSED: (
        "port is closed",
        "That machine was reached, and nothing listens on the port there (or a firewall refuses it).",
        "Start the run on that node too, with the same port; if it runs in a container, start that with --net=host.",
    ),
    ReachOutcome.SILENT: (
        "no answer",
        "Packets are lost on the way: a firewall drops them, the address is another machine's or none's, or a "
        "container's port is not published.",
        "See that the address is right (ping it, ssh to it), and open the port, or all ports between the nodes, in the "
        "firewalls of both.",
    ),
    ReachOutcome.NO_ROUTE: (
        "no route",
        "This machine knows no way to that address: another network, a card that is down, or a gateway that says so.",
        "Compare the address with those of that machine (ip addr), and look at the routes of this one (ip route).",
    ),
    ReachOutcome.UNRESOLVED: (
        "unknown name",
        "This machine's name service does not know that name.",
        "Correct the name, add it to /etc/hosts on every node, or use an IP address.",
    ),
}  # fmt: skip
_ERRORS = {
    errno.ECONNREFUSED: ReachOutcome.REFUSED,
    errno.ECONNRESET: ReachOutcome.REFUSED,
    errno.ETIMEDOUT: ReachOutcome.SILENT,
    errno.EHOSTUNREACH: ReachOutcome.NO_ROUTE,
    errno.ENETUNREACH: ReachOutcome.NO_ROUTE,
    errno.EADDRNOTAVAIL: ReachOutcome.NO_ROUTE,
}
_SPOKEN = {ReachOutcome.REFUSED: "refused", ReachOutcome.SILENT: "no answer", ReachOutcome.NO_ROUTE: "no route"}


def reach(host: str, port: int, timeout: float = TIMEOUT) -> Attempt:
    """Try to connect to a host, by each of its addresses in turn; blocks for at most ``timeout`` seconds for each."""
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as e:
        return Attempt(host, port, ReachOutcome.UNRESOLVED, f"the name {host} was looked up: {e.strerror or e}")
    outcomes: list[ReachOutcome] = []
    tried: list[str] = []
    for family, kind, protocol, _, address in dict.fromkeys(answers):
        start = time.monotonic()
        try:
            with socket.socket(family, kind, protocol) as s:
                s.settimeout(timeout)
                s.connect(address)
        except OSError as e:
            outcome = (
                ReachOutcome.SILENT if isinstance(e, TimeoutError) else _ERRORS.get(e.errno or 0, ReachOutcome.SILENT)
            )
            within = f" within {timeout:g} s" if outcome is ReachOutcome.SILENT else ""
            outcomes.append(outcome)
            tried.append(f"TCP to {address[0]} port {port}: {_SPOKEN[outcome]}{within}")
        else:
            seconds = time.monotonic() - start
            return Attempt(host, port, ReachOutcome.REACHED, f"TCP to {address[0]} port {port}: connected", seconds)
    return Attempt(host, port, next(o for o in _OUTCOMES if o in outcomes), "; ".join(tried))


def unreached(attempt: Attempt, who: str) -> Finding | None:
    """What an attempt to reach ``who`` ("node 1") says; None where it was reached."""
    if attempt.reached:
        return None
    condition, why, advice = _OUTCOMES[attempt.outcome]
    found = (
        f"{who[0].upper()}{who[1:]} ({attempt.host}) cannot be reached from {socket.gethostname()}: {attempt.tried}."
    )
    return Finding(condition, found, why, advice)
