"""Requests from one rank to another over gRPC, answered with bytes or an error text."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from actorflow.control.channels import PeerStub, grpc
from actorflow.control.message_rules import check_fields, check_known
from actorflow.control.pool import DaemonPool
from actorflow.control.proto import pieces
from actorflow.support.refusals import REFUSALS, MessageRefused
from actorflow.support.requests import Request, RequestHandlers
from actorflow.support.truncate import truncated
from actorflow_compiler.core.errors import ClusterError
from actorflow_protos import runtime_pb2 as pb

MOST_TEXT = 6000  # most bytes of an error text, which is sent in headers; gRPC may refuse more than 8192


class PullService:
    """The client and the server of pulls; coroutines run on the gRPC thread, handlers on a small thread pool."""

    def __init__(self) -> None:
        self.requests = RequestHandlers()
        self._pool = DaemonPool(64, "actorflow-serve")

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
        loop, key = asyncio.get_running_loop(), request.key
        try:
            check_known(request)
            check_fields(request)
            chunks: Iterator[bytes] = iter(await loop.run_in_executor(self._pool, self.requests.answer, key))
            while (chunk := await loop.run_in_executor(self._pool, next, chunks, None)) is not None:
                for piece in pieces(chunk):
                    await context.write(pb.Chunk(data=bytes(piece)))
        except MessageRefused as e:
            REFUSALS.add("pull", e, context.peer())
            await context.abort(grpc.StatusCode.ABORTED, truncated(str(e), MOST_TEXT, in_headers))
        except Exception as e:  # send any error of the handler to the other rank
            text = str(e) if isinstance(e, ClusterError) else f"{type(e).__name__}: {e}"
            await context.abort(grpc.StatusCode.ABORTED, truncated(text, MOST_TEXT, in_headers))

    def close(self) -> None:
        """Start no further answers."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def in_headers(text: str) -> int:
    """The bytes of a text in gRPC headers, where each byte that is not printable ASCII takes three."""
    return sum(1 if 0x20 <= byte <= 0x7E and byte != 0x25 else 3 for byte in text.encode(errors="replace"))
