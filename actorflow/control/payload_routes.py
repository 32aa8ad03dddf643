"""Bring the payloads of gathers up the tree of ranks, and those of scatters down: keep one's own, pass others on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from actorflow.control import proto as proto
from actorflow.control.message_rules import check_below, refuse
from actorflow.control.payloads import MOST, Payloads
from actorflow.control.step_agreement import StepAgreement
from actorflow.control.tree import Span, common, spans_of
from actorflow.control.tree_links import TreeLinks
from actorflow.support.refusals import MessageRefused, RefusalReason
from actorflow_compiler.core.errors import ClusterError
from actorflow_protos import runtime_pb2 as pb

__all__ = ["PayloadRoutes"]


class PayloadRoutes:
    """One rank's part in it; used on the gRPC thread alone.

    What many ranks get alike leaves rank 0 once for each neighbour.
    """

    def __init__(self, links: TreeLinks, steps: StepAgreement) -> None:
        self.payloads = Payloads()
        self._links, self._tree, self._steps = links, links.tree, steps

    def send_up(self, step: int, payload: bytes) -> None:
        """Send this rank's payload to rank 0.  Raises ClusterError for one that is too long."""
        for item in self._parts(step, payload, 0):
            self._links.up(item)

    def send_down(self, step: int, payloads: Sequence[bytes]) -> None:
        """From rank 0: send every other rank its payload.  Raises ClusterError for one that is too long."""
        ranks: defaultdict[bytes, list[int]] = defaultdict(list)  # that get the same
        for rank in range(1, self._tree.world):
            ranks[payloads[rank]].append(rank)
        for payload, those in ranks.items():
            for item in self._parts(step, payload, those[0]):
                self._pass_down(item.part, spans_of(those))

    async def take(self, rank: int, step: int) -> bytes:
        """Wait for a rank's payload for a step."""
        return await self.payloads.take(rank, step)

    def hear(self, neighbour: int, part: pb.Part) -> None:
        """Take in a part that a neighbour has sent or passed on; raises MessageRefused for what none sends."""
        if neighbour == self._tree.parent:
            receivers = proto.ranks_from(part, self._tree)
            if any(first <= self._tree.rank < end for first, end in receivers):
                self.payloads.add(0, part)
            self._pass_down(part, receivers)
            return
        check_below(self._tree, neighbour, part.sender)
        if part.receivers:
            refuse(RefusalReason.VALUE, f"a part of rank {part.sender} for others", "one for rank 0")
        if self._tree.rank:
            self._links.up(pb.Item(part=part))
            return
        leaf = part.sender == neighbour and self._tree.is_leaf(neighbour)  # else how far all below are is known
        tells = leaf and not self._steps.differ  # else the run is about to end
        try:
            self.payloads.add(part.sender, part, self._steps.told(part.sender) if tells else None)
        except MessageRefused as error:
            raise error.of(part.sender) from None

    def _pass_down(self, part: pb.Part, receivers: Sequence[Span]) -> None:
        for child in self._tree.children:
            theirs = common(receivers, [*self._tree.subtree_of(child)])
            if theirs:
                one = pb.Part(step=part.step, last=part.last, data=part.data, receivers=proto.ranks_to(theirs))
                self._links.put(child, pb.Item(part=one))

    def _parts(self, step: int, payload: bytes, to: int) -> list[pb.Item]:
        rank = self._tree.rank
        if len(payload) > MOST:
            raise ClusterError(
                f"rank {rank} has {len(payload)} bytes for rank {to} in one message, and at most {MOST} go: "
                "make what goes with a plan smaller, such as tensors that a step holds as constants"
            )
        return [*proto.parts(step, payload, rank)]
