"""One rank's access to its run, for the main thread: joining, common steps, messages, pulls, failure."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import uvloop

from actorflow.control.alone import Alone
from actorflow.control.buffered_callback import BufferedCallback
from actorflow.control.control_plane import ControlPlane
from actorflow.control.drops import NO_DROPS, DropSet
from actorflow.control.step_log import CommonStep, StepKind
from actorflow.rendezvous import start
from actorflow.rendezvous.elastic import torch_run_settings, torch_settings
from actorflow.rendezvous.failure import Failure, FailureKind, ProcessEnd
from actorflow.rendezvous.network import interface_of, route_to, unused_port
from actorflow.rendezvous.reports import RankFinished, report_to_launcher
from actorflow.rendezvous.roster import Ticket
from actorflow.rendezvous.settings import Settings
from actorflow.rendezvous.ticket import own_ticket
from actorflow.support.exit_hooks import at_exit
from actorflow.support.refusals import MessageRefused
from actorflow.support.requests import AnyRequest, Request
from actorflow.support.terminal import say
from actorflow.transport.abandon import Order, Word
from actorflow.transport.messages import Contributed, Filled, Line, Message, Region
from actorflow_compiler.core.errors import ActorflowError, ClusterError
from actorflow_protos import runtime_pb2 as pb

__all__ = ["Alone", "Cluster", "current", "joined", "process_settings", "use"]

P = ParamSpec("P")
T = TypeVar("T")

NEWS = 5.0  # seconds until the end of a rank is known
LOOK = 0.5  # seconds between looks at peers that may be lost
_BROKEN = re.compile(r"gloo|nccl|connection|broken pipe|reset by peer", re.IGNORECASE)


class Cluster:
    """This process as one rank of a run with others.

    Call everything on the main thread, in the same order on every rank; only ``send`` and ``pull`` may be called on
    any thread, in any order.  Blocking calls raise the run's error (ClusterError, or CallError when
    ranks did different things) as soon as any rank has failed; about two seconds later the process
    ends, because a blocked receive cannot be aborted.  Callbacks run on the gRPC thread and must be quick.
    """

    def __init__(self, settings: Settings, *, exit: Callable[[int], object] = os._exit) -> None:
        self.settings = settings
        self.rank = settings.rank
        self.world = settings.world
        self.failed = threading.Event()
        self.calls = 0  # announced so far
        self._host = settings.local_host
        self._base = own_ticket(settings)
        self._steps = 0  # common steps so far
        self._ending = ProcessEnd(exit)
        self._agreed_calls: BufferedCallback[[int, DropSet]] = BufferedCallback()
        self._messages: BufferedCallback[[int, Message]] = BufferedCallback()
        self._lines: BufferedCallback[[Line]] = BufferedCallback()
        self._failures: BufferedCallback[[Failure]] = BufferedCallback()
        self._orders: BufferedCallback[[Order]] = BufferedCallback()
        self._ends: list[Callable[[], object]] = []
        self._store: Any = None
        self._joined: Future[None] = Future()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="actorflow-grpc", daemon=True)
        where = ("", 0) if self.rank else (settings.master_host, unused_port(settings.bind_host()))
        self._control_plane = ControlPlane(
            settings,
            self._loop,
            self._ticket,
            where,
            self._agreed_calls,
            self._messages,
            self._lines,
            self._on_failure,
            self._orders,
        )
        self._local_links = self._control_plane.local_links.links

    # -- joining ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start to join in the background."""
        self._thread.start()

    def join(self) -> None:
        """Block until all ranks have joined.

        Raises ClusterError when ranks are missing after ``join_timeout``, when scripts, arguments or
        versions differ, when the token is wrong or the port is in use.
        """
        if not self._thread.is_alive():
            self.begin()
        self._joined.result()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # cancels pending tasks, then closes the loop
            runner.run(self._control_plane.run(self._joined))

    def _ticket(self, port: int) -> Ticket:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return replace(self._base, address=f"{host}:{port}")

    # -- common steps ----------------------------------------------------------------------------

    def gather(self, tag: str, payload: bytes) -> list[bytes] | None:
        """Bring every rank's payload to the master: all of them in order of rank there, None elsewhere."""
        return self._wait(self._control_plane.gather(self._next(), tag, payload))

    def scatter(self, tag: str, payloads: Sequence[bytes] | None) -> bytes:
        """Give every rank its payload; the master has one for each rank, the others None."""
        return self._wait(self._control_plane.scatter(self._next(), tag, payloads))

    def announce_call(self, call: int, digest: str, text: str, dropped: DropSet = NO_DROPS) -> int:
        """Announce a call of this rank, and the plans and variables ``dropped`` since the last one; returns at once.

        The callback of ``on_call_agreed`` is called some time after every rank has made it with the same digest.
        ``call`` is any number that is equal on all ranks; ``text`` is the call as source text.  A difference ends
        the run with a CallError that shows both ranks' texts.  Returns a digest, as a number of 63 bits, of all that
        this rank has done in common with others up to the call.
        """
        self._next()
        self.calls += 1
        return self._control_plane.steps.announce(CommonStep(StepKind.CALL, digest, text, call), dropped)

    def want_agreement(self) -> None:
        """Have this rank told as soon as all ranks have made the calls that it has announced; returns at once."""
        self._control_plane.steps.log.want()
        self._soon(self._control_plane.steps.tell)

    def goodbye(self) -> None:
        """Serve other ranks until every rank has come to the end of its script; then close all links."""
        self._next()
        self._wait(self._control_plane.goodbye())
        for end in self._ends:
            end()
        self._thread.join(5.0)
        report_to_launcher(self.settings.launcher, RankFinished(self.rank))

    def on_end(self, callback: Callable[[], object]) -> None:
        """Call back when all ranks have said goodbye, so that no rank needs this one any more."""
        self._ends.append(callback)

    def _next(self) -> int:
        if self._control_plane.failure is not None:
            raise self._control_plane.failure.error()
        number = self._steps
        self._steps += 1
        return number

    def on_call_agreed(self, callback: Callable[[int, DropSet], object]) -> None:
        """Call back with the number of a call when all ranks have made it and those before, and the drops of all ranks.

        It is called in order, but not for each call.
        """
        self._agreed_calls.attach(callback)

    def say(self, word: Word) -> None:
        """Tell the master about a call that has failed, here or elsewhere; any thread, returns at once."""
        self._soon(self._control_plane.failed_calls.say, word)

    def on_order(self, callback: Callable[[Order], object]) -> None:
        """Call back with the master's orders about calls that have failed."""
        self._orders.attach(callback)

    def forget(self, dropped: DropSet) -> None:
        """Forget plans and variables that all ranks have dropped by an agreement other than ``announce_call``."""
        if dropped:
            self._soon(self._control_plane.steps.forget, dropped, self._steps)

    # -- messages --------------------------------------------------------------------------------

    def connect(self, peers: Sequence[int]) -> None:
        """Block until there is a link to each of these ranks, which name this one among their peers.  Links stay.

        Ranks of one machine get a Unix socket for their register messages as well, if they can.
        """
        self._wait(self._control_plane.connect(peers))

    def send(self, peer: int, message: Message) -> None:
        """Queue a register message to a connected rank; any thread, returns at once.  Messages keep their order."""
        near = self._local_links.get(peer)
        if near is not None:
            near.send(message)
            return
        if isinstance(message, Filled | Region | Contributed):
            raise ClusterError(f"rank {self.rank} shares no memory with rank {peer}: they have no Unix socket")
        try:
            self._control_plane.links[peer].send(message)
        except KeyError:
            raise ClusterError(f"rank {self.rank} has no link to rank {peer}; connect first") from None

    def on_message(self, callback: Callable[[int, Message], object]) -> None:
        """Call back with (peer, message) for each that arrives; in order for each peer."""
        self._messages.attach(callback)

    def on_line(self, callback: Callable[[Line], object]) -> None:
        """Call back with each Unix socket on which messages of a peer come from now on, instead of ``on_message``."""
        self._lines.attach(callback)

    @property
    def local_peers(self) -> frozenset[int]:
        """The connected ranks with which this one has a Unix socket, so that they can share memory."""
        return frozenset(self._local_links)

    @property
    def machines(self) -> tuple[str, ...]:
        """For each rank, an id that is equal for ranks that can share memory; empty where a rank cannot."""
        return tuple(self._control_plane.tickets[rank].machine for rank in range(self.world))

    # -- pulls -----------------------------------------------------------------------------------

    def serve(
        self,
        kind: type[AnyRequest],
        handler: Callable[[AnyRequest], Iterable[bytes]],
        when: Callable[[AnyRequest], Future[None]] | None = None,
    ) -> None:
        """Answer requests of a kind in chunks; the handler may block, and runs on a pool of threads.

        ``when`` gives what is done when it can answer: see ``RequestHandlers.serve``.
        """
        self._control_plane.pulls.requests.serve(kind, handler, when)

    def pull(self, rank: int, request: Request) -> bytes:
        """A rank's answer to a request; any thread.  Raises ClusterError with that rank's error text if it failed."""
        if rank == self.rank:
            return b"".join(self._control_plane.pulls.requests.answer(request.text(), self.rank))
        return self._wait(self._control_plane.pull(rank, request))

    # -- data ------------------------------------------------------------------------------------

    def store(self) -> Any:
        """The run's ``torch.distributed.Store``, whose values the master keeps; see ``RunStore``.

        Process groups made on it use the network card by which the ranks reach each other, unless the user named one.
        """
        if self._store is None:
            from actorflow.control.run_store import RunStore

            card = self._card()
            os.environ.setdefault("GLOO_SOCKET_IFNAME", card)
            if card and not self.settings.one_node:  # Gloo's default may be a virtual card
                os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={card}")
            limit = timedelta(seconds=max(self.settings.join_timeout, 2 * self.settings.silence_limit))
            self._store = RunStore(self._ask_store, limit)
        return self._store

    @property
    def address_for_scripts(self) -> tuple[str, int]:
        """The master's host and a port there that nothing listens on, for a store that a script opens itself."""
        return self._control_plane.store

    def _ask_store(self, call: pb.StoreCall) -> pb.StoreReply:
        """Ask the master; any thread but the gRPC thread.  Raises ClusterError when the run or its thread has ended."""
        if threading.current_thread() is self._thread:
            raise ClusterError("the run's store was asked on the thread that answers it")
        if self._thread.is_alive():
            with suppress(RuntimeError):  # the loop is closed
                asked = asyncio.run_coroutine_threadsafe(self._control_plane.ask_store(call), self._loop)
                while self._thread.is_alive() or asked.done():
                    wait([asked], LOOK)
                    if asked.done() and not asked.cancelled():
                        return asked.result()
                    if asked.cancelled():
                        break
        raise ClusterError("this rank has left the run")

    def _card(self) -> str:
        """The network card that leads to the other ranks; empty where it has no name."""
        s = self.settings
        if s.one_node or (s.rank and not s.interface):
            return interface_of(self._host)
        if s.interface:
            return s.interface
        # the master's name for others may resolve differently here, so look up the route to another node
        other = next(t for _, t in sorted(self._control_plane.tickets.items()) if t.node != s.node)
        return interface_of(route_to(other.address.rpartition(":")[0].strip("[]")))

    # -- failure ---------------------------------------------------------------------------------

    def tell_waits(self, waits_for: Callable[[int], str]) -> None:
        """Set the function that says what this rank waits for from another one, for notices about silent ranks.

        It is called on any thread, and returns an empty text where no wait is known.
        """
        self._control_plane.peer_watch.waits_for = waits_for

    @property
    def failure(self) -> Failure | None:
        """Why the run is over, if it is."""
        return self._control_plane.failure

    def on_failure(self, callback: Callable[[Failure], object]) -> None:
        """Call back once when the run has failed, on any rank, so that blocked threads can wake."""
        self._failures.attach(callback)

    def at_failure(self, callback: Callable[[], object]) -> None:
        """Call back on a thread of its own when the run has failed; the process soon ends without waiting for it."""
        self._ending.at_failure(callback)

    def abort(self, kind: FailureKind, cause: str) -> None:
        """End the whole run because of this rank: ``RAISED``, "raised ValueError: … (train.py:12)"."""
        self._soon(
            self._control_plane.fail, Failure(self.rank, self._base.host, self._base.pid, kind, cause, self.rank)
        )
        if self._thread.is_alive():
            self.failed.wait(NEWS)

    def accuse(self, error: MessageRefused) -> None:
        """End the whole run because of what another rank has sent this one, which refuses it."""
        self._soon(self._control_plane.accuse, error)
        if self._thread.is_alive():
            self.failed.wait(NEWS)

    def fail(self, failure: Failure) -> None:
        """End the whole run because of another rank, of whose failure its launcher knows."""
        self._soon(self._control_plane.fail, failure)
        if self._thread.is_alive():
            self.failed.wait(NEWS)

    def explain(self, error: BaseException) -> BaseException:
        """The run's error if another rank's failure caused this error, else the error itself; any thread.

        When a rank is lost, a transfer may break shortly before the control plane knows the cause; for an error
        of a broken connection this waits until it does, for a few seconds, or, while a rank is silent, until
        that answers or is lost.
        """
        if self.failure is None and _looks_broken(error) and not self.failed.wait(NEWS):
            end = time.monotonic() + self.settings.silence_limit
            while self._control_plane.peer_watch.doubtful and time.monotonic() < end and not self.failed.wait(LOOK):
                pass
        return error if self.failure is None else self.failure.error()

    def end(self, code: int = 1) -> None:
        """After a failure, with all output printed: end the process with this status as soon as peers are notified."""
        self._ending.release(code)
        self.await_end()

    def await_end(self) -> None:
        """After a failure: block until the process ends, so that the script has time to raise and print its error."""
        self.failed.wait(NEWS)  # the end has begun by then
        self._ending.wait()

    def _on_failure(self, failure: Failure) -> None:
        report_to_launcher(self.settings.launcher, failure)
        self._ending.begin(self._control_plane.told)
        self.failed.set()
        self._failures(failure)

    # -- the thread ------------------------------------------------------------------------------

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._thread.is_alive():
            work.close()
            raise ClusterError("this rank has left the run")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _soon(self, function: Callable[P, object], *args: P.args, **_: P.kwargs) -> None:
        with suppress(RuntimeError):  # the loop is closed: the run is over
            self._loop.call_soon_threadsafe(function, *args)


