"""What a script asks for (devices, nodes, a port) and how it was started go in; how to start it anew comes out.

Whether a script stays in its process is a question of values alone.  ``start`` acts on the answer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from actorflow.rendezvous.addresses import is_loopback, resolve
from actorflow.rendezvous.places import NODE, own_place
from actorflow.rendezvous.settings import TOKEN, Settings
from actorflow_compiler.core.errors import ClusterError

INSECURE = "ACTORFLOW_INSECURE"  # 1: several nodes without a token
DEFAULT_PORT = 50051  # where neither the script nor the command line names one


@dataclass(frozen=True, slots=True)
class Asked:
    """What ``flow.config`` and ``flow.env`` were told; None and empty for what was not said."""

    gpu: int | None = None  # devices of each node
    cpu: int | None = None
    port: int | None = None  # of the master's control server
    nodes: tuple[str, ...] = ()  # names or addresses, node 0 first
    insecure: bool = False
    log_dir: str = ""
    said: Mapping[str, str] = field(default_factory=dict)  # setting → the call and its line: "… (train.py:7)"

    @property
    def devices(self) -> int | None:
        """The devices of each node."""
        return self.cpu if self.gpu is None else self.gpu


@dataclass(frozen=True, slots=True)
class Shape:
    """How a script has to be started so that it gets what it asks for."""

    devices: int  # ranks on each node
    nnodes: int
    node_rank: int
    master_addr: str
    port: int  # 0: any
    insecure: bool
    log_dir: str

    @property
    def spoken(self) -> str:
        """The shape for people: "2 devices on each of 2 nodes"."""
        devices = f"{self.devices} device{'s' * (self.devices != 1)}"
        return devices if self.nnodes == 1 else f"{devices} on each of {self.nnodes} nodes"


Place = Callable[[Sequence[str], str | None], int]


def wanted(
    asked: Asked, settings: Settings | None, environ: Mapping[str, str], place: Place = own_place
) -> Shape | None:
    """How to start the script anew; None where this process already is what it asks for.

    ``settings`` are those of a rank that a launcher started, None those of a plain ``python script.py``.  What
    was given on the launcher's command line stands: a script that says otherwise is a ClusterError that names both.
    """
    now = settings or Settings()
    _check(asked, now)
    devices = asked.devices or now.devices
    from_script = bool(asked.nodes) and "nodes" not in now.given
    nnodes = len(asked.nodes) if from_script else now.nnodes
    node = place(asked.nodes, environ.get(NODE)) if from_script else now.node
    if (devices, nnodes) == (now.devices, now.nnodes):
        return None
    if nnodes == 1:
        master, port = "127.0.0.1", asked.port or 0
    else:
        master = asked.nodes[0] if from_script else now.master_host
        port = now.master_port if "port" in now.given else asked.port or DEFAULT_PORT
    insecure = asked.insecure or environ.get(INSECURE) == "1" or (from_script and of_one_machine(asked.nodes))
    return Shape(devices, nnodes, node, master, port, insecure, asked.log_dir)


def check_token(shape: Shape, token: str) -> None:
    """Raise ClusterError for several nodes without a shared secret, where that was not asked for."""
    if shape.nnodes > 1 and not token and not shape.insecure:
        raise ClusterError(
            f"the script asks for {shape.nnodes} nodes, and there is no secret that they share, so that nobody else "
            f"can join: export {TOKEN}=… with the same value on every node. On a network that you trust wholly, "
            f"flow.config.insecure() in the script, or {INSECURE}=1, does without."
        )


def of_one_machine(nodes: Sequence[str]) -> bool:
    """Whether all addresses are of the loopback: nobody from elsewhere can join."""
    found = [resolve(node) for node in nodes]
    return all(addresses and all(map(is_loopback, addresses)) for addresses in found)


def _check(asked: Asked, now: Settings) -> None:
    """Raise ClusterError where the script contradicts itself or the command line."""
    if asked.gpu is not None and asked.cpu is not None and asked.gpu != asked.cpu:
        raise ClusterError(
            f"{asked.said['gpu']} and {asked.said['cpu']} contradict each other: a device is one process of the run, "
            "whatever its kind; give one of them, or the same number"
        )
    if asked.devices is not None and "devices" in now.given and asked.devices != now.devices:
        name = "cpu" if asked.gpu is None else "gpu"
        raise ClusterError(
            f"{asked.said[name]} contradicts the {now.devices} on each node with which the run was started (--devices, "
            "or what torchrun, Slurm or Ray says); drop one of them, or give both the same number"
        )
    if asked.port is not None and "port" in now.given and asked.port != now.master_port:
        raise ClusterError(
            f"{asked.said['port']} contradicts the port {now.master_port} of the command line (--ctrl-port, "
            "--master-port); drop one of them, or give both the same"
        )
    if asked.nodes and "nodes" in now.given:
        _check_nodes(asked, now)


def _check_nodes(asked: Asked, now: Settings) -> None:
    if len(asked.nodes) != now.nnodes:
        raise ClusterError(
            f"{asked.said['nodes']} names {len(asked.nodes)} nodes ({', '.join(asked.nodes)}), which contradicts "
            f"--nnodes {now.nnodes} of the command line, or of what has started it (torchrun, Slurm, Ray); drop one of "
            "them, or give both the same"
        )
    listed, given = resolve(asked.nodes[0]), resolve(now.master_host)
    if now.nnodes > 1 and asked.nodes[0] != now.master_host and listed and given and not {*listed} & {*given}:
        raise ClusterError(
            f"{asked.said['nodes']} says that the master is {asked.nodes[0]}, and --master-addr {now.master_host} of "
            "the command line that it is another; drop one of them, or give both the same"
        )


_told = False  # in this process, that there is no GPU


def kind_of_gpu(rank: int) -> str:
    """The kind of device where a script asks for GPUs: "cpu" where there is no CUDA device, as rank 0 says once."""
    import torch  # which the command line does without

    if torch.cuda.is_available():
        return "cuda"
    global _told
    if not _told and rank == 0:
        print(
            'actorflow: "gpu" was asked for, and this machine has no CUDA device: the script runs on CPU devices',
            file=sys.stderr,
            flush=True,
        )
    _told = True
    return "cpu"
