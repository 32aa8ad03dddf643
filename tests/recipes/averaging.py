"""Averages of models over training, by torch.optim.swa_utils and by hand."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from recipes.data import classes
from recipes.recipe import Training, recipe

KIND = "averages"
NORM = "batch norm sees one micro-batch at a time, so that two are another training"


def averaged(job, batches, *, in_step=True, start=0, own=None, **options):
    """A classifier, an average of it that is brought up to date in or beside the step, and a job that predicts."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)) if own is None else own
    average = AveragedModel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    @job
    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if in_step:
            average.update_parameters(model)
        return loss

    @job(type="predict")
    def predict(x):
        return average(x)

    calls = []

    def run(x, y):
        loss = train_step(x, y)
        calls.append(1)
        if not in_step and len(calls) > start:
            average.update_parameters(model)
        average.eval()
        found = predict(x)
        average.train()
        return loss, found

    return Training({"model": model, "average": average}, optimizer, run, batches, uncalled=("average",))


def normalised():
    """A classifier with statistics in buffers."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


@recipe(KIND, "an exponential average in the step")
def ema(job):
    """AveragedModel with get_ema_multi_avg_fn: the first call copies, as its counter says; a predict job uses it."""
    return averaged(job, classes(6, 4, steps=5), multi_avg_fn=get_ema_multi_avg_fn(0.9))


@recipe(KIND, "an equal average in the step")
def swa(job):
    """AveragedModel as it comes, whose counter divides."""
    return averaged(job, classes(6, 4, steps=5))


@recipe(KIND, "an equal average over lists in the step")
def lists(job):
    """AveragedModel with get_swa_multi_avg_fn, as it is on GPUs."""
    return averaged(job, classes(6, 4, steps=5), multi_avg_fn=get_swa_multi_avg_fn())


@recipe(KIND, "an average by a function of one's own in the step")
def function(job):
    """AveragedModel with an avg_fn that takes the number of models into account."""

    def average(old, new, count):
        share = torch.clamp((1 + count) / (10 + count), max=0.3)
        return old * share + new * (1 - share)

    return averaged(job, classes(6, 4, steps=5), avg_fn=average)


@recipe(KIND, "averaged buffers in the step", whole=NORM)
def buffers(job):
    """AveragedModel with use_buffers over batch norm."""
    options = {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True}
    return averaged(job, classes(6, 4, steps=5), own=normalised(), **options)


@recipe(KIND, "copied buffers in the step", whole=NORM)
def copied(job):
    """AveragedModel without use_buffers over batch norm, whose statistics it copies."""
    return averaged(job, classes(6, 4, steps=5), own=normalised(), multi_avg_fn=get_ema_multi_avg_fn(0.9))


@recipe(KIND, "an exponential average beside the step")
def beside(job):
    """update_parameters in the loop, from the third call on, over parameters that plans own."""
    return averaged(job, classes(6, 4, steps=5), in_step=False, start=2, multi_avg_fn=get_ema_multi_avg_fn(0.9))


@recipe(KIND, "an equal average of buffers beside the step", whole=NORM)
def beside_buffers(job):
    """update_parameters in the loop with use_buffers."""
    return averaged(job, classes(6, 4, steps=5), own=normalised(), in_step=False, start=1, use_buffers=True)


@recipe(KIND, "batch norm over all batches", whole=NORM)
def cumulative_norm(job):
    """nn.BatchNorm1d(momentum=None), whose statistics are an equal average of all batches."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    @job
    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, train_step, classes(6, 4))
