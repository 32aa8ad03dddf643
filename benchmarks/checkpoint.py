"""Compare checkpoints with those of FSDP2: the pause of training, bytes, time to resume, and memory.

python benchmarks/checkpoint.py              a GPT of 302M parameters on 4 ranks, about a quarter of an hour
python benchmarks/checkpoint.py --quick      10M parameters, two minutes
python benchmarks/checkpoint.py --parameters 100000000 --rounds 5

Three ways to save the same training (AdamW; data parallel, with parameters, gradients and the optimizer's state split
over the ranks): actorflow's; ``torch.distributed.checkpoint.async_save`` of what FSDP2 has split; and the whole state,
gathered on rank 0 and written by ``torch.save``.  A save is complete when all files are durable (fsync).  Ranks compute
with one thread each, are up during all rounds and wait for their turn, in another order each round.

A turn is some steps without a save, then steps from the one before which save is called until the save is complete, and
again some steps without.  "Longer" is what the steps with the save took more than as many without (the turn's median).
Where ranks compute on all cores, what a save takes of their time shows there, too: "CPU time" says how much that is.

To resume is done in fresh processes that have built their model without memory, from files that are not in the page
cache: load and the first step, less the first step of such processes that begin with new values instead.

Peaks are those of resident memory (VmHWM, started anew before what is measured): during a save, of the rank that needs
most above a step's own peak; in resuming, above what was resident before, with the parts themselves and what the first
step needs.  Both are told in parts: 1.0 is the memory of a rank's parameters and the optimizer's state, split evenly.

A figure is the median of the rounds, with the least and the most; a ratio (ours : theirs) the median of the rounds'.
The loss of the first step after loading has to be that of the step after the save.
"""

from __future__ import annotations

import itertools
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import click
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent / "pipelines"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "checkpoints"))

from training import Loaded, Setting, Stepped, start_peak_anew
from turns import Group, Lost, fitting, start, turned

HERE = Path(__file__).resolve().parent / "checkpoints"
AGREE = 1e-4  # how far losses may differ
MOST_PAUSE = 0.1  # of a step, that a save of ours may cost
MOST_BYTES = 1.01  # times what is saved, that a checkpoint of ours may have
MOST_MEMORY = 1.1  # parts, for one copy of them
MOST_STEPS = 100  # in which a save has to be complete

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Way:
    """A way to save."""

    title: str
    side: str  # whose ranks take its turns
    how: str


OURS = Way("actorflow", "ours", "parts")
PEERS = (Way("DCP async_save", "theirs", "async"), Way("gather, torch.save", "theirs", "whole"))
WAYS = (OURS, *PEERS)


@dataclass(frozen=True, slots=True)
class Saved:
    """A turn in which a checkpoint was saved."""

    step: float  # seconds of one without it
    blocked: float  # seconds until the call returned, on the slowest rank
    longer: float  # seconds
    cpu: float  # seconds, all ranks together, more than that of as many steps without a save
    complete: float  # seconds until it was, counted in whole steps
    size: int  # bytes of all files
    peak: int  # bytes above a step's own peak, on the rank that needs most
    step_after: int  # number of the step after it
    loss: float  # of that step


@dataclass(frozen=True, slots=True)
class Resumed:
    """A start from a checkpoint, or from new values."""

    load: float  # seconds until the call returned, on the slowest rank
    ready: float  # seconds until the first step was done
    peak: int  # bytes above what was resident before, on the rank that needs most
    loss: float  # of the first step


