"""Measure a workload: start the processes of its contenders, let them take turns, and write down what was found."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

sys.path.extend(str(Path(__file__).resolve().parents[1] / name) for name in ("peers", "pipelines"))

from results import median
from training import Task
from turns import Group, Lost, Turn, gather, play, start
from workloads import Workload

HERE = Path(__file__).resolve().parent
Record = dict[str, Any]


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def task_of(workload: Workload, **sizes: Any) -> Task:
    """The setting of a workload; ``sizes`` in place of its own."""
    threads = max(1, cores() // workload.processes)
    given = {"micro_batches": 1, "layers": 6, **workload.sizes, **sizes}
    return Task(workload.processes, steps=workload.steps, bind=True, threads=threads, **given)


def launch(workload: Workload, side: str, task: Task, python: str = sys.executable) -> Group:
    """Start the processes of a side, "ours" or "theirs"; raises Lost where they do not come."""
    processes, text = str(task.processes), task.to_json()

    def command(address: str) -> list[str]:
        if workload.kind == "hand-over":
            return [python, str(HERE / ("hand_over.py" if side == "ours" else "ray_graph.py")), address]
        script = str(HERE / f"{side}.py")
        if task.processes == 1:
            return [python, script, address, text]
        if side == "ours":
            return [python, "-m", "actorflow", "run", script, "--devices", processes, "--", address, text]
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
        return [python, *run, script, address, text]

    ranks = 1 if workload.kind == "hand-over" and side == "theirs" else task.processes
    return start(side, ranks, command, {"OMP_NUM_THREADS": str(task.threads)})


def contest(
    workload: Workload,
    rounds: Callable[[], Iterable[int]],
    sides: dict[str, Task],
    python: str = sys.executable,
) -> Record:
    """Let contenders take turns, as many rounds as ``rounds()`` has numbers, each side with its own setting.

    What is found holds raw figures: for each contender seconds, CPU seconds (of all processes) and the loss of each
    round's turn, and of each rank the bytes that ``noting_memory`` tells.  Raises Lost where losses differ, or where no
    contender of a side runs.
    """
    before, begun = os.getloadavg()[0], datetime.now(UTC)
    groups: list[Group] = []
    left_out: dict[str, str] = {}
    try:
        playing: dict[str, Group] = {}
        for side in sides:
            found: dict[str, Group] = {}
            for names in _in_one_group(workload, side):
                made, without = gather(
                    partial(launch, workload, side, sides[side], python), names, workload.steps, groups
                )
                found |= {f"{side}: {name}": group for name, group in made.items()}
                left_out |= {f"{side}: {name}": why for name, why in without.items()}
            if not found:
                raise Lost(f"{workload.name}: nothing runs of {side}: {left_out}")
            playing |= found
        named = {name: _Named(group, name.partition(": ")[2]) for name, group in playing.items()}
        turns = play(named, workload.steps, rounds())
        memory = {} if workload.together or workload.kind != "training" else _memory(named)
    finally:
        for group in groups:
            group.close()
    if workload.together:
        memory = _memory_apart(workload, turns, sides, python)
    return _circumstances(workload, sides["ours"], begun, before) | {
        "left out": left_out,
        "contenders": {name: _raw(taken, memory.get(name, [])) for name, taken in turns.items()},
    }


def idle(workload: Workload, task: Task, seconds: float, rounds: Iterable[int]) -> Record:
    """Let a run wait for its script, and write down the CPU time of all its processes."""
    before, begun = os.getloadavg()[0], datetime.now(UTC)
    group = launch(workload, "ours", task)
    found: list[tuple[float, float]] = []
    try:
        if why := group.make(workload.ours[0], workload.steps):
            raise Lost(why)
        group.turn(workload.ours[0], workload.steps)
        for _ in rounds:
            used, start = group.cpu(), time.perf_counter()
            time.sleep(seconds)
            found.append((time.perf_counter() - start, group.cpu() - used))
    finally:
        group.close()
    waited, used_cpu = ([round(one, 3) for one in some] for some in zip(*found, strict=True))
    return _circumstances(workload, task, begun, before) | {
        "left out": {},
        "contenders": {f"ours: {workload.ours[0]}": {"seconds": waited, "cpu": used_cpu, "memory": []}},
    }


def starts(workloads: Sequence[Workload], task: Task, rounds: Iterable[int]) -> list[Record]:
    """Start both sides' commands in turn, as start.py does, and write down the records of both workloads of it."""
    import start as starting  # benchmarks/start.py

    before, begun = os.getloadavg()[0], datetime.now(UTC)
    try:
        found = starting.take_turns(task.layers, task.processes, rounds)
    except (SystemExit, AssertionError) as error:
        raise Lost(str(error)) from error
    kept = {
        name: {
            "seconds": [round(one.step, 3) for one in runs],
            "cpu": [round(one.cpu, 2) for one in runs],
            "losses": [round(one.loss, 6) for one in runs],
            "memory": [],
        }
        for name, runs in found.items()
    }
    return [
        _circumstances(workload, task, begun, before)
        | {
            "left out": {},
            "contenders": {f"ours: {workload.ours[0]}": kept[workload.ours[0]]}
            | {f"theirs: {workload.theirs[0]}": kept[workload.theirs[0]]},
        }
        for workload in workloads
    ]


