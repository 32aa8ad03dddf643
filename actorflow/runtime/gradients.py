"""Calls of jobs go in; an error comes out where gradients that one has left behind would count in another."""

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
        """A job is called.  Raises StateError if what is left would count in eager PyTorch."""
        if gradients is self._last:  # the second of two equal calls changes nothing
            return
        found = sorted(gradients.adds & self._by.keys()) if self._by else []
        if found:
            raise StateError(
                f"job {job!r} takes gradients to be clear that job {self._by[found[0]]!r} has left behind (those of "
                f"{some(found)}), which would count in eager PyTorch; expected: gradients cleared between the two; "
                f"call optimizer.zero_grad() in {job!r} before backward, or for these parameters at the end of "
                f"{self._by[found[0]]!r}"
            )
        self._last = gradients
        for name in gradients.cleared & self._by.keys():
            del self._by[name]
        self._by.update(dict.fromkeys(gradients.left, job))
