"""What a part found goes in; lines for ``benchmarks/gpu.py`` leave."""

from __future__ import annotations

import json


def tell(what: str, found: str, target: str = "", holds: bool | None = None) -> None:
    """Print one line; ``holds`` is None where nothing is claimed or it cannot be measured here."""
    print(json.dumps({"what": what, "found": found, "target": target, "holds": holds}), flush=True)
