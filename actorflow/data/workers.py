"""Read batches ahead of the script in worker processes, which are those of torch's ``DataLoader``."""

from __future__ import annotations

import collections
import ctypes
import gc
import math
import multiprocessing
import os
import queue
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from actorflow.data.batch_slots import BatchSlots, Room, is_plain
from actorflow.data.reading import BatchTemplate, Doing, ReadFailure, ReadRequest, raised
from actorflow.support import background
from actorflow_compiler.core.errors import DataError
from actorflow_compiler.core.torch_internals import tell_worker

__all__ = ["ReadAhead", "Reader", "WorkerOptions", "in_a_worker", "map_in_workers"]

_PR_SET_PDEATHSIG = 1  # Linux: the signal that this process gets when the thread that made it ends


class Reader(Protocol):
    """What reads rows: in a worker, or in the script's own process."""

    template: BatchTemplate | None  # what batches look like; None: not known yet

    def read(self, request: ReadRequest, doing: Doing | None = None, room: Room | None = None) -> Any | ReadFailure:
        """The rows of each tensor of a batch, or why they cannot be read.

        ``doing[1]`` is set to the place in the epoch of the row that is being read; tensors may be in ``room``.
        """


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How batches are read ahead; the names are those of torch's ``DataLoader``."""

    workers: int = 0  # processes; 0: the script's own process reads, when a batch is needed
    prefetch: int = 2  # batches that are read ahead
    pin_memory: bool = False
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None
    timeout: float = 0.0  # seconds that one batch may take; 0: no limit

    @property
    def ahead(self) -> int:
        """How many batches are under way at a time."""
        return self.workers * max(1, -(-self.prefetch // self.workers)) if self.workers else 0


class ReadAhead:
    """Requests that workers read in the order in which they were added, a few at a time.

    ``begin`` starts with some requests, of which there are as many as may be under way (``options.ahead``) or all that
    there will be; before the result of a request is wanted, ``add`` must have been called for the one that is so many
    behind it, if there is one.  All methods are for the script's thread; results are set by another.
    """

    def __init__(self, reader: Reader, options: WorkerOptions, name: str) -> None:
        self._options, self._name = options, name
        self._doing = torch.full((options.workers, 3), -1)  # of each worker: epoch, place of the row, process
        self._doing.share_memory_()  # type: ignore[no-untyped-call]
        self._requests: collections.deque[ReadRequest | None] = collections.deque()
        self._requested = _Requested(reader, self._doing)
        with _without_advice():
            self._loader: DataLoader[Any] = DataLoader(
                self._requested,
                batch_size=None,
                sampler=_Stream(self._requests, self._requested),
                num_workers=options.workers,
                collate_fn=_as_it_is,
                pin_memory=options.pin_memory,
                timeout=options.timeout,
                worker_init_fn=_Init(options, _forker()),
                multiprocessing_context=options.multiprocessing_context,
                generator=torch.Generator(),
                prefetch_factor=options.ahead // options.workers,
                persistent_workers=True,
            )
        self._results: Iterator[Any] | None = None
        self._pending: collections.deque[tuple[ReadRequest | None, Future[Any]]] = collections.deque()  # in order
        self._asked: set[Future[Any]] = set()  # results that are wanted
        self._gone: ReadFailure | None = None  # a worker has ended
        self._owner: weakref.ref[Any] | None = None  # what the requests are for
        self._processes: Sequence[BaseProcess] = ()
        self._losing = threading.Lock()
        self._reading = threading.Lock()  # held while a result is waited for
        self._wanted: queue.SimpleQueue[Future[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended = _Bell()

    def begin(self, owner: object) -> None:
        """Forget what was requested before and is not wanted, and start with what is added until ``start``.

        The futures of what is forgotten are cancelled.
        """
        with self._reading:
            while self._gone is None and any(future in self._asked for _, future in self._pending):
                self._next()
            for _, future in self._pending:
                future.cancel()
            self._requests.clear()
            self._pending.clear()
            self._asked.clear()
            self._owner = weakref.ref(owner)

    @property
    def owner(self) -> object:
        """What ``begin`` was called with last, while there is such."""
        return None if self._owner is None else self._owner()

    def add(self, request: ReadRequest | None) -> Future[Any]:
        """Have this read, too; the result is a failure or what the reader returns.  None: nothing is read for it."""
        found: Future[Any] = Future()
        if self._gone is not None:
            found.set_result(self._gone)
            return found
        self._pending.append((request, found))
        self._requests.append(request)
        return found

    def start(self, rows: int) -> None:
        """Let the workers read; they are made at the first time, for batches of so many rows or fewer.

        Larger batches take longer to arrive.  Raises DataError where workers cannot be made.
        """
        with self._reading:
            if self._gone is not None:
                raise self._gone.error(self._name)
            before = {id(process) for process in multiprocessing.active_children()}
            if self._thread is None:
                self._requested.make_slots(rows, self._options.ahead)
            try:
                with _without_advice():
                    self._results = iter(self._loader)
            except Exception as error:
                raise DataError(
                    f"{self._name}: its workers cannot be started: {type(error).__name__}: {error}; pass workers=0, or "
                    f"a dataset and a collate that a process can take over (where it is not forked, they are pickled)"
                ) from error
        if self._thread is None:
            if self._requested.slots is not None:
                self._requested.slots.taken_over()
            self._processes = [one for one in multiprocessing.active_children() if id(one) not in before]
            _quiet({one.pid for one in self._processes if one.pid is not None})
            self._thread = background.start(self._serve, "actorflow data", self.close)
            background.start(self._watch, "actorflow data workers", self._ended.close)

    def read_also(self, request: ReadRequest) -> Future[Any]:
        """Have this read, behind all that was added; the result is set without more being added."""
        found = self.add(request)
        for _ in range(self._options.ahead):  # as many stay under way
            self.add(None)
        self.want(found)
        return found

    def want(self, future: Future[Any]) -> None:
        """Set the result of a request as soon as a worker has it."""
        self._asked.add(future)
        self._wanted.put(future)

    def close(self) -> None:
        """End the threads, and with them the workers; returns at once."""
        self._wanted.put(None)
        self._ended.close()

    def _serve(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            while not wanted.done():
                with self._reading:
                    if self._gone is not None or all(future is not wanted for _, future in self._pending):
                        break
                    self._next()
            del wanted

    def _next(self) -> None:
        """Wait for the result of the first request; the caller holds ``_reading``."""
        assert self._results is not None
        try:
            result = next(self._results, _NOTHING)
            if result is _NOTHING and self._requests:  # all that was under way is here: there is more since then
                self._results = iter(self._loader)
                result = next(self._results, _NOTHING)
            if result is _NOTHING:
                result = ReadFailure("its workers have ended; a later batch was wanted")
        except Exception as error:  # a worker has ended, or a result cannot be sent, or takes too long
            if gone := next((process for process in self._processes if not process.is_alive()), None):
                self._lose(gone)
            result = self._gone or ReadFailure(f"a worker that reads its batches has failed: {error}")
        if self._pending:  # else a worker has ended meanwhile
            future = self._pending.popleft()[1]
            self._asked.discard(future)
            _settle(future, result)

    def _watch(self) -> None:
        """Let all requests fail as soon as a worker has ended."""
        sentinels = {process.sentinel: process for process in self._processes}
        found = connection.wait([*sentinels, self._ended.fileno()])
        gone = [sentinels[one] for one in found if isinstance(one, int) and one in sentinels]
        if gone and not self._ended.closed:
            self._lose(gone[0])

    def _lose(self, process: BaseProcess) -> None:
        """Let all requests fail, as this worker has ended."""
        with self._losing:
            if self._gone is None:
                self._lost(process)

    def _lost(self, process: BaseProcess) -> None:
        process.join()
        code = process.exitcode
        how = f"exited with status {code}"
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
            how += " (there may be too little memory)" if -code == signal.SIGKILL else ""
        place = next((line for line in self._doing.tolist() if line[2] == process.pid), [-1, -1])
        index = next(
            (
                index
                for request, _ in tuple(self._pending)
                if request is not None and request.epoch == place[0]
                for at, index in zip(request.places, request.indices, strict=True)
                if at == place[1]
            ),
            None,
        )
        known = place[1] >= 0 and index is not None
        what = f" while it read sample {index!r} (row {place[1]} of epoch {place[0]})" if known else ""
        self._gone = ReadFailure(f"worker {process.pid}, which reads its batches, {how}{what}")
        while self._pending:
            with suppress(IndexError):
                _settle(self._pending.popleft()[1], self._gone)


_NOTHING = object()


@contextmanager
def _without_advice() -> Iterator[None]:
    """A context in which torch does not say for each loader anew what it says once, or our errors say."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        warnings.filterwarnings("ignore", message="Got pickle error")  # the error says it
        yield


def _settle(future: Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


class _Bell:
    """Something that ``connection.wait`` can wait for, and that is ready when it is closed."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self.closed = False

    def fileno(self) -> int:
        return self._read

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            os.write(self._write, b".")  # workers have inherited it: closing alone ends nothing
            os.close(self._write)

    def __del__(self) -> None:
        self.close()
        os.close(self._read)


def _forker() -> int:
    """This process, if workers that it forks now are to end with it: they end with the thread that forks them."""
    return os.getpid() if threading.current_thread() is threading.main_thread() else 0


_quieted: set[int] = set()  # workers whose end is told by their source


def _quiet(pids: set[int]) -> None:
    """Keep torch from raising an error of its own in the script, wherever that is, when one of these ends."""
    if threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(signal.SIGCHLD)
    _quieted.update(pids)
    if not callable(handler) or getattr(handler, "of_actorflow", False):
        return

    def handle(number: int, frame: Any) -> None:
        try:
            handler(number, frame)
        except RuntimeError as error:
            if not any(str(pid) in str(error) for pid in _quieted):
                raise

    handle.of_actorflow = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGCHLD, handle)


class _Stream(Sampler["_Order | None"]):
    """The requests so far, and later those that have been added since."""

    def __init__(self, requests: collections.deque[ReadRequest | None], requested: _Requested) -> None:
        self._requests, self._requested = requests, requested

    def __iter__(self) -> Iterator[_Order | None]:
        return _Orders(self._requests, self._requested)


class _Orders(Iterator["_Order | None"]):
    """Unlike a generator, it goes on after its end when there are more."""

    def __init__(self, requests: collections.deque[ReadRequest | None], requested: _Requested) -> None:
        self._requests, self._requested = requests, requested

    def __next__(self) -> _Order | None:
        with suppress(IndexError):
            request = self._requests.popleft()
            slots = self._requested.slots
            return None if request is None else (request, None if slots is None or not request.leaves else slots.take())
        raise StopIteration


_Order = tuple[ReadRequest, int | None]
"""What a worker is told: a request, and the slot for it; None: there is no free one."""


class _ForWorkers(Dataset[Any]):
    """A dataset of torch's workers, of which the user's code sees the dataset that it reads."""

    def __init__(self, users: Any) -> None:
        self.users = users
        self.failure: ReadFailure | None = None  # why this worker can read nothing


class _Requested(_ForWorkers):
    """The dataset of torch's workers, whose indices are requests."""

    def __init__(self, reader: Reader, doing: Tensor) -> None:
        super().__init__(getattr(reader, "dataset", None))
        self._reader, self._doing = reader, doing
        self.slots: BatchSlots | None = None

    def make_slots(self, rows: int, ahead: int) -> None:
        """Make slots for batches of so many rows, of which ``ahead`` are under way at a time."""
        template = self._reader.template
        if template is not None and not template.why_whole:
            forms = [template.leaves, *(leaves for _, leaves in template.buckets)]
            sizes = [[rows * math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves] for leaves in forms]
            self.slots = BatchSlots.of(max(sizes, key=sum), ahead)

    def __getitem__(self, order: _Order | None) -> Any:
        if order is None:
            return None
        request, slot = order
        room = None if slot is None or self.slots is None else self.slots.room(slot)
        found = self._found(request, room)
        if type(found) is list:
            values = found if room is None else [room.put(one) for one in found]
            found = [_Inline(one) if _is_small(one) else one for one in values]
        return found if room is None else room.sent(found)

    def _found(self, request: ReadRequest, room: Room | None) -> Any:
        if self.failure is not None:
            return self.failure
        worker = get_worker_info()
        line: Doing = self._doing.numpy()[0 if worker is None else worker.id]
        line[0], line[2] = request.epoch, os.getpid()
        found = self._reader.read(request, line, room)
        line[1] = -1
        return found


class _Inline:
    """A small tensor on its way out of a worker; what arrives is a tensor.

    torch sends each tensor as a file in shared memory, for which two processes make a connection: half a millisecond.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        tensor = self._tensor.contiguous()
        return _tensor_of, (tensor.view(-1).view(torch.uint8).numpy().tobytes(), tensor.dtype, tuple(tensor.shape))


_SMALL = 1 << 14  # bytes; a pipe takes 64 KiB at a time


def _is_small(value: Any) -> bool:
    """Whether a value is a tensor that ``_Inline`` can send."""
    return is_plain(value) and value.numel() * value.element_size() <= _SMALL


def _tensor_of(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


class _Init:
    """What a worker does first."""

    def __init__(self, options: WorkerOptions, parent: int) -> None:
        self._users, self._workers, self._parent = options.worker_init_fn, options.workers, parent

    def __call__(self, worker: int) -> None:
        if sys.platform == "linux":  # else torch's workers look for their parent every few seconds
            with suppress(OSError, AttributeError):
                if os.getppid() == self._parent:
                    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        gc.freeze()  # what the parent has left of other loaders is not for a worker to end
        info = get_worker_info()
        ours: Any = None if info is None else info.dataset
        tell_worker(ours.users, self._workers)
        if self._users is not None:
            try:
                self._users(worker)
            except Exception as error:
                ours.failure = ReadFailure(f"worker_init_fn of worker {worker} raised {raised(error)}")


def _as_it_is(result: Any) -> Any:
    return result


def in_a_worker(work: Callable[[], Any], dataset: Any, options: WorkerOptions, name: str) -> Any:
    """What ``work`` returns in a worker that is made for it: the script's process opens no file of the dataset.

    Raises DataError where a worker cannot be made, or ends.
    """
    once: DataLoader[Any] = DataLoader(
        _Once(work, dataset),
        batch_size=None,
        sampler=[0],
        num_workers=1,
        collate_fn=_as_it_is,
        worker_init_fn=_Init(options, _forker()),
        multiprocessing_context=options.multiprocessing_context,
        generator=torch.Generator(),
    )
    try:
        with _without_advice():
            found = next(iter(once))
    except Exception as error:
        raise DataError(
            f"{name}: its first samples cannot be read in a worker: {type(error).__name__}: {error}; with workers=0 "
            f"the script's own process reads"
        ) from error
    if isinstance(found, ReadFailure):
        raise found.error(name)
    return found


class _Once(_ForWorkers):
    """The dataset of a worker that does one thing."""

    def __init__(self, work: Callable[[], Any], users: Any) -> None:
        super().__init__(users)
        self._work = work

    def __getitem__(self, _: int) -> Any:
        return self.failure or self._work()


def map_in_workers(
    work: Callable[[int], Any], items: Sequence[int], *, dataset: Any, options: WorkerOptions, name: str
) -> Iterator[Any]:
    """What ``work`` returns for each item, in order, in workers that are made for it.

    Raises DataError where workers cannot be made, or one ends.
    """
    many: DataLoader[Any] = DataLoader(
        _Mapped(work, items, dataset),
        batch_size=_AT_A_TIME,
        num_workers=options.workers,
        collate_fn=_as_it_is,
        worker_init_fn=_Init(options, _forker()),
        multiprocessing_context=options.multiprocessing_context,
        generator=torch.Generator(),
    )
    try:
        for found in many:
            for one in found:
                if isinstance(one, ReadFailure):
                    raise one.error(name)
                yield one
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"{name}: its samples cannot be read in workers: {type(error).__name__}: {error}; with workers=0 the "
            f"script's own process reads"
        ) from error


_AT_A_TIME = 32  # items that a worker is told of at once


class _Mapped(_ForWorkers):
    """The dataset of workers that do the same with each item."""

    def __init__(self, work: Callable[[int], Any], items: Sequence[int], users: Any) -> None:
        super().__init__(users)
        self._work, self._items = work, items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, at: int) -> Any:
        return self.failure or self._work(self._items[at])
