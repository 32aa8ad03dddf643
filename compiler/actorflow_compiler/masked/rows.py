"""Functions that treat each row by itself (softmax, layer norm, attention, recurrent layers …), for selected rows."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from actorflow_compiler.masked.rules import RULES, bound, op_name, rule
from actorflow_compiler.masked.selecting import wrap_zeroed
from actorflow_compiler.masked.tensor import (
    MaskedRows,
    common_selection,
    filled,
    normalized_dim,
    only_first,
    refuse,
    refuse_pairs,
    tensors_in,
    wrap,
)

__all__: list[str] = []

ALONG = {  # functions along one dim: position of ``dim`` among the arguments, its default
    "softmax": (1, None), "log_softmax": (1, None), "softmin": (1, None), "cumsum": (1, None), "cumprod": (1, None),
    "logcumsumexp": (1, None), "sort": (1, -1), "argsort": (1, -1), "topk": (2, -1), "flip": (1, None),
    "roll": (2, None), "normalize": (2, 1), "glu": (1, -1), "cummax": (1, None), "cummin": (1, None), "diff": (2, -1),
}  # fmt: skip  # fmt: skip
OVER_ROWS = {"cumsum": 0.0, "cumprod": 1.0, "logcumsumexp": -math.inf, "softmax": -math.inf, "log_softmax": -math.inf}
BATCHED = {  # functions of a batch in dim 0: the number of dims with a batch
    "conv1d": 3, "conv2d": 4, "conv3d": 5, "max_pool1d": 3, "max_pool2d": 4, "avg_pool1d": 3, "avg_pool2d": 4,
    "adaptive_avg_pool1d": 3, "adaptive_avg_pool2d": 4, "adaptive_max_pool1d": 3, "adaptive_max_pool2d": 4,
    "pixel_shuffle": 4, "interpolate": None, "group_norm": None,
}  # fmt: skip  # fmt: skip


@rule(*ALONG)
def along(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function along one or more dims that keeps all dims."""
    name = op_name(func)
    v, at = only_first(op_name(func), args, kwargs)
    where, default = ALONG[name]
    key = "dims" if name in ("flip", "roll") else "dim"
    given = kwargs.get(key, args[where] if len(args) > where else default)
    if name == "flip" and isinstance(given, int):
        given = args[1:]
    if given is None:
        refuse(
            v, f"{name} without a dim is taken of", "which dim it is depends on how many there are", instead="dim=-1"
        )
    dims = [normalized_dim(d, v._whole.dim()) for d in ([given] if isinstance(given, int) else given)]
    if at not in dims:
        rest = args[1:]
        return pytree.tree_map_only(Tensor, lambda out: wrap(out, at, v._selection), func(v._whole, *rest, **kwargs))
    if name not in OVER_ROWS:
        most = {"topk": "float('-inf')", "sort": "float('inf')", "argsort": "float('inf')"}
        refuse(v, f"{name} goes along", "their order and their number depend on values", most.get(name, "0"))
    out = func(filled(v, OVER_ROWS[name]), *args[1:], **kwargs)
    return wrap_zeroed(out, at, v._selection)


@rule("layer_norm", "rms_norm")
def norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A norm over the last dims."""
    v, at = only_first(op_name(func), args, kwargs)
    shape = kwargs["normalized_shape"] if "normalized_shape" in kwargs else args[1]
    if at >= v._whole.dim() - len(shape):
        refuse(v, f"{op_name(func)} normalises over", "their number depends on values", "0")
    return wrap(func(v._whole, *args[1:], **kwargs), at, v._selection)


@rule("linear")
def linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A linear map of the last dim."""
    v, at = only_first(op_name(func), args, kwargs)
    if at == v._whole.dim() - 1:
        refuse(v, "linear sums over", "its weight has a column for each", "0")
    return wrap(func(v._whole, *args[1:], **kwargs), at, v._selection)


@rule("prelu")
def prelu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """PReLU, with one slope or one for each channel."""
    v, at = only_first("prelu", args, kwargs)
    slopes = args[1] if len(args) > 1 else kwargs["weight"]
    if at == 1 and slopes.numel() > 1:
        refuse(v, "prelu has a slope for each of", "their number depends on values")
    return wrap(func(v._whole, *args[1:], **kwargs), at, v._selection)


@rule(*BATCHED)
def batched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of a batch that treats each item of the batch by itself."""
    v, at = only_first(op_name(func), args, kwargs)
    dims = BATCHED[op_name(func)]
    if at or (dims is not None and v._whole.dim() != dims):
        refuse(v, f"{op_name(func)} mixes", "they are not its batch")
    return pytree.tree_map_only(Tensor, lambda out: wrap(out, 0, v._selection), func(v._whole, *args[1:], **kwargs))


@rule("scaled_dot_product_attention")
def attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Attention within each row."""
    given = bound(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, kwargs)
    rows = tensors_in(given)
    three = [given[k] for k in ("query", "key", "value")]
    if any(not isinstance(v, MaskedRows) or v._row_dim or v._whole.dim() < 3 for v in three) or given.get("dropout_p"):
        refuse(rows[0], "attention looks among", "each of them has to look within itself, without dropout", "0")
    extra = given.get("attn_mask")
    if (
        extra is not None
        and not isinstance(extra, MaskedRows)
        and extra.dim() == three[0]._whole.dim()
        and len(extra) > 1
    ):
        refuse(rows[0], "attention's mask has a row for each of", "also for those that were left out")
    selection = common_selection(rows)
    return wrap(func(**{k: v._whole if isinstance(v, MaskedRows) else v for k, v in given.items()}), 0, selection)


