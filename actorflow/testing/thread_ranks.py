"""Run a function on several ranks that are threads of this process, with global tensors between them.

For tests, examples and experiments.  No process is started, and ranks that wait for each other forever are detected at
once.  No other part of actorflow uses it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from actorflow.eager.communicator import EagerCommunicator
from actorflow.eager.current import use
from actorflow.eager.mismatch import MADE_OTHERWISE, CollectiveWait, RankState, ScriptEnd, find_mismatch, show_rank
from actorflow.script_state import seeds
from actorflow.support import background
from actorflow_compiler.core.errors import CallError

__all__ = ["ThreadCommunicator", "ThreadRanks"]

T = TypeVar("T")
Key = tuple[tuple[int, ...], int]  # (the ranks of a collective, its number)


class _Hub:
    """The state that the ranks of one world share, under one lock."""

    def __init__(self, world: int) -> None:
        self.changed = threading.Condition()
        self.states = {rank: RankState(None) for rank in range(world)}
        self.posted: dict[
            tuple[Key, int, int], tuple[CollectiveWait, Tensor | None]
        ] = {}  # (collective, from, to) → what the sender does, tensor
        self.verdict: str | None = None  # the mismatch that was found: all further collectives raise it

    def fail(self, why: str) -> None:
        self.verdict = self.verdict or why
        self.changed.notify_all()

    def check(self) -> None:
        if self.verdict is not None:
            raise CallError(self.verdict)


class ThreadCommunicator(EagerCommunicator):
    """The communicator of one of several ranks that are threads of this process.

    Each rank has its own generator for random global tensors, which ``flow.manual_seed`` seeds, too.
    """

    def __init__(self, rank: int, world: int, hub: _Hub, seed: int) -> None:
        super().__init__(rank, world)
        self._hub = hub
        self.generator: torch.Generator = torch.Generator().manual_seed(seed)

    def _transfer(
        self, waiting: CollectiveWait, digest: int, send: Sequence[Tensor | None], receive: Sequence[int], like: Tensor
    ) -> list[Tensor | None]:
        hub, me = self._hub, self.rank
        key = (waiting.ranks, waiting.number)
        given = [(r, t.clone()) for r, t in zip(waiting.ranks, send, strict=True) if t is not None]
        wanted = [r for r, n in zip(waiting.ranks, receive, strict=True) if n]
        with hub.changed:
            for peer, tensor in given:
                hub.posted[key, me, peer] = (waiting, tensor)
            hub.states[me] = RankState(waiting, dict(self._entered))
            hub.changed.notify_all()
            while hub.verdict is None and not all((key, r, me) in hub.posted for r in wanted):
                if (why := find_mismatch(hub.states)) is not None:
                    hub.fail(why)
                    break
                hub.changed.wait()
            hub.check()
            taken = {r: hub.posted.pop((key, r, me)) for r in wanted}
            for peer, (other, _) in taken.items():
                if (other.what, other.lineage) != (waiting.what, waiting.lineage):
                    why = (
                        "exchange tensors in different ops: all ranks have to run the same ops on global tensors in "
                        "the same order"
                    )
                    hub.fail(
                        f"rank {me} and rank {peer} {MADE_OTHERWISE if other.what == waiting.what else why}\n"
                        f"{show_rank(me, hub.states[me])}\n{show_rank(peer, RankState(other))}"
                    )
                    hub.check()
            hub.states[me] = RankState(None, dict(self._entered))
        return [taken[r][1] if r in taken else None for r in waiting.ranks]

    def finish(self, how: str = "has ended its script") -> None:
        """Tell the other ranks that this rank takes part in no further collective; ``how`` says why."""
        with self._hub.changed:
            self._hub.states[self.rank] = RankState(ScriptEnd(how), dict(self._entered))
            self._hub.changed.notify_all()

    def has_failed(self) -> bool:
        """Whether a mismatch was found, even if the ranks have caught the error."""
        return self._hub.verdict is not None

    def go_on(self) -> None:
        """Take part again after ``finish``."""
        self._hub.states[self.rank] = RankState(None, dict(self._entered))


class ThreadRanks:
    """``world`` ranks as threads, which live until ``close``; each has its own communicator.

    >>> with ThreadRanks(2) as threads:
    ...     threads.run(lambda: current().rank)
    [0, 1]
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self._tasks: list[SimpleQueue[Callable[[], None] | None]] = [SimpleQueue() for _ in range(world)]
        self._seed = torch.initial_seed()
        self._comms = self._connected()
        self._threads = [
            background.start(partial(self._serve, tasks), f"rank {rank}", partial(tasks.put, None))
            for rank, tasks in enumerate(self._tasks)
        ]

    def run(self, function: Callable[[], T]) -> list[T]:
        """Call the function on each rank and return the results, rank by rank.

        If a rank returns early or raises while others wait for it, these raise CallError.  If ranks have raised, this
        raises the error of the first rank with one that is no CallError, or else of the first rank.
        """
        results: dict[int, T] = {}
        errors: dict[int, BaseException] = {}
        done: SimpleQueue[int] = SimpleQueue()

        def task(rank: int) -> Callable[[], None]:
            comm = self._comms[rank]

            def do() -> None:
                try:
                    with use(comm), seeds.use_generator(comm.generator):
                        results[rank] = function()
                    comm.finish()
                except BaseException as error:
                    errors[rank] = error
                    comm.finish(f"raised {type(error).__name__}: {error}")
                finally:
                    done.put(rank)

            return do

        for rank, tasks in enumerate(self._tasks):
            tasks.put(task(rank))
        for _ in self._tasks:
            done.get()
        if errors or self._comms[0].has_failed():
            self._comms = self._connected()
        if errors:
            own = [r for r in sorted(errors) if not isinstance(errors[r], CallError)]
            raise errors[own[0] if own else min(errors)]
        for comm in self._comms:
            comm.go_on()
        return [results[rank] for rank in range(self.world)]

    def close(self) -> None:
        """End the threads."""
        for tasks in self._tasks:
            tasks.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> ThreadRanks:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _connected(self) -> list[ThreadCommunicator]:
        hub = _Hub(self.world)
        return [ThreadCommunicator(rank, self.world, hub, self._seed) for rank in range(self.world)]

    @staticmethod
    def _serve(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
        while (task := tasks.get()) is not None:
            task()
