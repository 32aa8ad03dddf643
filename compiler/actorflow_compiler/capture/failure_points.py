"""Record what a step has changed in Python before each line whose ops may fail when a call runs.

Kernels find some errors only when a call runs: an index or a label out of range, a matrix without an inverse.  PyTorch
ends the step at that line, and the script keeps what the step has changed before it.  A plan's call must do the same.
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
    """The changes in Python that one run of a step has made before each line whose ops may fail.

    ``so_far`` returns the changes up to now, and a text that names changes that cannot be recorded (else empty).
    """

    def __init__(self, so_far: Callable[[], tuple[Any, str]]) -> None:
        self._so_far = so_far
        self._lines = UserLines()
        self._changed: dict[str, Any] = {}  # line → changes before it; None: they differ between visits

    def watching(self) -> contextlib.AbstractContextManager[Any]:
        """Use while the step runs."""
        return before_each_op(self._record)

    def changed(self) -> Mapping[str, Any]:
        """The changes before each line, as ``so_far`` returns them; without lines whose changes cannot be recorded."""
        return {line: changed for line, changed in self._changed.items() if line and changed is not None}

    def _record(self, op: Any, args: Iterable[Any]) -> None:
        # ops of a backward pass get indices that the forward pass has used already
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
