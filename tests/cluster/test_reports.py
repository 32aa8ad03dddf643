"""What ranks tell their launcher, whatever characters are in it and however much it is."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator

import pytest

from actorflow.launch.watch import RankWatch
from actorflow.rendezvous.failure import Failure
from actorflow.rendezvous.reports import (
    LogsKept,
    Notice,
    RankFinished,
    RankSilence,
    RankStarted,
    RunShape,
    report_to_launcher,
)
from actorflow.support.refusals import RefusalCount
from cluster.ranks import LIMIT

MANY = 100_000  # characters, more than any datagram takes


@pytest.fixture
def watch() -> Iterator[RankWatch]:
    made = RankWatch()
    made.start()
    yield made
    if made._thread.is_alive():
        made.close()


@pytest.mark.parametrize("character", ["x", "é", "漢", "😀", '"', "\x00", "\udc80"], ids=ascii)
def test_a_cause_reaches_the_launcher_shortened_whatever_its_characters_take(watch: RankWatch, character: str) -> None:
    told = Failure(1, "host", 42, "raised", f"raised ValueError: {character * MANY}", 1)
    report_to_launcher(watch.address, told)
    report_to_launcher(watch.address, RankFinished(0))
    found = watch.close()
    (heard,) = found.failures
    assert (heard.rank, heard.host, heard.pid, heard.kind) == (1, "host", 42, "raised")
    assert len(heard.cause) > 4000
    assert heard.cause[:-1] == told.cause[: len(heard.cause) - 1]
    assert heard.cause[-1] == "…"


def test_a_cause_that_fits_is_not_shortened(watch: RankWatch) -> None:
    told = Failure(1, "host", 42, "raised", "raised ValueError: 文字", 1)
    report_to_launcher(watch.address, told)
    assert watch.close().failures == [told]


def test_a_long_notice_is_shortened_as_well(watch: RankWatch, capfd: pytest.CaptureFixture[str]) -> None:
    report_to_launcher(watch.address, Notice("待" * MANY))
    watch.close()
    assert capfd.readouterr().err.startswith("actorflow: 待待待")


def test_what_is_no_report_is_said_and_the_launcher_goes_on_listening(
    watch: RankWatch, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actorflow.launch.watch.REFUSALS", RefusalCount())  # a process says few in a minute
    wrong = [
        b"x" * MANY,  # longer than is read
        b'["failed", {"rank": 1',  # cut off
        b"\xff\xfe",
        b"{}",
        b'["nobody knows", {}]',
        b'["started", {"rank": 1}]',
    ]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        for datagram in wrong:
            s.sendto(datagram, watch.address)
    report_to_launcher(watch.address, RunShape(2, 1, 0, "", 0, False, ""))
    found = watch.close()
    assert found.wanted == RunShape(2, 1, 0, "", 0, False, "")
    assert (found.failures, found.started) == ([], {})
    said = "actorflow: a message was refused (launcher, from a process of this user): "
    assert capfd.readouterr().err.count(said) == len(wrong)


def test_a_terminal_that_is_gone_does_not_end_the_watch(watch: RankWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def write(self, text: str) -> int:
            raise BrokenPipeError

        flush = write

    monkeypatch.setattr("sys.stderr", Gone())
    report_to_launcher(watch.address, Notice("waiting"))
    told = Failure(1, "host", 42, "raised", "raised ValueError", 1)
    report_to_launcher(watch.address, told)
    assert watch.close().failures == [told]


def test_what_only_informs_a_launcher_that_does_not_read_keeps_no_rank_waiting() -> None:
    watch = RankWatch()  # never started
    for number in range(10_000):  # more than the kernel keeps
        report_to_launcher(watch.address, RankSilence(1, f"silence {number}", over=False))
        report_to_launcher(watch.address, Notice(f"notice {number}"))
    watch.start()
    watch.close()


def test_a_launcher_that_cannot_keep_logs_watches_on() -> None:
    def refuse(address: str) -> None:
        raise OSError(f"no way to {address}")

    watch = RankWatch(refuse)
    watch.start()
    report_to_launcher(watch.address, LogsKept("host:1"))
    told = Failure(1, "host", 42, "raised", "raised ValueError", 1)
    report_to_launcher(watch.address, told)
    assert watch.close().failures == [told]


def test_a_rank_that_has_ended_before_its_report_is_read_is_counted_as_started(watch: RankWatch) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait(LIMIT)
    report_to_launcher(watch.address, RankStarted(3, gone.pid))
    assert watch.close().started == {3: gone.pid}
