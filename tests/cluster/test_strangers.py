"""What those who lack the token can do to a run: nothing that lasts, and the terminal says who they were."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Iterator
from contextlib import suppress

import grpc
import psutil
import pytest

from actorflow.control import channels, strangers
from actorflow.control.strangers import MOST, Strangers, host_of
from actorflow.rendezvous.settings import Settings
from actorflow_protos import runtime_pb2 as pb
from actorflow_protos.runtime_pb2_grpc import PeerStub
from cluster.ranks import LIMIT, Ranks, until
from cluster.strangers import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    HEADERS,
    PREFACE,
    SETTINGS,
    are_open,
    connect,
    frame,
    headers,
)

Joined = Callable[..., Ranks]
LINK = "/actorflow.runtime.Peer/Link"
HELLO = PREFACE + frame(SETTINGS, 0, 0)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers have a second."""
    monkeypatch.setattr(channels, "STRANGER", 1.0)
    monkeypatch.setattr(channels, "_SERVER", tuple((k, 1000 if k in _TIMES else v) for k, v in channels._SERVER))


_TIMES = ("grpc.server_handshake_timeout_ms", "grpc.max_connection_idle_ms")


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    "said",
    [
        b"",
        PREFACE,
        HELLO,
        HELLO + frame(HEADERS, 0, 1, headers(LINK)),  # which are never ended
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["silent", "preface", "settings", "half a call", "http/1"],
)
def test_connections_that_say_too_little_are_closed_while_a_run_goes_on_and_ranks_join(
    ranks: Ranks, settings: Callable[..., Settings], short: None, many_files: None, said: bytes
) -> None:
    master = ranks.make(settings(0, 3))
    master.begin()
    port = master.settings.master_port
    until(lambda: _listens(port))
    before = psutil.Process().num_fds()
    strangers = [connect(port, said) for _ in range(500)]
    until(lambda: are_open(strangers) <= channels.CONNECTIONS * 3 + channels.SPARE)  # gRPC counts them
    for rank in (1, 2):
        ranks.make(settings(rank, 3))
    assert ranks.each(lambda cluster: cluster.join()) == [None] * 3
    until(lambda: are_open(strangers) == 0)
    assert ranks.each(lambda cluster: cluster.gather("on it goes", b"x")) == [[b"x"] * 3, None, None]
    for s in strangers:
        s.close()
    until(lambda: psutil.Process().num_fds() < before + 60)
    assert ranks.each(lambda cluster: cluster.goodbye()) == [None] * 3


def _listens(port: int) -> bool:
    try:
        connect(port).close()
    except OSError:
        return False
    return True


def test_a_call_with_too_much_metadata_is_refused(joined: Joined) -> None:
    ranks = joined(2)
    with grpc.insecure_channel(f"127.0.0.1:{ranks.clusters[0].settings.master_port}") as channel:
        for metadata in ([("x", "y" * 100_000)], [(f"x{i}", "y" * 1000) for i in range(100)]):
            with pytest.raises(grpc.RpcError) as e:
                list(PeerStub(channel).Pull(pb.PullRequest(key="k"), metadata=metadata, timeout=LIMIT))
            assert e.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
    assert ranks.each(lambda cluster: cluster.goodbye()) == [None] * 2


def _are_not_kept(send: Callable[[], object]) -> bool:
    """Whether what is sent takes less than 128 MiB here, once in four times: gRPC reads ahead, by how much depends."""
    for _ in range(4):
        before = psutil.Process().memory_info().rss
        send()
        if psutil.Process().memory_info().rss < before + (128 << 20):
            return True
    return False


