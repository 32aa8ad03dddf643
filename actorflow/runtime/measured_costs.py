"""Measure how long this machine takes for the bodies of plans, and keep the times on disk."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from actorflow.devices import Device, count, make_device
from actorflow.runtime.bodies.kernels import Kernels
from actorflow.support.heap import Heap
from actorflow.transport.small_tensors import decode
from actorflow_compiler.core.cache_folder import CACHE_VARIABLE, cache_folder
from actorflow_compiler.core.hardware import CPU_CORE, UNMEASURED, Hardware, Link, SharedCores
from actorflow_compiler.core.units import bytes_text
from actorflow_compiler.custom_ops.random import SEED
from actorflow_compiler.library import OPS
from actorflow_compiler.plan.plan import (
    Actor,
    FromRegister,
    OfInput,
    OfPiece,
    OfScalar,
    OfVariable,
    Operand,
    Plan,
    TensorSpec,
)
from actorflow_compiler.plan.summary import variable_shape
from actorflow_compiler.signatures.discovery.cache import keep
from actorflow_scheduler.cost import touched_bytes
from actorflow_scheduler.hardware_file import read_hardware
from actorflow_scheduler.work_digest import work_digest

FORMAT = 2  # of the file; increase it when the meaning of its fields changes
BUDGET = 60.0  # seconds for all bodies; the largest are measured first, those left over are estimated
TURNS = 2  # of all bodies, as what disturbs a machine lasts longer than the runs of one
RUNS = (3, 15)  # least and most runs of one body in a turn …
EACH = 0.15  # … between which it is run until this many seconds are spent
CACHES = 128 << 20  # bytes that evict all else from the caches of a processor
PROBE = Path(__file__).resolve().parents[1] / "link_probe.py"
PROBE_TIMEOUT = 120.0  # seconds


@dataclass(frozen=True, slots=True)
class Place:
    """The circumstances of a measurement, on which the time of the same work depends."""

    device: str  # "cpu", "cuda"
    threads: int  # that an op may use

    def path(self) -> Path | None:
        """The file of this machine's measurements; None if there is no cache folder or no such device."""
        where, name = cache_folder(), self.label()
        if where is None or not name:
            return None
        return where / "costs" / f"torch-{torch.__version__}" / platform.node() / f"{name.replace('/', '-')}.json"

    def label(self) -> str:
        """The kind of device, as its maker calls it, and what else of it counts; empty if there is no such device."""
        return make_device(self.device).label(self.threads) if count(self.device) else ""


@dataclass(frozen=True, slots=True)
class Target:
    """The hardware that plans are made for: that of a file, or this machine."""

    file: str = ""  # path of a hardware file; empty: this machine, with its stored measurements
    measure: bool = False  # measure the bodies for which no measurement is stored
    threads: int = 0  # threads of a rank; 0: as many as this process has
    ranks: int = 1  # of this machine, which share its cores
    costs: Costs | None = None  # the measurements to take, where none are to be made; None: those that are stored then

    def place(self, device: str) -> Place | None:
        """The circumstances of this machine's measurements; None for the hardware of a file."""
        return None if self.file else Place(device, self.threads or torch.get_num_threads())

    def hardware(
        self, device: str, plans: Callable[[], Iterable[Plan]] = tuple, doing: Callable[[str], None] = lambda _: None
    ) -> Hardware:
        """The hardware for the scheduler's cost model.  Raises HardwareError for a file that cannot be used."""
        place = self.place(device)
        if place is None:
            return read_hardware(self.file)
        if self.measure:
            found = measure(plans(), device, place.threads, doing=doing)
        else:
            found = (read(place) if self.costs is None else self.costs).hardware(device)
        if device != "cpu" or not found.measured:
            return found
        return replace(found, cores=SharedCores(len(os.sched_getaffinity(0)) / self.ranks, place.threads))


HERE = Target()
LINKS = "links"  # beside digests of work, what is measured


