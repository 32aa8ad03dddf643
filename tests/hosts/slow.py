"""Put a slow network that also loses packets between two hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hosts.machines import Host, run

CABLE = Path(__file__).with_name("cable.py")
NETWORK = "10.78.0"


@contextmanager
def slow(pair: tuple[Host, Host], seconds: float, fraction: float) -> Iterator[tuple[str, str]]:
    """Their addresses in a network where a packet takes so long each way, and such a fraction is lost.

    By the kernel's "netem" where it has that; else by a cable of ours between two further cards.
    """
    netem = ["tc", "qdisc", "add", "dev", "eth0", "root", "netem", "delay", f"{seconds}s", "loss", f"{fraction:%}"]
    tried = subprocess.run([*pair[0].network(), *netem], capture_output=True, text=True)
    if tried.returncode == 0:
        run(*pair[1].network(), *netem)
        try:
            yield pair[0].address, pair[1].address
        finally:
            for host in pair:
                run(*host.network(), "tc", "qdisc", "delete", "dev", "eth0", "root")
        return
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        pytest.skip(f"this kernel has no netem ({tried.stderr.strip()}), and there is no /dev/net/tun to do without")
    names = [f"slow{os.getpid() % 10**8}{end}" for end in "ab"]
    command = [sys.executable, str(CABLE), *names, str(seconds), str(fraction)]
    cable = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert cable.stdin is not None
    assert cable.stdout is not None
    addresses = (f"{NETWORK}.1", f"{NETWORK}.2")
    try:
        assert cable.stdout.readline() == "ready\n"
        for host, name, address in zip(pair, names, addresses, strict=True):
            host.adopt(name)
            for arguments in (["address", "add", f"{address}/24", "dev", name], ["link", "set", name, "up"]):
                run(*host.network(), "ip", *arguments)
        yield addresses
    finally:
        cable.stdin.close()  # it ends, and the cards with it
        cable.wait(10)
