"""Collect every distinct op that torch's own operator samples run, forward and backward."""

from __future__ import annotations

import random
import warnings
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_leaves, tree_map_only

from actorflow_compiler.core.ops import ITEM_BYTES
from signature_checks import Instance, described, instance, meta

UNKNOWN = (torch.complex32,)  # no dtype of a plan's
LARGEST = 4096  # elements; larger samples only take time
DTYPES = (torch.float64, torch.float32, torch.int64, torch.bool)  # the first that an operator takes
REFUSED = (RuntimeError, TypeError, ValueError, IndexError, AssertionError, ImportError)  # torch cannot run a sample

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Recorder(TorchDispatchMode):
    """Keeps each distinct call of an op that changes nothing, with operands as a plan would hand them over."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, dict[object, Arguments]] = defaultdict(dict)  # by op, then by what is known of it

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.wanted(func, args, kwargs):
            plain_args, plain_kwargs, operands = described(args, kwargs)
            key = plain_args, plain_kwargs, tuple(map(meta, operands))
            if key not in self.found[str(func)]:
                self.found[str(func)][key] = tree_map_only(Tensor, dense, (args, kwargs))
        return func(*args, **kwargs)

    @staticmethod
    def wanted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        given = tree_leaves((args, kwargs))
        tensors = [x for x in given if isinstance(x, Tensor)]
        return (
            func.namespace == "aten"
            and not func._schema.is_mutable
            and torch.Tag.nondeterministic_seeded not in func.tags
            and not any(isinstance(x, torch.Generator) or x in UNKNOWN for x in given if not isinstance(x, Tensor))
            and all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors)
            and all(x.layout == torch.strided and x.device.type == "cpu" and not x.is_quantized for x in tensors)
            and all(x.numel() <= LARGEST and str(x.dtype).removeprefix("torch.") in ITEM_BYTES for x in tensors)
        )


def dense(x: Tensor) -> Tensor:
    """A copy without gaps, as tensors are when they arrive from other devices."""
    return x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def recorded(samples_of_each: int | None) -> dict[str, list[Instance]]:
    """By op, the distinct calls that the first samples (None: all) of each of torch's operators make."""
    recorder = Recorder()
    for info in sorted(op_db, key=lambda info: info.full_name):
        record(info, recorder, samples_of_each)
    found: dict[str, list[Instance]] = {}
    for op, calls in recorder.found.items():
        made = [again(op, *call) for call in calls.values()]
        found[op] = [case for case in made if case is not None]
    return found


def record(info: OpInfo, recorder: Recorder, count: int | None) -> None:
    """Run the samples of an operator."""
    dtype = next((d for d in DTYPES if d in info.dtypes), None)
    if dtype is None:
        return
    differentiable = dtype.is_floating_point and info.supports_autograd
    for sample in samples(info, dtype, differentiable, count):
        with recorder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(info, sample, differentiable)


def samples(info: OpInfo, dtype: torch.dtype, requires_grad: bool, count: int | None) -> Iterator[SampleInput]:
    """The same samples each time."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    try:
        # not info.sample_inputs(), which reads the source of the calling test each time
        yield from islice(info.sample_inputs_func(info, "cpu", dtype, requires_grad), count)
    except REFUSED:  # a sample that this build of torch cannot make
        return


def run(info: OpInfo, sample: SampleInput, backward: bool) -> None:
    """Run a sample; what torch refuses to run is none of ours."""
    try:
        out = info(sample.input, *sample.args, **sample.kwargs)
        given = [x for x in tree_iter((sample.input, sample.args, sample.kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_iter(out) if isinstance(x, Tensor) and x.requires_grad]
        given = [x for x in given if x.requires_grad]
        if backward and given and made:
            torch.autograd.grad(made, given, [torch.randn_like(x) for x in made], allow_unused=True)
    except REFUSED:
        return


def again(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Instance | None:
    """The call from dense operands; None if it needed gaps between its elements or returns no tensor."""
    try:
        case = instance(op, args, kwargs)
    except RuntimeError:
        assert "as_strided" in op, op
        return None
    return case if any(r is not None for r in case.results) else None
