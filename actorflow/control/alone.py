"""The interface of ``Cluster`` for a process without peers, and for a pretended cluster."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from actorflow.control.buffered_callback import BufferedCallback
from actorflow.control.drops import NO_DROPS, DropSet
from actorflow.rendezvous.failure import Failure, FailureCallbacks, FailureKind
from actorflow.rendezvous.reports import RankFinished, report_to_launcher
from actorflow.rendezvous.settings import Settings
from actorflow.support.requests import AnyRequest, Request, RequestHandlers
from actorflow.transport.messages import Line, Message
from actorflow_compiler.core.errors import ClusterError


class Alone:
    """The interface of ``Cluster`` for plain ``python script.py``, and for a pretended cluster.

    A pretended cluster of n ranks assumes that every other rank does what this one does.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.rank = 0
        self.world = self.settings.world
        self.failed = threading.Event()
        self.failure: Failure | None = None
        self.calls = 0
        self._agreed_calls: BufferedCallback[[int, DropSet]] = BufferedCallback()
        self._requests = RequestHandlers()
        self._last = FailureCallbacks()

    def join(self) -> None:
        """Nothing to wait for."""

    def gather(self, tag: str, payload: bytes) -> list[bytes] | None:
        """The payload, once for each rank."""
        return [payload] * self.world

    def scatter(self, tag: str, payloads: Sequence[bytes] | None) -> bytes:
        """The first payload."""
        assert payloads is not None
        return payloads[0]

    def announce_call(self, call: int, digest: str, text: str, dropped: DropSet = NO_DROPS) -> int:
        """Report at once that all ranks have made the call."""
        self.calls += 1
        self._agreed_calls(call, dropped)
        return 0

    def want_agreement(self) -> None:
        """Nothing to do: no other rank has to agree."""

    def goodbye(self) -> None:
        """Nothing to wait for."""
        report_to_launcher(self.settings.launcher, RankFinished(self.rank))

    def on_call_agreed(self, callback: Callable[[int, DropSet], object]) -> None:
        """Call back with the number of each call, and what was dropped."""
        self._agreed_calls.attach(callback)

    def forget(self, dropped: DropSet) -> None:
        """Nothing to do: no other rank has reported drops."""

    def connect(self, peers: Sequence[int]) -> None:
        """There are no peers."""

    def send(self, peer: int, message: Message) -> None:
        """There is no peer to send to."""
        raise ClusterError(f"there is no rank {peer} to send to; this process runs alone")

    def on_message(self, callback: Callable[[int, Message], object]) -> None:
        """Nothing to do: without peers no message arrives."""

    def on_line(self, callback: Callable[[Line], object]) -> None:
        """No peer connects."""

    @property
    def local_peers(self) -> frozenset[int]:
        """There are no peers."""
        return frozenset()

    @property
    def machines(self) -> tuple[str, ...]:
        """Empty ids: a pretended cluster shares no memory."""
        return ("",) * self.world

    def serve(
        self,
        kind: type[AnyRequest],
        handler: Callable[[AnyRequest], Iterable[bytes]],
        when: Callable[[AnyRequest], Future[None]] | None = None,
    ) -> None:
        """Answer this process's own requests of a kind."""
        self._requests.serve(kind, handler, when)

    def pull(self, rank: int, request: Request) -> bytes:
        """The answer of this process's own handler."""
        return b"".join(self._requests.answer(request.text(), self.rank))

    def store(self) -> Any:
        """A ``torch.distributed.Store`` of this process."""
        from torch import distributed

        make: Any = distributed
        return make.HashStore()

    def on_failure(self, callback: Callable[[Failure], object]) -> None:
        """No other rank can fail."""

    def at_failure(self, callback: Callable[[], object]) -> None:
        """Call back on a thread of its own when this process has failed; ``abort`` waits for it, up to a limit."""
        self._last.add(callback)

    def abort(self, kind: FailureKind, cause: str) -> None:
        """Tell the launcher, if there is one."""
        self.failure = Failure(0, socket.gethostname(), os.getpid(), kind, cause, 0)
        self.failed.set()
        report_to_launcher(self.settings.launcher, self.failure)
        self._last.start().wait()

    def explain(self, error: BaseException) -> BaseException:
        """The error itself: no other rank can be behind it."""
        return error
