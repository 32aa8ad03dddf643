"""Speeds and memory of devices and of the links between them; layouts, stages and forecasts are priced by these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Link:
    """The connection between two ranks."""

    bytes_per_s: float  # each way, of one rank
    latency_s: float  # of one message


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
    measured: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}), hash=False)  # work → seconds
    name: str = "CPU cores of one host"

    @property
    def slowest(self) -> Link:
        """The link between ranks of different nodes, or between all ranks where there are no nodes."""
        return Link(self.bytes_per_s, self.latency_s)

    def flops_on(self, nbytes: Mapping[str, int]) -> float:
        """FLOP/s on operands with these bytes for each dtype; the dtype with the most bytes decides."""
        dtype = max(nbytes, key=nbytes.__getitem__, default="")
        return next((flops for name, flops in self.flops_by_dtype if name == dtype), self.flops_per_s)

    def link(self, ranks: tuple[int, ...]) -> Link:
        """The slowest link between these ranks."""
        if self.inside is not None and self.node_size is not None:
            first = ranks[0] // self.node_size
            if all(rank // self.node_size == first for rank in ranks):
                return self.inside
        return self.slowest


CPU_CORE = Hardware()
GPU = Hardware(  # the data sheet of an H100, at about half of what it says; docs/hardware.md says how to be exact
    flops_per_s=5e14,
    flops_by_dtype=(("float32", 2e14), ("float64", 3e13)),
    bytes_per_s=2e11,
    latency_s=1e-5,
    memory_bytes_per_s=1.7e12,
    name="GPUs of one host",
)
UNMEASURED = {"cpu": CPU_CORE, "cuda": GPU}  # kind of device → the figures assumed until it is measured
