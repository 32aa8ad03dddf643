"""Networks of their own for processes of this machine, where that is permitted."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def own_network() -> list[str]:
    """The command that gives a process a network of its own; skips the test where that is not permitted."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("unshare and ip are not installed")
    command = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]
    tried = subprocess.run([*command, "ip", "link", "add", "docker0", "type", "bridge"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"networks of their own are not permitted to this user: {tried.stderr.strip()}")
    return command


@contextmanager
def two_machines(cables: int = 1) -> Iterator[list[list[str]]]:
    """Two networks with a cable between them, 10.9.0.1 and 10.9.0.2: for each the command that runs a program in it.

    A second cable is between eth1, 10.9.1.1 and 10.9.1.2, and so on.
    """
    if shutil.which("ip") is None:
        pytest.skip("ip is not installed")
    names = [f"actorflow{os.getpid()}{side}" for side in "ab"]
    made: list[str] = []
    try:
        for name in names:
            tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
            if tried.returncode:
                pytest.skip(f"networks of their own are not permitted to this user: {tried.stderr.strip()}")
            made.append(name)
        a, b = names
        for name in names:
            _ip("-n", name, "link", "set", "lo", "up")
        for cable in range(cables):
            card = f"eth{cable}"
            _ip("link", "add", card, "netns", a, "type", "veth", "peer", "name", card, "netns", b)
            for number, name in enumerate(names, 1):
                _ip("-n", name, "address", "add", f"10.9.{cable}.{number}/24", "dev", card)
                _ip("-n", name, "link", "set", card, "up")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in made:
            _ip("netns", "delete", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
