"""Train under a layout; save a checkpoint on the way, or load some and go on from each.

python checkpointed.py LAYOUT OUT save FOLDER | load FOLDER...
"""

import json
import sys

import torch
import torch.nn.functional as F

import actorflow as flow

layout, out, action, *folders = sys.argv[1:]
STEPS, SAVED = 7, 3
torch.set_default_dtype(torch.float64)


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(12, 40), torch.nn.BatchNorm1d(40), torch.nn.ReLU(), torch.nn.Dropout(0.2),
        torch.nn.Linear(40, 24), torch.nn.LayerNorm(24), torch.nn.Tanh(), torch.nn.Linear(24, 6),
    )  # fmt: skip


if action == "load":
    with flow.deferred_init():
        model = build()
else:
    model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20)
options = {"micro_batches": 2}  # in all layouts: batch norm sees micro-batches
if layout == "pipeline":
    flow.place(model, {f"[{2 * n}{2 * n + 1}]": flow.placement("cpu", [n]) for n in range(4)})
if layout == "hybrid":  # data 2 × pipeline 2, with ZeRO 3
    flow.place(model, {"[0-3]": flow.placement("cpu", [0, 1]), "[4-7]": flow.placement("cpu", [2, 3])})
if layout in ("hybrid", "zero"):
    flow.zero(model, 3)
if layout == "tensor":
    options["parallel"] = "tensor"


@flow.global_function(type="train", **options)
def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(16, 12, generator=generator), torch.randint(0, 6, (16,), generator=generator)


def go_on(first: int, last: int) -> list[torch.Tensor]:
    losses = []
    for number in range(first, last):
        losses.append(step(*batch(number)))
        scheduler.step()
    return losses


def found(losses: list[torch.Tensor]) -> dict[str, object]:
    state = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    return {"losses": [float(loss) for loss in losses], "state": state, "rate": scheduler.get_last_lr()}


results = []
if action == "save":
    go_on(0, SAVED)
    flow.checkpoint.save(
        folders[0], model=model, optimizer=optimizer, scheduler=scheduler, step=SAVED, note={"seen": (1, float("inf"))}
    )
    results.append(found(go_on(SAVED, STEPS)))  # the calls change what is saved while it is copied and written
else:
    for folder in folders:
        loaded = flow.checkpoint.load(folder, model=model, optimizer=optimizer, scheduler=scheduler)
        assert loaded.step == SAVED
        assert loaded["note"] == {"seen": (1, float("inf"))}
        results.append(found(go_on(loaded.step, STEPS)))
with open(out, "w") as file:  # by each rank, the same
    json.dump(results, file)
