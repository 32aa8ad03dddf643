"""The types of arguments and results of a first-generation job function: ``import actorflow.typing as tp``.

>>> @flow.global_function(type="train")
... def train_job(
...     images: tp.Numpy.Placeholder((32, 1, 28, 28), dtype=flow.float),
...     labels: tp.Numpy.Placeholder((32,), dtype=flow.int32),
... ) -> tp.Numpy: ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch

from actorflow.support.nearest_names import answer_with_nearest
from actorflow_compiler.core.errors import CallError

__all__ = ["Callback", "ListNumpy", "Numpy", "Placeholder"]

Form = TypeVar("Form")


@dataclass(frozen=True, slots=True)
class Placeholder:
    """The required form of one argument, made by ``tp.Numpy.Placeholder`` and ``tp.ListNumpy.Placeholder``."""

    shape: tuple[int, ...]  # the exact shape; that of one item if there is one for each device
    dtype: torch.dtype
    each: bool  # whether the argument is a list with one item for each device

    def __str__(self) -> str:
        kind = "ListNumpy" if self.each else "Numpy"
        return f"tp.{kind}.Placeholder({self.shape}, dtype={self.dtype})"


class Numpy:
    """An argument or a result that is one array: the whole (logical) batch of all devices."""

    each: ClassVar[bool] = False

    @classmethod
    def Placeholder(cls, shape: Sequence[int], dtype: torch.dtype = torch.float) -> Placeholder:  # noqa: N802 (OneFlow's name)
        """An argument of this shape and dtype, passed as a NumPy array or a tensor.

        An array of the same kind of numbers is converted: floating-point numbers to the placeholder's precision,
        integers if every value fits.  Raises CallError for an invalid shape or dtype.
        """
        try:
            sizes = tuple(shape)
        except TypeError:
            sizes = (shape,)  # type: ignore[assignment]  # refused below
        wrong = [n for n in sizes if isinstance(n, bool) or not hasattr(n, "__index__") or n.__index__() < 0]
        if wrong or isinstance(shape, str | int):
            raise CallError(
                f"tp.{cls.__name__}.Placeholder: shape {shape!r} was found; a tuple of sizes was expected, such as "
                f"(32, 1, 28, 28), or () for a single number"
            )
        if not isinstance(dtype, torch.dtype):
            raise CallError(
                f"tp.{cls.__name__}.Placeholder: dtype={dtype!r} was found; a dtype was expected, such as flow.float "
                f"or flow.int32"
            )
        return Placeholder(tuple(n.__index__() for n in sizes), dtype, cls.each)


class ListNumpy(Numpy):
    """An argument or a result that is a list with one array for each device, in the mirrored view."""

    each: ClassVar[bool] = True


class Callback(Generic[Form]):
    """``-> tp.Callback[tp.Numpy]``: a call returns at once with a function that takes a callback.

    The callback is called once, with the result, on a separate thread; callbacks run in the order in which they were
    given.

    >>> train_job(images, labels)(lambda loss: print(loss.mean()))
    """


answer_with_nearest(__name__)
