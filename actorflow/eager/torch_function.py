"""Call one of torch's functions on global tensors: on the parts at once where that is possible, else op by op.

This is ``GlobalTensor.__torch_function__``.  ``linear`` is four ops and ``scaled_dot_product_attention`` eighteen,
with as many in the backward pass, and each costs a dispatch by torch and a new global tensor.  A function
whose ops need nothing from other ranks can be called on the parts instead, once, and autograd goes back through it on
the parts.  ``partwise.py`` finds out which functions these are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from actorflow.eager.convert import moved
from actorflow.eager.global_tensor import GlobalSpec, GlobalTensor, spec_of, wrap
from actorflow.eager.lineage import backward_pass
from actorflow.eager.linked_views import LinkedView, refresh
from actorflow.eager.partwise import CALLS, UNKNOWN, PartwiseCall, examine_call, fill, leaves
from actorflow.eager.plain_tensors import plain_as_whole
from actorflow.standins.owned_tensor import real_value
from actorflow_compiler.core.monkey_patches import original
from actorflow_compiler.core.torch_internals import (
    end_of_graph,
    gradients,
    in_backward,
    in_transform,
    keeps_graph,
    only_dispatch,
    packs_saved,
    plain_apply,
)


def call(cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    """``GlobalTensor.__torch_function__``: on the parts at once if that is known to be possible, else op by op."""
    with only_dispatch():
        func = original(func)
        prepare = _PREPARED.get(func)
        if prepare is not None:
            return prepare(func, args, kwargs or {})
        first = args[0] if args else None
        if type(first) is not GlobalTensor or func in first._spec.comm.stepwise or not _free(first._spec):
            return func(*args, **kwargs) if kwargs else func(*args)
        grad = torch.is_grad_enabled()
        recorded = False
        key: list[Any] = [func]
        operands: list[GlobalTensor] = []
        for value in (*args, *kwargs, *kwargs.values()) if kwargs else args:
            kind = type(value)
            if kind is GlobalTensor:
                operands.append(value)
                needs = grad and value.requires_grad
                recorded = recorded or needs
                key += (value._spec, needs)
            elif kind in _PLAIN:
                key.append((kind, value))
            elif isinstance(value, list | tuple) and all(type(v) in _PLAIN for v in value):
                key.append((kind, *map(type, value), *value))
            else:
                return func(*args, **kwargs) if kwargs else func(*args)
        if len(operands) > 1 and len(ids := [*map(id, operands)]) > len({*ids}):  # one tensor in several places
            key += map(ids.index, ids)
        names = tuple(key)
        found = CALLS.get(names)
        if found is UNKNOWN:
            return examine_call(names, func, args, kwargs or {}, operands, recorded)
        made = NotImplemented if found is None else _run(found, operands, recorded)
        if made is NotImplemented:
            return func(*args, **kwargs) if kwargs else func(*args)
        return made


# types of arguments that enter the key of a call by their values
_PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


def _by_value(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function with the values of all tensors but its first; collective unless every rank has them."""

    def plain(value: Any) -> Any:
        return torch.tensor(value.tolist()) if isinstance(value, GlobalTensor) else value

    named = {k: v if k in ("input", "self") else plain(v) for k, v in kwargs.items()}
    return func(*args[:1], *map(plain, args[1:]), **named)


