"""The launchers of several nodes meet before each attempt of a run, in the launcher of node 0.

Each has one gRPC stream to it for as long as it lives, so that its end is noticed.  What is decided, and when, is in
``node_assembly``.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from actorflow.control import channels as door
from actorflow.control.channels import grpc
from actorflow.control.join import FIRST_NOTICE, NOTICE
from actorflow.control.message_rules import check_fields, check_known, one_of_a_range, refuse, unreadable
from actorflow.control.proto import ticket_from, ticket_to
from actorflow.control.strangers import Strangers
from actorflow.doctor.ports import PortUse
from actorflow.launch.node_assembly import HOST, Begin, Decision, End, NodeAssembly, NodeLost, NodesWait, Note, Refuse
from actorflow.rendezvous.roster import Ticket
from actorflow.rendezvous.tls import TlsFiles, hint_of_server
from actorflow.support.refusals import REFUSALS, MessageRefused, RefusalReason
from actorflow_compiler.core.errors import ClusterError
from actorflow_protos import runtime_pb2 as pb

__all__ = ["RemoteMeeting", "HostedMeeting", "LauncherMeeting"]

MEETING = PortUse("The launchers of all nodes meet there.", "--master-port (the same on every node)")
MOST_ATTEMPTS, MOST_NODES = 1 << 20, 1 << 20
AGAIN, LOOKING_LONGEST = 0.3, 10.0  # seconds between attempts, and between looks at what it is that listens there
CLOSING = 3.0  # seconds for the last items to reach other launchers


class LauncherMeeting(Protocol):
    """A launcher's place in the meeting."""

    def ready(self, failed: bool, attempts: int, culprit: int | None) -> None:
        """Say that this launcher is ready for the next attempt; ``failed``: its ranks have failed in the last one.

        ``attempts``: how many it has had.  ``culprit``: the number of the node whose rank has failed.
        """

    def next(self) -> pb.MeetingItem:
        """The next item for this launcher; blocks.  Raises ConnectionError when node 0's launcher is gone."""

    def leave(self, status: int, why: str) -> None:
        """Leave for good, with the exit status of the run.

        ``why``: of node 0's launcher, what others are told; of another one, why it leaves on purpose, or nothing.
        """


