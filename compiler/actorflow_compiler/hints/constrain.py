"""``flow.constrain``: an op that carries a user's layout for one tensor through the passes of the compiler.

``actorflow.constrain(x, layout, origin)`` is the identity.  Inference gives it only those signatures whose
output has ``layout``; lowering removes the op, so it costs no more than the boxing of its input.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.ops import FLOATS
from actorflow_compiler.core.sbp import B, Broadcast, P, PartialSum, Sbp, Split, check_fits, parse
from actorflow_compiler.graph.graph import Graph
from actorflow_compiler.hints.tags import tracing
from actorflow_compiler.signatures import OpCall, Signature

CONSTRAIN = "actorflow.constrain"
FREE = "*"  # the text of an axis that a hint leaves free
Wish = tuple[Sbp | None, ...]  # one entry for each mesh axis, from the first; None leaves an axis free

# ---- public functions


def constrain(x: Tensor, sbp: Sbp | Wish) -> Tensor:
    """``x``, in the layout ``sbp`` from here on: a hint for the layout of one tensor inside a job.

    A tuple has one entry for each mesh axis of the placement; None leaves an axis to inference, as do
    axes that are not named.  Use the tensor that is returned.  Its gradient passes through unchanged.
    A dim that is too small to be cut stays whole.  Outside of a job ``x`` is returned unchanged.

    Raises LayoutError for a split dim that ``x`` does not have, for a partial sum of integers and, when
    the job is compiled, for more entries than the placement has mesh axes.
    """
    caller = sys._getframe(1)
    origin = f"{caller.f_code.co_filename}:{caller.f_lineno}: flow.constrain"
    return apply(x, wish_of(sbp, origin), origin)


# ---- for other passes


def wish_of(sbp: object, origin: str) -> Wish:
    """A user's layout as a ``Wish``, with one entry for each axis it names; raises LayoutError if it is no layout."""
    entries = sbp if isinstance(sbp, tuple) else (sbp,)
    found: list[Sbp | None] = []
    for entry in entries:
        if entry is not None and not isinstance(entry, Split | Broadcast | PartialSum):
            raise LayoutError(
                f"{origin}: {sbp!r} was found where a layout was expected: flow.sbp.split(dim), flow.sbp.broadcast, "
                f"or a tuple of these with one entry for each mesh axis"
            )
        plain = B if isinstance(entry, Broadcast) else P if isinstance(entry, PartialSum) else entry
        found.append(plain)
    return tuple(found)


def show_wish(wish: Iterable[Sbp | None]) -> str:
    """The short text form: ``S(0)``, or ``[*,S(1)]`` with ``*`` for an axis that is free."""
    parts = [FREE if entry is None else str(entry) for entry in wish]
    return parts[0] if len(parts) == 1 else f"[{','.join(parts)}]"


@functools.cache
def parse_wish(text: str) -> Wish:
    """``"[*,S(1)]"`` → ``(None, Split(1))``."""
    found = re.findall(r"S\([^)]*\)|[BP]|\*", text)
    return tuple(None if part == FREE else parse(part) for part in found)


def fit_wish(wish: Wish, shape: Sequence[int], what: str) -> Wish:
    """The wish with non-negative dims; raises LayoutError, naming ``what``, for a dim that ``shape`` does not have."""
    return tuple(entry if entry is None else check_fits(entry, shape, 1, what) for entry in wish)


def apply(x: Tensor, wish: Wish, origin: str) -> Tensor:
    """``constrain`` for a wish; ``origin``, for errors, is the script's line or the pattern that asked for it."""
    if not isinstance(x, Tensor):
        raise LayoutError(f"{origin}: {type(x).__name__} was found where a tensor was expected")
    wish = fit_wish(wish, x.shape, f"{origin}: the tensor")
    if P in wish and str(x.dtype).removeprefix("torch.") not in FLOATS:
        raise LayoutError(
            f"{origin}: {show_wish(wish)} was found for a tensor of {x.dtype} and shape {tuple(x.shape)}; "
            f"only floating numbers can be partial sums: split or broadcast it"
        )
    if not tracing() or all(entry is None for entry in wish):
        return x
    return mark(x, show_wish(wish), origin)


def mark(x: Tensor, layout: str, origin: str) -> Tensor:
    """``x`` passed through ``actorflow.constrain`` without any check; a later pass may replace the layout's text."""
    out: Tensor = _constrain(x, layout, origin)
    return out


def apply_to_first(output: Any, wish: Wish, origin: str) -> Any:
    """A module's output with its first tensor constrained; looks into tuples, lists, dictionaries and model outputs.

    Raises LayoutError where there is no tensor.
    """
    leaves, form = pytree.tree_flatten(output)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaves[i] = apply(leaf, wish, origin)
            return pytree.tree_unflatten(leaves, form)
    raise LayoutError(
        f"{origin}: the module returned {type(output).__name__} without a tensor in it; a hint on outputs is for the "
        f"first tensor that the module returns. Name another module, or use flow.constrain inside"
    )


def wanted(call: OpCall, axis: int) -> Sbp | None:
    """The layout that an ``actorflow.constrain`` asks for on a mesh axis; None where it leaves the axis free."""
    wish = parse_wish(call.args[1])
    return wish[axis] if axis < len(wish) else None


def honoured(call: OpCall, axis: int, found: tuple[Signature, ...]) -> tuple[Signature, ...]:
    """The signatures along a mesh axis that a constraint admits.

    An op other than ``actorflow.constrain`` may have all of them.  Where a dim cannot be cut (it has one
    element, or parts of different sizes from an earlier axis), the tensor stays whole.
    """
    if call.op != CONSTRAIN or (sbp := wanted(call, axis)) is None:
        return found
    return tuple(s for s in found if s.outs[0] == sbp) or found[:1]


def check_constraints(graph: Graph) -> Graph:
    """Return the graph if every constraint fits its placement; raise LayoutError that names the user's line."""
    for n in graph.nodes:
        if n.op != CONSTRAIN or n.placement is None:
            continue
        _, text, origin = n.args
        axes = len(n.placement.hierarchy)
        if len(parse_wish(text)) > axes:
            raise LayoutError(
                f"{origin}: {text} was found for a tensor of shape {graph.metas[n.outs[0]].shape}; its placement "
                f"{n.placement} has {axes} mesh ax{'i' if axes == 1 else 'e'}s, so at most {axes} "
                f"entr{'y was' if axes == 1 else 'ies were'} expected; place it on a mesh, or leave entries out"
            )
    return graph


@torch.library.custom_op("actorflow::constrain", mutates_args=())
def _constrain(x: Tensor, layout: str, origin: str) -> Tensor:
    """The identity; ``layout`` is the text of a wish (``show_wish``)."""
    return x.clone()


@_constrain.register_fake
def _(x: Tensor, layout: str, origin: str) -> Tensor:
    return torch.empty_like(x)


def _backward(_: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return grad, None, None


_constrain.register_autograd(_backward)
