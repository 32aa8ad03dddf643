"""gRPC servers and channels whose keepalive outlasts a silence that a run bears, and the check of the run's token.

The only file, with the generated stubs, that knows how gRPC is configured.
"""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's C++ log lines only repeat our errors
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # forked loader workers never use gRPC; its handlers can hang

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from actorflow.doctor.ports import CONTROL, PortUse, unusable
from actorflow.rendezvous.failure import FailureKind
from actorflow.rendezvous.tls import ANSWER, FLAGS, NoTls, TlsFiles, client_hello, name_of_server
from actorflow_compiler.core.errors import ClusterError
from actorflow_protos import runtime_pb2 as pb
from actorflow_protos import runtime_pb2_grpc

__all__ = [
    "ACCEPTED",
    "MOST_BYTES",
    "LogCollectorServicer",
    "LogCollectorStub",
    "MeetingServicer",
    "MeetingStub",
    "TlsPeer",
    "PeerServicer",
    "PeerStub",
    "add_keeper",
    "add_meeting",
    "add_servicer",
    "answers",
    "caller",
    "grpc",
    "is_accepted",
    "look_at_peer",
    "make_channel",
    "make_blocking_channel",
    "make_server",
    "metadata",
    "probe",
]

_generated: Any = runtime_pb2_grpc  # carries no types
PeerServicer = _generated.PeerServicer
PeerStub = _generated.PeerStub
add_servicer = _generated.add_PeerServicer_to_server
LogCollectorServicer = _generated.LogCollectorServicer
LogCollectorStub = _generated.LogCollectorStub
add_keeper = _generated.add_LogCollectorServicer_to_server
MeetingServicer = _generated.NodeMeetingServicer
MeetingStub = _generated.NodeMeetingStub
add_meeting = _generated.add_NodeMeetingServicer_to_server

TOKEN_KEY = "actorflow-token"
RANK_KEY = "actorflow-rank"
TLS_KEY = "actorflow-tls"  # in a call without the token: the caller uses TLS, and has found that this server does not
ACCEPTED = (("actorflow-accepted", "1"),)  # the first metadata that the answering side of a link sends

PING = 5.0  # seconds between gRPC's own signs of life on a connection that is at rest
STRANGER, IDLE = 10.0, 30.0  # seconds for a connection to be made, and for one to be there without a call
UNHEARD = 86400.0  # seconds that a call may wait until Python takes it; a process that is gone is noticed otherwise
CONNECTIONS = 4  # of one caller: its link, what it pulls, and questions whether this process lives
SPARE = 64  # connections that a server takes beyond those of its callers
CALLS = 1024  # that one connection may have under way
METADATA = 8192  # most bytes of a call's metadata, the token among it
MOST_WAIT = 1_000_000_000  # milliseconds; gRPC counts them in 32 bits
# bytes of a message, before anything of it is parsed: what is long goes in pieces of 1 MiB, drops and tickets take less
MOST_BYTES = 1 << 25
# The first two keep a server from closing healthy links for too many pings.  The others limit what those can take that
# have not shown the token: a connection that makes no call ends soon; all calls are refused before a byte of their
# messages is read.  A rank always has a call under way, its link.
_SERVER = (
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.server_handshake_timeout_ms", round(1000 * STRANGER)),
    ("grpc.max_connection_idle_ms", round(1000 * IDLE)),
    ("grpc.max_concurrent_streams", CALLS),
    ("grpc.server_max_unrequested_time_in_server", round(UNHEARD)),
    ("grpc.max_metadata_size", METADATA),
    ("grpc.absolute_max_metadata_size", METADATA),
)
_CHANNEL = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Rejects callers without the run's token before anything else that they send is parsed."""

    def __init__(self, token: str, turned_away: Callable[[str, str], None]) -> None:
        self._token = token.encode()
        self._turned_away = turned_away

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """Let the call through, or answer it with UNAUTHENTICATED."""
        metadata = dict(details.invocation_metadata or ())
        if TLS_KEY in metadata:
            return grpc.stream_stream_rpc_method_handler(self._deny_tls)
        if not self._token:
            return await continuation(details)
        found = metadata.get(TOKEN_KEY, "")
        if hmac.compare_digest(found.encode() if isinstance(found, str) else found, self._token):
            return await continuation(details)
        return grpc.stream_stream_rpc_method_handler(self._deny)

    async def _deny(self, _requests: Any, context: Any) -> None:
        self._turned_away(context.peer(), "for lack of this run's token")
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "refused")

    async def _deny_tls(self, _requests: Any, context: Any) -> None:
        why = f"for using TLS, which this node does not: give {FLAGS} on every node, or on none"
        self._turned_away(context.peer(), why)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "refused")


def _health(silence: float) -> list[tuple[str, int]]:
    """Settings of gRPC for connections that may be silent for so many seconds.

    A longer silence is noticed ``PING`` seconds later at most.  gRPC answers pings without the GIL, but not while its
    process is stopped, and has the kernel keep the same limit (TCP_USER_TIMEOUT).
    """
    timeout = min(round(1000 * silence), MOST_WAIT)
    return [
        ("grpc.keepalive_time_ms", round(1000 * PING)),
        ("grpc.keepalive_timeout_ms", timeout),
        ("grpc.http2.ping_timeout_ms", timeout),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_send_message_length", -1),
    ]


def _received(most: int) -> tuple[str, int]:
    return ("grpc.max_receive_message_length", most)


