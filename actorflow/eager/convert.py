"""Convert between plain and global tensors, and between layouts: ``to_global`` and ``to_local``, with gradients."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actorflow.eager.communicator import CollectiveLabel, EagerCommunicator
from actorflow.eager.current import current, world
from actorflow.eager.global_tensor import GlobalSpec, GlobalTensor, spec_of, wrap
from actorflow.eager.job_results import ResultTensor
from actorflow.eager.layout import NOWHERE, Layout, has_terms, layout_of, local_shape
from actorflow.eager.linked_views import LinkedView, refresh
from actorflow.eager.redistribution import part_in, redistribute
from actorflow.standins.beside import kept_layout
from actorflow.standins.lazy_tensor import LazyTensor
from actorflow.standins.owned_tensor import real_value, stands_for_whole
from actorflow_compiler.core.errors import CallError, LayoutError, NotGlobal
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, P, Split
from actorflow_compiler.hints.constrain import constrain
from actorflow_compiler.hints.tags import tracing
from actorflow_compiler.plan.region import coordinates

_MEETING = CollectiveLabel.of("to_global of a plain tensor: shapes are compared")


def to_global(
    x: Tensor,
    placement: Placement | None = None,
    sbp: Any = None,
    grad_sbp: Any = None,
    check_meta: bool | None = None,
) -> Tensor:
    """A plain tensor as this rank's part of a global one; or a global tensor with another placement or sbp.

    A plain tensor is the part of this rank: along an axis that is ``split`` the parts are joined in the order of
    the ranks, along one that is ``partial_sum`` they are terms of a sum, and along one that is ``broadcast`` the part
    of the first rank is copied to all, so that no rank has another value.  Shapes and dtypes of all ranks are compared,
    unless ``check_meta`` is False: then they are taken to be equal.  Ranks outside of the placement call it, too; their
    tensors are not used.

    A job's result is whole on every rank, as is a parameter or buffer that a job works with, and what ``state_dict()``
    has of it; it becomes a global tensor of the same value, on all ranks without a ``placement``, whole without an
    ``sbp``.  What was global before the job took it over lies again as it did.
    For a global tensor, a ``placement`` or ``sbp`` that is left out stays as it is.  ``grad_sbp`` is the layout of the
    gradient in the backward pass; without it, that of ``x``, but whole where ``x`` is a sum of terms.

    Raises LayoutError for an unknown rank, for an sbp that does not fit the mesh or the tensor, and, with the shapes
    of all ranks, for parts that do not form one tensor.

    >>> x.to_global(placement=flow.placement("cpu", [0, 1]), sbp=flow.sbp.split(0))
    """
    if isinstance(x, GlobalTensor):
        if placement is None and sbp is None:
            if grad_sbp is None:
                return x
            placement, sbp = x._spec.layout.placement, x._spec.layout.sbp
        old = x._spec.layout
        place = old.placement if placement is None else placement
        if sbp is None:
            if isinstance(place, Placement) and len(place.hierarchy) != len(old.placement.hierarchy):
                raise LayoutError(
                    f"a tensor that lies as {old} was to go to {place}, whose mesh has another number of axes; an sbp "
                    f"for each of them was expected: x.to_global(placement=…, sbp=[…])"
                )
            sbp = old.sbp
        target = layout_of(place, sbp, x.shape, "a global tensor")
        x._spec.comm.check_placement(target.placement)
        local_shape(target, tuple(x.shape), target.placement.ranks[0])
        wanted = layout_of(place, grad_sbp, x.shape, "the gradient") if grad_sbp is not None else None
        if target is old and wanted is None:
            return x
        moved: Tensor = _Redistribution.apply(x, target, wanted)  # type: ignore[no-untyped-call]
        return moved
    if tracing():  # in a job all tensors are whole, and values lie where its plan says
        return x if sbp is None or placement is not None else constrain(x, tuple(sbp) if isinstance(sbp, list) else sbp)
    if is_of_a_plan(x):
        return _of_a_plan(x, placement, sbp)
    if placement is None or sbp is None:
        raise LayoutError(
            f"to_global of a plain tensor of shape {tuple(x.shape)} was given "
            f"{'no placement' if placement is None else 'no sbp'}; both were expected: "
            f"x.to_global(placement=flow.placement({x.device.type!r}, [0, 1]), sbp=flow.sbp.split(0))"
        )
    comm = current()
    layout = layout_of(placement, sbp, x.shape, "this tensor")
    comm.check_placement(layout.placement)
    wanted = layout_of(placement, grad_sbp, x.shape, "the gradient") if grad_sbp is not None else None
    shape, dtype = _meet(x, layout, comm) if check_meta is not False else (_multiplied(x, layout), x.dtype)
    spec = spec_of(comm, layout, shape, None, dtype, comm.device(layout.placement))
    made: Tensor = _FromParts.apply(x, spec, True, wanted)  # type: ignore[no-untyped-call]
    return made


def is_of_a_plan(x: Tensor) -> bool:
    """Whether a plain tensor is known to be whole on every rank: a job's result, or what a plan owns."""
    return isinstance(x, LazyTensor) or stands_for_whole(x)


