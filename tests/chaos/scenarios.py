"""Scenarios of the fault suite, each drawn whole from a number: a run, and what happens to it at which moments."""

from __future__ import annotations

import enum
import random
from collections.abc import Collection
from dataclasses import dataclass

STEPS = 60
EVERY = 5  # steps from one checkpoint to the next, as in scripts/moments.py
RESTARTS = 3


class Moment(enum.StrEnum):
    """When a fault comes; but for JOIN, the rank that it meets says so itself."""

    JOIN = "join"  # its process has been started, for any attempt
    COMPILE = "compile"  # it makes its first call
    STEP = "step"  # it makes a later one
    CHECKPOINT = "checkpoint"  # it begins to save
    RESTART = "restart"  # it has been started again
    SHUTDOWN = "shutdown"  # its script has come to its end


WITHIN = {  # seconds from the word of a moment in which a fault comes
    Moment.JOIN: 0.4,
    Moment.COMPILE: 0.5,
    Moment.STEP: 0.04,
    Moment.CHECKPOINT: 0.03,
    Moment.RESTART: 1.0,
    Moment.SHUTDOWN: 0.05,
}


class Kind(enum.StrEnum):
    """What happens."""

    KILL_RANK = "kill a rank"
    KILL_LAUNCHER = "kill a launcher"
    KILL_FORK_SERVER = "kill the fork server"
    KILL_WORKER = "kill a data worker"
    KILL_SOLVER = "kill the solver process"
    STOP_RANK = "stop a rank for good"
    PAUSE_RANK = "stop a rank and let it go on"
    PAUSE_LAUNCHER = "stop a launcher and let it go on"
    PAUSE_ALL = "stop all processes and let them go on"
    PARTITION = "partition for good"
    BLINK = "partition that heals"
    RESET = "reset links"
    SLOW_NETWORK = "slow network that loses packets"
    FULL_LOGS = "full disk of logs"
    FULL_CHECKPOINTS = "full disk of checkpoints"
    FULL_SHM = "full /dev/shm"
    OUT_OF_MEMORY = "out of memory in a cgroup"
    RAISE = "exception on a rank"
    EXIT = "sys.exit(3) on a rank"
    SLOW_RANK = "slow rank"
    CLOCK_JUMP = "clock jump"