def _with_its_own(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function that makes plain tensors itself; they are whole if all of its tensor arguments are global."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    with plain_as_whole() if all(isinstance(t, GlobalTensor) for t in given) else contextlib.nullcontext():
        return func(*args, **kwargs)


def _without_chunks(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function without the chunk ``options`` where its backward pass would write into plain tensors."""
    return func(*args, **(kwargs | {"options": None} if kwargs.get("reduction") == "none" else kwargs))


def _copied_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``plain.copy_(x)`` of a global tensor of its shape: the whole value, as ``load_state_dict`` asks; collective."""
    plain, x = args[0], args[1] if len(args) > 1 else kwargs.get("src")
    if isinstance(plain, GlobalTensor) or not isinstance(x, GlobalTensor) or plain.shape != x.shape:
        return func(*args, **kwargs)
    if torch.is_grad_enabled() and (x.requires_grad or plain.requires_grad):
        return func(*args, **kwargs)  # the gradients would be a plain tensor's and a global one's
    return plain.copy_(real_value(x))


def _gradients(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.autograd.grad``."""
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, GlobalTensor)]
    if not tensors:
        return func(*args, **kwargs)
    with backward_pass(tensors[0]._spec.comm, *[t._lineage for t in tensors]):
        return func(*args, **kwargs)


# function of torch → how it is called
_PREPARED: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    # read the values of an argument, the places to cut at, before they call an op
    torch.tensor_split: _by_value,
    Tensor.tensor_split: _by_value,
    torch.nn.functional.embedding_bag: _with_its_own,  # offsets
    Tensor.copy_: _copied_out,
    torch.autograd.grad: _gradients,
}
if hasattr(torch.nn.functional, "linear_cross_entropy"):  # torch 2.13
    _PREPARED[torch.nn.functional.linear_cross_entropy] = _without_chunks


def _free(spec: GlobalSpec) -> bool:
    """Whether nothing is active that has to see each op: checks, autocast, saved-tensor hooks, functorch transforms."""
    return not (spec.comm.checks or torch.is_autocast_enabled(spec.device.type) or packs_saved() or in_transform())


def _run(partwise: PartwiseCall, operands: list[GlobalTensor], recorded: bool) -> Any:
    """Make the call on the parts; NotImplemented where a result is a view of an operand."""
    parts = leaves(operands) if recorded else [t._local for t in operands]
    made = fill(partwise, parts)
    outs = (made,) if partwise.form is None else tuple(made)
    for t in outs:
        if t._is_view() and any(t._base is p or t._base is p._base for p in parts):
            return NotImplemented
    if recorded:
        wrapped = _call(_RecordedCall(partwise, parts, outs), *operands)
    else:
        wrapped = tuple([wrap(t, spec) for t, spec in zip(outs, partwise.outs, strict=True)])
    known = partwise.lineages.of([t._lineage for t in operands])
    passes = in_backward()
    for t, lineage in zip(wrapped, known, strict=True):
        t._lineage = t._spec.comm.pass_lineage if passes else lineage
    return wrapped[0] if partwise.form is None else partwise.form(wrapped)


@dataclass(slots=True)
class _RecordedCall:
    """A call that was made on the parts, kept for its backward pass."""

    partwise: PartwiseCall
    parts: list[Tensor]  # those that need a gradient are leaves
    outs: tuple[Tensor, ...]


class _PartwiseFunction(torch.autograd.Function):
    """A call on the parts, as one node of the autograd graph of global tensors."""

    @staticmethod
    def forward(ctx: Any, recorded: _RecordedCall, *operands: GlobalTensor) -> tuple[GlobalTensor, ...]:
        partwise, outs = recorded.partwise, recorded.outs
        recorded.outs = ()  # do not keep the results alive: the graph needs only its end nodes
        made = tuple([wrap(t.detach(), spec) for t, spec in zip(outs, partwise.outs, strict=True)])
        ctx.set_materialize_grads(False)
        ctx.recorded, ctx.ends = recorded, [end_of_graph(t) for t in outs]
        # parts do not count changes in place of their global tensors: saving these detects them
        ctx.save_for_backward(*[operands[i] for i in partwise.kept_ins], *[made[i] for i in partwise.kept_outs])
        ctx.others = [
            (i, t, None if t.is_inference() else t._version)
            for i, t in enumerate(operands)
            if i not in partwise.kept_ins
        ]
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        partwise: PartwiseCall = ctx.recorded.partwise
        needs = ctx.needs_input_grad[1:]
        kept = ctx.saved_tensors  # raises if one was changed in place, or the graph was freed
        if ctx.ends is None:
            raise RuntimeError("Trying to backward through the graph a second time: give retain_graph=True the first")
        if torch.is_grad_enabled():
            return None, *_differentiable(partwise, _operands(ctx, kept), needs, grads)
        ends, given = [], []
        for end, g, layout in zip(ctx.ends, grads, partwise.back, strict=True):
            if g is not None:
                if isinstance(g, LinkedView):
                    refresh(g)
                ends.append(end)
                given.append(g._local if g._spec.layout is layout else moved(g, layout, "the backward pass")._local)
        made: list[Any] = [None] * (1 + len(needs))
        parts = ctx.recorded.parts
        which = [i for i, need in enumerate(needs) if need]
        keep = keeps_graph()
        if ends:
            seen = list(given)
            for i, g in zip(which, gradients(ends, given, [parts[i] for i in which], keep), strict=True):
                if g is not None:
                    # gradients of two tensors must not share memory: each may be added to in place
                    made[1 + i] = _wrapped(g.clone() if any(g is s for s in seen) else g, partwise.grads[i])
                    seen.append(g)
        if not keep:
            ctx.ends, ctx.recorded.parts, ctx.others = None, [], []
        return tuple(made)


_call: Callable[..., Any] = plain_apply(_PartwiseFunction)


def _wrapped(part: Tensor, spec: GlobalSpec) -> GlobalTensor:
    """Wrap a gradient, whose strides may differ from those of its tensor."""
    if not part.is_contiguous():
        steps = part.stride()
        order = sorted(range(part.dim()), key=lambda d: (-steps[d], d))
        if not part.permute(order).is_contiguous():
            part = part.contiguous()  # an expanded one
        else:
            strides, step = [0] * part.dim(), 1
            for d in reversed(order):
                strides[d] = step
                step *= max(spec.shape[d], 1)
            spec = spec_of(spec.comm, spec.layout, spec.shape, tuple(strides), spec.dtype, spec.device)
    return wrap(part, spec, spec.comm.pass_lineage)


def _operands(ctx: Any, kept: Sequence[Any]) -> list[Any]:
    """The operands that the function was called with; raises RuntimeError where one was changed in place since."""
    found = dict(zip(ctx.recorded.partwise.kept_ins, kept, strict=False))
    for i, t, version in ctx.others:
        if version is not None and t._version != version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"operand {i} of {ctx.recorded.partwise.func}, of shape {tuple(t.shape)}"
            )
        found[i] = t
    return [found[i] for i in sorted(found)]


def _differentiable(
    partwise: PartwiseCall, operands: Sequence[Any], needs: Sequence[bool], grads: Sequence[Any]
) -> list[Any]:
    """Compute the gradients op by op on global tensors, so that they can be differentiated themselves."""
    with torch.enable_grad(), only_dispatch():
        given = [t.view_as(t) for t in operands]  # a tensor that is passed twice gets two gradients
        made = fill(partwise, given)
        pairs = [(t, g) for t, g in zip([made] if partwise.form is None else made, grads, strict=True) if g is not None]
        found: list[Any] = [None] * len(given)
        which = [i for i, need in enumerate(needs) if need]
        if pairs:
            outs, received = zip(*pairs, strict=True)
            of = torch.autograd.grad(outs, [given[i] for i in which], received, create_graph=True, allow_unused=True)
            for i, g in zip(which, of, strict=True):
                found[i] = g
    return found


GlobalTensor.__torch_function__ = classmethod(call)
