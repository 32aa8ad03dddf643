"""Send register messages to a peer on this machine over a Unix socket, and receive its."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from actorflow.transport.messages import Message, Region
from actorflow.transport.unix_frames import BYE_FRAME, Parser, pack

ROOM = 1 << 18  # bytes read at a time
_DESCRIPTORS = socket.CMSG_SPACE(16 * array.array("i").itemsize)  # the most that one read can carry
_Piece = tuple[bytes, int]  # bytes, and the descriptor that goes beside the first of them, or -1


class UnixLink:
    """A connected Unix socket to one peer: a ``messages.Line``.

    Messages keep their order.  Those of the owner, the thread that receives, wait for its next
    ``flush``, so that what it does in one go leaves in one write; other threads send at once, and wait
    while the peer does not read.  When the peer is gone without a goodbye, ``on_end`` is called once on
    the thread that notices; what is sent from then on is dropped.
    """

    def __init__(self, peer: int, sock: socket.socket, on_end: Callable[[], object]) -> None:
        self.peer = peer
        self.unsent = False
        self.stuck = False
        self.ended = False
        self._socket = sock
        self._on_end = on_end
        self._owner = 0  # thread
        self._queue: deque[_Piece] = deque()
        self._lock = threading.Lock()  # of writing
        self._parser = Parser(peer)
        self._room = bytearray(ROOM)
        sock.setblocking(False)

    def fileno(self) -> int:
        """See ``Line``."""
        return self._socket.fileno()

    def own(self) -> None:
        """See ``Line``."""
        self._owner = threading.get_ident()

    def send(self, message: Message) -> None:
        """Queue a message; any thread."""
        self._queue.append((pack(message), message.descriptor if type(message) is Region else -1))
        self.unsent = True
        if threading.get_ident() != self._owner:
            self.flush()
            while self.stuck:  # without the lock: the owner must never wait for the peer
                writable = select.poll()  # of this thread alone: one cannot wait twice at a time
                writable.register(self._socket, select.POLLOUT)
                writable.poll()
                self.flush()

    def flush(self) -> None:
        """See ``Line``."""
        with self._lock:
            self.unsent = self.stuck = False  # before the queue is emptied: what comes later sets it again
            queue: list[_Piece] = []
            while self._queue:
                queue.append(self._queue.popleft())
            if self.ended:
                _drop(queue)
                return
            try:
                left = self._write(queue)
            except OSError:  # the peer is gone
                _drop(queue)
                self._end()
                return
            if left:
                self._queue.extendleft(reversed(left))
                self.unsent = self.stuck = True

    def _write(self, queue: list[_Piece]) -> Sequence[_Piece]:
        """Write what the socket takes; what it does not take comes back."""
        start = 0
        for at in [at for at, (_, descriptor) in enumerate(queue) if descriptor >= 0]:
            if left := self._write_bytes(queue[start:at]):
                return [(left, -1), *queue[at:]]
            data, descriptor = queue[at]
            try:
                sent = socket.send_fds(self._socket, [data], [descriptor])
            except BlockingIOError:
                return queue[at:]
            os.close(descriptor)
            queue[at] = (data[sent:], -1)
            start = at
        left = self._write_bytes(queue[start:])
        return [(left, -1)] if left else []

    def _write_bytes(self, queue: Iterable[_Piece]) -> bytes:
        data = b"".join([data for data, _ in queue])
        try:
            sent = self._socket.send(data) if data else 0
        except BlockingIOError:
            sent = 0
        return data[sent:]

    def receive(self) -> list[Message]:
        """See ``Line``."""
        try:
            count, extra, _, _ = self._socket.recvmsg_into([self._room], _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return []
        except OSError:
            count, extra = 0, []
        for _, kind, data in extra:
            if kind == socket.SCM_RIGHTS:
                found = array.array("i")
                found.frombytes(data[: len(data) - len(data) % found.itemsize])
                self._parser.descriptors.extend(found)
        if not count:
            with self._lock:
                self._end()
            return []
        return self._parser.feed(memoryview(self._room)[:count])

    def close(self) -> None:
        """Say goodbye, so that the peer does not take the end for a failure; the owner sees the end as well."""
        with self._lock, contextlib.suppress(OSError):
            self.ended = True
            self._socket.send(BYE_FRAME)
            self._socket.shutdown(socket.SHUT_RDWR)

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            if not self._parser.bye:
                self._on_end()


def _drop(queue: Iterable[_Piece]) -> None:
    for _, descriptor in queue:
        if descriptor >= 0:
            os.close(descriptor)
