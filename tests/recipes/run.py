"""Train recipes under layouts by the launcher and compare with eager PyTorch, whatever happens to one of them.

    actorflow run tests/recipes/run.py --devices 2 -- FOLDER 'a small CNN @ data 2' …

is what ``outcomes`` starts: every rank writes a line before and a line after each recipe, so that a run that dies or
stands still is known for the recipe that it was at, and is started again with those behind it.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import actorflow as flow
from recipes.compare import tensors, worst
from recipes.layouts import LAYOUTS, Layout
from recipes.recipe import RECIPES, Job, Recipe, Training
from watched import lines_of, watched

__all__ = ["Outcome", "Task", "outcomes"]

WORSE = 2.0  # how many times as far from float32 as eager bfloat16 a plan's bfloat16 may be …
NEAR = 1e-3  # … or this far, where both are near
PATIENCE = 180.0  # seconds that one recipe may take: a machine that does much else takes some for what is done in one


@dataclass(frozen=True)
class Task:
    """A recipe under a layout."""

    recipe: str
    layout: str


@dataclass(frozen=True)
class Outcome:
    """``ended`` is "equal", "apart", "raised", "died" or "hung"; ``said`` is what differs, or the error."""

    ended: str
    said: str = ""
    distance: float = 0.0
    seconds: float = 0.0


def trained(made: Recipe, job: Job, layout: Layout | None = None) -> dict[str, Tensor]:
    """Everything that a training leaves: what each call returned, and all state behind the last one."""
    torch.manual_seed(0)
    training: Training = made.make(job)
    if layout is not None:
        layout.hints(training.called)
    found: dict[str, Tensor] = {}
    for number, batch in enumerate(training.batches):
        found |= tensors(f"call {number}", training.run(*batch))
    for name, model in training.named.items():
        found |= tensors(name, model.state_dict())
    for number, optimizer in enumerate(training.stepped):
        state = tensors(f"optimizer {number}", optimizer.state_dict())
        found |= {at: t.double() if at.endswith("['step']") else t for at, t in state}  # a count, whatever its dtype
    found |= tensors("kept", training.kept())
    return found


def outcome(made: Recipe, layout: Layout) -> Outcome:
    """Train eagerly and as a job, in this process."""
    options = dict(layout.options)
    if made.whole:
        options.pop("micro_batches", None)
    torch.set_default_dtype(torch.float32 if made.bfloat16 else torch.float64)
    wanted = trained(made, Job(None))
    began = time.perf_counter()
    try:
        found = trained(made, Job(partial(_decorated, options)), layout)
    except Exception as error:
        return Outcome("raised", f"{type(error).__name__}: {error}", 0.0, time.perf_counter() - began)
    seconds = time.perf_counter() - began
    gap = worst(found, wanted)
    allowed = made.within
    if made.bfloat16 and gap.distance < float("inf"):
        exact = trained(made, Job(None, mixed=False))
        gap = worst(found, exact, dtypes=False)
        allowed = max(NEAR, WORSE * worst(wanted, exact, dtypes=False).distance)
    said = f"{gap.name}: {gap.why or f'{gap.distance:.1e} apart'}"
    return Outcome("equal" if gap.distance <= allowed else "apart", said, gap.distance, seconds)


def _decorated(options: dict[str, Any], function: Any, **own: Any) -> Any:
    given = {k: v for k, v in options.items() if k != "micro_batches" or own.get("type") != "predict"}
    return flow.global_function(**{**given, **own})(function)


def outcomes(tasks: Iterable[Task], python: str = sys.executable) -> dict[Task, Outcome]:
    """Train each task under the launcher, which ``python`` runs; tasks with as many devices share processes."""
    left = list(tasks)
    found: dict[Task, Outcome] = {}
    for devices in sorted({LAYOUTS[t.layout].devices for t in left}):
        share = [t for t in left if LAYOUTS[t.layout].devices == devices]
        while share:
            found |= _run(share, devices, python)
            share = [t for t in share if t not in found]
    return found


def _run(tasks: Sequence[Task], devices: int, python: str) -> dict[Task, Outcome]:
    """Run processes until all tasks are done, or one of them has killed or stopped the run."""
    with tempfile.TemporaryDirectory() as folder:
        names = [f"{t.recipe} @ {t.layout}" for t in tasks]
        command = [python, "-m", "actorflow", "run", __file__, "--devices", str(devices), "--no-bar"]
        command += ["--", folder, *names]
        with (Path(folder) / "said").open("w+") as said:
            path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
            process = subprocess.Popen(command, stdout=said, stderr=said, env={**os.environ, "PYTHONPATH": path})
            stuck = not watched(process, Path(folder), PATIENCE)
            said.seek(0)
            words = said.read()
        lines = [lines_of(Path(folder) / f"rank {rank}") for rank in range(devices)]
    done = [{Task(*line["task"]): Outcome(**line["outcome"]) for line in of if line["outcome"]} for of in lines]
    begun = [Task(*line["task"]) for of in lines for line in of]
    found = {}
    for task in tasks:
        if all(task in of for of in done):
            found[task] = max((of[task] for of in done), key=lambda o: (o.ended != "equal", o.distance))
        elif task in begun or task == tasks[0]:  # what a run dies of before its first task would kill the next, too
            tail = "\n".join(words.splitlines()[-12:])
            found[task] = Outcome("hung" if stuck else "died", tail)
    return found


def main(folder: str, *names: str) -> None:
    """Train tasks one after another, and write down what comes of each."""
    import recipes.all  # noqa: F401

    torch.set_num_threads(1)
    gc.freeze()  # torch and the recipes: what is collected after each is what it has left
    with (Path(folder) / f"rank {flow.env.rank()}").open("w", buffering=1) as file:
        for name in names:
            recipe, layout = name.split(" @ ")
            line: dict[str, Any] = {"task": [recipe, layout], "outcome": None}
            print(json.dumps(line), file=file)
            found = outcome(RECIPES[recipe], LAYOUTS[layout])
            print(json.dumps(line | {"outcome": asdict(found)}), file=file)
            gc.collect()


if __name__ == "__main__":
    main(*sys.argv[1:])
