"""A machine that was started as node 0, though the master's address is another one's: two nodes with one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actorflow.doctor.finding import Finding
from actorflow.rendezvous.addresses import own_addresses

if TYPE_CHECKING:
    from actorflow.doctor.here import Here


def not_the_master(here: Here) -> Finding | None:
    """This is node 0, and node 0's address is none of this machine's; a container's may be its host's."""
    if here.node != 0 or here.container:
        return None
    addresses = here.resolve(here.master)
    if not addresses or any(map(here.is_own, addresses)):
        return None
    return Finding(
        "master's address is another machine's",
        f"The master's address {here.master} is none of this machine's, which has {own_addresses(here.interfaces)}.",
        "The other nodes look for node 0 there.",
        "Give --node-rank 0 on one node alone, the one with that address; behind a translation of addresses it may be "
        "right as it is.",
        certain=False,
    )
