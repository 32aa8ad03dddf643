"""Add methods to ``GlobalTensor`` that are no ops: values, text, copies, pickles, and gradient layouts of leaves."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actorflow.eager.convert import moved_gradient, without_terms
from actorflow.eager.current import current
from actorflow.eager.global_tensor import GlobalSpec, GlobalTensor, Shape, spec_of, wrap
from actorflow.eager.layout import Layout, is_whole
from actorflow.eager.lineage import backward_pass
from actorflow.eager.linked_views import LinkedView, refresh
from actorflow.eager.memory_access import refuse_access_to_memory
from actorflow.eager.special_ops import whole_part
from actorflow.eager.torch_checkpoints import answer_torchs_checkpoints
from actorflow.support.whole_pickles import parts_are_refused
from actorflow_compiler.core.errors import LayoutError, StateError
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import parse
from actorflow_compiler.core.torch_internals import only_dispatch


def _numpy(x: GlobalTensor, *, force: bool = False) -> NDArray[Any]:
    """The whole tensor's values, on every rank; collective unless every rank has them.

    With ``force``, also of a tensor that requires a gradient.
    """
    if x.requires_grad and not force:
        raise RuntimeError("Can't call numpy() on a tensor that requires grad; use x.detach().numpy()")
    found: NDArray[Any] = np.array(_whole(x).cpu().numpy())
    return found


_data: Any = Tensor.data  # torch's own property


def _set_data(x: GlobalTensor, new: Tensor) -> None:
    """``x.data = …``, as ``module.double()`` does; the new values are a global tensor's, with its layout."""
    if not isinstance(new, GlobalTensor):
        raise LayoutError("x.data of a global tensor was given a plain tensor; a global one was expected: to_global it")
    if isinstance(new, LinkedView):
        refresh(new)
    _data.__set__(x, new)
    x._local, x._spec, x._lineage = new._local, new._spec, new._lineage


def _whole(x: GlobalTensor) -> Tensor:
    """The whole as a plain tensor on every rank; collective unless every rank has it.  Do not change it: it may share
    memory with this rank's part.  No gradient flows.
    """
    if isinstance(x, LinkedView):
        refresh(x)
    return whole_part(x).detach()


def _array(x: GlobalTensor, dtype: Any = None, copy: Any = None) -> NDArray[Any]:
    found = _numpy(x)
    return found if dtype is None else found.astype(dtype)


def _format(x: GlobalTensor, spec: str) -> str:
    """A tensor without dims as its number, as torch does; collective unless every rank has it."""
    return format(x.detach().item(), spec) if x.dim() == 0 else object.__format__(x, spec)


def _tolist(x: GlobalTensor) -> Any:
    return _numpy(x, force=True).tolist()


def _show(x: GlobalTensor, **_: Any) -> str:
    """Shape, layout and this rank's part; nothing is moved, so one rank may print by itself."""
    spec = x._spec
    if isinstance(x, LinkedView) and not x._moved:
        refresh(x)
    extra = ", requires_grad=True" if x.requires_grad and x.is_leaf else ""
    grad = x.grad_fn
    if grad is not None:
        extra = f", grad_fn=<{type(grad).__name__}>"
    about = f"shape={tuple(spec.shape)}, placement={spec.layout.placement}, sbp={_sbp_text(spec.layout)}{extra}"
    if not spec.here:
        return f"global_tensor(no part on rank {spec.comm.rank}, {about})"
    inner = repr(x._local.detach())
    inner = inner.removeprefix("tensor(").removesuffix(")")
    if is_whole(spec.layout):
        return f"global_tensor({inner}, {about})"
    return f"global_tensor({inner}, which is rank {spec.comm.rank}'s part, {about})"


def _sbp_text(layout: Layout) -> str:
    parts = [str(e) for e in layout.sbp]
    return parts[0] if len(parts) == 1 else f"[{', '.join(parts)}]"


def _deepcopy(x: GlobalTensor, memo: dict[int, Any]) -> Any:
    if id(x) in memo:
        return memo[id(x)]
    if not x.is_leaf:
        raise RuntimeError(
            "only global tensors that users made can be deep-copied; this one has a grad_fn: detach() it"
        )
    if isinstance(x, LinkedView):
        refresh(x)
    made: Any = wrap(x._local.detach().clone(), x._spec, x._lineage)
    torch.Tensor.requires_grad_(made, x.requires_grad)
    if x.requires_grad:
        keep_gradients_alike(made)
    made.__dict__.update({k: copy.deepcopy(v, memo) for k, v in x.__dict__.items() if k != _HOOKED})
    if x.requires_grad:
        made.__dict__[_HOOKED] = True
    if x.grad is not None:
        made.grad = _deepcopy(x.grad, memo)  # type: ignore[arg-type]
    memo[id(x)] = made
    return made


