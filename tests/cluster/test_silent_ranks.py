"""Ranks that give no sign of life for a while: each is named once, by the master, and the run goes on or ends."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from actorflow.control import control_plane, peer_watch
from actorflow.control.cluster import Cluster
from actorflow.launch import watch
from actorflow.launch.watch import RankWatch
from actorflow.rendezvous.failure import FailureKind
from actorflow.rendezvous.settings import Settings
from actorflow_compiler.core.errors import ClusterError
from cluster.ranks import LIMIT, Ranks

Joined = Callable[..., Ranks]
TICK = 0.05


class Terminal(io.StringIO):
    """What a launcher, and ranks without one, print: in memory, since pytest's capture loses what comes as it reads."""

    def __init__(self) -> None:
        super().__init__()
        self._printed = threading.Condition()
        self.watch = RankWatch()
        self.watch.start()

    def write(self, text: str) -> int:
        """Print something.  For any thread."""
        with self._printed:
            self._printed.notify_all()
            return super().write(text)

    def until(self, text: str) -> None:
        """Wait for a text to be printed."""
        with self._printed:
            printed = self._printed.wait_for(lambda: text in self.getvalue(), LIMIT)
        assert printed, f"{text!r} was awaited; printed is: {self.getvalue()}"

    def lines(self, of: str) -> list[str]:
        """The lines with a text in them."""
        return [line for line in self.getvalue().splitlines() if of in line]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setattr(peer_watch, "TICK", TICK)
    monkeypatch.setattr(peer_watch, "SUSPECT", 10 * TICK)
    monkeypatch.setattr(control_plane, "CATCHING_UP", 0.0)
    made = Terminal()
    for module in (peer_watch, watch):
        monkeypatch.setattr(module, "say", lambda text: made.write(f"actorflow: {text}\n"))
    yield made
    if made.watch._thread.is_alive():
        made.watch.close()


def hush(cluster: Cluster, *peers: int) -> Callable[[], None]:
    """Have a rank send no signs of life to these peers, as one does that is stopped; returns what ends that."""
    links = [cluster._control_plane.links[peer] for peer in peers]
    for link in links:
        link.beat = lambda _: None  # type: ignore[method-assign]

    def speak() -> None:
        for link in links:
            del link.beat

    return speak


def test_a_silent_rank_is_named_once_by_the_master_with_who_waits_and_again_when_it_answers(
    joined: Joined, terminal: Terminal
) -> None:
    ranks = joined(4, launcher=terminal.watch.address, lost_after=LIMIT)
    ranks.each(lambda cluster: cluster.connect(range(4)))
    ranks.clusters[0].tell_waits(lambda other: f"F1 waits for register 7 filled by F0 of rank {other}")
    ranks.apart(*[lambda c=c: c.announce_call(1, "ab", "step(x)") for c in ranks.clusters[:2]])
    speak = hush(ranks.clusters[2], 0, 1, 3)
    terminal.until("has not answered")
    speak()
    terminal.until("answers again")
    assert ranks.clusters[0].failure is None
    ticket = ranks.clusters[0]._control_plane.tickets[2]
    (named,) = terminal.lines("has not answered")
    assert named.startswith(f"actorflow: rank 2 ({ticket.host}, pid {ticket.pid}) has not answered for ")
    assert "s; rank 0 made call 1: step(x), which it has not; " in named
    assert "; rank 0 waits for it: F1 waits for register 7 filled by F0 of rank 2; " in named
    assert named.endswith(f"the run goes on when it does, and it is lost after {LIMIT:g} s (--lost-after)")
    (again,) = terminal.lines("answers again")
    assert again.startswith("actorflow: rank 2 answers again after ")


def test_a_silent_master_is_named_once_on_a_terminal_though_all_ranks_see_it(
    joined: Joined, terminal: Terminal
) -> None:
    ranks = joined(4, launcher=terminal.watch.address, lost_after=LIMIT)
    speak = hush(ranks.clusters[0], 1, 2, 3)
    terminal.until("rank 0 (")
    speak()
    terminal.until("rank 0 answers again")
    later = time.monotonic() + 20 * TICK  # others may still want to say it
    while time.monotonic() < later:
        assert len(terminal.lines("has not answered")) == len(terminal.lines("answers again")) == 1
        time.sleep(TICK)


def test_a_rank_that_answers_the_master_but_not_another_rank_is_named_so(joined: Joined, terminal: Terminal) -> None:
    ranks = joined(3, launcher=terminal.watch.address, lost_after=LIMIT)
    ranks.each(lambda cluster: cluster.connect(range(3)))
    ranks.clusters[2].tell_waits(lambda other: f"F1 waits for register 7 filled by F0 of rank {other}")
    speak = hush(ranks.clusters[1], 2)
    terminal.until("has not answered rank 2, though it does rank 0, for ")
    terminal.until("; rank 2 waits for it: F1 waits for register 7 filled by F0 of rank 1; ")
    speak()
    terminal.until("rank 1 answers again")


