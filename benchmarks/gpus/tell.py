"""Print what a part has found, as lines that ``benchmarks/gpu.py`` reads."""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


def tell(what: str, found: str, target: str = "", holds: bool | None = None) -> None:
    """Print one line; ``holds`` is None where nothing is claimed or it cannot be measured here."""
    print(json.dumps({"what": what, "found": found, "target": target, "holds": holds}), flush=True)


@contextmanager
def told(what: str) -> Iterator[None]:
    """Print what fails inside as a claim that does not hold; what comes after goes on."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        if isinstance(error, subprocess.CalledProcessError):
            print(error.stderr[-2000:], file=sys.stderr)
        lines = str(error).splitlines() or [""]
        tell(what, f"fails: {type(error).__name__}: {lines[0][:120]}", "no failure", False)
