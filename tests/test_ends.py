"""A process that ends, whatever its threads are in, ends with the status that its script has given it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

# for half a second from when the script leaves a thread is in torch's code more often than not
BUSY = """
import os, signal, sys, threading, time

import torch

inside, leaves = threading.Event(), threading.Event()


def work(*_):
    end = None
    while end is None or time.monotonic() < end:
        inside.set()
        if end is None and leaves.is_set():
            end = time.monotonic() + 0.5
        torch.ones(300, 300).mm(torch.ones(300, 300))
"""

A_CALLBACK = """
from actorflow.classic.callbacks import callbacks

callbacks.add(work, lambda: None)
callbacks.add(lambda _: print("called too late"), lambda: None)
inside.wait()
leaves.set()
raise ValueError("no")
"""

A_RANK = """
from actorflow.testing.thread_ranks import ThreadRanks


def interrupt():
    inside.wait()
    os.kill(os.getpid(), signal.SIGINT)
    leaves.set()


signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
threading.Thread(target=interrupt, daemon=True).start()
ThreadRanks(2).run(work)
"""

STOPPED = """
from actorflow.support import background

stop = threading.Event()


def last():
    stop.wait()
    work()
    print("ended")


background.start(last, "last", stop.set)
leaves.set()
sys.exit(3)
"""

RAISES = """
from actorflow.support import background

stop, other = threading.Event(), threading.Event()


def last():
    stop.wait()
    work()
    print("ended")


def cannot():
    raise RuntimeError("no way to stop it")


background.start(other.wait, "one that cannot be told", cannot)
background.start(last, "last", lambda: (stop.set(), other.set()))
leaves.set()
sys.exit(3)
"""

STUCK = """
from actorflow.support import background

background._SECONDS = 0.1
background.start(threading.Event().wait, "stuck")
sys.exit(3)
"""


LETS_GO = """
from functools import partial

from actorflow.support import background


class Held:
    __del__ = work

    def __init__(self):
        self.alone = threading.Event()


def hold(held):
    held.alone.wait()


held = Held()
alone = held.alone
background.start(partial(hold, held), "holds it last")
del held
alone.set()
inside.wait()
leaves.set()
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("script", "status", "out", "last"),
    [
        (A_CALLBACK, 1, "", "ValueError: no"),
        pytest.param(A_RANK, -signal.SIGINT, "", "KeyboardInterrupt", marks=pytest.mark.slow),
        pytest.param(STOPPED, 3, "ended", "", marks=pytest.mark.slow),
        pytest.param(RAISES, 3, "ended", "", marks=pytest.mark.slow),
        pytest.param(STUCK, 3, "", "", marks=pytest.mark.slow),
        pytest.param(LETS_GO, 3, "", "", marks=pytest.mark.slow),
    ],
    ids=[
        "a callback",
        "a rank that is a thread",
        "what is told to stop",
        "a stop that raises",
        "what never ends",
        "what one lets go of",
    ],
)
def test_a_process_ends_as_its_script_does_while_a_thread_is_at_work(
    script: str, status: int, out: str, last: str
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", BUSY + script],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert run.returncode == status, run.stderr
    assert run.stdout.strip() == out
    assert run.stderr.strip().rpartition("\n")[2] == last
