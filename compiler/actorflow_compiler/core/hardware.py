"""Speeds and memory of devices and of the links between them; layouts, stages and forecasts are priced by these."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from actorflow_compiler.core.errors import HardwareError
from actorflow_compiler.core.placement import MOST_WEIGHT

CLOSE = 0.01  # how far, as a fraction, the slowest device may be behind what exact shares would let it finish in
FINEST = 64  # the largest weight of the slowest device, among weights that balance devices


@dataclass(frozen=True, slots=True)
class Link:
    """The connection between two ranks."""

    bytes_per_s: float  # each way, of one rank
    latency_s: float  # of one message


@dataclass(frozen=True, slots=True)
class SharedCores:
    """The cores of a host on which its ranks compute, and copy what they tell each other."""

    share: float  # the host's cores divided by its ranks
    threads: int  # with which a rank computes


@dataclass(frozen=True, slots=True)
class Hardware:
    """Speeds and memory of one rank, and the links between ranks; the defaults are CPU cores of one host.

    Ranks 0 … node_size-1 are the first node, and so on; without ``node_size`` all links are the same.
    """

    flops_per_s: float = 5e10
    bytes_per_s: float = 4e9  # each way between a rank and the network
    latency_s: float = 1e-4  # of one message
    fire_overhead_s: float = 1e-5  # of every firing
    memory_bytes_per_s: float = 1e10  # between a rank and its memory
    memory_bytes: int | None = None  # that one rank has; None: not known
    flops_by_dtype: tuple[tuple[str, float], ...] = ()  # FLOP/s where they are not ``flops_per_s``
    node_size: int | None = None  # ranks
    inside: Link | None = None  # between ranks of one node; None: the same as between nodes
    collectives: Link | None = None  # between the ranks of a collective, where nodes are not known; None: as for sends
    cores: SharedCores | None = None  # None: every rank has a device, and links, that no other rank slows down
    speeds: tuple[float, ...] = ()  # of each rank, by which FLOP/s and memory bytes/s are multiplied; (): all 1
    measured: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}), hash=False)  # work → seconds
    name: str = "CPU cores of one host"
    device_type: str = "cpu"  # or "cuda": by which means of communication its ranks have

    @property
    def slowest(self) -> Link:
        """The link between ranks of different nodes, or between all ranks where there are no nodes."""
        return Link(self.bytes_per_s, self.latency_s)

    def flops_on(self, nbytes: Mapping[str, int]) -> float:
        """FLOP/s on operands with these bytes for each dtype; the dtype with the most bytes decides."""
        dtype = max(nbytes, key=nbytes.__getitem__, default="")
        return next((flops for name, flops in self.flops_by_dtype if name == dtype), self.flops_per_s)

    def speed(self, rank: int) -> float:
        """How fast a rank is, where 1 is what the other figures say.  Raises HardwareError for one without a speed."""
        if not self.speeds:
            return 1.0
        if rank >= len(self.speeds):
            raise HardwareError(
                f"the hardware {self.name!r} has speeds up to rank {len(self.speeds) - 1}, and rank {rank} takes part; "
                f"one for each rank was expected: add to device.speeds, or use fewer devices"
            )
        return self.speeds[rank]

    def link(self, ranks: tuple[int, ...], collective: bool = False) -> Link:
        """The slowest link between these ranks, for sends or for a collective of them."""
        if collective and self.collectives is not None:
            return self.collectives
        if self.inside is not None and self.node_size is not None:
            first = ranks[0] // self.node_size
            if all(rank // self.node_size == first for rank in ranks):
                return self.inside
        return self.slowest


CPU_CORE = Hardware()
GPU = Hardware(  # an H100: half of the FLOP/s of its data sheet, most of the bandwidth; docs/hardware.md: be exact
    flops_per_s=5e14,
    flops_by_dtype=(("float32", 2e14), ("float64", 3e13)),
    bytes_per_s=2e11,
    latency_s=1e-5,
    memory_bytes_per_s=3e12,
    name="GPUs of one host",
)
UNMEASURED = {"cpu": CPU_CORE, "cuda": GPU}  # kind of device → the figures assumed until it is measured


def balanced_weights(hardware: Hardware, ranks: Sequence[int]) -> tuple[int, ...] | None:
    """Weights of a placement on these ranks, in mesh order of one axis, by which all finish at about the same time.

    They are the smallest whole numbers by which the last device finishes within 1% of when all would by their exact
    speeds, or else those that come closest to it; None where equal ones do.  Raises HardwareError for a rank without a
    speed.
    """
    speeds = [hardware.speed(rank) for rank in ranks]
    least, total = min(speeds), sum(speeds)
    found: tuple[float, tuple[int, ...]] | None = None
    for k in range(1, FINEST + 1):
        weights = tuple(min(MOST_WEIGHT, max(1, round(speed / least * k))) for speed in speeds)
        behind = max(w / speed for w, speed in zip(weights, speeds, strict=True)) * total / sum(weights) - 1
        if found is None or behind < found[0] - 1e-12:
            found = behind, weights
        if behind <= CLOSE:
            break
    assert found is not None
    common = math.gcd(*found[1])
    return tuple(w // common for w in found[1]) if len(set(found[1])) > 1 else None
