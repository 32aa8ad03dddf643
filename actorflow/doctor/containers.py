"""A container whose ports others cannot reach: its nodes' address is the host's, and it has a network of its own."""

from __future__ import annotations

from actorflow.doctor.finding import Finding
from actorflow.doctor.here import Here
from actorflow.rendezvous.addresses import own_addresses


def unpublished(here: Here) -> Finding | None:
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
        f"{own_addresses(here.interfaces)}; node {here.node} of the run is {name}.",
        "In a container's own network other machines reach only the ports that were published, and ranks use ports "
        "that the system chooses as well.",
        "Start the container with the host's network: docker run --net=host (Kubernetes: hostNetwork: true). If it is "
        f"not node {here.node}, give every node its own --node-rank.",
    )