def test_bytes_of_a_call_without_the_token_are_not_kept(joined: Joined) -> None:
    ranks = joined(2)
    message = frame(DATA, 0, 1, b"\x00\x7f\xff\xff\xff" + b"x" * 16_000)
    hello = HELLO + frame(HEADERS, END_HEADERS, 1, headers(LINK))
    strangers = []

    def send() -> None:
        strangers.append(stranger := connect(ranks.clusters[0].settings.master_port, hello))
        stranger.settimeout(1.0)
        sent = 0
        with suppress(OSError):  # it takes no more, or has hung up
            while sent < 256 << 20:
                stranger.sendall(message)
                sent += len(message)

    assert _are_not_kept(send)
    for stranger in strangers:
        stranger.close()
    assert ranks.each(lambda cluster: cluster.gather("on it goes", b"x")) == [[b"x"] * 2, None]
    assert ranks.each(lambda cluster: cluster.goodbye()) == [None] * 2


def test_headers_without_an_end_are_not_kept(joined: Joined, short: None) -> None:
    ranks = joined(2)
    half = frame(CONTINUATION, 0, 1, headers(LINK, ("x", b"y" * 9000)))

    def send() -> None:  # 560 MiB
        stranger = connect(ranks.clusters[0].settings.master_port, HELLO + frame(HEADERS, 0, 1, headers(LINK)))
        stranger.settimeout(LIMIT)
        with suppress(ConnectionError):  # it is cut off
            for _ in range(64000):
                stranger.sendall(half)
        until(lambda: are_open([stranger]) == 0)

    assert _are_not_kept(send)
    assert ranks.each(lambda cluster: cluster.goodbye()) == [None] * 2


@pytest.mark.parametrize("method", ["Link", "Pull", "Store", "Nothing"])
def test_who_is_refused_learns_only_that(joined: Joined, method: str) -> None:
    ranks = joined(2)
    with grpc.insecure_channel(
        f"127.0.0.1:{ranks.clusters[1]._control_plane.own.address.rpartition(':')[2]}"
    ) as channel:
        call = channel.unary_unary(f"/actorflow.runtime.Peer/{method}")
        with pytest.raises(grpc.RpcError) as e:
            call(b"\xff" * 100, metadata=[("actorflow-token", "guess")], timeout=LIMIT)
    assert (e.value.code(), e.value.details()) == (grpc.StatusCode.UNAUTHENTICATED, "refused")
    assert ranks.each(lambda cluster: cluster.goodbye()) == [None] * 2


def test_every_rank_says_whom_it_has_refused_but_not_of_each(
    joined: Joined, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = joined(2)
    for cluster in ranks.clusters:
        address = cluster._control_plane.own.address
        with grpc.insecure_channel(address) as channel:
            for _ in range(MOST + 7):
                with pytest.raises(grpc.RpcError):
                    list(PeerStub(channel).Pull(pb.PullRequest(key="k"), timeout=LIMIT))
    assert ranks.each(lambda cluster: cluster.goodbye()) == [None] * 2
    lines = capsys.readouterr().err.splitlines()
    for rank in (0, 1):
        refused = f"actorflow: rank {rank} refused a caller from 127.0.0.1, for lack of this run's token"
        assert lines.count(refused) == MOST
        assert lines.count(f"actorflow: rank {rank} … and 7 more in 60 s") == 1


def test_a_minute_later_callers_are_named_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "MINUTE", 0.05)
    said: list[str] = []

    async def work() -> None:
        counted = Strangers(said.append)
        for _ in range(MOST + 2):
            counted.note("ipv4:10.0.0.7:1", "a guest")
        while len(said) == MOST:
            await asyncio.sleep(0.01)
        counted.note("ipv4:10.0.0.8:1", "a guest")
        counted.close()

    asyncio.run(work())
    assert said[MOST] == "… and 2 more in 0.05 s"
    assert said[MOST + 1] == "refused a caller from 10.0.0.8, a guest"
    assert len(said) == MOST + 2


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.7:4242", "10.0.0.7"),
        ("ipv6:[::1]:4242", "::1"),
        ("ipv6:%5Bfe80::1%5D:1", "fe80::1"),
        ("odd", "odd"),
    ],
)
def test_the_host_of_a_caller(peer: str, host: str) -> None:
    assert host_of(peer) == host
