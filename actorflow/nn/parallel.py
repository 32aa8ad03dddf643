"""``DistributedDataParallel``: a module whose gradients are averaged over all ranks of the run."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import parallel

from actorflow.distributed.group import default_group
from actorflow.support.nearest_names import answer_with_nearest
from actorflow_compiler.core.errors import LayoutError

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(parallel.DistributedDataParallel):
    """PyTorch's ``DistributedDataParallel`` with PyTorch's arguments, over all ranks of the run unless told otherwise.

    Each rank feeds it a part of the batch of its own; ``backward`` leaves the mean of all ranks'
    gradients in ``grad`` everywhere.  It needs no ``init_process_group``: the ranks of ``actorflow
    run``, ``python -m actorflow.distributed.launch`` and ``torchrun`` find each other, and a process
    that is alone trains alone.  What the module has and PyTorch's wrapper has not is found through it
    (``model.iter_count``); ``model.module`` is the module itself.

    >>> model = flow.nn.parallel.DistributedDataParallel(Model())
    >>> loss(model(x[flow.env.get_rank()]), y[flow.env.get_rank()]).backward()

    Raises LayoutError for a module with global tensors: they say themselves how they lie on the ranks.
    """

    def __init__(self, module: torch.nn.Module, *args: Any, **options: Any) -> None:
        _check(module)
        default_group()
        super().__init__(module, *args, **options)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:  # it is being made
                raise
            return getattr(module, name)


def _check(module: torch.nn.Module) -> None:
    state = [*module.named_parameters(), *module.named_buffers()]
    found = [name for name, tensor in state if getattr(tensor, "is_global", False)]
    if found:
        names = ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
        raise LayoutError(
            f"DistributedDataParallel was given a module with global tensors ({names}): a global tensor is not used "
            "together with it, as its placement and sbp say already how it lies on the ranks. Either leave "
            "DistributedDataParallel out (with sbp broadcast for parameters and split(0) for the batch the gradients "
            "are summed all the same), or keep the module's tensors local."
        )


answer_with_nearest(__name__)
