"""What a script has begun is ended in an order in which nobody waits for what comes later."""

from __future__ import annotations

import subprocess
import sys

import pytest

from actorflow.support import exit_hooks


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(exit_hooks, "_finished", [])
    monkeypatch.setattr(exit_hooks, "_failed", [])
    return []


@pytest.mark.parametrize("eager_is_used_first", [True, False])
def test_what_peers_wait_for_ends_before_what_waits_for_peers(told: list[str], eager_is_used_first: bool) -> None:
    begun = [
        lambda: exit_hooks.when_finished(lambda: told.append("global tensors"), first=True),
        lambda: exit_hooks.when_finished(lambda: told.append("calls of jobs")),
    ]
    for begin in begun if eager_is_used_first else reversed(begun):
        begin()
    exit_hooks.when_failed(lambda: told.append("bar"))
    exit_hooks.after_script()
    assert told == ["global tensors", "calls of jobs"]
    exit_hooks.after_error()
    assert told[2:] == ["bar"]


def test_a_call_that_failed_ends_the_script_with_its_error(told: list[str]) -> None:
    def fails() -> None:
        raise ValueError("a call failed")

    exit_hooks.when_finished(fails)
    with pytest.raises(ValueError, match="a call failed"):
        exit_hooks.after_script()


FORKED = """
import os, sys, threading
from actorflow.support import background

stop, process = threading.Event(), os.getpid()

def end():
    print("told to stop", os.getpid() == process, flush=True)
    stop.set()

background.start(stop.wait, "waits", end)
if not os.fork():
    sys.exit()
os.wait()
"""


def test_a_forked_process_tells_no_thread_of_its_parent_to_stop() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], check=True, stdout=subprocess.PIPE, text=True, timeout=250)
    assert done.stdout == "told to stop True\n"
