"""When enough nodes are there for an attempt, which numbers they have, and what counts as a failure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actorflow.launch.node_assembly import HOST, Begin, Decision, End, NodeAssembly, NodeLost, NodesWait, Note, Refuse
from actorflow.rendezvous.roster import Ticket

OWN = Ticket(0, 0, 4, 2, "a", 1, "", "1.0", "3.11", "2.13", "train.py", "d1", ())
LIMIT = 100.0  # seconds


def other(host: str, **values: object) -> Ticket:
    return replace(OWN, host=host, pid=ord(host), **values)  # type: ignore[arg-type]


class Nodes:
    """An assembly with a clock, whose nodes have names."""

    def __init__(self, least: int, most: int, restarts: int = 0) -> None:
        self.assembly = NodeAssembly(OWN, least, most, LIMIT, restarts)
        self.now = 0.0

    def ready(self, *keys: int, failed: bool = False, wanted: int | None = None) -> list[Decision]:
        """The decisions after the last of these nodes has said that it is ready."""
        found: list[Decision] = []
        for key in keys:
            ticket = OWN if key == HOST else other(chr(ord("a") + key))
            found = self.assembly.ready(key, ticket, 0 if key == HOST else wanted, failed, self.now)
        return found

    def gone(self, key: int) -> list[Decision]:
        return self.assembly.gone(key, self.now)

    def later(self, seconds: float) -> list[Decision]:
        self.now += seconds
        return self.assembly.pass_time(self.now)


def test_it_begins_at_once_when_all_nodes_are_there() -> None:
    nodes = Nodes(2, 3)
    assert nodes.ready(HOST) == []
    assert nodes.ready(5) == []
    assert nodes.ready(7) == [Begin(0, {HOST: 0, 5: 1, 7: 2})]
    assert nodes.assembly.deadline is None


def test_it_begins_with_fewer_when_the_time_is_over_but_never_with_too_few() -> None:
    nodes = Nodes(2, 3)
    nodes.ready(HOST, 5)
    assert nodes.later(LIMIT - 1) == []
    assert nodes.later(1) == [Begin(0, {HOST: 0, 5: 1})]
    few = Nodes(2, 3)
    few.ready(HOST)
    assert few.later(LIMIT) == [End("1 of 2 to 3 nodes are ready after 100 s (--join-timeout)")]


def test_without_its_host_nothing_begins() -> None:
    nodes = Nodes(1, 2)
    assert nodes.ready(5, 6) == []
    assert nodes.later(2 * LIMIT) == []
    assert nodes.ready(HOST) == [Begin(0, {HOST: 0, 5: 1})]


def test_a_failure_of_a_rank_starts_all_again_as_soon_as_all_have_ended_and_counts() -> None:
    nodes = Nodes(2, 2, restarts=1)
    nodes.ready(HOST, 5)
    assert nodes.ready(5, failed=True) == [NodeLost("the ranks of node 1 (f) have failed")]
    assert nodes.assembly.missing() == "1 of 2 nodes are ready, 1 still end their last attempt"
    assert nodes.ready(HOST, failed=True) == [Begin(1, {HOST: 0, 5: 1})]
    assert nodes.ready(HOST, failed=True) == []
    assert nodes.ready(5, failed=True) == [End("no restart is left (--max-restarts 1)")]


def test_the_loss_of_a_node_is_waited_for_and_does_not_count() -> None:
    nodes = Nodes(1, 2)
    nodes.ready(HOST, 5)
    assert nodes.gone(5) == [NodeLost("node 1 (f) has lost its launcher")]
    assert nodes.ready(HOST, failed=True) == []
    assert nodes.later(LIMIT - 1) == []
    assert nodes.ready(6) == [Begin(1, {HOST: 0, 6: 1})]  # it has come back
    nodes.gone(6)
    nodes.ready(HOST, failed=True)
    assert nodes.later(LIMIT) == [Begin(2, {HOST: 0})]


def test_a_node_whose_ranks_came_to_their_end_is_not_waited_for() -> None:
    nodes = Nodes(2, 2, restarts=1)
    nodes.ready(HOST, 5)
    assert nodes.assembly.done(5, 0.0) == []
    left = End("no restart: node 1 (f) had come to the end of the script, and left the run")
    assert nodes.ready(HOST, failed=True) == [left]
    later = Nodes(2, 2, restarts=1)  # that it has come to its end is heard behind the failure
    later.ready(HOST, 5)
    assert later.ready(HOST, failed=True) == []
    assert later.assembly.done(5, 0.0) == [left]
    fewer = Nodes(1, 2, restarts=1)
    fewer.ready(HOST, 5)
    fewer.assembly.done(5, 0.0)
    assert fewer.ready(HOST, failed=True) == [Begin(1, {HOST: 0})]
    three = Nodes(3, 3, restarts=1)  # the other one may fail as well
    three.ready(HOST, 5, 6)
    three.assembly.done(5, 0.0)
    assert three.ready(HOST, failed=True) == []
    assert three.ready(6, failed=True) == [left]


def test_a_node_that_comes_during_an_attempt_is_taken_in_when_the_run_says_so() -> None:
    nodes = Nodes(1, 3)
    nodes.ready(HOST, 5)
    nodes.later(LIMIT)
    note, waits = nodes.ready(6)
    assert isinstance(note, Note)
    assert "taken in at its Keeper's next checkpoint" in note.text
    assert waits == NodesWait(1)
    assert nodes.ready(HOST) == []
    assert nodes.ready(5) == [Begin(1, {HOST: 0, 5: 1, 6: 2})]


def test_a_node_that_waits_and_leaves_is_waited_for_no_more() -> None:
    nodes = Nodes(1, 2)
    nodes.ready(HOST)
    nodes.later(LIMIT)
    assert nodes.ready(6)[-1] == NodesWait(1)
    assert nodes.gone(6) == [NodesWait(0)]


def test_a_spare_takes_the_place_of_a_node_that_is_lost() -> None:
    nodes = Nodes(2, 2)
    nodes.ready(HOST, 5)
    (note,) = nodes.ready(6)
    assert isinstance(note, Note)
    assert "takes the place of a node that is lost" in note.text
    nodes.gone(5)
    assert nodes.ready(HOST, failed=True) == [Begin(1, {HOST: 0, 6: 1})]


def test_nodes_keep_their_numbers_and_gaps_are_filled() -> None:
    nodes = Nodes(2, 4)
    nodes.ready(HOST, 5, 6)
    assert nodes.ready(7) == [Begin(0, {HOST: 0, 5: 1, 6: 2, 7: 3})]
    nodes.gone(5)
    nodes.ready(HOST, 6, 7, failed=True)
    assert nodes.later(LIMIT) == [Begin(1, {HOST: 0, 6: 2, 7: 1})]
    nodes.ready(8)
    assert nodes.ready(HOST, 6, 7) == [Begin(2, {HOST: 0, 6: 2, 7: 1, 8: 3})]


def test_numbers_of_the_command_line_are_kept_whoever_comes_first() -> None:
    nodes = Nodes(3, 3)
    nodes.ready(5, wanted=2)
    nodes.ready(HOST)
    assert nodes.ready(6, wanted=1) == [Begin(0, {HOST: 0, 5: 2, 6: 1})]


@pytest.mark.parametrize(
    ("ticket", "wanted", "text"),
    [
        (other("b", digest="d2"), None, "the nodes do not agree on the script"),
        (other("b", devices=4), None, "do not agree on the number of devices of a node"),
        (other("b", nnodes=3), None, "do not agree on the number of nodes"),
        (other("b"), 4, "node 4 is none of 4 nodes"),
        (other("b"), 0, "two launchers say that they are node 0: pid 1 on a and pid 98 on b"),
        (other("b"), 3, "two launchers say that they are node 3: pid 99 on c and pid 98 on b"),
    ],
)
def test_a_node_that_does_not_belong_here_is_refused_and_harms_nobody(
    ticket: Ticket, wanted: int | None, text: str
) -> None:
    nodes = Nodes(4, 4)
    nodes.assembly.ready(9, other("c"), 3, False, 0.0)
    (refused,) = nodes.assembly.ready(5, ticket, wanted, False, 0.0)
    assert isinstance(refused, Refuse)
    assert (refused.key, text in refused.text) == (5, True), refused.text
    nodes.ready(HOST, 6)
    assert nodes.ready(7) == [Begin(0, {HOST: 0, 6: 1, 7: 2, 9: 3})]


def test_a_node_whose_earlier_process_is_not_gone_yet_waits_for_its_place() -> None:
    nodes = Nodes(2, 2)
    nodes.ready(HOST)
    nodes.ready(5, wanted=1)
    (note,) = nodes.ready(6, wanted=1)
    assert isinstance(note, Note)
    nodes.ready(HOST, failed=True)
    assert nodes.gone(5) == [Begin(1, {HOST: 0, 6: 1})]


def test_a_second_spare_is_not_promised_the_only_place() -> None:
    nodes = Nodes(1, 2)
    nodes.ready(HOST)
    nodes.later(LIMIT)
    for key, text in ((5, "taken in at its Keeper's next checkpoint"), (6, "takes the place of a node that is lost")):
        note = nodes.ready(key)[0]
        assert isinstance(note, Note)
        assert text in note.text


def test_a_node_that_leaves_on_purpose_ends_a_run_that_needs_it_and_is_not_waited_for_else() -> None:
    all_needed = Nodes(2, 2, restarts=3)
    all_needed.ready(HOST, 5)
    assert all_needed.assembly.left(5, "node 1 was ended by SIGTERM", 0.0) == [End("node 1 was ended by SIGTERM")]
    fewer = Nodes(1, 3)
    fewer.ready(HOST, 5, 6)
    assert fewer.assembly.left(6, "why", 0.0) == [NodeLost("node 2 (g) has lost its launcher")]
    assert fewer.ready(5, failed=True) == [NodeLost("the ranks of node 1 (f) have failed")]
    assert fewer.ready(HOST, failed=True) == [Begin(1, {HOST: 0, 5: 1})]


def test_attempts_are_counted_on_where_node_0_is_started_again() -> None:
    nodes = Nodes(2, 2)
    nodes.assembly.ready(5, other("f"), None, True, 0.0, attempts=3)
    assert nodes.ready(HOST) == [Begin(3, {HOST: 0, 5: 1})]


def test_a_node_that_is_taken_in_and_fails_at_once_is_sent_away_and_the_run_goes_on_without_it() -> None:
    nodes = Nodes(1, 2)
    nodes.ready(HOST)
    nodes.later(LIMIT)
    nodes.ready(5)
    assert nodes.ready(HOST) == [Begin(1, {HOST: 0, 5: 1})]
    assert nodes.assembly.ready(HOST, OWN, 0, True, nodes.now, culprit=1) == []
    (refused,) = nodes.assembly.ready(5, other("f"), None, True, nodes.now, culprit=1)
    assert isinstance(refused, Refuse)
    assert "have failed in their first attempt" in refused.text
    assert nodes.later(0) == [Begin(2, {HOST: 0})]


def test_a_node_that_has_been_there_before_counts_as_failing_where_its_rank_fails() -> None:
    nodes = Nodes(1, 2, restarts=1)
    nodes.ready(HOST, 5)
    for end in (Begin(1, {HOST: 0, 5: 1}), End("no restart is left (--max-restarts 1)")):
        nodes.assembly.ready(HOST, OWN, 0, True, nodes.now, culprit=1)
        assert nodes.assembly.ready(5, other("f"), None, True, nodes.now, culprit=1) == [end]


def test_a_failure_counts_whichever_launcher_tells_of_it() -> None:
    nodes = Nodes(2, 2)
    nodes.ready(HOST, 5)
    nodes.ready(HOST)
    assert nodes.ready(5, failed=True) == [End("no restart is left (--max-restarts 0)")]


def test_a_node_that_still_ends_is_not_taken_for_one_that_waits() -> None:
    nodes = Nodes(1, 2)
    nodes.ready(HOST, 5)
    nodes.ready(HOST, failed=True)
    assert nodes.later(LIMIT) == [Begin(1, {HOST: 0})]
    assert nodes.later(1) == []
    assert nodes.ready(5)[-1] == NodesWait(1)
