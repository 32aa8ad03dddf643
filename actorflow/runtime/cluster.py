"""The main thread's calls go in: join, common steps, messages, pulls; its peers' answers, or one error, come out."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import uvloop

from actorflow.runtime.alone import Alone
from actorflow.runtime.control import Control
from actorflow.runtime.control_ledger import CommonStep
from actorflow.runtime.control_pull import Handler
from actorflow.runtime.control_roster import Ticket
from actorflow.runtime.failure import Ending, Failure
from actorflow.runtime.feed import Feed
from actorflow.runtime.messages import Filled, Line, Message, Region
from actorflow.runtime.network import interface_of
from actorflow.runtime.reports import Finished, tell
from actorflow.runtime.settings import Settings
from actorflow.runtime.ticket import own_ticket
from actorflow_compiler.errors import ClusterError

__all__ = ["Alone", "Cluster", "current", "use"]

P = ParamSpec("P")
T = TypeVar("T")

DATA_TIMEOUT = timedelta(days=1)  # of torch.distributed; a peer that fails is noticed by the control plane
NEWS = 5.0  # seconds in which a lost rank becomes known
_BROKEN = re.compile(r"gloo|nccl|connection|broken pipe|reset by peer", re.IGNORECASE)


class Cluster:
    """This process as one rank of a run with others.

    Call everything on the main thread, in the same order on every rank, but for ``send`` and
    ``pull``, which are free.  What blocks raises the run's error (ClusterError, or CallError when
    ranks did different things) as soon as any rank has failed; about a second later the process
    ends, because a blocked receive cannot be aborted.  Callbacks run on the gRPC thread and must be quick.
    """

    def __init__(self, settings: Settings, *, exit: Callable[[int], object] = os._exit) -> None:
        self.settings = settings
        self.rank = settings.rank
        self.world = settings.world
        self.failed = threading.Event()
        self.calls = 0  # gated so far
        self._host = settings.local_host
        self._base = own_ticket(settings)
        self._steps = 0  # common steps so far
        self._ending = Ending(exit)
        self._go: Feed[[int]] = Feed()
        self._messages: Feed[[int, Message]] = Feed()
        self._lines: Feed[[Line]] = Feed()
        self._failures: Feed[[Failure]] = Feed()
        self._store: Any = None
        self._store_socket: socket.socket | None = None
        self._joined: Future[None] = Future()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="actorflow-grpc", daemon=True)
        where = ("", 0)
        if self.rank == 0:  # listens now, so that its port can be told before torch is imported
            self._store_socket = _listen(settings.bind_host())
            where = (settings.master_host, self._store_socket.getsockname()[1])
        self._control = Control(settings, self._ticket, where, self._go, self._messages, self._lines, self._on_failure)
        self._near = self._control.near.links

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
        try:
            self._loop.run_until_complete(self._control.run(self._joined))
        finally:
            self._loop.close()

    def _ticket(self, port: int) -> Ticket:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return replace(self._base, address=f"{host}:{port}")

    # -- common steps ----------------------------------------------------------------------------

    def gather(self, tag: str, payload: bytes) -> list[bytes] | None:
        """Bring every rank's payload to the master: all of them in order of rank there, None elsewhere."""
        return self._wait(self._control.gather(self._next(), tag, payload))

    def scatter(self, tag: str, payloads: Sequence[bytes] | None) -> bytes:
        """Give every rank its payload; the master has one for each rank, the others None."""
        return self._wait(self._control.scatter(self._next(), tag, payloads))

    def gate(self, call: int, digest: str, text: str) -> None:
        """Say that this rank makes a call; returns at once.

        ``on_go`` hears of it when every rank has made it with the same digest.  ``call`` is any
        number that is equal on all ranks; ``text`` is the call as people write it.  A difference ends
        the run with a CallError that shows both ranks' texts.
        """
        self._next()
        self.calls += 1
        self._soon(self._control.issue, CommonStep("call", f"{call} {digest}", text, call))

    def goodbye(self) -> None:
        """Block until every rank has come to the end of its script, serving meanwhile; then close all links."""
        self._next()
        self._wait(self._control.goodbye())
        self._thread.join(5.0)
        tell(self.settings.launcher, Finished(self.rank))

    def _next(self) -> int:
        if self._control.failure is not None:
            raise self._control.failure.error()
        number = self._steps
        self._steps += 1
        return number

    def on_go(self, callback: Callable[[int], object]) -> None:
        """Call back with the number of each call that all ranks have made, in order."""
        self._go.attach(callback)

    # -- messages --------------------------------------------------------------------------------

    def connect(self, peers: Sequence[int]) -> None:
        """Block until there is a link to each of these ranks; they name this one among theirs.  Links stay.

        Ranks of one machine get a Unix socket for their register messages as well, if they can.
        """
        self._wait(self._control.connect(peers))

    def send(self, peer: int, message: Message) -> None:
        """Queue a register message to a connected rank; any thread, returns at once, keeps its order."""
        near = self._near.get(peer)
        if near is not None:
            near.send(message)
            return
        if isinstance(message, Filled | Region):
            raise ClusterError(f"rank {self.rank} shares no memory with rank {peer}: they have no Unix socket")
        try:
            self._control.links[peer].send(message)
        except KeyError:
            raise ClusterError(f"rank {self.rank} has no link to rank {peer}; connect first") from None

    def on_message(self, callback: Callable[[int, Message], object]) -> None:
        """Call back with (peer, message) for each that arrives; in order for each peer."""
        self._messages.attach(callback)

    def on_line(self, callback: Callable[[Line], object]) -> None:
        """Call back with each Unix socket on which messages of a peer come from now on, instead of ``on_message``."""
        self._lines.attach(callback)

    @property
    def near(self) -> frozenset[int]:
        """The connected ranks with which this one has a Unix socket, so that they can share memory."""
        return frozenset(self._near)

    @property
    def machines(self) -> tuple[str, ...]:
        """For each rank what it has in common with those that it can share memory with; empty where it cannot."""
        return tuple(self._control.tickets[rank].machine for rank in range(self.world))

    # -- pulls -----------------------------------------------------------------------------------

    def serve(self, handler: Handler) -> None:
        """Answer pulls: the handler turns a key into chunks; it may block, and runs on a small pool of threads."""
        self._control.pulls.handler = handler

    def pull(self, rank: int, key: str) -> bytes:
        """What a rank serves under a key; any thread.  Raises ClusterError with its text where that rank cannot."""
        if rank == self.rank:
            return b"".join(self._control.pulls.answer(key))
        return self._wait(self._control.pull(rank, key))

    # -- data ------------------------------------------------------------------------------------

    def store(self) -> Any:
        """The run's ``torch.distributed.Store``; the master makes it, so it calls this too.

        Gloo groups made on it use the network that the ranks reach each other by.
        """
        if self._store is None:
            from torch import distributed

            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(self._host))
            host, port = self._control.store
            limit = timedelta(seconds=self.settings.join_timeout)
            torch_distributed: Any = distributed  # its stubs lack what follows
            make = torch_distributed.TCPStore
            if self._store_socket is None:
                self._store = make(host, port, None, False, limit)
            else:
                fd = self._store_socket.detach()
                self._store = make("127.0.0.1", port, None, True, limit, wait_for_workers=False, master_listen_fd=fd)
        return self._store

    def connect_data(self) -> None:
        """Make torch.distributed's default group over all ranks with Gloo, once; collective."""
        from torch import distributed

        if not distributed.is_initialized():
            store = self.store()
            distributed.init_process_group(
                "gloo", store=store, rank=self.rank, world_size=self.world, timeout=DATA_TIMEOUT
            )

    # -- failure ---------------------------------------------------------------------------------

    @property
    def failure(self) -> Failure | None:
        """Why the run is over, if it is."""
        return self._control.failure

    def on_failure(self, callback: Callable[[Failure], object]) -> None:
        """Call back once when the run has failed, on any rank, so that waiters wake."""
        self._failures.attach(callback)

    def abort(self, kind: str, cause: str) -> None:
        """End the whole run because of this rank: "raised", "raised ValueError: … (train.py:12)"."""
        self._soon(self._control.fail, Failure(self.rank, self._base.host, self._base.pid, kind, cause, self.rank))
        self.failed.wait(1.0)

    def explain(self, error: BaseException) -> BaseException:
        """The run's error where another rank's failure is behind this one, else the error itself; any thread.

        When a rank is lost, a transfer may break a moment before the control plane knows why; an
        error that looks like it waits for that news.
        """
        if self.failure is None and _looks_broken(error):
            self.failed.wait(NEWS)
        return error if self.failure is None else self.failure.error()

    def end(self, code: int = 1) -> None:
        """After a failure and when all is printed: end the process with this status as soon as peers are told."""
        self._ending.release(code)
        self._ending.wait()

    def _on_failure(self, failure: Failure) -> None:
        tell(self.settings.launcher, failure)
        self._ending.begin(self._control.told)
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


def current() -> Cluster | Alone:
    """This process's place in its run; alone unless the launcher's entry has joined one."""
    global _current
    if _current is None:
        _current = Alone()
    return _current


def use(cluster: Cluster | Alone) -> None:
    """Make this the process's current cluster."""
    global _current
    _current = cluster


def _looks_broken(error: BaseException | None) -> bool:
    """Whether an error, or one behind it, speaks of a connection."""
    while error is not None:
        if _BROKEN.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _listen(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=1024, dualstack_ipv6=host == "::")
