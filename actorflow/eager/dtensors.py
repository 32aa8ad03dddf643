"""Convert global tensors to torch's DTensor and back; the parts share memory."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable

from actorflow.distributed.group import default_group
from actorflow.eager.convert import moved, without_terms
from actorflow.eager.current import current
from actorflow.eager.global_tensor import GlobalSpec, GlobalTensor, spec_of, wrap
from actorflow.eager.layout import NOWHERE, Layout, local_shape
from actorflow.eager.linked_views import LinkedView, refresh
from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, P, Sbp, Split
from actorflow_compiler.core.torch_internals import arrived
from actorflow_compiler.plan.region import coordinates

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = ["from_dtensor", "to_dtensor"]


def to_dtensor(x: Tensor, mesh: DeviceMesh | None = None) -> DTensor:
    """The DTensor of the same parts; gradients flow back, of the first order.

    It lies on ``mesh``, which must have the ranks of ``x``'s placement in the same order and shape; without one, on a
    mesh of those ranks that is made at the first use.  That, and making torch's default process group where the script
    has made none, is collective: every rank of the run calls this, and a rank outside of the placement holds an empty
    part of the DTensor too.

    Raises LayoutError for layouts that DTensor cannot express (splits in blocks, and uneven splits that torch cuts
    differently), for a mesh with other ranks, and if torch's default group does not have the ranks of this run.

    >>> flow.to_dtensor(x).placements  # x: placement cpu:[0,1,2,3](2,2), sbp (S(0), B)
    (Shard(dim=0), Replicate())
    """
    if not isinstance(x, GlobalTensor):
        raise LayoutError(
            "to_dtensor was given a plain tensor; a global tensor was expected: x.to_global(placement, sbp)"
        )
    if isinstance(x, LinkedView):
        refresh(x)
    spec = x._spec
    layout = spec.layout
    for entry in layout.sbp:
        if isinstance(entry, Split) and (entry.blocks, entry.unit) != (1, 1):
            raise LayoutError(f"{entry} is a split in blocks, which DTensor does not have: first x.to_global(sbp=…)")
    if not _cut_alike(layout, spec.shape):
        raise LayoutError(
            f"the parts of a tensor of shape {spec.shape} that lies as {layout} are uneven, and DTensor cuts "
            f"uneven dims otherwise; first x.to_global(sbp=flow.sbp.broadcast)"
        )
    default_group()
    if distributed.get_world_size() != spec.comm.world:
        raise LayoutError(
            f"torch's default process group has {distributed.get_world_size()} ranks, and the global tensor's run "
            f"{spec.comm.world}; a DTensor needs a group of the same ranks"
        )
    if mesh is not None and _placement(mesh) != layout.placement:
        raise LayoutError(
            f"to_dtensor was given a mesh of {_placement(mesh)} for a tensor on {layout.placement}; a mesh of the same "
            f"ranks was expected: first x.to_global(placement=…)"
        )
    made: DTensor = _ToDTensor.apply(x, mesh)  # type: ignore[no-untyped-call]
    return made


def from_dtensor(x: DTensor) -> Tensor:
    """The global tensor of a DTensor's parts; gradients flow back, of the first order.

    Every rank of the run calls it, those outside of the mesh as well.  Raises LayoutError for placements that have no
    sbp, such as partial maxima, and for uneven parts that actorflow cuts differently.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(x, DTensor):
        raise LayoutError(f"from_dtensor was given a {type(x).__name__}; a DTensor was expected")
    made: Tensor = _FromDTensor.apply(x)  # type: ignore[no-untyped-call]
    return made


@lru_cache(maxsize=64)
def _mesh(placement: Placement, group: Any) -> DeviceMesh:
    """The mesh of a placement, one for each life of the default process group."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh(placement.type, torch.tensor(placement.ranks).view(placement.hierarchy))


def _wrapped(local: Tensor, spec: GlobalSpec, layout: Layout, mesh: DeviceMesh | None) -> DTensor:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    words = {B: Replicate(), P: Partial()}
    placements = [Shard(e.dim) if isinstance(e, Split) else words[e] for e in layout.sbp]
    mesh = mesh or _mesh(layout.placement, distributed.group.WORLD)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(spec.shape), stride=spec.strides
    )


def _layout(x: DTensor) -> Layout:
    """The layout of a DTensor."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    entries: list[Sbp] = []
    for p in x.placements:
        if isinstance(p, Replicate):
            entries.append(B)
        elif type(p) is Shard:
            entries.append(Split(p.dim % x.dim()))
        elif type(p) is Partial and p.reduce_op == "sum":
            entries.append(P)
        else:
            raise LayoutError(
                f"a DTensor with the placement {p} was given, for which there is no sbp; redistribute() it"
            )
    return Layout(_placement(x.device_mesh), tuple(entries))


def _placement(mesh: DeviceMesh) -> Placement:
    return Placement(mesh.device_type, tuple(mesh.mesh.flatten().tolist()), tuple(mesh.mesh.shape))


def _cut_alike(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether torch gives every rank the same part; checks all ranks, so that all get the same answer."""
    place = layout.placement
    for at, rank in enumerate(place.ranks):
        part = list(shape)
        for entry, n, i in zip(layout.sbp, place.hierarchy, coordinates(place, at), strict=True):
            if isinstance(entry, Split):
                size = part[entry.dim]
                most = -(-size // n)  # size of each part except the last ones
                part[entry.dim] = max(0, min(size - i * most, most))
        if tuple(part) != local_shape(layout, shape, rank):
            return False
    return True


class _ToDTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: GlobalTensor, mesh: DeviceMesh | None) -> Any:
        ctx.spec = x._spec
        return _wrapped(x._local, x._spec, x._spec.layout, mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return moved(_taken(grads[0]), without_terms(ctx.spec.layout), "the backward pass of to_dtensor"), None


class _FromDTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor) -> Any:
        ctx.layout, ctx.mesh = _layout(x), x.device_mesh
        return _taken(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        layout = without_terms(ctx.layout)
        g = moved(grads[0], layout, "the backward pass of from_dtensor")
        return _wrapped(g._local, g._spec, layout, ctx.mesh)


def _taken(x: DTensor) -> GlobalTensor:
    layout, comm = _layout(x), current()
    comm.check_placement(layout.placement)
    local = arrived(x.detach().to_local())  # type: ignore[attr-defined]  # detach's stub says Tensor
    shape = tuple(x.shape)
    if not _cut_alike(layout, shape):
        raise LayoutError(
            f"a DTensor of shape {shape} with the placements {x.placements} is cut unevenly, other than {layout} is; "
            f"redistribute() it to Replicate() first"
        )
    if comm.rank not in layout.placement:
        local = local.new_empty(NOWHERE)
    return wrap(local, spec_of(comm, layout, shape, tuple(x.stride()), x.dtype, local.device))
