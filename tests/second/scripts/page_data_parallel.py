"""DistributedDataParallel with a sampler and a loader on each rank, its parameters saved by one."""

from __future__ import annotations

from typing import Any

import actorflow as flow
from actorflow.nn.parallel import DistributedDataParallel as ddp  # noqa: N813 -- as the page writes it

features = flow.arange(64.0).reshape(16, 4) % 7 / 7
dataset = flow.utils.data.TensorDataset(features, features.sum(1, keepdim=True))
sampler: Any = flow.utils.data.distributed.DistributedSampler(dataset, shuffle=False)
loader = flow.utils.data.DataLoader(dataset, batch_size=8 // flow.env.get_world_size(), sampler=sampler)

m: Any = flow.nn.Linear(4, 1).to("cpu")
m = ddp(m)
loss_fn = flow.nn.MSELoss(reduction="mean")
optimizer = flow.optim.SGD(m.parameters(), 0.1)

losses = []
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = loss_fn(m(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        flow.comm.all_reduce(mean)
        losses.append(float(mean) / flow.env.get_world_size())

if flow.env.get_rank() == 0:
    flow.save(m.state_dict(), "ddp_model")
flow.comm.barrier()
told = {"losses": losses, "keys": list(flow.load("ddp_model"))}
