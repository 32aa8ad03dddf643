"""Sockets and temporary files belong to this user alone, and what a killed process has left goes at the next start."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import warm
from actorflow.launch.watch import RankWatch
from actorflow.rendezvous.reports import RankFinished, report_to_launcher
from actorflow.rendezvous.waiting_nodes import say_node_is_lost
from actorflow.status.sockets import answer_requests
from actorflow.support import peer_user
from actorflow.support.held_files import FileHolder, held_files
from actorflow_compiler.core.owned_folders import OWNER, birth, make_owned_folder, remove_leftovers
from cluster.ranks import LIMIT
from cluster.runs import Run

MAKES = """
import sys
from actorflow_compiler.core.owned_folders import make_owned_folder
print(make_owned_folder("held"), flush=True)
sys.stdin.read()
"""
WAIT = """
import os, pathlib, sys, threading
from actorflow.control.cluster import current

current()
pathlib.Path(sys.argv[1], "up.part").write_text("")
os.rename(f"{sys.argv[1]}/up.part", f"{sys.argv[1]}/up")
threading.Event().wait()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def mode(path: str | Path) -> int:
    return stat.S_IMODE(Path(path).lstat().st_mode)


def test_folders_of_processes_that_were_killed_go_and_those_of_others_stay(temporary: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe = subprocess.PIPE
    made = [
        subprocess.Popen([sys.executable, "-c", MAKES], stdin=pipe, stdout=pipe, text=True, env=environment)
        for _ in range(2)
    ]
    dies = made[1]
    try:
        stays, goes = (Path(str(one.stdout and one.stdout.readline().strip())) for one in made)
        dies.kill()
        dies.wait(LIMIT)
        own, logs = Path(make_owned_folder()), temporary / "actorflow-logs-ab"
        logs.mkdir()
        assert remove_leftovers() == [str(goes)]
        assert sorted(temporary.iterdir()) == sorted([own, logs, stays])
        assert [mode(folder) for folder in (own, stays)] == [0o700, 0o700]
    finally:
        for one in made:
            one.communicate("")


@pytest.mark.parametrize(
    ("owner", "removed"),
    [
        ({}, False),
        ({"birth": 1}, True),  # this process's id was another's before
        ({"birth": 1, "where": "another container, in which this id means another process"}, False),
        ({"birth": "yesterday"}, False),
    ],
    ids=["lives", "has ended", "cannot be known", "is not told"],
)
def test_a_folder_is_removed_only_where_its_owner_is_known_to_have_ended(
    owner: dict[str, object], removed: bool
) -> None:
    folder = Path(make_owned_folder())
    told = json.loads((folder / OWNER).read_text())
    assert told["birth"] == birth(os.getpid())
    (folder / OWNER).write_text(json.dumps({**told, **owner}))
    remove_leftovers()
    assert folder.exists() is not removed


def test_no_link_is_followed_and_no_folder_of_another_user_touched(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = Path(make_owned_folder())
    told = json.loads((left / OWNER).read_text())
    (left / OWNER).write_text(json.dumps({**told, "birth": 1}))
    elsewhere = left.rename(tmp_path / "elsewhere")
    (temporary / "actorflow-link").symlink_to(elsewhere)
    assert remove_leftovers() == []
    (temporary / "actorflow-link").unlink()
    elsewhere.rename(left)
    monkeypatch.setattr(os, "geteuid", lambda: told["pid"] + 1)
    assert remove_leftovers() == []
    monkeypatch.undo()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    assert remove_leftovers() == [str(left)]


def test_a_start_removes_what_a_killed_launcher_has_left_but_no_logs(
    start: Callable[..., Run], temporary: Path, tmp_path: Path
) -> None:
    run = start(WAIT, "--devices", "1", "--max-restarts", "1", "--", str(tmp_path), python=warm.python())
    run.wait_for([tmp_path / "up"])
    left = sorted(temporary.glob("actorflow-*"))
    assert len(left) == 2, left  # its own socket's, and that of files which are held for restarts
    assert all(mode(folder) == 0o700 for folder in left)
    sockets = [path for folder in left for path in folder.iterdir() if path.is_socket()]
    assert {path.name for path in sockets} == {"launcher", "rank0", "holder"}
    assert {mode(path) for path in sockets} == {0o600}
    os.kill(json.loads((left[0] / OWNER).read_text())["pid"], signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    assert sorted(temporary.glob("actorflow-*")) == left
    (temporary / "actorflow-logs-ab").mkdir()
    assert start("pass", "--devices", "1", python=warm.python()).wait() == 0
    assert [path.name for path in temporary.glob("actorflow-*")] == ["actorflow-logs-ab"]


def test_a_folder_goes_while_another_thread_says_that_a_node_is_lost(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, remove = RankWatch(), os.rmdir

    def say_and_remove(*arguments: Any, **more: Any) -> None:
        say_node_is_lost(watch.address, "node 1")
        remove(*arguments, **more)

    monkeypatch.setattr(os, "rmdir", say_and_remove)
    watch.start()
    watch.close()
    assert list(temporary.iterdir()) == []


def test_what_another_user_sends_to_a_launcher_a_rank_or_a_holder_of_files_is_not_taken(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    watch, holder = RankWatch(), FileHolder()
    answer_requests(watch.address, 0, 1, lambda _: b"")
    assert held_files(holder.address, "") == {}
    user = os.geteuid()
    monkeypatch.setattr(peer_user.os, "geteuid", lambda: user + 1)  # so that this user is another one
    report_to_launcher(watch.address, RankFinished(0))
    watch.start()
    with pytest.raises((OSError, ValueError)):
        held_files(holder.address, "")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
        s.settimeout(LIMIT)
        s.connect(str(Path(watch.address).with_name("rank0")))
        with suppress(ConnectionError):  # it has closed
            s.sendall(b"own\n")
            assert s.recv(1) == b""
    found = watch.close()
    holder.close()
    assert "could not be taken in: a datagram of another user" in capfd.readouterr().err
    assert watch._finished == set()
    assert found.failures == []
