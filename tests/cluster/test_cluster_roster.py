"""Who joined, who is missing, and what does not match, without any process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from actorflow.rendezvous.roster import Roster, Ticket
from actorflow_compiler.core.errors import ClusterError

OWN = Ticket(0, 0, 2, 3, "alpha", 11, "10.0.0.1:1", "1.0", "3.11.7", "2.13.0", "train.py", "ab" * 32, ("--epochs", "3"))


def ticket(rank: int, **changes: Any) -> Ticket:
    return replace(OWN, rank=rank, node=rank // OWN.devices, host="beta", pid=20 + rank, **changes)


def test_the_missing_ranks_are_named_with_their_node() -> None:
    roster = Roster(OWN)
    for rank in (1, 4):
        roster.add(ticket(rank))
    assert roster.missing() == [2, 3, 5]
    assert roster.missing_text() == "rank 2 (node 0), ranks 3, 5 (node 1)"


def test_equal_tickets_match() -> None:
    roster = Roster(OWN)
    for rank in range(1, 6):
        roster.add(ticket(rank))
    assert roster.complete
    assert roster.mismatch() is None


@pytest.mark.parametrize(
    ("change", "both"),
    [
        ({"argv": ("--epochs", "4")}, ("--epochs 3", "--epochs 4")),
        ({"digest": "cd" * 32, "script": "other.py"}, ("train.py (SHA-256 abab", "other.py (SHA-256 cdcd")),
        ({"torch": "2.11.0"}, ("2.13.0", "2.11.0")),
        ({"python": "3.12.1"}, ("3.11.7", "3.12.1")),
        ({"version": "0.9"}, ("1.0", "0.9")),
    ],
)
def test_what_differs_is_shown_with_both_values_and_hosts(change: dict[str, Any], both: tuple[str, str]) -> None:
    roster = Roster(OWN)
    roster.add(ticket(4, **change))
    text = roster.mismatch()
    assert text is not None
    for part in (*both, "rank 0 (node 0, alpha)", "rank 4 (node 1, beta)"):
        assert part in text


def test_another_number_of_devices_is_refused_at_once() -> None:
    with pytest.raises(ClusterError, match=r"(?s)number of devices of a node.*: 3\n.*: 2\n.*--devices"):
        Roster(OWN).add(ticket(4, devices=2))


def test_two_processes_cannot_be_one_rank() -> None:
    roster = Roster(OWN)
    roster.add(ticket(3))
    with pytest.raises(ClusterError, match=r"pid 23 on beta and pid 99 on gamma.*--node-rank"):
        roster.add(replace(ticket(3), host="gamma", pid=99))
