"""Train a pipeline of two stages: pipeline.py STEPS MICRO_BATCHES; the master prints the seconds of a step."""

import json
import statistics
import sys
import time
from itertools import pairwise

import torch
from torch import nn

import actorflow as flow

WIDTH, BATCH = 16, 32  # few bytes: what TCP makes of many depends on the kernel, and on packets that were lost
steps, pieces = map(int, sys.argv[1:])
model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
flow.place(model, stages=2)


@flow.global_function(type="train", micro_batches=pieces, schedule="gpipe")
def train_step(inputs):
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


inputs = torch.randn(BATCH, WIDTH)
losses, times = [], []
for _ in range(steps):
    losses.append(float(train_step(inputs)))  # the loss is here before the backward pass is over: nothing is held up
    times.append(time.perf_counter())
periods = [b - a for a, b in pairwise(times[2:])]  # the first ones compile, and fill the pipeline
if flow.env.is_master():
    print(json.dumps({"period": statistics.median(periods), "losses": losses}), flush=True)
