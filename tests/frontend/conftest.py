"""Launchers in other processes."""

from __future__ import annotations

from cluster.conftest import start

__all__ = ["start"]