_current: Cluster | Alone | None = None
_late = False


def current() -> Cluster | Alone:
    """This process as a rank of its run.

    The launcher's entry has joined the run already; a process of torch's launcher joins now, which is
    collective; any other process is alone.  The first call begins the run: if the script asked for more devices
    than this process has, it is restarted and this does not return.
    """
    global _current, _late
    start.begin_run(_current)
    if _current is None:
        settings = torch_run_settings()
        if settings is None:
            _current = Alone(Settings.from_env())
        else:
            run = Cluster(settings)
            run.join()
            _current, _late = run, True
            at_exit(_leave, run)
    return _current


def joined_late() -> bool:
    """Whether ``current`` joined the run, so that only this process's exit shows that its script has ended."""
    return _late


def joined() -> Cluster | Alone | None:
    """The run that this process has joined, or None; never joins one."""
    return _current


def process_settings() -> Settings:
    """This process's settings in its run; begins the run as ``current`` does, but joins no other ranks.

    Under torch's launcher they come from its environment variables, which child processes (loader workers) inherit.
    """
    start.begin_run(_current)
    return (torch_settings() or Settings()) if _current is None else _current.settings


def _leave(run: Cluster) -> None:
    """End a process of torch's launcher: wait for all ranks' scripts to end, or report why this one failed."""
    error = getattr(sys, "last_value", None)
    try:
        if error is None:
            run.goodbye()
            return
        if run.explain(error) is error:
            run.abort(FailureKind.RAISED, f"raised {type(error).__name__}: {error}")
    except ActorflowError as failure:
        say(str(failure))
    sys.stdout.flush()
    sys.stderr.flush()
    run.await_end()  # torch's launcher kills all ranks once one has ended; give them time to report
    os._exit(1)


def use(cluster: Cluster | Alone) -> None:
    """Make this the process's current cluster."""
    global _current
    _current = cluster


def _looks_broken(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, is about a connection."""
    while error is not None:
        if _BROKEN.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False
