"""Let groups of processes run in turns, one at a time, and record the time, CPU time and loss of each turn.

The ranks of all groups are up during the whole run and wait in a socket for their turn, which costs no CPU time.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any, TypeVar

import psutil

T = TypeVar("T")

PATIENCE = 300.0  # seconds for a group to start, to prepare a contender, or to end a turn
GRACE = 30.0  # seconds for its processes to end, or to answer where one of them has failed
AGREE = 1e-4  # how far the losses of contenders may differ


def _cpu_clock(pid: int) -> int:
    """The kernel's clock of the CPU time of a process, as Linux's ``clock_getcpuclockid`` numbers it.

    It counts nanoseconds.  What psutil reads counts the ticks that meet a process: one that wakes up for moments, at
    times that ticks have, too, is met far too often.
    """
    return (~pid << 3) | 2


class Lost(Exception):
    """A group of processes cannot go on."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One contender's turn."""

    seconds: float  # from the word to go until the last rank was done
    cpu: float  # CPU seconds, all ranks together
    loss: float  # of the last step
    everything: float = 0.0  # CPU seconds of all processes of the group, its launcher's too; counted in 10 ms


# --- on the ranks ---

Steps = Callable[[int], "float | None"]
"""Takes some training steps and waits for their end; the last step's loss, on a rank that has it."""


Notes = Callable[[], Mapping[str, Any]]
"""What a rank tells the referee of a contender that has taken its first steps."""


def take_turns(address: str, rank: int, make: Callable[[str], tuple[Steps, Notes]]) -> None:
    """Serve the referee at ``address`` until it says goodbye; ``make`` takes the name of a contender."""
    contenders: dict[str, Steps] = {}
    notes: dict[str, Notes] = {}
    with Client(address) as referee:
        referee.send(rank)
        rested = time.process_time(), time.perf_counter()
        while True:
            what, name, steps = referee.recv()
            idle = time.process_time() - rested[0], time.perf_counter() - rested[1]
            if what == "end":
                return
            if what == "make":
                try:
                    contenders[name], notes[name] = make(name)
                    contenders[name](steps)  # allocates and warms up
                    referee.send(("made", dict(notes[name]()), idle))
                except Exception as error:
                    referee.send(("failed", f"{type(error).__name__}: {error}", idle))
            elif what == "notes":
                referee.send(("noted", dict(notes[name]()), idle))
            else:
                used = time.process_time()
                loss = contenders[name](steps)
                referee.send(("done", (time.process_time() - used, loss), idle))
            rested = time.process_time(), time.perf_counter()


# --- on the referee ---


@dataclass(slots=True)
class Group:
    """Processes that take their turns together."""

    name: str
    process: subprocess.Popen[bytes]
    ranks: list[Connection]  # by rank
    log: Path
    rest: list[tuple[float, float]] = field(default_factory=list)  # CPU seconds and seconds between turns, by rank
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)  # contender → what its ranks say of it

    def make(self, name: str, steps: int) -> str:
        """Prepare a contender and take its first steps; why it does not run, or nothing."""
        answers = self._answers("make", name, steps)
        failed = [text for what, text, _ in answers if what == "failed"]
        if not failed:
            self.notes[name] = {k: v for _, notes, _ in answers for k, v in notes.items()}
        return failed[0] if failed else ""

    def turn(self, name: str, steps: int) -> Turn:
        """Let a contender take some steps."""
        used, start = self.cpu(), time.perf_counter()
        answers = self._answers("turn", name, steps)
        seconds = time.perf_counter() - start
        done = [result for _, result, _ in answers]
        (loss,) = {loss for _, loss in done if loss is not None}
        return Turn(seconds, sum(cpu for cpu, _ in done), loss, self.cpu() - used)

    def told(self, name: str) -> list[dict[str, Any]]:
        """What each rank says now of a contender, by rank."""
        return [notes for _, notes, _ in self._answers("notes", name, 0)]

    def cpu(self) -> float:
        """CPU seconds so far of all its processes."""
        found = 0.0
        started = psutil.Process(self.process.pid)
        for process in [started, *started.children(recursive=True)]:
            with suppress(OSError):  # it has ended
                found += time.clock_gettime(_cpu_clock(process.pid))
        return found

    def close(self) -> None:
        """End the processes."""
        for rank in self.ranks:
            try:
                rank.send(("end", "", 0))
            except OSError:
                continue
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                self.process.wait(GRACE)
                break
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, number)  # a launcher that is told to end first ends its ranks
        if not self.process.wait():
            shutil.rmtree(self.log.parent)

    def _answers(self, *message: Any) -> list[Any]:
        answers = self.ask(*message)
        self.rest += [idle for *_, idle in answers]
        return answers

    def ask(self, *message: Any) -> list[Any]:
        """Send a message to all ranks; their answers, by rank.

        Raises Lost where a rank ends or does not answer in time; after one that failed there is little, as others may
        wait for it for ever, and why it failed is told.
        """
        for number, rank in enumerate(self.ranks):
            try:
                rank.send(message)
            except OSError as error:
                raise Lost(f"{self.name}, rank {number}: ended before {message}; see {self.log}") from error
        end, failed = time.monotonic() + PATIENCE, ""
        answers: dict[int, Any] = {}
        while len(answers) < len(self.ranks):
            left = {rank: number for number, rank in enumerate(self.ranks) if number not in answers}
            ready = wait(list(left), max(0.0, end - time.monotonic()))
            if not ready:
                silent = f"{self.name}, ranks {sorted(left.values())}: no answer to {message}; see {self.log}"
                raise Lost(f"{silent}\n{failed}".strip())
            for rank, number in left.items():
                if rank not in ready:
                    continue
                try:
                    answers[number] = answer = rank.recv()
                except (EOFError, ConnectionError) as error:
                    ended = f"{self.name}, rank {number}: ended during {message}; see {self.log}"
                    raise Lost(f"{ended}\n{failed}".strip()) from error
                if isinstance(answer, tuple) and answer[0] == "failed" and not failed:
                    failed, end = f"rank {number} failed: {answer[1]}", min(end, time.monotonic() + GRACE)
        return [answers[number] for number in range(len(self.ranks))]

    @property
    def restless(self) -> float:
        """The share of a core that its ranks took while others had their turns."""
        return len(self.ranks) * sum(cpu for cpu, _ in self.rest) / sum(clock for _, clock in self.rest)


