"""Compare data sources with torch's DataLoader under DDP, and with batches that are in memory.

python benchmarks/data.py                    2,000 JPEG files, about five minutes
python benchmarks/data.py --quick            400 of them, under two minutes
python benchmarks/data.py --images 5000 --rounds 10

Decoding: 2 ranks train a small network on JPEG files (160 × 160, made at the start from numbers), which 2 workers for
each rank decode, crop and mirror at random.  Ours is ``flow.data.loader`` under ``actorflow run``; theirs a DataLoader
with persistent workers and DistributedSampler, and DistributedDataParallel, under torchrun.  Both have the same rows in
each batch, model and optimizer.  A turn is a whole epoch, from its first request to the end of the last step.  "CPU
time" is that of the ranks and their workers.

In memory: a job is called with batches of a source whose samples are quickly made, and with the same batches in memory.
A turn is a few steps.

The ranks of all are up during the whole run and wait for their turn, in another order each round.  A figure is the
median of the rounds, with the least and the most; a ratio the median of the rounds'.  Ranks compute with one thread.

Reads are counted by the dataset: how often an image was read in an epoch, by any process, on average and at most.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent / "data"))

from decoding import Setting, indices_read
from turns import Group, Lost, fitting, start, turned

HERE = Path(__file__).resolve().parent / "data"
LEAST_RATE = 1.0  # times theirs
MOST_STEP = 1.02  # times a step with batches in memory
MOST_READS = 1.0  # of each row in an epoch


@dataclass(frozen=True, slots=True)
class Taken:
    """A turn."""

    seconds: float
    cpu: float  # seconds, of the ranks and their workers
    workers: float  # … of the workers
    loss: float
    reads: float  # of an image, on average
    most: int  # reads of one image


@click.command()
@click.option("--images", type=click.IntRange(64), help="[default: 2000; with --quick: 400]")
@click.option("--rounds", type=click.IntRange(1), help="[default: 7; with --quick: 2]")
@click.option("--steps", type=click.IntRange(1), default=8, show_default=True, help="Of a turn in memory.")
@click.option("--quick", is_flag=True, help="Fewer images and rounds.")
@click.option("--minutes", type=float, help="No round begins that would not end in this time.  [default: 5; 1.5]")
@click.option("--only", type=click.Choice(["decoding", "memory"]), help="[default: both]")
def main(
    images: int | None, rounds: int | None, steps: int, quick: bool, minutes: float | None, only: str | None
) -> None:
    """Measure data sources against torch's DataLoader, and against batches in memory."""
    end = time.monotonic() + 60 * (minutes or (1.5 if quick else 5.0))
    count, rounds = images or (400 if quick else 2000), rounds or (2 if quick else 7)
    load = " ".join(f"{one:.1f}" for one in os.getloadavg())
    cores = len(os.sched_getaffinity(0))
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {cores} cores, load {load}")
    with tempfile.TemporaryDirectory(prefix="images-") as folder:
        tempfile.tempdir = folder  # logs, too, are removed at the end
        setting = Setting(folder, count)
        setting.write_images()
        size = statistics.mean(setting.path(index).stat().st_size for index in range(count))
        print(
            f"{count:,} images of {setting.size} × {setting.size} ({size / 1e3:.1f} KB), batch {setting.batch}, "
            f"{setting.ranks} ranks with {setting.workers} workers each",
            flush=True,
        )
        try:
            with group_of("ours", setting) as ours:
                half = time.monotonic() + (end - time.monotonic()) * (0.75 if only is None else 1.0)
                if only != "memory":
                    with group_of("theirs", setting) as theirs:
                        decoding(setting, {"ours": ours, "theirs": theirs}, fitting(rounds, half))
                if only != "decoding":
                    in_memory(setting, ours, steps, fitting(2 * rounds, end))
        except Lost as error:
            raise click.ClickException(str(error)) from error
    print(f"load at the end: {' '.join(f'{one:.1f}' for one in os.getloadavg())}")


def decoding(setting: Setting, groups: dict[str, Group], rounds: Iterator[int]) -> None:
    """Measure epochs over the JPEG files, and print their table."""
    first = {}
    for side, group in groups.items():
        begun = {rank: length(setting.reads(side, rank)) for rank in range(setting.ranks)}
        made(group, "jpeg", 1)
        first[side] = reads_since(setting, side, begun)
    turns: dict[str, list[Taken]] = {side: [] for side in groups}
    for number in rounds:
        for side in turned([*groups], number):
            turns[side].append(taken(groups[side], "jpeg", 1, setting))
    heading("Decoding", len(turns["ours"]), "DataLoader, DDP")
    row("samples/s", turns, lambda t: setting.images / t.seconds, "8.0f", least=LEAST_RATE)
    row("CPU time of a sample, ms", turns, lambda t: t.cpu / setting.images * 1e3, "8.3f")
    row("  of workers", turns, lambda t: t.workers / setting.images * 1e3, "8.3f")
    row("last loss", turns, lambda t: t.loss, "8.3f")
    row("reads of a row, mean", turns, lambda t: t.reads, "8.3f", most_own=MOST_READS)
    row("  most", turns, lambda t: t.most, "8.0f", most_own=MOST_READS)
    print(f"{'  mean, in the first epoch':27}" + "".join(f"{mean:27.3f}" for mean, _ in first.values()))


