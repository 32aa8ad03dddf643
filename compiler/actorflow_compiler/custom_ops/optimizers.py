"""Fused optimizers as ops: a functional op for each parameter in the graph, one in-place call for many in a plan.

The functional ops exist so that a step can be traced; plans run torch's fused kernels in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.core.expressions import NumberSource, SourceKind
from actorflow_compiler.core.torch_internals import schema_of

aten = torch.ops.aten


@torch.library.custom_op("actorflow::adam", mutates_args=())
def adam(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, max_exp_avg_sq: Tensor | None, step: Tensor,
    lr: float, weight_decay: float, beta1: float, beta2: float, eps: float, maximize: bool, decoupled: bool,
    found_inf: Tensor | None, group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """One step of Adam (``decoupled``: AdamW) → new param, exp_avg, exp_avg_sq, max_exp_avg_sq (empty without it).

    If ``found_inf``, a scalar, is 1, nothing changes; this holds for the other optimizers, too.
    """
    out = [t.clone() for t in (param, exp_avg, exp_avg_sq)] + [
        param.new_empty(0) if max_exp_avg_sq is None else max_exp_avg_sq.clone()
    ]
    adam_(
        [out[0]], [grad], [out[1]], [out[2]], [] if max_exp_avg_sq is None else [out[3]], [step],
        lr, weight_decay, beta1, beta2, eps, maximize, decoupled, found_inf,
    )  # fmt: skip
    return out[0], out[1], out[2], out[3]


@adam.register_fake
def _(param: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, max_exp_avg_sq: Any, *rest: Any) -> Any:
    maximum = param.new_empty(0) if max_exp_avg_sq is None else torch.empty_like(max_exp_avg_sq)
    return torch.empty_like(param), torch.empty_like(exp_avg), torch.empty_like(exp_avg_sq), maximum


@torch.library.custom_op("actorflow::sgd", mutates_args=())
def sgd(
    param: Tensor, grad: Tensor, momentum_buffer: Tensor | None, lr: float, weight_decay: float, momentum: float,
    dampening: float, nesterov: bool, maximize: bool, first: bool, found_inf: Tensor | None, group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One step of SGD → new param, momentum_buffer (empty without momentum)."""
    out = param.clone()
    buffer = param.new_empty(0) if momentum_buffer is None else momentum_buffer.clone()
    buffers = [] if momentum_buffer is None else [buffer]
    sgd_([out], [grad], buffers, lr, weight_decay, momentum, dampening, nesterov, maximize, first, found_inf)
    return out, buffer


@sgd.register_fake
def _(param: Any, grad: Any, momentum_buffer: Any, *rest: Any) -> Any:
    return torch.empty_like(param), param.new_empty(0) if momentum_buffer is None else torch.empty_like(momentum_buffer)


