"""Ranks in this process that have joined a run."""

from __future__ import annotations

from cluster.conftest import joined, ranks, settings

__all__ = ["joined", "ranks", "settings"]
