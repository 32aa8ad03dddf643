"""Trace ``torch.cond``, ``while_loop``, ``scan`` and ``map`` as plain ops.

Both sides of a branch on a value are computed, and the value selects one.  Loops are unrolled: the number of rounds
must be known while the step is captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from actorflow_compiler.core.torch_internals import OpOverload, is_fake, replaced_higher_order
from actorflow_compiler.values.checks import within_branch

__all__ = ["unrolled_higher_order_ops"]

METADATA = {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride,
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf")),
}  # fmt: skip


@contextlib.contextmanager
def unrolled_higher_order_ops() -> Iterator[None]:
    """Replace these functions of torch by ones that a trace turns into plain ops."""
    with replaced_higher_order({"cond": _cond, "while_loop": _while_loop, "scan": _scan, "map": _map}):
        yield


class _GradientWhere(torch.autograd.Function):
    """The identity.  Its gradient is zero where a side of a branch was not taken, even if the incoming one is NaN."""

    @staticmethod
    def forward(ctx: Any, taken: Tensor, x: Tensor) -> Tensor:
        """See above."""
        ctx.save_for_backward(taken)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        """See above."""
        (taken,) = ctx.saved_tensors
        return None, torch.where(taken, gradient, 0)


class _BranchMode(TorchFunctionMode):
    """The mode in which one side of a branch is traced.

    Tensors from before the branch (operands, and those in a closure) get gradients only where the side is taken.
    """

    def __init__(self, taken: Tensor) -> None:
        super().__init__()
        self._taken = taken
        self._guarded: dict[int, tuple[Tensor, Tensor]] = {}  # by id: a tensor (kept alive), and its copy
        self._made: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See above."""
        kwargs = kwargs or {}
        if func in METADATA or isinstance(func, OpOverload):  # also what the guard itself calls
            return func(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(Tensor, self._guard, (args, kwargs))
        found = func(*args, **kwargs)
        self._made.update({id(x): x for x in pytree.tree_leaves(found) if isinstance(x, Tensor)})
        return found

    def _guard(self, x: Tensor) -> Tensor:
        if id(x) in self._made or not x.requires_grad or not is_fake(x):
            return x
        if id(x) not in self._guarded:
            self._guarded[id(x)] = x, _GradientWhere.apply(self._taken, x)  # type: ignore[no-untyped-call]
        return self._guarded[id(x)][1]


def _cond(predicate: Any, true: Callable[..., Any], false: Callable[..., Any], operands: Sequence[Any]) -> Any:
    if not isinstance(predicate, Tensor):
        return (true if predicate else false)(*operands)
    predicate = predicate.reshape(()).bool()

    def side(function: Callable[..., Any], taken: Tensor) -> Any:
        with _BranchMode(taken), within_branch(taken):
            return function(*operands)

    def choose(a: Any, b: Any) -> Any:
        return torch.where(predicate, a, b) if isinstance(a, Tensor) else a

    return pytree.tree_map(choose, side(true, predicate), side(false, ~predicate))


def _while_loop(cond: Callable[..., Any], body: Callable[..., Any], carried: Any, more: Any = (), **_: Any) -> Any:
    carried = tuple(carried)
    while bool(cond(*carried, *more)):
        found = body(*carried, *more)
        carried = tuple(found) if isinstance(found, tuple | list) else (found,)
    return carried


def _scan(
    combine: Callable[..., Any], init: Sequence[Tensor], xs: Sequence[Tensor], additional_inputs: Any = ()
) -> Any:
    carry: Any = [*init]
    rows = []
    for at in range(xs[0].shape[0]):
        carry, out = combine(*pytree.tree_leaves(carry), *(x[at] for x in xs), *additional_inputs)
        rows.append(out)
    return carry, pytree.tree_map(lambda *column: torch.stack(column), *rows)


def _map(function: Callable[..., Any], xs: Sequence[Tensor], more: Any = ()) -> Any:
    rows = [function(*(x[at] for x in xs), *more) for at in range(xs[0].shape[0])]
    return pytree.tree_map(lambda *column: torch.stack(column), *rows)