@rule("multi_head_attention_forward")
def heads(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``nn.MultiheadAttention`` within each row; torch has the batch in dim 1."""
    given = dict(inspect.signature(func).bind(*args, **kwargs).arguments)
    three = [given[k] for k in ("query", "key", "value")]
    if any(not isinstance(v, MaskedRows) or v._row_dim != 1 or v._whole.dim() != 3 for v in three) or (
        given.get("dropout_p") and given.get("training", True)
    ):
        refuse(three[0] if isinstance(three[0], MaskedRows) else tensors_in(given)[0], "attention looks among",
               "each of them has to look within itself, without dropout", "0")  # fmt: skip
    selection = common_selection(tensors_in(given))
    extra, padding = given.get("attn_mask"), given.get("key_padding_mask")
    if extra is not None and extra.dim() != 2:
        refuse(three[0], "attention's mask has a row for each of", "also for those that were left out")
    if padding is not None and not isinstance(padding, MaskedRows):
        refuse(three[0], "key_padding_mask is that of others beside", "it has a row for each, also for those that the "
               "mask leaves out",
               instead=f"the same rows of it: key_padding_mask[{selection.origin.mask}]")  # fmt: skip
    if padding is not None:
        given["key_padding_mask"] = filled(padding, 0)  # a row without any key would give NaN
    out, weights = func(**{k: v._whole if isinstance(v, MaskedRows) else v for k, v in given.items()})
    return wrap(out, 1, selection), weights if weights is None else wrap(weights, 0, selection)


def recurrent(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``, where each row is a sequence with its own state."""
    v, state, *_ = args
    states = state if isinstance(state, list | tuple) else (state,)
    batch_first = args[-1]
    drops = len(args) > 5 and args[5] and args[6]  # dropout, train
    known = isinstance(v, MaskedRows) and v._whole.dim() == 3 and v._row_dim == (0 if batch_first is True else 1)
    if (
        not known
        or len(args) != 9
        or any(not isinstance(s, MaskedRows) or s._row_dim != 1 for s in states)
        or drops
        or kwargs
    ):
        refuse(tensors_in(args)[0], f"{op_name(func)} goes over", "only whole sequences in each row are known, with a "
               "state for each of them or none, and without dropout")  # fmt: skip
    selection = common_selection(tensors_in(args))
    plain = [s._whole for s in states]
    out, *left = func(v._whole, tuple(plain) if isinstance(state, list | tuple) else plain[0], *args[2:])
    return wrap(out, v._row_dim, selection), *(wrap(s, 1, selection) for s in left)


def cell(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``nn.LSTMCell``, ``nn.GRUCell`` and ``nn.RNNCell``, where each row has its own state."""
    rows = tensors_in((args, kwargs))
    states = args[1] if isinstance(args[1], list | tuple) else (args[1],)
    if any(not isinstance(s, MaskedRows) or s._row_dim or s._whole.dim() != 2 for s in (args[0], *states)) or kwargs:
        refuse(rows[0], f"{op_name(func)} takes, beside others,", "the state has a row for each of them, too",
               instead="a state for the same rows: h[mask]")  # fmt: skip
    selection = common_selection(rows)
    plain = [tuple(s._whole for s in a) if isinstance(a, list | tuple) else a._whole for a in args[:2]]
    out = func(*plain, *args[2:])
    return pytree.tree_map_only(Tensor, lambda o: wrap(o, 0, selection), out)


RULES.add((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), recurrent)
RULES.add((torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell), cell)


@rule("batch_norm")
def batch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Batch norm with running statistics (eval mode), which treats each row by itself."""
    v, at = only_first(op_name(func), args, kwargs)
    given = bound(
        ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"), args, kwargs
    )
    if given.get("training") or at == 1:
        refuse(v, "batch norm takes the mean and the variance of", "its statistics would count all rows",
               instead="the norm over the whole tensor, before it is selected, or LayerNorm")  # fmt: skip
    return wrap(func(v._whole, *args[1:], **kwargs), at, v._selection)


@rule("embedding")
def embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Look up rows of a table by selected indices."""
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    given = bound(names, args, kwargs)
    v = given["input"]
    if (
        not isinstance(v, MaskedRows)
        or len(tensors_in(given)) > 1
        or given.get("max_norm")
        or given.get("scale_grad_by_freq")
    ):
        refuse(tensors_in(given)[0], "embedding is called with", "only plain ones are known: no max_norm, no counts")
    given["input"] = filled(v, 0)
    return wrap(func(**given), v._row_dim, v._selection)


@rule("one_hot")
def one_hot(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One-hot rows; refused without a number of classes."""
    given = bound(("tensor", "num_classes"), args, {("tensor" if k == "input" else k): a for k, a in kwargs.items()})
    v = given["tensor"]
    if given.get("num_classes", -1) < 0:
        refuse(v, "one_hot looks at the largest of", "that depends on values", instead="F.one_hot(y, num_classes)")
    return wrap(func(filled(v, 0), given["num_classes"]), v._row_dim, v._selection)


@rule("cdist")
def cdist(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The distances of each row from the rows of a whole tensor."""
    v, at = only_first(op_name(func), args, kwargs)
    other = args[1] if len(args) > 1 else kwargs["x2"]
    if at != 0 or v._whole.dim() != 2 or other.dim() != 2:
        refuse_pairs(v, "cdist pairs")
    return wrap(func(v._whole, *args[1:], **kwargs), 0, v._selection)


@rule("pad")
def pad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pad dims other than the dim of the rows."""
    v, at = only_first(op_name(func), args, kwargs)
    sizes = list(kwargs.get("pad", args[1] if len(args) > 1 else ()))
    here = 2 * (v._whole.dim() - 1 - at)
    if any(sizes[here : here + 2]):
        refuse(v, "pad puts others beside", "their number depends on values")
    return wrap(func(v._whole, *args[1:], **kwargs), at, v._selection)
