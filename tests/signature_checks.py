"""Check a signature against real calls of its op, by running the op on parts of its operands."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.core.op_call import overload
from actorflow_compiler.core.ops import Arg, Meta, Ref, Symbol
from actorflow_compiler.core.sbp import Broadcast, PartialSum, Parts, Split, device_count, local_shape
from actorflow_compiler.custom_ops.optimizers import IN_PLACE
from actorflow_compiler.library import OPS
from actorflow_compiler.signatures import OpCall, Signature, is_placed, local_op, shard, signatures, unshard
from actorflow_compiler.signatures.table import TABLE

MERGED_RANDOMLY = {
    "aten.empty_like.default",
    "aten.empty.memory_format",
    "aten.new_empty.default",
    "aten.new_empty_strided.default",
    "aten.empty_permuted.default",
    "aten.empty_strided.default",
}  # values mean nothing
ON_GPU_ONLY = {
    name
    for name in TABLE
    if any(
        kind in name
        for kind in (
            "flash_attention.",
            "flash_attention_backward.",
            "efficient_",
            "cudnn_",
            "_fused_rms_norm_backward",
            "_thnn_fused",
        )
    )
}
ROUNDING = {torch.float32: 1e-5, torch.complex64: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Instance:
    """A call with real operands and what it returned."""

    call: OpCall
    operands: tuple[Tensor, ...]
    results: tuple[Tensor | None, ...]


def described(
    args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...], list[Tensor]]:
    """Arguments as a graph has them, and the tensors that they refer to."""
    operands: list[Tensor] = []

    def plain(value: Any) -> Arg:
        if isinstance(value, Tensor):
            operands.append(value)
            return Ref(len(operands) - 1)
        if isinstance(value, list | tuple):
            return tuple(plain(v) for v in value)
        if isinstance(value, torch.device):
            return Symbol(f"device:{value.type}")
        return Symbol(str(value)) if isinstance(value, torch.dtype | torch.layout | torch.memory_format) else value

    return tuple(plain(a) for a in args), tuple((k, plain(v)) for k, v in kwargs.items()), operands


def instance(
    op: str, args: Sequence[Any], kwargs: dict[str, Any] | None = None, used: Sequence[bool] | None = None
) -> Instance:
    """Run an op whole; ``used`` says which outputs count."""
    plain_args, plain_kwargs, operands = described(args, kwargs or {})
    results = run(op, plain_args, plain_kwargs, operands)
    if used is not None:
        results = [r if u else None for r, u in zip(results, used, strict=True)]
    outs = tuple(None if r is None else meta(r) for r in results)
    return Instance(
        OpCall(op, plain_args, plain_kwargs, tuple(map(meta, operands)), outs), tuple(operands), tuple(results)
    )


def run(
    op: str, args: Sequence[Arg], kwargs: Sequence[tuple[str, Arg]], tensors: Sequence[Tensor]
) -> list[Tensor | None]:
    """Run an op as a plan names it."""
    if op in IN_PLACE:  # its form in a graph has the name of a parameter group, too
        out = overload(f"{op}.default")(*(real(a, tensors) for a in args), "group")
    else:
        function = OPS[op.removeprefix("actorflow.")] if op.startswith("actorflow.") else overload(op)
        out = function(*(real(a, tensors) for a in args), **{k: real(v, tensors) for k, v in kwargs})
    flat = list(out) if isinstance(out, list | tuple) else [out]
    return [r if isinstance(r, Tensor) else None for r in flat]


def real(value: Arg, tensors: Sequence[Tensor]) -> Any:
    """An argument of a plan as torch takes it."""
    if isinstance(value, Ref):
        return tensors[value.index]
    if isinstance(value, tuple):
        return [real(v, tensors) for v in value]
    if isinstance(value, Symbol):
        text = value.text
        return torch.device(text[7:]) if text.startswith("device:") else getattr(torch, text.removeprefix("torch."))
    return value


def meta(tensor: Tensor) -> Meta:
    """Shape and dtype."""
    return Meta(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def wrong(
    case: Instance, signature: Signature, parts: Parts, tolerance: float = 1e-8, make: Callable[..., Any] = local_op
) -> str | None:
    """Shard the operands, run the op on each device, and compare; None if all is right."""
    generator = torch.Generator().manual_seed(7)
    shards = [shard(x, s, parts, generator) for x, s in zip(case.operands, signature.ins, strict=True)]
    results: list[list[Tensor | None]] = []
    alike: dict[object, object] = {}  # what devices have of each tensor → what they run
    for index in range(device_count(parts)):
        op, args, kwargs, metas = make(case.call, signature, parts, index)
        held = (*(x[index].shape for x in shards), *metas)
        if not is_placed(case.call, signature) and alike.setdefault(held, said := (op, args, kwargs)) != said:
            return f"device {index} runs it otherwise, though it is not said to matter which elements it has"
        local = run(op, args, kwargs, [x[index].clone() for x in shards])
        if len(local) != len(case.results):
            return f"device {index} has {len(local)} outputs"
        expected = iter(metas)
        for r, whole, layout in zip(local, case.results, signature.outs, strict=True):
            if whole is None or layout is None:
                continue
            if r is None or meta(r) != (told := next(expected)):
                return f"device {index}: {meta(r) if r is not None else None} where {told} was said"
            if tuple(r.shape) != local_shape(whole.shape, layout, parts, index):
                return f"device {index}: shape {tuple(r.shape)} for {layout}"
        results.append(local)
    if case.call.op in MERGED_RANDOMLY:
        return None
    for j, (whole, layout) in enumerate(zip(case.results, signature.outs, strict=True)):
        if whole is None or layout is None:
            continue
        made = [r[j] for r in results]
        assert all(m is not None for m in made)
        tensors = [m for m in made if m is not None]
        if isinstance(layout, Broadcast) and any(not close(t, tensors[0], 0.0) for t in tensors):
            return f"output {j}: devices differ"
        joined = unshard(tensors, layout, parts)
        scale = 10.0 if any(isinstance(s, PartialSum) for s in signature.ins) else 1.0
        rounding = max(ROUNDING.get(x.dtype, 0.0) for x in (*case.operands, whole))
        if not close(joined, whole, max(tolerance, rounding) * scale):
            return f"output {j}: wrong values"
    return None


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Equal up to rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if not a.is_floating_point() or not tolerance:
        return torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
    finite = b[b.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * max(scale, 1e-3), equal_nan=True)


def granular(case: Instance, parts: Parts) -> set[Split]:
    """Cuts with blocks and units that the operands could have."""
    found = set()
    for m in case.call.ins:
        for dim, n in enumerate(m.shape):
            found |= {
                Split(dim, k, u)
                for k in (1, 2, 3)
                for u in (1, 2, 3)
                if (k, u) != (1, 1) and n and n % (k * u) == 0 and n // k > u
            }
    return found


def failures(case: Instance, parts: Parts, tolerance: float = 1e-8, wanted: bool = True) -> Iterator[str]:
    """What is wrong with any of the derived signatures."""
    for signature in signatures(case.call, parts, wanted=granular(case, parts) if wanted else ()):
        try:
            found = wrong(case, signature, parts, tolerance)
        except Exception as error:
            found = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if found:
            shapes = [str(m) for m in case.call.ins]
            yield f"{case.call.op} {shapes} over {parts}, {signature} ({signature.letter}): {found}"


class Collector(torch.fx.Interpreter):
    """Runs a captured graph and keeps every distinct op instance."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.found: dict[OpCall, Instance] = {}
        self.calls: dict[torch.fx.Node, OpCall] = {}
        self._node: torch.fx.Node | None = None

    def run_node(self, n: torch.fx.Node) -> Any:
        self._node = n
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = super().call_function(target, args, kwargs)
        if target is operator.getitem or "copy_" in str(target):
            return out
        assert self._node is not None
        count = len(out) if isinstance(out, list | tuple) else 1
        used = [isinstance(out, Tensor)] * count
        for user in self._node.users:
            if user.target is operator.getitem:
                used[user.args[1]] = True  # type: ignore[index,call-overload]
        name = str(target)  # ops of our own have no overloads in a graph
        case = instance(name.removesuffix(".default") if name.startswith("actorflow.") else name, args, kwargs, used)
        self.calls[self._node] = case.call
        copies = tuple(x.clone() for x in case.operands)
        results = tuple(None if r is None else r.clone() for r in case.results)
        self.found.setdefault(case.call, Instance(case.call, copies, results))
        return out
