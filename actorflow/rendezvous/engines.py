"""Find a process's place in its run from the variables of the engine that started it: torchrun, Slurm or Ray.

A table describes each engine's variables; nothing here does I/O.  An engine may start one process for each
node, which then starts the node's devices, or one for each device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from actorflow_compiler.core.errors import ClusterError

__all__ = [
    "BY_OPTION",
    "ENGINES",
    "RAY",
    "SLURM",
    "TORCHRUN",
    "Engine",
    "EngineProcess",
    "MASTER_VARIABLE",
    "find_process",
    "half_set",
    "hosts_of",
]


MASTER_VARIABLE = "ACTORFLOW_MASTER"  # host:port of the master's server; set in every rank that our launcher started


@dataclass(frozen=True, slots=True)
class Engine:
    """The environment variables of an engine; those without a default are required."""

    name: str
    option: str  # the value of --on
    command: str  # that starts a script
    marks: tuple[str, ...]  # any of these is set if the engine has started this process
    rank: str  # this process's number
    world: str  # processes
    task: str  # this process's number on its node
    tasks: str  # processes on each node: "2", or Slurm's list of all nodes' "2(x3),1"
    node: str  # this node's number
    nnodes: str
    master: str  # host of node 0, or the hosts of all nodes, node 0 first
    port: str = ""  # of the engine's own store on node 0, if it has one
    run: tuple[str, ...] = ()  # what distinguishes runs on one node
    gpus: str = ""  # optional: the GPUs of this node that the run may use
    cores: str = ""  # optional: the cores of this node that the run may use, together

    @property
    def needed(self) -> tuple[str, ...]:
        """The required variables."""
        named = (self.rank, self.world, self.task, self.tasks, self.node, self.nnodes, self.master, self.port)
        return tuple(filter(None, (*named, *self.run)))


TORCHRUN = Engine(
    name="torchrun",
    option="torchrun",
    command="torchrun -m actorflow run train.py",
    marks=("TORCHELASTIC_RUN_ID", "RANK"),
    rank="RANK",
    world="WORLD_SIZE",
    task="LOCAL_RANK",
    tasks="LOCAL_WORLD_SIZE",
    node="GROUP_RANK",
    nnodes="GROUP_WORLD_SIZE",
    master="MASTER_ADDR",
    port="MASTER_PORT",
)
SLURM = Engine(
    name="Slurm",
    option="slurm",
    command="srun actorflow run train.py",
    marks=("SLURM_STEP_ID", "SLURM_STEP_NODELIST"),  # not set in a batch script outside of srun
    rank="SLURM_PROCID",
    world="SLURM_STEP_NUM_TASKS",
    task="SLURM_LOCALID",
    tasks="SLURM_STEP_TASKS_PER_NODE",
    node="SLURM_NODEID",
    nnodes="SLURM_STEP_NUM_NODES",
    master="SLURM_STEP_NODELIST",
    run=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    gpus="SLURM_GPUS_ON_NODE",
    cores="SLURM_CPUS_ON_NODE",
)
RAY = Engine(  # set by actorflow's own Ray actors
    name="Ray",
    option="ray",
    command="actorflow run --on ray train.py",
    marks=("ACTORFLOW_RAY_RANK",),
    rank="ACTORFLOW_RAY_RANK",
    world="ACTORFLOW_RAY_WORLD",
    task="ACTORFLOW_RAY_LOCAL_RANK",
    tasks="ACTORFLOW_RAY_DEVICES",
    node="ACTORFLOW_RAY_NODE",
    nnodes="ACTORFLOW_RAY_NODES",
    master="ACTORFLOW_RAY_MASTER",
    port="ACTORFLOW_RAY_PORT",
)
ENGINES = (TORCHRUN, RAY, SLURM)  # the innermost first: Slurm may start Ray or torchrun, not the other way round
BY_OPTION = {engine.option: engine for engine in ENGINES}


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """This process's place among the processes that its engine has started."""

    engine: Engine
    rank: int
    world: int  # processes
    task: int  # of the node's processes
    tasks: int  # on each node; if several, each is one device
    node: int
    nnodes: int
    master: str  # host of node 0, as the engine names it
    port: int = 0  # of the engine's store on node 0
    run: str = ""  # distinguishes runs: "job 7, step 0" is "7.0"
    gpus: int | None = None  # of this node
    cores: int | None = None  # of this node


