"""A name or an address goes in; what it resolves to, and whether it is this machine, comes out."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_SIOCGIFFLAGS = 0x8913
_UP = 1


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface of this machine, as the kernel shows it to this process."""

    name: str
    addresses: tuple[str, ...]
    up: bool = True

    @property
    def text(self) -> str:
        """The interface as people write it: eth0 (10.0.0.1)."""
        return f"{self.name} ({', '.join(self.addresses) or 'no address'})"


def interfaces() -> tuple[Interface, ...]:
    """This machine's interfaces, in the kernel's order; of IPv4 the first address of each, of IPv6 all global ones."""
    six = _ipv6()
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            four: list[str] = []
            up = False
            with suppress(OSError):  # it went away, or has no IPv4 address
                up = bool(struct.unpack("H", fcntl.ioctl(s, _SIOCGIFFLAGS, request)[16:18])[0] & _UP)
                four = [socket.inet_ntoa(fcntl.ioctl(s, _SIOCGIFADDR, request)[20:24])]
            found.append(Interface(name, (*four, *six.get(name, ())), up))
    return tuple(found)


def _ipv6() -> dict[str, list[str]]:
    """The global IPv6 addresses of each interface."""
    found: dict[str, list[str]] = {}
    with suppress(OSError):  # the kernel has no IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope == "00":
                found.setdefault(name, []).append(str(ipaddress.IPv6Address(int(digits, 16))))
    return found


def own_addresses(cards: tuple[Interface, ...]) -> str:
    """This machine's addresses for people: "10.0.0.1 (eth0), 172.17.0.1 (docker0)"; the loopback is left out."""
    shown = [f"{a} ({card.name})" for card in cards for a in card.addresses if not is_loopback(a)]
    return ", ".join(shown) or "none but the loopback's"


def resolve(host: str) -> tuple[str, ...]:
    """The IP addresses of a name, the preferred one first, or of an address itself; none where it is unknown."""
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
