"""The inbox of one thread: work items from other threads and from watched sockets, one after the other."""

from __future__ import annotations

import os
import select
import time
from collections import deque
from typing import Any, Protocol

Item = tuple[Any, ...]


class Source(Protocol):
    """An object whose file descriptor becomes readable when there is work."""

    def fileno(self) -> int:
        """The descriptor."""


class Inbox:
    """The work items of one thread, the owner.

    The owner itself sleeps on its sockets (epoll), so that a message from a peer wakes it directly.  That costs half as
    much as a second thread that reads and hands over.  Where it watches sockets, it looks for ``patience`` seconds
    before it sleeps: a kernel takes some 50 µs to wake a thread whose core is idle.  Without a core of its own it must
    have none (0), as other threads could use that time.
    """

    def __init__(self, patience: float = 0.0) -> None:
        self.items: deque[Item] = deque()  # the owner takes them from the left
        self._patience = patience
        self._asleep = False  # the owner sleeps or is about to: ``put`` must write to the eventfd
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        self._poll.register(self._bell, select.EPOLLIN)
        self._watched: dict[int, Item] = {}

    def put(self, *item: Any) -> None:
        """Add an item.  For any thread."""
        self.items.append(item)
        # Safe under the GIL: the owner sets ``_asleep`` before it looks at the items for the last time.
        if self._asleep:
            self._asleep = False
            os.eventfd_write(self._bell, 1)

    def look(self, wait: bool) -> bool:
        """Add the items of readable sources; with ``wait``, sleep until there is an item.  For the owner only.

        Returns whether there are items.
        """
        items = self.items
        if not wait:
            self._take(0)
            return bool(items)
        if self._patience and self._watched:
            end = time.perf_counter() + self._patience
            while not items and time.perf_counter() < end:
                os.sched_yield()  # to threads that prepare what is waited for, on this core
                self._take(0)
        while not items:
            self._asleep = True
            if not items:
                self._take(-1)
            self._asleep = False
        return True

    def _take(self, timeout: int) -> None:
        """Add the items of sources that are readable within ``timeout`` seconds; -1: sleep until the bell or one is."""
        for fd, _ in self._poll.poll(timeout):
            if fd == self._bell:
                os.eventfd_read(self._bell)
            else:
                self.items.append(self._watched[fd])

    def watch(self, source: Source, *item: Any) -> None:
        """Add ``item`` whenever a source is readable, until ``unwatch``.  For the owner only."""
        self._watched[source.fileno()] = item
        self._poll.register(source.fileno(), select.EPOLLIN)

    def unwatch(self, source: Source) -> None:
        """Stop watching a source.  For the owner only."""
        del self._watched[source.fileno()]
        self._poll.unregister(source.fileno())

    def writable(self, source: Source, wanted: bool) -> None:
        """Start (``wanted``) or stop adding a watched source's item also when the source is writable."""
        self._poll.modify(source.fileno(), select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def close(self) -> None:
        """Release the file descriptors.  Items that are put later are never processed.  For the owner only."""
        self._watched.clear()
        self._poll.close()
        os.close(self._bell)
