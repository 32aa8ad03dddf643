"""Small calls of every op in the table: uneven, with sizes of 1, broadcast, with all sorts of arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.custom_ops.causal_attention import causal_attention
from actorflow_compiler.custom_ops.ring_attention import ring_attention
from signature_samples_more import MORE
from signature_values import b, f, n, seed

Call = tuple[list[Any], dict[str, Any]]
SHAPES: tuple[tuple[int, ...], ...] = ((5, 7), (1, 4, 2), (6,), ())


def calls(op: str) -> list[Call]:
    """The sample calls of an op by its short name, the same each time; raises KeyError where there are none."""
    found = []
    short = op.removeprefix("aten.").removesuffix(".default")
    seed(short)
    for call in _calls(short):
        args, kwargs = call if isinstance(call, tuple) else (call, {})
        found.append((args, kwargs))
    return found


def has_calls(op: str) -> bool:
    """Whether there are sample calls of an op."""
    short = op.removeprefix("aten.").removesuffix(".default")
    known = (UNARY, SCALAR, BINARY, GRADIENT, SAMPLES)
    return any(short in names for names in known) or short.partition(".")[0] in COMPARE


def words(text: str) -> list[str]:
    """A list of names."""
    return text.split()


UNARY = words(
    "abs acos acosh asin asinh atan atanh ceil celu cos cosh digamma elu erf erfc erfinv exp exp2 expm1 floor "
    "full_like gelu hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu lgamma log log10 log1p log2 "
    "logit mish nan_to_num ones_like reciprocal relu round rsqrt sgn sigmoid sign silu sin sinh softplus softshrink "
    "hardshrink sqrt square tan tanh threshold trunc zeros_like empty_like zero neg clone alias detach lift_fresh "
    "lift_fresh_copy positive log_sigmoid_forward"
)
SCALAR: dict[str, tuple[Any, ...]] = {
    "full_like": (2.0,),
    "threshold": (0.1, 0.5),
    "clamp_max": (0.2,),
    "clamp_min": (0.2,),
    "fill.Scalar": (3.0,),
    "fmod.Scalar": (0.4,),
    "remainder.Scalar": (0.4,),
    "pow.Tensor_Scalar": (3,),
    "div.Scalar_mode": (0.3,),
    "mul.Scalar": (0.3,),
    "div.Scalar": (0.3,),
    "add.Scalar": (0.3,),
    "sub.Scalar": (0.3,),
    "rsub.Scalar": (0.3,),
}
BINARY = words(
    "atan2 clamp_max.Tensor clamp_min.Tensor copysign.Tensor floor_divide fmod.Tensor hypot logaddexp max.other "
    "maximum min.other minimum pow.Tensor_Tensor remainder.Tensor xlogy.Tensor add.Tensor sub.Tensor rsub.Tensor "
    "mul.Tensor div.Tensor copy"
)
COMPARE = words("eq ge gt le lt ne")
GRADIENT = words(
    "gelu_backward silu_backward mish_backward sigmoid_backward tanh_backward threshold_backward hardtanh_backward "
    "hardsigmoid_backward hardswish_backward leaky_relu_backward softplus_backward softshrink_backward "
    "hardshrink_backward elu_backward log_sigmoid_backward native_dropout_backward"
)
GRADIENT_ARGS: dict[str, tuple[Any, ...]] = {
    "threshold_backward": (0.1,),
    "hardtanh_backward": (-0.5, 0.5),
    "leaky_relu_backward": (0.1, False),
    "softplus_backward": (1.0, 20.0),
    "softshrink_backward": (0.5,),
    "hardshrink_backward": (0.5,),
    "native_dropout_backward": (2.0,),
}


def _calls(op: str) -> Iterator[Any]:
    if op in UNARY or op in SCALAR:
        low, high = (1.1, 2.0) if op == "acosh" else (0.05, 0.95)
        for shape in SHAPES:
            yield (
                [f(*shape, low=low, high=high), *SCALAR.get(op, ())],
                {"rounding_mode": "floor"} if op == "div.Scalar_mode" else {},
            )
        if op == "nan_to_num":
            yield [f(5, 7).log()]
        if op in ("add.Scalar", "sub.Scalar", "rsub.Scalar"):
            yield [f(5, 3), 0.0]
    elif op in BINARY:
        for x, y in (((5, 7), (5, 7)), ((3, 1, 4), (3, 5, 1)), ((5, 7), (7,)), ((6,), ())):
            if op != "copy" or x != (3, 1, 4):
                yield [f(*x, low=0.1), f(*y, low=0.3)]
        if op in ("add.Tensor", "sub.Tensor"):
            yield [f(5, 3), f(5, 3)], {"alpha": 2.5}
            yield [f(5, 3), 2.0]
            yield [f(5, 3), n(5, 3, below=4)]
        if op in ("mul.Tensor", "div.Tensor"):
            yield [f(5, 3), 2.0]
    elif op.partition(".")[0] in COMPARE:
        yield [n(5, 7, below=3), n(5, 7, below=3) if op.endswith("Tensor") else 1]
        yield [n(5, 7, below=3), n(7, below=3) if op.endswith("Tensor") else 2]
    elif op in GRADIENT:
        args = list(GRADIENT_ARGS.get(op, ()))
        for shape in SHAPES:
            x = b(*shape) if op == "native_dropout_backward" else f(*shape)
            y = (
                [1.0, 1.0, 1.0, False, x]
                if op == "elu_backward"
                else [x, f(*shape)]
                if op == "log_sigmoid_backward"
                else [x, *args]
            )
            yield [f(*shape), *y]
    else:
        yield from SAMPLES[op]()


def _softmax_like(backward: bool) -> Iterator[Any]:
    for shape, dim in (((5, 7), -1), ((3, 4, 6), 1), ((7,), 0), ((2, 3), 1)):
        x = f(*shape)
        yield [f(*shape), torch.softmax(x, dim), dim, torch.float64] if backward else [x, dim, False]


def _reduce(*rest: Any, dims: tuple[Any, ...] = ([1], [-1], [0], [0, 1])) -> Iterator[Any]:
    for dim in dims:
        for keep in (False, True):
            yield [f(5, 7, 3), *rest, dim, keep]
            yield [f(2, 1, 3), *rest, dim, keep]


def _one_dim(*rest: Any) -> Iterator[Any]:
    return _reduce(*rest, dims=(0, 1, -1))


def _var(*, both: tuple[Any, ...] = ([1], [0, 2], None)) -> Iterator[Any]:
    for dim in both:
        yield [f(5, 7, 3), dim], {"correction": 1, "keepdim": dim is not None}


def _arg_reduce() -> Iterator[Any]:
    yield from _one_dim()
    yield [f(5, 7)]


def _attention(backward: bool) -> Iterator[Any]:
    for batch, heads, groups, s, t, causal, mask in (
        (5, 3, 3, 4, 4, True, None),
        (2, 6, 6, 5, 7, False, None),
        (3, 4, 4, 5, 6, False, (3, 4, 5, 6)),
        (3, 4, 4, 5, 6, False, (3, 1, 5, 6)),
        (3, 2, 2, 5, 6, False, (5, 6)),
        (1, 5, 5, 3, 3, True, None),
        (2, 6, 3, 4, 4, True, None),
    ):
        q, k, v = f(batch, heads, s, 8), f(batch, groups, t, 8), f(batch, groups, t, 8)
        kwargs = {"attn_mask": None if mask is None else f(*mask), "scale": 0.3}
        if not backward:
            yield [q, k, v, 0.0, causal], kwargs
            continue
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, **kwargs)
        yield [f(*out.shape), q, k, v, out, lse, 0.0, causal], kwargs


def _causal_attention(backward: bool) -> Iterator[Any]:
    """Some of the queries: the first of all, some in the middle, and some behind the last key."""
    for batch, heads, groups, t, rows in (
        (5, 3, 3, 6, ((0, 4),)),
        (2, 6, 3, 9, ((2, 5),)),
        (3, 4, 4, 6, ((4, 5),)),
        (1, 2, 2, 3, ((5, 4),)),
        (2, 3, 3, 8, ((1, 2), (5, 3))),
    ):
        q = f(batch, heads, sum(count for _, count in rows), 8)
        k, v = f(batch, groups, t, 8), f(batch, groups, t, 8)
        if not backward:
            yield [q, k, v, rows, 0.3]
            continue
        out, sums = causal_attention(q, k, v, rows, 0.3)
        yield [f(*out.shape), q, k, v, out, sums, rows, 0.3]


def _ring_attention(backward: bool) -> Iterator[Any]:
    """The first step, and one after it, in which a device has no keys or another all of them; with masks, too."""
    for batch, heads, groups, blocks, mask in (
        (5, 3, 3, (3, 0, 0, 2, 0, 3), None),
        (2, 6, 3, (3, 1, 0), None),
        (3, 4, 4, (0, 0, 0, 3, 0, 0), None),
        (2, 4, 2, (2, 1, 0, 3, 0, 2, 0, 0, 5), None),
        (1, 3, 3, (3, 0, 0), None),
        (2, 3, 3, (3, 0, 0, 2, 0, 3), (2, 3, 8, 5)),
        (2, 3, 3, (3, 0, 2), (2, 1, 1, 5)),
    ):
        devices = len(blocks) // 3
        q, (k, v) = f(batch, heads, 4 * devices, 8), (f(batch, groups, 3 * devices, 8) for _ in range(2))
        masked = None if mask is None else f(*mask)
        top = None if masked is None else masked.amax(-1)
        out, sums = ring_attention(q, k, v, None, None, None, None, (3, 0, 0) * devices, 0.3)
        first = blocks[0] == 3
        if not backward:
            yield [q, k, v, *((None, None) if first else (out, sums)), masked, top, blocks, 0.3]
            continue
        yield [f(*out.shape), q, k, v, out, sums, None if first else f(*q.shape), masked, blocks, 0.3]


def _evened(back: bool) -> Iterator[Any]:
    for shape, rows in (((5, 3, 5, 4), (3, 2)), ((2, 6, 4), (2, 1, 1)), ((1, 4, 3, 2), (3,))):
        most = max(rows)
        yield [f(*shape[:2], most * len(rows) if back else shape[2], *shape[3:]), rows, most]


def _layer_norm(backward: bool) -> Iterator[Any]:
    for shape, normal, affine in (
        ((5, 3, 6), [6], True),
        ((2, 5), [5], True),
        ((5, 6), [6], False),
        ((3, 4, 2, 5), [2, 5], True),
        ((4,), [4], True),
    ):
        x = f(*shape)
        w, bias = (f(*normal), f(*normal)) if affine else (None, None)
        if not backward:
            yield [x, normal, w, bias, 1e-5]
            continue
        _, mean, rstd = torch.ops.aten.native_layer_norm(x, normal, w, bias, 1e-5)
        yield [f(*shape), x, normal, mean, rstd, w, bias, [True, affine, affine]]


def _rms_norm(backward: bool) -> Iterator[Any]:
    x, w = f(5, 3, 6), f(6)
    if not backward:
        yield [x, [6], w, 1e-5]
        return
    _, rstd = torch.ops.aten._fused_rms_norm(x, [6], w, 1e-5)
    yield [f(5, 3, 6), x, [6], rstd, w, [True, True]]


def _group_norm(backward: bool) -> Iterator[Any]:
    for batch in (5, 2):
        x, w, bias = f(batch, 6, 3, 2), f(6), f(6)
        if not backward:
            yield [x, w, bias, batch, 6, 6, 3, 1e-5]
            continue
        _, mean, rstd = torch.ops.aten.native_group_norm(x, w, bias, batch, 6, 6, 3, 1e-5)
        yield [f(batch, 6, 3, 2), x, mean, rstd, w, batch, 6, 6, 3, [True, True, True]]


def _batch_norm(op: str) -> Iterator[Any]:
    for batch, channels, space in ((5, 3, ()), (2, 3, (3,)), (5, 2, (3, 2))):
        for training in (True, False):
            x = f(batch, channels, *space)
            statistics = [f(channels), f(channels, low=0.5)]
            if op == "legit_none":
                yield [x, f(channels), f(channels), training, 0.1, 1e-5]
            elif op != "backward":
                yield [x, f(channels), f(channels), *statistics, training, 0.1, 1e-5]
            else:
                _, mean, inv = torch.ops.aten.native_batch_norm(
                    x, f(channels), f(channels), *[s.clone() for s in statistics], training, 0.1, 1e-5
                )
                yield [f(*x.shape), x, f(channels), *statistics, mean, inv, training, 1e-5, [True, True, True]]


def _convolution(backward: bool) -> Iterator[Any]:
    for x, w, bias, stride, padding, transposed, groups in (
        ((5, 3, 6, 5), (4, 3, 3, 2), True, [1, 1], [1, 0], False, 1),
        ((2, 2, 4, 4), (2, 2, 2, 2), True, [1, 1], [0, 0], False, 1),
        ((2, 5, 7), (3, 5, 3), False, [2], [1], False, 1),
        ((3, 4, 5, 5), (6, 2, 3, 3), True, [1, 1], [1, 1], False, 2),
        ((3, 4, 5, 5), (4, 5, 3, 3), True, [2, 2], [1, 1], True, 1),
    ):
        out_channels = w[1] if transposed else w[0]
        rest = [stride, padding, [1] * len(stride), transposed, [0] * len(stride), groups]
        args = [f(*x), f(*w), f(out_channels) if bias else None, *rest]
        if not backward:
            yield args
            continue
        grad = f(*torch.ops.aten.convolution(*args).shape)
        for mask in ([True, True, False], [True, True, True]):
            yield [grad, args[0], args[1], [out_channels], *rest, mask], {}


def _pool(op: str) -> Iterator[Any]:
    for shape in ((5, 3, 6, 7), (3, 6, 4), (2, 5, 4, 4), (3, 2, 4, 4)):
        x = f(*shape)
        if op == "adaptive":
            yield [x, [2, 3]]
        elif op == "adaptive_backward":
            yield [f(*shape[:-2], 2, 3), x]
        elif op == "average":
            yield [x, [2, 2], [2, 1], [1, 0]]
        elif op == "average_backward":
            y = torch.ops.aten.avg_pool2d(x, [2, 2], [2, 1], [1, 0])
            yield [f(*y.shape), x, [2, 2], [2, 1], [1, 0], False, True, None]
        else:
            y, at = torch.ops.aten.max_pool2d_with_indices(x, [3, 2], [2, 2], [1, 0])
            yield (
                [x, [3, 2], [2, 2], [1, 0]]
                if op == "max"
                else [f(*y.shape), x, [3, 2], [2, 2], [1, 0], [1, 1], False, at]
            )


def _upsample(op: str) -> Iterator[Any]:
    x = f(5, 2, 4, 3)
    tail = [] if "nearest" in op else [False]
    if op.endswith("vec"):
        yield [x, None, *tail, [2.0, 2.0]]
    elif op.endswith("backward"):
        yield [f(5, 2, 8, 6), [8, 6], [5, 2, 4, 3], *tail]
    else:
        yield [x, [8, 6], *tail]


def _losses(backward: bool, dims: int) -> Iterator[Any]:
    for batch in (5, 1, 2):
        shape = (batch, 6, 3, 2)[: 2 + dims]
        x, t = torch.log_softmax(f(*shape), 1), n(*shape[:1], *shape[2:], below=6)
        t[0] = -100
        for reduction in (2, 0, 1):
            for w in (None, f(6, low=0.2)):
                if not backward:
                    yield [x, t, w, reduction, -100]
                    continue
                grad = f(*t.shape) if reduction == 0 else f()
                yield [grad, x, t, w, reduction, -100, torch.full((1,), 4.0, dtype=torch.float64)]


def _picks(backward: bool) -> Iterator[Any]:
    for shape, dim, first in (((5, 7), 1, 0), ((2, 3, 5), 1, 2), ((3, 4, 5, 2), 1, 0), ((4, 6), 0, 1), ((7,), 0, 0)):
        size = shape[dim]
        target = n(*shape[:dim], *shape[dim + 1 :], below=first + size + 2)
        target.view(-1)[0] = -100
        where = [dim, -100, first, first + size + 2]
        yield [f(*target.shape), target, size, *where] if backward else [f(*shape), target, *where]


def _least_squares() -> Iterator[Any]:
    for batch, driver in (((), "gelsy"), ((5,), "gelsd"), ((2, 3), "gels"), ((3,), "gelss")):
        yield [f(*batch, 6, 4), f(*batch, 6, 2), None, driver]


def _aligned(backward: bool) -> Iterator[Any]:
    for batch, padded in ((5, True), (2, True), (3, False)):
        log_probs = f(9, batch, 4).log_softmax(-1)
        labels = 1 + (n(batch, 3, below=3) if padded else n(3 * batch, below=3))
        times, lengths = 9 - n(batch, below=2), torch.full((batch,), 3) - (n(batch, below=2) if padded else 0)
        given = [log_probs, labels, times, lengths]
        loss, alpha = torch.ops.actorflow.ctc(*given, 0, False)
        yield [f(batch), *given, loss, alpha, 0, False] if backward else [*given, 0, False]


def _views() -> Iterator[Any]:
    for x, y in (
        ((5, 3, 4), (15, 4)),
        ((15, 4), (5, 3, 4)),
        ((5, 12), (5, 3, 4)),
        ((5, 3, 4), (5, 12)),
        ((6, 4), (2, 12)),
        ((6, 4), (4, 6)),
        ((5, 1, 6), (5, 6)),
        ((4, 6, 5), (6, 20)),
        ((5, 3, 2, 4), (15, 8)),
        ((1, 5), (5, 1)),
        ((), (1, 1)),
        ((5, 6), (30,)),
        ((7, 6), (7, 3, 2)),
        ((0, 3), (3, 0)),
        ((2, 6), (2, 2, 3)),
        ((2, 4, 2), (8, 2)),
        ((5, 4, 6, 3), (20, 18)),
        ((12, 5), (3, 2, 2, 5)),
    ):
        yield [f(*x), list(y)]


def _slices() -> Iterator[Any]:
    for args in (
        [0, 1, 4],
        [1],
        [1, 0, 2],
        [1, 2, 4],
        [1, 4, 9223372036854775807],
        [1, -2, 6],
        [0, 1, 9, 2],
        [1, 0, 3],
        [-1, 3, 6],
    ):
        yield [f(5, 6), *args]


def _slice_backward() -> Iterator[Any]:
    for dim, lo, hi, step in (
        (0, 1, 4, 1),
        (1, 0, 6, 1),
        (1, 0, 2, 1),
        (1, 2, 4, 1),
        (1, 3, 6, 1),
        (0, 0, 5, 2),
        (1, 0, 9223372036854775807, 1),
    ):
        x = f(5, 6)
        shape = torch.ops.aten.slice.Tensor(x, dim, lo, hi, step).shape
        yield [f(*shape), [5, 6], dim, lo, hi, step]


def _index(put: bool) -> Iterator[Any]:
    cases: tuple[tuple[tuple[int, ...], list[Tensor | None]], ...] = (
        ((5, 7), [n(6, below=5)]),
        ((5, 7), [None, n(3, 2, below=7)]),
        ((5, 7, 3), [n(6, below=5), n(6, below=7)]),
        ((5, 7, 3), [n(6, below=5), None, n(6, below=3)]),
        ((5, 7, 3), [None, n(6, 1, below=7), n(4, below=3)]),
        ((5, 7), [n(below=5)]),
        ((2, 7), [None, n(2, below=7)]),
    )
    for shape, positions in cases:
        x = f(*shape)
        if not put:
            yield [x, positions]
            continue
        shape = torch.ops.aten.index.Tensor(x, positions).shape
        for accumulate in (True, False):
            yield [x, positions, f(*shape) if accumulate else f(), accumulate]
        yield [x, positions, f(*shape[1:]), True]


def _put_plain() -> Iterator[Any]:
    for args in _index(True):
        if len(args[1]) == 1:
            yield args


def _optimizer(states: int, rest: list[Any], *, step: bool) -> Iterator[Any]:
    for shape in ((5, 7), (2,), ()):
        for found in (None, torch.tensor(0.0), torch.tensor(1.0)):  # whether an infinity was found
            tensors = [f(*shape, low=0.1) for _ in range(2 + states)]
            yield [*tensors, *([torch.tensor(3.0)] if step else []), *rest, found]


SAMPLES: dict[str, Any] = {
    **MORE,
    "bitwise_not": lambda: [[b(5, 3)], [n(6, below=9)]],
    "logical_not": lambda: [[b(5, 3)], [f(6)]],
    "bitwise_and.Scalar": lambda: [[n(5, 3, below=9), 3]],
    "bitwise_or.Scalar": lambda: [[n(5, 3, below=9), 3]],
    "bitwise_xor.Scalar": lambda: [[n(5, 3, below=9), 3]],
    "pow.Scalar": lambda: [[2.0, f(5, 3)]],
    "clamp": lambda: [[f(5, 7), -0.5, 0.5], [f(5), None, 0.5]],
    "clamp.Tensor": lambda: [[f(5, 7), f(7, low=-1.0, high=0.0), f(5, 1, low=0.5)], [f(5, 7), None, f(7)]],
    "fill.Tensor": lambda: [[f(5, 7), f()]],
    "div.Tensor_mode": lambda: [([f(5, 7), f(7, low=0.3)], {"rounding_mode": "floor"})],
    **{
        f"{o}.Tensor": (lambda: [[b(5, 7), b(5, 7)], [n(5, 7, below=9), n(7, below=9)]])
        for o in ("bitwise_and", "bitwise_or", "bitwise_xor")
    },
    **{o: (lambda: [[b(5, 7), b(5, 7)], [b(3, 1, 4), b(5, 1)]]) for o in ("logical_and", "logical_or", "logical_xor")},
    "_to_copy": lambda: [
        ([f(5, 7)], {"dtype": torch.float32}),
        ([n(5, 7, below=5)], {"dtype": torch.float64}),
        ([f(5)], {"dtype": torch.int64}),
    ],
    "lerp.Scalar": lambda: [[f(5, 7), f(5, 7), 0.3], [f(5, 7), f(7), 0.3]],
    "lerp.Tensor": lambda: [[f(5, 7), f(5, 7), f(7)]],
    "addcdiv": lambda: [([f(5, 7), f(5, 7), f(5, 7, low=0.5)], {"value": 0.7}), [f(5, 7), f(7), f(5, 1, low=0.5)]],
    "addcmul": lambda: [([f(5, 7), f(5, 7), f(5, 7)], {"value": 0.7}), [f(5, 7), f(7), f(5, 1)]],
    "where.self": lambda: [
        [b(5, 7), f(5, 7), f(5, 7)],
        [b(5, 1), f(7), f()],
        [b(3, 4), n(3, 4, below=9), n(4, below=9)],
    ],
    "where.ScalarOther": lambda: [[b(5, 7), f(5, 7), 1.0], [b(5, 1), f(7), 0.0]],
    "where.ScalarSelf": lambda: [[b(5, 7), 1.0, f(5, 7)], [b(5, 1), 0.0, f(7)]],
    "masked_fill.Scalar": lambda: [[f(5, 7), b(5, 7), 0.0], [f(5, 7), b(7), -torch.inf], [f(5, 7), b(5, 1), 1.0]],
    "masked_fill.Tensor": lambda: [[f(5, 7), b(5, 7), f()]],
    "mm": lambda: [[f(2, 2), f(2, 2)], [f(5, 7), f(7, 3)], [f(1, 4), f(4, 6)]],
    "bmm": lambda: [[f(2, 2, 3), f(2, 3, 2)], [f(3, 5, 7), f(3, 7, 2)]],
    "addmm": lambda: [
        [f(2), f(2, 2), f(2, 2)],
        [f(3), f(5, 7), f(7, 3)],
        [f(5, 3), f(5, 7), f(7, 3)],
        ([f(5, 1), f(5, 4), f(4, 3)], {"beta": 0.5, "alpha": 2.0}),
    ],
    "baddbmm": lambda: [[f(3, 5, 2), f(3, 5, 7), f(3, 7, 2)], ([f(3, 1, 2), f(3, 5, 7), f(3, 7, 2)], {"beta": 2.0})],
    "mv": lambda: [[f(5, 7), f(7)]],
    "addmv": lambda: [[f(5), f(5, 7), f(7)], [f(), f(5, 7), f(7)]],
    "dot": lambda: [[f(5), f(5)]],
    "linear": lambda: [[f(5, 3, 7), f(4, 7), f(4)], [f(5, 7), f(4, 7)]],
    "sum": lambda: [[f(5, 7)], [n(5, 7, below=9)], [f()]],
    "sum.dim_IntList": lambda: [
        *_reduce(),
        [f(5, 7), None],
        [f(5, 7), []],
        ([n(5, 7, below=9), [0]], {"dtype": torch.float64}),
    ],
    "nansum": lambda: [[f(5, 7).log(), [0]], *_reduce()],
    "mean.dim": lambda: _reduce(),
    **dict.fromkeys(("amax", "amin", "any.dims", "all.dims", "logsumexp"), _reduce),
    **dict.fromkeys(("any.dim", "all.dim", "prod.dim_int", "max.dim", "min.dim"), _one_dim),
    "argmax": _arg_reduce,
    "argmin": _arg_reduce,
    **dict.fromkeys(("var.correction", "std.correction", "var_mean.correction", "std_mean.correction"), _var),
    "linalg_vector_norm": lambda: [*_reduce(2), *_reduce(3.0)],
    **{o: (lambda: [[f(5, 7), 1], [f(3, 4, 5), -3], [f(2, 7), 1]]) for o in ("cumsum", "cumprod", "logcumsumexp")},
    "flip": lambda: [[f(5, 7), [0]], [f(5, 7, 2), [0, -1]]],
    "roll": lambda: [[f(5, 7), [2], [1]], [f(5, 7), [3]]],
    "sort": lambda: [[f(5, 2), 0], [f(5, 7)]],
    "sort.stable": lambda: [([f(5, 7)], {"stable": True, "dim": 0})],
    "topk": lambda: [[f(2, 7), 3], [f(5, 7), 2, 0]],
    "_softmax": lambda: _softmax_like(False),
    "_log_softmax": lambda: _softmax_like(False),
    "_safe_softmax": lambda: [[f(5, 7), -1], [f(3, 4, 5), 1]],
    "_softmax_backward_data": lambda: _softmax_like(True),
    "_log_softmax_backward_data": lambda: _softmax_like(True),
    "tril": lambda: [[f(2, 5, 5)], [f(5, 7), 1]],
    "triu": lambda: [[f(3, 5, 5)], [f(5, 7), -1]],
    "full": lambda: [[[5, 7], 2.5]],
    **{o: (lambda: [[[5, 7]], [[]]]) for o in ("zeros", "ones", "empty.memory_format")},
    "new_full": lambda: [[f(5, 7), [6, 4], 2.0]],
    **{o: (lambda: [[f(5, 7), [6, 4]]]) for o in ("new_zeros", "new_ones", "new_empty")},
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), _views),
    "t": lambda: [[f(5, 7)]],
    "transpose.int": lambda: [[f(5, 7, 3), 1, -1], [f(5, 7, 3), 0, 1]],
    "permute": lambda: [[f(5, 7, 3), [2, 0, 1]], [f(5, 4, 3, 2), [0, 2, 1, -1]]],
    "unsqueeze": lambda: [[f(5, 7), 0], [f(5, 7), -1], [f(5, 7), 1], [f(), 0]],
    "squeeze": lambda: [[f(5, 1, 2, 1)], [f(2, 3)]],
    "squeeze.dim": lambda: [[f(5, 1, 2), 1], [f(2, 3), 0]],
    "squeeze.dims": lambda: [[f(5, 1, 2, 1), [1, -1]], [f(2, 3, 1), [0, 2]]],
    "expand": lambda: [[f(5, 1), [5, 7]], [f(1, 3), [4, 5, 3]], [f(3), [-1]], [f(5, 1), [-1, 7]]],
    "repeat": lambda: [[f(2), [3]], [f(5, 3), [1, 2]], [f(5, 3), [4, 1, 1]], [f(5, 3), [2, 3]], [f(1, 3), [5, 1]]],
    "slice.Tensor": _slices,
    "slice_backward": _slice_backward,
    "slice_scatter": lambda: [[f(5, 7), f(5, 3), 1, 2, 5], [f(5, 7), f(2, 7), 0, 1, 3]],
    "select.int": lambda: [[f(5, 7), 0, 2], [f(5, 7), 1, -1], [f(5, 4, 3), 1, 0]],
    "select_backward": lambda: [[f(7), [5, 7], 0, 2], [f(5), [5, 7], 1, -1]],
    "select_scatter": lambda: [[f(5, 7), f(5), 1, 2], [f(5, 7), f(7), 0, -1]],
    "unbind.int": lambda: [[f(2, 5, 7), 1], [f(3, 5, 7)], [f(5, 3, 2), 1]],
    "split.Tensor": lambda: [[f(5, 6), 2, 1], [f(7, 3), 4], [f(5, 3), 1, 1], [f(5, 3), 3, -1], [f(5, 9), 3, 1]],
    "split.sizes": lambda: [[f(5, 6), [2, 4], 1], [f(5, 6), [3, 3], 1], [f(6, 2), [2, 2, 2]]],
    "split_with_sizes": lambda: [[f(5, 6), [2, 4], 1], [f(5, 6), [3, 3], 1], [f(6, 2), [2, 2, 2]]],
    "cat": lambda: [
        [[f(5, 2), f(5, 2)], 1],
        [[f(5, 7), f(5, 7)], 1],
        [[f(5, 3), f(5, 2)], -1],
        [[f(5, 3)] * 3],
        [[f(5, 1), f(5, 1)], 1],
        [[f(5), f(2), f(5)]],
    ],
    "stack": lambda: [
        [[f(2), f(2)]],
        [[f(5, 7), f(5, 7)], 1],
        [[f(5), f(5), f(5)]],
        [[f(), f()]],
        [[f(5, 7), f(5, 7)], -1],
    ],
    "constant_pad_nd": lambda: [
        [f(5, 7), [1, 2]],
        [f(5, 7), [0, 0, 1, 0], 0.0],
        [f(5, 7), [1, 0], 2.0],
        [f(3, 5, 6), [-1, 0]],
    ],
    "gather": lambda: [
        [f(2, 3), 1, n(2, 2, below=3)],
        [f(5, 7), 1, n(5, 3, below=7)],
        [f(5, 7), 0, n(6, 7, below=5)],
        [f(5, 7), -1, n(4, 3, below=7)],
        [f(5, 6), 1, n(5, 1, below=6)],
    ],
    "scatter.src": lambda: [
        [f(5, 7), 1, n(5, 3, below=1), f(5, 3)],
        [f(4, 3), 0, torch.arange(4).flip(0)[:, None].expand(4, 3).clone(), f(4, 3)],
    ],
    "scatter.value": lambda: [
        [f(5, 7), 1, n(5, 3, below=7), 0.0],
        [f(5, 7), 1, n(5, 1, below=7), 1.0],
        [f(5, 7), 0, n(2, 7, below=5), 0],
    ],
    "scatter_add": lambda: [
        [f(2, 3), 1, n(2, 2, below=3), f(2, 2)],
        [f(5, 7), 1, n(5, 3, below=7), f(5, 3)],
        [f(5, 7), 0, n(6, 7, below=5), f(6, 7)],
        [f(5, 7), 1, n(5, 1, below=7), f(5, 1)],
    ],
    "index_select": lambda: [[f(2, 3), 1, n(2, below=3)], [f(5, 7), 1, n(4, below=7)], [f(5, 7), 0, n(6, below=5)]],
    "index_add": lambda: [[f(5, 7), 1, n(4, below=7), f(5, 4)], ([f(5, 7), 0, n(6, below=5), f(6, 7)], {"alpha": 2.0})],
    "index.Tensor": lambda: _index(False),
    "_unsafe_index.Tensor": lambda: _index(False),
    "index_put": lambda: _index(True),
    "_unsafe_index_put": lambda: _index(True),
    "_index_put_impl": _put_plain,
    "embedding": lambda: [[f(7, 5), n(3, 4, below=7)], [f(5, 6), n(3, below=5), 2], [f(2, 3), n(1, 4, below=2)]],
    "embedding_dense_backward": lambda: [
        [f(3, 4, 5), n(3, 4, below=7), 7, -1, False],
        [f(6, 5), n(6, below=5), 5, 2, False],
        [f(6, 5), torch.tensor([2, 0, 2, 1, 2, 0]), 5, 4, True],
    ],
    "actorflow.uniform": lambda: [
        [(5, 6), (((0, 5),), ((0, 6),)), 1, f(low=1, high=99), None, None, torch.float32, torch.device("cpu")],
        [(7, 2, 3), (((0, 7),), ((0, 2),), ((0, 3),)), 2, 7, None, None, torch.int64, torch.device("cpu")],
    ],
    "_standard_gamma_grad": lambda: [[f(5, 6, low=0.5, high=3), f(5, 6, low=0.5, high=3)]],
    "_dirichlet_grad": lambda: [[f(5, 6, low=0.1, high=0.5), f(5, 6, low=0.5, high=3), f(5, 6, low=9, high=10)]],
    "actorflow.poisson_quantile": lambda: [[f(5, 6, low=0, high=9), f(5, 6, low=0, high=1)]],
    "actorflow.binomial_quantile": lambda: [
        [n(5, 6, below=20).double(), f(5, 6, low=0, high=1), f(5, 6, low=0, high=1)]
    ],
    "actorflow.embedding_part": lambda: [[f(5, 3), n(4, 2, below=12), 4, 12]],
    "actorflow.embedding_part_backward": lambda: [[f(4, 2, 3), n(4, 2, below=12), 4, 5, 6]],
    "actorflow.grouped_mm": lambda: [
        [f(7, 4), f(3, 4, 5), n(7, below=9), 4, 9],
        [f(6, 4), f(5, 4, 3), n(6, below=6), 0, 5],
    ],
    "actorflow.grouped_mm_weight": lambda: [
        [f(7, 4), f(7, 5), n(7, below=9), 4, 3, 9],
        [f(6, 4), f(6, 3), n(6, below=6), 0, 5, 5],
    ],
    "_scaled_dot_product_flash_attention_for_cpu": lambda: _attention(False),
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda: _attention(True),
    "actorflow.causal_attention": lambda: _causal_attention(False),
    "actorflow.causal_attention_backward": lambda: _causal_attention(True),
    "actorflow.ring_attention": lambda: _ring_attention(False),
    "actorflow.ring_attention_backward": lambda: _ring_attention(True),
    "actorflow.pass_on": lambda: [
        [f(5, 3, 6, 4), f(5, 3, 4), 2],
        [f(2, 3, 6, 4), f(2, 6, 8, 5), 3],
        [f(1, 4, 3, 2), f(1, 4, 3), 1],
    ],
    "actorflow.even_out": lambda: _evened(False),
    "actorflow.cut_back": lambda: _evened(True),
    "native_layer_norm": lambda: _layer_norm(False),
    "native_layer_norm_backward": lambda: _layer_norm(True),
    "_fused_rms_norm": lambda: _rms_norm(False),
    "_fused_rms_norm_backward": lambda: _rms_norm(True),
    "native_group_norm": lambda: _group_norm(False),
    "native_group_norm_backward": lambda: _group_norm(True),
    "native_batch_norm": lambda: _batch_norm("plain"),
    "_native_batch_norm_legit": lambda: _batch_norm("plain"),
    "_native_batch_norm_legit_functional": lambda: _batch_norm("plain"),
    "_native_batch_norm_legit.no_stats": lambda: [c for c in _batch_norm("legit_none") if c[3]],
    "native_batch_norm_backward": lambda: _batch_norm("backward"),
    "convolution": lambda: _convolution(False),
    "convolution_backward": lambda: _convolution(True),
    "max_pool2d_with_indices": lambda: _pool("max"),
    "max_pool2d_with_indices_backward": lambda: _pool("max_backward"),
    "avg_pool2d": lambda: _pool("average"),
    "avg_pool2d_backward": lambda: _pool("average_backward"),
    "_adaptive_avg_pool2d": lambda: _pool("adaptive"),
    "_adaptive_avg_pool2d_backward": lambda: _pool("adaptive_backward"),
    **{
        o: (lambda o=o: _upsample(o))
        for o in (
            "upsample_nearest2d.vec",
            "upsample_nearest2d",
            "upsample_bilinear2d",
            "upsample_bilinear2d.vec",
            "upsample_bicubic2d",
            "upsample_nearest2d_backward",
            "upsample_bilinear2d_backward",
            "upsample_bicubic2d_backward",
        )
    },
    "nll_loss_forward": lambda: _losses(False, 0),
    "nll_loss2d_forward": lambda: _losses(False, 2),
    "nll_loss_backward": lambda: _losses(True, 0),
    "nll_loss2d_backward": lambda: _losses(True, 2),
    "actorflow.lstsq": _least_squares,
    "actorflow.ctc": lambda: _aligned(False),
    "actorflow.ctc_backward": lambda: _aligned(True),
    "actorflow.pick": lambda: _picks(False),
    "actorflow.pick_backward": lambda: _picks(True),
    "actorflow.amax_blocks": lambda: [
        [f(5, 7), 1, (2,)],
        [f(7, 4, 3), 0, (3,)],
        [f(4, 7), 1, (2, 3)],
        [f(2, 3), 1, (3, 2)],
        [n(5, 8, below=9), 1, (3,)],
        [f(4, 7), 1, (-2, 2, 1, 2)],  # over two devices that share as 2 to 1, each over two
        [f(4, 7), 1, (0, 3, -2, 1, 3)],
    ],
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": lambda: [
        [f(*shape), torch.tensor([0.1]), torch.tensor([3], dtype=torch.int32), torch.ones(1), 0, 15]
        for shape in ((5, 7), (3, 2, 5))
    ],
    "fake_quantize_per_tensor_affine_cachemask_backward": lambda: [[f(5, 7), f(5, 7) > 0]],
    "actorflow.number": lambda: [[torch.tensor(0.5), torch.float32, torch.device("cpu")]],
    "actorflow.add_scaled": lambda: [[f(5, 7), f(5, 7), torch.tensor(0.5)]],
    "actorflow.lerp_to": lambda: [[f(5, 7), f(5, 7), torch.tensor(0.25)]],
    "actorflow.addcmul_scaled": lambda: [[f(5, 7), f(5, 7), f(5, 7), torch.tensor(0.5)]],
    "actorflow.addcdiv_scaled": lambda: [[f(5, 7), f(5, 7), f(5, 7).abs() + 1, torch.tensor(0.5)]],
    "actorflow.finite": lambda: [[f(5, 7)], [f(2)], [f()], [torch.tensor([1.0, float("inf"), 2.0, 3.0, float("nan")])]],
    "actorflow.adam": lambda: _optimizer(3, [0.1, 0.01, 0.9, 0.99, 1e-8, False, True], step=True),
    "actorflow.sgd": lambda: _optimizer(1, [0.1, 0.01, 0.9, 0.1, True, False, False], step=False),
    "actorflow.adagrad": lambda: _optimizer(1, [0.1, 0.01, 0.001, 1e-8, False], step=True),
    "actorflow.accumulate": lambda: [[f(5, 7)]],
    "actorflow.last": lambda: [[f(5, 7)], [n(5, below=3)]],
    "actorflow.identity": lambda: [[f(5, 7)], [n(5, below=3)]],
    "actorflow.constrain": lambda: [[f(5, 7), "S(0)", "here"], [n(5, below=3), "*", "here"]],
    "actorflow.first": lambda: [[f(5, 7), 0], [f(5, 7), 1]],
    "actorflow.unpack": lambda: [[f(15, 4), 0, 3, 1], [f(5, 4), 1, 2, 0]],
    "actorflow.pack": lambda: [[f(5, 4), 0, 3], [f(5, 4), 1, 2]],
}
