"""Runs of the real launcher."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from cluster.ranks import LIMIT


class Run:
    """One launcher of a script and what became of it; ``python`` runs it, and see ``warm``."""

    def __init__(
        self,
        folder: Path,
        script: Path,
        *arguments: str,
        env: dict[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        self.script = script
        self._out = (folder / f"{os.urandom(4).hex()}.out").open("w+")
        self.process = subprocess.Popen(
            [python, "-m", "actorflow", "run", str(script), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(env or {})},
        )

    def wait(self, limit: float = LIMIT) -> int:
        """The exit status; raises subprocess.TimeoutExpired after ``limit`` seconds."""
        return self.process.wait(limit)

    def until(self, there: Callable[[], bool]) -> None:
        """Wait until something is so, while the run goes on."""
        deadline = time.monotonic() + LIMIT
        while not there():
            assert time.monotonic() < deadline, self.output
            assert self.process.poll() is None, self.output
            time.sleep(0.02)

    def kill(self) -> None:
        """End the launcher at once, as when its host loses its power; its ranks end with it."""
        self.process.kill()
        self.process.wait(LIMIT)

    def wait_for(self, paths: Sequence[Path]) -> list[str]:
        """What the run's ranks have written to these files, once all are there; they have to be renamed into place."""
        self.until(lambda: all(path.exists() for path in paths))
        return [path.read_text() for path in paths]

    @property
    def output(self) -> str:
        """What the terminal shows."""
        self._out.seek(0)
        return self._out.read()

    def ranks_left(self) -> list[int]:
        """The processes of ranks that still run."""
        found = psutil.process_iter(["cmdline"])
        return [process.pid for process in found if str(self.script) in " ".join(process.info["cmdline"] or ())]
