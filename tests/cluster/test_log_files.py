"""Copies of files that grow elsewhere: whole ones of short files, bounded ones of long files, none of strangers'."""

from __future__ import annotations

from pathlib import Path

import pytest

from actorflow.launch.log_files import CHUNK, LogCopies, LogTail, log_path
from actorflow.launch.log_gather import LogKeeper, LogSender
from actorflow.support.refusals import MessageRefused


def test_a_short_file_is_read_as_it_grows_and_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LogTail(path)
    assert tail.more() == b""  # nothing is written yet
    path.write_bytes(b"one\n")
    assert tail.more() == b"one\n"
    assert tail.more() == b""
    with path.open("ab") as file:
        file.write(b"two\n")
    assert list(tail.rest()) == [b"two\n"]


def test_of_a_file_that_is_too_long_the_beginning_and_the_end_are_read_and_the_gap_is_told(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a" * CHUNK + b"b" * CHUNK + b"z" * 1000)
    tail = LogTail(path, most=CHUNK, last=1000)
    assert tail.more() == b"a" * CHUNK
    assert tail.more() == b""  # that is the most
    note, end = tail.rest()
    assert f"{CHUNK:,} bytes are left out here; the whole is in {path}" in note.decode()
    assert end == b"z" * 1000


def test_what_is_left_to_copy_when_all_has_ended_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a" * 5000 + b"z" * 10)
    note, end = LogTail(path, rush=100, last=10).rest()
    assert "5,000 bytes are left out" in note.decode()
    assert end == b"z" * 10


def test_copies_are_bounded_and_begin_anew_in_a_folder_that_is_used_again(tmp_path: Path) -> None:
    path = log_path(tmp_path, 2, "stdout")
    path.write_bytes(b"of an earlier run")
    copies = LogCopies(str(tmp_path), range(1, 2), devices=2, most=6)
    for data in (b"abcd", b"efgh", b"ijkl"):
        copies.add(1, 2, "stdout", data)
    assert path.read_bytes() == b"abcdef"


@pytest.mark.parametrize(
    ("node", "rank", "file"),
    [(0, 0, "stdout"), (2, 4, "stdout"), (1, 1, "stdout"), (1, 4, "stdout"), (1, 2, "../stdout"), (1, 2, "")],
)
def test_a_node_writes_no_files_but_those_of_its_ranks(node: int, rank: int, file: str, tmp_path: Path) -> None:
    copies = LogCopies(str(tmp_path), range(1, 2), devices=2)
    with pytest.raises(MessageRefused, match=f"node {node} has no"):
        copies.add(node, rank, file, b"x")
    assert list(tmp_path.iterdir()) == []


def _gathered(tmp_path: Path, token: str) -> str:
    """What node 0 has of a rank of node 1, whose launcher knows this token."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    log_path(there, 1, "stderr").write_text("ValueError\n")
    keeper = LogKeeper(range(1, 2), 1, str(here), "127.0.0.1", "secret", 30.0, print)
    keeper.start()
    sender = LogSender(1, range(1, 2), str(there), token, 30.0, "127.0.0.1:{}".format)
    sender.send_to(f"127.0.0.1:{keeper.port}")
    sender.finish(well=True)
    keeper.finish(well=token == "secret")
    copy = log_path(here, 1, "stderr")
    return copy.read_text() if copy.exists() else ""


def test_what_a_rank_of_another_node_printed_last_is_there_when_both_have_ended(tmp_path: Path) -> None:
    assert _gathered(tmp_path, "secret") == "ValueError\n"


def test_a_stranger_writes_nothing(tmp_path: Path) -> None:
    assert _gathered(tmp_path, "guess") == ""


@pytest.mark.parametrize(
    "address", ["10.9.8.7:4242", "localhost:4242", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:99999", "127.0.0.1:x", ""]
)
def test_the_logs_and_the_token_go_to_no_other_host_than_node_0(tmp_path: Path, address: str) -> None:
    """A process of this user can tell the launcher where logs are kept."""
    sender = LogSender(1, range(1, 2), str(tmp_path), "secret", 30.0, "127.0.0.1:{}".format)
    with pytest.raises(MessageRefused):
        sender.send_to(address)
    assert sender._thread is None
    sender.finish(well=True)
