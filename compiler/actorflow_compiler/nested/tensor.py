"""A tensor subclass for nested tensors: it holds packed rows, and the constant lengths of their sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from actorflow_compiler.core.torch_internals import make_wrapper
from actorflow_compiler.masked.rules import FunctionRules, refusal

__all__ = [
    "RULES", "NestedRows", "RaggedSize", "SequenceLengths", "check_results", "dim_of_rows", "nested_in", "refuse",
    "rule", "dispatchers", "refuse_step",
]  # fmt: skip

dispatchers: list[Callable[[Any, Sequence[Any], dict[str, Any]], Any]] = []  # ``__init__.py`` appends the only one
RULES = FunctionRules()
rule = RULES.register
INSTEAD = (
    "expected: plain tensors there, which nt.unbind(), nt.values() and torch.nested.to_padded_tensor(nt, 0.0) give"
)


class SequenceLengths:
    """The lengths of a nested tensor's sequences; those of jagged tensors compare by identity, as in PyTorch."""

    def __init__(self, of: Sequence[int]) -> None:
        self.of = tuple(of)

    @property
    def offsets(self) -> list[int]:
        """Where each sequence begins in the packed rows, and where the last one ends."""
        found = [0]
        for length in self.of:
            found.append(found[-1] + length)
        return found

    @classmethod
    def over(cls, offsets: Tensor, of: Sequence[int]) -> SequenceLengths:
        """The lengths ``of`` for a tensor of offsets; the same object for the same tensor, as in PyTorch.

        If the offsets were written, so that ``of`` differs from before, it is a new object.
        """
        known: SequenceLengths | None = _by_offsets.get(offsets)
        if known is None or known.of != tuple(of):
            known = cls(of)
            _by_offsets[offsets] = known
        return known


_by_offsets: Any = WeakIdKeyDictionary()  # tensor of offsets → SequenceLengths


class RaggedSize:
    """The size of the ragged dim in a shape.  It can be compared and passed to ``view``; arithmetic is refused."""

    def __init__(self, lengths: SequenceLengths) -> None:
        self.lengths = lengths

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedSize) and other.lengths is self.lengths

    def __hash__(self) -> int:
        return id(self.lengths)

    def _no_number(self, *_: Any) -> NoReturn:
        refuse_step(
            f"the step computes with the size of a dim of a nested tensor whose sequences are "
            f"{_lengths_text(self.lengths)} long, which is no number; expected: -1 in a view, or the lengths, which "
            f"are constants"
        )

    __index__ = __int__ = __float__ = __bool__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = _no_number
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __rfloordiv__ = _no_number
    __truediv__ = __rtruediv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __str__ = __repr__ = _no_number


class NestedRows(Tensor):
    """A nested tensor with a batch dim: sequences of ``_lengths``, packed along dim ``_ragged_dim`` of ``_rows``.

    It never runs a kernel: a function without a rule is refused.
    """

    _rows: Tensor
    _ragged_dim: int
    _lengths: SequenceLengths
    _jagged: bool  # whether the layout is jagged; else it is strided

    @staticmethod
    def __new__(cls, rows: Tensor, at: int, lengths: SequenceLengths, jagged: bool) -> NestedRows:
        """Wrap ``rows`` without a copy."""
        made: NestedRows = make_wrapper(
            cls, rows.shape, dtype=rows.dtype, device=rows.device, requires_grad=rows.requires_grad
        )
        assert rows.shape[at] == sum(lengths.of), (rows.shape, at, lengths.of)
        made._rows, made._ragged_dim, made._lengths, made._jagged = rows, at, lengths, jagged
        return made

    def like(self, rows: Tensor, at: int | None = None) -> NestedRows:
        """A nested tensor over other rows, with the same lengths and layout; ``at`` is another ragged dim."""
        return NestedRows(rows, self._ragged_dim if at is None else at, self._lengths, self._jagged)

    @property
    def each(self) -> tuple[Tensor, ...]:
        """The sequences, as views of the packed rows."""
        found: tuple[Tensor, ...] = torch.split(self._rows, list(self._lengths.of), self._ragged_dim)
        return found

    def offsets(self) -> Tensor:
        """Where each sequence begins among ``values()``, and where the last one ends."""
        found = torch.tensor(self._lengths.offsets, device=self._rows.device)
        _by_offsets[found] = self._lengths
        return found

    def _get_max_seqlen(self) -> int:
        return max(self._lengths.of)

    def _get_min_seqlen(self) -> int:
        return min(self._lengths.of)

    def lengths(self) -> None:
        """None, as for each jagged tensor without holes in PyTorch."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatchers[0](func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is a disabled stub
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        refuse(nested_in((args, kwargs))[0], str(func))

    def __len__(self) -> int:
        return len(self._lengths.of)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.unbind())


def nested_in(tree: Any) -> list[NestedRows]:
    """The nested tensors among arguments."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, NestedRows)]


def refuse_step(text: str) -> NoReturn:
    """Raise CaptureError with the user's line; the end of the capture raises it again if the step catches it."""
    raise refusal(text)


def refuse(of: NestedRows, what: str, why: str = "what that gives is not known", instead: str = INSTEAD) -> NoReturn:
    """Raise CaptureError for an operation that nested tensors do not support."""
    refuse_step(
        f"{what} is called with a nested tensor, whose sequences are {_lengths_text(of._lengths)} long; {why}; "
        f"{instead}"
    )


def dim_of_rows(x: NestedRows, dim: int, name: str) -> int:
    """The dim of the packed rows for a dim of a nested tensor.  Raises CaptureError for the batch dim."""
    dims = x._rows.dim() + 1
    if not -dims <= dim < dims:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-dims}, {dims - 1}], but got {dim})")
    dim %= dims
    if not dim:
        refuse(x, f"{name} along dim 0", "that mixes sequences of different lengths")
    return dim - 1


def check_results(results: Any) -> None:
    """Raise CaptureError where a step returns a nested tensor."""
    for nested in nested_in(results):
        refuse(nested, "return", "a result is a plain tensor",
               "expected: nt.values(), nt.unbind() or torch.nested.to_padded_tensor(nt, 0.0)")  # fmt: skip


def _lengths_text(lengths: SequenceLengths) -> str:
    texts = [str(n) for n in lengths.of]
    return ", ".join([*texts[:4], "…"] if len(texts) > 5 else texts)
