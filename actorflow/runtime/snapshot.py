"""Copies of this rank's variables as a call leaves them, made while later calls run.

A variable that a later call is about to change is copied by the compute thread, unless the thread that saves is done
with it.  That thread reads the others where they are; on a device that runs ahead, it copies them to the host first, as
soon as it can.  So training stands still for no longer than it takes to copy what the next change overwrites.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from actorflow.devices import Device, Mark
from actorflow.runtime.call import fresh
from actorflow_compiler.core.tensor_bytes import as_bytes

__all__ = ["Cut", "Snapshot"]

Cut = tuple[slice, ...]  # a rectangle of this rank's part of a variable: a slice for each dim


class Snapshot:
    """Copies of rectangles of this rank's variables, as they are after all calls that were issued before it.

    ``cuts`` are the rectangles to copy, by variable.  Any thread may call the methods, but for those of the thread that
    saves, of which there is one.
    """

    def __init__(self, cuts: Mapping[str, Sequence[Cut]], variables: Mapping[str, Tensor], on: Device) -> None:
        self._on = on
        self._changed = threading.Condition()  # guards the attributes below
        # of both: None where nobody reads it any more
        self._left: dict[str, list[Tensor | None]] = {  # not copied yet
            name: [variables[name][cut] for cut in some] for name, some in cuts.items()
        }
        self._copies: dict[str, tuple[list[Tensor | None], Mark | None]] = {}  # on the device if there is a mark
        self._calls = -1  # unfinished calls whose end must come first; -1: the compute thread has not seen it yet
        self._after = -1  # the last of them
        self._marks: list[Mark] = []  # of these calls: once they have passed, the device is done with them
        self._failure: BaseException | None = None

    @property
    def finished(self) -> bool:
        """Whether no call matters to it any more."""
        return self._failure is not None or (not self._left and not self._calls)

    # --- for the compute thread ---

    def begin(self, after: int, calls: int) -> None:
        """Wait for ``calls`` unfinished calls, of which number ``after`` is the last one."""
        with self._changed:
            self._after, self._calls = after, calls
            self._changed.notify_all()

    def ended(self, number: int, marks: Sequence[Mark], lost: BaseException | None) -> None:
        """A call has ended; ``marks`` pass when the device is done with it.  ``lost``: why it was given up."""
        if number > self._after:
            return
        if lost is not None:
            self.fail(lost)
        with self._changed:
            self._calls -= 1
            self._marks += marks
            self._changed.notify_all()

    def before_change(self, number: int, names: Collection[str]) -> None:
        """Copy these variables, if that is still to be done, before call ``number`` changes them."""
        if number > self._after:
            self.keep(names)

    def keep(self, names: Collection[str]) -> None:
        """Copy these variables, if that is still to be done; all calls that may change them before have done so."""
        with self._changed:
            for name in names:
                if name in self._left:
                    self._copy(name)

    # --- for the thread that saves ---

    def begin_to_read(self) -> None:
        """Return when ``read`` may be called; blocks until the calls before the snapshot are done.

        Raises the error of one that was given up, and the worker's failure.
        """
        self._on.prepare_thread()
        with self._changed:
            self._changed.wait_for(lambda: self._calls == 0 or self._failure is not None)
        for mark in self._marks:
            mark.wait_on_host()
        while True:
            with self._changed:  # the compute thread must not change a variable while it is copied
                if self._failure is not None:
                    raise fresh(self._failure)
                if not self._left or not self._on.ahead:
                    return
                name, cuts = self._left.popitem()
                self._copies[name] = self._on_host([None if cut is None else _copied(cut) for cut in cuts]), None

    def read(self, name: str, at: int, start: int, out: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        """Copy bytes of a variable's rectangle number ``at``, from number ``start`` on, in row-major order, to ``out``.

        Raises the worker's failure.
        """
        with self._changed:  # as above
            if self._failure is not None:
                raise fresh(self._failure)
            if name in self._left and not _is_contiguous(self._left[name][at]):
                self._copy(name)
            if name in self._left:
                _read(self._left[name][at], start, out)
                return
            copies, mark = self._copies[name]
        if mark is not None:
            mark.wait_on_host()
            copies = self._on_host(copies)
            with self._changed:
                self._copies[name] = copies, None
        _read(copies[at], start, out)

    def let_go(self, name: str, at: int) -> None:
        """Rectangle number ``at`` of a variable is not read any more."""
        with self._changed:
            held = self._left[name] if name in self._left else self._copies[name][0]
            held[at] = None
            if all(one is None for one in held):
                self._left.pop(name, None)
                self._copies.pop(name, None)

    def fail(self, error: BaseException) -> None:
        """The values cannot be had any more: ``read`` raises this error."""
        with self._changed:
            if self._failure is None:
                self._failure = error
                self._left.clear()
                self._changed.notify_all()

    def _copy(self, name: str) -> None:
        copies = [None if cut is None else _copied(cut) for cut in self._left.pop(name)]
        self._copies[name] = copies, self._on.here().mark() if self._on.ahead else None

    def _on_host(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        found = iter(self._on.to_host([tensor for tensor in tensors if tensor is not None]))
        return [None if tensor is None else next(found) for tensor in tensors]


def _is_contiguous(tensor: Tensor | None) -> bool:
    return tensor is None or tensor.is_contiguous()


def _read(tensor: Tensor | None, start: int, out: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    assert tensor is not None
    out[:] = np.from_dlpack(as_bytes(tensor.detach()))[start : start + len(out)]


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
