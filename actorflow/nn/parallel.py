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
    """PyTorch's ``DistributedDataParallel`` with its arguments and OneFlow's, over all ranks unless told otherwise.

    Each rank feeds it a part of the batch of its own; ``backward`` leaves the mean of all ranks'
    gradients in ``grad`` everywhere.  It needs no ``init_process_group``: the ranks of ``actorflow
    run``, ``python -m actorflow.distributed.launch`` and ``torchrun`` find each other, and a process
    that is alone trains alone.  What the module has and PyTorch's wrapper has not is found through it
    (``model.iter_count``); ``model.module`` is the module itself.

    >>> model = flow.nn.parallel.DistributedDataParallel(Model())
    >>> loss(model(x[flow.env.get_rank()]), y[flow.env.get_rank()]).backward()

    OneFlow's: ``broadcast_parameters=False`` takes the ranks' parameters to be equal already; ``use_bucket=False`` sums
    each gradient by itself.  ``bucket_size``, a number of parameters, changes nothing: buckets are filled by bytes
    (``bucket_cap_mb=``).

    Raises LayoutError for a module with global tensors: they say themselves how they lie on the ranks.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *args: Any,
        broadcast_parameters: bool = True,
        bucket_size: int = 10,
        use_bucket: bool = True,
        **options: Any,
    ) -> None:
        _check(module)
        if isinstance(bucket_size, bool) or not isinstance(bucket_size, int) or bucket_size < 1:
            raise ValueError(f"bucket_size={bucket_size!r} was found; a number of parameters, 1 or more, was expected")
        if not use_bucket:
            options.setdefault("bucket_cap_mb", 0)
        if not broadcast_parameters:
            options.setdefault("init_sync", False)
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
    found = [name for name, tensor in state if getattr(tensor, "has_parts", False)]
    if found:
        names = ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
        raise LayoutError(
            f"DistributedDataParallel was given a module with global tensors ({names}): a global tensor is not used "
            "together with it, as its placement and sbp say already how it lies on the ranks. Either leave "
            "DistributedDataParallel out (with sbp broadcast for parameters and split(0) for the batch the gradients "
            "are summed all the same), or keep the module's tensors local."
        )


answer_with_nearest(__name__)