class HostedMeeting:
    """The place of node 0's launcher, which holds the meeting; raises ClusterError where it cannot listen.

    ``on_waiting`` is called with the number of nodes that could be taken in, whenever that changes, and ``on_lost``
    with what has happened to a node of the attempt under way; ``port`` returns the port of the next attempt's master;
    ``say`` gets texts for the terminal.  They are called on its thread.
    """

    def __init__(
        self,
        own: Ticket,
        assembly: NodeAssembly,
        listen: tuple[str, int],  # address and port
        token: str,
        port: Callable[[], int],
        on_waiting: Callable[[int], object],
        on_lost: Callable[[str], object],
        say: Callable[[str], object],
        tls: TlsFiles | None = None,
    ) -> None:
        self._tls = tls
        self._own, self._assembly, self._listen, self._token = own, assembly, listen, token
        self._port, self._on_waiting, self._on_lost, self._say = port, on_waiting, on_lost, say
        self._items: queue.SimpleQueue[pb.MeetingItem] = queue.SimpleQueue()
        self._guests: dict[int, asyncio.Queue[pb.MeetingItem | None]] = {}  # by key
        self._tickets: dict[int, Ticket] = {}  # of guests
        self._keys = HOST  # the last one that was given
        self._over: pb.MeetingItem | None = None
        self._started: Future[None] = Future()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="actorflow-meeting", daemon=True)
        self._thread.start()
        self._started.result()

    def ready(self, failed: bool, attempts: int, culprit: int | None) -> None:
        """See ``LauncherMeeting``."""
        with suppress(RuntimeError):  # the meeting is over, which is the next item
            self._loop.call_soon_threadsafe(
                lambda: self._hear_of(
                    self._assembly.ready(HOST, self._own, 0, failed, time.monotonic(), attempts, culprit)
                )
            )

    def next(self) -> pb.MeetingItem:
        """See ``LauncherMeeting``."""
        return self._items.get()

    def leave(self, status: int, why: str) -> None:
        """See ``LauncherMeeting``."""
        over = pb.MeetingItem(over=pb.Over(status=status, text=why))
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(lambda: self._end(over))
        self._thread.join(2 * CLOSING)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._hold())

    async def _hold(self) -> None:
        self._loop.set_exception_handler(_without_closed_loops)
        self._news = asyncio.Event()
        self._left = asyncio.Event()
        host, port = self._listen
        strangers = Strangers(lambda text: self._say(f"the launcher of node 0 {text}"))
        try:
            server, _ = door.make_server(
                host, port, reserved=False, token=self._token, silence=self._own.lost_after,
                callers=self._own.nnodes, turned_away=strangers.note, tls=self._tls, use=MEETING,
            )  # fmt: skip
            door.add_meeting(_Servicer(self._meet), server)
            await server.start()
        except ClusterError as error:
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        clock = asyncio.ensure_future(self._watch_clock())
        await self._left.wait()
        clock.cancel()
        strangers.close()
        await server.stop(CLOSING)

    async def _watch_clock(self) -> None:
        """Ask the assembly when its deadline has come, and say from time to time what is waited for."""
        notice: float | None = None
        while True:
            deadline, now = self._assembly.deadline, time.monotonic()
            if deadline is None:
                notice = None
            elif notice is None:
                notice = now + FIRST_NOTICE
            elif now >= notice:
                self._say(f"waiting for other nodes: {self._assembly.missing()}; {deadline - now:.0f} s are left")
                notice = now + NOTICE
            wake = min((moment for moment in (deadline, notice) if moment is not None), default=None)
            with suppress(TimeoutError):
                async with asyncio.timeout(None if wake is None else max(0.0, wake - now)):
                    await self._news.wait()
            self._news.clear()
            self._carry_out(self._assembly.pass_time(time.monotonic()))

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Begin(attempt, numbers):
                    port = self._port()
                    for key, number in numbers.items():
                        begin = pb.Attempt(number=attempt, node=number, nnodes=len(numbers), port=port)
                        self._tell(key, pb.MeetingItem(attempt=begin))
                case Refuse(key, text):
                    self._tell(key, pb.MeetingItem(refused=text))
                case Note(key, text):
                    self._tell(key, pb.MeetingItem(note=text))
                case NodesWait(count):
                    self._on_waiting(count)
                case NodeLost(what):
                    self._on_lost(what)
                case End(text):
                    self._end(pb.MeetingItem(over=pb.Over(status=1, text=text)))

    def _hear_of(self, decisions: Sequence[Decision]) -> None:
        """Carry out what follows from a launcher's words or end, after which the deadline may be another."""
        self._carry_out(decisions)
        self._news.set()

    def _tell(self, key: int, item: pb.MeetingItem) -> None:
        if key == HOST:
            self._items.put(item)
        elif key in self._guests:
            self._guests[key].put_nowait(item)

    def _end(self, over: pb.MeetingItem) -> None:
        if self._over is None:
            self._over = over
            for key in (HOST, *self._guests):
                self._tell(key, over)
            for guest in self._guests.values():
                guest.put_nowait(None)
        self._left.set()

    async def _meet(self, requests: AsyncIterator[pb.NodeReady], context: Any) -> None:
        """Serve one other launcher, until it or the meeting ends."""
        self._keys += 1
        key, items = self._keys, asyncio.Queue[pb.MeetingItem | None]()
        self._guests[key] = items
        await context.send_initial_metadata(door.ACCEPTED)
        listening = asyncio.ensure_future(self._listen_to(key, requests, context.peer()))
        listening.add_done_callback(lambda _: items.put_nowait(None))
        try:
            while (item := await items.get()) is not None:
                await context.write(item)
                if item.WhichOneof("kind") in ("refused", "over"):
                    break
        finally:
            listening.cancel()
            del self._guests[key]
            self._tickets.pop(key, None)
            self._hear_of(self._assembly.gone(key, time.monotonic()))

    async def _listen_to(self, key: int, requests: AsyncIterator[pb.NodeReady], address: str) -> None:
        try:
            async for request in requests:
                self._take_in(key, request)
        except (MessageRefused, DecodeError) as problem:
            error = problem if isinstance(problem, MessageRefused) else unreadable(str(problem))
            REFUSALS.add("meeting", error, address)
            self._tell(key, pb.MeetingItem(refused=str(error)))

    def _take_in(self, key: int, request: pb.NodeReady) -> None:
        """Take in what a launcher says.  Raises MessageRefused, before anything has changed, for what none says."""
        check_known(request)
        check_fields(request)
        culprit = request.culprit if request.HasField("culprit") else None
        wanted = request.node if request.HasField("node") else None
        now = time.monotonic()
        if self._over is not None:
            self._tell(key, self._over)
        elif request.done:
            if key not in self._tickets:
                refuse(RefusalReason.SEQUENCE, "the end of a launcher that is not here", "one that has taken part")
            self._hear_of(self._assembly.done(key, now))
        elif request.left:
            self._hear_of(self._assembly.left(key, request.left, now))
        else:
            ticket = ticket_from(request.ticket)
            one_of_a_range("the attempts of a launcher", request.attempts, 0, MOST_ATTEMPTS)
            for number in (wanted, culprit):
                one_of_a_range("node", number or 0, 0, MOST_NODES)
            if self._tickets.setdefault(key, ticket) != ticket:
                refuse(RefusalReason.VALUE, "another ticket of a launcher", "the one that it has sent before")
            self._hear_of(self._assembly.ready(key, ticket, wanted, request.failed, now, request.attempts, culprit))


