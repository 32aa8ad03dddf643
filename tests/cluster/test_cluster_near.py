"""Unix sockets between the ranks of a machine: who gets in, and what happens where none can be opened."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from actorflow.control import local_links
from actorflow.control.cluster import Cluster
from actorflow.rendezvous.settings import Settings
from actorflow.transport import unix_door
from actorflow.transport.messages import Credit, Filled, Message
from actorflow.transport.unix_door import UnixDoor, machine
from actorflow_compiler.core.errors import ClusterError
from cluster.ranks import LIMIT, Ranks, Word

Joined = Callable[..., Ranks]


def visit(*guests: tuple[int, str]) -> tuple[list[object], list[int]]:
    """Dial rank 0 of a run with token "secret", guest by (rank, token); what each got, and who rank 0 let in."""

    async def main() -> tuple[list[object], list[int]]:
        host = UnixDoor(0, "secret")
        serving = asyncio.ensure_future(host.serve())
        got: list[object] = []
        try:
            for rank, token in guests:
                try:
                    sock = await UnixDoor(rank, token).dial(0, host.name)
                    got.append(sock.getpeername())
                except (OSError, ClusterError, TimeoutError) as e:
                    got.append(e)
            return got, [rank for rank in range(10) if host.take(rank) is not None]
        finally:
            serving.cancel()

    return uvloop.run(main())


def test_ranks_with_the_token_get_in_and_others_do_not() -> None:
    got, inside = visit((1, "secret"), (2, "guess"), (3, ""), (4, "secret"))
    assert inside == [1, 4]
    assert [isinstance(g, Exception) for g in got] == [False, True, True, False]


def test_a_rank_gets_in_once() -> None:
    got, inside = visit((1, "secret"), (1, "secret"))
    assert inside == [1]
    assert isinstance(got[1], Exception)


def test_another_user_is_turned_away_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_door.os, "geteuid", lambda: os.getuid() + 1)
    got, inside = visit((1, "secret"))
    assert inside == []
    assert f"of user {os.getuid()} is at the other end" in str(got[0])


@pytest.mark.parametrize("data", [b"", b"actflow1", b"GET / HTTP/1.1\r\n" * 2 + bytes(12)])
def test_a_stranger_learns_nothing_and_keeps_nobody_waiting(data: bytes) -> None:
    async def main() -> bytes:
        host = UnixDoor(0, "secret")
        serving = asyncio.ensure_future(host.serve())
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(f"\0{host.name}")
        stranger.sendall(data)
        stranger.setblocking(False)
        await UnixDoor(1, "secret").dial(0, host.name)
        if len(data) < 44:
            stranger.shutdown(socket.SHUT_WR)
        answer = await asyncio.get_running_loop().sock_recv(stranger, 100)
        serving.cancel()
        return answer

    assert uvloop.run(main()) == b""


def test_a_peer_that_answers_for_another_rank_is_not_believed() -> None:
    async def main() -> None:
        host = UnixDoor(0, "secret")
        serving = asyncio.ensure_future(host.serve())
        try:
            await UnixDoor(2, "secret").dial(1, host.name)
        finally:
            serving.cancel()

    with pytest.raises(ClusterError, match="not of this run"):
        uvloop.run(main())


def test_a_socket_leaves_nothing_in_the_file_system_and_its_name_is_free_again() -> None:
    door = UnixDoor(0, "")
    sockets = Path("/proc/net/unix")
    assert f"@{door.name}" in sockets.read_text()  # "@": it is no path
    door._socket.close()
    assert door.name not in sockets.read_text()


def test_ranks_of_one_machine_are_near_and_others_are_not(
    ranks: Ranks, settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = iter(["a", "b", "a"])
    monkeypatch.setattr(local_links, "machine", lambda: next(places))
    for rank in range(3):
        cluster = ranks.make(settings(rank, 3))
        cluster.begin()
        while not (cluster._control_plane.local_links._door or cluster.failed.wait(0.01)):
            pass
    assert ranks.each(lambda cluster: cluster.join()) == [None] * 3
    assert ranks.each(lambda cluster: cluster.connect(range(3))) == [None] * 3
    assert [cluster.local_peers for cluster in ranks.clusters] == [{2}, set(), {0}]
    assert ranks.clusters[0].machines == ("a", "b", "a")
    (e,) = ranks.apart(lambda: ranks.clusters[0].send(1, Filled(0, 0, 0)))
    assert isinstance(e, ClusterError)
    assert "shares no memory with rank 1" in str(e)


def test_where_no_socket_opens_both_ranks_say_it_once_and_use_grpc(
    joined: Joined, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def refuse(self: UnixDoor, peer: int, name: str) -> socket.socket:
        raise ConnectionRefusedError("no way")

    monkeypatch.setattr(UnixDoor, "dial", refuse)
    ranks = joined(2)
    for _ in range(2):
        assert ranks.each(lambda cluster: cluster.connect(range(2))) == [None] * 2
    heard: list[Message] = []

    def talk(cluster: Cluster) -> None:
        if cluster.rank == 0:
            cluster.on_message(lambda peer, message: heard.append(message))
            cluster.serve(Word, lambda _: [b""])
        else:
            cluster.send(0, Credit(0, 5))
            cluster.gather("sent", b"")
            return
        cluster.gather("sent", b"")

    assert ranks.each(talk) == [None] * 2
    assert heard == [Credit(0, 5)]
    assert [cluster.local_peers for cluster in ranks.clusters] == [set(), set()]
    warnings = [line for line in capfd.readouterr().err.splitlines() if "Unix socket" in line]
    assert len(warnings) == 1
    assert "rank 1 and rank 0 (node 0" in warnings[0]
    assert "no way" in warnings[0]


def test_a_rank_whose_socket_closes_without_a_goodbye_ends_the_run(joined: Joined) -> None:
    ranks = joined(2)
    assert ranks.each(lambda cluster: cluster.connect(range(2))) == [None] * 2
    lines = []
    ranks.clusters[0].on_line(lines.append)
    ranks.clusters[1]._control_plane.local_links.links[0]._socket.shutdown(socket.SHUT_RDWR)
    assert lines[0].receive() == []
    assert ranks.clusters[0].failed.wait(LIMIT)
    failure = ranks.clusters[0].failure
    assert failure is not None
    assert (failure.rank, failure.kind) == (1, "broken")


def test_ranks_that_may_not_be_local_have_no_socket(joined: Joined) -> None:
    assert machine()
    ranks = joined(2, local=False)
    assert ranks.each(lambda cluster: cluster.connect(range(2))) == [None] * 2
    assert [cluster.local_peers for cluster in ranks.clusters] == [set(), set()]
    assert ranks.clusters[0].machines == ("", "")