def _of_a_plan(x: Tensor, placement: Placement | None, sbp: Any) -> Tensor:
    """A job's result, or what a plan owns, as a global tensor; every rank has the whole of it."""
    whole = real_value(x)
    place, lies = placement, sbp
    if place is None:
        everywhere = (Placement(x.device.type, tuple(range(world())), (world(),)), None)
        place, own = kept_layout(x) or everywhere
        lies = own if lies is None else lies
    if lies is None and isinstance(place, Placement):
        lies = (B,) * len(place.hierarchy)
    layout = layout_of(place, lies, whole.shape, "a tensor of a job")
    return from_whole(whole, layout, from_first=not isinstance(x, LazyTensor))  # a script may change its copy


def to_local(x: Tensor) -> Tensor:
    """This rank's part of a global tensor; it shares the memory.  Raises NotGlobal for a plain tensor.

    The part of a job's plain result is all of it, as such results are whole on every rank; what a job gives as a global
    tensor is waited for when the part is read.  The part of a parameter that a job has taken over is a copy.

    The gradient of the part becomes this rank's part of the gradient of the whole.  Along axes that are ``broadcast``
    or ``partial_sum`` it is taken as the whole gradient, equal on all ranks.
    """
    if isinstance(x, LazyTensor):
        return x
    if not isinstance(x, GlobalTensor) and kept_layout(x) is not None and not tracing():
        x = to_global(x)
    if not isinstance(x, GlobalTensor):
        raise NotGlobal("to_local() was called on a plain tensor; a global tensor was expected: see x.is_global")
    if isinstance(x, ResultTensor) and not x.requires_grad and (pending := x.pending()) is not None:
        return pending
    part: Tensor = _ToPart.apply(x)  # type: ignore[no-untyped-call]
    return part


def from_whole(
    whole: Tensor, layout: Layout, comm: EagerCommunicator | None = None, from_first: bool = False
) -> GlobalTensor:
    """A global tensor of which every rank has the whole; no gradient flows.

    With ``from_first`` the value of the placement's first rank is used on all ranks.
    """
    here = comm or current()
    here.check_placement(layout.placement)
    shape = tuple(whole.shape)
    place = layout.placement
    begin = (
        Layout(Placement(place.type, place.ranks[:1], (1,)), (B,))
        if from_first
        else Layout(place, (B,) * len(layout.sbp))
    )
    part = whole.detach().resolve_conj().resolve_neg().to(here.device(place))
    part = part if here.rank in begin.placement else part.new_empty(NOWHERE)
    part = redistribute(part, shape, begin, layout, here, "to_global")
    if begin is layout:
        part = part.clone()
    return wrap(part, spec_of(here, layout, shape, None, whole.dtype, here.device(place)))


# ---- differentiable steps


