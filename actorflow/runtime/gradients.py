"""Calls of jobs go in; an error comes out where one would add to the gradients that another has left behind."""

from __future__ import annotations

from actorflow_compiler.errors import StateError
from actorflow_compiler.gradients import Gradients, some

__all__ = ["Left"]


class Left:
    """Whose gradients are not clear between calls: plans keep none, and eager PyTorch would."""

    def __init__(self) -> None:
        self._by: dict[str, str] = {}  # parameter → the job that left its gradient
        self._last: Gradients | None = None

    def before(self, job: str, gradients: Gradients) -> None:
        """A job is called.  Raises StateError if it would add to what is left."""
        if gradients is self._last:  # the second of two equal calls changes nothing
            return
        found = sorted(gradients.adds & self._by.keys()) if self._by else []
        if found:
            raise StateError(
                f"job {job!r} adds to gradients that job {self._by[found[0]]!r} has left behind (those of "
                f"{some(found)}); expected: gradients that are clear; call optimizer.zero_grad() in {job!r} before "
                f"backward, as eager PyTorch needs it, too, where those gradients are not meant to count"
            )
        self._last = gradients
        for name in gradients.cleared & self._by.keys():
            del self._by[name]
        self._by.update(dict.fromkeys(gradients.left, job))
