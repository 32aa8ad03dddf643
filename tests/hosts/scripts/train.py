"""Train models under layouts, one after the other: train.py MODEL:LAYOUT… ; what every rank saw is printed as JSON.

``--eager`` trains each model once, in one process and without a job: the losses that the others have to equal.
"""

import hashlib
import json
import sys
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

import actorflow as flow
from actorflow_compiler.plan.text import to_json
from digits import load_data
from gpt import GPT

STEPS, BATCH, PIECES = 5, 16, 4
HINTS = {
    "data": (1, lambda model: None),
    "data × pipeline": (PIECES, lambda model: flow.place(model, stages=2)),
    "pipeline": (PIECES, lambda model: flow.place(model, stages=4)),
    "zero": (1, lambda model: flow.zero(model, stage=3)),
}


def digits():
    torch.manual_seed(0)
    sizes = [64, 64, 48, 32]
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    (images, targets), _ = load_data()
    batches = [(images[i : i + BATCH], targets[i : i + BATCH]) for i in range(0, STEPS * BATCH, BATCH)]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 10)), batches


def gpt():
    torch.manual_seed(0)
    model = GPT(layers=4, width=32, heads=2, context=12, vocabulary=64)
    batches = [torch.randint(64, (2, BATCH, 12), generator=torch.Generator().manual_seed(n)) for n in range(STEPS)]
    return model, [tuple(batch) for batch in batches]


def train(name, hint, pieces):
    """Losses of all steps and, where there is a job, the plan."""
    model, batches = {"digits": digits, "gpt": gpt}[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(inputs, targets):
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    if hint is None:
        return [float(step(*batch)) for batch in batches], None
    hint(model)
    job = flow.global_function(type="train", micro_batches=pieces, name=name)(step)
    losses = [job(*batch) for batch in batches]
    return [float(loss) for loss in losses], job.plan


def digest(plan, rank):
    return hashlib.sha256(to_json(plan.for_rank(rank)).encode()).hexdigest()[:16]


found = {}
if "--eager" in sys.argv:
    found = {name: {"losses": train(name, None, 1)[0]} for name in ("digits", "gpt")}
else:
    rank, world = flow.env.rank(), flow.env.world_size()
    for case in sys.argv[1:]:
        name, layout = case.split(":")
        pieces, hint = HINTS[layout]
        losses, plan = train(name, hint, pieces)
        ranks = range(world) if rank == 0 else [rank]
        found[case] = {"losses": losses, "plans": {str(r): digest(plan, r) for r in ranks}}
print(json.dumps(found), flush=True)
