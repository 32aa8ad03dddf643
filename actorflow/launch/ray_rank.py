"""The Ray actor that runs the launcher of one device on its node and streams its output.

Nothing here imports torch or Ray: the actor's process stays small, and this module can be read without Ray.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from actorflow.rendezvous.elastic import hold_free_port
from actorflow.rendezvous.settings import Settings

__all__ = ["CHUNK", "RayRank"]

CHUNK = 1 << 16  # bytes of output that travel at once
_DIE_WITH_PARENT = Path(__file__).resolve().parents[1] / "distributed" / "die_with_parent.py"


class RayRank:
    """One device of the run; ``run`` once.  Its processes end with the actor's, however that ends."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._stopped = False

    def where(self, nnodes: int) -> tuple[str, str, int]:
        """This node's name and address, and a free port, which is held in case the master runs on this node."""
        address = str(import_module("ray.util").get_node_ip_address())
        return socket.gethostname(), address, hold_free_port(Settings(nnodes=nnodes, master_host=address).bind_host())

    async def run(
        self, command: Sequence[str], folder: str, variables: Mapping[str, str], dropped: Sequence[str]
    ) -> AsyncIterator[tuple[str, bytes | int]]:
        """Run a command with these variables on top of the node's, without the dropped ones.

        Yields its output as ("stdout", bytes) and ("stderr", bytes), and finally ("ended", exit status).
        """
        env = {name: value for name, value in os.environ.items() if name not in dropped}
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(_DIE_WITH_PARENT), str(os.getpid()), sys.executable, *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            cwd=folder if os.path.isdir(folder) else None,
            env={**env, **variables},
        )
        if self._stopped:
            self.stop()
        said: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(16)
        pipes = {"stdout": process.stdout, "stderr": process.stderr}
        readers = [asyncio.ensure_future(_read(name, pipe, said)) for name, pipe in pipes.items() if pipe is not None]
        open_pipes = len(readers)
        while open_pipes:
            name, data = await said.get()
            if data:
                yield name, data
            else:
                open_pipes -= 1
        yield "ended", await process.wait()

    def stop(self) -> None:
        """Ask the launcher to end its rank and itself."""
        self._stopped = True
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.terminate()


async def _read(name: str, pipe: asyncio.StreamReader, said: asyncio.Queue[tuple[str, bytes]]) -> None:
    """Put the pipe's data into the queue, and an empty piece at its end."""
    while data := await pipe.read(CHUNK):
        await said.put((name, data))
    await said.put((name, b""))
