"""A few steps of a small model on every device of the run; the losses, and where each rank is, are printed."""

from __future__ import annotations

import os
import signal
import sys

import torch

import actorflow as flow

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


@flow.global_function(type="train")
def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


print("place", flow.env.rank(), flow.env.world_size(), flow.env.node(), flow.env.node_count(), flush=True)
generator = torch.Generator().manual_seed(2)
for _ in range(3):
    loss = step(torch.randn(16, 8, generator=generator), torch.randint(4, (16,), generator=generator))
    print(f"loss {float(loss):.6f}", flush=True)
print("cards", os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME"), flush=True)
match sys.argv[1:]:
    case ["die", rank] if flow.env.rank() == int(rank):
        raise RuntimeError("this rank was told to die")
    case ["wait", folder]:
        with open(os.path.join(folder, f"rank{flow.env.rank()}.new"), "w") as file:
            file.write(str(os.getpid()))
        os.rename(file.name, os.path.join(folder, f"rank{flow.env.rank()}"))
        signal.pause()  # until somebody ends this rank, or the run
