"""Streams of a real GPU: none is shared, and a rank that may compute on CPUs touches no GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from actorflow.devices import Cuda

pytestmark = pytest.mark.cuda

UNTOUCHED = """
import torch
from actorflow.launch.entry import _seed
from actorflow.rendezvous.settings import Settings

_seed(Settings(rank=1, local_rank=1, world=2, devices=2, oversubscribe=True))
assert not torch.cuda.is_initialized()
torch.zeros(1, device="cuda")
assert torch.cuda.current_device() == 1 % torch.cuda.device_count()
"""


def test_queues_have_streams_of_their_own_beyond_the_32_of_one_priority() -> None:
    device = Cuda()
    queues = [device.queue("compute"), *(device.queue(f"receive:{peer}") for peer in range(40))]
    assert len({queue.stream.cuda_stream for queue in queues}) == len(queues)
    x = torch.ones(4, device=device.where)
    device.synchronize()
    mark = None
    for queue in queues:
        queue.wait(mark)
        with queue.context():
            x.add_(1)
        mark = queue.mark()
    assert mark is not None
    mark.wait_on_host()
    assert x.tolist() == [float(len(queues) + 1)] * 4


def test_a_rank_takes_its_gpu_with_the_first_use_of_cuda() -> None:
    done = subprocess.run([sys.executable, "-c", UNTOUCHED], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
