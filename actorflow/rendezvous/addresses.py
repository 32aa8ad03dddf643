"""Resolve host names, and list this machine's interfaces and addresses."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

import psutil

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface of this machine, as the kernel shows it to this process."""

    name: str
    addresses: tuple[str, ...]
    up: bool = True

    @property
    def text(self) -> str:
        """The interface as text: eth0 (10.0.0.1)."""
        return f"{self.name} ({', '.join(self.addresses) or 'no address'})"


def interfaces() -> tuple[Interface, ...]:
    """This machine's interfaces, in the kernel's order; of their IPv6 addresses only the global ones."""
    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    return tuple(
        Interface(
            name,
            tuple(a.address for a in addresses.get(name, ()) if a.family in _FAMILIES and not _is_local(a.address)),
            name in states and "up" in states[name].flags.split(","),  # psutil's isup also needs a plugged-in cable
        )
        for _, name in socket.if_nameindex()
    )


def _is_local(address: str) -> bool:
    """Whether an IPv6 address is valid only on its interface or on this machine."""
    found = ipaddress.ip_address(address)
    return found.version == 6 and (found.is_link_local or found.is_loopback)


def own_addresses_text(cards: tuple[Interface, ...]) -> str:
    """This machine's addresses for people: "10.0.0.1 (eth0), 172.17.0.1 (docker0)"; the loopback is left out."""
    shown = [f"{a} ({card.name})" for card in cards for a in card.addresses if not is_loopback(a)]
    return ", ".join(shown) or "none but the loopback's"


def resolve(host: str) -> tuple[str, ...]:
    """The IP addresses of a name, the preferred one first, or an address itself; empty for an unknown name."""
    try:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(answer[4][0]) for answer in answers))


def is_loopback(address: str) -> bool:
    """Whether an IP address reaches this machine alone."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def is_address(host: str) -> bool:
    """Whether this is an IP address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_own(address: str) -> bool:
    """Whether an IP address is one of this machine's: a socket can be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as s:
            s.bind((address, 0))
    except OSError:
        return False
    return True
