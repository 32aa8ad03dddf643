"""Checks of network interfaces: which one leads to the other nodes, and which one Gloo and NCCL were told to use."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from actorflow.doctor.finding import Finding
from actorflow.rendezvous.addresses import Interface, is_loopback
from actorflow.rendezvous.network import LIBRARIES, route_to, selects
from actorflow_compiler.core.errors import ClusterError

if TYPE_CHECKING:
    from actorflow.doctor.machine_facts import MachineFacts

# names of interfaces → what makes them; they lead to other programs of this machine, or through a tunnel
_VIRTUAL = (
    (r"docker\d*|br-[0-9a-f]{6,}", "Docker's bridge"),
    (r"veth.*", "one end of a container's cable"),
    (r"virbr.*|vnet\d+", "libvirt's bridge"),
    (r"(podman|lxcbr|lxdbr|cni|cbr)\d*", "a bridge of containers"),
    (r"(flannel|cali|cilium|weave|vxlan|genev).*", "a network of containers"),
    (r"(vmnet|vboxnet)\d+", "a network of virtual machines"),
    (r"(tun|tap|ppp|wg|tailscale|zt|utun).*", "a tunnel"),
    (r"(dummy|ifb|sit|ip6tnl|gre|gretap|erspan|teql|nlmon)\d+", "no network"),
)


def virtual(name: str) -> str:
    """What makes an interface of this name, where it is known to be virtual; else empty."""
    return next((kind for pattern, kind in _VIRTUAL if re.fullmatch(pattern, name)), "")


def way_to(here: MachineFacts, host: str) -> Interface | None:
    """The interface by which packets to a host leave; None where there is no way."""
    addresses = here.resolve(host)
    if not addresses or is_loopback(addresses[0]):
        return None
    try:
        own = route_to(addresses[0])
    except ClusterError:
        return None
    return next((card for card in here.interfaces if own in card.addresses), None)


def through_virtual(here: MachineFacts) -> Finding | None:
    """Packets to another node leave through a virtual card."""
    for number, host in _others(here):
        card = way_to(here, host)
        kind = virtual(card.name) if card is not None else ""
        if card is not None and kind:
            real = [c.text for c in here.interfaces if _is_real(c)]
            return Finding(
                "way through a virtual card",
                f"Packets to node {number} ({host}) leave by {card.text}, which is {kind}.",
                f"Other machines are seldom behind it; this one has {', '.join(real) or 'no other card'}.",
                "Name the nodes by addresses of their real network cards, or correct the routes (ip route get "
                f"{host}).",
                certain=False,
            )
    return None


def misnamed(here: MachineFacts) -> Finding | None:
    """A variable that tells Gloo or NCCL which card to use names none that is up and has an address."""
    for variable in LIBRARIES:
        value = here.environ.get(variable, "")
        if value and not any(selects(variable, value, c.name) for c in here.interfaces if c.up and c.addresses):
            usable = ", ".join(c.text for c in here.interfaces if c.up and c.addresses)
            return Finding(
                "no such card",
                f"{variable}={value} names no network interface of this machine that is up and has an address.",
                f"It has {usable}.",
                f"Set {variable} to one of them, or unset it: then the card that leads to node 0 is used.",
            )
    return None


def ambiguous(here: MachineFacts) -> Finding | None:
    """Virtual cards stand beside real ones, and a library was not told, or was told something else than the way."""
    ways = [card for _, host in _others(here) if (card := way_to(here, host)) is not None]
    if not ways or virtual(ways[0].name):
        return None
    way = ways[0]
    for variable in LIBRARIES:
        value = here.environ.get(variable, "")
        if value and not selects(variable, value, way.name):
            return Finding(
                "another card than the way",
                f"{variable}={value}, but packets to the other nodes leave by {way.text}.",
                "Where that card does not lead to the other nodes, their transfers wait for ever.",
                f"export {variable}={way.name}, or unset it, if the two are different networks.",
                certain=False,
            )
    false = [c for c in here.interfaces if c.up and c.addresses and virtual(c.name)]
    if false and "NCCL_SOCKET_IFNAME" not in here.environ:
        return Finding(
            "virtual cards",
            f"This machine has virtual network cards: {', '.join(f'{c.text}, {virtual(c.name)}' for c in false)}.",
            f"actorflow uses {way.text}, which leads to the other nodes, and tells Gloo and NCCL so; a program that "
            "sets up NCCL by itself may pick a virtual one and wait for ever.",
            f"For such programs: export NCCL_SOCKET_IFNAME={way.name} GLOO_SOCKET_IFNAME={way.name}.",
            certain=False,
        )
    return None


def _others(here: MachineFacts) -> list[tuple[int, str]]:
    return [(number, host) for number, host in enumerate(here.nodes) if number != here.node]


def _is_real(card: Interface) -> bool:
    return card.up and bool(card.addresses) and not virtual(card.name) and not all(map(is_loopback, card.addresses))
