"""Attention over nested queries, keys and values, computed as attention over padded ones with a mask."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from actorflow_compiler.masked.rules import bound
from actorflow_compiler.nested.shapes import padded
from actorflow_compiler.nested.tensor import NestedRows, nested_in, refuse, rule

__all__: list[str] = []

NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@rule("scaled_dot_product_attention")
def attend(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Attention within each sequence, over the keys of that sequence."""
    given = bound(NAMES, args, kwargs)
    q, k, v = (given.pop(name) for name in NAMES[:3])
    for name in ("attn_mask", "dropout_p"):
        if given.pop(name, None):
            refuse(
                nested_in((q, k, v))[0], f"F.scaled_dot_product_attention with {name}",
                "there it knows neither masks nor dropout", "expected: is_causal=True, or padded tensors and a mask",
            )  # fmt: skip
    if not all(isinstance(t, NestedRows) and t._ragged_dim == t._rows.dim() - 2 for t in (q, k, v)):
        refuse(
            nested_in((q, k, v))[0], "F.scaled_dot_product_attention",
            "queries, keys and values are all nested, and their last dim but one is the ragged one",
            "expected: nt.unflatten(-1, [heads, size]).transpose(1, 2)",
        )  # fmt: skip
    if k._lengths.of != v._lengths.of or len(q) != len(k) or 0 in k._lengths.of:
        refuse(k, "F.scaled_dot_product_attention", "as many sequences, and as many values as keys, one at least, "
               "are expected in each")  # fmt: skip
    most = max(k._lengths.of)
    counts = torch.tensor(k._lengths.of, device=k._rows.device)
    there = torch.arange(most, device=k._rows.device) < counts.view(-1, *(1,) * q._rows.dim())
    if given.pop("is_causal", False):
        there = there & torch.ones(max(q._lengths.of), most, dtype=torch.bool, device=k._rows.device).tril()
    out = F.scaled_dot_product_attention(_padded(q), _padded(k), _padded(v), there, **given)
    at = q._ragged_dim
    parts = [out[i].narrow(at, 0, length) for i, length in enumerate(q._lengths.of)]
    return q.like(torch.cat(parts, at))


def _padded(x: NestedRows) -> Tensor:
    size = [*x._rows.shape]
    size[x._ragged_dim] = max(x._lengths.of)
    return padded(x, 0.0, size)
