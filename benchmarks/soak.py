"""See whether anything grows in a long run: memory, files, threads or the time of a step.

python benchmarks/soak.py                       half an hour of steps, then 500 shapes and 200 jobs
python benchmarks/soak.py --minutes 2 --shapes 60 --jobs 40
python benchmarks/soak.py steps                 one of the three: steps, shapes, jobs

"steps" trains on 2 ranks, with batches of several shapes, evaluation, checkpoints, a trace, and ranks that are slow now
and then.  "shapes" calls one job with another shape of batch each time, in an order without a trend, so that the plans
that are there late are as large as those that are there early; every tenth call goes back to a shape of long ago, whose
plan was let go where fewer are kept (ACTORFLOW_MOST_PLANS).  "jobs" makes job after job over one model, and keeps them
all.  Every loss of "shapes" and "jobs" is compared with that of PyTorch on one device.

The first part of each, in which plans are made and memory is still taken, is not counted.  What is compared is the
median of the part behind it and that of the last part.  Memory is what is resident in a rank, with what it shares;
files and threads are the fewest of each part; work is the processor time of all its threads for a step, which other
programs disturb less than the time.

Ends with exit status 1 where memory has grown by more than 1% (with shapes and jobs: 5%), where there are more open
files than before or two threads more, or where a step of "steps" takes a quarter more work.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import psutil
import torch
from torch import Tensor, nn

import actorflow as flow
from actorflow.distributed import default_group

WARM = 0.3  # the share of a run that is not counted, in which the last shapes come for the first time
LATE = 0.3  # the share at its end, and behind the warm-up, of which medians are taken
MOST = {"steps": 0.01, "shapes": 0.05, "jobs": 0.05}  # growth of memory
SLOWER = 1.25  # work of a step, as a multiple of that before
HELPERS = 1  # threads that may come later, once: the one that asks why a rank takes long stays for the next time
CLOSE = 1e-9  # how far a loss in float64 may be from that on one device
ROWS = range(2, 52, 2)  # of the batches of "shapes"
SHORTEST = 8  # of their sequences
EVERY = 20  # steps from one look at the process to the next
LENGTHS = (12, 16, 20, 24, 28, 32, 40, 48)  # of sequences in the batches
VOCABULARY, WIDTH = 64, 64


@dataclass(frozen=True, slots=True)
class Look:
    """A rank's process at one moment."""

    memory: int  # bytes
    files: int
    threads: int
    step: float  # seconds, the median of the steps since the last look
    work: float  # seconds of processor time of a step, the mean of the same steps


class Plain(nn.Module):
    """A smaller one without dropout, whose losses are those of one device."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """As ``Net.forward``."""
        out: Tensor = self.head(torch.relu(self.up(self.embed(x))))
        return out


class Net(nn.Module):
    """A small transformer, whose batches may have any shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """The logits, float32[batch, length, VOCABULARY], of int64[batch, length]."""
        out: Tensor = self.head(self.block(self.embed(x)))
        return out


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice(list(MOST)), metavar="[steps|shapes|jobs]...")
@click.option("--minutes", default=30.0, show_default=True, help="Of steps.")
@click.option("--shapes", default=500, show_default=True)
@click.option("--jobs", default=200, show_default=True)
@click.option("--devices", default=2, show_default=True)
@click.option("--rank", type=click.Choice(list(MOST)), hidden=True, help="Be a rank of such a run.")
@click.option("--folder", hidden=True)
def main(
    parts: tuple[str, ...], minutes: float, shapes: int, jobs: int, devices: int, rank: str | None, folder: str
) -> None:
    """Run, or be a rank."""
    if rank is not None:
        looks = Looks(Path(folder))
        {"steps": lambda: steps(looks, 60 * minutes), "shapes": lambda: other_shapes(looks, shapes),
         "jobs": lambda: other_jobs(looks, jobs)}[rank]()  # fmt: skip
        return
    print(f"{'':10}{'rank':6}{'looks':8}{'memory':22}{'files':12}{'threads':12}{'work':9}time of a step")
    grown = False
    for part in parts or tuple(MOST):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "actorflow", "run", __file__, "--devices", str(devices)]
            command += ["--log-dir", folder]
            if part == "steps":
                command += ["--trace", str(Path(folder, "trace"))]
            words = ["--rank", part, "--minutes", str(minutes), "--shapes", str(shapes), "--jobs", str(jobs)]
            done = subprocess.run(
                [*command, "--", *words, "--folder", folder], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, env={**os.environ, "OMP_NUM_THREADS": "1", "ACTORFLOW_CACHE": str(Path(folder, "cache"))},
            )  # fmt: skip
            if done.returncode:
                raise click.ClickException(f"the run of {part} failed:\n{done.stdout}")
            for rank_ in range(devices):
                text, more = judged(part, Path(folder, f"looks-{rank_}"))
                grown = grown or more
                print(f"{part:10}{rank_:<6}{text}", flush=True)
    sys.exit(int(grown))


