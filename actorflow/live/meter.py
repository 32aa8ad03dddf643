"""Count training steps as they are done: progress, speed, and the latest loss."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from actorflow_compiler.core.units import seconds_text

__all__ = ["StepMeter", "MeterReading"]

WINDOW = 10.0  # seconds over which the speed is averaged


class IssuedCall(Protocol):
    """A call that was issued."""

    @property
    def done(self) -> bool:
        """Whether the call has ended."""


@dataclass(frozen=True, slots=True)
class MeterReading:
    """The progress of a run."""

    steps: int  # training steps that are done
    total: int | None  # steps in all; None: not known
    steps_per_s: float
    samples_per_s: float
    loss: float | None
    elapsed: float  # seconds since the first step was issued

    @property
    def left(self) -> float | None:
        """Estimated seconds until all steps are done; None if it is not known."""
        if self.total is None or not self.steps_per_s:
            return None
        return max(0, self.total - self.steps) / self.steps_per_s

    def __str__(self) -> str:
        """One line, such as: step 20 of 100, 3.1 steps/s, 198 samples/s, loss 0.213, 25.8 s left."""
        of = "" if self.total is None else f" of {self.total}"
        parts = [f"step {self.steps}{of}"]
        if self.steps_per_s:
            parts.append(f"{_number(self.steps_per_s)} steps/s")
        if self.samples_per_s:
            parts.append(f"{_number(self.samples_per_s)} samples/s")
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4g}")
        parts.append(f"{seconds_text(self.left)} left" if self.left else f"{seconds_text(self.elapsed)} so far")
        return ", ".join(parts)


def _number(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


class StepMeter:
    """Counts training steps as they are done.  Any thread may call its methods.

    Calls end in order, so only the oldest unfinished calls are checked.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.total: int | None = None
        self.issued = 0  # number of calls
        self._now = now
        self._lock = threading.Lock()
        self._open: deque[tuple[IssuedCall, int, Callable[[], float | None]]] = deque()
        self._begin: float | None = None
        self._steps = self._samples = 0
        self._loss: float | None = None
        self._marks: deque[tuple[float, int, int]] = deque()  # (when, steps, samples) of earlier looks

    def step(self, call: IssuedCall, samples: int, loss: Callable[[], float | None]) -> None:
        """Note that a call was issued; ``loss`` is called when it is done, and returns its loss or None."""
        with self._lock:
            self.issued += 1
            if self._begin is None:
                self._begin = self._now()
                self._marks.append((self._begin, 0, 0))
            self._open.append((call, samples, loss))

    def look(self) -> MeterReading | None:
        """Count the calls that are done and return the progress; None before the first call."""
        with self._lock:
            if self._begin is None:
                return None
            now = self._now()
            while self._open and self._open[0][0].done:
                _, samples, loss = self._open.popleft()
                self._steps += 1
                self._samples += samples
                if not self._open or not self._open[0][0].done:  # only the latest loss is read
                    found = loss()
                    self._loss = self._loss if found is None else found
            while len(self._marks) > 1 and self._marks[1][0] <= now - WINDOW:
                self._marks.popleft()
            then, steps, samples = self._marks[0]
            over = now - then
            if now > self._marks[-1][0]:
                self._marks.append((now, self._steps, self._samples))
            return MeterReading(
                self._steps,
                self.total,
                (self._steps - steps) / over if over > 0 else 0.0,
                (self._samples - samples) / over if over > 0 else 0.0,
                self._loss,
                now - self._begin,
            )
