"""Files by which node 0's launcher tells its ranks that nodes wait to join, or that one was lost."""

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
    """What has happened to a node of the attempt whose ranks are gone, as a text; empty if there is none."""
    try:
        return _file(launcher, "node-lost").read_text() if launcher else ""
    except OSError:
        return ""


def say_node_is_lost(launcher: str, what: str) -> None:
    """Let the ranks of the launcher with this socket know what has happened to a node whose ranks are gone."""
    with suppress(OSError):
        file = _file(launcher, "node-lost")
        file.with_suffix(".part").write_text(what)
        file.with_suffix(".part").rename(file)


def _file(launcher: str, name: str) -> Path:
    return Path(launcher).with_name(name)
