"""Find the network interface and address by which this host and others reach each other."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping

from actorflow.rendezvous import addresses
from actorflow.rendezvous.addresses import Interface
from actorflow_compiler.core.errors import ClusterError

LIBRARIES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # variables that tell these libraries which card to use
_ANYWHERE = ("192.0.2.1", "2001:db8::1")  # documentation addresses, which are reached by the default route


def hold_port(host: str) -> socket.socket:
    """A bound socket that never listens, so that its port stays free for a server that may share it."""
    holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind((host, 0))
    return holder


def unused_port(host: str) -> int:
    """A port that nothing uses at an address of this host, and that nobody keeps for the caller."""
    with hold_port(host) as holder:
        return int(holder.getsockname()[1])


def is_loopback(host: str) -> bool:
    """Whether an address reaches this host alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def route_to(host: str) -> str:
    """The local address of this host's route to another host; nothing is sent."""
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


def own_address(host: str) -> str:
    """The address by which others reach this host, whose name for them is ``host``.

    A host's own name often resolves to the loopback (by Debian's /etc/hosts); then it is the local address of the
    default route.  Raises ClusterError if that is ambiguous.
    """
    known = addresses.resolve(host)
    if addresses.is_address(host) or not known or not all(map(is_loopback, known)):
        return route_to(host)
    for far in _ANYWHERE:
        try:
            return route_to(far)
        except ClusterError:  # there is no default route
            continue
    cards = [card for card in addresses.interfaces() if _usable(card) and not is_loopback(card.addresses[0])]
    if len(cards) == 1:
        return cards[0].addresses[0]
    raise ClusterError(
        f"the name of node 0, {host}, resolves to {known[0]} on node 0 itself, and which of its addresses others reach "
        f"is not clear: it has {addresses.own_addresses_text(tuple(cards))}. Give --master-addr as one of these, or "
        "--interface."
    )


def interface_of(host: str) -> str:
    """The name of this host's network card with an address, such as "lo"; empty if none has it."""
    if is_loopback(host):
        return "lo"
    known = addresses.resolve(host)
    return next((card.name for card in addresses.interfaces() if {*card.addresses} & {*known}), "")


def address_of(interface: str, host: str) -> str:
    """The address of a network card of this host, of the kind (IPv4, IPv6) by which another host is reached.

    Raises ClusterError where it has none.
    """
    card = _card(interface, addresses.interfaces())
    six = any(":" in address for address in addresses.resolve(host)[:1])
    found = [address for address in card.addresses if (":" in address) == six]
    if not found:
        kind = "IPv6" if six else "IPv4"
        raise ClusterError(
            f"--interface {interface}: {card.text} has no {kind} address, by which the master ({host}) is reached"
        )
    return found[0]


def check_interface(name: str, environ: Mapping[str, str], cards: tuple[Interface, ...] | None = None) -> None:
    """Raise ClusterError if the card does not exist or is unusable, or if a library's variable names another one."""
    _card(name, addresses.interfaces() if cards is None else cards)
    for variable in LIBRARIES:
        said = environ.get(variable, "")
        if said and not selects(variable, said, name):
            raise ClusterError(
                f"--interface {name} contradicts {variable}={said} in the environment; drop one of them, or give both "
                "the same card"
            )


def selects(variable: str, value: str, name: str) -> bool:
    """Whether a library's variable names a card: exactly for Gloo; for NCCL by prefix, "=" exactly, "^" all others."""
    if variable.startswith("GLOO"):
        return name in value.split(",")
    excluded, exact = value.startswith("^"), "=" in value[:2]
    names = value.lstrip("^=").split(",")
    named = name in names if exact else any(name.startswith(prefix) for prefix in names)
    return named != excluded


def _card(name: str, cards: tuple[Interface, ...]) -> Interface:
    card = next((card for card in cards if card.name == name), None)
    if card is not None and _usable(card):
        return card
    usable = ", ".join(card.text for card in cards if _usable(card)) or "none"
    what = "there is no such network card" if card is None else "it has no address" if card.up else "it is down"
    raise ClusterError(f"--interface {name}: {what} on {socket.gethostname()}; those that can be used: {usable}")


def _usable(card: Interface) -> bool:
    return card.up and bool(card.addresses)
