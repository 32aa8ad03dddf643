"""Compare pipelined steps with those of torch.distributed.pipelining, the forecast and the ideal.

python benchmarks/pipeline.py                                        everything, on 2 and on 4 processes
python benchmarks/pipeline.py --processes 2 --micro-batches 8 --schedule 1f1b --rounds 4

Both sides train the same GPT (5M parameters, 4 processes: 7M) on the same batches from the same weights, over Gloo or
what actorflow takes on one host, with one thread for each process.  A process group for each side is up during the
whole run; its schedules are prepared in it, and then they take turns of a few steps, round after round, in another
order each time, while all others wait.  A ratio is the median of the rounds' ratios, a time the median of the rounds'.
The losses of all of them are compared in each round: a difference of more than 1e-4 ends the run.  Ranks of actorflow
compute on cores of their own where there are enough; ``--bind`` does the same to PyTorch's processes, as its launcher
does not.

"forecast" is what the timeline of the plan says of a turn, and where there are fewer cores than processes not less than
its computing spread over the cores.  "ideal" is the CPU time of the same step in one eager process, spread over the
processes with the schedule's own bubble (as published, for equal times), and over no more cores than there are.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent / "pipelines"))

from setting import Setting
from turns import Group, Lost, Turn, gather, play, start

HERE = Path(__file__).resolve().parent / "pipelines"
EAGER = "eager"
THREADS = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Row:
    """A schedule of ours, and those of torch that it is compared with."""

    ours: str
    theirs: tuple[str, ...]
    bubble: Callable[[int, int], float]  # of P ranks and M micro-batches: the idle share of the schedule as published


def _none(p: int, m: int) -> float:
    return 0.0


# fmt: off
ROWS = (
    Row("gpipe",       ("GPipe", "LoopedBFS"),       lambda p, m: (p - 1) / (m + p - 1)),
    Row("1f1b",        ("1F1B",),                    lambda p, m: (p - 1) / (m + p - 1)),
    Row("interleaved", ("Interleaved1F1B",),         lambda p, m: (p - 1) / (2 * m + p - 1)),
    Row("zb-h1",       ("InterleavedZeroBubble",),   lambda p, m: (p - 1) / (3 * m + p - 1)),
    Row("zb-h2",       (),                           _none),
    Row("zb-v",        ("ZBVZeroBubble", "DualPipeV"), _none),
    Row("auto",                  (), _none),
    Row("auto, interleaved", (), _none),
    Row("auto, there and back",  (), _none),
)
# fmt: on
NAMES = tuple(row.ours for row in ROWS)
SAME_STAGES = {"gpipe": "1f1b", "zb-h1": "1f1b", "zb-h2": "1f1b", "zb-v": "auto, there and back"}
LAYERS = {2: 6, 4: 8}  # processes → layers; every rank of a there-and-back pipeline needs two stages


@click.command()
@click.option("--processes", type=click.IntRange(1), multiple=True, default=(2, 4), show_default=True)
@click.option("--micro-batches", type=click.IntRange(1), multiple=True, default=(4, 8), show_default=True)
@click.option("--schedule", type=click.Choice(NAMES), multiple=True, help="Of ours; with its peers.  [default: all]")
@click.option("--rounds", type=click.IntRange(1), default=10, show_default=True, help="Turns of each contender.")
@click.option("--steps", type=click.IntRange(1), default=4, show_default=True, help="Training steps in a turn.")
@click.option("--layers", type=click.IntRange(1), help="Of the model.  [default: 6 on 2 processes, 8 on 4]")
@click.option("--measure/--no-measure", default=True, show_default=True, help="First: what actors take, for forecasts.")
@click.option("--fused/--plain", default=True, show_default=True, help="The AdamW of PyTorch's side.")
@click.option("--bind/--no-bind", default=False, show_default=True, help="Bind PyTorch's processes to cores, too.")
def main(
    processes: tuple[int, ...],
    micro_batches: tuple[int, ...],
    schedule: tuple[str, ...],
    rounds: int,
    steps: int,
    layers: int | None,
    measure: bool,
    fused: bool,
    bind: bool,
) -> None:
    """Measure steps of pipelines against torch.distributed.pipelining."""
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {_cores()} cores")
    rows = [row for row in ROWS if not schedule or row.ours in schedule]
    with TemporaryDirectory() as folder:
        os.environ["ACTORFLOW_CACHE"] = folder  # what was measured on another day does not count
        for p in processes:
            for m in micro_batches:
                setting = Setting(p, m, layers or LAYERS.get(p, 2 * p), steps, fused=fused, bind=bind)
                print(
                    f"\n{p} processes, M = {m}, {setting.layers} layers, {rounds} rounds of {steps} steps", flush=True
                )
                try:
                    for name in {SAME_STAGES.get(row.ours, row.ours): None for row in rows if measure}:
                        measure_plan(setting, name)
                    compare(setting, rows, rounds)
                except Lost as error:
                    raise click.ClickException(str(error)) from error


def measure_plan(setting: Setting, name: str) -> None:
    """Let actorflow measure what the actors of a schedule of ours take on this machine; it keeps what it knows."""
    run = ["-m", "actorflow", "plan", str(HERE / "ours.py"), "--devices", str(setting.processes), "--measure"]
    environment = {**os.environ, **THREADS}
    command = [sys.executable, *run, "--", name, setting.to_json()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(f"  {name} cannot be measured: {done.stderr.strip().splitlines()[-1]}")


def compare(setting: Setting, rows: Sequence[Row], rounds: int) -> None:
    """Run all contenders and print their table."""
    theirs = list(dict.fromkeys(name for row in rows for name in row.theirs))
    groups: list[Group] = []
    try:
        alone, _ = gather(lambda: launch(setting, EAGER), [EAGER], setting.steps, groups)
        peers, without = gather(lambda: launch(setting, "torch"), theirs, setting.steps, groups)
        mine, without_mine = gather(
            lambda: launch(setting, "actorflow"), [row.ours for row in rows], setting.steps, groups
        )
        for name, why in (without | without_mine).items():
            print(f"  {name} does not run: {why}")
        turns = play(alone | peers | mine, setting.steps, range(rounds))
        report(setting, [row for row in rows if row.ours in mine], list(peers), turns, mine)
        for group in groups:
            print(f"  {group.name} took {group.restless:.1%} of a core while others had their turns")
    finally:
        for group in groups:
            group.close()


def launch(setting: Setting, side: str) -> Group:
    """Start the processes of a side."""
    python, p, text = sys.executable, str(setting.processes), setting.to_json()

    def command(address: str) -> list[str]:
        if side == EAGER:
            return [python, str(HERE / "theirs.py"), address, text, EAGER]
        if side == "torch":
            run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", p]
            return [python, *run, str(HERE / "theirs.py"), address, text]
        return [python, "-m", "actorflow", "run", str(HERE / "ours.py"), "--devices", p, "--", address, text]

    return start(side, 1 if side == EAGER else setting.processes, command, THREADS)


def report(
    setting: Setting, rows: Sequence[Row], peers: Sequence[str], turns: dict[str, list[Turn]], mine: dict[str, Group]
) -> None:
    """Print the table."""

    def ms(name: str) -> float:
        return statistics.median(t.seconds for t in turns[name]) / setting.steps * 1e3

    def cpu(name: str) -> float:
        return statistics.median(t.cpu for t in turns[name]) / setting.steps * 1e3

    def ratio(ours: str, theirs: str) -> float:
        return statistics.median(a.seconds / b.seconds for a, b in zip(turns[ours], turns[theirs], strict=True))

    p, m, cores = setting.processes, setting.micro_batches, min(setting.processes, _cores())
    best = min(peers, key=ms, default=None)
    print(f"  {'ours':22} {'theirs':22}    ours  theirs  ratio   forecast          ideal            CPU ms")
    print(f"  {'':22} {'':22}      ms      ms               ms /ours      ms  /ours    ours theirs")
    for row in rows:
        auto = row.ours.startswith("auto")
        compared = [name for name in ((best,) if auto else row.theirs) if name in peers]
        notes = mine[row.ours].notes[row.ours]
        forecast = max(notes["forecast"], notes["work"] / cores) * 1e3
        ideal = cpu(EAGER) / min(cores, p * (1 - row.bubble(p, m)))
        for name in compared or [None]:
            line = f"  {row.ours:22} "
            line += f"{name + (' (best)' if auto else ''):22} " if name else f"{'':22} "
            line += f"{ms(row.ours):7.1f} "
            line += f"{ms(name):7.1f} {ratio(row.ours, name):6.3f} " if name else f"{'':7} {'':6} "
            line += f"{forecast:9.1f} {forecast / ms(row.ours):6.2f} {ideal:7.1f} {ideal / ms(row.ours):6.2f} "
            print(line + f"{cpu(row.ours):7.0f}" + (f" {cpu(name):6.0f}" if name else ""))
    print(f"  one eager process: {ms(EAGER):.1f} ms, {cpu(EAGER):.1f} ms of CPU time")


def _cores() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    main()
