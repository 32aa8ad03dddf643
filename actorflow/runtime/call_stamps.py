"""Compare the calls that this rank's script makes with those that other ranks show by their stamps.

The stamps of one rank come in the order of its calls, each before what the rank sends in the call.  Where a stamp
differs, nothing of what comes behind it is used, and the control plane finds and tells what differs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from actorflow.support.refusals import MessageRefused, RefusalReason
from actorflow.transport.messages import Stamp

__all__ = ["CallStamps"]

MOST = 1 << 16  # calls; the slots of registers and the calls in flight keep ranks much nearer to each other


class CallStamps:
    """The stamps of one rank and of its peers; for the compute thread.

    >>> stamps = CallStamps()
    >>> stamps.arrived(1, Stamp(0, 77))
    >>> stamps.have([1], 0)
    False
    >>> stamps.made(Stamp(0, 77))
    >>> stamps.have([1], 0)
    True
    """

    def __init__(self) -> None:
        self.differing: dict[int, int] = {}  # rank → the call where its script has done something else
        self._own: dict[int, int] = {}  # call → this rank's history; not of those that all ranks are known to have made
        self._last = -1  # the last call of this rank
        self._heard: dict[int, int] = {}  # rank → the last call of which its stamp has come
        self._early: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # call not made here → rank, history
        self._ahead: defaultdict[int, int] = defaultdict(int)  # rank → its stamps in ``_early``
        self._matched: defaultdict[int, int] = defaultdict(lambda: -1)  # rank → the last call in which it did the same
        self._waiting: list[tuple[Sequence[int], int, Callable[[], None]]] = []

    def made(self, stamp: Stamp) -> None:
        """Note that this rank has made a call."""
        self._own[stamp.call] = stamp.history
        self._last = stamp.call
        for rank, history in self._early.pop(stamp.call, ()):
            self._ahead[rank] -= 1
            self._compare(rank, stamp.call, history, stamp.history)

    def arrived(self, rank: int, stamp: Stamp) -> None:
        """Note that another rank has made a call, and do what has waited for that.

        Raises MessageRefused for a call that is not behind its last one, or one more than any rank comes ahead.
        """
        if stamp.call <= self._heard.get(rank, -1):
            what = f"the stamp of call {stamp.call}"
            raise MessageRefused(RefusalReason.SEQUENCE, what, f"one behind {self._heard[rank]}", rank)
        if stamp.call > self._last and self._ahead[rank] >= MOST:
            what = f"the stamps of {MOST + 1} calls that are not made here"
            raise MessageRefused(RefusalReason.LIMIT, what, f"at most {MOST}", rank)
        self._heard[rank] = stamp.call
        if stamp.call > self._last:
            self._ahead[rank] += 1
            self._early[stamp.call].append((rank, stamp.history))
            return
        # a call that is not among our own is one that all ranks are known to have made alike
        self._compare(rank, stamp.call, stamp.history, self._own.get(stamp.call, stamp.history))
        self._go_on()

    def have(self, ranks: Sequence[int], call: int) -> bool:
        """Whether these ranks have made a call as this rank has."""
        return all(self._matched[rank] >= call for rank in ranks)

    def when(self, ranks: Sequence[int], call: int, go_on: Callable[[], None]) -> None:
        """Do something when these ranks have made a call as this rank has; never if one of them differs."""
        self._waiting.append((ranks, call, go_on))

    def agreed(self, call: int) -> None:
        """Note that all ranks are known to have made all calls up to this one alike."""
        while self._own and (first := next(iter(self._own))) <= call:
            del self._own[first]

    def missing(self, before: Iterable[tuple[Sequence[int], int]] = ()) -> dict[int, int]:
        """Rank → the first call that something here waits for it to make; any thread.

        ``before`` are ranks and calls that are waited for, too, without ``when``.
        """
        found: dict[int, int] = {}
        for those, call in (*before, *(one[:2] for one in tuple(self._waiting))):
            for rank in those:
                if self._matched.get(rank, -1) < call:
                    found[rank] = min(call, found.get(rank, call))
        return found

    def _compare(self, rank: int, call: int, theirs: int, ours: int) -> None:
        if theirs != ours:
            self.differing.setdefault(rank, call)
        elif rank not in self.differing:
            self._matched[rank] = call

    def _go_on(self) -> None:
        waiting, self._waiting = self._waiting, []
        for ranks, call, go_on in waiting:
            if self.have(ranks, call):
                go_on()
            else:
                self._waiting.append((ranks, call, go_on))