def make_server(
    host: str,
    port: int,
    *,
    reserved: bool,
    token: str,
    silence: float,
    callers: int,
    turned_away: Callable[[str, str], None],
    tls: TlsFiles | None = None,
    use: PortUse = CONTROL,
    most: int | None = None,
) -> tuple[Any, int]:
    """A server bound to an address, not yet started, and its port; ``port`` 0 takes any.

    ``reserved``: the launcher holds the port for this rank, so the server may share it.  ``silence``: the seconds
    for which a caller may be silent.  ``callers``: how many processes call it; where the installed gRPC can count them,
    it takes ``SPARE`` connections more than they need.  ``turned_away`` is called with the address of whoever calls
    without the token, and why it is refused.  ``tls``: encrypt, and have callers show certificates.  ``use``: what the
    port is for, as the error says where it cannot be had.  ``most``: bytes of a message, ``MOST_BYTES`` if not
    given; a longer one ends its call unread.
    """
    options = [
        *_health(silence), *_SERVER, _received(MOST_BYTES if most is None else most),
        ("grpc.max_allowed_incoming_connections", CONNECTIONS * callers + SPARE),
        ("grpc.so_reuseport", int(reserved)),
    ]  # fmt: skip
    server = grpc.aio.server(interceptors=[TokenInterceptor(token, turned_away)], options=options)
    try:
        where = f"{_bracket(host)}:{port}"
        if tls is None:
            bound = server.add_insecure_port(where)
        else:
            ca, cert, key = tls.read()
            bound = server.add_secure_port(where, grpc.ssl_server_credentials([(key, cert)], ca, True))
    except RuntimeError:
        bound = 0
    if not bound:
        why = unusable(host, port, use=use)
        raise ClusterError(why.text if why is not None else f"port {port} on {host} cannot be used. {use.advice}")
    return server, bound


@dataclass(frozen=True, slots=True)
class TlsPeer:
    """How another side is to be dialled by TLS."""

    files: TlsFiles  # our own
    name: str  # one that is in its certificate


def make_channel(address: str, silence: float, tls: TlsPeer | None = None) -> Any:
    """A channel to a peer; it belongs to the running event loop.  ``silence``: see ``make_server``."""
    return _channel(grpc.aio, address, [*_health(silence), *_CHANNEL, _received(MOST_BYTES)], tls)


def make_blocking_channel(address: str, silence: float, tls: TlsPeer | None = None) -> Any:
    """A channel to a peer for threads without an event loop.  ``silence``: see ``make_server``."""
    return _channel(grpc, address, [*_health(silence), *_CHANNEL, _received(MOST_BYTES)], tls)


def _channel(kind: Any, address: str, options: list[tuple[str, Any]], tls: TlsPeer | None) -> Any:
    if tls is None:
        return kind.insecure_channel(address, options=options)
    ca, cert, key = tls.files.read()
    named = [*options, ("grpc.ssl_target_name_override", tls.name)]
    return kind.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options=named)


def look_at_peer(tls: TlsFiles, address: str) -> TlsPeer:
    """How the server at an address is to be dialled, which it has to answer in ``ANSWER`` seconds.

    Raises OSError where nothing answers, and ClusterError where one of the two has no certificate for the other.  A
    server without TLS is told so, so that it can tell people.
    """
    try:
        return TlsPeer(tls, name_of_server(tls, address))
    except NoTls:
        with grpc.insecure_channel(address, options=_CHANNEL) as channel, suppress(grpc.RpcError):
            list(PeerStub(channel).Pull(pb.PullRequest(), metadata=((TLS_KEY, "1"),), timeout=ANSWER))
        raise


def metadata(token: str, rank: int) -> Sequence[tuple[str, str]]:
    """The metadata of every call: the token and the caller's rank."""
    return ((TOKEN_KEY, token), (RANK_KEY, str(rank)))


def is_accepted(initial_metadata: Any) -> bool:
    """Whether the answering side has accepted the link; nothing may be written to it before."""
    return ACCEPTED[0] in [tuple(entry) for entry in initial_metadata or ()]


def caller(context: Any) -> int:
    """The rank that a caller of the server claims to be; -1 if it claims none."""
    value = dict(context.invocation_metadata() or ()).get(RANK_KEY, "")
    return int(value) if str(value).isdigit() else -1


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host


async def answers(
    address: str, call_metadata: Sequence[tuple[str, str]], seconds: float, tls: TlsPeer | None = None
) -> bool:
    """Whether Python runs in the process of a peer: a call over a connection of its own comes back in time."""
    options = [*_CHANNEL, ("grpc.use_local_subchannel_pool", 1)]
    async with _channel(grpc.aio, address, options, tls) as channel:
        try:
            async for _ in PeerStub(channel).Pull(pb.PullRequest(), metadata=call_metadata, timeout=seconds):
                pass
        except grpc.aio.AioRpcError as e:
            return e.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
    return True


async def probe(address: str, connecting: float = 0.5, greeting_time: float = 0.3, tls: bool = False) -> FailureKind:
    """Probe the host of a lost peer for the kind of its failure: one of ``failure.LOST``.

    A dead process refuses the connection.  For a stopped one the kernel accepts it, but no data follows.  A live
    server sends its HTTP/2 settings at once, even while its process holds the GIL, and one with ``tls`` its part of a
    handshake once it has heard a client's.  The limits are in seconds.
    """
    host, _, port = address.rpartition(":")
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), connecting)
    except (ConnectionRefusedError, ConnectionResetError):
        return FailureKind.KILLED
    except (OSError, TimeoutError):
        return FailureKind.UNREACHABLE
    try:
        if tls:
            writer.write(client_hello())
        greeting = await asyncio.wait_for(reader.read(1), greeting_time)
    except TimeoutError:
        return FailureKind.STOPPED
    except OSError:
        return FailureKind.KILLED
    finally:
        writer.close()
    return FailureKind.BROKEN if greeting else FailureKind.KILLED
