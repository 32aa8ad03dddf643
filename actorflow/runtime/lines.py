"""Send and receive on the sockets to peers on this machine, for the compute thread."""

from __future__ import annotations

from collections.abc import Callable

from actorflow.runtime.inbox import Inbox
from actorflow.transport.messages import Line, Message


class PeerSockets:
    """The sockets that the owner of an inbox reads and writes.  For that thread only."""

    def __init__(self, inbox: Inbox, deliver: Callable[[int, Message], object]) -> None:
        self._inbox = inbox
        self._deliver = deliver  # called with the peer and each message
        self._lines: list[Line] = []
        self._stuck: set[Line] = set()  # sockets with full buffers: the inbox watches until they are writable

    def __bool__(self) -> bool:
        return bool(self._lines)

    def watch(self, line: Line) -> None:
        """Read a socket whenever it is readable, until the peer closes it."""
        line.own()
        self._lines.append(line)
        self._inbox.watch(line, self._read, line)

    def flush(self) -> None:
        """Send the messages that are queued on all sockets."""
        for line in self._lines:
            if line.unsent:
                self._flush(line)

    def _read(self, line: Line) -> None:
        for message in line.receive():
            self._deliver(line.peer, message)
        if line.ended:
            self._inbox.unwatch(line)
            self._lines.remove(line)
            self._stuck.discard(line)
        elif line.stuck or line in self._stuck:
            self._flush(line)

    def _flush(self, line: Line) -> None:
        line.flush()
        stuck = line.stuck
        if stuck != (line in self._stuck):
            self._inbox.writable(line, stuck)
            self._stuck ^= {line}
