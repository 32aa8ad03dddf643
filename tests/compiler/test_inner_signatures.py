"""Ops whose reduced dim is split: written out and run on parts, they give what the whole op gives, and move little."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from actorflow_compiler.core.ops import Ref
from actorflow_compiler.core.sbp import Parts, Sbp, Split, device_count, even_shares, local_shape
from actorflow_compiler.custom_ops.ring_attention import PASS_ON
from actorflow_compiler.graph.graph import call_of
from actorflow_compiler.infer.inner_decompositions import BODIES
from actorflow_compiler.infer.inner_signatures import decompose, inner_cost
from actorflow_compiler.infer.ring_decompositions import RING_BODIES, ring_cost
from actorflow_compiler.signatures import OpCall, Signature, local_op, shard, signatures, unshard
from actorflow_compiler.signatures.inner import LINES
from actorflow_compiler.signatures.ring_signatures import WRITTEN_OUT
from signature_checks import Instance, close, instance, meta, run
from signature_samples import f

ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"
INFINITE = [-math.inf] * 7
ROWS = torch.tensor([[0.0, -math.inf, 3.0, 1.0, -math.inf, 2.0, 0.5], INFINITE, [1e4, -1e4, 0.0, 9e3, 1.0, 2.0, 1e4]])


def inner(case: Instance, parts: Parts) -> list[Signature]:
    return [s for s in signatures(case.call, parts, inner=True) if s.inner]


def on_parts(case: Instance, signature: Signature, parts: Parts) -> list[Tensor]:
    """Run the body of an op on every device, boxing as its signatures say; returns the outputs put together."""
    body = decompose(case.call, (signature,), (parts,))
    held: dict[int, tuple[list[Tensor], Sbp]] = {}

    def obtain(value: int, need: Sbp) -> list[Tensor]:
        tensors, have = held[value]
        return tensors if have == need else shard(unshard(tensors, have, parts), need, parts)

    for i, x, s in zip(body.graph.inputs, case.operands, signature.ins, strict=True):
        held[i.value] = shard(x, s, parts), s
    for n, (chosen,) in zip(body.graph.nodes, body.chosen, strict=True):
        call, operands = call_of(n, body.graph.metas)
        reads = [obtain(v, need) for v, need in zip(operands, chosen.ins, strict=True)]
        made = []
        for index in range(device_count(parts) if n.op != PASS_ON else 0):
            op, args, kwargs, metas = local_op(call, chosen, parts, index)
            outs = [r for r in run(op, args, kwargs, [r[index] for r in reads]) if r is not None]
            assert tuple(map(meta, outs)) == metas, n
            made.append(outs)
        if n.op == PASS_ON:  # around the ring
            made = [[reads[0][index - 1]] for index in range(device_count(parts))]
        used = [(o, s) for o, s in zip(n.outs, chosen.outs, strict=True) if o >= 0]
        for k, (o, layout) in enumerate(used):
            assert layout is not None
            held[o] = [outs[k] for outs in made], layout
    wanted = [s for s in signature.outs if s is not None]
    for r, s, whole in zip(body.graph.results, wanted, (x for x in case.results if x is not None), strict=True):
        for index, tensor in enumerate(obtain(r, s)):
            assert tuple(tensor.shape) == local_shape(whole.shape, s, parts, index)
    return [unshard(obtain(r, s), s, parts) for r, s in zip(body.graph.results, wanted, strict=True)]


def softmax(op: str, x: Tensor, dim: int) -> Instance:
    if "backward" in op:
        forward = torch.log_softmax if "log" in op else torch.softmax
        return instance(op, [f(*x.shape).to(x.dtype), forward(x, dim), dim, x.dtype])
    return instance(op, [x, dim] if "safe" in op else [x, dim, False])


def layer_norm(backward: bool, shape: tuple[int, ...], normal: int, affine: bool) -> Instance:
    x, w, b = f(*shape) + 3.0, f(*shape[-normal:]), f(*shape[-normal:])
    last = list(shape[-normal:])
    args: list[Any] = [x, last, w if affine else None, b if affine else None]
    if not backward:
        return instance("aten.native_layer_norm.default", [*args, 1e-5])
    _, mean, inverse = torch.ops.aten.native_layer_norm(*args, 1e-5)
    mask = [True, affine, affine]
    return instance(
        "aten.native_layer_norm_backward.default", [f(*shape), x, last, mean, inverse, *args[2:], mask], used=mask
    )


def rms_norm() -> list[Instance]:
    """Forward, without a weight or an epsilon, too; and backward, which CPUs have no kernel for: by autograd."""
    x, w, grad = f(5, 3, 7).requires_grad_(), f(7).requires_grad_(), f(5, 3, 7)
    gradients = torch.autograd.grad(F.rms_norm(x, [7], w, 1e-5), [x, w], grad)
    x, w = x.detach(), w.detach()
    forward = [
        instance("aten._fused_rms_norm.default", [x, [7], *rest]) for rest in ((w, 1e-5), (None, 0.1), (w, None))
    ]
    _, inverse = forward[0].results
    assert inverse is not None
    operands = (grad, x, inverse, w)
    args = (Ref(0), Ref(1), (7,), Ref(2), Ref(3), (True, True))
    call = OpCall(
        "aten._fused_rms_norm_backward.default", args, (), *(tuple(map(meta, t)) for t in (operands, gradients))
    )
    return [*forward, Instance(call, operands, gradients)]


def attention(q: Tensor, keys: int, heads: int, causal: bool, mask: Tensor | None = None) -> tuple[Instance, Instance]:
    """Attention, and its gradients."""
    k, v = (f(q.shape[0], heads, keys, q.shape[3]).to(q.dtype) for _ in range(2))
    kwargs = {"attn_mask": mask, "scale": 0.3}
    forward = instance(f"{ATTENTION}.default", [q, k, v, 0.0, causal], kwargs)
    grad = f(*q.shape).to(q.dtype)
    args = [grad, q, k, v, *forward.results, 0.0, causal]
    return forward, instance(f"{ATTENTION}_backward.default", args, kwargs)


def masks(rows: int, keys: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Masks of all forms, some of whose rows hide everything, or all of one part of the keys."""
    least = torch.finfo(dtype).min
    every = torch.where(f(2, 4, rows, keys) > 0, 0.0, -math.inf)
    every[:, :, 1], every[:, :, 2, keys // 2 :], every[:, :, 3, : keys // 2] = -math.inf, -math.inf, -math.inf
    padded = torch.zeros(2, 1, 1, keys)
    padded[1, ..., keys // 3 :] = -math.inf
    low = torch.zeros(2, 1, rows, keys, dtype=dtype)
    low[:, :, 0], low[:, :, 1, : keys // 2], low[:, :, 2, keys // 2 :], low[:, :, 3] = least, least, least, -math.inf
    low[:, :, 4, : keys - 1], low[:, :, 4, keys - 1] = -math.inf, least
    shared = f(rows, keys)
    found = {"every": every, "padded": padded, "low": low, "shared": shared, "one for all": shared[None, None, :1]}
    return {name: mask.to(dtype) for name, mask in found.items()}


def samples() -> dict[str, Instance]:
    found = {}
    for op in ("_softmax", "_log_softmax", "_safe_softmax", "_softmax_backward_data", "_log_softmax_backward_data"):
        for shape, dim in (((5, 7), -1), ((3, 4, 6), 1), ((3,), 0)):
            found[f"{op} {shape}"] = softmax(f"aten.{op}.default", f(*shape) * 5, dim)
        if "backward" not in op:
            found[f"{op} masked and large"] = softmax(f"aten.{op}.default", ROWS, 1)
        found[f"{op} bf16"] = softmax(f"aten.{op}.default", (f(5, 7) * 5).bfloat16(), 1)
    for op in ("amax", "amin", "logsumexp"):
        for dims, keep in (([1], False), ([0, -1], True), ([0, 1, 2], False)):
            found[f"{op} {dims} {keep}"] = instance(f"aten.{op}.default", [f(5, 3, 7), dims, keep])
    found["amax of all"] = instance("aten.amax.default", [f(5, 7)])
    found["logsumexp masked"] = instance("aten.logsumexp.default", [ROWS, [1]])
    ties = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0], [math.nan, 1.0, 2.0, math.nan, 0.0], [-math.inf] * 5])
    for op in ("argmax", "argmin"):
        found[op] = instance(f"aten.{op}.default", [ties, 1])
        found[f"{op} first"] = instance(f"aten.{op}.default", [f(7, 4), 0, True])
    for op in ("max.dim", "min.dim"):
        found[op] = instance(f"aten.{op}", [ties, -1])
        found[f"values of {op}"] = instance(f"aten.{op}", [f(3, 4, 5), 1, True], used=[True, False])
    for shape, normal, affine in (((5, 3, 6), 1, True), ((2, 5), 1, False), ((4, 3, 5), 2, True), ((7,), 1, True)):
        found[f"layer_norm {shape}"] = layer_norm(False, shape, normal, affine)
        found[f"layer_norm_backward {shape}"] = layer_norm(True, shape, normal, affine)
    for length, keys, heads, causal, dtype in (
        (12, 12, 4, True, torch.float64), (11, 11, 2, True, torch.float64), (11, 7, 4, False, torch.float64),
        (6, 12, 1, False, torch.float64), (12, 12, 4, True, torch.bfloat16), (11, 11, 2, False, torch.bfloat16),
    ):  # fmt: skip
        name = f"attention {length} {keys} {heads} {causal} {dtype}"
        found[name], found[f"{name} backward"] = attention(f(2, 4, length, 8).to(dtype), keys, heads, causal)
    for length, keys, dtype in ((12, 12, torch.float64), (11, 7, torch.float64), (11, 11, torch.bfloat16)):
        for name, mask in masks(length, keys, dtype).items():
            name = f"attention {length} {keys} {dtype} masked: {name}"
            q = f(2, 4, length, 8).to(dtype)
            found[name], found[f"{name} backward"] = attention(q, keys, 4, False, mask)
    for k, case in enumerate(rms_norm()):
        found[f"rms_norm {k}"] = case
    return found


