"""A device that runs ahead, on the CPU: ops are put into queues, and run in any order that marks allow.

An op that is launched inside of a queue's context gets outputs full of garbage at once.  Later, when
something waits on the host, or at the whim of a seeded generator, it runs and fills them.  Beside that every
op is checked when it is launched, by vector clocks, so that no luck hides a mistake: all that it reads must
have been written before by what its queue has waited for, and all that it writes must have been read.
Memory that is let go of goes back to the queue that made it: whoever else reads it must be waited for
by that queue, must have passed, or must have been named by ``Queue.use``.  What is wrong goes to ``wrongs``.
"""

from __future__ import annotations

import contextlib
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from actorflow.devices import Device, Mark, Queue
from actorflow.transport.messages import DataPlane
from actorflow.transport.staged import StagedPlane

Clock = dict["FakeQueue", int]  # queue → how much of its work is known to be done before


@dataclass(slots=True)
class Memory:
    """What is known of one storage."""

    maker: FakeQueue | None  # the queue that it goes back to; None where it is not the device's
    real: Any = None  # the array that ops really work on
    written: tuple[FakeQueue, int] | None = None
    read: dict[FakeQueue, int] = field(default_factory=dict)
    used: set[FakeQueue] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Captured:
    """An op that a capture keeps, with the memory that it is for."""

    func: Any
    reads: Sequence[Memory]
    writes: Sequence[Memory]
    run: Callable[[], None]


Pool = dict[int, list[Any]]  # bytes → memory that captures of one device have for what they need while they run


