"""Record what a step has changed in Python by each line whose ops may fail when a call runs.

An index or a label out of range, a matrix that has no inverse: kernels find them only when a call runs.  PyTorch ends
the step at that line, and the script keeps what the step has changed before it; so must a call of the plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from actorflow_compiler.core.torch_internals import before_each_op
from actorflow_compiler.core.user_code import UserLines
from actorflow_compiler.hints.tags import in_backward

__all__ = ["FailurePoints"]

BY_VALUE = ("linalg", "cholesky", "multinomial", "assert", "ctc_loss")  # in names of ops that may fail for some values


class FailurePoints:
    """What one run of a step has changed in Python by each line whose ops may fail.

    ``so_far`` returns what it has changed up to now, and a text that names changes which cannot be recorded.
    """

    def __init__(self, so_far: Callable[[], tuple[Any, str]]) -> None:
        self._so_far = so_far
        self._lines = UserLines()
        self._changed: dict[str, Any] = {}  # line → changes by then; None: they differ between visits

    def watching(self) -> contextlib.AbstractContextManager[Any]:
        """Use while the step runs."""
        return before_each_op(self._record)

    def changed(self) -> Mapping[str, Any]:
        """The changes by each line, as ``so_far`` returns them, for lines where they are known."""
        return {line: changed for line, changed in self._changed.items() if line and changed is not None}

    def _record(self, op: Any, args: Iterable[Any]) -> None:
        # ops of a backward pass take the values that the forward pass has taken
        if in_backward() or not _may_fail(op, args):
            return
        changed, lost = self._so_far()
        line = self._lines.here()
        if lost or self._changed.setdefault(line, changed) != changed:
            self._changed[line] = None


def _may_fail(op: Any, args: Iterable[Any]) -> bool:
    """Whether an op takes indices, or may fail for some values in other ways."""
    name = str(op)
    if any(part in name for part in BY_VALUE):
        return True
    leaves = (leaf for leaf in pytree.tree_leaves(list(args)) if isinstance(leaf, Tensor))
    return any(not leaf.dtype.is_floating_point and not leaf.dtype.is_complex for leaf in leaves)
