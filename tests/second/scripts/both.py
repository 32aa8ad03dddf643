"""Every collective, DistributedDataParallel against torch's own, and a job, in one run; rank K writes OUT/K.json."""

import json
import sys
from pathlib import Path

import torch
from torch import distributed as dist

import actorflow as flow

rank, world = flow.env.get_rank(), flow.env.get_world_size()
found = {
    "place": [rank, world, flow.env.get_local_rank(), flow.env.get_node_size()],
    "before": dist.is_initialized(),
}


def mine(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + 10 * rank


def empty(*shape):
    return torch.full(shape, -1.0)


for name in ("comm", "distributed"):
    c = getattr(flow, name)
    x = mine(2)
    assert c.all_reduce(x) is None
    parts = [empty(2) for _ in range(world)]
    c.all_gather(parts, mine(2))
    joined = empty(2 * world)
    c.all_gather_into_tensor(joined, mine(2))
    exchanged = [empty(1) for _ in range(world)]
    c.all_to_all(exchanged, list(mine(world).split(1)))
    sent = mine(2)
    c.broadcast(sent, src=1)
    c.barrier()
    gathered = [empty(2) for _ in range(world)] if rank == 0 else None
    c.gather(mine(2), gathered, dst=0)
    reduced = mine(2)
    c.reduce(reduced, dst=0)
    part = empty(1)
    c.reduce_scatter(part, list(mine(world).split(1)))
    piece = empty(1)
    c.reduce_scatter_tensor(piece, mine(world))
    given = empty(1)
    c.scatter(given, list(mine(world).split(1)) if rank == 0 else None, src=0)
    passed = mine(2)
    if rank == 0:
        c.send(passed, dst=1)
    else:
        c.recv(passed, src=0)
    found[name] = {
        "all_reduce": x, "all_gather": torch.cat(parts), "all_gather_into_tensor": joined,
        "all_to_all": torch.cat(exchanged), "broadcast": sent, "gather": torch.cat(gathered) if gathered else None,
        "reduce": reduced if rank == 0 else None, "reduce_scatter": part, "reduce_scatter_tensor": piece,
        "scatter": given, "recv": passed,
    }  # fmt: skip
    found[name] = {op: value.tolist() if value is not None else None for op, value in found[name].items()}
top = mine(2)
flow.distributed.all_reduce(top, op=flow.distributed.ReduceOp.MAX)
found["max"] = top.tolist()


def of_lists(*args, **kwargs):
    raise RuntimeError("Backend gloo does not support alltoall")


has, dist.all_to_all = dist.all_to_all, of_lists  # as Gloo of torch 2.11, also where the torch at hand has more
rows = [empty(1 + rank, 2) for _ in range(world)]
work = flow.distributed.all_to_all(rows, [mine(1, 2), mine(2, 2)], async_op=True)
over = work.wait() and work.is_completed() and work.get_future().value() == rows
found["rows"] = [row.tolist() for row in rows] if over else None
dist.all_to_all = has
found["ranks"] = [flow.distributed.get_rank(), flow.distributed.get_world_size()]


def model():
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


torch.manual_seed(6)
batch, wanted = torch.randn(8, 4), torch.randn(8, 1)
half = slice(rank * 4, rank * 4 + 4)


def trained(net, x, y):
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, [round(float(p.detach().double().sum()), 6) for p in net.parameters()]


found["ours"] = trained(flow.nn.parallel.DistributedDataParallel(model()), batch[half], wanted[half])
found["theirs"] = trained(torch.nn.parallel.DistributedDataParallel(model()), batch[half], wanted[half])
found["alone"] = trained(model(), batch, wanted)

net = model()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)


@flow.global_function(type="train")
def step(x, y):
    loss = torch.nn.functional.mse_loss(net(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


found["job"] = [float(step(batch, wanted)) for _ in range(5)]
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