@click.command()
@click.option("--parameters", type=click.IntRange(10**5), help="Of the model, about.  [default: 300000000]")
@click.option("--quick", is_flag=True, help="A model of 10M parameters.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Turns of each way.")
@click.option("--resumes", type=click.IntRange(1), help="… to resume.  [default: as --rounds; with --quick: 1]")
@click.option("--steps", type=click.IntRange(1), default=1, show_default=True, help="Before a save, and after it.")
@click.option("--minutes", default=15.0, show_default=True, help="No round begins that would not end in this time.")
@click.option("--ranks", type=click.IntRange(1), default=4, show_default=True)
@click.option("--context", type=click.IntRange(1), default=32, show_default=True, help="Tokens of each rank.")
def main(
    parameters: int | None,
    quick: bool,
    rounds: int,
    resumes: int | None,
    steps: int,
    minutes: float,
    ranks: int,
    context: int,
) -> None:
    """Measure checkpoints against those of FSDP2."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that all is cleared up
    setting = Setting(parameters or (10**7 if quick else 3 * 10**8), ranks, batch=ranks, context=context)
    count, end = setting.parameters_of_model(), time.monotonic() + 60 * minutes
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {len(os.sched_getaffinity(0))} cores")
    print(
        f"A GPT of {count / 1e6:.0f}M parameters ({setting.layers} layers, width {setting.width}) on {ranks} ranks, "
        f"{3 * 4 * count / 1e9:.2f} GB with what AdamW keeps, batch {setting.batch} × {context}",
        flush=True,
    )
    if not start_peak_anew():
        print("Here a peak cannot be started anew: those below are of the whole life of a process, so far")
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
        tempfile.tempdir = folder  # logs, too, are removed at the end
        try:
            saves = save(setting, Path(folder), fitting(rounds, end - 30 * minutes), steps)
            report_saves(saves, 3 * 4 * count, ranks)
            loads = resume(setting, Path(folder), fitting(resumes or (1 if quick else rounds), end), saves)
            report_resumes(loads, 3 * 4 * count / ranks)
        except Lost as error:
            raise click.ClickException(str(error)) from error


# --- what is measured ---


def save(setting: Setting, folder: Path, rounds: Iterable[int], steps: int) -> dict[Way, list[Saved]]:
    """Let all ways save, round after round; the last checkpoint of each stays in the folder."""
    found: dict[Way, list[Saved]] = {way: [] for way in WAYS}
    with ranks_of("ours", setting) as ours, ranks_of("theirs", setting) as theirs:
        groups = {"ours": ours, "theirs": theirs}
        numbers = {side: itertools.count(1) for side in groups}  # of the steps
        for group in groups.values():
            group.ask("load", 0, "", "")
            step_once(group, next(numbers[group.name]), "", "", True)  # warms up
        for number in rounds:
            for way in turned(WAYS, number):
                if found[way]:
                    shutil.rmtree(folder / way.how)
                found[way].append(save_once(groups[way.side], way, folder / way.how, numbers[way.side], steps))
    return found


def save_once(group: Group, way: Way, path: Path, numbers: Iterator[int], steps: int) -> Saved:
    """One turn, whose steps have the next numbers."""
    alone = [step_once(group, next(numbers), "", "", True) for _ in range(steps)]
    number = next(numbers)
    during = [step_once(group, number, way.how, str(path), True)]
    while not all(stepped.saved for stepped in during[-1][1]):
        if len(during) == MOST_STEPS:
            raise Lost(f"{way.title}: a save was not complete after {MOST_STEPS} steps")
        during.append(step_once(group, next(numbers), "", "", False))
    peaks = group.ask("finish")
    after = [step_once(group, next(numbers), "", "", True) for _ in range(steps)]

    first = during[0][1]
    usual = statistics.median(seconds for seconds, _ in alone + after)
    usual_cpu = statistics.median(sum(one.cpu for one in ranks) for _, ranks in alone + after)
    own = [max(ranks[rank].peak for _, ranks in alone) for rank in range(len(peaks))]
    return Saved(
        step=usual,
        blocked=max(one.blocked for one in first),
        longer=sum(seconds for seconds, _ in during) - len(during) * usual,
        cpu=sum(one.cpu for _, ranks in during for one in ranks) - len(during) * usual_cpu,
        complete=sum(seconds for seconds, _ in during),
        size=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
        peak=max(peak - usually for peak, usually in zip(peaks, own, strict=True)),
        step_after=number,
        loss=first[0].loss,
    )


def step_once(group: Group, number: int, how: str, path: str, anew: bool) -> tuple[float, list[Stepped]]:
    """Let all ranks take a step: seconds from the word to go until the last was done, and what they say."""
    begun = time.perf_counter()
    said = group.ask("step", number, how, path, anew)
    return time.perf_counter() - begun, said


def resume(
    setting: Setting, folder: Path, rounds: Iterable[int], saves: dict[Way, list[Saved]]
) -> dict[Way, list[tuple[Resumed, Resumed]]]:
    """Let all ways load their last checkpoint, round after round, each beside a start of its side from new values.

    Raises Lost where a training does not go on as it would have done.
    """
    found: dict[Way, list[tuple[Resumed, Resumed]]] = {way: [] for way in WAYS}
    for number in rounds:
        new = {side: resume_once(setting, side, 0, "", "") for side in turned(("ours", "theirs"), number)}
        for way in turned(WAYS, number):
            last = saves[way][-1]
            forget(folder / way.how)
            resumed = resume_once(setting, way.side, last.step_after, way.how, str(folder / way.how))
            if abs(resumed.loss - last.loss) > AGREE:
                raise Lost(f"{way.title}: the loss after loading is {resumed.loss:.6f}; it was {last.loss:.6f}")
            found[way].append((resumed, new[way.side]))
    return found


def resume_once(setting: Setting, side: str, number: int, how: str, path: str) -> Resumed:
    """Start the ranks of a side, load, and take the step of this number."""
    with ranks_of(side, setting) as group:
        begun = time.perf_counter()
        said: list[Loaded] = group.ask("load", number, how, path)
        ready = time.perf_counter() - begun
    return Resumed(max(one.load for one in said), ready, max(one.peak - one.before for one in said), said[0].loss)


def forget(path: Path) -> None:
    """Let the system drop files from its page cache, where it can."""
    if hasattr(os, "posix_fadvise"):
        for file in path.rglob("*"):
            fd = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


@contextmanager
def ranks_of(side: str, setting: Setting) -> Iterator[Group]:
    """Processes of a side, for as long as they are needed."""
    script, count = str(HERE / f"{side}.py"), str(setting.ranks)

    def command(address: str) -> list[str]:
        if side == "ours":
            launch = ["-m", "actorflow", "run", script, "--devices", count, "--"]
        else:
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count, script]
        return [sys.executable, *launch, address, setting.to_json()]

    group = start(side, setting.ranks, command, {"OMP_NUM_THREADS": "1", "TMPDIR": tempfile.gettempdir()})
    pids: list[int] = []
    try:
        pids = group.ask("pid")
        yield group
    except BaseException:
        close(group, pids)
        if group.log.exists():  # it does where the group, too, has failed
            print(group.log.read_text()[-4000:], file=sys.stderr)
        raise
    close(group, pids)


def close(group: Group, pids: Sequence[int]) -> None:
    """End the processes of a group, also those that wait for one that has failed."""
    group.close()
    for pid in pids:
        with suppress(OSError):  # it has ended, as it should; another's process has not this script's name
            if b"checkpoints" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


# --- what is printed ---


def report_saves(saves: dict[Way, list[Saved]], nbytes: int, ranks: int) -> None:
    """Print the table of saves; ``nbytes`` is what is to be saved."""
    heading("To save", len(saves[OURS]))
    row("a step without a save, s", saves, lambda s: s.step, "7.2f")
    row("the call returns after, s", saves, lambda s: s.blocked, "7.2f")
    row("  % of a step", saves, lambda s: 100 * s.blocked / s.step, "7.1f")
    row("steps take longer, s", saves, lambda s: s.longer, "7.2f")
    row("  % of a step", saves, lambda s: 100 * s.longer / s.step, "7.1f", 100 * MOST_PAUSE)
    row("CPU time, s", saves, lambda s: s.cpu, "7.2f")
    row("complete after, s", saves, lambda s: s.complete, "7.2f")
    row("bytes, of what is saved", saves, lambda s: s.size / nbytes, "7.3f", MOST_BYTES)
    row("peak of memory, MB", saves, lambda s: s.peak / 1e6, "7.0f")
    row("  parts", saves, lambda s: s.peak / (nbytes / ranks), "7.2f", MOST_MEMORY)


def report_resumes(resumes: dict[Way, list[tuple[Resumed, Resumed]]], part: float) -> None:
    """Print the table of resuming; ``part`` is the bytes that a rank has to hold."""
    heading("To resume", len(resumes[OURS]))
    row("the call returns after, s", resumes, lambda r: r[0].load, "7.2f")
    row("… and the first step, s", resumes, lambda r: r[0].ready, "7.2f")
    row("from new values, s", resumes, lambda r: r[1].ready, "7.2f")
    row("to load takes longer, s", resumes, lambda r: r[0].ready - r[1].ready, "7.2f")
    row("peak of memory, MB", resumes, lambda r: r[0].peak / 1e6, "7.0f")
    row("  parts", resumes, lambda r: r[0].peak / part, "7.2f")
    row("  more than from new values", resumes, lambda r: (r[0].peak - r[1].peak) / part, "7.2f", MOST_MEMORY)


def heading(title: str, rounds: int) -> None:
    """Print the names of the columns."""
    title = f"{title} (rounds: {rounds})"
    print(f"\n{title:27}{OURS.title:>25}" + "".join(f"{way.title:>25}  ratio" for way in PEERS), flush=True)


def row(title: str, found: dict[Way, list[T]], value: Callable[[T], float], form: str, most: float = 0.0) -> None:
    """Print a figure of all ways, and whether ours is what it should be at ``most``."""
    values = {way: [value(one) for one in some] for way, some in found.items()}

    def cell(way: Way) -> str:
        median, low, high = statistics.median(values[way]), min(values[way]), max(values[way])
        return f"{median:{form}} ({low:{form}} …{high:{form}})".rjust(25)

    line = f"{title:27}{cell(OURS)}"
    for way in PEERS:
        pairs = [*zip(values[OURS], values[way], strict=True)]
        line += cell(way)
        line += f"{statistics.median(a / b for a, b in pairs):7.2f}" if all(b > 0 for _, b in pairs) else "      –"
    if most:
        kept = "kept" if statistics.median(values[OURS]) <= most else "NOT KEPT"
        line += f"   at most {most:g}: {kept}"
    print(line, flush=True)


if __name__ == "__main__":
    main()