def moved(x: GlobalTensor, target: Layout, why: str = "to_global") -> GlobalTensor:
    """The same tensor in another layout; no gradient flows."""
    if isinstance(x, LinkedView):
        refresh(x)
    spec = x._spec
    part = part_in(x, target, why)
    device = spec.device if target.placement.type == spec.layout.placement.type else spec.comm.device(target.placement)
    made = spec_of(spec.comm, target, spec.shape, spec.strides, spec.dtype, device)
    # ranks outside of the placement that it comes from may have made theirs in another way
    return wrap(part, made, x._lineage if target.placement.ranks == spec.layout.placement.ranks else None)


def moved_gradient(g: GlobalTensor, target: Layout, why: str) -> GlobalTensor:
    """A gradient in another layout; it can still be differentiated itself."""
    if target is g._spec.layout:
        return g
    if torch.is_grad_enabled() and g.requires_grad:
        made: GlobalTensor = _Redistribution.apply(g, target, None)  # type: ignore[no-untyped-call]
        return made
    return moved(g, target, why)


def without_terms(layout: Layout) -> Layout:
    """The layout with partial sums replaced by broadcast, as gradients have it."""
    return Layout(layout.placement, tuple(B if e == P else e for e in layout.sbp)) if has_terms(layout) else layout


class _Redistribution(torch.autograd.Function):
    """Redistribute a global tensor to another layout."""

    @staticmethod
    def forward(ctx: Any, x: GlobalTensor, target: Layout, grad: Layout | None) -> GlobalTensor:
        ctx.back = without_terms(x._spec.layout)
        ctx.grad = grad
        if target is x._spec.layout:
            return wrap(x._local, x._spec, x._lineage)
        return moved(x, target)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (g,) = grads
        if ctx.grad is not None:
            g = moved_gradient(g, ctx.grad, "grad_sbp")
        return moved_gradient(g, ctx.back, "the backward pass of to_global"), None, None


class _FromParts(torch.autograd.Function):
    """Make a global tensor from this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: GlobalSpec, from_first: bool, grad: Layout | None) -> GlobalTensor:
        ctx.back, ctx.grad, ctx.shape = without_terms(spec.layout), grad, tuple(x.shape)
        part = x.detach().resolve_conj().resolve_neg()
        if not spec.here:
            return wrap(torch.empty(NOWHERE, dtype=spec.dtype, device=spec.device), spec)
        if from_first:
            part = _first_of_copies(part, spec)
        return wrap(part.to(spec.device), spec)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (g,) = grads
        if ctx.grad is not None:
            g = moved_gradient(g, ctx.grad, "grad_sbp")
        g = moved_gradient(g, ctx.back, "the backward pass of to_global")
        part = _ToPart.apply(g) if torch.is_grad_enabled() else g._local  # type: ignore[no-untyped-call]
        if tuple(part.shape) != ctx.shape:
            part = part.new_zeros(ctx.shape)  # this rank is outside of the placement
        return part, None, None, None


class _ToPart(torch.autograd.Function):
    """Take this rank's part of a global tensor."""

    @staticmethod
    def forward(ctx: Any, x: GlobalTensor) -> Tensor:
        if isinstance(x, LinkedView):
            refresh(x)
        ctx.spec = x._spec
        return x._local.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (g,) = grads
        spec: GlobalSpec = ctx.spec
        made = spec_of(spec.comm, without_terms(spec.layout), spec.shape, None, g.dtype, spec.device)
        if torch.is_grad_enabled() and g.requires_grad:
            return _FromParts.apply(g, made, False, None)  # type: ignore[no-untyped-call]
        return wrap(g, made, spec.comm.pass_lineage)


def _first_of_copies(part: Tensor, spec: GlobalSpec) -> Tensor:
    """This rank's part, replaced by that of the first rank along axes that are broadcast."""
    place, sbp = spec.layout.placement, spec.layout.sbp
    if not any(e == B and n > 1 for e, n in zip(sbp, place.hierarchy, strict=True)):
        return part
    firsts = []
    for i, rank in enumerate(place.ranks):
        at = coordinates(place, i)
        if all(c == 0 for c, e in zip(at, sbp, strict=True) if e == B):
            firsts.append(rank)
    mesh = tuple(1 if e == B else n for e, n in zip(sbp, place.hierarchy, strict=True))
    weights = tuple(() if e == B else w for e, w in zip(sbp, place.weights, strict=False))  # there may be none
    source = Layout(Placement(place.type, tuple(firsts), mesh, weights), sbp)
    mine = part if spec.comm.rank in source.placement else part.new_empty(NOWHERE)
    return redistribute(mine, spec.shape, source, spec.layout, spec.comm, "to_global of a plain tensor")


