"""Gather the output of the ranks of all nodes into files on node 0 during the run.

The launchers do it, because they outlive their ranks, and the last lines of a failed rank are the most important ones.
Node 0's launcher listens.  Rank 0 sends its address to the other ranks when all have joined, and these pass it on to
their launchers.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Set
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from actorflow.control import channels as door
from actorflow.control.channels import grpc
from actorflow.control.message_rules import check_address, check_fields, check_known, refuse, unreadable
from actorflow.control.strangers import Strangers
from actorflow.launch.log_files import FILES, LogCopies, LogTail, log_path
from actorflow.rendezvous.tls import TlsFiles
from actorflow.support.refusals import REFUSALS, MessageRefused, RefusalReason
from actorflow_compiler.core.errors import ClusterError
from actorflow_protos import runtime_pb2 as pb

__all__ = ["LogKeeper", "LogSender"]

TICK = 0.25  # seconds between checks for new output
PATIENCE = 3.0  # seconds to send the last pieces after the ranks have ended
MOST_BYTES = 2 << 20  # of a message: a piece of a log has at most half as many
_MARKER = re.compile(rb"\.logs-[0-9a-f]{16}")
OTHERS = 6.0  # seconds for the ranks of other nodes to end, too, where the run has failed


class LogSender:
    """Sends the output of this node's ranks to node 0, in the background."""

    port = 0

    def __init__(
        self, node: int, ranks: range, folder: str, token: str, silence: float, at_master: Callable[[int], str],
        tls: TlsFiles | None = None,
    ) -> None:  # fmt: skip
        """``at_master``: the address of a port on node 0's host, which alone is given the token and the logs."""
        self._tls = tls
        self._at_master = at_master
        self._node = node
        self._silence = silence  # seconds that node 0 may be silent
        self._ranks = ranks
        self._folder = folder
        self._marker = Path(folder, f".logs-{secrets.token_hex(8)}")
        self._token = token
        self._ended = threading.Event()
        self._call: Any = None
        self._thread: threading.Thread | None = None

    def send_to(self, address: str) -> None:
        """See ``LogTransfer``; only the first address is used.  Raises MessageRefused for one on another host."""
        check_address(address)
        own = self._at_master(int(address.rpartition(":")[2]))
        if address != own:
            refuse(RefusalReason.VALUE, f"logs kept at {address}", f"a port of node 0, as {own}")
        if self._thread is None:
            self._thread = threading.Thread(target=self._send, args=(address,), name="actorflow-logs", daemon=True)
            self._thread.start()

    def finish(self, well: bool, unreachable: Set[int] = frozenset()) -> None:
        """See ``LogTransfer``."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(PATIENCE)

    def _send(self, address: str) -> None:
        try:
            tls = None if self._tls is None else door.look_at_peer(self._tls, address)
        except (OSError, ClusterError):  # node 0 is gone: the logs stay here
            return
        with door.make_blocking_channel(address, self._silence, tls) as channel, self._marked():
            call = door.LogCollectorStub(channel).Keep(
                self._pieces(), metadata=door.metadata(self._token, self._ranks.start), wait_for_ready=True
            )
            with suppress(grpc.RpcError):  # node 0 is gone: the logs stay here
                for _ in call:
                    pass

    @contextmanager
    def _marked(self) -> Iterator[None]:
        """A marker file, by which a keeper with the same folder on a shared disk sees that no copy is needed."""
        with suppress(OSError):
            self._marker.touch()
        try:
            yield
        finally:
            with suppress(OSError):
                self._marker.unlink(missing_ok=True)

    def _pieces(self) -> Iterator[pb.LogPiece]:
        yield pb.LogPiece(node=self._node, rank=self._ranks.start, data=self._marker.name.encode())
        tails = [(rank, file, LogTail(log_path(self._folder, rank, file))) for rank in self._ranks for file in FILES]
        while not self._ended.wait(TICK):
            for rank, file, tail in tails:
                if data := tail.more():
                    yield pb.LogPiece(node=self._node, rank=rank, file=file, data=data)
        for rank, file, tail in tails:
            for data in tail.rest():
                yield pb.LogPiece(node=self._node, rank=rank, file=file, data=data)


class LogKeeper:
    """On node 0: writes the logs that other launchers send into files.

    ``start`` raises ClusterError if no port is available.  ``say`` prints a line, on a thread of its own.
    """

    def __init__(
        self, nodes: range, devices: int, folder: str, host: str, token: str, silence: float,
        say: Callable[[str], object], tls: TlsFiles | None = None,
    ) -> None:  # fmt: skip
        self._tls = tls
        self.port = 0
        self._strangers = Strangers(lambda text: say(f"what gathers the logs {text}"))
        self._silence = silence  # seconds that another node may be silent
        self._nodes = nodes
        self._copies = LogCopies(folder, nodes, devices)
        self._host = host
        self._token = token
        self._came: set[int] = set()  # nodes that have sent logs
        self._gone: set[int] = set()
        self._ready: Future[int] = Future()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="actorflow-logs", daemon=True)

    def start(self) -> None:
        """Listen."""
        self._thread.start()
        self.port = self._ready.result()

    def send_to(self, address: str) -> None:
        """See ``LogTransfer``; there is nothing to send, since this is node 0."""

    def finish(self, well: bool, unreachable: Set[int] = frozenset()) -> None:
        """See ``LogTransfer``: after a successful run wait for every node, else for those that have sent before."""
        if not self._thread.is_alive():
            return
        awaited = set(self._nodes) if well else self._came - unreachable
        self._loop.call_soon_threadsafe(self._end, awaited, well)
        self._thread.join(OTHERS + (self._silence if well else 0.0) + PATIENCE)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._news = asyncio.Event()
        self._awaited: Set[int] | None = None  # None: this node's ranks still run
        self._well = False
        try:
            server, port = door.make_server(
                self._host, 0, reserved=False, token=self._token, silence=self._silence, callers=len(self._nodes),
                turned_away=self._strangers.note, tls=self._tls, most=MOST_BYTES,
            )  # fmt: skip
            door.add_keeper(_Servicer(self._keep), server)
            await server.start()
        except ClusterError as e:
            self._ready.set_exception(e)
            return
        self._ready.set_result(port)
        while self._awaited is None:
            await self._wait()
        await self._await_gone(self._awaited, OTHERS)
        if self._well:  # one that has come is only slow, or stands still for a while
            await self._await_gone(self._came, self._silence)
        self._strangers.close()
        await server.stop(0)

    async def _await_gone(self, nodes: Set[int], seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not nodes <= self._gone:
                    await self._wait()

    async def _wait(self) -> None:
        await self._news.wait()
        self._news.clear()

    def _end(self, awaited: set[int], well: bool) -> None:
        self._awaited, self._well = awaited, well
        self._news.set()

    async def _keep(self, pieces: Any, context: Any) -> None:
        node = -1
        try:
            async for piece in pieces:
                check_known(piece)
                check_fields(piece)
                if piece.node != node and (node >= 0 or piece.node not in self._nodes or piece.node in self._came):
                    refuse(RefusalReason.SENDER, f"logs of node {piece.node}", "those of one of the nodes, once")
                if not piece.file and self._copies.has(_marker_in(piece)):  # the same folder: no copy needed
                    node = self._comes(piece.node)
                    break
                if piece.file:
                    self._copies.add(piece.node, piece.rank, piece.file, piece.data)
                node = self._comes(piece.node)
            await context.write(pb.LogsKept())
        except (MessageRefused, DecodeError) as problem:
            e = problem if isinstance(problem, MessageRefused) else unreadable(str(problem))
            REFUSALS.add("logs", e, context.peer())
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(e))
        finally:
            if node >= 0:
                self._gone.add(node)
                self._news.set()

    def _comes(self, node: int) -> int:
        self._came.add(node)
        return node


def _marker_in(piece: pb.LogPiece) -> str:
    """The name of a sender's marker file, which has no folder in it.  Raises MessageRefused for anything else."""
    if not _MARKER.fullmatch(piece.data):
        refuse(RefusalReason.VALUE, f"the file name {piece.data[:80]!r}", "that of a marker")
    return piece.data.decode()


class _Servicer(door.LogCollectorServicer):  # type: ignore[misc]
    """The gRPC service that the other launchers call."""

    def __init__(self, keep: Callable[[Any, Any], Any]) -> None:
        self._keep = keep

    async def Keep(self, pieces: Any, context: Any) -> None:  # noqa: N802 -- the service's name
        await self._keep(pieces, context)
