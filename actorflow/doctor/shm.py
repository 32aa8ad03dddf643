"""Check for a small /dev/shm, as Docker gives to containers, and a hint for errors that it may cause."""

from __future__ import annotations

import re

from actorflow.doctor.finding import Finding
from actorflow.doctor.machine_facts import SHM, MachineFacts, shm

ENOUGH = 256 << 20  # bytes; Docker gives 64 MB
MORE = (
    "Start the container with --shm-size=8g, or with --ipc=host, which has its host's (Kubernetes: an emptyDir volume "
    "with medium: Memory at /dev/shm)."
)
_SIGNS = re.compile(r"bus error|shared memory|/dev/shm|no space left on device", re.IGNORECASE)


def small(here: MachineFacts) -> Finding | None:
    """In a container: /dev/shm is as small as Docker makes it."""
    if not here.container or here.shm is None or here.shm >= ENOUGH:
        return None
    return Finding(
        "little shared memory",
        f"{SHM} of this container ({here.container}) holds {here.shm / 1e6:,.1f} MB.",
        "actorflow's own transfers do not use it, but loader workers (DataLoader(num_workers=…)) and NCCL do; they end "
        "with a bus error where it is full.",
        MORE,
        certain=False,
    )


def advice(error: str, found: int | None = None) -> str:
    """A sentence to add to an error that a small /dev/shm may be behind; empty for all others."""
    found = shm() if found is None else found
    if found is None or found >= ENOUGH or not _SIGNS.search(error):
        return ""
    return f"{SHM}, through which loader workers and NCCL pass tensors, holds {found / 1e6:,.1f} MB here. {MORE}"
