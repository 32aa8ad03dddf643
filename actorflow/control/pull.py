"""Requests from one rank to another over gRPC, answered with bytes or an error text."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from actorflow.control.channels import PeerStub, caller, grpc
from actorflow.control.message_rules import check_fields, check_known, refuse
from actorflow.control.pool import DaemonPool
from actorflow.control.proto import pieces
from actorflow.support.refusals import REFUSALS, MessageRefused, RefusalReason
from actorflow.support.requests import Request, RequestHandlers
from actorflow.support.truncate import truncated
from actorflow_compiler.core.errors import ClusterError
from actorflow_protos import runtime_pb2 as pb

T = TypeVar("T")
MOST = 64  # pulls of one rank that are under way, of which most wait for this rank's script
TURNS = 8  # of these, that threads work on at a time
MOST_TEXT = 6000  # most bytes of an error text, which is sent in headers; gRPC may refuse more than 8192


class _Desk:
    """What one rank has asked and is not answered yet."""

    def __init__(self) -> None:
        self.under_way = 0
        self.turns = asyncio.Semaphore(TURNS)


class PullService:
    """The client and the server of pulls; coroutines run on the gRPC thread, handlers on a pool of threads.

    A pull that waits for this rank's script holds no thread, and no rank can have so many under way that others wait.
    """

    def __init__(self, world: int) -> None:
        self.requests = RequestHandlers()
        self._world = world
        self._desks: defaultdict[int, _Desk] = defaultdict(_Desk)  # by rank; -1: of those who name none of the run
        self._pool = DaemonPool(TURNS * (world + 1), "actorflow-serve")

    async def pull(self, channel: Any, call_metadata: Any, request: Request) -> bytes:
        """Fetch all chunks; raises ClusterError with the other rank's error text, or AioRpcError if the link breaks."""
        call = PeerStub(channel).Pull(pb.PullRequest(key=request.text()), metadata=call_metadata, wait_for_ready=True)
        try:
            return b"".join([chunk.data async for chunk in call])
        except grpc.aio.AioRpcError as e:
            if e.code() is grpc.StatusCode.ABORTED:
                raise ClusterError(e.details()) from None
            raise

    async def serve(self, request: pb.PullRequest, context: Any) -> None:
        """Answer a pull with chunks of at most 1 MiB; one that is no request of this version is refused."""
        rank = caller(context)
        desk = self._desks[rank if 0 <= rank < self._world else -1]
        desk.under_way += 1
        try:
            check_known(request)
            check_fields(request)
            asked = self.requests.asked(request.key, rank)
            if desk.under_way > MOST:
                refuse(RefusalReason.LIMIT, f"{desk.under_way} pulls of rank {rank} at a time", f"at most {MOST}")
            there = asked.there()
            if there is not None:
                await asyncio.wrap_future(there)
            chunks: Iterator[bytes] = iter(await self._in_turn(desk, asked.answer))
            while (chunk := await self._in_turn(desk, next, chunks, None)) is not None:
                for piece in pieces(chunk):
                    await context.write(pb.Chunk(data=bytes(piece)))
        except MessageRefused as e:
            REFUSALS.add("pull", e, context.peer())
            await context.abort(grpc.StatusCode.ABORTED, truncated(str(e), MOST_TEXT, in_headers))
        except Exception as e:  # send any error of the handler to the other rank
            text = str(e) if isinstance(e, ClusterError) else f"{type(e).__name__}: {e}"
            await context.abort(grpc.StatusCode.ABORTED, truncated(text, MOST_TEXT, in_headers))
        finally:
            desk.under_way -= 1

    async def _in_turn(self, desk: _Desk, work: Callable[..., T], *args: Any) -> T:
        """Have a thread work for a rank.  It counts among the rank's until it is done, also if nobody waits for it."""
        await desk.turns.acquire()
        try:
            done = asyncio.get_running_loop().run_in_executor(self._pool, work, *args)
        except BaseException:
            desk.turns.release()
            raise

        def over(future: asyncio.Future[T]) -> None:
            desk.turns.release()
            if not future.cancelled():
                future.exception()  # it may be that nobody asks for it any more

        done.add_done_callback(over)
        return await asyncio.shield(done)

    def close(self) -> None:
        """Start no further answers."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def in_headers(text: str) -> int:
    """The bytes of a text in gRPC headers, where each byte that is not printable ASCII takes three."""
    return sum(1 if 0x20 <= byte <= 0x7E and byte != 0x25 else 3 for byte in text.encode(errors="replace"))