def rebuild(
    local: Tensor, placement: tuple[Any, ...], sbp: Sequence[str], shape: Shape, strides: Shape, rank: int,
    requires_grad: bool, is_parameter: bool,
) -> Any:  # fmt: skip
    """Rebuild a global tensor from a pickle."""
    comm, layout = current(), Layout(Placement(*placement), tuple(map(parse, sbp)))
    if comm.rank != rank:
        raise LayoutError(
            f"rank {comm.rank} has loaded rank {rank}'s part of a global tensor of shape {shape}, {layout}; each rank "
            f"can load what it has saved with torch.save: save under a name with the rank, or by flow.save, which "
            f"writes whole tensors"
        )
    comm.check_placement(layout.placement)
    device = comm.device(layout.placement)
    made: Any = wrap(local.to(device), spec_of(comm, layout, tuple(shape), tuple(strides), local.dtype, device))
    made.requires_grad_(requires_grad)
    if is_parameter:
        made._is_param = True
    return made


def _reduce(x: GlobalTensor, protocol: Any) -> Any:
    """A pickle of this rank's part, which the same rank can load; of plain values, as ``weights_only`` asks."""
    if parts_are_refused():
        raise StateError(
            f"flow.save has come to a global tensor of shape {tuple(x.shape)} in an object that is no list, tuple or "
            f"dictionary, and only in these its whole value is saved; of a module, save module.state_dict()"
        )
    if isinstance(x, LinkedView):
        refresh(x)
    spec: GlobalSpec = x._spec
    place = spec.layout.placement
    return rebuild, (
        x._local.detach(), (place.type, place.ranks, place.hierarchy, place.weights),
        tuple(map(str, spec.layout.sbp)), spec.shape, spec.strides, spec.comm.rank, x.requires_grad,
        "_is_param" in x.__dict__,
    )  # fmt: skip


# ---- the gradient of a leaf has the layout of the leaf

_HOOKED = "_actorflow_hooked"


def keep_gradients_alike(x: GlobalTensor) -> None:
    """Redistribute the gradient of a leaf to the leaf's layout as soon as it is known, so that it is summed once."""
    if x.__dict__.get(_HOOKED):
        return
    x.__dict__[_HOOKED] = True
    target = without_terms(x._spec.layout)

    def alike(grad: Any) -> Any:
        if isinstance(grad, GlobalTensor) and grad._spec.layout is not target:
            return moved_gradient(grad, target, "a gradient")
        return grad

    x.register_hook(alike)  # type: ignore[no-untyped-call]


def _requires_grad(x: GlobalTensor, requires_grad: bool = True) -> GlobalTensor:
    """Record ops on this leaf; its gradient will have the leaf's layout."""
    torch.Tensor.requires_grad_(x, requires_grad)
    if requires_grad and x.is_leaf:
        keep_gradients_alike(x)
    return x


def _backward(
    x: GlobalTensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Compute gradients, as ``Tensor.backward`` does.

    Defined here so that hooks of the backward pass go through ``__torch_function__`` as well.
    """
    given = (gradient._lineage,) if isinstance(gradient, GlobalTensor) else ()
    with backward_pass(x._spec.comm, x._lineage, *given):
        torch.autograd.backward(x, gradient, retain_graph, create_graph, inputs=inputs)


def _quickly(name: str) -> property:
    """A property of every tensor that does not go through ``__torch_function__``."""
    found: Any = getattr(Tensor, name)

    def read(x: GlobalTensor) -> Any:
        with only_dispatch():
            return found.__get__(x)

    def write(x: GlobalTensor, value: Any) -> None:
        with only_dispatch():
            found.__set__(x, value)

    def remove(x: GlobalTensor) -> None:
        with only_dispatch():
            found.__delete__(x)

    return property(read, write, remove)


_made: Any = GlobalTensor
for _name in ("grad", "grad_fn", "is_leaf", "requires_grad"):
    setattr(_made, _name, _quickly(_name))
_made.shape = property(lambda x: x._spec.size)
_made.dtype = property(lambda x: x._spec.dtype)
_made.device = property(lambda x: x._spec.device)
_made.backward = _backward
_made.placement = property(lambda x: x._spec.layout.placement)
_made.sbp = property(lambda x: x._spec.layout.sbp)
_made.data = property(_data.__get__, _set_data)
_made.is_global = property(lambda x: True)
_made.numpy, _made.tolist, _made.__array__, _made.whole = _numpy, _tolist, _array, _whole
_made.__format__ = _format
_made.__repr__ = _made.__str__ = _show
_made.__deepcopy__, _made.__reduce_ex__ = _deepcopy, _reduce
_made.requires_grad_ = _requires_grad
answer_torchs_checkpoints(_made)
refuse_access_to_memory(_made)
