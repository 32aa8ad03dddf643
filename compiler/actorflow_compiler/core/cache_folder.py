"""Find the cache folder, in which a run keeps plans, costs and kernels for later runs."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "cache_folder"]

CACHE_VARIABLE = "ACTORFLOW_CACHE"  # environment variable: the folder; empty or 0: nothing is kept


def cache_folder() -> Path | None:
    """``$ACTORFLOW_CACHE``, else ``actorflow`` in the user's cache folder; None if nothing is to be kept."""
    given = os.environ.get(CACHE_VARIABLE)
    try:
        if given is not None:
            return Path(given).expanduser() if given not in ("", "0") else None
        base = os.environ.get("XDG_CACHE_HOME", "")
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "actorflow"
    except RuntimeError:  # no home
        return None
