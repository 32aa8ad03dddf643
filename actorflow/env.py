"""What this process is in its run: its rank, its host's number, how many there are."""

from __future__ import annotations

from actorflow.runtime.cluster import current

__all__ = ["is_master", "local_rank", "node", "node_count", "rank", "world_size"]


def rank() -> int:
    """This process's number, 0 … ``world_size() - 1``."""
    return current().rank


def world_size() -> int:
    """The number of ranks; 1 under plain ``python``."""
    return current().world


def is_master() -> bool:
    """Whether this is rank 0."""
    return current().rank == 0


def local_rank() -> int:
    """This process's number on its node."""
    return current().settings.local_rank


def node() -> int:
    """The number of this process's node."""
    return current().settings.node


def node_count() -> int:
    """The number of nodes."""
    return current().settings.nnodes
