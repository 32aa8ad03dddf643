"""Seed the random number generators of all ranks alike, so that each makes the same batches, models and numbers."""

from __future__ import annotations

import multiprocessing
import os
import random
from typing import Any

from actorflow.rendezvous.elastic import torch_settings
from actorflow.rendezvous.engines import MASTER_VARIABLE
from actorflow_compiler.core.errors import ClusterError

__all__ = ["seed_alike", "seed_ranks_of_torchs_launcher"]

SEED = 0  # of every random number generator, on every rank
CHOSEN = 2**32  # torch's own seed of a process is drawn from 64 bits: one below this was chosen by the script


def seed_alike() -> None:
    """Seed Python's, NumPy's and torch's generators with the seed that all ranks have."""
    import numpy
    import torch

    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)


def seed_ranks_of_torchs_launcher() -> None:
    """Seed a process that torch's launcher (``torchrun``, or ours like it) has started as one of several ranks.

    Torch has been imported.  What the script has seeded before this package was imported keeps its seeds: all
    generators where it has seeded torch, and NumPy's, and with it Python's, where it has seeded that.
    """
    import numpy
    import torch

    if MASTER_VARIABLE in os.environ or multiprocessing.parent_process() is not None:
        return  # a rank of `actorflow run`, which is seeded already, or a child of a rank
    if torch.initial_seed() < CHOSEN:
        return
    try:
        settings = torch_settings()
    except ClusterError:  # told where the process first needs its peers
        return
    if settings is not None and settings.world > 1:
        torch.manual_seed(SEED)
        numpys: Any = numpy.random  # its stubs lack what follows
        if getattr(numpys.get_bit_generator(), "seed_seq", None) is not None:  # NumPy's seed() leaves none
            numpy.random.seed(SEED)
            random.seed(SEED)
