"""Train a digit classifier whose hidden layers are data-parallel and whose output layer is split over the devices.

actorflow run examples/digits.py --devices 2
python examples/digits.py
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from torch import nn

import actorflow as flow
from actorflow_compiler.plan.text import to_text

ENOUGH = 0.95  # held-out accuracy


class Classifier(nn.Module):
    """8 × 8 pixels to the logits of ten digits."""

    def __init__(self, width=128):
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.output = nn.Linear(width, 10)

    def forward(self, images):
        return self.output(self.hidden(images))


def load_data(held_out=360):
    """Images as float32[n, 64] in 0 … 1 and digits as int64[n]: some to train with, some held out."""
    digits = load_digits()
    shuffled = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.data, dtype=torch.float32)[shuffled] / 16
    targets = torch.tensor(digits.target)[shuffled]
    return (images[held_out:], targets[held_out:]), (images[:held_out], targets[:held_out])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--plan", default="digits.plan.txt", help="file that the plan is written to")
    options = parser.parse_args()
    torch.manual_seed(0)

    train, held_out = load_data()
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    flow.distribute(model, {r"output\.(weight|bias)": flow.sbp.split(0)})

    @flow.global_function(type="train")
    def train_step(images, targets):
        loss = F.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    @flow.global_function(type="predict")
    def predict(images):
        return model(images).argmax(dim=1)

    is_master = flow.env.is_master()
    columns = (TextColumn("epoch {task.fields[epoch]}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    batches = -(-len(train[0]) // options.batch)  # the last one is shorter, and has a plan of its own
    plan = None
    with Progress(*columns, TextColumn("loss {task.fields[loss]}"), disable=not is_master) as progress:
        bar = progress.add_task("train", total=options.epochs * batches, epoch=1, loss="…")
        for epoch in range(1, options.epochs + 1):
            order = torch.randperm(len(train[0]))  # the same on every rank, which all have the same seed
            for rows in order.split(options.batch):
                loss = train_step(train[0][rows], train[1][rows])  # returns at once
                plan = plan or train_step.plan
                progress.update(bar, advance=1, epoch=epoch)
            progress.update(bar, loss=f"{float(loss):.4f}")  # reading waits, so it is done once in an epoch
            schedule.step()

    accuracy = float((predict(held_out[0]) == held_out[1]).float().mean())
    if is_master:
        print(f"held-out accuracy: {accuracy:.3f}")
        path = Path(options.plan)
        path.write_text(to_text(plan))
        print(f"plan written to {path.resolve()}")
    if accuracy < ENOUGH:
        sys.exit(f"accuracy {accuracy:.3f} is below {ENOUGH}")


if __name__ == "__main__":
    main()
