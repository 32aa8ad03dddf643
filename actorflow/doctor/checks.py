"""All checks of one machine in a table, and the findings of those that hold."""

from __future__ import annotations

from collections.abc import Callable

from actorflow.doctor import cards, node_addresses, ports, proxies, shm
from actorflow.doctor.finding import Finding
from actorflow.doctor.machine_facts import MachineFacts
from actorflow.doctor.reach import reach, unreached

# (what is looked at, the check)
CHECKS: tuple[tuple[str, Callable[[MachineFacts], Finding | None]], ...] = (
    ("port of the run", ports.master_port),
    ("master's address", node_addresses.master_is_loopback),
    ("node 0", node_addresses.not_the_master),
    ("container", node_addresses.unpublished),
    ("libraries in the way", proxies.preloaded),
    ("proxy variables", proxies.proxied),
    ("cards that libraries use", cards.misnamed),
    ("way to the nodes", cards.through_virtual),
    ("virtual cards", cards.ambiguous),
    ("shared memory", shm.small),
)
_NOT_OF_A_JOIN = (ports.master_port, cards.ambiguous, shm.small)  # the first has its own error, the others stop no join


def findings(here: MachineFacts) -> list[Finding]:
    """The conditions that may keep this node from joining, the certain ones first."""
    found = [finding for _, check in CHECKS if check not in _NOT_OF_A_JOIN and (finding := check(here))]
    return sorted(found, key=lambda finding: not finding.certain)


def why_unreached(here: MachineFacts, host: str, port: int, who: str) -> str:
    """A paragraph on why ``who`` ("the master") at an address cannot be reached from here; blocks for some seconds."""
    attempt = reach(host, port)
    first = unreached(attempt, who)
    texts = [first.text] if first else [f"A connection to {host} port {port} can be made ({attempt.tried})."]
    return " ".join([*texts, *(finding.text for finding in findings(here))])


def why_alone(here: MachineFacts) -> str:
    """What on the master's machine may keep others from reaching it; empty where nothing is seen."""
    return " ".join(finding.text for finding in findings(here))