def _without_closed_loops(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle errors as asyncio does, but for gRPC's where an event is for a loop of this process that is closed."""
    if not (isinstance(error := context.get("exception"), RuntimeError) and "loop is closed" in str(error)):
        loop.default_exception_handler(context)


class _Servicer(door.MeetingServicer):  # type: ignore[misc]
    """The gRPC service that the other launchers call."""

    def __init__(self, meet: Callable[[Any, Any], Any]) -> None:
        self._meet = meet

    async def Meet(self, requests: Any, context: Any) -> None:  # noqa: N802 -- the service's name
        await self._meet(requests, context)


def _reach(address: str, silence: float, limit: float, tls: TlsFiles | None) -> Any:
    """A channel to the launcher of node 0, which has answered; see ``RemoteMeeting``."""
    end, look = time.monotonic() + limit, 1.0
    channel = door.make_blocking_channel(address, silence) if tls is None else None
    while (left := end - time.monotonic()) > 0:
        try:
            if tls is not None and channel is None:
                channel = door.make_blocking_channel(address, silence, door.look_at_peer(tls, address))
            grpc.channel_ready_future(channel).result(min(look, left))
            return channel
        except OSError:  # nothing listens there yet
            time.sleep(min(AGAIN, left))
        except grpc.FutureTimeoutError:
            if tls is None and (hint := hint_of_server(address)):
                if channel is not None:
                    channel.close()
                raise ClusterError(hint) from None
            look = min(2 * look, LOOKING_LONGEST)
    if channel is not None:
        channel.close()
    raise ConnectionError(f"no launcher of node 0 answered at {address} within {limit:.0f} s")


@dataclass(frozen=True, slots=True)
class _Gone:
    """The stream has ended."""

    why: Exception


class RemoteMeeting:
    """The place of another node's launcher; dials node 0's launcher until it answers, for ``limit`` seconds at most.

    Raises ClusterError for a wrong token, for certificates that do not fit, and where one side alone uses TLS, and
    ConnectionError where nobody answers.
    """

    def __init__(
        self, own: Ticket, wanted: int | None, address: str, token: str, limit: float, tls: TlsFiles | None = None
    ) -> None:
        self._ticket, self._wanted, self._address = ticket_to(own), wanted, address
        self._requests: queue.SimpleQueue[pb.NodeReady | None] = queue.SimpleQueue()
        self._items: queue.SimpleQueue[pb.MeetingItem | _Gone] = queue.SimpleQueue()
        self._channel = _reach(address, own.lost_after, limit, tls)
        self._call = door.MeetingStub(self._channel).Meet(self._said(), metadata=door.metadata(token, 0))
        self._thread = threading.Thread(target=self._hear, name="actorflow-meeting", daemon=True)
        self._thread.start()

    def ready(self, failed: bool, attempts: int, culprit: int | None) -> None:
        """See ``LauncherMeeting``."""
        self._requests.put(
            pb.NodeReady(ticket=self._ticket, node=self._wanted, failed=failed, attempts=attempts, culprit=culprit)
        )

    def next(self) -> pb.MeetingItem:
        """See ``LauncherMeeting``."""
        item = self._items.get()
        if isinstance(item, _Gone):
            if isinstance(item.why, grpc.RpcError) and item.why.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise ClusterError(
                    f"the launcher of node 0 ({self._address}) turned this one away: their tokens differ. Give every "
                    "node the same token (ACTORFLOW_TOKEN or --token-file)."
                )
            if isinstance(item.why, grpc.RpcError) and item.why.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise ClusterError(
                    f"what listens at {self._address} is no launcher of a run with restarts. Give every node the same "
                    "--nnodes and --max-restarts, and a --master-port of its own for each run."
                )
            raise ConnectionError(f"the launcher of node 0 ({self._address}) is gone") from item.why
        return item

    def leave(self, status: int, why: str) -> None:
        """See ``LauncherMeeting``."""
        if why:
            self._requests.put(pb.NodeReady(ticket=self._ticket, left=why))
        elif status == 0:
            self._requests.put(pb.NodeReady(ticket=self._ticket, done=True))
        self._requests.put(None)  # what the other side answers by ending the stream
        self._thread.join(CLOSING)
        self._call.cancel()
        self._channel.close()

    def _said(self) -> Iterator[pb.NodeReady]:
        while (request := self._requests.get()) is not None:
            yield request

    def _hear(self) -> None:
        try:
            for item in self._call:
                self._items.put(item)
            self._items.put(_Gone(ConnectionError("the stream has ended")))
        except Exception as error:
            self._items.put(_Gone(error))