SAMPLES = samples()


def test_every_line_has_a_body_and_a_sample() -> None:
    bodies = BODIES.keys() | RING_BODIES.keys()
    assert LINES.keys() | WRITTEN_OUT == bodies == {case.call.op for case in SAMPLES.values()}


BY_WEIGHTS = [pytest.param(weights, marks=pytest.mark.slow) for weights in ((2, 1), (1, 2))]


def tolerance(case: Instance, result: Tensor) -> float:
    """What rounding may change of a result, as a share of the largest: what a kernel keeps in float32 of operands of 16
    bits (the logarithm of a softmax's sum, say), it adds up in as few bits as the CPU's instructions are for.
    """
    if result.dtype == torch.float32 and any(x.dtype == torch.bfloat16 for x in case.operands):
        return 1e-4
    return {torch.float64: 1e-10, torch.bfloat16: 1e-2}.get(result.dtype, 1e-6)


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("parts", [2, 3, *BY_WEIGHTS], ids=str)
@pytest.mark.parametrize("name", SAMPLES)
def test_an_op_written_out_gives_on_parts_what_the_whole_op_gives(name: str, parts: Parts) -> None:
    case = SAMPLES[name]
    found = inner(case, parts)
    if not isinstance(parts, int) and case.call.op in WRITTEN_OUT:
        assert not found
    else:
        assert found or max(n for m in case.call.ins for n in m.shape) < parts
    for s in found:
        expected = [x for x in case.results if x is not None]
        for ours, theirs in zip(on_parts(case, s, parts), expected, strict=True):
            assert close(ours, theirs, tolerance(case, theirs)), (name, s)