def test_a_silent_rank_whose_process_lives_is_waited_for_and_said_to_keep_the_lock(
    joined: Joined, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answers(*_: Any) -> bool:
        return False

    monkeypatch.setattr(control_plane.door, "answers", answers)
    ranks = joined(2, launcher=terminal.watch.address, lost_after=20 * TICK)
    speak = hush(ranks.clusters[1], 0)
    terminal.until("but its process lives: some code in it")
    time.sleep(30 * TICK)  # another limit
    speak()
    terminal.until("rank 1 answers again")
    assert [cluster.failure for cluster in ranks.clusters] == [None, None]
    assert len(terminal.lines("its process lives")) == 1


def test_a_rank_that_answers_calls_but_not_on_its_link_has_lost_that_link(joined: Joined, terminal: Terminal) -> None:
    ranks = joined(2, launcher=terminal.watch.address, lost_after=20 * TICK)
    hush(ranks.clusters[1], 0)
    for cluster in ranks.clusters:
        assert cluster.failed.wait(LIMIT)
        assert cluster.failure is not None
        assert (cluster.failure.rank, cluster.failure.kind) == (1, FailureKind.BROKEN)
    assert terminal.lines("its process lives") == []


@pytest.mark.parametrize("silent", [0, 2])
@pytest.mark.parametrize("kind", [FailureKind.STOPPED, FailureKind.UNREACHABLE])
def test_a_rank_that_is_silent_for_the_limit_and_does_not_answer_a_probe_is_lost(
    joined: Joined, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, kind: FailureKind, silent: int
) -> None:
    async def probe(*_: Any) -> FailureKind:
        return kind

    monkeypatch.setattr(control_plane.door, "probe", probe)
    ranks = joined(3, launcher=terminal.watch.address, lost_after=20 * TICK)
    hush(ranks.clusters[silent], *{0, 1, 2} & set(ranks.clusters[silent]._control_plane.links))
    for cluster in ranks.clusters:
        assert cluster.failed.wait(LIMIT)
    assert {(c.failure.rank, c.failure.kind) for c in ranks.clusters if c.failure} == {(silent, kind)}
    assert len(terminal.lines("has not answered")) == 1


def test_a_rank_that_answers_while_it_is_probed_is_not_lost(
    joined: Joined, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed, speaks = threading.Event(), threading.Event()

    async def probe(*_: Any) -> FailureKind:
        probed.set()
        await control_plane.asyncio.to_thread(speaks.wait, LIMIT)
        return FailureKind.STOPPED

    monkeypatch.setattr(control_plane.door, "probe", probe)
    ranks = joined(2, launcher=terminal.watch.address, lost_after=20 * TICK)
    speak = hush(ranks.clusters[1], 0)
    assert probed.wait(LIMIT)
    speak()
    terminal.until("rank 1 answers again")
    speaks.set()
    assert ranks.each(lambda cluster: cluster.goodbye()) == [None, None]


def test_ranks_without_a_launcher_print_it_themselves(joined: Joined, terminal: Terminal) -> None:
    ranks = joined(3, lost_after=LIMIT)
    speaks = [hush(ranks.clusters[2], 0), hush(ranks.clusters[0], 1, 2)]
    terminal.until("rank 2 (")
    terminal.until("rank 0 (")
    for speak in speaks:
        speak()
    terminal.until("rank 2 answers again")
    terminal.until("rank 0 answers again")
    assert len(terminal.lines("has not answered")) == 2


def test_different_limits_on_two_nodes_are_refused(ranks: Ranks, settings: Callable[..., Settings]) -> None:
    for rank, lost_after in enumerate((20.0, 25.0)):
        ranks.make(settings(rank, 2, devices=1, nnodes=2, node=rank, lost_after=lost_after))
    for e in ranks.each(lambda cluster: cluster.join()):
        assert isinstance(e, ClusterError)
        assert "ranks do not agree on the limit of silence (--lost-after):" in str(e)
        assert "): 20 s\n" in str(e)
        assert "): 25 s\nStart every node with the same --lost-after" in str(e)


def test_the_limit_is_longer_where_there_are_several_hosts_and_what_the_user_says_where_he_does(
    settings: Callable[..., Settings],
) -> None:
    assert settings(0, 2).silence_limit == 15.0
    assert settings(0, 2, devices=1, nnodes=2).silence_limit == 30.0
    assert settings(0, 2, lost_after=7.0).silence_limit == 7.0
    assert settings(0, 2, devices=1, nnodes=2).to_env()["ACTORFLOW_LOST_AFTER"] == "30.0"


def test_transfers_over_nccl_outlast_a_silence_unless_the_user_says_less(settings: Callable[..., Settings]) -> None:
    assert settings(0, 2).transfer_limit == 600.0
    assert settings(0, 2, lost_after=1000.0).transfer_limit == 2000.0
    assert settings(0, 2, lost_after=1000.0, nccl_timeout=10.0).transfer_limit == 10.0
