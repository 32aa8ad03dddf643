"""``flow.unpack`` and ``flow.pack``: graph markers between which tensors flow in pieces (micro-batches).

``actorflow.in_pieces(x, n, origin, number)`` and ``actorflow.whole(…)`` are the identity, and each is the
gradient of the other, under the same ``number``.  ``rewriting/micro_batches.py`` removes them when it cuts the
step in time.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.core.errors import CallError
from actorflow_compiler.core.ops import Phase
from actorflow_compiler.graph.graph import Graph, InputKind, Node, without
from actorflow_compiler.hints.tags import tracing

IN_PIECES, WHOLE = "actorflow.in_pieces", "actorflow.whole"
MARKERS = (IN_PIECES, WHOLE)
_numbers = itertools.count()

# ---- public functions


def unpack(x: Tensor, n: int) -> Tensor:
    """``x``, which from here on flows through the job in ``n`` equal pieces of its dim 0, one after another.

    The script still sees the whole tensor, and results are the same as without.  Ops before run once, ops after
    it once for each piece, until ``pack``; gradients of parameters used in between add up.
    All ``unpack`` and ``pack`` of a job, and its ``micro_batches``, name the same number.  Use the tensor
    that is returned.  Outside of a job ``x`` is returned unchanged.

    Raises CallError if ``n`` does not divide dim 0.  In a job that has run with another batch, a shorter
    last one for example, the largest number up to ``n`` that does is taken instead.
    """
    return _insert_marker(x, n, "unpack")


def pack(x: Tensor, n: int) -> Tensor:
    """``x``, which flows in ``n`` pieces, as a whole again: ops after it run once, on all pieces together.

    The inverse of ``unpack``, with the same rules and errors.  An op that reads the result together with
    a value in pieces packs that value as well.
    """
    return _insert_marker(x, n, "pack")


# ---- for other passes


@dataclass(frozen=True, slots=True)
class PieceMarker:
    """The arguments of a marker op."""

    value: int  # the value that is marked
    count: int  # pieces
    origin: str  # of the user's line
    number: int  # of the call to unpack or pack; its gradient has the same


def marker_of(n: Node) -> PieceMarker:
    """The marker arguments of a node whose op is in ``MARKERS``."""
    ref, count, origin, number = n.args
    return PieceMarker(ref.index, count, origin, number)


def without_markers(graph: Graph) -> Graph:
    """The same step with every marker replaced by the value that it marks."""
    return without(graph, lambda n: n.op in MARKERS)


def nearest_divisors(size: int, count: int) -> list[int]:
    """The divisors of ``size`` just below and above ``count``, which is none."""
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    below, above = [d for d in divisors if d < count], [d for d in divisors if d > count]
    return [*below[-1:], *above[:1]]


def count_pieces(graph: Graph, micro_batches: int, asked: str, later: bool) -> tuple[int, tuple[str, ...]]:
    """How many pieces a step is cut into, and notes on that; the arguments are those of ``cut_in_time``.

    Raises CallError where markers and ``micro_batches`` contradict each other, and where the batch does not divide.
    """
    wanted: dict[int, str] = {micro_batches: asked} if micro_batches > 1 else {}  # number → who wants it
    sizes: dict[int, str] = {}  # size to be divided → who asks for that, and of which value
    if micro_batches > 1:
        batches = (graph.metas[i.value].shape for i in graph.inputs if i.kind == InputKind.BATCH)
        sizes.update({shape[0]: f"{asked}: the batch" for shape in batches})
    markers = [(n, marker_of(n)) for n in graph.nodes if n.op in MARKERS]
    for _, mark in markers:
        wanted.setdefault(mark.count, mark.origin)
        sizes.setdefault(graph.metas[mark.value].shape[0], f"{mark.origin}: the tensor")
    if len(wanted) > 1:
        (count, one), (other, another), *_ = wanted.items()
        raise CallError(
            f"{one} and {another} were found in one job, which want {count} and {other} pieces; a job has one number "
            f"of pieces: name the same everywhere, or leave micro_batches out and say with flow.unpack what flows in "
            f"pieces"
        )
    if micro_batches == 1 and markers and all(n.op != IN_PIECES or n.phase == Phase.BACKWARD for n, _ in markers):
        raise CallError(
            f"{markers[0][1].origin}: nothing flows in pieces here; flow.unpack(x, {markers[0][1].count}) before it "
            f"was expected, or micro_batches={markers[0][1].count} of the job"
        )
    if micro_batches > 1 and not sizes and not later:
        raise CallError(f"{asked}: the job has no batch to divide; a tensor was expected among its arguments")
    most = next(iter(wanted), 1)
    count = max(n for n in range(1, most + 1) if all(size % n == 0 for size in sizes)) if sizes else 1
    for size, what in sizes.items():
        if size % most and not later:
            raise CallError(uneven(what, size, most))
    if count != most:
        (size, *_) = sizes
        return count, (f"a batch of {size} does not divide into {most} equal micro-batches; it goes in {count}",)
    return count, ()


# ---- inside


def _insert_marker(x: Tensor, n: int, what: str) -> Tensor:
    caller = sys._getframe(2)
    origin = f"{caller.f_code.co_filename}:{caller.f_lineno}: flow.{what}(x, {n!r})"
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise CallError(f"{origin}: a number of pieces, 1 or more, was expected")
    if not isinstance(x, Tensor) or x.dim() == 0:
        found = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise CallError(f"{origin}: {found} was found where a tensor with a dim 0 was expected")
    if tracing():
        mark = _in_pieces if what == "unpack" else _whole
        marked: Tensor = mark(x, n, origin, next(_numbers))
        return marked
    if x.shape[0] % n:
        raise CallError(uneven(f"{origin}: the tensor", x.shape[0], n))
    return x


def uneven(what: str, size: int, count: int) -> str:
    """The text of an error: ``what`` has a dim 0 of ``size``, and ``count`` pieces of it were asked for."""
    near = " or ".join(map(str, nearest_divisors(size, count)))
    return (
        f"{what} has {size} samples (dim 0), which do not divide into {count} equal pieces; "
        f"take {near} pieces, or another batch size"
    )


@torch.library.custom_op("actorflow::in_pieces", mutates_args=())
def _in_pieces(x: Tensor, count: int, origin: str, number: int) -> Tensor:
    """The same tensor."""
    return x.clone()


@torch.library.custom_op("actorflow::whole", mutates_args=())
def _whole(x: Tensor, count: int, origin: str, number: int) -> Tensor:
    """The same tensor."""
    return x.clone()


def _shape(x: Tensor, count: int, origin: str, number: int) -> Tensor:
    return torch.empty_like(x)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.mark = inputs[1:]


for _one, _other in ((_in_pieces, _whole), (_whole, _in_pieces)):
    _one.register_fake(_shape)
    _one.register_autograd(
        lambda ctx, grad, _other=_other: (_other(grad, *ctx.mark), None, None, None), setup_context=_remember
    )
