"""What a rank sends over the tree of ranks: up to the one above it, down to those below it, or towards any."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from actorflow.control.link import PeerLink
from actorflow.control.tree import Tree
from actorflow_protos import runtime_pb2 as pb

__all__ = ["TreeLinks"]


class TreeLinks:
    """The links of one rank to its neighbours in the tree; used on the gRPC thread alone.

    Items for a neighbour whose link is not there yet wait for it, and go in their order.
    """

    def __init__(self, tree: Tree, links: Mapping[int, PeerLink]) -> None:
        self.tree = tree
        self._links = links
        self._early: defaultdict[int, list[pb.Item]] = defaultdict(list)  # by neighbour

    def put(self, neighbour: int, item: pb.Item) -> None:
        """Send an item to a neighbour."""
        link = self._links.get(neighbour)
        if link is None or link.passing:
            self._early[neighbour].append(item)
        else:
            link.put(item)

    def up(self, item: pb.Item) -> None:
        """Send an item to the rank above."""
        self.put(self.tree.parent, item)

    def down(self, item: pb.Item) -> None:
        """Send an item to all ranks next below."""
        for child in self.tree.children:
            self.put(child, item)

    def begin(self, link: PeerLink) -> None:
        """Send what has waited for a link."""
        for item in self._early.pop(link.peer, ()):
            link.put(item)
