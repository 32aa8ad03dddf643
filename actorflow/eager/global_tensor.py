"""``GlobalTensor``, a tensor spread over ranks, and ``GlobalSpec``, its description without values."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actorflow.eager.communicator import EagerCommunicator
from actorflow.eager.layout import Layout
from actorflow.eager.lineage import Lineage, code_of
from actorflow_compiler.core.ops import Meta
from actorflow_compiler.core.torch_internals import make_wrapper, no_torch_function

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class GlobalSpec:
    """The description of a global tensor without its values; ``spec_of`` makes one object for equal specs on a rank.

    Ops are looked up by the specs of their operands, so specs compare and hash by identity.
    """

    comm: EagerCommunicator  # of this rank
    layout: Layout
    shape: Shape  # of the whole
    strides: Shape  # of the whole, as one device would have it
    dtype: torch.dtype
    device: torch.device
    make: Callable[[], Any] = field(init=False)  # makes a tensor of this kind, without its part
    size: torch.Size = field(init=False)  # the shape as torch gives it
    here: bool = field(init=False)  # whether this rank is in the placement
    lineage: Lineage = field(init=False)  # of a tensor of which nothing else is known

    def __post_init__(self) -> None:
        about: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        if self.strides != dense_strides(self.shape):
            about["strides"] = self.strides
        object.__setattr__(self, "make", partial(make_wrapper, GlobalTensor, self.shape, **about))
        object.__setattr__(self, "size", torch.Size(self.shape))
        object.__setattr__(self, "here", self.comm.rank in self.layout.placement)
        object.__setattr__(self, "lineage", code_of(str(self)))

    @property
    def meta(self) -> Meta:
        """Shape and dtype as the compiler writes them."""
        return Meta(self.shape, str(self.dtype).removeprefix("torch."))

    def __deepcopy__(self, memo: object) -> GlobalSpec:
        return self  # there is one for equal values, and its communicator is this rank's connection to others

    def __str__(self) -> str:
        return f"{self.meta}, {self.layout}"


_specs: dict[tuple[Any, ...], GlobalSpec] = {}


def spec_of(
    comm: EagerCommunicator,
    layout: Layout,
    shape: Shape,
    strides: Shape | None,
    dtype: torch.dtype,
    device: torch.device,
) -> GlobalSpec:
    """The spec of these values; ``strides=None`` means those of a new contiguous tensor."""
    key = (comm, layout, shape, strides, dtype, device)
    found = _specs.get(key)
    if found is None:
        made = GlobalSpec(comm, layout, shape, dense_strides(shape) if strides is None else strides, dtype, device)
        found = _specs.setdefault(key if strides is not None else (*key[:3], made.strides, *key[4:]), made)
        _specs[key] = found
    return found


def dense_strides(shape: Shape) -> Shape:
    """The strides of a new tensor."""
    out, step = [], 1
    for n in reversed(shape):
        out.append(step)
        step *= max(n, 1)
    return tuple(reversed(out))


Sources = tuple["weakref.ref[GlobalTensor]", ...]


class GlobalTensor(torch.Tensor):
    """A tensor spread over the ranks of a placement; its shape is that of the whole.

    Every op on it runs on all ranks, on the part that each holds.  Ranks outside of the placement have an empty part.
    """

    has_parts = True  # for code that does not import this module
    _local: Tensor
    _spec: GlobalSpec
    _lineage: Lineage  # how it was made: see ``lineage.py``
    _sources: Sources  # of a view: what it is a view of, the nearest first, which changes with it
    _leaf: tuple[Tensor, Tensor]  # this part, and the same as a leaf of a graph of parts; set when first needed

    __slots__ = ("_leaf", "_lineage", "_local", "_sources", "_spec")
    __torch_function__ = no_torch_function  # replaced by ``torch_function.py``

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub knows no class method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replaced by ``dispatch.py``."""
        raise NotImplementedError(func)


def wrap(local: Tensor, spec: GlobalSpec, lineage: Lineage | None = None) -> GlobalTensor:
    """The global tensor of which ``local`` is this rank's part; nothing is checked, nothing is differentiated.

    Its lineage is that of its spec unless it is given.
    """
    made: GlobalTensor = spec.make()
    made._local = local
    made._spec = spec
    made._lineage = spec.lineage if lineage is None else lineage
    return made
