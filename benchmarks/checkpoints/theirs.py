"""One rank of FSDP2: checkpoint.py starts it with torchrun."""

from __future__ import annotations

import os
import sys
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import GPT, Setting, loss_of, serve


class FullySharded:
    """FSDP2 with each block a group of its own, whose parameters are dropped after their use (the default).

    Ways to save: "async", with ``torch.distributed.checkpoint.async_save``, which copies before it returns and writes
    in a thread; and "whole", with the whole state gathered on rank 0, and written there with ``torch.save``.
    """

    def __init__(self, setting: Setting, rank: int) -> None:
        self._setting, self._rank = setting, rank
        self._future: Future[Any] | None = None
        self._savers = dist.new_group(backend="gloo")  # the thread must not meet a step's collectives
        with torch.device("meta"):
            self._model = setting.model()
        mesh = init_device_mesh("cpu", (setting.ranks,))
        for block in self._model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self._model, mesh=mesh)

    def step(self, number: int) -> float:
        """See ``Trainer``."""
        each = self._setting.batch // self._setting.ranks
        mine = slice(self._rank * each, (self._rank + 1) * each)
        tokens, targets = self._setting.batch_of(number)
        loss = loss_of(self._model(tokens[mine]), targets[mine])
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()

    def save(self, how: str, path: str) -> None:
        """See ``Trainer``."""
        if how == "async":
            state = self._state(StateDictOptions())
            found = async_save(state, checkpoint_id=path, process_group=self._savers)
            assert isinstance(found, Future)
            self._future = found
            return
        whole = self._state(StateDictOptions(full_state_dict=True, cpu_offload=True))
        if self._rank == 0:
            os.makedirs(path)
            with open(os.path.join(path, "state.pt"), "wb") as file:
                torch.save(whole, file)
                file.flush()
                os.fsync(file.fileno())  # as the others do
        dist.barrier()

    def saved(self) -> bool:
        """See ``Trainer``."""
        return self._future is None or self._future.done()

    def finish(self) -> None:
        """See ``Trainer``."""
        if self._future is not None:
            self._future.result()
            self._future = None

    def load(self, how: str, path: str) -> None:
        """See ``Trainer``."""
        self._model.to_empty(device="cpu")
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=self._setting.lr, fused=True)
        if not path:
            _initialise(self._model)
        elif how == "async":
            state = self._state(StateDictOptions())
            load(state, checkpoint_id=path)
            self._give(state, StateDictOptions())
        else:
            whole: dict[str, Any] = {"model": {}, "optimizer": {}}
            if self._rank == 0:
                whole = torch.load(os.path.join(path, "state.pt"), mmap=True, weights_only=True)
            self._give(whole, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))

    def _state(self, options: StateDictOptions) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer, options=options)
        return {"model": model, "optimizer": optimizer}

    def _give(self, state: dict[str, Any], options: StateDictOptions) -> None:
        set_model_state_dict(self._model, state["model"], options=options)  # set_state_dict skips an empty model's
        set_optimizer_state_dict(self._model, self._optimizer, state["optimizer"], options=options)


def _initialise(model: GPT) -> None:
    """Give a model whose memory is empty its first values."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    serve(sys.argv[1], rank, FullySharded(Setting.from_json(sys.argv[2]), rank))
    dist.destroy_process_group()
