"""Ops that work on each micro-batch by itself, and how their batch is split: batch norm in training.

Its statistics are those of one piece, as people expect of micro-batches, and its running statistics move on with every
piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from actorflow_compiler.core.ops import Ref
from actorflow_compiler.core.sbp import B, P, Sbp, Split
from actorflow_compiler.graph.graph import Node


class PerPiece:
    """The layout of a value of which every piece has its own, never joined with others: batch-norm statistics."""


PER_PIECE = PerPiece()
TimeLayout = Sbp | PerPiece
S0 = Split(0)
BACKWARD = "aten.native_batch_norm_backward.default"
# ops that, in training, work on each piece by themselves: position of the argument that says whether they train,
# layouts over time of the tensors among the arguments, by position, and of the outputs (S0: as the batch is split)
PIECEWISE: Mapping[str, tuple[int, Mapping[int, TimeLayout], tuple[TimeLayout, ...]]] = {
    "aten._native_batch_norm_legit_functional.default": (
        5, {0: S0, 1: B, 2: B, 3: PER_PIECE, 4: PER_PIECE}, (S0, PER_PIECE, PER_PIECE, PER_PIECE, PER_PIECE),
    ),
    "aten.native_batch_norm.default": (5, {0: S0, 1: B, 2: B}, (S0, PER_PIECE, PER_PIECE)),
    BACKWARD: (7, {0: S0, 1: S0, 2: B, 5: PER_PIECE, 6: PER_PIECE}, (S0, P, P)),
}  # fmt: skip


def split_of_batch(n: Node, layouts: Sequence[TimeLayout | None]) -> Split | None:
    """How the batch of an op that works on each piece by itself is split; None for all other ops.

    Gradients come as they come, and are brought to the split of what batch norm has normalized.
    """
    if n.op not in PIECEWISE:
        return None
    training, ins, _ = PIECEWISE[n.op]
    tensors = [at for at, a in enumerate(n.args) if isinstance(a, Ref)]
    found = [layout or S0 for at, layout in zip(tensors, layouts, strict=True) if ins.get(at) == S0]
    split = found[-1]  # of what is normalized; a gradient comes before it
    return split if n.args[training] and isinstance(split, Split) and split.dim == 0 else None


def reads_pieces(n: Node, layouts: Sequence[TimeLayout | None]) -> bool:
    """Whether an op works on each piece by itself because it reads statistics of each: the backward pass of such a one.

    Running statistics are read by the forward pass, which may well be of the whole batch.
    """
    return n.op == BACKWARD and any(isinstance(layout, PerPiece) for layout in layouts)
