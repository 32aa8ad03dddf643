"""Say how long a communication occupies a rank, by its kind, bytes, data plane and link."""

from __future__ import annotations

import math

from actorflow_compiler.core.hardware import Link
from actorflow_compiler.plan.plan import CollectiveKind, Plane

AT_ONCE = 65536  # bytes up to which Gloo's all-reduce sends everything to everyone; above, it uses a ring


def communication_time(
    kind: CollectiveKind | None, ranks: int, read: float, moved: float, plane: Plane, link: Link
) -> float:
    """Seconds of a collective of a kind, or of a send (None), in which a rank moves ``moved`` bytes over a link.

    They are the time of its bytes at the bandwidth of one rank, plus the latency of the messages that it waits for.
    ``read``: the bytes of a rank's operands.
    """
    return waits(kind, ranks, read, plane) * link.latency_s + moved / link.bytes_per_s


def waits(kind: CollectiveKind | None, ranks: int, read: float, plane: Plane) -> int:
    """How many message latencies a communication waits for, one after the other, before its queue is free.

    With Gloo, a rank sends data only on request: a send takes two messages (announcement and answer), and so does a
    collective (requests and data).  A ring all-reduce does this 2 (n-1) times.  On other planes a send does not wait.
    In a collective in shared memory every rank tells all others at once; with NCCL it is a tree.
    """
    if plane != Plane.GLOO:
        if kind is None:
            return 0
        return 1 if plane == Plane.SHARED else max(1, math.ceil(math.log2(ranks)))
    if kind != CollectiveKind.ALL_REDUCE or (ranks - 1) * read <= AT_ONCE:
        return 2
    return 2 * 2 * (ranks - 1)
