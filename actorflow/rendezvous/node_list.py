"""Find which node of the run's list this machine is; errors show the machine's addresses."""

from __future__ import annotations

from collections.abc import Sequence

from actorflow.rendezvous.addresses import interfaces, is_own, own_addresses_text, resolve
from actorflow_compiler.core.errors import ClusterError

NODE = "ACTORFLOW_NODE"  # this node's number in the list, if its addresses do not determine it


def own_node(nodes: Sequence[str], said: str | None) -> int:
    """The number of this machine in the list of nodes.

    ``said`` is the value of ``ACTORFLOW_NODE``, if set; it is needed if several addresses of the list are
    this machine's, or none is (a container, a translated address).  Raises ClusterError for those, for a
    machine that is in the list twice, and for a number that is not in it.
    """
    check_distinct(nodes)
    listed = ", ".join(nodes)
    if said is not None and said != "":
        if not said.isdigit() or int(said) >= len(nodes):
            raise ClusterError(
                f"{NODE}={said} was found; a number from 0 to {len(nodes) - 1} was expected, because the "
                f"run has the nodes {listed}"
            )
        return int(said)
    addresses = [resolve(node) for node in nodes]
    mine = [number for number, found in enumerate(addresses) if any(is_own(a) for a in found)]
    if len(mine) == 1:
        return mine[0]
    own = own_addresses_text(interfaces())
    if mine:
        both = ", ".join(f"node {number} ({nodes[number]})" for number in mine)
        raise ClusterError(
            f"several nodes of the list {listed} are this machine: {both}. Its addresses are {own}. Say which one this "
            f"process is, with {NODE}={mine[0]} before the command, or give every machine once."
        )
    unknown = [node for node, found in zip(nodes, addresses, strict=True) if not found]
    resolved = f" The name{'s' * (len(unknown) > 1)} {', '.join(unknown)} could not be resolved." if unknown else ""
    raise ClusterError(
        f"this machine is not in the list of nodes {listed}. Its addresses are {own}.{resolved} Put one of them into "
        f"the list, or, if others reach it by another address (a container, address translation), say which node it is "
        f"with {NODE}=… before the command."
    )


def check_distinct(nodes: Sequence[str]) -> None:
    """Raise ClusterError where a node is in the list twice."""
    for number, node in enumerate(nodes):
        if node in nodes[:number]:
            raise ClusterError(
                f"the list of nodes has {node} twice, as node {list(nodes).index(node)} and node {number}; give each "
                "node once, and the number of its devices with flow.config.gpu_device_num or cpu_device_num"
            )
