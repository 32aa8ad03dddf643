"""Print, for many steps, the digest of what their plans are made from, and that of their plans, as JSON.

PYTHONPATH=tests:examples python digested.py NAMES…   cases by name, or numbers of random programs
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch

import random_programs
from architectures import ARCHITECTURES
from models import CASES, DROPOUT
from reused import Reuse, reuse_of
from trained import LAYOUTS

ALL = {**CASES, **ARCHITECTURES, "dropout": DROPOUT}


def found(name: str) -> list[Reuse]:
    if name.isdecimal():
        drawn = random_programs.draw(int(name))
        return [reuse_of(drawn.case, drawn.layout, drawn.size)]
    return [reuse_of(ALL[name], LAYOUTS[layout], 8) for layout in ("data 2", "pipeline 2")]


if __name__ == "__main__":
    torch.set_num_threads(1)
    said = {name: [(one.digest, hashlib.sha256(one.plan).hexdigest()) for one in found(name)] for name in sys.argv[1:]}
    print(json.dumps(said))
