"""The main thread's calls go in: join, common steps, messages, pulls; what its peers answer, or one error, comes out."""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import re
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from importlib import metadata
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import uvloop

from actorflow.runtime.control import Control, Handler
from actorflow.runtime.control_ledger import CommonStep
from actorflow.runtime.control_roster import Ticket
from actorflow.runtime.failure import Ending, Failure
from actorflow.runtime.messages import Message
from actorflow.runtime.network import interface_of
from actorflow.runtime.reports import Finished, tell
from actorflow.runtime.settings import Settings
from actorflow_compiler.errors import ClusterError

if TYPE_CHECKING:
    from torch.distributed import Store

P = ParamSpec("P")
T = TypeVar("T")

DATA_TIMEOUT = timedelta(days=1)  # of torch.distributed; a peer that fails is noticed by the control plane
NEWS = 5.0  # seconds in which a lost rank becomes known
_BROKEN = re.compile(r"gloo|nccl|connection|broken pipe|reset by peer", re.IGNORECASE)


class Feed(Generic[P]):
    """Hands values to a callback; keeps those that come before there is one."""

    def __init__(self) -> None:
        self._callback: Callable[P, object] | None = None
        self._kept: list[Callable[[Callable[P, object]], object]] = []
        self._lock = threading.Lock()

    def attach(self, callback: Callable[P, object]) -> None:
        """Set the callback and give it what was kept, in order."""
        with self._lock:
            for give in self._kept:
                give(callback)
            self._kept.clear()
            self._callback = callback

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Pass a value on."""
        callback = self._callback
        if callback is None:
            with self._lock:
                callback = self._callback
                if callback is None:
                    self._kept.append(lambda give: give(*args, **kwargs))
                    return
        callback(*args, **kwargs)


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
        self._base = _ticket(settings, self._host)
        self._steps = 0  # common steps so far
        self._ending = Ending(exit)
        self._go: Feed[[int]] = Feed()
        self._messages: Feed[[int, Message]] = Feed()
        self._failures: Feed[[Failure]] = Feed()
        self._store: Store | None = None
        self._store_socket: socket.socket | None = None
        self._joined: Future[None] = Future()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="actorflow-grpc", daemon=True)
        where = ("", 0)
        if self.rank == 0:  # listens now, so that its port can be told before torch is imported
            self._store_socket = _listen(settings.bind_host())
            where = (settings.master_host, self._store_socket.getsockname()[1])
        self._control = Control(settings, self._ticket, where, self._go, self._messages, self._on_failure)

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
        step = CommonStep("call", f"{call} {digest}", text, call)
        self._soon(self._control.issue, step)

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
        """Block until there is a link to each of these ranks; they name this one among theirs.  Links stay."""
        self._wait(self._control.connect(peers))

    def send(self, peer: int, message: Message) -> None:
        """Queue a register message to a connected rank; any thread, returns at once, keeps its order."""
        try:
            self._control.links[peer].send(message)
        except KeyError:
            raise ClusterError(f"rank {self.rank} has no link to rank {peer}; connect first") from None

    def on_message(self, callback: Callable[[int, Message], object]) -> None:
        """Call back with (peer, message) for each that arrives; in order for each peer."""
        self._messages.attach(callback)

    # -- pulls -----------------------------------------------------------------------------------

    def serve(self, handler: Handler) -> None:
        """Answer pulls: the handler turns a key into chunks; it may block, and runs on a small pool of threads."""
        self._control.handler = handler

    def pull(self, rank: int, key: str) -> bytes:
        """What a rank serves under a key; any thread.  Raises ClusterError with its text where that rank cannot."""
        if rank == self.rank:
            return _serve_self(self._control.handler, rank, key)
        return self._wait(self._control.pull(rank, key))

    # -- data ------------------------------------------------------------------------------------

    def store(self) -> Store:
        """The run's key-value store, made by the master."""
        if self._store is None:
            from torch.distributed import TCPStore

            host, port = self._control.store
            limit = timedelta(seconds=self.settings.join_timeout)
            if self._store_socket is not None:
                listening = self._store_socket.detach()
                self._store = TCPStore(
                    "127.0.0.1", port, None, True, limit, wait_for_workers=False, master_listen_fd=listening
                )
            else:
                self._store = TCPStore(host, port, None, False, limit)
        return self._store

    def connect_data(self) -> None:
        """Make torch.distributed's default group over all ranks with Gloo, once; collective."""
        from torch import distributed
        from torch.distributed import PrefixStore

        if distributed.is_initialized():
            return
        name = interface_of(self._host)
        if name:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        distributed.init_process_group(
            "gloo",
            store=PrefixStore("actorflow", self.store()),
            rank=self.rank,
            world_size=self.world,
            timeout=DATA_TIMEOUT,
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
        """The run's error where another rank's failure is behind this one, else the error itself.

        When a rank is lost, a transfer may break a moment before the control plane knows why.
        """
        if self.failure is None and isinstance(error, RuntimeError | OSError) and _BROKEN.search(str(error)):
            self.failed.wait(NEWS)
        return error if self.failure is None else self.failure.error()

    def end(self, code: int = 1) -> None:
        """After a failure and when all is printed: end the process with this status as soon as peers are told."""
        self._ending.release(code)
        self._ending.wait()

    def _on_failure(self, failure: Failure) -> None:
        tell(self.settings.launcher, failure)
        self.failed.set()
        self._ending.begin(self._control.told)
        self._failures(failure)

    # -- the thread ------------------------------------------------------------------------------

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._thread.is_alive():
            work.close()
            raise ClusterError("this rank has left the run")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _soon(self, function: Callable[P, object], *args: P.args, **_: P.kwargs) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed: the run is over
            pass


class Alone:
    """The same face where there are no peers: plain ``python script.py``, or a pretended cluster.

    In a pretended cluster of n ranks every other rank is taken to do what this one does.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.rank = 0
        self.world = self.settings.world
        self.failed = threading.Event()
        self.failure: Failure | None = None
        self.calls = 0
        self._go: Feed[[int]] = Feed()
        self._handler: Handler | None = None

    def join(self) -> None:
        """Nobody to wait for."""

    def gather(self, tag: str, payload: bytes) -> list[bytes] | None:
        """The payload, once for each rank."""
        return [payload] * self.world

    def scatter(self, tag: str, payloads: Sequence[bytes] | None) -> bytes:
        """The first payload."""
        assert payloads is not None
        return payloads[0]

    def gate(self, call: int, digest: str, text: str) -> None:
        """Let the call go at once."""
        self.calls += 1
        self._go(call)

    def goodbye(self) -> None:
        """Nobody to wait for."""
        tell(self.settings.launcher, Finished(self.rank))

    def on_go(self, callback: Callable[[int], object]) -> None:
        """Call back with the number of each call."""
        self._go.attach(callback)

    def connect(self, peers: Sequence[int]) -> None:
        """There are no peers."""

    def send(self, peer: int, message: Message) -> None:
        """There is no peer to send to."""
        raise ClusterError(f"there is no rank {peer} to send to; this process runs alone")

    def on_message(self, callback: Callable[[int, Message], object]) -> None:
        """No message ever comes."""

    def serve(self, handler: Handler) -> None:
        """Answer this process's own pulls."""
        self._handler = handler

    def pull(self, rank: int, key: str) -> bytes:
        """What this process serves under a key."""
        return _serve_self(self._handler, rank, key)

    def connect_data(self) -> None:
        """Make torch.distributed's default group of one, once."""
        from torch import distributed

        if not distributed.is_initialized():
            distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)

    def on_failure(self, callback: Callable[[Failure], object]) -> None:
        """No other rank can fail."""

    def abort(self, kind: str, cause: str) -> None:
        """Tell the launcher, if there is one."""
        self.failure = Failure(0, socket.gethostname(), os.getpid(), kind, cause, 0)
        self.failed.set()
        tell(self.settings.launcher, self.failure)

    def explain(self, error: BaseException) -> BaseException:
        """The error itself: no other rank can be behind it."""
        return error


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


def _ticket(s: Settings, host: str) -> Ticket:
    return Ticket(
        rank=s.rank,
        node=s.node,
        nnodes=s.nnodes,
        devices=s.devices,
        host=socket.gethostname(),
        pid=os.getpid(),
        address=host,
        version=_version("actorflow"),
        python=platform.python_version(),
        torch=_version("torch"),
        script=s.script,
        digest=_digest(s.script),
        argv=s.argv,
    )


def _serve_self(handler: Handler | None, rank: int, key: str) -> bytes:
    if handler is None:
        raise ClusterError(f"rank {rank} could not serve {key!r}: nothing is served here yet")
    return b"".join(handler(key))


def _listen(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=1024, dualstack_ipv6=host == "::")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from its source folder
        return "source"


def _digest(script: str) -> str:
    if not script:
        return ""
    try:
        with open(script, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as e:
        raise ClusterError(f"the script {script!r} cannot be read on {socket.gethostname()}: {e}") from e
