"""Decide on calls that have failed on some rank: ranks say how far they are with one, and rank 0 orders what all do.

It runs on the gRPC thread.  What is decided, and when, is in ``transport.abandon``.
"""

from __future__ import annotations

from collections.abc import Callable

from actorflow.control import proto as proto
from actorflow.control.message_rules import check_below, refuse
from actorflow.control.tree_links import TreeLinks
from actorflow.support.refusals import RefusalReason
from actorflow.transport.abandon import Coordinator, Hold, Order, Word

__all__ = ["FailedCalls"]


class FailedCalls:
    """One rank's part in the decisions, and on rank 0 the decisions themselves."""

    def __init__(self, links: TreeLinks, on_order: Callable[[Order], None]) -> None:
        self._rank, self._links, self._on_order = links.tree.rank, links, on_order
        self._coordinator = Coordinator(links.tree.world)  # rank 0's
        self._held: set[int] = set()  # on another rank: calls that rank 0 has ordered to be held,
        self._decided: set[int] = set()  # and those that it has decided

    def say(self, word: Word) -> None:
        """Tell rank 0 the state, on this rank, of a call that has failed on some rank."""
        self._bring(self._rank, word)

    def hear(self, neighbour: int, rank: int, word: Word) -> None:
        """A rank at or below the neighbour, which passes it on, says how far it is with a call."""
        check_below(self._links.tree, neighbour, rank)
        self._bring(rank, word)

    def _bring(self, rank: int, word: Word) -> None:
        if self._rank:
            self._links.up(proto.word_to(word, rank))
            return
        order = self._coordinator.hear(rank, word)
        if order is not None:
            self._links.down(proto.order_to(order))
            self._on_order(order)

    def obey(self, order: Order) -> None:
        """On another rank: hold a call once, and decide it once."""
        if isinstance(order, Hold):
            if order.call in self._held or order.call in self._decided:
                refuse(RefusalReason.SEQUENCE, f"a second order to hold call {order.call}", "one")
            self._held.add(order.call)
        else:
            if order.call not in self._held:
                refuse(RefusalReason.SEQUENCE, f"a decision on call {order.call}", "one on a call that is held")
            self._held.discard(order.call)
            self._decided.add(order.call)
        self._links.down(proto.order_to(order))
        self._on_order(order)
