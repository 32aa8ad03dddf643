"""When ranks do not come together, the error says what was tried and what stands in the way."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from actorflow.control import join_hints
from actorflow.rendezvous import ticket
from actorflow.rendezvous.reports import parse
from actorflow.rendezvous.roster import Ticket
from actorflow.rendezvous.settings import Settings
from actorflow_compiler.core.errors import ClusterError
from cluster.ranks import LIMIT, Ranks

Make = Callable[..., Settings]


def test_without_a_master_the_attempt_and_the_conditions_here_are_told(
    ranks: Ranks, settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    monkeypatch.setenv("LD_PRELOAD", "libtsocks.so")
    cluster = ranks.make(settings(1, 2, join_timeout=0.3, devices=1, nnodes=2))
    (e,) = ranks.each(lambda cluster: cluster.join())
    assert isinstance(e, ClusterError)
    port = cluster.settings.master_port
    for part in (
        f"The master (127.0.0.1) cannot be reached from {socket.gethostname()}: TCP to 127.0.0.1 port {port}: refused.",
        "Start the run on that node too, with the same port",
        "GLOO_SOCKET_IFNAME=ib7 names no network interface",
        "LD_PRELOAD=libtsocks.so sends this process's connections through a proxy",
    ):
        assert part in str(e)


def test_the_master_tells_what_may_keep_others_away_from_it(
    ranks: Ranks, settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=ib7")
    ranks.make(settings(0, 2, join_timeout=0.3, devices=1, nnodes=2))
    (e,) = ranks.each(lambda cluster: cluster.join())
    assert isinstance(e, ClusterError)
    assert "rank 1 (node 1) did not join within 0.3 s" in str(e)
    assert "NCCL_SOCKET_IFNAME==ib7 names no network interface" in str(e)


@pytest.mark.parametrize(
    ("function", "argument", "values", "name"),
    [
        ("_version", "torch", ("2.13.0", "2.11.0"), "version of torch"),
        ("_version", "actorflow", ("0.1.0", "0.2.0"), "version of actorflow"),
        (
            "communication",
            None,
            ("NCCL 2.27.3 and CUDA 12.8 of torch 2", "NCCL 2.21.5 and CUDA 12.8 of torch 2"),
            "communication library",
        ),
        (
            "communication",
            None,
            ("NCCL 2.27.3 and CUDA 12.8 of torch 2", "NCCL 2.27.3 and CUDA 13.0 of torch 2"),
            "communication library",
        ),
    ],
)
def test_ranks_with_different_versions_are_told_both(
    ranks: Ranks,
    settings: Make,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    argument: str | None,
    values: tuple[str, str],
    name: str,
) -> None:
    as_it_is = getattr(ticket, function)
    for rank, value in enumerate(values):

        def other(*given: Any, value: str = value) -> Any:
            return value if argument is None or given == (argument,) else as_it_is(*given)

        monkeypatch.setattr(ticket, function, other)
        ranks.make(settings(rank, 2))
    results = ranks.each(lambda cluster: cluster.join())
    for e in results:
        assert isinstance(e, ClusterError)
        assert f"ranks do not agree on the {name}:" in str(e)
        assert all(value in str(e) for value in values)


def test_a_rank_that_waits_for_its_master_says_so_on_its_nodes_terminal(
    settings: Make, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(join_hints, "FIRST_NOTICE", 0.0)
    path = str(tmp_path_factory.mktemp("l") / "launcher")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as launcher:
        launcher.bind(path)
        launcher.settimeout(LIMIT)
        mine = settings(1, 2, devices=1, nnodes=2, node=1, launcher=path)

        async def until_said() -> bytes:
            telling = asyncio.ensure_future(join_hints.report_waiting(mine))
            said = await asyncio.to_thread(launcher.recv, 1 << 16)
            telling.cancel()
            return said

        notice = parse(asyncio.run(until_said()))
    assert "rank 1 (node 1) waits for the master. The master (127.0.0.1) cannot be reached" in str(notice)


def test_ranks_that_reach_the_master_but_not_each_other_name_the_port(settings: Make) -> None:
    def at(rank: int, address: str) -> Ticket:
        return Ticket(rank, rank, 3, 1, f"host{rank}", 1, address, "", "", "", "", "", ())

    with socket.create_server(("127.0.0.1", 0)) as s:
        closed = s.getsockname()[1]
    own, other = at(1, "127.0.0.1:1"), at(2, f"127.0.0.1:{closed}")
    text = asyncio.run(join_hints.why_no_link(settings(1, 3, devices=1, nnodes=3), own, other, 9.0))
    assert f"rank 1 (127.0.0.1:1) and rank 2 (node 2, host2) (127.0.0.1:{closed}) could not connect within 9 s" in text
    assert "all ports between the nodes have to be open" in text
    assert f"TCP to 127.0.0.1 port {closed}: refused." in text
