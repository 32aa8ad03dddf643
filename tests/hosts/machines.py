"""What a test asks of a host of its cluster: to run programs, to fail, and to come back; and what runs on one."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

LIMIT = 100.0  # seconds after which a test is taken to hang


class Host(Protocol):
    """One machine with an address of its own, or what behaves like one."""

    name: str
    folder: str  # that programs on it can write to, and no other host sees

    @property
    def hostname(self) -> str:
        """As it calls itself."""

    @property
    def address(self) -> str:
        """In the cluster's network."""

    def command(self, *arguments: str, env: Mapping[str, str]) -> list[str]:
        """The command of this machine that runs a program there."""

    def network(self) -> list[str]:
        """What stands before a command of this machine that is to see the host's network."""

    def adopt(self, card: str) -> None:
        """Take a network card of this machine into the host's network."""

    def read(self, path: str) -> str:
        """A file of the host; empty where there is none."""

    def write(self, path: str, text: str) -> None:
        """Make a file of the host, and its folders."""

    def alias(self, name: str, address: str) -> None:
        """From now on the host takes a name for this address."""

    def pause(self) -> None:
        """Stop everything on it; its kernel goes on to answer."""

    def resume(self) -> None:
        """Let it go on."""

    def kill(self) -> None:
        """End everything on it at once, as when it loses its power."""

    def cut(self) -> None:
        """Pull its network cable."""

    def heal(self) -> None:
        """Put the cable in again."""

    def renew(self) -> None:
        """Make it as it was at first, with nothing running."""

    def left(self) -> list[str]:
        """The command lines of the ranks and launchers that run on it."""


class Running:
    """A program on a host, and what it prints."""

    def __init__(self, command: Sequence[str], out: Path) -> None:
        self._out = out.open("w+")
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._out, stderr=subprocess.STDOUT, start_new_session=True
        )

    @property
    def output(self) -> str:
        """All of it so far."""
        return Path(self._out.name).read_text(errors="replace")

    def wait(self, limit: float = LIMIT) -> int:
        """The exit status.  Raises AssertionError, with the output, where it does not end in time."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {limit:g} s:\n{self.output}") from None

    def until(self, text: str, limit: float = LIMIT) -> None:
        """Wait until it has printed a text; AssertionError where it ends without."""
        self.holds(lambda: text in self.output, f"{text!r} to be printed", limit)

    def holds(self, there: Callable[[], bool], what: str, limit: float = LIMIT) -> None:
        """Wait until something is so, while the program runs."""
        deadline = time.monotonic() + limit
        while not there():
            ended = self.process.poll() is not None
            assert not ended or there(), f"ended while {what} was awaited:\n{self.output}"
            assert time.monotonic() < deadline, f"{what} was awaited for {limit:g} s:\n{self.output}"
            time.sleep(0.05)

    def end(self) -> None:
        """Kill it where it still runs."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(LIMIT)
        self._out.close()


def run(*command: str) -> str:
    """What a command of this machine prints; raises CalledProcessError with it where the command fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr or done.stdout}")
    return done.stdout


def is_ours(command: str) -> bool:
    """Whether a command line is that of a rank or a launcher."""
    return "actorflow" in command and (" run " in command or "actorflow.runtime" in command)
