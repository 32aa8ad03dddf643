"""The inbox of one thread: work from other threads, and from sockets that it watches, one item after the other."""

from __future__ import annotations

import os
import select
from collections import deque
from typing import Any, Protocol

Item = tuple[Any, ...]


class Source(Protocol):
    """Something with a file descriptor that becomes readable when there is work."""

    def fileno(self) -> int:
        """The descriptor."""


class Inbox:
    """What one thread, the owner, is to do next.

    The owner sleeps on its sockets itself: a message from a peer wakes it without another thread in
    between, which costs half as much as a thread that reads and hands over.
    """

    def __init__(self) -> None:
        self.items: deque[Item] = deque()  # the owner takes them from the left
        self._asleep = False  # the owner is about to sleep, or does: a ring wakes it
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        self._poll.register(self._bell, select.EPOLLIN)
        self._watched: dict[int, Item] = {}

    def put(self, *item: Any) -> None:
        """Add an item; any thread."""
        self.items.append(item)
        # Under the GIL: the owner says that it is asleep before it looks at the items for the last time.
        if self._asleep:
            self._asleep = False
            os.eventfd_write(self._bell, 1)

    def look(self, wait: bool) -> bool:
        """Add the items of sources that are readable; with ``wait``, sleep until there is any item.  The owner only.

        Returns whether there are items.
        """
        items = self.items
        while True:
            if wait:
                self._asleep = True
                if items:
                    self._asleep = False
                    return True
            for fd, _ in self._poll.poll(-1 if wait else 0):
                if fd == self._bell:
                    os.eventfd_read(self._bell)
                else:
                    items.append(self._watched[fd])
            self._asleep = False
            if items or not wait:
                return bool(items)

    def watch(self, source: Source, *item: Any) -> None:
        """Give the owner an item whenever a source is readable, until ``unwatch``.  The owner only."""
        self._watched[source.fileno()] = item
        self._poll.register(source.fileno(), select.EPOLLIN)

    def unwatch(self, source: Source) -> None:
        """Forget a source that was watched.  The owner only."""
        del self._watched[source.fileno()]
        self._poll.unregister(source.fileno())

    def writable(self, source: Source, wanted: bool) -> None:
        """Give the item of a watched source also when it can be written to, or no longer."""
        self._poll.modify(source.fileno(), select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def close(self) -> None:
        """End: nothing may be taken any more; what is put is dropped.  The owner only."""
        self._watched.clear()
        self._poll.close()
        os.close(self._bell)
