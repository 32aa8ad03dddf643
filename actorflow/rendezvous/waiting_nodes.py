"""What node 0's launcher lets its ranks know of other nodes, in files beside its socket: some wait, or one is lost."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

__all__ = ["lost_node", "nodes_wait", "say_node_is_lost", "say_whether_nodes_wait"]


def nodes_wait(launcher: str) -> bool:
    """Whether nodes wait to be taken in, as the launcher with this socket has last said."""
    return bool(launcher) and _file(launcher, "nodes-wait").exists()


def say_whether_nodes_wait(launcher: str, wait: bool) -> None:
    """Let the ranks of the launcher with this socket know whether nodes wait; does nothing once they have ended."""
    with suppress(OSError):
        if wait:
            _file(launcher, "nodes-wait").touch()
        else:
            _file(launcher, "nodes-wait").unlink(missing_ok=True)


def lost_node(launcher: str) -> str:
    """Which node of the attempt has lost its launcher, as a text; empty if none has."""
    try:
        return _file(launcher, "node-lost").read_text() if launcher else ""
    except OSError:
        return ""


def say_node_is_lost(launcher: str, which: str) -> None:
    """Let the ranks of the launcher with this socket know that a node of the attempt has lost its launcher."""
    with suppress(OSError):
        file = _file(launcher, "node-lost")
        file.with_suffix(".part").write_text(which)
        file.with_suffix(".part").rename(file)


def _file(launcher: str, name: str) -> Path:
    return Path(launcher).with_name(name)
