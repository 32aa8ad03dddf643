"""Prices of layouts, in seconds: bytes moved, work done more than once, memory held."""

from __future__ import annotations

from dataclasses import dataclass

from actorflow_compiler.core.hardware import CPU_CORE, Link
from actorflow_compiler.graph.graph import InputKind

LOCAL = 1e-7  # s for a change of layout without communication
REDUNDANT = 1e-6  # s for each redundant floating-point operation: far above its real cost, so that it is a last resort
BYTE_HELD = 1e-14  # s for each byte held of a copy instead of a part; only breaks ties
BLOCKS = 1e-7  # s for a layout in blocks or units, whose parts are copied in more pieces; only breaks ties
FREE_KINDS = frozenset(  # every rank has all of these
    {InputKind.BATCH, InputKind.ARGUMENT, InputKind.CONSTANT, InputKind.SCALAR, InputKind.PIECE}
)
IN_A_BUCKET = 0.1  # share of a latency for a tensor that is sent together with others


@dataclass(frozen=True, slots=True)
class Prices:
    """What communication over a link costs."""

    bandwidth: float  # bytes/s of one device
    latency: float  # s for each communication that an op waits for
    forbidden: float  # s for what the mode excludes: another split of the batch, a weight gathered under "tensor"

    @property
    def link(self) -> Link:
        """The link with these prices."""
        return Link(self.bandwidth, self.latency)

    @property
    def grouped(self) -> float:
        """Seconds of latency for a tensor sent in a bucket: gradients, new values of variables, gathered weights."""
        return IN_A_BUCKET * self.latency


def prices_of(link: Link) -> Prices:
    """The prices of a link; even without latency it costs more than no communication.

    On a link slower than a CPU core's, the price of excluded options rises as well, so that they stay excluded.
    """
    latency = max(link.latency_s, LOCAL / IN_A_BUCKET)
    slower = max(1.0, CPU_CORE.bytes_per_s / link.bytes_per_s, latency / CPU_CORE.latency_s)
    return Prices(link.bytes_per_s, latency, slower)
