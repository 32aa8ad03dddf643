"""``flow.distribute``: as a function it sets the layouts of a model's tensors; its methods name one variable's."""

from __future__ import annotations

from torch import nn

from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, Broadcast, Split
from actorflow_compiler.hints import hints
from actorflow_compiler.hints.hints import LayoutPatterns

__all__ = ["distribute"]


class _Distribute:
    """``flow.distribute(model, …)``, and ``.split(axis)``, ``.broadcast()`` and ``.auto()`` for ``get_variable``."""

    def __call__(
        self,
        model: nn.Module,
        layouts: LayoutPatterns | None = None,
        *,
        outputs: LayoutPatterns | None = None,
        optimizer: LayoutPatterns | None = None,
        placement: Placement | None = None,
    ) -> None:
        hints.distribute(model, layouts, outputs=outputs, optimizer=optimizer, placement=placement)

    @staticmethod
    def split(axis: int) -> Split:
        """A layout that splits dimension ``axis`` of the variable over the devices.

        Raises LayoutError if ``axis`` is no integer.
        """
        if isinstance(axis, bool) or not isinstance(axis, int):
            raise LayoutError(f"distribute.split({axis!r}) was found; the number of a dimension was expected: split(0)")
        return Split(axis)

    @staticmethod
    def broadcast() -> Broadcast:
        """A layout in which every device holds the whole variable."""
        return B

    @staticmethod
    def auto() -> None:
        """No layout (None): the job's ``parallel=`` decides how the variable is distributed, as it does by default."""

    def __repr__(self) -> str:
        return "<flow.distribute>"


_Distribute.__call__.__doc__ = hints.distribute.__doc__
distribute = _Distribute()
