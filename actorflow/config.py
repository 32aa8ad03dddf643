"""``flow.config``: request the devices, the port and other settings of a run in the script, before the run begins.

The settings take effect when the script is started by hand.  Then ``python script.py`` becomes the launcher of its
ranks when the run begins, at ``flow.env.init()`` or at the first call of a job, and the script runs again from its
beginning as each rank.  Under ``actorflow run`` they supply what the command line leaves open; a contradiction is an
error.
"""

from __future__ import annotations

from actorflow.rendezvous.start import request_setting
from actorflow.support.nearest_names import answer_with_nearest, unknown_name
from actorflow_compiler.core.errors import ClusterError

__all__ = ["cpu_device_num", "ctrl_port", "enable_tensor_float_32_compute", "gpu_device_num", "insecure"]

# names that older scripts set → what to use instead
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
    """Request ``n`` devices on every node: GPUs, or CPU devices on a machine without a CUDA device.

    Raises ClusterError if ``n`` is no integer above 0, if the machine has GPUs but fewer than ``n``, and after the run
    has begun.
    """
    call = f"flow.config.gpu_device_num({n!r})"
    _check(call, n, 1, None)
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else n
    if n > there:
        raise ClusterError(f"{call} was found, and this machine has {there} GPU{'s' * (there != 1)}; ask for fewer")
    request_setting("gpu", n, call)


def cpu_device_num(n: int) -> None:
    """Request ``n`` CPU devices on every node: processes that share its cores.

    Raises ClusterError if ``n`` is no integer above 0, and after the run has begun.
    """
    call = f"flow.config.cpu_device_num({n!r})"
    _check(call, n, 1, None)
    request_setting("cpu", n, call)


def ctrl_port(port: int) -> None:
    """Set the port of node 0 for control messages between ranks, the same on every node; 50051 by default.

    Raises ClusterError if ``port`` is no valid port, and after the run has begun.  A run that ``actorflow run`` has
    started on a single node keeps the free port that it has found.
    """
    call = f"flow.config.ctrl_port({port!r})"
    _check(call, port, 1, 65535)
    request_setting("port", port, call)


def insecure(yes: bool = True) -> None:
    """Let several nodes join without a shared secret (ACTORFLOW_TOKEN): anyone who reaches the port can then join.

    Use it only in networks that are fully trusted.  Raises ClusterError after the run has begun.
    """
    request_setting("insecure", yes, f"flow.config.insecure({yes!r})")


def enable_tensor_float_32_compute(yes: bool = True) -> None:
    """Allow TF32 in float32 matrix products on GPUs: ``torch.set_float32_matmul_precision("high")``, or "highest"."""
    import torch

    torch.set_float32_matmul_precision("high" if yes else "highest")


def _check(call: str, value: object, least: int, most: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        expected = f"from {least} to {most}" if most else f"above {least - 1}"
        raise ClusterError(f"{call} was found; a whole number {expected} was expected")


def __getattr__(name: str) -> object:
    raise unknown_name(__name__, name, _ELSEWHERE.get(name, ""))


answer_with_nearest(__name__)
