"""Let the ranks of node 0 know that nodes wait to be taken in: a file beside their launcher's socket."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

__all__ = ["nodes_wait", "say_whether_nodes_wait"]


def nodes_wait(launcher: str) -> bool:
    """Whether nodes wait, as the launcher with this socket has last said."""
    return bool(launcher) and _file(launcher).exists()


def say_whether_nodes_wait(launcher: str, wait: bool) -> None:
    """Let the ranks of the launcher with this socket know whether nodes wait; does nothing once they have ended."""
    with suppress(OSError):
        if wait:
            _file(launcher).touch()
        else:
            _file(launcher).unlink(missing_ok=True)


def _file(launcher: str) -> Path:
    return Path(launcher).with_name("nodes-wait")