@dataclass(slots=True)
class Costs:
    """The measurements of one ``Place``."""

    work: dict[str, float] = field(default_factory=dict)  # digest of the work (``work_digest``) → seconds
    flops_per_s: float = 0.0  # of measured bodies that do little else; 0: none was measured
    sends: Link | None = None  # between two ranks of this machine; None: not measured
    collectives: Link | None = None  # of two ranks of this machine; None: not measured

    def hardware(self, device: str) -> Hardware:
        """This machine with this kind of device; defaults where nothing was measured."""
        found = UNMEASURED[device]
        if self.work:
            found = replace(found, measured=dict(self.work), name="this machine, as measured")
        if self.flops_per_s:
            found = replace(found, flops_per_s=self.flops_per_s)
        if self.sends is not None:
            found = replace(found, latency_s=self.sends.latency_s, bytes_per_s=self.sends.bytes_per_s)
        return replace(found, collectives=self.collectives)

    def to_json(self) -> dict[str, Any]:
        """The measurements as JSON data."""
        return {
            "format": FORMAT, "flops_per_s": self.flops_per_s, "work": self.work,
            "links": {name: asdict(link) for name, link in self._links()},
        }  # fmt: skip

    def _links(self) -> list[tuple[str, Link]]:
        both = (("sends", self.sends), ("collectives", self.collectives))
        return [(name, link) for name, link in both if link is not None]

    @staticmethod
    def from_json(data: Any) -> Costs | None:
        """The measurements of data that ``to_json`` made; None for other data."""
        try:
            if data["format"] != FORMAT:
                return None
            work = {str(name): float(seconds) for name, seconds in data["work"].items()}
            links = {
                name: Link(float(link["bytes_per_s"]), float(link["latency_s"])) for name, link in data["links"].items()
            }
            found = Costs(work, float(data["flops_per_s"]), **links)
        except (ValueError, TypeError, AttributeError, KeyError):
            return None
        numbers = (*work.values(), found.flops_per_s, *(n for link in links.values() for n in astuple(link)))
        real = all(math.isfinite(number) and number >= 0 for number in numbers)
        return found if real and all(link.bytes_per_s for link in links.values()) else None


@dataclass(slots=True)
class _OfProcess:
    """What this process has measured of a place and cannot store, and what it has tried to measure in vain."""

    costs: Costs | None = None
    in_vain: set[str] = field(default_factory=set)  # digests of work, and ``LINKS``


_of_process: dict[tuple[Place, Path | None], _OfProcess] = {}  # by the place, and the file where it is stored


def read(place: Place) -> Costs:
    """The stored measurements of a place; empty if there are none or the file cannot be read."""
    path = place.path()
    try:
        found = None if path is None else Costs.from_json(json.loads(path.read_text()))
    except (OSError, ValueError):
        found = None
    return found or Costs()


def here(device: str, threads: int | None = None) -> Hardware:
    """This machine by its stored measurements; defaults for values that were not measured."""
    return read(Place(device, threads or torch.get_num_threads())).hardware(device)


def measure(
    plans: Iterable[Plan],
    device: str,
    threads: int,
    *,
    budget: float = BUDGET,
    doing: Callable[[str], None] = lambda _: None,
) -> Hardware:
    """Measure how long bodies of plans, sends and collectives take on this machine, and store the times.

    Times that are stored already, or that this process has measured and cannot store, are not measured again.  Each
    body runs alone, with the kernels of a run, on tensors of the plan's shapes that no cache of the processor holds any
    more, as between two steps of a run.  A body that cannot run alone, or that is not reached within ``budget``
    seconds, is estimated from its floating-point operations.
    """
    place, on = Place(device, threads), make_device(device)
    path = place.path()
    mine = _of_process.setdefault((place, path), _OfProcess())
    costs = mine.costs or read(place)
    end = time.perf_counter() + budget
    todo: dict[str, tuple[Plan, Actor]] = {}
    meanwhile: dict[str, float] = {}  # work → bytes that its rank uses between two firings, among them its own
    sends = False
    for plan in plans:
        used = _used_bytes(plan)
        for actor in plan.actors:
            sends = sends or actor.comm is not None
            if actor.body is not None and not any(isinstance(o, OfInput) for o in actor.operands):
                digest = work_digest(plan, actor)
                todo.setdefault(digest, (plan, actor))
                meanwhile.setdefault(digest, used[actor.rank] / actor.rate)
    heap = Heap()  # as in a run
    with _threads(threads), torch.no_grad():
        kernels = Kernels(on.where, OPS)
        missing = [name for name in todo if name not in costs.work and name not in mine.in_vain]
        ordered = sorted(missing, key=lambda n: -todo[n][1].flops)
        for i, name in enumerate(ordered * TURNS):
            if time.perf_counter() > end:
                break
            doing(f"measure {i % len(ordered) + 1} of {len(ordered)} bodies{' again' * (i >= len(ordered))}")
            taken = _time(kernels, *todo[name], on, min(CACHES, meanwhile[name]))
            heap.settle()
            if taken is None:
                mine.in_vain.add(name)
            else:
                costs.work[name] = min(taken, costs.work.get(name, taken))
    known = [
        (actor.flops, costs.work[name]) for name, (_, actor) in todo.items() if costs.work.get(name) and actor.flops
    ]
    costs.flops_per_s = max(costs.flops_per_s, _arithmetic(known))
    if sends and device == "cpu" and costs.collectives is None and LINKS not in mine.in_vain:
        doing("measure sends and collectives")
        costs.sends, costs.collectives = _probe()
        if costs.collectives is None:
            mine.in_vain.add(LINKS)
    why = "" if path is None else keep(path, costs.to_json())
    if why and mine.costs is None:
        warnings.warn(
            f"what was measured cannot be kept in {path}: {why}; it counts in this process alone.  Name another "
            f"folder with {CACHE_VARIABLE}",
            stacklevel=2,
        )
    if path is None or why:
        mine.costs = costs
    return costs.hardware(device)


