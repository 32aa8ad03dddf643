"""An address goes in; how this host reaches it, or which interface has it, comes out."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

from actorflow_compiler.errors import ClusterError

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def is_loopback(host: str) -> bool:
    """Whether an address reaches this host alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def route_to(host: str) -> str:
    """The address of this host from which packets to another leave; nothing is sent."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as s:
            s.connect(address)
            return str(s.getsockname()[0])
    except OSError as e:
        raise ClusterError(
            f"the master's address {host!r} cannot be used from this host ({e}). Give --master-addr as a name or an IP "
            "address of node 0 that every node can reach."
        ) from e


def interface_of(host: str) -> str:
    """The name of this host's network interface that has an address, such as "lo"; empty where none has it."""
    if is_loopback(host):
        return "lo"
    try:
        wanted = socket.gethostbyname(host)
    except OSError:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(s, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == wanted:
                return name
    return ""