class Bench:
    """All fake devices of one test, and what goes wrong on them.

    ``eager`` is how many ops run, on average, whenever one is launched; with 0 nothing runs before the host waits.
    """

    def __init__(self, seed: int = 0, eager: float = 0.5) -> None:
        self.wrongs: list[str] = []
        self.syncs: list[str] = []  # ops that had to wait for the device while they were launched
        self.ran = 0  # ops
        self.replays = 0  # of captures
        self.live = self.peak = 0  # bytes of memory that the device gave out
        self._random = random.Random(seed)
        self._eager = eager
        self._lock = threading.RLock()
        self._queues: list[FakeQueue] = []
        self._memory: dict[int, Memory] = {}  # by address
        self._fetched: set[int] = set()  # addresses of what came to the host
        self._seen: Clock = {}  # what the host has seen pass
        self._here = threading.local()

    def device(self, rank: int = 0) -> FakeDevice:
        """A device of its own for one rank."""
        return FakeDevice(self, rank)

    def queue(self, name: str) -> FakeQueue:
        """A new queue."""
        with self._lock:
            self._queues.append(FakeQueue(self, name))
            return self._queues[-1]

    # -- threads

    def knows(self) -> Clock:
        """What the calling thread has waited for on the host."""
        if not hasattr(self._here, "clock"):
            self._here.clock = {}
        found: Clock = self._here.clock
        return found

    def stack(self) -> list[FakeQueue]:
        """The contexts that the calling thread is in."""
        if not hasattr(self._here, "stack"):
            self._here.stack = []
        found: list[FakeQueue] = self._here.stack
        return found

    def own(self) -> FakeQueue:
        """The queue that a thread launches into outside of all contexts: there work is done at once."""
        if not hasattr(self._here, "own"):
            self._here.own = self.queue(f"of thread {threading.current_thread().name}")
        found: FakeQueue = self._here.own
        found.clock.update(_later(found.clock, self.knows()))
        return found

    # -- launching

    def launch(self, queue: FakeQueue, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Put an op into a queue; its outputs, which are garbage until it has run."""
        with self._lock, _disable_current_modes():
            self._whim()
            written, views = _aliases(func, args, kwargs)
            if views:
                return func(*args, **kwargs)
            tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            if any(_address(t) in self._fetched for t in tensors) and not any(self.is_here(t) for t in tensors):
                return func(*args, **kwargs)  # work of the host, which does it at once
            reads = [t for t in tensors if not any(t is w for w in written)]
            try:
                shapes = None if written and not _fresh(func) else func(*_meta(args), **_meta(kwargs))
            except Exception:  # what the outputs look like depends on values: wait for them
                if self.tape() is not None:
                    raise RuntimeError(f"{func} waits for the device, which cannot be captured") from None
                self.syncs.append(str(func))
                self._run_until(lambda: not queue.waiting, f"{func} on {queue.name}")
                real = func(*_real(self, args), **_real(self, kwargs))
                self._note(queue, func, self._all(reads), self._all(written))
                return pytree.tree_map_only(Tensor, lambda t: self._filled(queue, t), real)
            outputs: list[Tensor] = []

            def output(like: Tensor) -> Tensor:
                outputs.append(self._new(queue, like))
                return outputs[-1]

            found = (
                pytree.tree_map_only(Tensor, output, shapes) if shapes is not None else _returned(func, args, kwargs)
            )
            tape = self.tape()
            touched = self._all(reads), self._all([*written, *outputs])
            if tape is None:
                self._note(queue, func, *touched)
            on, at, into = _real(self, args), _real(self, kwargs), _real(self, outputs)

            def run() -> None:
                made = [t for t in pytree.tree_leaves(func(*on, **at)) if isinstance(t, Tensor)]
                for place, value in zip(into, made, strict=False):
                    place.copy_(value)

            if tape is None:
                queue.waiting.append((queue.count, run))
            else:
                tape.append(Captured(func, *touched, run))
            return found

    def tape(self) -> list[Captured] | None:
        """Where the calling thread's ops are kept instead of being run; None where they run."""
        return getattr(self._here, "tape", None)

    @contextlib.contextmanager
    def capturing(self, pool: Pool) -> Iterator[list[Captured]]:
        """Keep the calling thread's ops; what memory they make is the pool's, and goes back there."""
        self._here.tape, self._here.pool = [], pool
        try:
            yield self._here.tape
        finally:
            self._here.tape = None

    def again(self, queue: FakeQueue, captured: Iterable[Captured]) -> None:
        """Put ops that were kept into a queue."""
        with self._lock:
            self._whim()
            self.replays += 1
            for one in captured:
                self._note(queue, one.func, one.reads, one.writes)
                queue.waiting.append((queue.count, one.run))

    def _all(self, tensors: Iterable[Tensor]) -> list[Memory]:
        return [memory for memory in map(self._of, tensors) if memory is not None]

    def _note(self, queue: FakeQueue, func: Any, reads: Sequence[Memory], writes: Sequence[Memory]) -> None:
        queue.clock.update(_later(queue.clock, self.knows()))
        queue.count += 1
        queue.clock[queue] = queue.count
        for memory in reads:
            self._after(queue, memory.written, f"{queue.name}: {func} reads what {{}} may not have written yet")
            memory.read[queue] = queue.count
        for memory in writes:
            self._after(queue, memory.written, f"{queue.name}: {func} overwrites what {{}} may not have written yet")
            for reader in memory.read.items():
                self._after(queue, reader, f"{queue.name}: {func} overwrites what {{}} may not have read yet")
            memory.written, memory.read = (queue, queue.count), {}

    def _after(self, queue: FakeQueue, other: tuple[FakeQueue, int] | None, wrong: str) -> None:
        if other is None or self._seen.get(other[0], 0) >= other[1]:  # it was over before this was launched
            return
        if queue.clock.get(other[0], 0) < other[1]:
            self.wrongs.append(wrong.format(other[0].name))

    # -- memory

    def _of(self, tensor: Tensor) -> Memory | None:
        address = _address(tensor)
        return self._memory.setdefault(address, Memory(None)) if address else None

    def is_here(self, tensor: Tensor) -> bool:
        """Whether a device gave out a tensor's memory."""
        found = self._memory.get(_address(tensor))
        return found is not None and found.maker is not None

    def _new(self, queue: FakeQueue, like: Tensor) -> Tensor:
        """Garbage that looks like a tensor, in memory that is watched."""
        size = sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True)) + 1 if like.numel() else 0
        if not size:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        if self.tape() is not None:
            return self._pooled(size * like.element_size(), like)
        real = _aligned(size * like.element_size())
        real[:] = 0xFF  # of a float: not a number
        shown = real[:]
        flat = torch.from_numpy(shown)
        address = flat.data_ptr()
        self._memory[address] = Memory(queue, real)
        self.live += real.nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(shown, self._free, address, real.nbytes)
        return flat.view(like.dtype).as_strided(like.shape, like.stride())

    def _pooled(self, nbytes: int, like: Tensor) -> Tensor:
        """The same in memory that a capture shares with those of its pool that came before, and will come."""
        room = self._here.pool.setdefault(nbytes, [])
        real = room.pop() if room else _aligned(nbytes)
        shown = real[:]
        flat = torch.from_numpy(shown)
        self._memory.setdefault(flat.data_ptr(), Memory(None, real))
        weakref.finalize(shown, room.append, real)
        return flat.view(like.dtype).as_strided(like.shape, like.stride())

    def fetched(self, tensor: Tensor) -> Tensor:
        """A copy in host memory."""
        if not tensor.numel():
            return tensor.clone()
        array = _aligned(tensor.numel() * tensor.element_size())
        flat = torch.from_numpy(array)
        self._fetched.add(flat.data_ptr())
        weakref.finalize(array, self._fetched.discard, flat.data_ptr())
        return flat.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def _filled(self, queue: FakeQueue, value: Tensor) -> Tensor:
        found = self._new(queue, value)
        _real(self, found).copy_(value)
        return found

    def _free(self, address: int, nbytes: int) -> None:
        with self._lock:
            memory = self._memory.pop(address)
            self.live -= nbytes
            maker = memory.maker
            assert maker is not None
            touched = dict(memory.read)
            if memory.written is not None:
                touched[memory.written[0]] = max(memory.written[1], touched.get(memory.written[0], 0))
            for queue, at in touched.items():
                safe = queue is maker or queue in memory.used
                if not safe and maker.clock.get(queue, 0) < at and self._seen.get(queue, 0) < at:
                    self.wrongs.append(f"memory of {maker.name} is free while {queue.name} may still use it")

    # -- running

    def _whim(self) -> None:
        while self._random.random() < self._eager / (1 + self._eager):
            if not self._step():
                return

    def _step(self) -> bool:
        """Run the next thing of any queue that can go on."""
        able = [q for q in self._queues if q.waiting and (callable(q.waiting[0][1]) or q.waiting[0][1].reached())]
        if not able:
            return False
        queue = self._random.choice(able)
        number, what = queue.waiting.popleft()
        if callable(what):
            with _disable_current_modes(), torch.no_grad():
                what()
            self.ran += 1
        queue.done = number
        return True

    def _run_until(self, there: Callable[[], bool], what: str) -> None:
        while not there():
            if not self._step():
                raise AssertionError(
                    f"the device stands still: {what}; {[(q.name, len(q.waiting)) for q in self._queues]}"
                )

    def wait(self, mark: FakeMark) -> None:
        """Block the host until a mark has passed."""
        with self._lock:
            self._run_until(mark.reached, f"the host waits for {mark.queue.name}")
            self._see(mark)
            self.knows().update(_later(self.knows(), mark.clock))

    def look(self, mark: FakeMark) -> bool:
        """Whether a mark has passed."""
        with self._lock:
            self._whim()
            if mark.reached():
                self._see(mark)
            return mark.reached()

    def drain(self) -> None:
        """Run everything."""
        with self._lock:
            self._run_until(lambda: not any(q.waiting for q in self._queues), "everything")
            for queue in self._queues:
                self._seen[queue] = queue.count
                self.knows().update(_later(self.knows(), queue.clock))

    def _see(self, mark: FakeMark) -> None:
        self._seen.update(_later(self._seen, mark.clock))

    def put_mark(self, queue: FakeQueue) -> FakeMark:
        """A mark at the end of a queue."""
        with self._lock:
            return FakeMark(self, queue, queue.count, dict(queue.clock))

    def put_wait(self, queue: FakeQueue, mark: FakeMark) -> None:
        """Let a queue go on when a mark has passed."""
        with self._lock:
            queue.clock.update(_later(queue.clock, mark.clock))
            queue.count += 1
            queue.clock[queue] = queue.count
            queue.waiting.append((queue.count, mark))

    def put_use(self, queue: FakeQueue, tensors: Iterable[Tensor]) -> None:
        """Keep memory for a queue."""
        with self._lock:
            for tensor in tensors:
                memory = self._of(tensor)
                if memory is not None:
                    memory.used.add(queue)

    def real(self, tensor: Tensor) -> Tensor:
        """The same part of the memory that ops work on; holding it does not keep the device's memory."""
        memory = self._memory.get(_address(tensor))
        if memory is None or memory.real is None:
            return tensor.detach()
        flat = torch.from_numpy(memory.real).view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class FakeQueue:
    """See ``Queue``."""

    def __init__(self, bench: Bench, name: str) -> None:
        self.name = name
        self.count = 0  # ops and waits that were put in
        self.done = 0  # of them, those that have run
        self.clock: Clock = {}
        self.waiting: deque[tuple[int, Any]] = deque()  # (number, op or mark to wait for)
        self._bench = bench

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        stack = self._bench.stack()
        stack.append(self)
        try:
            with _Launching(self._bench, self):
                yield
        finally:
            stack.pop()

    def mark(self) -> FakeMark:
        return self._bench.put_mark(self)

    def wait(self, mark: Mark | None) -> None:
        if mark is not None:
            assert isinstance(mark, FakeMark), mark
            self._bench.put_wait(self, mark)

    def use(self, tensors: Iterable[Tensor]) -> None:
        self._bench.put_use(self, tensors)