def test_only_a_dim_of_which_every_device_gets_some_is_split_inside() -> None:
    case = softmax("aten._softmax.default", f(5, 3), 1)
    assert [str(s) for s in inner(case, 3)] == ["S(1) -> S(1)"]
    assert not inner(case, 4)
    assert not inner(case, 1)
    assert all(not s.inner for s in signatures(case.call, 3))


@pytest.mark.parametrize("parts", [2, 3, (2, 1), (1, 9)], ids=str)
def test_a_softmax_over_a_split_vocabulary_moves_two_numbers_for_each_row(parts: Parts) -> None:
    rows, row = 6, 6 * 8
    forward = softmax("aten._log_softmax.default", f(rows, 101), 1)
    backward = softmax("aten._log_softmax_backward_data.default", f(rows, 101), 1)
    others = device_count(parts) - 1
    maxima, total = others * even_shares(parts) * row, 2 * others * row  # a maximum for each part of a weight
    assert inner_cost(forward.call, inner(forward, parts)[0], parts) == (maxima + total, 2)
    assert inner_cost(backward.call, inner(backward, parts)[0], parts) == (total, 1)
    plain = next(s for s in signatures(forward.call, parts) if s.ins == (Split(0),))
    assert inner_cost(forward.call, plain, parts) == (0, 0)


@pytest.mark.parametrize("devices", [2, 3])
def test_the_cost_of_a_ring_is_that_of_its_blocks(devices: int) -> None:
    for case in attention(f(2, 4, 12, 8), 12, 2, True):
        (signature,) = inner(case, devices)
        ((moved, times),) = decompose(case.call, (signature,), (devices,)).costs
        cost = ring_cost(case.call, devices)
        assert (cost.moved, 2 * cost.times) == (moved, times)  # keys and values leave together


def test_a_layer_norm_over_split_features_moves_statistics_only() -> None:
    forward, backward = (layer_norm(b, (6, 101), 1, True) for b in (False, True))
    for case in (forward, backward):
        moved, times = inner_cost(case.call, inner(case, 2)[0], 2)
        assert (moved, times) == (2 * 2 * 6 * 8, 2)
    weight = [
        m.shape for m, s in zip(backward.call.outs, inner(backward, 2)[0].outs, strict=True) if m and s == Split(0)
    ]
    assert weight == [(101,), (101,)]