# ---- shapes of all ranks


def _multiplied(x: Tensor, layout: Layout) -> tuple[int, ...]:
    """The shape of the whole if all parts have the shape of this one.

    Raises LayoutError for a split by weights, whose parts have other shapes.
    """
    shape = list(x.shape)
    for entry, n in zip(layout.sbp, layout.placement.axes, strict=True):
        if isinstance(entry, Split):
            if not isinstance(n, int):
                raise LayoutError(
                    f"to_global(check_meta=False) takes the parts of all ranks to have one shape, and those of a "
                    f"tensor that lies as {layout} do not; leave check_meta out, so that the ranks tell their shapes"
                )
            shape[entry.dim] *= n
    return tuple(shape)


def _meet(x: Tensor, layout: Layout, comm: EagerCommunicator) -> tuple[tuple[int, ...], torch.dtype]:
    """The shape and dtype of the whole, from those of all ranks."""
    if comm.world == 1:
        return tuple(x.shape), x.dtype
    mine = {"shape": list(x.shape), "dtype": str(x.dtype), "layout": str(layout)}
    found = [json.loads(t) for t in comm.gather(_MEETING, comm.all_ranks, json.dumps(mine).encode())]
    if any(f["layout"] != mine["layout"] for f in found):
        lines = "\n".join(f"  rank {r}: {f['layout']}" for r, f in enumerate(found))
        raise CallError(f"to_global was called with different layouts; the same on every rank was expected:\n{lines}")
    place = layout.placement
    parts = [(rank, tuple(found[rank]["shape"]), found[rank]["dtype"]) for rank in place.ranks]
    shape = _whole_shape(layout, [s for _, s, _ in parts])
    ok = shape is not None and all(local_shape(layout, shape, r) == s for r, s, _ in parts) and _fits(layout, shape)
    if not ok or len({d for *_, d in parts}) > 1:
        lines = "\n".join(f"  rank {r}: {s} {d.removeprefix('torch.')}" for r, s, d in parts)
        raise LayoutError(
            f"the plain tensors of the ranks are no parts of one tensor that lies as {layout}; "
            f"{_expected(layout)} was expected:\n{lines}"
        )
    assert shape is not None
    return shape, getattr(torch, parts[0][2].removeprefix("torch."))


def _fits(layout: Layout, shape: Sequence[int]) -> bool:
    return all(not isinstance(e, Split) or e.dim < len(shape) for e in layout.sbp)


def _whole_shape(layout: Layout, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape of the joined parts (along a split dim, the sum over the ranks of that axis); None if they misfit."""
    place = layout.placement
    if len({len(s) for s in shapes}) > 1 or not _fits(layout, shapes[0]):
        return None
    whole = []
    for d in range(len(shapes[0])):
        cut = [isinstance(e, Split) and e.dim == d for e in layout.sbp]
        lines = [
            s[d]
            for i, s in enumerate(shapes)
            if all(c == 0 or is_cut for c, is_cut in zip(coordinates(place, i), cut, strict=True))
        ]
        whole.append(sum(lines))
    return tuple(whole)


def _expected(layout: Layout) -> str:
    cuts = {e.dim for e in layout.sbp if isinstance(e, Split)}
    if not cuts:
        return "one dtype and one shape"
    dims = " and ".join(f"dim {d}" for d in sorted(cuts))
    if layout.placement.weights:
        return f"one dtype, and shapes that are equal but for {dims}, shared by the weights of the placement"
    return f"one dtype, and shapes that are equal but for {dims}, of which the first ranks may have one more"
