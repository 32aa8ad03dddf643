"""``flow.env``: this process's rank, its host's number, and how many there are in its run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorflow import config
from actorflow.control.cluster import current, process_settings
from actorflow.rendezvous import start
from actorflow.rendezvous.node_list import check_distinct
from actorflow_compiler.core.errors import ClusterError

__all__ = [
    "ctrl_port",
    "get_local_rank",
    "get_node_size",
    "get_rank",
    "get_world_size",
    "grpc_use_no_signal",
    "init",
    "init_rdma",
    "is_master",
    "local_rank",
    "log_dir",
    "machine",
    "node",
    "node_count",
    "rank",
    "rdma_is_initialized",
    "world_size",
]


def rank() -> int:
    """This process's number, 0 … ``world_size() - 1``."""
    return process_settings().rank


def world_size() -> int:
    """The number of ranks; 1 under plain ``python``."""
    return process_settings().world


def is_master() -> bool:
    """Whether this is rank 0."""
    return process_settings().rank == 0


def local_rank() -> int:
    """This process's number on its node."""
    return process_settings().local_rank


def node() -> int:
    """The number of this process's node."""
    return process_settings().node


def node_count() -> int:
    """The number of nodes."""
    return process_settings().nnodes


# -- the second generation's names -----------------------------------------------------------------


def get_rank() -> int:
    """This process's number, as ``rank`` gives it."""
    return rank()


def get_world_size() -> int:
    """The number of ranks, as ``world_size`` gives it."""
    return world_size()


def get_local_rank() -> int:
    """This process's number on its node, as ``local_rank`` gives it."""
    return local_rank()


def get_node_size() -> int:
    """The number of nodes, as ``node_count`` gives it."""
    return node_count()


def init_rdma() -> None:
    """Have NCCL move what is on GPUs over InfiniBand or RoCE; collective.

    NCCL uses such devices by itself: this makes the ranks' group, and warns (RdmaWarning) where they cannot be
    used, with the reason; then the network's ordinary sockets carry the data.  Call it on every rank.
    """
    from actorflow.distributed import rdma

    rdma.init()


def rdma_is_initialized() -> bool:
    """Whether ``init_rdma`` has been called on this rank and has found what NCCL needs for RDMA."""
    from actorflow.distributed import rdma

    return rdma.initialized()


# -- before the run: the first generation's settings -----------------------------------------------


def machine(*nodes: Any) -> None:
    """Name the nodes of the run, node 0, the master, first: ``machine([{"addr": "10.0.0.1"}, {"addr": "10.0.0.2"}])``.

    A node is a dictionary with the key ``"addr"``, or that address or name itself; nodes come as one list or one by
    one.  The same script is started by hand on every node; each finds its own address in the list, or
    takes what the variable ``ACTORFLOW_NODE`` says.  Raises ClusterError for what is no node, for one that is
    given twice, and after the run has begun.
    """
    listed = nodes[0] if len(nodes) == 1 and isinstance(nodes[0], list | tuple) else nodes
    call = f"flow.env.machine({nodes[0] if len(nodes) == 1 else nodes!r})"
    addresses = tuple(_address(node, call) for node in listed)
    if not addresses:
        raise ClusterError(f"{call} was found; one node or more was expected")
    check_distinct(addresses)
    start.request_setting("nodes", addresses, call)


def _address(node: Any, call: str) -> str:
    address = node.get("addr") if isinstance(node, Mapping) else node
    if not isinstance(address, str) or not address.strip():
        raise ClusterError(
            f'{call} was found, with the node {node!r}; {{"addr": "10.0.0.1"}} was expected, or the address or name '
            "itself, of which every node knows what it means"
        )
    return address.strip()


def ctrl_port(port: int) -> None:
    """Set the port of node 0, as ``flow.config.ctrl_port`` does."""
    config.ctrl_port(port)


def log_dir(folder: str) -> None:
    """Have the output of ranks other than 0 written to this folder, where the script makes its process the launcher.

    On the command line ``--log-dir`` says so.  Raises ClusterError after the run has begun.
    """
    start.request_setting("log_dir", str(folder), f"flow.env.log_dir({folder!r})")


def grpc_use_no_signal(yes: bool = True) -> None:
    """Nothing to do: gRPC takes no signals here.  For scripts that say so."""


def init() -> None:
    """Begin the run: this process stays where it is one of those that the script asks for; else it starts them.

    With several devices or nodes (``flow.config``, ``machine``) a process that was started by hand becomes the
    launcher and does not return: the script runs again from its beginning, as every rank of this node.  In the
    ranks it returns when what the script asks for agrees with how they were started.  Raises ClusterError
    where it does not, or where this machine has no place in the list of nodes.
    """
    current()
