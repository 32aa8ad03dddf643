"""Say in the script what a run is to have (devices on each node, a port), before the run begins.

The settings matter where the script is started by hand: ``python script.py`` becomes the launcher of its
ranks when the run begins, at ``flow.env.init()`` or at the first call of a job, and the script runs again from
its beginning as each of them.  Under ``actorflow run`` they fill in what the command line does not say; a
contradiction is an error.
"""

from __future__ import annotations

from actorflow.rendezvous.start import request_setting
from actorflow_compiler.core.errors import ClusterError

__all__ = ["cpu_device_num", "ctrl_port", "enable_tensor_float_32_compute", "gpu_device_num", "insecure"]

# names that scripts of the time set → what there is instead
_ELSEWHERE = {
    "machine": "the list of nodes is given with flow.env.machine",
    "machine_num": "the number of nodes is the length of the list of flow.env.machine",
    "data_port": "transfers use ports that the system chooses",
    "use_rdma": "flow.env.init_rdma is where InfiniBand is asked for",
    "reserved_host_mem_mbyte": "memory is limited with memory_budget= of flow.global_function",
    "reserved_device_mem_mbyte": "memory is limited with memory_budget= of flow.global_function",
    "enable_debug_mode": "`actorflow plan script.py` shows what would run",
}


def gpu_device_num(n: int) -> None:
    """Ask for ``n`` devices on every node, which are GPUs; where a machine has no CUDA device, CPU devices.

    Raises ClusterError for what is no number above 0, for more than the machine's GPUs, where it has some, and
    after the run has begun.
    """
    call = f"flow.config.gpu_device_num({n!r})"
    _check(call, n, 1, None)
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else n
    if n > there:
        raise ClusterError(f"{call} was found, and this machine has {there} GPU{'s' * (there != 1)}; ask for fewer")
    request_setting("gpu", n, call)


def cpu_device_num(n: int) -> None:
    """Ask for ``n`` devices on every node, which are CPU devices: processes that share the cores.

    Raises ClusterError for what is no number above 0, and after the run has begun.
    """
    call = f"flow.config.cpu_device_num({n!r})"
    _check(call, n, 1, None)
    request_setting("cpu", n, call)


def ctrl_port(port: int) -> None:
    """Use this port of node 0 for what the ranks say to each other, the same on every node; 50051 is the default.

    Raises ClusterError for what is no port, and after the run has begun.  A run that ``actorflow run`` has started
    on one node alone keeps the free port that it has found.
    """
    call = f"flow.config.ctrl_port({port!r})"
    _check(call, port, 1, 65535)
    request_setting("port", port, call)


def insecure(yes: bool = True) -> None:
    """Let several nodes come together without a shared secret (ACTORFLOW_TOKEN): anyone who reaches the port can join.

    For networks that are trusted wholly.  Raises ClusterError after the run has begun.
    """
    request_setting("insecure", yes, f"flow.config.insecure({yes!r})")


def enable_tensor_float_32_compute(yes: bool = True) -> None:
    """Let float32 matrix products of GPUs use TF32: ``torch.set_float32_matmul_precision("high")``, or "highest"."""
    import torch

    torch.set_float32_matmul_precision("high" if yes else "highest")


def _check(call: str, value: object, least: int, most: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        expected = f"from {least} to {most}" if most else f"above {least - 1}"
        raise ClusterError(f"{call} was found; a whole number {expected} was expected")


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    instead = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
    raise AttributeError(f"flow.config has no {name!r}{instead}; it has {', '.join(__all__)}")
