"""Three ranks of this process that have joined: what comes in on their links, and the state that a refusal leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

from actorflow.control.control_plane import ControlPlane
from actorflow.control.link import PeerLink
from actorflow.rendezvous.settings import Settings
from actorflow.support.refusals import MessageRefused
from actorflow_protos import runtime_pb2 as pb
from cluster.ranks import LIMIT, Ranks, free_port

WORLD = 3


class ControlDoor:
    """A run of three ranks; what is said to one is handled on its own thread, as what comes over its network."""

    def __init__(self, ranks: Ranks, traffic: list[tuple[int, int, bytes]]) -> None:
        self.ranks = ranks
        self.traffic = traffic  # (to, from, a batch of one item), as ranks have sent it until now
        self.messages: list[tuple[int, Any]] = []  # register messages that a rank has passed on
        for cluster in ranks.clusters:
            cluster.on_message(lambda peer, message: self.messages.append((peer, message)))

    def plane(self, rank: int) -> ControlPlane:
        return self.ranks.clusters[rank]._control_plane

    def say(self, to: int, sender: int, item: pb.Item) -> MessageRefused | None:
        """Have a rank take in an item on its link to another one; returns why it is refused."""
        return self.say_bytes(to, sender, pb.Batch(items=[item]).SerializeToString())

    def say_bytes(self, to: int, sender: int, data: bytes) -> MessageRefused | None:
        """Have a rank take in what was sent on its link to another one; returns why it is refused."""
        plane = self.plane(to)
        link = plane.links[sender]

        async def hear() -> MessageRefused | None:
            batches = iter([data])

            async def read() -> pb.Batch | None:
                return pb.Batch.FromString(one) if (one := next(batches, None)) is not None else END

            try:
                await link.read(read, plane._item)
            except MessageRefused as error:
                return error.of(sender)
            return None

        return asyncio.run_coroutine_threadsafe(hear(), self.ranks.clusters[to]._loop).result(LIMIT)

    def stranger(self, to: int, peer: int, *items: pb.Item) -> MessageRefused | None:
        """Have a rank take in items on a link of somebody who has not said hello."""
        plane = self.plane(to)

        async def hear() -> MessageRefused | None:
            link = PeerLink(peer, plane._loop, "test")
            try:
                for item in items:
                    plane._item(link, item)
            except MessageRefused as error:
                return error
            return None

        return asyncio.run_coroutine_threadsafe(hear(), self.ranks.clusters[to]._loop).result(LIMIT)

    def state(self, rank: int) -> Any:
        """All that a message could have changed, as plain data."""
        plane = self.plane(rank)
        steps, failed, payloads = plane.steps, plane.failed_calls, plane._payloads.payloads

        async def look() -> Any:
            return repr([
                {rank: astuple(ticket) for rank, ticket in plane.tickets.items()}, plane.store, plane.failure,
                [(peer, link.known, link.said_bye, link.turned_away) for peer, link in plane.links.items()],
                steps.log.told, steps.log.forgotten, steps.log.ended, steps._hurry, steps._alike,
                steps._ledger._done, bytes(steps._ledger._digests), sorted(steps._ledger._ended), steps._difference,
                sorted(steps._wanted), sorted(steps._hurried.items()), sorted(steps._described),
                sorted(failed._coordinator._open), sorted(failed._coordinator._decided), sorted(failed._held),
                sorted(failed._decided), steps._dropped._by, steps._dropped._later, plane._done,
                repr(steps._released._told), repr(steps._released._forgotten),
                payloads._here, payloads._steps,
                {key: len(whole.result()) if whole.done() else None for key, whole in payloads._whole.items()},
                sorted(plane.local_links._settled), sorted(plane.local_links._said), sorted(plane.peer_watch._suspects),
            ])  # fmt: skip

        return asyncio.run_coroutine_threadsafe(look(), self.ranks.clusters[rank]._loop).result(LIMIT)


END = object()  # what gRPC returns at the end of a stream


@contextmanager
def three_ranks() -> Iterator[ControlDoor]:
    """Three ranks that have joined, are linked to each other, and have made two common steps."""
    ranks = Ranks()
    port = free_port()
    traffic: list[tuple[int, int, bytes]] = []
    take_in = ControlPlane._item

    def record(self: ControlPlane, link: PeerLink, item: pb.Item) -> None:
        traffic.append((self.rank, link.peer, pb.Batch(items=[item]).SerializeToString()))
        take_in(self, link, item)

    ControlPlane._item = record  # type: ignore[method-assign]
    try:
        for rank in range(WORLD):
            ranks.make(
                Settings(
                    rank, rank, WORLD, devices=WORLD, master_port=port, token="secret", join_timeout=LIMIT, local=False
                )
            )
        assert ranks.each(lambda cluster: cluster.join()) == [None] * WORLD
        assert ranks.each(lambda cluster: cluster.connect(range(WORLD))) == [None] * WORLD
        assert ranks.each(lambda cluster: cluster.gather("one", b"")) == [[b""] * WORLD, None, None]
        assert ranks.each(lambda c: c.scatter("two", None if c.rank else [b"x"] * WORLD)) == [b"x"] * WORLD
        pause = threading.Event()
        while any(cluster._control_plane.steps.log.forgotten < 2 for cluster in ranks.clusters):
            pause.wait(0.01)  # the master tells in its own time that all have done both
        ControlPlane._item = take_in  # type: ignore[method-assign]
        yield ControlDoor(ranks, traffic)
    finally:
        ControlPlane._item = take_in  # type: ignore[method-assign]
        ranks.close()
