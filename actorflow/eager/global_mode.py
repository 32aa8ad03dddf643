"""``global_mode``: a scope in which functions that make tensors make global ones; and how these take a placement."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import Tensor

from actorflow.eager.current import current
from actorflow.eager.layout import Layout, layout_of
from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import NdSbp
from actorflow_compiler.hints.tags import tracing

__all__ = ["current_global_mode", "global_mode", "like", "placed"]


class _Modes(threading.local):
    def __init__(self) -> None:
        self.entered: list[Layout | None] = []  # of this thread, the innermost last; None: not enabled


_modes = _Modes()


class global_mode:  # noqa: N801 -- OneFlow's name
    """In a ``with``, let ``flow.ones``, ``flow.randn`` and so on make global tensors where they are given no placement.

    Their ``device=`` does not count then.  ``global_mode(False)`` lets them make plain tensors again.  In a job all
    tensors are whole, and it changes nothing.  Raises LayoutError for a missing or wrong placement or sbp.

    >>> with flow.utils.global_view.global_mode(True, placement=placement, sbp=flow.sbp.broadcast):
    ...     noise = flow.randn(4, 5)
    >>> noise.is_global
    True
    """

    __slots__ = ("_layout",)

    def __init__(self, enabled: bool, placement: Any = None, sbp: Any = None) -> None:
        if not isinstance(enabled, bool):
            raise LayoutError(f"global_mode({enabled!r}) was found; global_mode(True, placement=…, sbp=…) was expected")
        if not enabled and (placement is not None or sbp is not None):
            raise LayoutError("global_mode(False) was given a placement or an sbp; neither was expected")
        self._layout = layout_of(placement, sbp, None, "global_mode") if enabled else None
        if self._layout is not None:
            current().check_placement(self._layout.placement)

    def __enter__(self) -> None:
        _modes.entered.append(self._layout)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _modes.entered.pop()


class current_global_mode:  # noqa: N801 -- OneFlow's name
    """The ``global_mode`` that this thread is in: ``is_enabled``, and its ``placement`` and ``sbp``, else None."""

    __slots__ = ("placement", "sbp")

    def __init__(self) -> None:
        mode = _innermost()
        self.placement: Placement | None = None if mode is None else mode.placement
        self.sbp: NdSbp | None = None if mode is None else mode.sbp

    @property
    def is_enabled(self) -> bool:
        """Whether tensors are made global."""
        return self.placement is not None


def _innermost() -> Layout | None:
    return _modes.entered[-1] if _modes.entered else None


def placed(function: Callable[..., Tensor], in_mode: bool = True) -> Callable[..., Tensor]:
    """The same function of a placement and an sbp.

    With ``in_mode``, a ``global_mode`` gives them where both are left out.

    In a job, where all tensors are whole and lie where its plan says, it is called without them.
    """
    name = function.__name__

    @functools.wraps(function)
    def call(*args: Any, placement: Any = None, sbp: Any = None, **options: Any) -> Tensor:
        if in_mode and placement is None and sbp is None and (mode := _innermost()) is not None:
            placement, sbp = mode.placement, mode.sbp
            options.pop("device", None)
        if placement is not None and tracing():
            layout_of(placement, sbp, None, f"flow.{name}")
            placement = sbp = None
        return function(*args, placement=placement, sbp=sbp, **options)

    return call


def like(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``placed`` for a function that makes a tensor like another one, whose kind the result has in any mode."""
    return placed(function, in_mode=False)
