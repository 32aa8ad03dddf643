"""Unix sockets to the peers on this machine, used only if both sides agree.

Used on the gRPC thread.  Of two ranks, the higher one dials and tells the lower one whether it succeeded, so that
both use the link or neither does; without it, their messages go over gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from actorflow.control.join import UnlessFailed
from actorflow.control.link import PeerLink
from actorflow.control.message_rules import refuse
from actorflow.rendezvous.roster import Ticket
from actorflow.rendezvous.settings import Settings
from actorflow.support.refusals import RefusalReason
from actorflow.support.terminal import say
from actorflow.transport.unix_door import UnixDoor, machine
from actorflow.transport.unix_link import UnixLink
from actorflow_compiler.core.errors import ClusterError
from actorflow_protos import runtime_pb2 as pb


class LocalLinks:
    """The peers on this machine, and the Unix links to them.

    ``on_link`` gets each link as it is made; ``on_end``, which may be called on any thread, the peer
    whose link has ended without a goodbye.
    """

    def __init__(
        self, settings: Settings, on_link: Callable[[UnixLink], object], on_end: Callable[[int], object]
    ) -> None:
        self.links: dict[int, UnixLink] = {}
        self._settings = settings
        self._on_link, self._on_end = on_link, on_end
        self._settled: set[int] = set()  # peers with which it is agreed whether there is a link
        self._said: dict[int, asyncio.Future[bool]] = {}  # by peer: whether its dialling succeeded
        self._door: UnixDoor | None = None
        self._serving: asyncio.Task[None] | None = None

    def open(self) -> tuple[str, str]:
        """Open this rank's socket: the machine and the name for its ticket, empty where there is none."""
        where = machine() if self._settings.local else ""
        if where:
            with suppress(OSError):
                self._door = UnixDoor(self._settings.rank, self._settings.token, self._settings.silence_limit)
                self._serving = asyncio.ensure_future(self._door.serve())
                return where, self._door.name
        return "", ""

    async def connect(self, peer: Ticket, control: PeerLink, unless_failed: UnlessFailed) -> None:
        """Make a Unix link to a peer on this machine, which does the same, or agree that there is none."""
        if self._door is None or peer.rank in self._settled:
            return
        if peer.rank < self._settings.rank:
            try:
                sock = await self._door.dial(peer.rank, peer.socket)
            except (OSError, TimeoutError, ClusterError) as e:
                sock = None
                say(
                    f"rank {self._settings.rank} and {peer.place} are on one machine, but no Unix socket "
                    f"between them could be opened ({str(e) or type(e).__name__}); they use the network, a slower way"
                )
            control.put(pb.Item(near=pb.Near(connected=sock is not None)))
        else:
            said = self._said.setdefault(peer.rank, asyncio.get_running_loop().create_future())
            await unless_failed(asyncio.shield(said), self._settings.join_timeout)
            sock = self._door.take(peer.rank) if said.result() else None
            if said.result() and sock is None:
                raise ClusterError(
                    f"{peer.place} says that it came to the Unix socket of this rank, which has not seen it"
                )
        self._settled.add(peer.rank)
        if sock is not None:
            link = self.links[peer.rank] = UnixLink(peer.rank, sock, lambda: self._on_end(peer.rank))
            self._on_link(link)

    def on_dialled(self, peer: int, connected: bool) -> None:
        """Record that a peer has dialled this rank, and whether it succeeded."""
        said = self._said.setdefault(peer, asyncio.get_running_loop().create_future())
        if said.done():
            refuse(RefusalReason.SEQUENCE, f"a second word of rank {peer} about its Unix socket", "one")
        said.set_result(connected)

    async def close(self) -> None:
        """Say goodbye on all links and close the socket."""
        for link in self.links.values():
            link.close()
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait({self._serving})