def _arithmetic(known: Sequence[tuple[float, float]]) -> float:
    """FLOP/s by pairs of FLOPs and seconds of bodies, without those that spend more time on other things; 0 of none."""
    most = max((flops / seconds for flops, seconds in known), default=0.0)
    fast = [(flops, seconds) for flops, seconds in known if flops / seconds > most / 2]
    return sum(flops for flops, _ in fast) / sum(seconds for _, seconds in fast) if fast else 0.0


def _used_bytes(plan: Plan) -> dict[int, float]:
    """Rank → bytes that its actors read and write in an iteration."""
    found: dict[int, float] = {}
    for actor in plan.actors:
        found[actor.rank] = found.get(actor.rank, 0.0) + actor.rate * touched_bytes(plan, actor)
    return found


def _time(kernels: Kernels, plan: Plan, actor: Actor, on: Device, apart: float) -> float | None:
    """The median of the seconds that a body takes; None if it cannot run on made-up values.

    ``apart``: the bytes of operands that other runs use before a run uses the same ones again; so it is with the memory
    that its outputs are made in.
    """
    assert actor.body is not None
    least, most = RUNS
    try:
        kernel = kernels.kernel(plan.bodies[actor.body])
        values = [_value(plan, actor, operand, on.where) for operand in actor.operands]
        for _ in range(2):  # the first calls allocate, and wake threads
            outputs = _tensors(kernel(list(values)))
    except (RuntimeError, IndexError, ValueError, TypeError):
        return None
    sets = [values] + [_copied(values) for _ in range(_turns(values, apart) - 1)]
    made = deque([_copied(outputs) for _ in range(_turns(outputs, apart))])
    del outputs
    times: list[float] = []
    while len(times) < least or (len(times) < most and sum(times) < EACH):
        given = list(sets[len(times) % len(sets)])
        made.popleft()  # what is made next has room where this was
        on.synchronize()
        start = time.perf_counter()
        results = kernel(given)
        on.synchronize()
        times.append(time.perf_counter() - start)
        made.append(_tensors(results))
        del results  # so that they are kept no longer than that
    return statistics.median(times)


def _turns(values: Sequence[Any], apart: float) -> int:
    """How many sets like these take turns, so that so many bytes lie between two uses of one; at least 1."""
    nbytes = sum(tensor.nbytes for tensor in _tensors(values))
    return max(1, min(RUNS[1], round(apart / max(1, nbytes))))


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


def _copied(values: Sequence[Any]) -> list[Any]:
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]


def _value(plan: Plan, actor: Actor, operand: Operand, device: torch.device) -> Any:
    """A made-up value for an operand: floats in [0, 1), and 0 for integers, as it is a legal index."""
    match operand:
        case FromRegister(register, index):
            return _tensor(plan.register(register).tensors[index], device)
        case OfVariable(name):
            variable = plan.variable(name)
            if variable is not None:
                return _tensor(TensorSpec(variable_shape(variable, actor.rank), variable.dtype, ""), device)
            constant = next(c for c in plan.constants if c.name == name)
            return decode([constant.data], [TensorSpec(constant.shape, constant.dtype, "")], device)[0]
        case OfScalar(name):
            return 0 if name == SEED else 0.001
        case OfPiece():
            return 0
        case OfInput():
            raise TypeError("the shape of a call's argument is not in the plan")


def _tensor(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.rand(spec.shape, dtype=dtype, device=device)
    return torch.zeros(spec.shape, dtype=dtype, device=device)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _probe() -> tuple[Link | None, Link | None]:
    """How fast two ranks send and carry out collectives, from a run of two; None, and a warning, if that fails."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ACTORFLOW_") or k == CACHE_VARIABLE}
    # in a folder of its own, which is the first in which Python looks for modules: ours has some of Python's names
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "actorflow", "run", shutil.copy(PROBE, folder), "--devices", "2"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=PROBE_TIMEOUT, check=True, env=environment, cwd=folder
            )
            found = json.loads(done.stdout.splitlines()[-1])
            both = [found[name] for name in ("sends", "collectives")]
            why = next((str(link["failed"]) for link in both if "failed" in link), "")
            if not why:
                sends, collectives = (Link(float(link["bytes_per_s"]), float(link["latency_s"])) for link in both)
                return sends, collectives
        except subprocess.CalledProcessError as e:
            why = (e.stderr.strip().splitlines() or [f"exit status {e.returncode}"])[-1]
        except (OSError, subprocess.SubprocessError, ValueError, LookupError) as e:
            why = str(e)
    warnings.warn(
        f"sends and collectives of two ranks of this machine could not be measured ({why}); they are taken to be as "
        f"fast as those of {CPU_CORE.name}: {bytes_text(CPU_CORE.bytes_per_s)}/s",
        stacklevel=2,
    )
    return None, None
