"""Several launchers on one node, each with one rank: whose ranks they start, what these find, where their logs go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from actorflow.launch import attempt as launch
from actorflow.launch.log_files import log_path
from actorflow.launch.log_gather import LogKeeper, LogSender
from actorflow.rendezvous.settings import Settings


def settings_of(run: Settings, local: int = 0) -> Settings:
    """What the rank with this number below its launcher finds."""
    variables = launch._variables(launch._rank_settings(run, 4242, "logs", "", 0))
    return Settings.from_env({**variables, "LOCAL_RANK": str(local)})


def test_the_launchers_of_a_node_start_its_ranks_between_them() -> None:
    runs = [Settings(devices=4, nnodes=2, node=1, tasks=4, local_rank=task) for task in range(4)]
    assert [list(run.launcher_ranks) for run in runs] == [[4], [5], [6], [7]]
    assert [run.launcher_number for run in runs] == [4, 5, 6, 7]
    found = settings_of(runs[2])
    assert (found.rank, found.local_rank, found.world, found.node, found.devices) == (6, 2, 8, 1, 4)
    assert found.leads  # hears for its launcher


def test_one_launcher_of_a_node_starts_them_all() -> None:
    run = Settings(devices=4, nnodes=2, node=1)
    assert list(run.launcher_ranks) == [4, 5, 6, 7]
    assert (run.launcher_number, run.launchers) == (1, 2)
    found = [settings_of(run, local) for local in range(4)]
    assert [one.rank for one in found] == [4, 5, 6, 7]
    assert [one.leads for one in found] == [True, False, False, False]


def test_launchers_share_their_nodes_cores_unless_theirs_are_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    shared = settings_of(Settings(devices=2, tasks=2, local_rank=1))
    assert (shared.threads, shared.cores) == (4, frozenset(range(4, 8)))
    own = settings_of(Settings(devices=2, tasks=2, local_rank=1, own_cores=True))
    assert (own.threads, own.cores) == (8, frozenset())


def test_a_held_port_and_a_named_card_reach_the_ranks() -> None:
    found = settings_of(Settings(nnodes=2, master_port=4242, reserved_port=True, interface="ib0"))
    assert (found.reserved_port, found.interface) == (True, "ib0")
    assert not settings_of(Settings(nnodes=2, master_port=4242)).reserved_port


def test_only_a_launcher_that_is_alone_makes_a_secret() -> None:
    assert len(launch._rank_settings(Settings(devices=2), 4242, "", "", 0).token) == 32
    assert launch._rank_settings(Settings(devices=2, tasks=2), 4242, "", "", 0).token == ""


@pytest.mark.parametrize("shared", [False, True])
def test_logs_come_to_the_master_once_also_where_all_launchers_share_a_folder(shared: bool, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / ("here" if shared else "there")
    here.mkdir()
    there.mkdir(exist_ok=True)
    keeper = LogKeeper(range(1, 2), 1, str(here), "127.0.0.1", "secret", 30.0, print)
    sender = LogSender(1, range(1, 2), str(there), "secret", 30.0, "127.0.0.1:{}".format)
    log_path(there, 1, "stdout").write_text("before\n")
    keeper.start()
    sender.send_to(f"127.0.0.1:{keeper.port}")
    assert sender._thread is not None
    sender._thread.join(1.0)  # seconds; a shared folder's ends at once, another's goes on
    assert sender._thread.is_alive() is not shared
    with log_path(there, 1, "stdout").open("a") as file:
        file.write("after\n")
    sender.finish(True)
    keeper.finish(True)
    assert log_path(here, 1, "stdout").read_text() == "before\nafter\n"
    assert sorted(path.name for path in there.iterdir()) == ["rank1.stdout.log"]
