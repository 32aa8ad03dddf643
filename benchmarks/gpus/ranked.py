"""A user's script for the launcher: train a small model by the named plan, and print its losses.

With "nccl" as third argument, ranks that share a GPU exchange tensors over NCCL all the same.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.nn.functional as F

import actorflow as flow
from gpt import GPT

LAYERS, CONTEXT, STEPS = 4, 64, 4


def main(plan: str, kind: str, over: str = "") -> None:
    """Train a small GPT, by a plan or, for "eager", without one."""
    if over == "nccl":
        os.environ["NCCL_HOSTID"] = os.environ["RANK"]  # NCCL lets no two ranks of a host share a GPU
    torch.manual_seed(0)
    model = GPT(LAYERS, 64, 4, CONTEXT).to(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    if "pipeline" in plan:
        half = flow.env.get_world_size() // 2
        first, second = (flow.placement(kind, list(range(at, at + half))) for at in (0, half))
        flow.place(model, {r"embed|positions|blocks\.[01]": first, r"blocks\.[23]|norm|head": second})
    if plan == "zero":
        flow.zero(model, stage=3)

    def train_step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = train_step
    if plan != "eager":
        parallel = "tensor" if plan == "tensor" else None
        step = flow.global_function(type="train", parallel=parallel, micro_batches=4 if "pipeline" in plan else 1)(
            train_step
        )
    random = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        batch = [torch.randint(256, (8, CONTEXT), generator=random) for _ in range(2)]
        losses.append(float(step(*(t.to(kind) if plan == "eager" else t for t in batch)).detach()))
    if over == "nccl":
        check_planes(step)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(losses), flush=True)


def check_planes(job: Any) -> None:
    """Raise AssertionError unless the job's plan has communications, all of them over NCCL."""
    planes = {actor.comm.plane for actor in job.last.plan.actors if actor.comm is not None}
    assert planes == {"nccl"}, planes


if __name__ == "__main__":
    main(*sys.argv[1:])
