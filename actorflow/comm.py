"""The collectives of ``flow.distributed`` under their second name: PyTorch's signatures, over all ranks of the run.

``send`` and ``recv`` have OneFlow's signatures, too: ``recv(0)`` needs no tensor.
"""

from __future__ import annotations

from actorflow.distributed.collectives import (
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
)
from actorflow.distributed.point_to_point import recv, send
from actorflow.support.nearest_names import answer_with_nearest

__all__ = [
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "broadcast", "barrier", "gather", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "recv", "scatter", "send",
]  # fmt: skip

answer_with_nearest(__name__)
