"""Verify signatures that a user registered, by running the op on parts of small random operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from actorflow_compiler.core.op_call import OpCall, Signature
from actorflow_compiler.core.sbp import P
from actorflow_compiler.core.shards import shard
from actorflow_compiler.signatures.discovery.execute import on_meta, run
from actorflow_compiler.signatures.discovery.search import (
    OutOfTimeError,
    ReferenceRun,
    Trials,
    is_right,
    reference_runs,
)
from actorflow_compiler.signatures.discovery.small_calls import small_calls
from actorflow_compiler.signatures.localise import local_call

Derive = Callable[[OpCall, int], Iterable[Signature]]


def find_wrong_signature(call: OpCall, derive: Derive) -> tuple[Signature, str] | None:
    """The first signature that is wrong on small calls like this one, and the reason; None if all are right.

    Also None where the op cannot be run on small random operands.
    """
    trials = Trials()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            found, tolerance = small_calls(call, trials.attempt, apart=False)
            for whole in reference_runs(found, trials):
                for signature in derive(whole.small.call, whole.parts) if not whole.with_nans else ():
                    why = _wrong(whole, signature, tolerance)
                    if why:
                        shapes = ", ".join(map(str, whole.small.call.ins))
                        return signature, f"{why} on ({shapes}) over {whole.parts} devices"
    except OutOfTimeError:
        pass
    return None


def _wrong(whole: ReferenceRun, signature: Signature, tolerance: float) -> str | None:
    call, parts = whole.small.call, whole.parts
    generator = torch.Generator().manual_seed(whole.seed)
    shards = [shard(x, s, parts, generator) for x, s in zip(whole.operands, signature.ins, strict=True)]
    made: list[Sequence[Tensor | None]] = []
    for index in range(parts):
        local = local_call(call, signature, parts, index)
        try:
            on_meta(local)
            results = run(local.op, local.args, local.kwargs, [x[index].clone() for x in shards])
        except Exception as error:  # whatever an op raises about shapes that do not fit
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'raised'}"
        for out, meta in zip(results, local.outs, strict=True):
            if meta is not None and (out is None or tuple(out.shape) != meta.shape):
                found = None if out is None else tuple(out.shape)
                return f"the part of device {index} has shape {found}, not {meta.shape},"
        made.append(results)
    for j, (result, layout) in enumerate(zip(whole.results, signature.outs, strict=True)):
        if result is not None and layout is not None:
            tensors = [t for outs in made if (t := outs[j]) is not None]
            if not is_right(tensors, result, layout, tolerance * (10 if P in signature.ins else 1)):
                return f"output {j} is not what the whole op gives"
    return None
