"""Data formats and padding of convolutions and pools, as OneFlow writes them, for torch's functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from actorflow_compiler.core.errors import StateError

__all__ = [
    "Padding", "channels_first", "channels_last", "even_padding", "pad", "padding_amounts", "per_dim", "same_format",
]  # fmt: skip

Padding = str | Sequence[int | Sequence[int]]
AUTOMATIC = ("VALID", "SAME", "SAME_LOWER", "SAME_UPPER")


def channels_last(what: str, data_format: str, tensor: Tensor, spatial: int) -> bool:
    """Whether a data format has the channels last.

    Raises StateError for an unknown format, or for a tensor of another number of dims; ``what`` is the function called.
    """
    window = "DHW"[3 - spatial :]
    formats = {f"NC{window}": False, f"N{window}C": True}
    if data_format.upper() not in formats:
        raise StateError(
            f"{what}: data_format={data_format!r} was found; {' or '.join(map(repr, formats))} was expected"
        )
    if tensor.dim() != spatial + 2:
        raise StateError(
            f"{what}: a tensor of shape {list(tensor.shape)} was found; {spatial + 2} dims ({data_format}) "
            f"were expected"
        )
    return formats[data_format.upper()]


def same_format(data_format: str | None, spatial: int) -> str:
    """A data format, or the default one: channels first."""
    return data_format if data_format is not None else f"NC{'DHW'[3 - spatial :]}"


def channels_first(tensor: Tensor, last: bool) -> Tensor:
    """A view with the channels as dim 1."""
    return tensor.movedim(-1, 1) if last else tensor


def per_dim(what: str, key: str, value: int | Sequence[int] | None, count: int) -> tuple[int, ...]:
    """``value`` for each of the window's dims; None is 1.  Raises StateError for another number of them."""
    if value is None or isinstance(value, int):
        return (1 if value is None else value,) * count
    found = tuple(value)
    if len(found) == 1:
        return found * count
    if len(found) != count:
        raise StateError(f"{what}: {key}={list(found)} was found; a number, or {count} of them, was expected")
    return found


def padding_amounts(
    what: str,
    padding: Padding,
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
    last: bool,
) -> list[tuple[int, int]]:
    """How much is added before and after each of the window's dims.

    ``padding`` is "VALID" (nothing), "SAME_UPPER" or "SAME_LOWER" (as much as makes ⌈size / stride⌉ outputs, the odd
    one after or before), "SAME" (as "SAME_LOWER"), or has an item for every dim of the tensor: a number, or two.
    Raises StateError for anything else.
    """
    if isinstance(padding, str):
        if padding.upper() not in AUTOMATIC:
            raise StateError(
                f"{what}: padding={padding!r} was found; one of {', '.join(map(repr, AUTOMATIC))}, or an item for each "
                f"dim of the tensor, was expected"
            )
        if padding.upper() == "VALID":
            return [(0, 0)] * len(sizes)
        pairs = []
        for size, k, stride, d in zip(sizes, kernel, strides, dilation, strict=True):
            total = max(0, (-(-size // stride) - 1) * stride + (k - 1) * d + 1 - size)
            less, more = total // 2, total - total // 2
            pairs.append((less, more) if padding.upper() == "SAME_UPPER" else (more, less))
        return pairs
    items = [(p, p) if isinstance(p, int) else tuple(p) for p in padding]
    inside = range(1, len(items) - 1) if last else range(2, len(items))
    outside = [item for i, item in enumerate(items) if i not in inside]
    if len(items) != len(sizes) + 2 or any(len(item) != 2 for item in items) or any(any(item) for item in outside):
        raise StateError(
            f"{what}: padding={list(padding)} was found; an item (a number, or two: before and after) for each of the "
            f"{len(sizes) + 2} dims was expected, 0 for batch and channels"
        )
    return [(int(items[i][0]), int(items[i][1])) for i in inside]


def even_padding(pairs: Sequence[tuple[int, int]]) -> list[int] | None:
    """The padding as torch's functions take it themselves; None where it differs before and after."""
    return [before for before, _ in pairs] if all(a == b for a, b in pairs) else None


def pad(tensor: Tensor, pairs: Sequence[tuple[int, int]], value: float = 0.0) -> Tensor:
    """A tensor with its last dims padded with ``value``."""
    flat: list[Any] = [side for pair in reversed(pairs) for side in pair]
    return F.pad(tensor, flat, value=value)
