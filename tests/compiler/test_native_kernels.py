"""Kernels of torch on operands that lie in memory in all sorts of ways: what comes out is always the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from actorflow.runtime.bodies.kernels import Kernels
from actorflow_compiler.core.op_call import argument
from actorflow_compiler.core.ops import Arg
from actorflow_compiler.library import OPS
from actorflow_compiler.plan.plan import Body, Step
from actorflow_compiler.signatures import signatures
from actorflow_compiler.signatures.localise import local_call
from actorflow_compiler.signatures.table import TABLE
from signature_checks import MERGED_RANDOMLY, ON_GPU_ONLY, Instance, close, instance
from signature_samples import calls, has_calls

TOLERANCE = 1e-8
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
NAMES = sorted(n for n in TABLE if n.startswith("aten.") and has_calls(n) and n not in ON_GPU_ONLY | MERGED_RANDOMLY)
AMONG_EQUALS = {"aten.median.dim"}  # which of equal elements is the one is not said


def reversed_dims(x: Tensor) -> Tensor:
    """Column by column."""
    order = list(range(x.dim()))[::-1]
    return x.permute(order).contiguous().permute(order)


def channels_last(x: Tensor) -> Tensor:
    """With channels innermost, where there are any."""
    return x.contiguous(memory_format=LAST[x.dim()]) if x.dim() in LAST else x


def with_gaps(x: Tensor, dim: int) -> Tensor:
    """Each index of a dim between others of a larger tensor."""
    if not x.dim():
        return x
    shape = list(x.shape)
    shape[dim] = 2 * shape[dim] + 1
    room = torch.zeros(shape, dtype=x.dtype)
    if x.is_floating_point():
        room.fill_(torch.nan)
    part = room.narrow(dim, 1, 2 * x.shape[dim]).unflatten(dim, (x.shape[dim], 2)).select(dim % x.dim() + 1, 0)
    return part.copy_(x)


def repeated(x: Tensor) -> Tensor:
    """One element, at all places."""
    return x.reshape(-1)[:1].reshape([1] * x.dim()).expand(x.shape) if x.is_floating_point() and x.numel() else x


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "column by column": reversed_dims,
    "channels innermost": channels_last,
    "every other column": lambda x: with_gaps(x, -1),
    "every other row": lambda x: with_gaps(x, 0),
    "one element": repeated,
}


def row_major(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def computed(case: Instance, operands: Sequence[Tensor]) -> list[Tensor]:
    """What a plan for one device computes for an op; outputs of no use are left out."""
    call = local_call(case.call, signatures(case.call, 1)[0], 1, 0)
    count = len(call.ins)
    outs = tuple(count + i if m is not None else -1 for i, m in enumerate(call.outs))
    step = Step(call.op, call.args, call.kwargs, outs)
    body = Body(count, (step,), tuple(o for o in outs if o >= 0))
    with torch.no_grad():
        return list(Kernels(torch.device("cpu"), OPS).kernel(body)(list(operands)))


def cases(op: str) -> Iterator[Instance]:
    """The samples of an op, with all masks that say which outputs are wanted."""
    for args, kwargs in calls(op):
        case = instance(op, args, kwargs)
        yield case
        try:
            at, mask = argument(case.call, "output_mask")
        except ValueError:
            continue
        assert isinstance(mask, tuple)
        for other in itertools.product((True, False), repeat=len(mask)):
            if other != mask and any(other) and all(m or not o for m, o in zip(mask, other, strict=True)):
                changed: tuple[Arg, ...] = (*case.call.args[:at], other, *case.call.args[at + 1 :])
                used = zip(case.call.outs, other, strict=True)
                outs = tuple(meta if wanted else None for meta, wanted in used)
                yield replace(case, call=replace(case.call, args=changed, outs=outs))


@pytest.mark.matrix(every=8)
@pytest.mark.parametrize("op", NAMES)
def test_an_op_computes_the_same_however_its_operands_lie_in_memory(op: str) -> None:
    for case in cases(op):
        for name, way in WAYS.items():
            if way is repeated and op in AMONG_EQUALS:
                continue
            laid = [way(x) for x in case.operands]
            alone = [[*case.operands[:i], x, *case.operands[i + 1 :]] for i, x in enumerate(laid)]
            for operands in [laid, *alone]:
                if all(x.is_contiguous() for x in operands):
                    continue
                try:
                    expected = computed(case, [row_major(x) for x in operands])
                except RuntimeError:  # the op takes no such values
                    continue
                found = computed(case, operands)
                wrong = [i for i, pair in enumerate(zip(found, expected, strict=True)) if not close(*pair, TOLERANCE)]
                assert not wrong, f"{case.call}: outputs {wrong} differ where operands lie {name}"