def _circumstances(workload: Workload, task: Task, begun: datetime, load: float) -> Record:
    """What a record says of when, where and of what it was measured."""
    return {
        "workload": workload.name,
        "date": begun.isoformat(timespec="minutes"),
        "machine": {"cores": cores(), "processor": _processor()}
        | {"load before": round(load, 2), "load after": round(os.getloadavg()[0], 2)},
        "versions": versions(),
        "setting": asdict(task),
        "steps": workload.steps,
    }


def versions() -> dict[str, str]:
    """Of what was measured, and of the compiler that inductor uses."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "linux": platform.release()}
    for name in ("actorflow", "ray"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
    found["commit"] = commit.stdout.strip() or "unknown"
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    said = subprocess.run([compiler, "-dumpfullversion"], capture_output=True, text=True).stdout if compiler else "none"
    return found | {"compiler": f"g++ {said.strip()}" if compiler else "none"}


class _Named:
    """A contender whose name in the record says its side, in a group that knows it without."""

    def __init__(self, group: Group, name: str) -> None:
        self.group, self.name = group, name

    def turn(self, _: str, steps: int) -> Turn:
        return self.group.turn(self.name, steps)

    def told(self) -> list[dict[str, Any]]:
        return sorted(self.group.told(self.name), key=lambda notes: int(notes["rank"]))


def _in_one_group(workload: Workload, side: str) -> list[Sequence[str]]:
    names = workload.ours if side == "ours" else workload.theirs
    return [names] if workload.together else [(name,) for name in names]


def _memory(named: dict[str, _Named]) -> dict[str, list[dict[str, Any]]]:
    return {name: one.told() for name, one in named.items()}


def _memory_apart(
    workload: Workload, turns: dict[str, list[Turn]], sides: dict[str, Task], python: str
) -> dict[str, list[dict[str, Any]]]:
    """Of the fastest contender of each side, in processes of its own."""
    found: dict[str, list[dict[str, Any]]] = {}
    for side, task in sides.items():
        mine = {name: taken for name, taken in turns.items() if name.startswith(f"{side}: ")}
        name = min(mine, key=lambda one: median([turn.seconds for turn in mine[one]]))
        group = launch(workload, side, task, python)
        try:
            contender = _Named(group, name.partition(": ")[2])
            if why := group.make(contender.name, workload.steps):
                raise Lost(why)
            contender.turn(name, workload.steps)
            found[name] = contender.told()
        finally:
            group.close()
    return found


def _raw(taken: list[Turn], memory: list[dict[str, Any]]) -> Record:
    return {
        "seconds": [round(turn.seconds, 5) for turn in taken],
        "cpu": [round(turn.everything, 2) for turn in taken],
        "losses": [round(turn.loss, 6) for turn in taken],
        "memory": memory,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


__all__ = ["Record", "contest", "cores", "idle", "launch", "starts", "task_of", "versions"]
