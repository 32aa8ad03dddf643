"""Losses over selected rows: computed over whole tensors, and reduced over the selected rows."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F

from actorflow_compiler.masked.pointwise import pointwise
from actorflow_compiler.masked.reduce import mean, total
from actorflow_compiler.masked.rules import RULES, bound, op_name, rule
from actorflow_compiler.masked.tensor import MaskedRows, common_selection, filled, refuse, tensors_in, wrap

__all__: list[str] = []

OF_ELEMENTS = {  # element-wise loss → a number at which it is finite; None: it always is
    "mse_loss": None, "l1_loss": None, "smooth_l1_loss": None, "huber_loss": None, "soft_margin_loss": None,
    "binary_cross_entropy_with_logits": None, "binary_cross_entropy": 0.5, "kl_div": 0.0, "poisson_nll_loss": 0.0,
    "hinge_embedding_loss": None, "margin_ranking_loss": None, "gaussian_nll_loss": 1.0,
}  # fmt: skip
OF_ROWS = (  # losses for each row of a matrix
    "cosine_embedding_loss", "triplet_margin_loss", "multi_margin_loss", "multilabel_soft_margin_loss",
    "multilabel_margin_loss",
)  # fmt: skip


def _given(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], list[MaskedRows], str]:
    """Arguments by name, the selections among them, and the reduction."""
    given = dict(inspect.signature(func).bind(*args, **kwargs).arguments)
    rows = tensors_in(given)
    if given.get("size_average") is not None or given.get("reduce") is not None:
        refuse(
            rows[0], "size_average and reduce, which are no more, reduce", "use reduction=", instead="reduction='mean'"
        )
    return given, rows, given.pop("reduction", "mean")


def _reduced(losses: MaskedRows, reduction: str) -> Any:
    return {"mean": mean, "sum": total}[reduction](losses) if reduction != "none" else losses


def _of_elements(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = op_name(func)
    given, _, reduction = _given(func, args, kwargs)
    safe = OF_ELEMENTS[name]
    if safe is not None:
        given = {
            k: wrap(filled(v, safe), v._row_dim, v._selection) if isinstance(v, MaskedRows) else v
            for k, v in given.items()
        }
    losses = pointwise(func, (), {**given, "reduction": "none"})
    if reduction == "batchmean":
        n = losses._selection.count if losses._row_dim == 0 else losses._whole.shape[0]
        return total(losses) / n
    return _reduced(losses, reduction)


def _of_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given, rows, reduction = _given(func, args, kwargs)
    selection = common_selection(rows)
    tensors = [v for k, v in given.items() if isinstance(v, torch.Tensor) and k != "weight"]
    if len(tensors) != len(rows) or any(v._row_dim for v in rows) or rows[0]._whole.dim() != 2:
        refuse(rows[0], f"{op_name(func)} pairs", "all of its tensors have to be selected by the same mask, in dim 0")
    if op_name(func) in ("multi_margin_loss", "multilabel_margin_loss"):
        given["target"] = filled(given["target"], 0)
    plain = {k: v._whole if isinstance(v, MaskedRows) else v for k, v in given.items()}
    return _reduced(wrap(func(**plain, reduction="none"), 0, selection), reduction)


for _names, _rule in ((OF_ELEMENTS, _of_elements), (OF_ROWS, _of_rows)):
    RULES.add((getattr(F, _name) for _name in _names), _rule)


@rule("cross_entropy", "nll_loss")
def cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows that are not selected get the ignored class, so that a mean is divided by the right count."""
    given, rows, reduction = _given(func, args, kwargs)
    x, target, selection = given["input"], given["target"], common_selection(rows)
    pair = isinstance(x, MaskedRows) and isinstance(target, MaskedRows)
    if not pair or x._row_dim or target._row_dim or x._whole.dim() < 2 or len(rows) > 2:
        refuse(
            rows[0], f"{op_name(func)} pairs", "scores and targets have to be selected by the same mask",
            instead=f"both of the same rows: F.{op_name(func)}(x[{selection.origin.mask}], y[{selection.origin.mask}])",
        )  # fmt: skip
    if target._whole.is_floating_point():
        losses = func(**{**given, "input": x._whole, "target": target._whole}, reduction="none")
        return _reduced(wrap(losses, 0, selection), reduction)
    ignored = given.get("ignore_index", -100)
    found = func(**{**given, "input": x._whole, "target": filled(target.long(), ignored)}, reduction=reduction)
    return wrap(found, 0, selection) if reduction == "none" else found


@rule("cosine_similarity", "pairwise_distance")
def row_distances(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Distances between the rows of two tensors that pair by row, over their columns."""
    distance = op_name(func) == "pairwise_distance"
    names = ("x1", "x2", "p", "eps", "keepdim") if distance else ("x1", "x2", "dim", "eps")
    given = bound(names, args, kwargs)
    one, other = given["x1"], given["x2"]
    rows = tensors_in(given)
    selection = common_selection(rows)
    dims = max(x._whole.dim() if isinstance(x, MaskedRows) else x.dim() for x in (one, other))
    dim = -1 if distance else given.get("dim", 1)
    backs = {r._row_dim - r._whole.dim() for r in rows}
    plain = [x for x in (one, other) if not isinstance(x, MaskedRows)]
    (back, *others) = backs
    if others or dim % dims == dims + back or any(p.dim() >= -back and p.shape[back] != 1 for p in plain):
        refuse(rows[0], f"{op_name(func)} pairs others with", "rows can be paired with rows of the same mask alone")
    out = func(**{k: v._whole if isinstance(v, MaskedRows) else v for k, v in given.items()})
    at = dims + back
    return wrap(out, at - (out.dim() < dims and dim % dims < at), selection)
