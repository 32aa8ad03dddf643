"""Checks of the nodes' addresses: a loopback or another machine's as master, a container's that is its host's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actorflow.doctor.finding import Finding
from actorflow.rendezvous.addresses import is_address, is_loopback, own_addresses_text

if TYPE_CHECKING:
    from actorflow.doctor.machine_facts import MachineFacts


def master_is_loopback(here: MachineFacts) -> Finding | None:
    """Node 0 resolves to the loopback on this machine, though other machines take part."""
    addresses = here.resolve(here.master)
    if not addresses or not all(map(is_loopback, addresses)):
        return None
    others = [a for node in here.nodes[1:] for a in here.resolve(node)[:1]]
    elsewhere = any(not is_loopback(a) for a in others)
    named = not is_address(here.master) and here.node != 0
    if not elsewhere and not named:  # a run of loopback addresses alone is one of this machine
        return None
    shown = here.master if is_address(here.master) else f"{here.master}, which resolves to {addresses[0]} here,"
    why = (
        "Other nodes reach themselves by it."
        if here.node == 0
        else "This machine reaches itself by it, not node 0; /etc/hosts has such a line."
    )
    return Finding(
        "master's address is a loopback",
        f"The master's address {shown} is a loopback address.",
        why,
        "Name node 0 by an IP address that every node can reach, or correct /etc/hosts.",
    )


def not_the_master(here: MachineFacts) -> Finding | None:
    """This is node 0, and node 0's address is none of this machine's; a container's may be its host's."""
    if here.node != 0 or here.container:
        return None
    addresses = here.resolve(here.master)
    if not addresses or any(map(here.is_own, addresses)):
        return None
    return Finding(
        "master's address is another machine's",
        f"The master's address {here.master} is none of this machine's, which has "
        f"{own_addresses_text(here.interfaces)}.",
        "The other nodes look for node 0 there.",
        "Give --node-rank 0 on one node alone, the one with that address; behind a translation of addresses it may be "
        "right as it is.",
        certain=False,
    )


def unpublished(here: MachineFacts) -> Finding | None:
    """In a container: this node's address in the run is not one of the container's own."""
    if not here.container or here.node is None or here.node >= len(here.nodes):
        return None
    name = here.nodes[here.node]
    addresses = here.resolve(name)
    if not addresses or any(here.is_own(a) for a in addresses):
        return None
    return Finding(
        "container without published ports",
        f"This process runs in a container ({here.container}) with addresses of its own, "
        f"{own_addresses_text(here.interfaces)}; node {here.node} of the run is {name}.",
        "In a container's own network other machines reach only the ports that were published, and ranks use ports "
        "that the system chooses as well.",
        "Start the container with the host's network: docker run --net=host (Kubernetes: hostNetwork: true). If it is "
        f"not node {here.node}, give every node its own --node-rank.",
    )
