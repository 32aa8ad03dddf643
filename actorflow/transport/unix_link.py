"""Exchange register messages with a peer on this machine over a Unix socket."""

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

ROOM = 1 << 18  # most bytes of one read
_DESCRIPTORS = socket.CMSG_SPACE(16 * array.array("i").itemsize)  # room for the descriptors of one read
_Piece = tuple[bytes, int]  # bytes, and the file descriptor to send along with them, or -1


class UnixLink:
    """A connected Unix socket to one peer: a ``messages.Line``.

    Messages keep their order.  Messages of the owner, the thread that receives, wait for its next ``flush``, so that
    several leave in one write.  Other threads send at once, and block while the peer does not read.  If the peer closes
    the socket without a goodbye, ``on_end`` is called once on the thread that notices.  Messages sent after the end are
    dropped.
    """

    def __init__(self, peer: int, sock: socket.socket, on_end: Callable[[], object]) -> None:
        self.peer = peer
        self.unsent = False
        self.stuck = False
        self.ended = False
        self._socket = sock
        self._on_end = on_end
        self._owner = 0  # id of the thread that receives
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
        """Send a message, or queue it if called by the owner.  For any thread."""
        self._queue.append((pack(message), message.descriptor if type(message) is Region else -1))
        self.unsent = True
        if threading.get_ident() != self._owner:
            self.flush()
            while self.stuck:  # without the lock: the owner must never wait for the peer
                writable = select.poll()  # one for each call, as two threads cannot poll the same object
                writable.register(self._socket, select.POLLOUT)
                writable.poll()
                self.flush()

    def flush(self) -> None:
        """See ``Line``."""
        with self._lock:
            self.unsent = self.stuck = False  # before the queue is emptied, as another thread's message sets it again
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
        """Write as much as the socket takes; return the rest of the queue."""
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
        """Close the socket with a goodbye, so that the peer sees no failure; the owner's ``receive`` sees the end."""
        with self._lock, contextlib.suppress(OSError):
            self.ended = True
            self._socket.send(BYE_FRAME)
            self._socket.shutdown(socket.SHUT_RDWR)

    def _end(self) -> None:
        self._parser.close()
        if not self.ended:
            self.ended = True
            if not self._parser.bye:
                self._on_end()


def _drop(queue: Iterable[_Piece]) -> None:
    for _, descriptor in queue:
        if descriptor >= 0:
            os.close(descriptor)
