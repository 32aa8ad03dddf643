"""Compare training steps with those of what people would take instead: DDP, FSDP2, DTensor, pipelining, Ray.

python benchmarks/suite.py                        all workloads, about an hour and a half; figures are kept
python benchmarks/suite.py --quick                few rounds, and nothing is kept
python benchmarks/suite.py data-2 zero-3 --rounds 20
python benchmarks/suite.py --minutes 60           as many rounds as fit, each workload's share of the time alike

Both sides of a workload train the same model on the same batches from the same weights, with the same number of
threads, and ranks on cores of their own where there are enough.  Their processes are up during the whole workload and
take turns of a few steps, in another order each round, while all others wait.  The losses of all are compared in each
round: a difference of more than 1e-4 ends the workload.  Of several contenders of a side (torch's schedules of a
pipeline, say) the fastest counts.

"time" is the median of the rounds' ratios, with the least and the most; "CPU" that of all processes' CPU time, which
other work on the machine disturbs less.  "memory" is the ratio of peaks of resident memory, of the rank that needs
most, above what was resident before its model was made: with compiling, and (in brackets) of later steps alone.

What is found is kept in benchmarks/results, one file a workload; ``make bench-report`` makes the table and the chart of
docs/performance.md of it.  Ray is in the extra "bench": without it, its workloads are left out.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

import click
import torch

sys.path.append(str(Path(__file__).resolve().parent / "peers"))

from contest import Record, contest, cores, idle, starts, task_of
from results import RESULTS, Figures, figures, write
from turns import Lost, fitting
from workloads import BY_NAME, WORKLOADS, Workload


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(BY_NAME)), metavar="[WORKLOAD]...")
@click.option("--rounds", type=click.IntRange(1), help="Turns of each contender.  [default: 12; with --quick: 3]")
@click.option("--quick", is_flag=True, help="Few rounds; nothing is kept.")
@click.option("--minutes", type=float, help="No round begins that would not end in this time.")
@click.option("--results", type=click.Path(path_type=Path), help="[default: benchmarks/results; with --quick: none]")
@click.option("--list", "listing", is_flag=True, help="Only show the workloads.")
def main(
    names: tuple[str, ...], rounds: int | None, quick: bool, minutes: float | None, results: Path | None, listing: bool
) -> None:
    """Measure workloads (all, where none is named) against what people would take instead."""
    chosen = [BY_NAME[name] for name in dict.fromkeys(names)] or list(WORKLOADS)
    if listing:
        for workload in chosen:
            print(f"{workload.name:18}{workload.title}; {workload.peer}; at most {workload.target:g}")
        return
    load = " ".join(f"{one:.1f}" for one in os.getloadavg())
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {cores()} cores, load {load}")
    print(f"{'':18}{'ours':22}{'theirs':26}rounds   time (least … most)    CPU   memory (steps)   at most", flush=True)
    end, failed = time.monotonic() + 60 * minutes if minutes else float("inf"), False
    folder = results or (None if quick else RESULTS)
    left = chosen
    while left:
        together = [one for one in left if one.kind == "start"] if left[0].kind == "start" else left[:1]
        now = time.monotonic()
        share = now + (end - now) * len(together) / len(left)
        left = [one for one in left if one not in together]
        try:
            records = measured(together, rounds or (3 if quick else 12), share, quick)
        except Lost as error:
            print(f"{together[0].name:18}{error}", flush=True)
            failed = True
            continue
        for record in records:
            print(line(figures(BY_NAME[record["workload"]], record)), flush=True)
            for name, why in record["left out"].items():
                print(f"{'':18}left out, {name}: {why.strip().splitlines()[-1]}")
            if folder is not None:
                write(record, folder)
    sys.exit(failed)


def measured(workloads: list[Workload], rounds: int, end: float, quick: bool) -> list[Record]:
    """What is found of workloads that are measured together; where their peer is not installed, that is said."""
    workload = workloads[0]
    if workload.kind == "hand-over" and importlib.util.find_spec("ray") is None:
        print(f"{workload.name:18}left out: Ray is not installed (pip install 'actorflow[bench]')", flush=True)
        return []
    task = task_of(workload)
    if workload.kind == "start":
        return starts(workloads, task, fitting(rounds, end))
    with tempfile.TemporaryDirectory(prefix="plans-") as cache:
        os.environ["ACTORFLOW_CACHE"] = cache  # what was measured or planned on another day does not count
        if workload.kind == "idle":
            return [idle(workload, task, 5.0 if quick else 20.0, fitting(min(rounds, 3), end))]
        return [contest(workload, lambda: fitting(rounds, end), {"ours": task, "theirs": task})]


def line(found: Figures) -> str:
    """A line of the table."""
    workload = found.workload
    text = f"{workload.name:18}{found.ours:22}{found.theirs:26}{found.rounds:6}"
    text += f"{found.time:7.3f} ({found.low:.3f} … {found.high:.3f})"
    text += f"{found.cpu:7.3f}" if found.cpu is not None else f"{'–':>7}"
    memory = f"{found.memory:.2f} ({found.memory_of_steps:.2f})" if found.memory is not None else "–"
    text += f"{memory:>16}   {workload.target:g}"
    text += f", memory {workload.memory_target:g}" if workload.memory_target else ""
    return f"{text}: {'kept' if found.kept else 'NOT KEPT'}"


if __name__ == "__main__":
    main()
