"""Run ``opinfo_runs.py`` on DTensor instead of global tensors: four ranks as threads, as in torch's own tests of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup, _install_threaded_pg

from actorflow_compiler.core.placement import Placement as Devices
from actorflow_compiler.core.sbp import NdSbp, PartialSum, Split
from actorflow_compiler.plan.region import coordinates
from opinfo_runs import MESHES, RANKS, Verdict, plain, term

PATIENCE = 20.0  # seconds for one case
Pair = tuple[Verdict, Verdict]


class Ended(Exception):
    """A rank was ended because another one has raised."""


class Theirs:
    """DTensors on four ranks."""

    def __init__(self, axes: int = 1) -> None:
        self._hierarchy = MESHES[axes]
        _install_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        self._store = dist.HashStore()
        self._tasks: list[SimpleQueue[Callable[[], Pair]]] = [SimpleQueue() for _ in range(RANKS)]
        self._done: SimpleQueue[tuple[int, Pair | BaseException]] = SimpleQueue()
        self._here = threading.local()
        for rank in range(RANKS):
            threading.Thread(target=self._serve, args=(rank,), daemon=True).start()

    def _serve(self, rank: int) -> None:
        dist.init_process_group(backend="threaded", rank=rank, world_size=RANKS, store=self._store)
        self._here.rank = rank
        self._here.mesh = init_device_mesh("cpu", self._hierarchy)
        while True:
            task = self._tasks[rank].get()
            try:
                result: Pair | BaseException = task()
                if any(verdict.kind == "refused" for verdict in result):  # so that the others do not wait for this one
                    ProcessLocalGroup.exception_handle(Ended("another rank has raised"))
            except SystemExit:
                result = Ended("another rank has raised")
            except BaseException as error:
                ProcessLocalGroup.exception_handle(error)
                result = error
            self._done.put((rank, result))

    @property
    def mesh(self) -> DeviceMesh:
        """This rank's."""
        return self._here.mesh

    def run(self, function: Callable[[], Pair]) -> list[Pair]:
        for tasks in self._tasks:
            tasks.put(function)
        found: dict[int, Pair | BaseException] = {}
        while len(found) < RANKS:
            try:
                rank, result = self._done.get(timeout=PATIENCE)
                found[rank] = result
            except Empty:  # some ranks wait for others for ever
                ProcessLocalGroup.exception_handle(Ended("ranks wait for each other"))
        ProcessLocalGroup.reset()
        pairs = [pair for pair in found.values() if not isinstance(pair, BaseException)]
        errors = [e for e in found.values() if isinstance(e, BaseException)]
        if errors and not (pairs and all(isinstance(e, Ended) for e in errors)):
            raise next((e for e in errors if not isinstance(e, Ended)), errors[0])
        return pairs

    def spread(self, whole: Tensor, sbp: NdSbp) -> Tensor:
        devices = Devices("cpu", tuple(range(RANKS)), self._hierarchy)
        mine = term(whole, sbp, coordinates(devices, self._here.rank), self._hierarchy)
        splits = [Shard(e.dim) if isinstance(e, Split) else Replicate() for e in sbp]
        made = distribute_tensor(mine, self.mesh, splits, src_data_rank=None)
        if not any(isinstance(e, PartialSum) for e in sbp):
            return made
        lies = [Partial() if isinstance(e, PartialSum) else s for e, s in zip(sbp, splits, strict=True)]
        return DTensor.from_local(
            made.to_local(), self.mesh, lies, run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def whole(self, x: Any) -> Any:
        if isinstance(x, DTensor):
            x = x.detach().full_tensor()
        return plain(x) if isinstance(x, Tensor) else x
