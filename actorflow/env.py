"""``flow.env``: the rank and node of this process, the size of its run, and settings before the run begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorflow import config
from actorflow.control.cluster import current, process_settings
from actorflow.placements import placement
from actorflow.rendezvous import start
from actorflow.rendezvous.node_list import check_distinct
from actorflow.support.nearest_names import answer_with_nearest
from actorflow_compiler.core.errors import ClusterError
from actorflow_compiler.core.placement import Placement

__all__ = [
    "all_device_placement",
    "ctrl_port",
    "data_port",
    "get_local_rank",
    "get_node_size",
    "get_rank",
    "get_world_size",
    "grpc_use_no_signal",
    "init",
    "init_rdma",
    "is_master",
    "is_multi_client",
    "local_rank",
    "log_dir",
    "logbuflevel",
    "logtostderr",
    "machine",
    "node",
    "node_count",
    "rank",
    "rdma_is_initialized",
    "world_size",
]


def rank() -> int:
    """This process's rank, from 0 to ``world_size() - 1``."""
    return process_settings().rank


def world_size() -> int:
    """The number of ranks; 1 under plain ``python``."""
    return process_settings().world


def is_master() -> bool:
    """Whether this process is rank 0."""
    return process_settings().rank == 0


def local_rank() -> int:
    """This process's number among the ranks of its node."""
    return process_settings().local_rank


def node() -> int:
    """The number of this process's node."""
    return process_settings().node


def node_count() -> int:
    """The number of nodes."""
    return process_settings().nnodes


# -- the second generation's names -----------------------------------------------------------------


def get_rank() -> int:
    """This process's rank, like ``rank``."""
    return rank()


def get_world_size() -> int:
    """The number of ranks, like ``world_size``."""
    return world_size()


def get_local_rank() -> int:
    """This process's number among the ranks of its node, like ``local_rank``."""
    return local_rank()


def get_node_size() -> int:
    """The number of nodes, like ``node_count``."""
    return node_count()


def is_multi_client() -> bool:
    """True: every process runs the script, as in all of OneFlow's second generation."""
    return True


def all_device_placement(type: str) -> Placement:
    """All devices of the run, in one dimension, like ``flow.placement.all``.

    >>> flow.env.all_device_placement("cpu")
    Placement(type='cpu', ranks=(0,), hierarchy=(1,))
    """
    return placement.all(type)


def init_rdma() -> None:
    """Make NCCL use InfiniBand or RoCE for GPU tensors; a collective operation, so every rank must call it.

    NCCL finds such devices by itself.  This call creates the ranks' process group, and issues an RdmaWarning with the
    reason if the devices cannot be used; ordinary network sockets then carry the data.
    """
    from actorflow.distributed import rdma

    rdma.init()


def rdma_is_initialized() -> bool:
    """Whether ``init_rdma`` was called on this rank and found everything that NCCL needs for RDMA."""
    from actorflow.distributed import rdma

    return rdma.initialized()


# -- before the run: the first generation's settings -----------------------------------------------


def machine(*nodes: Any) -> None:
    """Name the nodes of the run, the master first: ``machine([{"addr": "10.0.0.1"}, {"addr": "10.0.0.2"}])``.

    A node is a dictionary with the key ``"addr"``, or its address or name itself.  Nodes are passed as one list or as
    separate arguments.  The same script is started by hand on every node.  Each node finds its own address in the list,
    or takes its number from the variable ``ACTORFLOW_NODE``.  Raises ClusterError for an invalid node, for a node that
    is named twice, and after the run has begun.
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
    """Set the port of node 0, like ``flow.config.ctrl_port``."""
    config.ctrl_port(port)


def log_dir(folder: str) -> None:
    """Write the output of ranks other than 0 to files in this folder, if the script's process becomes the launcher.

    The option ``--log-dir`` of the command line does the same.  Raises ClusterError after the run has begun.
    """
    start.request_setting("log_dir", str(folder), f"flow.env.log_dir({folder!r})")


def data_port(port: int) -> None:
    """Do nothing, for scripts that call it: data between ranks go over ports that the system chooses."""


def logtostderr(yes: bool = True) -> None:
    """Do nothing, for scripts that call it: what a rank has to say goes to its standard error anyway."""


def logbuflevel(level: int) -> None:
    """Do nothing, for scripts that call it: no output is held back here."""


def grpc_use_no_signal(yes: bool = True) -> None:
    """Do nothing, for scripts that call it: gRPC installs no signal handlers here."""


def init() -> None:
    """Begin the run: return in a process that is a rank of the run; otherwise start the ranks.

    If the script requests several devices or nodes (``flow.config``, ``machine``), a process that was started by hand
    becomes the launcher and does not return: the script runs again from its beginning, as every rank of this node.  In
    the ranks it returns if the script's requests agree with how they were started.  Raises ClusterError if they do not,
    or if this machine is not in the list of nodes.
    """
    current()


answer_with_nearest(__name__)