@torch.library.custom_op("actorflow::adagrad", mutates_args=())
def adagrad(
    param: Tensor, grad: Tensor, state_sum: Tensor, step: Tensor, lr: float, weight_decay: float,
    lr_decay: float, eps: float, maximize: bool, found_inf: Tensor | None, group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One step of Adagrad → new param, state_sum."""
    out, total = param.clone(), state_sum.clone()
    adagrad_([out], [grad], [total], [step], lr, weight_decay, lr_decay, eps, maximize, found_inf)
    return out, total


@adagrad.register_fake
def _(param: Any, grad: Any, state_sum: Any, *rest: Any) -> Any:
    return torch.empty_like(param), torch.empty_like(state_sum)


def _run(
    fused: Callable[..., None], lists: Sequence[Sequence[Tensor]], *rest: Sequence[Tensor], **settings: Any
) -> None:
    """Run a fused kernel in place over ``lists``: parameters, gradients, and lists of optimizer state.

    A kernel walks through the memory of a parameter, its gradient and its state in one order, so all get the strides of
    the parameter.  Kernels do not support complex numbers, which become pairs of real ones here.  torch's CPU kernel
    for SGD computes wrong results in 16 bits, so tensors of 16 bits go through float32 on the CPU.
    """
    real = [[torch.view_as_real(t) if t.is_complex() else t for t in of] for of in lists]
    ours = [[_laid_as(t, p) for t, p in zip(of, real[0], strict=True)] if of else [] for of in real]
    fused(*ours, *rest, **settings)
    for number, of in enumerate(real):
        for t, own in zip(of, ours[number], strict=True):
            if own is not t and number != 1:  # a gradient does not change
                t.copy_(own)


def _laid_as(tensor: Tensor, param: Tensor) -> Tensor:
    """The tensor if it has the strides of its parameter and a supported dtype, else a copy that does."""
    wide = torch.float32 if tensor.itemsize == 2 and tensor.device.type == "cpu" else tensor.dtype
    if tensor.dtype == wide and tensor.stride() == param.stride():
        return tensor
    return torch.empty_like(param, dtype=wide).copy_(tensor)


def adam_(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor], steps: Sequence[Tensor], lr: float, weight_decay: float,
    beta1: float, beta2: float, eps: float, maximize: bool, decoupled: bool, found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    """Adam in place over many tensors; ``steps`` already count this step."""
    _run(
        aten._fused_adamw_ if decoupled else aten._fused_adam_,
        (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs), steps, lr=lr, beta1=beta1, beta2=beta2,
        weight_decay=weight_decay, eps=eps, amsgrad=len(max_exp_avg_sqs) > 0, maximize=maximize, found_inf=found_inf,
    )  # fmt: skip


def sgd_(
    params: Sequence[Tensor], grads: Sequence[Tensor], buffers: Sequence[Tensor], lr: float, weight_decay: float,
    momentum: float, dampening: float, nesterov: bool, maximize: bool, first: bool, found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    """SGD in place over many tensors."""
    _run(
        aten._fused_sgd_, (params, grads, buffers), weight_decay=weight_decay, momentum=momentum, lr=lr,
        dampening=dampening, nesterov=nesterov, maximize=maximize, is_first_step=first, found_inf=found_inf,
    )  # fmt: skip


def adagrad_(
    params: Sequence[Tensor], grads: Sequence[Tensor], sums: Sequence[Tensor], steps: Sequence[Tensor],
    lr: float, weight_decay: float, lr_decay: float, eps: float, maximize: bool, found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    """Adagrad in place over many tensors; ``steps`` already count this step."""
    _run(
        aten._fused_adagrad_,
        (params, grads, sums),
        steps,
        lr=lr,
        lr_decay=lr_decay,
        weight_decay=weight_decay,
        eps=eps,
        maximize=maximize,
        found_inf=found_inf,
    )


# functional op → (in-place op, tensor operands that it takes as lists, operands that it updates, in output order)
IN_PLACE: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "actorflow.adam": (
        "actorflow.adam_",
        ("param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"),
        ("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    ),
    "actorflow.sgd": ("actorflow.sgd_", ("param", "grad", "momentum_buffer"), ("param", "momentum_buffer")),
    "actorflow.adagrad": ("actorflow.adagrad_", ("param", "grad", "state_sum", "step"), ("param", "state_sum")),
}
SCALARS: dict[str, tuple[str, ...]] = {  # functional op → arguments that are read at each call; they are adjacent
    "actorflow.adam": ("lr", "weight_decay", "beta1", "beta2"),
    "actorflow.sgd": ("lr", "weight_decay", "momentum"),
    "actorflow.adagrad": ("lr", "weight_decay"),
}
READ = frozenset(("lr", "weight_decay", "momentum", "betas"))  # settings of groups that give ``SCALARS``
OPS: dict[str, Callable[..., Any]] = {"adam_": adam_, "sgd_": sgd_, "adagrad_": adagrad_}


def source_of(group: str, key: str) -> NumberSource:
    """The source of an argument ``key`` that is read at each call, for a group named like ``optimizer.0``."""
    title, _, at = group.rpartition(".")
    index = {"beta1": 0, "beta2": 1}.get(key, -1)
    return NumberSource(SourceKind.SETTING, title, at, key if index < 0 else "betas", index)


def arguments(op: str) -> tuple[str, ...]:
    """The argument names of a functional optimizer op, in order."""
    schema = schema_of(getattr(torch.ops.actorflow, op.removeprefix("actorflow.")).default)
    return tuple(a.name for a in schema.arguments)


def expand_fused(target: Any, args: Sequence[Any], kwargs: dict[str, Any], groups: Sequence[str]) -> bool:
    """Run torch's in-place fused list op ``target`` as one functional op for each parameter.

    ``groups[i]`` names the optimizer and parameter group of parameter i.  Returns False, without
    running anything, if ``target`` is no fused optimizer.
    """
    name = schema_of(target).name.removeprefix("aten::")
    if name not in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"):
        return False
    given = dict(zip((a.name for a in schema_of(target).arguments), args, strict=False)) | kwargs
    value = {a.name: given.get(a.name, a.default_value) for a in schema_of(target).arguments}
    params, grads, found = value["self"], value["grads"], value.get("found_inf")
    if value.get("grad_scale") is not None:
        grads = [g / value["grad_scale"] for g in grads]

    def item(key: str, i: int) -> Any:
        return value[key][i] if value.get(key) else None

    for i, (p, g, group) in enumerate(zip(params, grads, groups, strict=True)):
        if name in ("_fused_adam_", "_fused_adamw_"):
            state = [item("exp_avgs", i), item("exp_avg_sqs", i), item("max_exp_avg_sqs", i)]
            new = torch.ops.actorflow.adam(
                p, g, *state, value["state_steps"][i], float(value["lr"]), value["weight_decay"], value["beta1"],
                value["beta2"], value["eps"], value["maximize"], name == "_fused_adamw_", found, group,
            )  # fmt: skip
        elif name == "_fused_sgd_":
            state = [item("momentum_buffer_list", i)]
            new = torch.ops.actorflow.sgd(
                p, g, *state, float(value["lr"]), value["weight_decay"], value["momentum"], value["dampening"],
                value["nesterov"], value["maximize"], value["is_first_step"], found, group,
            )  # fmt: skip
        else:
            state = [item("state_sums", i)]
            new = torch.ops.actorflow.adagrad(
                p, g, *state, value["state_steps"][i], float(value["lr"]), value["weight_decay"], value["lr_decay"],
                value["eps"], value["maximize"], found, group,
            )  # fmt: skip
        for old, fresh in zip((p, *state), new, strict=True):
            if old is not None:
                old.copy_(fresh)
    return True