@dataclass(frozen=True, slots=True)
class FakeMark:
    """See ``Mark``."""

    bench: Bench
    queue: FakeQueue
    number: int  # of the last thing before it
    clock: Clock

    def reached(self) -> bool:
        """Whether it has passed, without anybody who learns of it."""
        return self.queue.done >= self.number

    def passed(self) -> bool:
        return self.bench.look(self)

    def wait_on_host(self) -> None:
        self.bench.wait(self)


class FakeDevice:
    """See ``Device``."""

    kind = "fake"
    ahead = True
    replays = True
    where = torch.device("cpu")

    def __init__(self, bench: Bench, rank: int) -> None:
        self._bench = bench
        self._rank = rank
        self._queues: dict[str, FakeQueue] = {}
        self._pool: Pool = {}
        self._lock = threading.Lock()

    def label(self, threads: int) -> str:
        return "fake"

    def prepare_thread(self) -> None:
        pass

    def leave_thread(self) -> None:
        pass

    def queue(self, name: str) -> FakeQueue:
        with self._lock:
            if name not in self._queues:
                self._queues[name] = self._bench.queue(f"{name}@{self._rank}")
            return self._queues[name]

    def here(self) -> Queue:
        stack = self._bench.stack()
        return stack[-1] if stack else self._bench.own()

    def to_device(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        found = []
        for tensor in tensors:
            if not self._bench.is_here(tensor):
                with _disable_current_modes():
                    tensor = tensor.clone()
                tensor = tensor.clone()
            found.append(tensor)
        return found

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        fetch = self.queue(f"fetch {self.here().name}")
        fetch.wait(self.here().mark())
        with fetch.context():
            copies = [tensor.clone() for tensor in tensors]
        fetch.mark().wait_on_host()
        with _disable_current_modes():
            return [self._bench.fetched(copy) for copy in copies]

    def staging(self, nbytes: int) -> Tensor:
        with _disable_current_modes():
            return torch.empty(nbytes, dtype=torch.uint8)

    def capture(
        self, launch: Callable[[], Any], warm: int = 0, *, apart: bool = False
    ) -> tuple[Callable[[], None], Any]:
        with self.queue("capture").context():
            for _ in range(warm):
                launch()
            with self._bench.capturing({} if apart else self._pool) as captured:
                found = launch()
        return lambda: self._bench.again(self._bench.stack()[-1], captured), found

    def synchronize(self) -> None:
        self._bench.drain()


class HostPlane:
    """A plane for host memory: what it does there is done at once, also in a queue's context."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._plane, name)

        def call(*args: Any) -> Any:
            with _disable_current_modes():
                return method(*args)

        return call


def staged(plane: DataPlane, device: Device) -> StagedPlane:
    """A plane of host memory for a fake device."""
    return StagedPlane(HostPlane(plane), device)


class _Launching(TorchDispatchMode):
    """Sends the ops of a thread to a queue."""

    def __init__(self, bench: Bench, queue: FakeQueue) -> None:
        super().__init__()
        self._bench = bench
        self._queue = queue

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._bench.launch(self._queue, func, args, kwargs or {})


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _aligned(nbytes: int) -> Any:
    """Memory as torch aligns it: kernels add in another order where it is not."""
    room = np.empty(nbytes + 64, dtype=np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + nbytes]


def _later(one: Clock, other: Clock) -> Clock:
    return {queue: at for queue, at in other.items() if at > one.get(queue, 0)}


def _aliases(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Tensor], bool]:
    """The tensors that an op writes, and whether it only looks at memory in another way."""
    written: list[Tensor] = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[at] if at < len(args) else None)
            written += [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
    returns = func._schema.returns
    views = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return written, views


def _fresh(func: Any) -> bool:
    """Whether an op returns something that is none of its operands."""
    return any(r.alias_info is None for r in func._schema.returns)


def _returned(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What an op in place returns: its own operand."""
    if not func._schema.returns:
        return None
    wanted = [r.alias_info.before_set for r in func._schema.returns]
    found = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set in wanted:
            found.append(kwargs.get(argument.name, args[at] if at < len(args) else None))
    return found[0] if len(found) == 1 else tuple(found)


def _meta(tree: Any) -> Any:
    def meta(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return torch.device("meta") if isinstance(value, torch.device) else value

    return pytree.tree_map(meta, tree)


def _real(bench: Bench, tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, bench.real, tree)
