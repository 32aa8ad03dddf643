"""Name the library and version that moves tensors between ranks here (NCCL or Gloo), without importing torch."""

from __future__ import annotations

import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")


def communication() -> str:
    """The communication library and its version: "NCCL 2.27.3 and CUDA 12.8 of torch 2.13.0+cu128", or "Gloo of …".

    Ranks whose libraries differ may wait for each other for ever, so this is compared when they join.
    """
    version, cuda = _torch()
    for package in _NCCL if cuda else ():
        try:
            return f"NCCL {metadata.version(package)} and CUDA {cuda} of torch {version}"
        except metadata.PackageNotFoundError:
            continue
    return f"{f'NCCL of CUDA {cuda}' if cuda else 'Gloo'} of torch {version}"


def _torch() -> tuple[str, str]:
    """Torch's full version and its CUDA version (empty without CUDA), read from files without importing torch."""
    spec = find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        try:
            text = Path(folder, "version.py").read_text()
        except OSError:
            continue
        found = {m[1]: m[2] for m in re.finditer(r"^(\w+)\b[^=\n]*= *['\"]([^'\"]*)['\"]", text, re.MULTILINE)}
        return found.get("__version__", "?"), found.get("cuda", "")
    return "?", ""