def judged(part: str, file: Path) -> tuple[str, bool]:
    """A line for a rank's looks, and whether something has grown."""
    looks = [Look(**json.loads(line)) for line in file.read_text().splitlines()]
    behind = looks[int(WARM * len(looks)) :]
    count = max(int(LATE * len(looks)), 1)
    before, after = behind[:count], behind[-count:]

    def of(field: str, chosen: Callable[[Any], Any]) -> tuple[Any, Any]:
        return tuple(chosen(getattr(look, field) for look in some) for some in (before, after))

    memory, step, work = (of(field, statistics.median) for field in ("memory", "step", "work"))
    files, threads = of("files", min), of("threads", min)  # the fewest: a checkpoint is open for a moment
    growth = memory[1] / memory[0] - 1
    more = growth > MOST[part] or files[1] > files[0] or threads[1] > threads[0] + HELPERS
    more = more or (part == "steps" and work[1] > SLOWER * work[0])
    line = (
        f"{len(looks):<8}{f'{memory[1] / 1e6:.0f} MB ({growth:+.1%})':22}{f'{files[0]} → {files[1]}':12}"
        f"{f'{threads[0]} → {threads[1]}':12}{f'{work[1] / work[0]:.2f} ×':9}{step[1] / step[0]:.2f} ×"
        f"{'  GROWN' if more else ''}"
    )
    return line, more


class Looks:
    """Writes what this rank's process takes, every so many steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = Path(folder, f"looks-{flow.env.rank()}")
        self._process = psutil.Process()
        self._times: list[float] = []
        self._work, self._last = time.process_time(), time.perf_counter()

    def step(self, every: int) -> None:
        """A step is done."""
        now = time.perf_counter()
        self._times.append(now - self._last)
        if len(self._times) == every:
            found = Look(
                self._process.memory_info().rss, self._process.num_fds(), self._process.num_threads(),
                statistics.median(self._times), (time.process_time() - self._work) / every,
            )  # fmt: skip
            with self._file.open("a") as file:
                file.write(json.dumps(asdict(found)) + "\n")
            self._times.clear()
            self._work = time.process_time()
        self._last = time.perf_counter()


Work = Callable[[Tensor], Tensor]


def with_optimizer(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer."""
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def functions_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Work, Work]:
    """Functions that train and judge a model."""

    def train(x: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def judge(x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())

    return train, judge


def jobs_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Work, Work]:
    """Jobs that do so."""
    train, judge = functions_of(model, optimizer)
    return flow.global_function(type="train")(train), flow.global_function(type="predict")(judge)


class Compared:
    """A model, and a copy of it that PyTorch trains on one device."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.optimizer = with_optimizer(Plain().double())
        self._alone = functions_of(*with_optimizer(copy.deepcopy(self.model)))

    def call(self, jobs: tuple[Work, ...], x: Tensor) -> None:
        """Train, and judge where there is a job for it; the end of the run where a loss is not that of one device."""
        for job, alone in zip(jobs, self._alone, strict=False):
            found, expected = float(job(x)), float(alone(x))
            if not abs(found - expected) < CLOSE:
                raise SystemExit(f"the loss of a batch {tuple(x.shape)} was {found}; on one device it is {expected}")


def batch(number: int, length: int, rows: int = 8) -> Tensor:
    """The batch of a step, int64[rows, length], the same on all ranks; one that a model can learn."""
    start = torch.randint(VOCABULARY, (rows, 1), generator=torch.Generator().manual_seed(number))
    return (start + torch.arange(length)) % VOCABULARY


def steps(looks: Looks, seconds: float) -> None:
    """Train for so long, with all that a training has beside its steps."""
    torch.manual_seed(0)
    model, optimizer = with_optimizer(Net())
    train, judge = jobs_of(model, optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    own = random.Random(flow.env.rank())  # a rank is slow at steps of its own
    keeper = flow.checkpoint.Keeper(
        looks.folder / "kept", model=model, optimizer=optimizer, schedule=schedule, every=500, keep=2
    )
    group, going = default_group(), torch.ones(1)
    end = time.monotonic() + seconds
    for number in itertools.count():
        loss = float(train(batch(number, LENGTHS[number % len(LENGTHS)])))
        schedule.step()
        if number % 50 == 49:
            model.eval()
            float(judge(batch(number, LENGTHS[0])))
            model.train()
        if own.random() < 0.02:
            time.sleep(0.02)
        keeper.step(number)
        looks.step(EVERY)
        if number % 100 == 99:
            going.fill_(time.monotonic() < end)
            torch.distributed.broadcast(going, 0, group=group)
            if not going:
                break
    keeper.wait()
    if not loss < 1.0:
        raise SystemExit(f"the loss was {loss} at the end; a model that learns has less than 1")


def other_shapes(looks: Looks, shapes: int) -> None:
    """Call one job with so many shapes, and now and then with one of long ago."""
    compared = Compared()
    train = jobs_of(compared.model, compared.optimizer)[:1]
    lengths = range(SHORTEST, SHORTEST + -(-shapes // len(ROWS)))
    order = random.Random(0).sample([(rows, length) for rows in ROWS for length in lengths], shapes)
    for number, (rows, length) in enumerate(order):
        compared.call(train, batch(number, length, rows))
        if number % 10 == 9:
            rows, length = order[number // 3]
            compared.call(train, batch(number, length, rows))
        looks.step(1)


def other_jobs(looks: Looks, jobs: int) -> None:
    """Make so many jobs over one model, and call each of them; now and then the first again."""
    compared = Compared()
    kept = []
    for number in range(jobs):
        kept.append(jobs_of(compared.model, compared.optimizer))
        compared.call(kept[-1], batch(number, 16))
        if number % 10 == 9:
            compared.call(kept[number // 30], batch(number, 16))
        looks.step(1)


if __name__ == "__main__":
    main()