def start(name: str, ranks: int, command: Callable[[str], Sequence[str]], environment: Mapping[str, str]) -> Group:
    """Start ``command(address)``, whose ranks come to ``address``; raises Lost where they do not."""
    folder = Path(tempfile.mkdtemp(prefix="benchmark-"))
    address, log = str(folder / "referee"), folder / "log"
    with Listener(address) as listener, log.open("wb") as output:
        listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
        process = subprocess.Popen(
            command(address),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        found: dict[int, Connection] = {}
        end = time.monotonic() + PATIENCE
        while len(found) < ranks:
            if process.poll() is not None or time.monotonic() > end:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                raise Lost(f"{name}: {len(found)} of {ranks} ranks came; see {log}\n{log.read_text()[-2000:]}")
            try:
                connection = listener.accept()
            except TimeoutError:
                continue
            found[connection.recv()] = connection
    return Group(name, process, [found[r] for r in range(ranks)], log)


def gather(
    launch: Callable[[], Group], names: Sequence[str], steps: int, groups: list[Group]
) -> tuple[dict[str, Group], dict[str, str]]:
    """Start a side and prepare its contenders: the group of each, and of those that do not run, why."""
    without: dict[str, str] = {}
    while True:
        left = [name for name in names if name not in without]
        if not left:
            return {}, without
        group = launch()
        groups.append(group)
        for name in left:
            try:
                why = group.make(name, steps)
            except Lost as error:
                why = str(error)
            if why:
                without[name] = why
                break
        else:
            return dict.fromkeys(left, group), without
        groups.remove(group)  # what failed may have left something behind: start again without it
        group.close()


def play(contenders: Mapping[str, Group], steps: int, rounds: Iterable[int]) -> dict[str, list[Turn]]:
    """Let all take their turns, round after round; raises Lost where their losses differ."""
    names = list(contenders)
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for number in rounds:
        for name in turned(names, number)[:: -1 if number // len(names) % 2 else 1]:
            turns[name].append(contenders[name].turn(name, steps))
        losses = {name: taken[-1].loss for name, taken in turns.items()}
        first = losses[names[0]]
        if not all(abs(loss - first) <= AGREE for loss in losses.values()):  # nan agrees with nothing
            raise Lost("losses differ: " + ", ".join(f"{name} {loss:.6f}" for name, loss in losses.items()))
    return turns


def fitting(rounds: int, end: float) -> Iterator[int]:
    """The numbers of rounds, as long as one more would end in time (of ``monotonic``), and the first in any case."""
    begun = time.monotonic()
    for number in range(rounds):
        now = time.monotonic()
        if number and now + (now - begun) / number > end:
            print(f"\n{number} of {rounds} rounds: there is no time for more")
            return
        yield number


def turned(things: Sequence[T], by: int) -> list[T]:
    """In another order each round."""
    at = by % len(things)
    return [*things[at:], *things[:at]]


__all__ = ["Group", "Lost", "Notes", "Steps", "Turn", "fitting", "gather", "play", "start", "take_turns", "turned"]
