"""A master's address that means another machine on each machine: one that resolves to the loopback."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actorflow.doctor.finding import Finding
from actorflow.rendezvous.addresses import is_address, is_loopback

if TYPE_CHECKING:
    from actorflow.doctor.here import Here


def master_is_loopback(here: Here) -> Finding | None:
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
