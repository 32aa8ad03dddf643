"""The gRPC stream to one peer: items are queued from any thread and written in batches."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.message import DecodeError

from actorflow.control.message_rules import check_known, unreadable
from actorflow.control.proto import message_to_item
from actorflow.transport.messages import Message
from actorflow_protos import runtime_pb2 as pb

BATCH_BYTES = 1 << 20  # about the most that one write carries; a larger single item goes alone
BATCH_ITEMS = 1024


class PeerLink:
    """The stream between this rank and one peer.

    ``put`` and ``send`` queue and return at once, on any thread; what was queued while a write was
    under way goes out with the next one.  Items keep their order.  Everything else runs on the gRPC thread.
    """

    def __init__(self, peer: int, loop: asyncio.AbstractEventLoop, address: str = "") -> None:
        self.peer = peer
        self.address = address  # from which the peer has dialled this rank
        self.known = False  # the peer has identified itself
        self.turned_away = False  # nothing of what comes is taken in any more
        self.passing = False  # it is there only while its two ranks join
        self.said_bye = False  # the peer has said goodbye, so the end of the stream is no failure
        self.ended = asyncio.Event()  # the stream is down
        self.heard = False  # something has come since the watch of peers looked last
        self._loop = loop
        self._queue: deque[pb.Item | Message | None] = deque()
        self._wake = asyncio.Event()
        self._armed = False  # a wake-up of ``pump`` is scheduled
        self._writing = False
        self._spoken = False  # something has been queued since the last call of ``beat``
        self._thread = 0  # on which ``pump`` runs

    def put(self, item: pb.Item) -> None:
        """Queue a control item."""
        self._push(item)

    def send(self, message: Message) -> None:
        """Queue a register message; it is encoded on the gRPC thread."""
        self._push(message)

    def beat(self, item: pb.Item) -> None:
        """Queue a sign of life, unless anything has been queued since the last call, or is being written now.

        That is a sign of life as well, and so none pile up for a peer that does not read.  A sign of life counts, too:
        on a link that is at rest every second call sends one.
        """
        if self._spoken or self._writing or self._queue:
            self._spoken = False
        else:
            self._push(item)

    def close(self) -> None:
        """Queue a goodbye to the peer; ``pump`` returns when it is written."""
        self._push(pb.Item(bye=pb.Bye()))
        self._push(None)

    def _push(self, entry: pb.Item | Message | None) -> None:
        self._queue.append(entry)
        self._spoken = True
        # Under the GIL: ``pump`` disarms before it drains, so an entry queued while armed is always seen.
        if not self._armed:
            self._armed = True
            if threading.get_ident() == self._thread:
                self._wake.set()  # without a system call, which most signs of life would need
            else:
                self._loop.call_soon_threadsafe(self._wake.set)

    async def pump(self, write: Callable[[pb.Batch], Awaitable[Any]]) -> None:
        """Write queued items until ``close``, or until cancelled."""
        self._thread = threading.get_ident()
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._armed = False
            while self._queue:
                batch, last = self._take()
                if batch.items:
                    self._writing = True
                    await write(batch)
                    self._writing = False
                if last:
                    return

    def _take(self) -> tuple[pb.Batch, bool]:
        batch, size = pb.Batch(), 0
        while self._queue and size < BATCH_BYTES and len(batch.items) < BATCH_ITEMS:
            entry = self._queue.popleft()
            if entry is None:
                return batch, True
            item = entry if isinstance(entry, pb.Item) else message_to_item(entry)
            size += item.ByteSize()
            batch.items.append(item)
        return batch, False

    async def read(self, read: Callable[[], Awaitable[Any]], handle: Callable[[PeerLink, pb.Item], None]) -> None:
        """Pass every item of the peer to ``handle`` until the stream ends; errors of a broken link pass through.

        Raises MessageRefused for what is no batch of items of this version.
        """
        while True:
            try:
                batch = await read()
            except DecodeError as error:  # as a server sees it
                raise unreadable(str(error)) from None
            if batch is None:  # as a client sees it
                raise unreadable("a batch was expected")
            if not isinstance(batch, pb.Batch):  # gRPC's end marker
                return
            check_known(batch)
            self.heard = True
            for item in batch.items:
                handle(self, item)
