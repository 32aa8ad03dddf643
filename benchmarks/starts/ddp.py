"""What a user writes for torchrun: the same GPT under DistributedDataParallel, one step of the same batch."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import BATCH, CONTEXT, end_of_step, model_of_gpt, rows
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(model_of_gpt())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens, targets = (whole.chunk(world)[rank] for whole in rows(BATCH, CONTEXT))
loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
loss.backward()
optimizer.step()
optimizer.zero_grad()
mean = loss.detach() / world
dist.all_reduce(mean)  # the loss of the whole batch, as the other script has it
if rank == 0:
    end_of_step(float(mean))
dist.destroy_process_group()
os._exit(0)  # DDP keeps its group, whose threads end the process by SIGABRT if they free a tensor while Python ends
