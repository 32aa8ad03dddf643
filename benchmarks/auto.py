"""Compare what parallel="auto" chooses, and the order of plans by forecast, with what is measured.

python benchmarks/auto.py                     five models on 2 and on 4 processes, each plan of a small grid
python benchmarks/auto.py gpt cnn --world 2   some of them

Each plan is run in processes of its own, in turn with the others, --rounds times; its step is the median.  Forecasts
are those of the costs that were measured on this machine, as with ``actorflow plan --measure``.  Memory is what is
resident in the last rank at most, less what its process has besides tensors: what is resident with a model of the same
ops and next to no parameters, less the forecast for that.  Of what ranks map together each counts a share.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).resolve().parent / "autos"))
from subjects import SUBJECTS  # isort: skip

from actorflow.auto_parallel.strategy import Strategy
from actorflow.rendezvous.settings import threads_of
from actorflow.runtime.measured_costs import Target
from actorflow_compiler.core.units import bytes_text, columns, seconds_text
from actorflow_compiler.hints.goal import ParallelMode
from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.plan.text import from_json
from actorflow_scheduler.forecast import Forecast, forecast

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "autos" / "training_of.py"
RESULTS = HERE / "autos" / "ranked.json"
DATA, TENSOR, AUTO = ParallelMode.DATA, ParallelMode.TENSOR, ParallelMode.AUTO
NEAR, ORDER, MEMORY = 1.10, 0.9, 0.10  # asked: chosen : best measured, rank correlation, error of the memory forecast
TOLD = 8 << 20  # bytes from which tensors are told from what a process has besides
GRID = {
    2: (
        Strategy(1, (2,), (DATA,), 0, 1),
        Strategy(1, (2,), (DATA,), 1, 1),
        Strategy(1, (2,), (DATA,), 3, 1),
        Strategy(1, (2,), (DATA,), 0, 4),
        Strategy(1, (2,), (TENSOR,), 0, 1),
        Strategy(1, (2,), (AUTO,), 0, 1),
        Strategy(2, (1,), (DATA,), 0, 1),
        Strategy(2, (1,), (DATA,), 0, 4),
        Strategy(2, (1,), (DATA,), 0, 16),
    ),
    4: (
        Strategy(1, (4,), (DATA,), 0, 1),
        Strategy(1, (4,), (DATA,), 1, 1),
        Strategy(1, (4,), (DATA,), 3, 1),
        Strategy(1, (4,), (TENSOR,), 0, 1),
        Strategy(1, (4,), (AUTO,), 0, 1),
        Strategy(1, (2, 2), (DATA, TENSOR), 0, 1),
        Strategy(2, (2,), (DATA,), 0, 4),
        Strategy(2, (2,), (TENSOR,), 0, 4),
        Strategy(4, (1,), (DATA,), 0, 8),
    ),
}


@dataclass(slots=True)
class Tried:
    """A plan of the grid, and what was found for it."""

    strategy: Strategy
    expected: float = 0.0  # seconds of a step, as forecast
    memory: int = 0  # bytes of the last rank, as forecast
    seconds: list[float] = field(default_factory=list)  # of each round
    peaks: list[int] = field(default_factory=list)  # bytes that were resident in the last rank at most
    refused: str = ""

    @property
    def measured(self) -> float:
        """Seconds of a step: the median over rounds."""
        return statistics.median(self.seconds)


def options_of(strategy: Strategy) -> dict[str, Any]:
    """The hints and options by which a script asks for a strategy."""
    mesh, modes = strategy.mesh or (), strategy.modes
    several = len(mesh) > 1
    parallel = {str(mode): size for mode, size in zip(modes, mesh, strict=True)} if several or AUTO in modes else None
    return {
        "stages": strategy.stages,
        "zero": strategy.zero,
        "micro_batches": strategy.micro_batches,
        "parallel": parallel or str(modes[0]),
    }


def planned(name: str, asked: Mapping[str, Any], world: int, folder: Path, measured: bool = True) -> Plan:
    """The plan that is made for these options, by measured costs.  Raises ClickException where there is none."""
    out = folder / "plan.json"
    command = [sys.executable, "-m", "actorflow", "plan", str(SCRIPT), "--devices", str(world)]
    command += ["--measure"] * measured + ["--out", str(out), "--", name, json.dumps(asked), "1", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(done.stderr[-2000:])
    return from_json(out.read_text())


def run(name: str, one: Tried, world: int, steps: int, folder: Path) -> None:
    """Run a plan, and note what its steps took on the slowest rank and what the last one held."""
    command = [sys.executable, "-m", "actorflow", "run", str(SCRIPT), "--devices", str(world)]
    command += ["--", name, json.dumps(options_of(one.strategy)), str(steps), str(folder)]
    subprocess.run(command, capture_output=True, text=True, check=True)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    one.seconds.append(max(rank["seconds"] for rank in found))
    one.peaks.append(found[-1]["peak"])


def ranked(name: str, world: int, rounds: int, steps: int) -> dict[str, Any]:
    """Forecast and measure the grid of one model, and print its table."""
    tried = [Tried(s) for s in GRID[world]]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for one in tried:
            try:
                plan = planned(name, options_of(one.strategy), world, folder)
            except click.ClickException as error:
                one.refused = error.message.strip().splitlines()[-1]
                continue
            found = _forecast(plan, world)
            one.expected, one.memory = found.period, _memory(found)
        left = [one for one in tried if not one.refused]
        everything = {"parallel": "auto", "micro_batches": "auto"}
        chosen = planned(name, everything, world, folder).considered[0].text
        base = _besides_tensors(name, world, folder)
        for number in range(rounds):
            for one in left[number % len(left) :] + left[: number % len(left)]:
                run(name, one, world, steps, folder)
        best = min(left, key=lambda one: one.measured)
        taken = next((one for one in left if str(one.strategy) == chosen), None)
        if taken is None:  # it is not in the grid
            taken = Tried(_strategy_of(chosen))
            for _ in range(rounds):
                run(name, taken, world, steps, folder)
    order = _correlation([one.expected for one in left], [one.measured for one in left])
    agreement = _correlation([one.seconds[0] for one in left], [one.seconds[-1] for one in left])
    _print(name, world, left, best, base)
    near = taken.measured / best.measured
    print(
        f"  chosen: {chosen}: {near:.2f} of the best ({NEAR} asked); rank correlation {order:.2f} ({ORDER}), "
        f"of the first round with the last {agreement:.2f}\n",
        flush=True,
    )
    return {
        "model": name, "world": world, "chosen": chosen, "near": near, "order": order, "agreement": agreement,
        "plans": [[str(o.strategy), o.expected, o.measured, o.memory, statistics.median(o.peaks) - base] for o in left],
    }  # fmt: skip


def _correlation(some: list[float], others: list[float]) -> float:
    return float(spearmanr(some, others).statistic)


def _forecast(plan: Plan, world: int) -> Forecast:
    return forecast(plan, Target(threads=threads_of(world), ranks=world).hardware("cpu"))


def _memory(found: Forecast) -> int:
    """Bytes of the last rank, as forecast."""
    return next(rank.total for rank in found.ranks if found.world - 1 in rank.ranks)


def _besides_tensors(name: str, world: int, folder: Path) -> int:
    """Bytes that are resident in the last rank besides the tensors of its plan."""
    tiny, one = f"tiny {name}", Tried(GRID[world][0])
    plan = planned(tiny, options_of(one.strategy), world, folder, measured=False)
    run(tiny, one, world, 3, folder)
    return one.peaks[0] - _memory(_forecast(plan, world))


def _print(name: str, world: int, left: list[Tried], best: Tried, base: int) -> None:
    print(f"{SUBJECTS[name].title}, {world} processes")
    rows = [["plan", "forecast", "measured", "ratio", "memory", "measured", ""]]
    for one in sorted(left, key=lambda one: one.measured):
        peak = statistics.median(one.peaks) - base
        rows.append([
            str(one.strategy), seconds_text(one.expected), seconds_text(one.measured),
            f"{one.expected / one.measured:.2f}", bytes_text(one.memory), bytes_text(int(peak)),
            "best" if one is best else "",
        ])  # fmt: skip
    print("\n".join(f"  {line}" for line in columns(rows, "<>>>>><")))


def _strategy_of(text: str) -> Strategy:
    """The strategy that a text names, as ``str(strategy)`` does."""
    stages, zero, pieces, mesh, again = 1, 0, 1, {}, (0, 0)
    for part in text.split(", "):
        first, _, last = part.partition(" ")
        if last == "stages":
            stages = int(first)
        elif first == "ZeRO":
            zero = int(last)
        elif last in ("micro-batch", "micro-batches"):
            pieces = int(first)
        elif last.endswith("parts computed again"):
            again = int(first), int(last.split()[1])
        else:
            mesh[ParallelMode(first)] = int(last)
    return Strategy(stages, tuple(mesh.values()) or (1,), tuple(mesh) or (DATA,), zero, pieces, (), again)


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(SUBJECTS)))
@click.option("--world", "worlds", multiple=True, type=click.Choice(list(map(str, GRID))), default=list(map(str, GRID)))
@click.option("--rounds", default=3)
@click.option("--steps", default=15, help="Measured in each run.")
@click.option("--results", default=str(RESULTS), type=click.Path(dir_okay=False))
def main(names: tuple[str, ...], worlds: tuple[str, ...], rounds: int, steps: int, results: str) -> None:
    """Rank the plans of a small grid."""
    print(f"torch {torch.__version__}, Python {platform.python_version()}\n")
    rows = [ranked(name, int(world), rounds, steps) for world in worlds for name in names or SUBJECTS]
    Path(results).write_text(json.dumps(rows, indent=1) + "\n")
    print("\n".join(_summary(rows)))
    print(f"chosen within {NEAR} of the best: {sum(r['near'] <= NEAR for r in rows)} of {len(rows)}; "
          f"rank correlation at least {ORDER}: {sum(r['order'] >= ORDER for r in rows)}")  # fmt: skip


def _summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each model and number of processes, for docs/foresight.md."""
    yield "| model | processes | plans | chosen | by the best | rank correlation | of two rounds | step | memory |"
    yield "|---|--:|--:|---|--:|--:|--:|--:|--:|"
    for row in rows:
        plans = row["plans"]
        yield (
            f"| {SUBJECTS[row['model']].title} | {row['world']} | {len(plans)} | {row['chosen']} | {row['near']:.2f} | "
            f"{row['order']:.2f} | {row['agreement']:.2f} | {_range(plans, 1)} | {_range(plans, 3)} |"
        )


def _range(plans: list[list[Any]], at: int) -> str:
    """The smallest and the largest of forecasts by what was measured, without memory that is next to nothing."""
    found = [plan[at] / plan[at + 1] for plan in plans if at == 1 or plan[at] >= TOLD]
    return f"{min(found):.2f} to {max(found):.2f}"


if __name__ == "__main__":
    main()
