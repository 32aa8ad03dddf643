"""One rank of PyTorch's DataLoader and DistributedDataParallel: data.py starts it with torchrun."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from decoding import JpegFiles, Setting
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from turns import Steps, take_turns


def jpeg(setting: Setting) -> Steps:
    """Whole epochs over the JPEG files; rank 0 says the last loss, which is the mean of the ranks'."""
    rank = dist.get_rank()
    dataset = JpegFiles(setting, "theirs", rank)
    sampler: DistributedSampler[tuple[torch.Tensor, int]] = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(
        dataset,
        setting.batch // setting.ranks,
        sampler=sampler,
        num_workers=setting.workers,
        persistent_workers=True,
    )
    model = DistributedDataParallel(setting.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=setting.lr, momentum=0.9)
    done = 0

    def epochs(count: int) -> float | None:
        nonlocal done
        for _ in range(count):
            sampler.set_epoch(done)
            done += 1
            for images, targets in loader:
                loss = F.cross_entropy(model(images), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        last = loss.detach().clone()
        dist.all_reduce(last)
        return float(last) / setting.ranks if rank == 0 else None

    return epochs


if __name__ == "__main__":
    torch.set_num_threads(1)
    setting = Setting.from_json(sys.argv[2])
    dist.init_process_group("gloo")
    take_turns(sys.argv[1], int(os.environ["RANK"]), lambda _: (jpeg(setting), dict))
    dist.destroy_process_group()