def in_memory(setting: Setting, group: Group, steps: int, rounds: Iterator[int]) -> None:
    """Measure steps with a source and with batches in memory, and print their table."""
    names = ("source", "memory")
    for name in names:
        made(group, name, setting.batches)
    turns: dict[str, list[Taken]] = {name: [] for name in names}
    for number in rounds:
        for name in turned(names, number):
            turns[name].append(taken(group, name, steps, None))
    if {one.loss for one in turns["source"]} ^ {one.loss for one in turns["memory"]}:
        raise Lost("losses differ: " + str({name: [one.loss for one in some] for name, some in turns.items()}))
    heading("A source beside memory", len(turns["source"]), "in memory")
    row("a step, ms", turns, lambda t: t.seconds / steps * 1e3, "8.1f", most=MOST_STEP)
    row("CPU time, ms", turns, lambda t: t.cpu / steps * 1e3, "8.1f")
    row("  of ranks", turns, lambda t: (t.cpu - t.workers) / steps * 1e3, "8.1f")


def made(group: Group, name: str, steps: int) -> None:
    """Prepare a contender."""
    if why := group.make(name, steps):
        raise Lost(f"{group.name} does not run {name}: {why}")


def taken(group: Group, name: str, steps: int, setting: Setting | None) -> Taken:
    """Let a contender take a turn; with ``setting``, count what it reads."""
    begun = {}
    if setting is not None:
        begun = {rank: length(setting.reads(group.name, rank)) for rank in range(setting.ranks)}
    turn = group.turn(name, steps)
    mean, most = (0.0, 0) if setting is None else reads_since(setting, group.name, begun)
    return Taken(turn.seconds, turn.everything, turn.everything - turn.cpu, turn.loss, mean, most)


def length(path: Path) -> int:
    """Bytes of a file; 0 where there is none."""
    return path.stat().st_size if path.exists() else 0


def reads_since(setting: Setting, side: str, begun: dict[int, int]) -> tuple[float, int]:
    """How often an image was read since the files had these lengths: on average, and at most."""
    read = np.concatenate([indices_read(setting.reads(side, rank), at) for rank, at in begun.items()])
    counts = np.bincount(read, minlength=setting.images)
    return float(counts.mean()), int(counts.max())


@contextmanager
def group_of(side: str, setting: Setting) -> Iterator[Group]:
    """The processes of a side, for as long as they are needed."""
    script, count = str(HERE / f"{side}.py"), str(setting.ranks)

    def command(address: str) -> list[str]:
        if side == "ours":
            launch = ["-m", "actorflow", "run", script, "--devices", count, "--"]
        else:
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count, script]
        return [sys.executable, *launch, address, setting.to_json()]

    group = start(side, setting.ranks, command, {"OMP_NUM_THREADS": "1"})
    try:
        yield group
    except Lost:
        print(group.log.read_text()[-4000:], file=sys.stderr)
        raise
    finally:
        group.close()


def heading(title: str, rounds: int, theirs: str) -> None:
    """Print the names of the columns."""
    print(f"\n{f'{title} (rounds: {rounds})':27}{'actorflow':>27}{theirs:>27}  ratio", flush=True)


def row(
    title: str,
    turns: dict[str, list[Taken]],
    value: Callable[[Taken], float],
    form: str,
    *,
    least: float | None = None,
    most: float | None = None,
    most_own: float | None = None,
) -> None:
    """Print a figure of both, and whether the ratio, or our own figure, is within its bound."""
    mine, other = ([value(one) for one in some] for some in turns.values())
    ratio, line = statistics.median(a / b for a, b in zip(mine, other, strict=True)), f"{title:27}"
    for values in (mine, other):
        median, low, high = statistics.median(values), min(values), max(values)
        line += f"{median:{form}} ({low:{form}} …{high:{form}})".replace("( ", "(").rjust(27)
    line += f"{ratio:7.3f}"
    if least is not None:
        line += f"   at least {least:g}: {'kept' if ratio >= least else 'NOT KEPT'}"
    if most is not None:
        line += f"   at most {most:g}: {'kept' if ratio <= most else 'NOT KEPT'}"
    if most_own is not None:
        line += f"   at most {most_own:g}: {'kept' if max(mine) <= most_own else 'NOT KEPT'}"
    print(line, flush=True)


if __name__ == "__main__":
    main()
