"""Train, evaluate between steps, schedule the learning rate, end with a shorter batch, save on the master alone."""

import sys

import torch
import torch.nn.functional as F

import actorflow as flow
from models import CASES

name, layout, path = sys.argv[1:4]
sizes = [16, 16, 16, 6]
case = CASES[name]
model = case.model()
optimizer = case.optimizer(model)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
micro_batches = 1
if layout == "split":
    flow.distribute(model, {r"head\.weight": flow.sbp.split(0)})
elif layout == "pipeline":
    half = flow.env.world_size() // 2
    stages = [flow.placement("cpu", range(half)), flow.placement("cpu", range(half, 2 * half))]
    flow.place(model, dict(zip(case.stages, stages, strict=True)))
    micro_batches = 4
elif layout == "home":
    flow.distribute(model, {".*": flow.sbp.broadcast}, placement=flow.placement("cpu", [flow.env.world_size() - 1]))
    micro_batches = 2


@flow.global_function(type="train", micro_batches=micro_batches)
def train_step(inputs, targets):
    loss = case.loss(model, inputs, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@flow.global_function(type="predict")
def evaluate(inputs, targets):
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


losses, held_out = [], []
batches = case.batches([*sizes, 10])
for inputs, targets in batches[:-1]:
    losses.append(train_step(inputs, targets))
    scheduler.step()
    held_out.append(evaluate(*batches[-1]))
if flow.env.is_master():
    state = {key: value.clone() for key, value in model.state_dict().items()}
    torch.save({"losses": [float(x) for x in losses], "held out": [float(x) for x in held_out], "state": state}, path)