def find_process(environ: Mapping[str, str], on: str = "auto") -> EngineProcess | None:
    """This process's place in the engine that started it; None if no engine did.

    ``on`` names the engine that must have started it, or is "auto".  A process that a rank has started is no rank
    itself.  Raises ClusterError where variables are missing or make no sense, or nodes have different numbers of
    processes.
    """
    if MASTER_VARIABLE in environ:
        return None
    named = [engine for engine in ENGINES if any(environ.get(mark) for mark in engine.marks)]
    if on != "auto":
        engine = BY_OPTION[on]
        if engine not in named:
            raise ClusterError(
                f"--on {on}, but {engine.name} has not started this process: {' and '.join(engine.marks)} "
                f"{'is' if len(engine.marks) == 1 else 'are'} not set. Start it with: {engine.command}"
            )
        return _read(engine, environ)
    return _read(named[0], environ) if named else None


def _read(engine: Engine, environ: Mapping[str, str]) -> EngineProcess:
    if not all(environ.get(name) for name in engine.needed):
        raise half_set(engine, environ, engine.needed)

    def number(name: str) -> int:
        try:
            return int(environ[name])
        except ValueError:
            raise ClusterError(f"{engine.name}'s variable {name}={environ[name]} is no number") from None

    counts = _counts(environ[engine.tasks])
    if not counts:
        raise ClusterError(f"{engine.name}'s variable {engine.tasks}={environ[engine.tasks]} is no number of processes")
    if len(set(counts)) > 1:
        raise ClusterError(
            f"{engine.name} has started different numbers of processes on the nodes ({engine.tasks}="
            f"{environ[engine.tasks]}): every node needs the same number"
            + (", which srun's --ntasks-per-node gives" if engine is SLURM else "")
        )
    process = EngineProcess(
        engine=engine,
        rank=number(engine.rank),
        world=number(engine.world),
        task=number(engine.task),
        tasks=counts[0],
        node=number(engine.node),
        nnodes=number(engine.nnodes),
        master=hosts_of(environ[engine.master])[0],
        port=number(engine.port) if engine.port else 0,
        run=".".join(environ[name] for name in engine.run),
        gpus=_optional(environ, engine.gpus),
        cores=_optional(environ, engine.cores),
    )
    p = process
    fits = 0 <= p.task < p.tasks and 0 <= p.node < p.nnodes and 0 <= p.rank < p.world == p.nnodes * p.tasks
    if not fits:
        values = ", ".join(f"{name}={environ[name]}" for name in engine.needed)
        raise ClusterError(
            f"{engine.name}'s variables contradict each other: process {p.rank} of {p.world}, number {p.task} of "
            f"{p.tasks} on node {p.node} of {p.nnodes} (numbers begin at 0, and every node needs the same number of "
            f"processes); found {values}"
        )
    return process


def half_set(engine: Engine, environ: Mapping[str, str], needed: Sequence[str]) -> ClusterError:
    """The error if only some of an engine's variables are set."""
    there = ", ".join(f"{name}={environ[name]}" for name in needed if environ.get(name)) or "none of those needed"
    mark = next(mark for mark in engine.marks if environ.get(mark))
    return ClusterError(
        f"{engine.name}'s variables are half set: {mark} says that it has started this process; there: {there}; "
        f"missing: {', '.join(name for name in needed if not environ.get(name))}. They come together (as with "
        f"`{engine.command}`): hand all of them on to this process, or unset {mark}; `actorflow run --on none` looks "
        "at none of them."
    )


def _optional(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "") if name else ""
    return int(value) if value.isdecimal() else None


def _counts(text: str) -> list[int]:
    """The number of processes of each node: "2(x3),1" is 2, 2, 2, 1; empty for a malformed text."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None or int(match[1]) == 0:
            return []
        found += [int(match[1])] * int(match[2] or 1)
    return found


def hosts_of(text: str) -> tuple[str, ...]:
    """The hosts of a list as Slurm writes it: "gpu[08-10,12],login" is gpu08, gpu09, gpu10, gpu12, login.

    A single host name or address gives itself.  Raises ClusterError for a malformed list.
    """
    hosts: list[str] = []
    for item in _items(text):
        parts = re.split(r"\[([^\[\]]*)\]", item)  # outside, inside, outside … of brackets
        spans = [list(_span(part, text)) if k % 2 else [part] for k, part in enumerate(parts)]
        hosts += map("".join, product(*spans))
    if not hosts or any(not host or set(host) & set("[] ") for host in hosts):
        raise ClusterError(f"{text!r} is no list of hosts; one such as gpu[08-10,12],login was expected")
    return tuple(hosts)


def _items(text: str) -> list[str]:
    """The parts between commas that are not in brackets."""
    if ":" in text and "[" not in text:  # an IPv6 address
        return [text]
    return re.findall(r"(?:[^,\[]|\[[^\]]*\]?)+", text)


def _span(inside: str, text: str) -> Iterator[str]:
    """The numbers of "08-10,12", with their leading zeros."""
    for part in inside.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ClusterError(f"{part!r} of {text!r} is no number and no range of numbers such as 08-10")
        first, last = match[1], match[2] or match[1]
        yield from (str(n).zfill(len(first)) for n in range(int(first), int(last) + 1))
