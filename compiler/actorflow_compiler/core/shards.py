"""Cut a whole tensor into the parts of each device, and put parts together again, along one mesh axis."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actorflow_compiler.core.sbp import PartialSum, Parts, Sbp, Split, device_count, spans


def shard(tensor: Tensor, sbp: Sbp, parts: Parts, generator: torch.Generator | None = None) -> list[Tensor]:
    """The parts of ``tensor`` on each of ``parts`` devices along one mesh axis.

    Parts of a split are copies; broadcast parts are the tensor itself.  A sum of terms is the tensor
    on the first device and zeros on the others; with a ``generator``, random terms of about its size.
    Raises LayoutError for a split that does not fit the tensor.
    """
    count = device_count(parts)
    if isinstance(sbp, Split):
        size = tensor.shape[sbp.dim]
        return [
            torch.cat([tensor.narrow(sbp.dim, start, n) for start, n in spans(size, sbp, parts, i)], sbp.dim)
            for i in range(count)
        ]
    if not isinstance(sbp, PartialSum):
        return [tensor] * count
    if generator is None:
        return [tensor, *(torch.zeros_like(tensor) for _ in range(count - 1))]
    scale = tensor[tensor.isfinite()].abs().max().clamp(1e-2, 1e3) if tensor.isfinite().any() else 1.0
    terms = [torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) * scale for _ in range(count - 1)]
    return [tensor - sum(terms), *terms]


def unshard(tensors: Sequence[Tensor], sbp: Sbp, parts: Parts | None = None) -> Tensor:
    """The whole tensor of which ``tensors`` are the parts, in order of device; without ``parts`` devices are equal.

    Raises LayoutError for a split that does not fit the whole.
    """
    if isinstance(sbp, PartialSum):
        return torch.stack(list(tensors)).sum(0)
    if not isinstance(sbp, Split):
        return tensors[0]
    size = sum(t.shape[sbp.dim] for t in tensors)
    pieces: list[tuple[int, Tensor]] = []
    for i, tensor in enumerate(tensors):
        at = 0
        for start, n in spans(size, sbp, parts or len(tensors), i):
            pieces.append((start, tensor.narrow(sbp.dim, at, n)))
            at += n
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda p: (p[0], p[1].shape[sbp.dim]))], sbp.dim)