HARMLESS = frozenset(
    {
        Kind.KILL_FORK_SERVER, Kind.KILL_SOLVER, Kind.PAUSE_RANK, Kind.PAUSE_LAUNCHER, Kind.PAUSE_ALL, Kind.BLINK,
        Kind.SLOW_NETWORK, Kind.FULL_SHM, Kind.SLOW_RANK, Kind.CLOCK_JUMP,
    }
)  # fmt: skip
IN_SCRIPT = {Kind.RAISE: "raise", Kind.EXIT: "exit", Kind.SLOW_RANK: "slow", Kind.OUT_OF_MEMORY: "eat"}
OF_NETWORKS = frozenset({Kind.PARTITION, Kind.BLINK, Kind.RESET, Kind.SLOW_NETWORK})
REAL = frozenset({Kind.KILL_FORK_SERVER, Kind.KILL_SOLVER, Kind.CLOCK_JUMP})  # need processes that are started whole
ANYWHERE = frozenset(Moment)
WHEN: dict[Kind, frozenset[Moment]] = {  # where not anywhere
    Kind.KILL_FORK_SERVER: frozenset({Moment.JOIN}),
    Kind.KILL_SOLVER: frozenset({Moment.COMPILE}),
    Kind.KILL_WORKER: frozenset({Moment.STEP, Moment.CHECKPOINT}),
    Kind.FULL_CHECKPOINTS: frozenset({Moment.COMPILE, Moment.STEP, Moment.CHECKPOINT}),
    Kind.FULL_LOGS: frozenset({Moment.COMPILE, Moment.STEP, Moment.CHECKPOINT}),
    Kind.SLOW_NETWORK: frozenset({Moment.JOIN}),
    **dict.fromkeys(
        IN_SCRIPT, frozenset({Moment.COMPILE, Moment.STEP, Moment.CHECKPOINT, Moment.RESTART, Moment.SHUTDOWN})
    ),
    Kind.OUT_OF_MEMORY: frozenset({Moment.COMPILE, Moment.STEP, Moment.CHECKPOINT}),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens to a rank, or its node, at a moment of an attempt."""

    kind: Kind
    rank: int
    moment: Moment
    number: int  # of the step, or of the checkpoint
    attempt: int
    delay: float  # seconds from the word of the moment
    seconds: float  # that it lasts, where it does not last for good

    @property
    def mark(self) -> tuple[str, int]:
        """The moment's word and number, as the script says them."""
        if self.moment is Moment.RESTART:
            return "script", 0
        return str(self.moment), self.number if self.moment in (Moment.COMPILE, Moment.STEP, Moment.CHECKPOINT) else 0

    @property
    def word(self) -> str:
        """For the script, where it is the script that misbehaves; empty for others."""
        if self.kind is Kind.FULL_LOGS:
            return f"print:{self.rank}:-:-:-"
        if self.kind not in IN_SCRIPT:
            return ""
        moment, number = self.mark
        return f"{IN_SCRIPT[self.kind]}:{self.rank}:{moment}:{number}:{self.attempt}"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run, and its faults in the order in which they come."""

    seed: int
    nodes: int
    devices: int  # of each
    layout: str
    keeps: bool  # checkpoints
    restarts: int  # --max-restarts
    elastic: bool  # --nnodes 1:2
    whole: bool  # processes are started whole, not forked by tests/warm.py
    faults: tuple[Fault, ...]

    @property
    def ranks(self) -> int:
        """Of all nodes."""
        return self.nodes * self.devices

    @property
    def shape(self) -> str:
        """Of the run, for people."""
        nodes = f"{self.nodes} node{'s' * (self.nodes > 1)}"
        more = [
            f"{self.devices} rank{'s' * (self.devices > 1)} each" if self.nodes > 1 else f"{self.devices} ranks",
            self.layout,
            *(["Keeper"] if self.keeps else []),
            *([f"{self.restarts} restarts"] if self.restarts else []),
            *(["1:2"] if self.elastic else []),
            *(["started whole"] if self.whole else []),
        ]
        return ", ".join([nodes, *more])

    @property
    def text(self) -> str:
        """All of it on one line."""
        faults = "; ".join(
            f"{f.kind} (rank {f.rank}) {f.delay:.3f} s into {f.moment} {f.number} of attempt {f.attempt}"
            for f in self.faults
        )
        return f"seed {self.seed}: {self.shape}: {faults}"

    def node_of(self, rank: int) -> int:
        """The node of a rank."""
        return rank // self.devices


@dataclass(frozen=True, slots=True)
class Tools:
    """What this machine has; the names are those of what is missing where it is False."""

    namespaces: bool = True
    slow_network: bool = True
    cgroups: bool = True
    compiler: bool = True
    disks: bool = True

    def missing_for(self, kind: Kind) -> str:
        """What a kind of fault needs and this machine has not; empty where it has all."""
        needs = {
            **dict.fromkeys(OF_NETWORKS, "namespaces"),
            Kind.SLOW_NETWORK: "slow_network",
            Kind.FULL_SHM: "namespaces",
            Kind.FULL_LOGS: "disks",
            Kind.FULL_CHECKPOINTS: "disks",
            Kind.OUT_OF_MEMORY: "cgroups",
            Kind.CLOCK_JUMP: "compiler",
        }
        name = needs.get(kind, "")
        return "" if not name or getattr(self, name) else name


def draw(seed: int, kinds: Collection[Kind] = tuple(Kind)) -> Scenario:
    """The scenario of a seed; its first fault is one of these kinds."""
    drawn = random.Random(seed)
    kind = drawn.choice(sorted(kinds))
    whole = kind in REAL
    nodes = 2 if kind in OF_NETWORKS else 1 if kind in REAL else drawn.choice((1, 1, 2))
    devices = drawn.choice((2, 4) if nodes == 1 and not whole else (1, 2) if nodes == 2 else (2,))
    if kind is Kind.KILL_WORKER:
        layout = "workers"
    elif kind is Kind.KILL_SOLVER:
        layout = "auto"
    elif kind is Kind.SLOW_NETWORK:
        devices, layout = 1, drawn.choice(("data", "pipeline"))
    else:
        layout = drawn.choice(("data", "pipeline", "zero1", "zero3"))
    restarts = RESTARTS if kind not in (Kind.SLOW_NETWORK, *REAL) and drawn.random() < 0.5 else 0
    keeps = bool(restarts) or kind is Kind.FULL_CHECKPOINTS or drawn.random() < 0.3
    elastic = nodes == 2 and bool(restarts) and drawn.random() < 0.5
    ranks = nodes * devices
    first = _fault(drawn, kind, ranks, keeps, 0)
    faults = [first]
    more = drawn.choice((0, 0, 1, 1, 2)) if kind not in (Kind.SLOW_NETWORK, *REAL) else 0
    for _ in range(more):
        again = bool(restarts) and faults[-1].kind not in HARMLESS and faults[-1].attempt + 1 < restarts
        attempt = faults[-1].attempt + 1 if again else faults[-1].attempt
        others = [Kind.KILL_RANK, Kind.PAUSE_RANK, Kind.RAISE, Kind.EXIT, Kind.SLOW_RANK, Kind.STOP_RANK]
        if elastic and devices == 1:  # the only rank that is left may be stopped for as long as one likes
            others.remove(Kind.STOP_RANK)
        faults.append(_fault(drawn, drawn.choice(others), ranks, keeps, attempt))
    return Scenario(seed, nodes, devices, layout, keeps, restarts, elastic, whole, tuple(faults))


def _fault(drawn: random.Random, kind: Kind, ranks: int, keeps: bool, attempt: int) -> Fault:
    moments = WHEN.get(kind, ANYWHERE)
    moments -= {Moment.RESTART} if attempt == 0 else {Moment.COMPILE, Moment.CHECKPOINT, Moment.STEP}
    moments -= frozenset() if keeps else {Moment.CHECKPOINT}
    moment = drawn.choice(sorted(moments))
    rank = drawn.randrange(ranks)
    if moment is Moment.JOIN or kind is Kind.FULL_LOGS:
        rank = max(1, rank)  # whose output is a file, by which its process is known before it says anything
    number = {
        Moment.STEP: drawn.randrange(1, STEPS),
        Moment.CHECKPOINT: drawn.randrange(STEPS // EVERY - 1),
    }.get(moment, 0)
    delay = drawn.random() * WITHIN[moment]
    return Fault(kind, rank, moment, number, attempt, delay, 0.5 + 2.5 * drawn.random())
