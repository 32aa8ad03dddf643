"""What the scripts of the fault suite share: they tell the runner of each moment, and misbehave where they are told to.

Their arguments: SOCKET FOLDER LAYOUT STEPS KEEPER [KIND:RANK:MOMENT:NUMBER:ATTEMPT …], where KEEPER is the folder of
checkpoints, or "-".  Rank 0 adds each step's loss to FOLDER/losses.
"""

import json
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

where, folder, layout, steps, kept, *words = sys.argv[1:]
rank, attempt = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
EVERY = 5  # steps from one checkpoint to the next
PAUSE = 0.01  # seconds of a step outside the job
_teller = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)


def at(moment: str, number: int = 0) -> None:
    """Say that a moment has come, and do what is to be done then."""
    with suppress(OSError):  # the runner is gone
        _teller.sendto(json.dumps([rank, os.getpid(), moment, number, attempt]).encode(), where)
    for word in words:
        kind, *when = word.split(":")
        if when == [str(rank), moment, str(number), str(attempt)]:
            _misbehave(kind)
        if kind == "print" and when[0] == str(rank):
            print("x" * 3000, flush=True)


def note_loss(step: int, loss: float, world: int) -> None:
    """On rank 0: write the loss of a step down."""
    if rank == 0:
        with open(f"{folder}/losses", "a") as file:
            file.write(f"{step} {loss.hex()} {attempt} {world}\n")


def _misbehave(kind: str) -> None:
    if kind == "raise":
        raise ValueError("this rank has had enough")
    if kind == "exit":
        sys.exit(3)
    if kind == "slow":
        time.sleep(1.5)
    if kind == "eat":
        while not Path(folder, "limited").exists():
            time.sleep(0.01)
        eaten = []
        while True:
            eaten.append(torch.ones(1 << 22))  # 16 MiB
