"""A data plane for tensors on a device, over a data plane that handles only host memory.

It serves ranks that share a GPU, which NCCL refuses, ranks with different kinds of devices (CPU and CUDA), and machines
without NCCL.  The device copies through pinned memory; on a CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from actorflow.devices import Device
from actorflow.transport.messages import DataPlane
from actorflow_compiler.plan.plan import Collective, TensorSpec

__all__ = ["StagedPlane"]


class StagedPlane:
    """A data plane whose tensors lie on ``device``, over the data plane ``host``, whose tensors lie in host memory.

    The calling thread must launch into the queue that wrote the tensors to send, or into a queue that waits for it.  A
    call blocks until the data are sent, or until they are received and their copy to the device is launched into that
    queue.
    """

    def __init__(self, host: DataPlane, device: Device) -> None:
        self._host = host
        self._device = device

    def open(self, peers: Sequence[tuple[int, int]], groups: Sequence[tuple[int, ...]]) -> None:
        """See ``DataPlane``."""
        self._host.open(peers, groups)

    def send(self, to: int, tensors: Sequence[Tensor]) -> None:
        """See ``DataPlane``."""
        self._host.send(to, self._device.to_host(tensors))

    def receive(self, source: int, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """See ``DataPlane``."""
        return self._device.to_device(self._host.receive(source, specs))

    def collective(self, comm: Collective, tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> list[Tensor]:
        """See ``DataPlane``."""
        return self._device.to_device(self._host.collective(comm, self._device.to_host(tensors), specs))

    def explain(self) -> str:
        """See ``DataPlane``."""
        return self._host.explain()

    def close(self) -> None:
        """See ``DataPlane``."""
        self._host.close()
