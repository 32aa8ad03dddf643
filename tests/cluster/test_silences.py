"""How long peers have been silent, by a clock that tests turn, and the texts that name them."""

from __future__ import annotations

import asyncio

import pytest

from actorflow.control.peer_watch import PeerWatch, SeenSilence, name_silence
from actorflow.rendezvous.settings import Settings
from actorflow.support.silences import LongSilence, SilenceCounter, SilenceEvent


def counter() -> SilenceCounter:
    return SilenceCounter(suspect=5.0, limit=15.0, tick=1.0)


def events(found: list[LongSilence]) -> list[tuple[int, SilenceEvent]]:
    return [(one.peer, one.event) for one in found]


def test_a_silence_is_told_once_when_it_is_long_and_once_when_it_is_over() -> None:
    count = counter()
    told = {now: count.tick(float(now), {1: now in (0, 1, 11), 2: True}) for now in range(14)}
    assert {now: events(found) for now, found in told.items() if found} == {
        6: [(1, SilenceEvent.SUSPECT)],
        11: [(1, SilenceEvent.OVER)],
    }
    assert told[11][0].seconds == 10.0


def test_a_short_silence_is_not_told() -> None:
    count = counter()
    assert [count.tick(float(now), {1: now % 5 == 0}) for now in range(40)] == [[]] * 40


def test_a_silence_of_the_limit_is_told_each_time_that_it_has_lasted_so_long_again() -> None:
    count = counter()
    told = [now for now in range(60) for one in count.tick(float(now), {7: False}) if one.event is SilenceEvent.LONG]
    assert told == [15, 30, 45]


def test_time_in_which_this_process_was_stopped_is_no_silence_of_its_peers() -> None:
    count = counter()
    for now in range(4):
        count.tick(float(now), {1: True})
    assert count.tick(1000.0, {1: False}) == []  # what they sent meanwhile is read after the first tick
    assert count.of(1) == 2.0
    assert count.tick(1001.0, {1: True}) == []
    count.tick(2000.0, {1: False})
    assert count.tick(3000.0, {1: False}) == []
    assert count.of(1) == 4.0


def test_a_late_tick_counts_as_the_time_that_has_passed() -> None:
    count = counter()
    found = [one for now in (0.0, 1.9, 3.8, 5.7) for one in count.tick(now, {1: False})]
    assert found == [LongSilence(1, pytest.approx(5.7), SilenceEvent.SUSPECT)]


def test_a_peer_that_is_new_has_not_been_silent_and_one_that_has_left_is_forgotten() -> None:
    count = counter()
    for now in range(4):
        count.tick(float(now), {1: False})
    count.tick(4.0, {2: False})
    assert (count.of(1), count.of(2), count.longest) == (0.0, 0.0, 0.0)
    assert events(count.tick(5.0, {1: False, 2: False})) == []


def test_a_process_that_was_stopped_knows_for_how_long_until_it_has_run_for_a_while() -> None:
    count = counter()
    for now in (0.0, 1.0, 2.9):
        count.tick(now, {1: True})
        assert count.stopped(now) == 0.0
    assert count.stopped(50.9) == 48.0  # before the first tick
    count.tick(52.9, {1: True})
    count.tick(53.9, {1: True})
    assert count.stopped(54.0) == 50.0
    count.tick(60.0, {1: True})  # it hardly runs yet
    assert count.stopped(60.1) == 50.0
    for now in (61.0, 62.0):
        count.tick(now, {1: True})
    assert count.stopped(62.1) == 50.0
    count.tick(63.0, {1: True})
    assert count.stopped(63.1) == pytest.approx(6.1)
    for now in (64.0, 65.0, 66.0):
        count.tick(now, {1: True})
    assert count.stopped(66.1) == 0.0


@pytest.mark.parametrize("ticks", [0, 3], ids=["before the first tick", "after some"])
@pytest.mark.parametrize(("limit", "stopped", "noticed"), [(6.0, 4.5, 4.5), (6.0, 3.9, 0.0), (15.0, 4.5, 0.0)])
def test_a_rank_knows_that_it_was_stopped_for_as_long_as_peers_wait_less_what_they_counted_before(
    limit: float, stopped: float, noticed: float, ticks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, sleeps = 0.0, [*[1.0] * ticks, stopped]

    async def sleep(_seconds: float) -> None:
        nonlocal now
        now += sleeps.pop(0)

    async def watched() -> float:
        watch = PeerWatch(Settings(rank=1, lost_after=limit), {}, {}, lambda _: None, lambda _: "", lambda _: None)
        monkeypatch.setattr(asyncio, "sleep", sleep)
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
        await watch.run(lambda: not sleeps)
        return watch.stopped()

    assert asyncio.run(watched()) == noticed


def seen(by: int, seconds: float = 5.0, waits: str = "") -> SeenSilence:
    return SeenSilence(by, seconds, 0.0, waits)


END = "; the run goes on when it does, and it is lost after 15 s (--lost-after)"
PLACE = "rank 2 (b, pid 7)"


@pytest.mark.parametrize(
    ("by", "missing", "elsewhere", "text"),
    [
        ([seen(0)], "", False, "rank 2 (b, pid 7) has not answered for 5 s"),
        ([seen(0)], "rank 0 made call 3: step(x), which it has not", False,
         "rank 2 (b, pid 7) has not answered for 5 s; rank 0 made call 3: step(x), which it has not"),
        ([seen(0, 6.2), seen(1, 4.0, "F1 waits for register 3"), seen(3, 4.0, "F2 waits"), seen(4, 4.0, "F2 waits")],
         "", False, "rank 2 (b, pid 7) has not answered for 6 s; rank 1 waits for it: F1 waits for register 3, and so "
         "do ranks 3-4"),
        ([seen(1, 4.0)], "", True, "rank 2 (b, pid 7) has not answered rank 1, though it does rank 0, for 5 s"),
    ],
    ids=["nobody waits", "a call", "registers", "one link"],
)  # fmt: skip
def test_a_silent_rank_is_named_with_who_waits_for_what(
    by: list[SeenSilence], missing: str, elsewhere: bool, text: str
) -> None:
    assert name_silence(PLACE, by, missing, 15.0, elsewhere) == text + END
