"""Ranks come together, or learn why not."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import grpc
import pytest

from actorflow.control import join as control_join
from actorflow.rendezvous.settings import Settings
from actorflow.rendezvous.ticket import own_ticket
from actorflow_compiler.core.errors import ClusterError
from actorflow_protos import runtime_pb2 as pb
from actorflow_protos.runtime_pb2_grpc import PeerStub
from cluster.ranks import LIMIT, Ranks, Word, until

Make = Callable[..., Settings]


def test_all_ranks_join_whichever_comes_first(joined: Callable[[int], Ranks]) -> None:
    ranks = joined(3)
    assert [cluster.rank for cluster in ranks.clusters] == [0, 1, 2]
    assert ranks.each(lambda cluster: cluster.goodbye()) == [None] * 3


def test_different_arguments_end_every_rank_with_both_values(ranks: Ranks, settings: Make) -> None:
    for rank in range(3):
        ranks.make(settings(rank, 3, argv=("--lr", "0.1" if rank < 2 else "0.2")))
    results = ranks.each(lambda cluster: cluster.join())
    assert [type(e) for e in results] == [ClusterError] * 3
    assert len({str(e) for e in results}) == 1
    for part in ("arguments of the script", "--lr 0.1", "--lr 0.2", "rank 0", "rank 2"):
        assert part in str(results[0])


def test_a_missing_rank_is_named_to_everybody_who_came(
    ranks: Ranks, settings: Make, give_up: Callable[[], None]
) -> None:
    for rank in (0, 1):
        ranks.make(settings(rank, 4, devices=2, nnodes=2)).begin()
    plane = ranks.clusters[0]._control_plane
    until(lambda: plane._reception is not None and 1 in plane._reception.roster.tickets)
    give_up()
    for e in ranks.each(lambda cluster: cluster.join()):
        assert isinstance(e, ClusterError)
        assert f"ranks 2-3 (node 1) did not join within {LIMIT:g} s" in str(e)


def test_a_master_that_never_comes_is_an_error(ranks: Ranks, settings: Make) -> None:
    ranks.make(settings(1, 2, join_timeout=0.5))
    (e,) = ranks.each(lambda cluster: cluster.join())
    assert isinstance(e, ClusterError)
    assert "no master (rank 0, node 0) answered rank 1" in str(e)


def test_a_wrong_token_is_turned_away_and_both_sides_say_so(
    ranks: Ranks, settings: Make, give_up: Callable[[], None]
) -> None:
    ranks.make(settings(0, 2)).begin()
    ranks.make(settings(1, 2, token="guess"))
    (other,) = ranks.apart(ranks.clusters[1].join)
    give_up()
    (master,) = ranks.apart(ranks.clusters[0].join)
    assert isinstance(other, ClusterError)
    assert "tokens differ" in str(other)
    assert "ACTORFLOW_TOKEN" in str(other)
    assert isinstance(master, ClusterError)
    assert "rank 1 (node 0) did not join" in str(master)
    assert "Callers from 127.0.0.1 were turned away, for lack of this run's token." in str(master)


@pytest.mark.parametrize("metadata", [(), (("actorflow-token", "guess"),), (("actorflow-token", ""),)])
def test_without_the_token_nothing_can_be_pulled(
    joined: Callable[[int], Ranks], metadata: tuple[tuple[str, str]]
) -> None:
    ranks = joined(2)
    ranks.clusters[0].serve(Word, lambda _: [b"state"])
    address = f"127.0.0.1:{ranks.clusters[0].settings.master_port}"
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as e:
        list(PeerStub(channel).Pull(pb.PullRequest(key="k"), metadata=metadata, timeout=LIMIT))
    assert e.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert ranks.each(lambda cluster: cluster.goodbye()) == [None, None]


def test_a_port_in_use_is_named(ranks: Ranks, settings: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ranks.make(settings(0, 2, master_port=port))
        (e,) = ranks.each(lambda cluster: cluster.join())
    assert isinstance(e, ClusterError)
    assert f"Port {port} on 127.0.0.1 is in use: " in str(e)
    assert f"(pid {os.getpid()}) listens there" in str(e)
    assert "--ctrl-port" in str(e)


def test_a_stray_process_is_refused_and_the_run_goes_on(joined: Callable[[int], Ranks], settings: Make) -> None:
    ranks = joined(2)
    stray = Ranks()
    stray.make(replace(ranks.clusters[1].settings, script=__file__))
    (e,) = stray.each(lambda cluster: cluster.join())
    stray.close()
    assert isinstance(e, ClusterError)
    assert "two processes say that they are rank 1" in str(e)
    assert ranks.each(lambda cluster: cluster.gather("still here", b"")) == [[b"", b""], None]
    assert ranks.each(lambda cluster: cluster.goodbye()) == [None, None]


def test_ranks_of_one_node_listen_on_the_loopback_alone(joined: Callable[[int], Ranks]) -> None:
    ranks = joined(2)
    assert {cluster.settings.bind_host() for cluster in ranks.clusters} == {"127.0.0.1"}
    hosts = {ticket.address.rpartition(":")[0] for ticket in ranks.clusters[1]._control_plane.tickets.values()}
    assert hosts == {"127.0.0.1"}
    assert ranks.each(lambda cluster: cluster.goodbye()) == [None, None]


def test_the_first_note_about_who_is_awaited_says_what_may_be_wrong_here(
    settings: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(control_join, "FIRST_NOTICE", 0.02)
    monkeypatch.setattr(control_join, "LOOKING", LIMIT)
    times = iter([0.0, 0.03, 0.11])
    monkeypatch.setattr(control_join, "time", SimpleNamespace(monotonic=lambda: next(times)))
    reception = control_join.Reception(own_ticket(settings(0, 2)), 0.1, lambda: "A firewall is up.")
    with pytest.raises(ClusterError, match=r"rank 1 \(node 0\) did not join within 0.1 s"):
        asyncio.run(reception.wait(asyncio.wait_for))
    assert "waiting for rank 1 (node 0) to join: 0 s of 0.1 s. A firewall is up.\n" in capsys.readouterr().err


def test_a_node_that_loses_its_launcher_is_waited_for_no_longer(settings: Make) -> None:
    lost = "node 1 (beta) has lost its launcher"
    reception = control_join.Reception(own_ticket(settings(0, 2)), 1e6, lost_node=lambda: lost)
    with pytest.raises(ClusterError, match=r"node 1 \(beta\) has lost its launcher while rank 1 .* had still to join"):
        asyncio.run(reception.wait(asyncio.wait_for))
