"""One rank of PyTorch by itself: suite.py starts it with torchrun, or by itself for one device."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron import parts_to_split, split_over
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from training import Task, loss_of, noting_memory
from turns import Steps, take_turns

sys.path.append(str(Path(__file__).resolve().parents[1]))
from pipelines.setting import Part, cut  # isort: skip
from pipelines.theirs import SCHEDULES, pipelined  # isort: skip

CPU = torch.device("cpu")


def adamw(task: Task, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """A fused AdamW; tensors of one mesh are a group, as torch's kernels for many take no others together."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for p in parameters:
        groups.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=task.lr, fused=True)


def stepping(
    task: Task, forward: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, at: int = 0, of: int = 1
) -> Steps:
    """Steps over the rows ``at`` of ``of`` of each batch; rank 0 says the last loss, the mean over all rows."""
    batches = cycle([(x.chunk(of)[at].contiguous(), y.chunk(of)[at].contiguous()) for x, y in task.batches()])

    def steps(count: int) -> float | None:
        for _ in range(count):
            inputs, targets = next(batches)
            loss = loss_of(forward(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        last = loss.detach().clone()
        if of > 1:
            dist.all_reduce(last)  # where there are ranks with the same rows, all rows count as often
        return float(last) / (dist.get_world_size() if of > 1 else 1) if not at_rank() else None

    return steps


def at_rank() -> int:
    """The number of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def compiled(task: Task, module: nn.Module) -> nn.Module:
    """The module, compiled by torch's inductor if the setting says so."""
    if task.compiled:
        module.compile()
    return module


def sharded(task: Task, model: Any, mesh: DeviceMesh, keep: bool) -> nn.Module:
    """Split a GPT over the ranks with FSDP2, each block by itself; ``keep``: until its backward pass it stays whole."""
    for block in model.blocks:
        compiled(task, block)
        fully_shard(block, mesh=mesh, reshard_after_forward=not keep)
    fully_shard(model, mesh=mesh, reshard_after_forward=not keep)
    return model


def staged(task: Task, kind: str, across: str, mesh: DeviceMesh) -> Steps:
    """Two stages, each on two ranks that share it as ``across`` says: "data" or "tensor"."""
    stage, within = mesh.get_local_rank("pipeline"), mesh.get_local_rank(across)
    model = task.model()
    if across == "tensor":
        model = parts_to_split(model)
    part: nn.Module = Part(model, cut(task.layers, range(2))[stage])
    if across == "tensor":
        split_over(part, mesh["tensor"])
    optimizer = adamw(task, part.parameters())
    rows = slice(None)
    if across == "data":
        part = DistributedDataParallel(part, process_group=mesh["data"].get_group())
        rows = slice(within * task.batch // 2, (within + 1) * task.batch // 2)
    last, part = stage == 1, compiled(task, part)
    schedule = getattr(schedules, f"Schedule{kind}")(
        PipelineStage(part, stage, 2, CPU, group=mesh["pipeline"].get_group()), task.micro_batches, loss_fn=loss_of
    )
    batches = cycle([(x[rows].contiguous(), y[rows].contiguous()) for x, y in task.batches()])

    def steps(count: int) -> float | None:
        for _ in range(count):
            losses: list[Tensor] = []
            inputs, targets = next(batches)
            given: dict[str, Any] = {"target": targets, "losses": losses} if last else {}
            schedule.step(*([] if last else [inputs]), **given, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
        if not last:
            return None
        mean = torch.stack(losses).detach().mean()
        dist.all_reduce(mean, group=mesh[across].get_group())
        return float(mean) / 2 if within == 0 else None

    return steps


def training(name: str, task: Task) -> Steps:
    """The steps of a contender."""
    if task.of(name)[0] in SCHEDULES:
        return pipelined(name, task)
    name, task = task.of(name)
    rank, of = at_rank(), task.processes
    if " + 1F1B" in name or " + GPipe" in name:
        how, kind = name.split(" + ")
        across = {"DDP": "data", "DTensor": "tensor"}[how]
        return staged(task, kind, across, init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", across)))
    model: Any = task.model()
    if name == "eager":
        return stepping(task, compiled(task, model), adamw(task, model.parameters()))
    if name == "DDP":
        return stepping(task, compiled(task, DistributedDataParallel(model)), adamw(task, model.parameters()), rank, of)
    if name == "ZeroRedundancyOptimizer":
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(),
            optimizer_class=torch.optim.AdamW,
            lr=task.lr,
            fused=True,
            parameters_as_bucket_view=True,
        )
        return stepping(task, compiled(task, DistributedDataParallel(model)), optimizer, rank, of)
    if name == "FSDP2":
        model = sharded(task, model, init_device_mesh("cpu", (of,)), keep=False)
        return stepping(task, model, adamw(task, model.parameters()), rank, of)
    if name == "DTensor":
        model = split_over(parts_to_split(model), init_device_mesh("cpu", (of,)))
        return stepping(task, compiled(task, model), adamw(task, model.parameters()))
    assert name == "FSDP2 + DTensor", name
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = sharded(task, split_over(parts_to_split(model), mesh["tensor"]), mesh["data"], keep=True)
    return stepping(task, model, adamw(task, model.parameters()), mesh.get_local_rank("data"), 2)


def main() -> None:
    """Serve the referee."""
    task, rank = Task.from_json(sys.argv[2]), int(os.environ.get("RANK", "0"))
    task.bind_to_cores(rank)
    if task.processes > 1:
        dist.init_process_group("gloo")
    take_turns(sys.argv[1], rank, lambda name: noting_memory(rank, lambda: training(name, task)))
    if task.processes > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
