"""Send and receive on the sockets to peers on this machine, for the compute thread."""

from __future__ import annotations

from collections.abc import Callable

from actorflow.runtime.inbox import Inbox
from actorflow.transport.messages import Line, Message


class PeerSockets:
    """The sockets that the owner of an inbox reads and writes itself; only that thread may use them."""

    def __init__(self, inbox: Inbox, deliver: Callable[[int, Message], object]) -> None:
        self._inbox = inbox
        self._deliver = deliver  # gets the peer and each message
        self._lines: list[Line] = []
        self._stuck: set[Line] = set()  # those that the inbox watches until they can be written to

    def __bool__(self) -> bool:
        return bool(self._lines)

    def watch(self, line: Line) -> None:
        """Read a socket, until it ends, whenever the inbox finds that there is something."""
        line.own()
        self._lines.append(line)
        self._inbox.watch(line, self._read, line)

    def flush(self) -> None:
        """Let leave what was queued on all of them."""
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
