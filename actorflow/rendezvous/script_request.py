"""Decide whether a script that asks for devices, nodes or a port has to be restarted, and how.

These are pure functions of values; ``start`` acts on the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from actorflow.rendezvous.addresses import is_loopback, resolve
from actorflow.rendezvous.node_list import NODE, own_node
from actorflow.rendezvous.options import INSECURE, TLS_CA, TLS_CERT, TLS_KEY, TOKEN
from actorflow.rendezvous.settings import Settings
from actorflow.support.terminal import say
from actorflow_compiler.core.errors import ClusterError

DEFAULT_PORT = 50051  # used if neither the script nor the command line names one


@dataclass(frozen=True, slots=True)
class ScriptRequest:
    """The settings of a script through ``flow.config`` and ``flow.env``; None or empty if not set."""

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
class RunShape:
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


NodeFinder = Callable[[Sequence[str], str | None], int]


def restart_shape(
    request: ScriptRequest, settings: Settings | None, environ: Mapping[str, str], find_node: NodeFinder = own_node
) -> RunShape | None:
    """The shape with which to restart the script; None if this process already satisfies the request.

    ``settings`` are those of a rank that a launcher started, None those of a plain ``python script.py``.  What
    was given on the launcher's command line takes precedence; a contradicting script is a ClusterError that names both.
    """
    now = settings or Settings()
    _check(request, now)
    devices = request.devices or now.devices
    from_script = bool(request.nodes) and "nodes" not in now.given
    nnodes = len(request.nodes) if from_script else now.nnodes
    node = find_node(request.nodes, environ.get(NODE)) if from_script else now.node
    if (devices, nnodes) == (now.devices, now.nnodes):
        return None
    if nnodes == 1:
        master, port = "127.0.0.1", request.port or 0
    else:
        master = request.nodes[0] if from_script else now.master_host
        port = now.master_port if "port" in now.given else request.port or DEFAULT_PORT
    insecure = request.insecure or INSECURE.read(environ) or (from_script and of_one_machine(request.nodes))
    return RunShape(devices, nnodes, node, master, port, insecure, request.log_dir)


def check_token(shape: RunShape, secret: str, hint: str = "") -> None:
    """Raise ClusterError for several nodes that share neither token nor certificates, unless --insecure was given.

    ``secret``: the token, or the path of a certificate; empty where there is neither.  ``hint``: more for the error.
    """
    if shape.nnodes > 1 and not secret and not shape.insecure:
        raise ClusterError(
            f"the script asks for {shape.nnodes} nodes, and there is no secret that they share, so that nobody else "
            f"can join: export {TOKEN.variable}=… with the same value on every node, or {TLS_CA.variable}, "
            f"{TLS_CERT.variable} and {TLS_KEY.variable} with the files of each. On a network that you trust "
            f"wholly, flow.config.insecure() in the script, or {INSECURE.variable}=1, does without."
            f"{hint}"
        )


def of_one_machine(nodes: Sequence[str]) -> bool:
    """Whether all addresses are of the loopback, so that no other machine can join."""
    found = [resolve(node) for node in nodes]
    return all(addresses and all(map(is_loopback, addresses)) for addresses in found)


def _check(request: ScriptRequest, now: Settings) -> None:
    """Raise ClusterError where the script contradicts itself or the command line."""
    if request.gpu is not None and request.cpu is not None and request.gpu != request.cpu:
        raise ClusterError(
            f"{request.said['gpu']} and {request.said['cpu']} contradict each other: a device is one process of the "
            "run, whatever its kind; give one of them, or the same number"
        )
    if request.devices is not None and "devices" in now.given and request.devices != now.devices:
        name = "cpu" if request.gpu is None else "gpu"
        raise ClusterError(
            f"{request.said[name]} contradicts the {now.devices} on each node with which the run was started "
            "(--devices, or what torchrun, Slurm or Ray says); drop one of them, or give both the same number"
        )
    port = now.meeting_port or now.master_port
    if request.port is not None and "port" in now.given and request.port != port:
        raise ClusterError(
            f"{request.said['port']} contradicts the port {port} of the command line (--ctrl-port, "
            "--master-port); drop one of them, or give both the same"
        )
    if request.nodes and "nodes" in now.given:
        _check_nodes(request, now)


def _check_nodes(request: ScriptRequest, now: Settings) -> None:
    nnodes = now.most_nodes or now.nnodes
    if len(request.nodes) != nnodes:
        raise ClusterError(
            f"{request.said['nodes']} names {len(request.nodes)} nodes ({', '.join(request.nodes)}), which contradicts "
            f"--nnodes {nnodes} of the command line, or of what has started it (torchrun, Slurm, Ray); drop one of "
            "them, or give both the same"
        )
    listed, given = resolve(request.nodes[0]), resolve(now.master_host)
    if now.nnodes > 1 and request.nodes[0] != now.master_host and listed and given and not {*listed} & {*given}:
        raise ClusterError(
            f"{request.said['nodes']} says that the master is {request.nodes[0]}, and --master-addr {now.master_host} "
            "of the command line that it is another; drop one of them, or give both the same"
        )


_gpu_noted = False  # whether this process has printed that there is no GPU


def kind_of_gpu(rank: int) -> str:
    """The kind of device where a script asks for GPUs: "cpu" where there is no CUDA device, as rank 0 says once."""
    import torch  # here, since the command line does not need it

    if torch.cuda.is_available():
        return "cuda"
    global _gpu_noted
    if not _gpu_noted and rank == 0:
        say('"gpu" was asked for, and this machine has no CUDA device: the script runs on CPU devices')
    _gpu_noted = True
    return "cpu"
