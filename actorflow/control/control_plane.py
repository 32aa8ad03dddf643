"""One rank's control plane on its gRPC thread: joining, common steps, register messages, pulls, failure detection.

Every method runs on that thread's event loop unless it says otherwise.  The main thread uses it through
``cluster.Cluster``.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from actorflow.control import channels as door
from actorflow.control import join_hints as join_hints
from actorflow.control import proto as proto
from actorflow.control.address_book import AddressBook, check_welcome, welcome_to
from actorflow.control.channels import PeerServicer, PeerStub, add_servicer, grpc
from actorflow.control.drops import DropSet
from actorflow.control.failed_calls import FailedCalls
from actorflow.control.join import Reception
from actorflow.control.link import PeerLink
from actorflow.control.local_links import LocalLinks
from actorflow.control.message_rules import (
    COUNT,
    check_address,
    check_below,
    check_fields,
    check_sender,
    one_of_a_range,
    refuse,
)
from actorflow.control.payload_routes import PayloadRoutes
from actorflow.control.peer_watch import PeerWatch
from actorflow.control.pull import MOST_TEXT, PullService, in_headers
from actorflow.control.step_agreement import StepAgreement
from actorflow.control.step_log import CommonStep, StepKind
from actorflow.control.store_keeper import StoreKeeper
from actorflow.control.strangers import Strangers, host_of
from actorflow.control.tree import Tree
from actorflow.control.tree_links import TreeLinks
from actorflow.rendezvous.failure import LOST, Failure, FailureKind
from actorflow.rendezvous.reports import LogsKept, Notice, report_to_launcher
from actorflow.rendezvous.roster import Ticket
from actorflow.rendezvous.settings import Settings
from actorflow.rendezvous.tls import hint_of_server
from actorflow.rendezvous.waiting_nodes import lost_node
from actorflow.support.refusals import REFUSALS, MessageRefused, RefusalReason
from actorflow.support.requests import Request
from actorflow.support.terminal import say
from actorflow.support.truncate import truncated
from actorflow.transport.abandon import Order
from actorflow.transport.messages import Credit, Line, Message, Stamp
from actorflow_compiler.core.errors import ClusterError
from actorflow_protos import runtime_pb2 as pb

T = TypeVar("T")

CLOSING = 3.0  # seconds for links to close after all have said goodbye
NOTICING = 6.0  # seconds until the loss of a peer whose connection has broken is known
BACKSTOP = 2.0  # times the limit of the watch over peers after which gRPC ends what has no link, such as a pull
CLOSED_TOO = 1.0  # seconds in which the links of a process that ends are all closed
CONNECTING, GREETING = 2.0, 1.0  # seconds that a silent peer's host and process have to answer a probe
LOOKING_ONCE, LOOKING_LONGEST = 1.0, 10.0  # seconds between looks at what it is that does not take a call
AGAIN = 0.3  # seconds until a peer that has not answered is dialled again
ANSWERING = 2.0  # seconds that its Python has to answer a call
LONGEST_STORED = door.MOST_BYTES // 2  # bytes of a request to the store
LINK = "link"  # how refusals of what comes on links are counted
CATCHING_UP = 0.2  # seconds in which what has come while this process itself was stopped is read


class ControlPlane:
    """The state of one rank's control plane; made by ``Cluster``."""

    def __init__(
        self,
        settings: Settings,
        loop: asyncio.AbstractEventLoop,  # of the gRPC thread
        ticket: Callable[[int], Ticket],  # makes this rank's ticket from the port of its server
        store: tuple[str, int],  # where a script may open a store of its own, as the master says
        on_go: Callable[[int, DropSet], None],
        on_message: Callable[[int, Message], None],
        on_line: Callable[[Line], None],
        on_failure: Callable[[Failure], None],
        on_order: Callable[[Order], None],
    ) -> None:
        self.settings = settings
        self.rank = settings.rank
        self.tickets = AddressBook()
        self.store = store
        self.failure: Failure | None = None
        self.told = threading.Event()  # every peer has been notified of the failure
        self.pulls = PullService(settings.world)
        self.links: dict[int, PeerLink] = {}
        self.local_links = LocalLinks(settings, on_line, self._line_ended)
        self.tree = Tree(settings.rank, settings.world, settings.fan_out)
        self._tree_links = TreeLinks(self.tree, self.links)
        self.steps = StepAgreement(self._tree_links, loop, self)
        self.failed_calls = FailedCalls(self._tree_links, on_order)
        self._loop = loop
        self._make_ticket = ticket
        self._on_go, self._on_message, self._on_failure = on_go, on_message, on_failure
        self._reception: Reception | None = None  # the master's
        self._strangers = Strangers(self._say)
        self._store_keeper = StoreKeeper()  # the master's
        self._payloads = PayloadRoutes(self._tree_links, self.steps)
        self._dialled: dict[int, Any] = {}  # channels, by peer
        self._failing: asyncio.Future[None] = loop.create_future()
        self._parent_known: asyncio.Future[None] = loop.create_future()
        self._welcomed: asyncio.Future[None] = loop.create_future()
        self._departed: asyncio.Future[None] = loop.create_future()
        self._over = asyncio.Event()
        self._arrivals: defaultdict[int, asyncio.Future[None]] = defaultdict(loop.create_future)  # of peers' links
        self._tasks: set[asyncio.Future[Any]] = set()
        self._rejected: set[PeerLink] = set()  # links from ranks that do not belong to this run
        self._unheard: set[PeerLink] = set()
        self._done = False  # all have said goodbye
        self.peer_watch = PeerWatch(
            settings,
            self.links,
            self.tickets,
            lambda peer: self._spawn(self._silent_for_long(peer)),
            self.steps.missing,
            self._tree_links.up,
        )
        self._items: dict[str, Callable[[PeerLink, Any], None]] = {
            "steps": lambda link, item: self.steps.hear(link.peer, proto.steps_from(item)),
            "part": lambda link, item: self._payloads.hear(link.peer, item),
            "alike": lambda _, item: self.steps.are_alike(*proto.alike_from(item)),
            "hurry": lambda _, item: self.steps.hurry_up(item.steps),
            "tell": lambda _, item: self.steps.describe(item.step),
            "told": lambda link, item: self.steps.hear_described(link.peer, proto.told_from(item)),
            "hello": self._hello,
            "parent": lambda _, item: self._told_parent(item),
            "welcome": lambda _, item: self._welcome(item),
            "failure": self._told_of_failure,
            "heard": lambda link, _: self._told_heard(link),
            "farewell": lambda _, __: self._told_farewell(),
            "bye": self._bye,
            "near": lambda link, item: self.local_links.on_dialled(link.peer, item.connected),
            "failed": lambda link, item: self.failed_calls.hear(link.peer, item.rank, proto.word_from(item)),
            "vote": lambda link, item: self.failed_calls.hear(link.peer, item.rank, proto.word_from(item)),
            "hold": lambda _, item: self.failed_calls.obey(proto.order_from(item)),
            "decision": lambda _, item: self.failed_calls.obey(proto.order_from(item)),
            "beat": lambda _, __: None,
            "silent": self._told_of_silence,
        }

    async def run(self, joined: Future[None]) -> None:
        """Serve from joining to goodbye; ``joined`` gets the result of joining."""
        server = None
        try:
            server = await self._serve()
            self._spawn(self._watch_peers())
            await (self._welcome_all() if self.rank == 0 else self._join())
            joined.set_result(None)
        except Exception as e:
            if not isinstance(e, ClusterError):
                traceback.print_exc()
            self.fail(self._own_failure(FailureKind.JOIN, str(e)))
            joined.set_exception(e)
        await self._over.wait()
        self._strangers.close()
        self.pulls.close()
        await self.local_links.close()
        for channel in self._dialled.values():
            await channel.close()
        if server is not None:
            await server.stop(0.5)

    # -- joining ---------------------------------------------------------------------------------

    async def _serve(self) -> Any:
        s = self.settings
        host, port = s.bind_host(), s.master_port if self.rank == 0 else 0
        server, port = door.make_server(
            host, port, reserved=s.reserved_port and self.rank == 0, token=s.token,
            silence=BACKSTOP * s.silence_limit, callers=s.world, turned_away=self._turn_away, tls=s.tls,
        )  # fmt: skip
        machine, socket = self.local_links.open()
        self.own = replace(self._make_ticket(port), machine=machine, socket=socket)
        self.tickets.add(self.own)
        if self.rank == 0:
            hints = join_hints.master_hints(s)
            self._reception = Reception(self.own, s.join_timeout, hints, lambda: lost_node(s.launcher))
        add_servicer(_Servicer(self), server)
        await server.start()
        return server

    def _turn_away(self, address: str, why: str) -> None:
        self._strangers.note(address, why)
        if self._reception is not None:
            self._reception.turn_away(host_of(address), why)

    def _say(self, text: str) -> None:
        """Print a line about this rank on its node's terminal."""
        if self.settings.launcher:
            report_to_launcher(self.settings.launcher, Notice(f"rank {self.rank} {text}"))
        else:
            say(f"rank {self.rank} {text}")

    async def _welcome_all(self) -> None:
        """The master's part of joining: wait for all, then give each its place in the tree, and all the address book.

        All have said hello here, since they know nobody else; those that are not next below hear to whom they say it
        next, and end their first link.
        """
        assert self._reception is not None
        tickets = await self._reception.wait(self._unless_failed)
        for rank in range(1 + len(self.tree.children), self.tree.world):
            self.links[rank].passing = True
            del self._arrivals[rank]
            above = proto.ticket_to(tickets[self.tree.parent_of(rank)])
            self.links[rank].put(pb.Item(parent=pb.Parent(ticket=above)))
        self._tree_links.down(pb.Item(welcome=welcome_to(tickets, self.store, self.settings.logs_port)))

    async def _join(self) -> None:
        """Another rank's part of joining."""
        s = self.settings
        address = s.master_address
        notices = (
            self._spawn(join_hints.report_waiting(s)) if s.local_rank == 0 else None
        )  # one report for each node is enough
        try:
            link = await self._dial(0, address, s.join_timeout)
        except TimeoutError:
            raise ClusterError(
                f"no master (rank 0, node 0) answered rank {self.rank} (node {s.node}) at {address} within "
                f"{s.join_timeout:g} s (--join-timeout). {await join_hints.why_no_master(s)}"
            ) from None
        finally:
            if notices is not None:
                notices.cancel()
        link.passing = self.tree.parent != 0
        link.put(pb.Item(hello=pb.Hello(rank=self.rank, ticket=proto.ticket_to(self.own))))
        limit = s.join_timeout + 10.0  # the master decides; the margin is for a master that started later
        try:
            if link.passing:
                await self._unless_failed(self._parent_known, limit)
        except TimeoutError:
            raise _not_welcomed(address) from None
        await self._link_to([self.tree.parent])
        try:
            await self._unless_failed(self._welcomed, limit)
            if link.passing:
                link.close()
                await self._unless_failed(link.ended.wait(), limit)
        except TimeoutError:
            raise _not_welcomed(address) from None
        await self._link_to(self.tree.children)

    def _hello(self, link: PeerLink, item: pb.Hello) -> None:
        if self._done:
            return
        if link.known or item.rank != link.peer:
            refuse(RefusalReason.SEQUENCE, f"the hello of rank {item.rank}", f"one of rank {link.peer}, once")
        joins, reception = item.HasField("ticket"), self._reception
        late = reception is not None and reception.roster.complete
        most = COUNT if joins and reception else self.settings.world
        one_of_a_range("the hello of rank", item.rank, self.rank + 1, most)
        if joins != (reception is not None) and (joins or not late):
            refuse(RefusalReason.VALUE, "a hello with a ticket, or without", "one to rank 0 alone")
        if joins:
            assert reception is not None
            ticket = proto.ticket_from(item.ticket)
            if ticket.rank != link.peer:
                refuse(RefusalReason.NUMBER, f"the ticket of rank {ticket.rank}", f"that of rank {link.peer}")
            try:
                reception.admit(ticket)
            except ClusterError as e:
                self._reject(link, str(e), late)
                return
            self.tickets.add(ticket)
        elif link.peer in self.links:
            refuse(RefusalReason.SENDER, f"a second link of rank {link.peer}", "one for each rank")
        link.known = True
        self.links[link.peer] = link
        if self.failure is not None:
            link.put(proto.failure_to(self.failure))
        self._tree_links.begin(link)
        arrival = self._arrivals[link.peer]
        if not arrival.done():
            arrival.set_result(None)

    def _reject(self, link: PeerLink, text: str, late: bool) -> None:
        failure = self._own_failure(FailureKind.JOIN, text)
        if late:  # a stray process must not harm a run that goes well
            link.turned_away = True
            link.put(proto.failure_to(failure))
            link.close()
        else:
            link.known = True  # so that its acknowledgement is accepted
            self._rejected.add(link)
            self.fail(failure)

    def _told_parent(self, item: pb.Parent) -> None:
        if self.tree.parent == 0 or self._parent_known.done():
            refuse(RefusalReason.SEQUENCE, "the rank above in the tree", "none: it is known")
        ticket = proto.ticket_from(item.ticket)
        if ticket.rank != self.tree.parent:
            refuse(RefusalReason.NUMBER, f"rank {ticket.rank} above in the tree", f"rank {self.tree.parent}")
        check_address(ticket.address)
        self.tickets.add(ticket)
        self._parent_known.set_result(None)

    def _welcome(self, item: pb.Welcome) -> None:
        if self._welcomed.done():
            refuse(RefusalReason.SEQUENCE, "a second welcome", "one")
        check_welcome(item, self.settings.world, self.own)
        self.tickets.welcome(item, self.own)
        self.store = item.store_host, item.store_port
        self._tree_links.down(pb.Item(welcome=item))
        if item.logs_port and self.settings.leads:  # one for each launcher is enough
            report_to_launcher(self.settings.launcher, LogsKept(self.settings.at_master(item.logs_port)))
        self._welcomed.set_result(None)

    # -- links -----------------------------------------------------------------------------------

    async def connect(self, peers: Sequence[int]) -> None:
        """Make a link to each of these ranks, which call this with our rank among theirs."""
        await self._link_to(peers)
        for peer in sorted({*peers} - {self.rank}):
            if self.own.machine and self.own.machine == self.tickets[peer].machine:
                await self.local_links.connect(self.tickets[peer], self.links[peer], self._unless_failed)

    async def _link_to(self, peers: Sequence[int]) -> None:
        linked = {peer for peer, link in self.links.items() if not link.passing}
        wanted = sorted({*peers} - linked - {self.rank})
        timeout = self.settings.join_timeout
        for peer in wanted:
            try:
                if peer < self.rank:
                    link = await self._dial(peer, self.tickets[peer].address, timeout)
                    link.put(pb.Item(hello=pb.Hello(rank=self.rank)))
                    self._tree_links.begin(link)
                else:
                    await self._unless_failed(asyncio.shield(self._arrivals[peer]), timeout)
            except TimeoutError:
                raise ClusterError(
                    await join_hints.why_no_link(self.settings, self.own, self.tickets[peer], timeout)
                ) from None

    async def _dial(self, peer: int, address: str, timeout: float) -> PeerLink:
        await self._reach(peer, address, self._loop.time() + timeout)
        call = PeerStub(self._dialled[peer]).Link(metadata=self._metadata())
        if not door.is_accepted(await self._unless_failed(call.initial_metadata(), timeout)):
            if await call.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise ClusterError(
                    f"what listens at {address} is no rank: where a run has restarts, its launchers meet at that port. "
                    "Give every node the same --max-restarts and --nnodes."
                )
            if await call.code() is not grpc.StatusCode.UNAUTHENTICATED:
                raise ClusterError(f"rank {peer} ({address}) refused rank {self.rank}: {await call.details()}")
            raise ClusterError(
                f"rank {peer} ({address}) turned rank {self.rank} away: their tokens differ. Give every node the same "
                "token (ACTORFLOW_TOKEN or --token-file)."
            )
        link = PeerLink(peer, self._loop)
        link.known = True
        self.links[peer] = link
        self._spawn(self._talk(link, call))
        return link

    async def _reach(self, peer: int, address: str, deadline: float) -> None:
        """Wait until a peer's server answers; TimeoutError at the deadline, ClusterError where it is none of ours."""
        look = LOOKING_ONCE
        while True:
            left = deadline - self._loop.time()
            if left <= 0:
                raise TimeoutError
            try:
                channel = await self._channel(peer, address)
                await self._unless_failed(channel.channel_ready(), min(look, left))
                return
            except OSError:  # TimeoutError is one
                pass
            if self.settings.tls is not None:
                await self._unless_failed(asyncio.sleep(min(AGAIN, left)))
            elif not self.settings.one_node and (hint := await asyncio.to_thread(hint_of_server, address)):
                raise ClusterError(hint)
            look = min(2 * look, LOOKING_LONGEST)

    async def _channel(self, peer: int, address: str) -> Any:
        """The channel to a peer; with TLS, OSError where it does not answer, ClusterError where it is none of ours."""
        if peer not in self._dialled:
            tls = await self._tls_of(address)
            if peer not in self._dialled:
                self._dialled[peer] = door.make_channel(address, BACKSTOP * self.settings.silence_limit, tls)
        return self._dialled[peer]

    async def _tls_of(self, address: str) -> door.TlsPeer | None:
        if self.settings.tls is None:
            return None
        return await self._unless_failed(asyncio.to_thread(door.look_at_peer, self.settings.tls, address))

    def _metadata(self) -> Sequence[tuple[str, str]]:
        return door.metadata(self.settings.token, self.rank)

    async def _talk(self, link: PeerLink, call: Any) -> None:
        """Run the dialling side of a link."""

        async def pump() -> None:
            await link.pump(call.write)
            await call.done_writing()

        await self._converse(link, pump(), call.read)

    async def answer(self, context: Any) -> None:
        """Run the answering side of a link."""
        peer = door.caller(context)
        if peer <= self.rank:
            refused = MessageRefused(RefusalReason.SENDER, f"a call of rank {peer}", f"one of a rank above {self.rank}")
            REFUSALS.add(LINK, refused, context.peer())
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"rank {peer} does not dial rank {self.rank}")
        await context.send_initial_metadata(door.ACCEPTED)
        link = PeerLink(peer, self._loop, context.peer())
        await self._converse(link, link.pump(context.write), context.read)

    async def _converse(
        self, link: PeerLink, pump: Coroutine[Any, Any, None], read: Callable[[], Awaitable[Any]]
    ) -> None:
        pumping = asyncio.ensure_future(pump)
        pumping.add_done_callback(lambda task: task.cancelled() or task.exception())  # the reader reports the error
        try:
            while not await self._read(link, read):
                pass
            if link.said_bye:  # answer it before the stream goes down
                await asyncio.wait({pumping}, timeout=CLOSING)
        except grpc.aio.AioRpcError as error:  # a broken link, as a client sees it
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:  # ranks send no message that is too long
                self._refused(link, MessageRefused(RefusalReason.LIMIT, str(error.details()), "messages in pieces"))
        except asyncio.CancelledError:  # and as a server does
            pass
        finally:
            pumping.cancel()
            self._ended(link)

    async def _read(self, link: PeerLink, read: Callable[[], Awaitable[Any]]) -> bool:
        """Take in what comes on a link; returns whether that is all, since a rank that is refused is to hear why."""
        try:
            await link.read(read, self._item)
        except MessageRefused as error:
            self._refused(link, error)
            return not link.known
        return True

    def _item(self, link: PeerLink, item: pb.Item) -> None:
        """Take in an item.  Raises MessageRefused, before anything has changed, for what no rank sends."""
        kind = item.WhichOneof("kind")
        if link.turned_away and kind not in ("heard", "bye"):
            return
        if kind is None:
            refuse(RefusalReason.UNREADABLE, "an empty item", "one of a kind")
        if not (link.known or link.turned_away or kind == "hello"):
            refuse(RefusalReason.SEQUENCE, f"{kind!r} before a hello", "a hello first")
        try:
            if kind == "credit":
                self._on_message(link.peer, Credit(item.credit.plan, item.credit.register))
            elif kind == "ready":
                self._on_message(link.peer, proto.ready_from(item.ready))
            elif kind == "stamp":
                self._on_message(link.peer, Stamp(item.stamp.call, item.stamp.history))
            else:
                check_sender(kind, link.peer, self.tree)
                found = getattr(item, kind)
                check_fields(found)
                self._items[kind](link, found)
        except MessageRefused as error:
            raise error.of(link.peer) from None
        except Exception as e:  # a bug in actorflow or a callback must end the run, not just stop the link
            traceback.print_exc()
            self.fail(
                self._own_failure(FailureKind.RAISED, f"raised {type(e).__name__}: {e} (while it handled {kind!r})")
            )

    def _refused(self, link: PeerLink, error: MessageRefused) -> None:
        """What was sent on a link is refused: one of no known rank ends, one of a rank of this run ends the run."""
        link.turned_away = True
        if link.known:
            self.accuse(error.of(link.peer))
        else:
            REFUSALS.add(LINK, error, link.address)

    def accuse(self, error: MessageRefused) -> None:
        """End the run because of what another rank has sent."""
        REFUSALS.add(LINK, error, f"rank {error.sender}")
        ticket = self.tickets.get(error.sender)
        host, pid = (ticket.host, ticket.pid) if ticket else (self.settings.master_host, 0)
        self.fail(Failure(error.sender, host, pid, FailureKind.MALFORMED, error.cause, self.rank))

    def _bye(self, link: PeerLink, _item: pb.Bye) -> None:
        link.said_bye = True
        if link.passing:
            link.close()

    def _ended(self, link: PeerLink) -> None:
        link.ended.set()
        self._heard(link)
        if self.links.get(link.peer) is not link:
            return
        if link.passing and link.said_bye:
            del self.links[link.peer]
        if self.failure is None and not self._done and not link.said_bye:
            self._spawn(self._lost(link.peer))

    def _line_ended(self, peer: int) -> None:
        """A peer's Unix socket was closed without a goodbye.  Any thread."""

        async def look() -> None:
            link = self.links[peer]
            with suppress(TimeoutError):  # the link brings why the peer has ended, if it knows
                await asyncio.wait_for(link.ended.wait(), CLOSED_TOO)
            if self.failure is None and not self._done and not link.said_bye:
                await self._lost(peer)

        with suppress(RuntimeError):  # the loop is closed: the run is over
            self._loop.call_soon_threadsafe(lambda: self._spawn(look()))

    async def _lost(self, peer: int) -> None:
        stopped = self.peer_watch.stopped()
        kind = await door.probe(self._address(peer), tls=self.settings.tls is not None)
        if stopped:  # gRPC may drop what a peer has sent before its end, such as why it ended
            cause = f"was stopped for {stopped:.0f} s, and the run ended meanwhile"
            self.fail(self._own_failure(FailureKind.STOPPED, cause))
            return
        self._fail_for(peer, kind)

    async def _silent_for_long(self, peer: int) -> None:
        """End the run if a peer that has been silent for the limit is gone or stopped."""
        address = self._address(peer)
        kind = await door.probe(address, CONNECTING, GREETING, self.settings.tls is not None)
        alive = kind is FailureKind.BROKEN and not await self._answers(address)
        await asyncio.sleep(CATCHING_UP)
        if self.failure is not None or self._done or not self.peer_watch.is_silent(peer):
            return
        if alive:  # gRPC greets without the GIL
            self.peer_watch.note_busy(peer)
        else:
            self._fail_for(peer, kind)

    async def _answers(self, address: str) -> bool:
        """Whether Python runs in the process of a peer."""
        try:
            async with asyncio.timeout(ANSWERING):
                tls = await self._tls_of(address)
            return await door.answers(address, self._metadata(), ANSWERING, tls)
        except (OSError, ClusterError):
            return False

    async def _watch_peers(self) -> None:
        try:
            await self.peer_watch.run(lambda: self.failure is not None or self._done)
        except Exception as e:  # a bug in actorflow: without the watch, the run could hang
            traceback.print_exc()
            self.fail(self._own_failure(FailureKind.RAISED, f"raised {type(e).__name__}: {e} (while it watched peers)"))

    def _told_of_silence(self, link: PeerLink, item: pb.Silent) -> None:
        check_below(self.tree, link.peer, item.by)
        one_of_a_range("the silence of rank", item.rank, 1, self.settings.world)
        if item.rank == item.by or item.seconds < 0:
            refuse(RefusalReason.VALUE, f"{item.seconds:g} s of silence of rank {item.rank}", "that of another rank")
        if self.rank:
            self._tree_links.up(pb.Item(silent=item))
        else:
            self.peer_watch.hear(item.by, item.rank, item.seconds, item.over, item.waits, item.missing)

    def _fail_for(self, peer: int, kind: FailureKind) -> None:
        ticket = self.tickets.get(peer)
        host, pid = (ticket.host, ticket.pid) if ticket else (self.settings.master_host, 0)
        self.fail(Failure(peer, host, pid, kind, LOST[kind], self.rank))

    def _address(self, peer: int) -> str:
        return self.tickets[peer].address if peer in self.tickets else self.settings.master_address

    # -- common steps ----------------------------------------------------------------------------

    def steps_agreed(self, call: int, dropped: DropSet) -> None:
        """See ``StepListener``."""
        self._on_go(call, dropped)

    def steps_over(self) -> None:
        """See ``StepListener``."""
        self._farewell()

    def steps_differ(self, rank: int, text: str) -> None:
        """See ``StepListener``."""
        ticket = self.tickets[rank]
        self.fail(Failure(rank, ticket.host, ticket.pid, FailureKind.CALL, text, self.rank))

    async def gather(self, number: int, tag: str, payload: bytes) -> list[bytes] | None:
        """Common step ``number``: send every rank's payload to the master; other ranks get None."""
        self.steps.issue(CommonStep(StepKind.GATHER, tag))
        if self.rank:
            self._payloads.send_up(number, payload)
            return None
        found = [payload, *[await self._payload(peer, number) for peer in range(1, self.settings.world)]]
        await self._unless_failed(self.steps.until_alike(number + 1))  # else payloads may be of something else
        return found

    async def scatter(self, number: int, tag: str, payloads: Sequence[bytes] | None) -> bytes:
        """Common step ``number``: send each rank its payload from the master."""
        self.steps.issue(CommonStep(StepKind.SCATTER, tag))
        if self.rank:
            return await self._payload(0, number)
        assert payloads is not None
        assert len(payloads) == self.settings.world
        self._payloads.send_down(number, payloads)
        return payloads[0]

    async def _payload(self, peer: int, number: int) -> bytes:
        found = await self._unless_failed(self._payloads.take(peer, number))
        if self.steps.differ:  # ranks have not come here in the same way: the run is about to end
            await self._unless_failed(self._loop.create_future())
        return found

    # -- goodbye ---------------------------------------------------------------------------------

    async def goodbye(self) -> None:
        """Serve until every rank's script has ended, then close all links."""
        self.steps.issue(CommonStep(StepKind.END))
        await self._unless_failed(self._departed)
        await asyncio.wait({asyncio.ensure_future(link.ended.wait()) for link in self.links.values()}, timeout=CLOSING)
        self._over.set()

    def _told_farewell(self) -> None:
        if not self.steps.log.ended:
            refuse(RefusalReason.SEQUENCE, "a farewell", "none before this rank's script has ended")
        self._tree_links.down(pb.Item(farewell=pb.Farewell()))
        self._farewell()

    def _farewell(self) -> None:
        self._done = True
        for link in self.links.values():
            link.close()
        if not self._departed.done():
            self._departed.set_result(None)

    # -- pulls -----------------------------------------------------------------------------------

    async def pull(self, rank: int, request: Request) -> bytes:
        """Another rank's answer to a request."""
        try:
            channel = await self._channel(rank, self.tickets[rank].address)
            return await self._unless_failed(self.pulls.pull(channel, self._metadata(), request))
        except (grpc.aio.AioRpcError, OSError) as e:
            try:  # the link to that rank, or the master, soon reports what happened
                await self._unless_failed(asyncio.sleep(NOTICING))
            except ClusterError as known:
                raise known from None
            raise ClusterError(f"rank {rank} broke off while it served {request}: {_details(e)}") from e
        except ClusterError as e:
            if self.failure is not None:
                raise
            raise ClusterError(f"rank {rank} could not serve {request}: {e}") from None

    # -- the store -------------------------------------------------------------------------------

    async def ask_store(self, call: pb.StoreCall) -> pb.StoreReply:
        """The master's answer to a request to the store; ClusterError where the run has failed or this rank left it."""
        if self._over.is_set():
            raise ClusterError("this rank has left the run")
        if call.ByteSize() > LONGEST_STORED:
            raise ClusterError(
                f"{call.verb!r} of {call.ByteSize()} bytes was asked of the run's store, which takes {LONGEST_STORED} "
                "at most: send tensors by a collective"
            )
        if self.rank == 0:
            return await self._unless_failed(self._store_keeper.answer(call))
        try:
            channel = await self._channel(0, self.tickets[0].address)
            return await self._unless_failed(PeerStub(channel).Store(call, metadata=self._metadata()))
        except grpc.aio.AioRpcError as e:
            if e.code() is grpc.StatusCode.ABORTED:
                raise ClusterError(e.details()) from None
            with suppress(TimeoutError):  # the link to the master soon reports what happened
                await self._unless_failed(self._loop.create_future(), NOTICING)
            raise ClusterError(f"rank 0 broke off while it served the run's store: {e.details()}") from e

    async def answer_store(self, call: pb.StoreCall, context: Any) -> pb.StoreReply:
        """Answer another rank's request to the store."""
        try:
            return await self._unless_failed(self._store_keeper.answer(call))
        except ClusterError as e:
            if isinstance(e, MessageRefused):
                REFUSALS.add("store", e, context.peer())
            await context.abort(grpc.StatusCode.ABORTED, truncated(str(e), MOST_TEXT, in_headers))
            raise

    # -- failure ---------------------------------------------------------------------------------

    def fail(self, failure: Failure) -> None:
        """End the run: wake all waiters here, and notify the owner and the peers, which notify theirs."""
        if self.failure is not None or self._done:
            return
        self.failure = failure
        if not self._failing.done():
            self._failing.set_result(None)
        peers = {*self.links.values(), *self._rejected}
        for link in peers:
            link.put(proto.failure_to(failure))
        lost = failure.rank if failure.kind in LOST else -1
        self._unheard = {link for link in peers if not link.ended.is_set() and link.peer != lost}
        if not self._unheard:
            self.told.set()
        self._on_failure(failure)

    def _told_of_failure(self, link: PeerLink, item: pb.Failure) -> None:
        failure = proto.failure_from(item)
        if self.rank == 0 or self._welcomed.done():  # else this rank may be none of that run
            one_of_a_range("the failure of rank", failure.rank, 0, self.settings.world)
        link.put(pb.Item(heard=pb.Heard()))
        self.fail(failure)

    def _told_heard(self, link: PeerLink) -> None:
        if self.failure is None and not link.turned_away:
            refuse(RefusalReason.SEQUENCE, "an answer to a failure", "none: there is none")
        self._heard(link)

    def _heard(self, link: PeerLink) -> None:
        self._unheard.discard(link)
        if self.failure is not None and not self._unheard:
            self.told.set()

    def _own_failure(self, kind: FailureKind, cause: str) -> Failure:
        ticket = self.tickets.get(self.rank) or self._make_ticket(0)
        return Failure(self.rank, ticket.host, ticket.pid, kind, cause, self.rank)

    async def _unless_failed(self, awaitable: Awaitable[T], timeout: float | None = None) -> T:
        """Await something; raises the failure's error as soon as the run has failed, or TimeoutError."""
        task = asyncio.ensure_future(awaitable)
        either: set[asyncio.Future[Any]] = {task, self._failing}
        await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if task is not awaitable:  # do not cancel a future, which its owner may still set
            task.cancel()
        if self.failure is not None:
            raise self.failure.error()
        raise TimeoutError

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._tasks.discard)
        return task


def _not_welcomed(address: str) -> ClusterError:
    return ClusterError(f"the master at {address} took the call but did not welcome us")


def _details(error: Exception) -> str:
    return str(error.details() if isinstance(error, grpc.aio.AioRpcError) else error)


class _Servicer(PeerServicer):  # type: ignore[misc]
    """The gRPC service that other ranks call."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control

    async def Link(self, _requests: Any, context: Any) -> None:  # noqa: N802 -- the service's name
        await self._control.answer(context)

    async def Pull(self, request: pb.PullRequest, context: Any) -> None:  # noqa: N802
        await self._control.pulls.serve(request, context)

    async def Store(self, request: pb.StoreCall, context: Any) -> pb.StoreReply:  # noqa: N802
        return await self._control.answer_store(request, context)
