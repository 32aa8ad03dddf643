"""What the kernel says of a machine's interfaces is shown as far as other machines can use it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from types import SimpleNamespace

import psutil
import pytest

from actorflow.rendezvous.addresses import Interface, interfaces


def test_interfaces_have_all_addresses_but_local_ones_of_ipv6_and_need_no_cable_to_be_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    four, six = socket.AF_INET, socket.AF_INET6
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "eth1"), (4, "gone")])
    monkeypatch.setattr(
        psutil, "net_if_addrs",
        lambda: {
            "lo": _of((four, "127.0.0.1"), (six, "::1"), (psutil.AF_LINK, "00:00:00:00:00:00")),
            "eth1": _of((psutil.AF_LINK, "02:42:ac:11:00:02")),
            "eth0": _of((four, "10.0.0.1"), (four, "10.0.9.1"), (six, "fd00::1"), (six, "fe80::1%eth0")),
        },
    )  # fmt: skip
    flags = {"lo": "up,loopback,running", "eth0": "up,broadcast,multicast", "eth1": "broadcast"}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {name: SimpleNamespace(flags=f) for name, f in flags.items()})
    assert interfaces() == (
        Interface("lo", ("127.0.0.1",)),
        Interface("eth0", ("10.0.0.1", "10.0.9.1", "fd00::1")),
        Interface("eth1", (), up=False),
        Interface("gone", (), up=False),  # since its name was read
    )


def _of(*addresses: tuple[int, str]) -> Sequence[SimpleNamespace]:
    return [SimpleNamespace(family=family, address=address) for family, address in addresses]
