"""Decompose random ops of torch into counter-based uniform numbers and ordinary ops.

``decompositions`` is a ``decomposition_table`` for the trace of a step.  To add an op, register a
function of (draw, arguments by name) under its name; its in-place and ``out`` forms follow.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from actorflow_compiler.core.errors import CaptureError
from actorflow_compiler.core.op_call import OpCall, bind, overload
from actorflow_compiler.core.torch_internals import OpOverload, schema_of
from actorflow_compiler.custom_ops.quantiles import binomial_quantile, poisson_quantile
from actorflow_compiler.graph.graph import Node
from actorflow_compiler.substitutes.random_streams import RandomStreams

aten = torch.ops.aten
Given = Mapping[str, Any]  # an op's arguments by their names, defaults filled in
HALVES = {torch.float16: 11, torch.bfloat16: 8}  # bits of the significand
ROUNDS = 8  # of rejection sampling; each accepts at least 95%


class Draw:
    """Uniform numbers for one op; every call draws from a stream of its own."""

    def __init__(self, streams: RandomStreams, given: Given) -> None:
        self._streams, self._generator = streams, given.get("generator")
        like = next((v for v in given.values() if isinstance(v, Tensor)), None)
        self.device = given.get("device") or (torch.device("cpu") if like is None else like.device)

    def __call__(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor of ``shape``: float32 or float64 in [0, 1), or int64 over all its values."""
        stream, seed = self._streams.next(self._generator)
        drawn: Tensor = torch.ops.actorflow.draw(shape, dtype=dtype, device=self.device, stream=stream, seed=seed)
        return drawn


class UniformSource(Protocol):
    """The source of uniform numbers that rules draw from."""

    def __call__(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, /) -> Tensor:
        """A tensor of ``shape``: float32 or float64 in [0, 1), or int64 over all its values."""


Rule = Callable[[UniformSource, Given], Any]
RULES: dict[str, Rule] = {}  # by the name of the op without its overload


def _for(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def decompositions(streams: RandomStreams) -> dict[OpOverload, Callable[..., Any]]:
    """For every overload of every op in ``RULES``, a function that draws its numbers from ``streams``."""
    return {op: functools.partial(_traced, streams, op, rule) for op, rule in _overloads()}


@functools.cache
def _overloads() -> tuple[tuple[OpOverload, Rule], ...]:
    packets = [(getattr(aten, n, None), rule) for name, rule in RULES.items() for n in (name, f"{name}_")]
    return tuple((getattr(p, o), rule) for p, rule in packets if p is not None for o in p.overloads())


def _traced(streams: RandomStreams, op: OpOverload, rule: Rule, *args: Any, **kwargs: Any) -> Any:
    return written_out(lambda given: Draw(streams, given), op, rule, args, kwargs)


def rule_of(op: OpOverload) -> Rule | None:
    """The rule of an op, whatever the overload and whether in place or not; None where there is none."""
    name = schema_of(op).name.removeprefix("aten::")
    return RULES.get(name) or RULES.get(name.removesuffix("_")) if op.namespace == "aten" else None


def written_out(
    draw: Callable[[Given], UniformSource], op: OpOverload, rule: Rule, args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:  # fmt: skip
    """Run an op by its rule, with numbers from ``draw``; writes the op's ``out`` or in-place operand."""
    given: dict[str, Any] = {a.name: a.default_value for a in schema_of(op).arguments}
    given.update(zip(given, args, strict=False))
    given.update(kwargs)
    made = rule(draw(given), given)
    outs = [given[a.name] for a in schema_of(op).arguments if a.is_out]
    if schema_of(op).name.endswith("_"):
        outs = [given["self"]]
    if not outs:
        return made
    if outs[0].shape != made.shape:
        raise CaptureError(
            f"{op} has a result of shape {tuple(made.shape)}, but was given out= of shape {tuple(outs[0].shape)}; "
            f"expected: equal shapes"
        )
    return outs[0].copy_(made)


def is_random(node: Node) -> bool:
    """Whether an op of the graph draws from a generator of torch: a random op without a rule, such as a custom one."""
    found = overload(node.op)
    if found is None or torch.Tag.nondeterministic_seeded not in found.tags:
        return False
    given = bind(OpCall(node.op, node.args, node.kwargs, (), ()))
    names = [a.name for a in schema_of(found).arguments]
    return "dropout_p" not in names or given[names.index("dropout_p")] != 0


# shapes and dtypes of results


def _shape(given: Given) -> Sequence[int]:
    shape: Sequence[int] = given["size"] if "size" in given else given["self"].shape
    return shape


def _broadcast(*tensors: Tensor) -> Sequence[int]:
    shape: Sequence[int] = torch.broadcast_shapes(*(t.shape for t in tensors))  # type: ignore[no-untyped-call]
    return shape


def _dtype(given: Given) -> torch.dtype:
    """The dtype of the result: the ``dtype`` argument, that of ``out`` or ``self``, or the default dtype."""
    for key in ("dtype", "out", "self"):
        found = given.get(key)
        if isinstance(found, Tensor | torch.dtype):
            return found.dtype if isinstance(found, Tensor) else found
        if isinstance(found, int):  # schemas give torch.int64 by its number
            return torch.int64
    return torch.get_default_dtype()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of a floating dtype are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _complex(draw: UniformSource, given: Given, rule: Rule) -> Tensor:
    """Complex numbers whose real and imaginary parts ``rule`` draws."""
    part = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(_dtype(given))
    if part is None:
        raise CaptureError(f"the step draws random numbers of {_dtype(given)}; expected: complex64 or wider")
    parts = {**given, "dtype": part, "size": _shape(given)}
    return torch.complex(rule(draw, parts), rule(draw, parts))


# uniform numbers


@_for("rand", "rand_like", "uniform")
def _uniform(draw: UniformSource, given: Given) -> Tensor:
    """Uniform in [from, to), also after rounding to the result's dtype."""
    dtype, low, high = _dtype(given), given.get("from", 0.0), given.get("to", 1.0)
    if dtype.is_complex:
        return _complex(draw, given, _uniform)
    numbers = draw(_shape(given), _wide(dtype))
    if dtype in HALVES:
        numbers = (numbers * 2.0 ** HALVES[dtype]).floor() * 2.0 ** -HALVES[dtype]
    if (low, high) == (0.0, 1.0):
        return numbers.to(dtype)
    numbers = (numbers * (high - low) + low).to(dtype)
    return torch.where(numbers < high, numbers, low)


@_for("randint", "randint_like")
def _integers(draw: UniformSource, given: Given) -> Tensor:
    return _below(draw, _shape(given), given.get("low", 0), given["high"]).to(_dtype(given))


@_for("random")
def _fill_with_integers(draw: UniformSource, given: Given) -> Tensor:
    """Integers in [from, to); without a ``to``, up to the largest that the dtype represents exactly."""
    dtype = _dtype(given)
    low, high = given.get("from", 0), given.get("to")
    if high is None:
        if dtype.is_floating_point:
            high = 2 ** (HALVES.get(dtype) or (53 if dtype == torch.float64 else 24)) + 1
        else:
            high = 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1
    return _below(draw, given["self"].shape, low, high).to(dtype)


def _below(draw: UniformSource, shape: Sequence[int], low: int, high: int | Tensor) -> Tensor:
    """int64 in [low, high): a 64-bit number modulo the range; relative error of probabilities ≤ range·2⁻⁶⁴."""
    bits = draw(shape, torch.int64)
    if isinstance(high, Tensor):
        return bits.remainder(high - low) + low
    count = high - low
    if count <= 0:
        raise CaptureError(f"the step draws integers in [{low}, {high}), of which there are none")
    if count & (count - 1) == 0:
        return bits + low if count == 2**64 else bits.bitwise_and(count - 1) + low
    if count >= 2**63:
        raise CaptureError(f"the step draws integers in [{low}, {high}); expected: at most 2**63 different ones")
    return bits.remainder(count) + low


@_for("randperm")
def _permutation(draw: UniformSource, given: Given) -> Tensor:
    """A permutation: the sorting order of random 64-bit numbers."""
    return draw((given["n"],), torch.int64).sort(stable=True).indices.to(_dtype(given))


# Bernoulli numbers


@_for("bernoulli")
def _bernoulli(draw: UniformSource, given: Given) -> Tensor:
    """1 with probability ``p`` (a number or a tensor; default: the values of ``self``), else 0."""
    p = given.get("p", given["self"])
    wide = _wide(p.dtype) if isinstance(p, Tensor) else torch.float32
    numbers = draw(given["self"].shape, wide)
    return (numbers < (p.to(wide) if isinstance(p, Tensor) else p)).to(_dtype(given))


@_for("native_dropout")
def _dropout(draw: UniformSource, given: Given) -> tuple[Tensor, Tensor]:
    """The input with elements dropped and the others scaled up, and the mask of kept elements."""
    x, p = given["input"], given["p"]
    if given["train"] is False:
        return x, torch.ones_like(x, dtype=torch.bool)
    kept = draw(x.shape) < 1 - p
    return x * kept * (1 / (1 - p) if p < 1 else 0.0), kept


@_for("rrelu_with_noise")
def _rrelu(draw: UniformSource, given: Given) -> Tensor:
    """A slope in [lower, upper) for each element that is not positive; ``noise`` takes the factors."""
    x, noise, lower, upper = (given[key] for key in ("self", "noise", "lower", "upper"))
    if not given["training"]:
        return torch.where(x > 0, x, x * ((lower + upper) / 2))
    slopes = draw(x.shape, _wide(x.dtype)) * (upper - lower) + lower
    factors = torch.where(x > 0, 1.0, slopes).to(x.dtype)
    noise.copy_(factors)
    return torch.mul(x, factors)


# normal and related


def _standard_normal(draw: UniformSource, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Normal numbers with mean 0 and variance 1 (Box, Muller 1958)."""
    radius = (draw(shape, dtype).neg() + 1).log().mul(-2.0).sqrt()
    return radius * (draw(shape, dtype) * (2 * math.pi)).cos()


@_for("randn", "randn_like", "normal", "normal_functional")
def _normal(draw: UniformSource, given: Given) -> Tensor:
    mean, std = given.get("mean", 0.0), given.get("std", 1.0)
    tensors = [v for v in (mean, std) if isinstance(v, Tensor)]
    dtype = tensors[0].dtype if tensors else _dtype(given)
    shape = _broadcast(*tensors) if tensors else _shape(given)
    if dtype.is_complex:
        numbers = _complex(draw, {"size": shape, "dtype": dtype, "std": math.sqrt(0.5)}, _normal)
    else:
        numbers = _standard_normal(draw, shape, _wide(dtype))
    if isinstance(std, Tensor) or std != 1:
        numbers = numbers * std
    if isinstance(mean, Tensor) or mean != 0:
        numbers = numbers + mean
    return numbers.to(dtype)


@_for("log_normal")
def _log_normal(draw: UniformSource, given: Given) -> Tensor:
    dtype = _dtype(given)
    numbers = _standard_normal(draw, given["self"].shape, _wide(dtype))
    return torch.exp(numbers * given["std"] + given["mean"]).to(dtype)


@_for("cauchy")
def _cauchy(draw: UniformSource, given: Given) -> Tensor:
    angle = (draw(given["self"].shape, torch.float64) - 0.5) * math.pi
    return torch.mul(angle.tan(), given["sigma"]).add(given["median"]).to(_dtype(given))


@_for("_standard_gamma")
def _standard_gamma(draw: UniformSource, given: Given) -> Tensor:
    """Gamma numbers (Marsaglia, Tsang 2000), in a fixed number of rounds: at most 3 in 10¹⁰ elements fail in all.

    For α < 1, it draws Gamma(α + 1) · u^(1/α).
    """
    alpha = given["self"]
    wide = alpha.to(_wide(alpha.dtype))
    rounds, shape = (ROUNDS, *alpha.shape), alpha.shape
    d = torch.where(wide < 1, wide + 1, wide) - 1 / 3
    normal = _standard_normal(draw, rounds, wide.dtype)
    v = (normal * (d * 9).rsqrt() + 1).pow(3)
    limit = normal * normal * 0.5 + d - d * v + d * v.clamp(min=1e-30).log()
    accepted = (v > 0) & ((draw(rounds, wide.dtype).neg() + 1).log() < limit)
    first = accepted & (accepted.to(torch.int64).cumsum(0) == 1)
    found = d * torch.where(first, v, 0.0).sum(0)
    found = torch.where(found > 0, found, d)
    power = torch.where(wide < 1, wide.reciprocal(), 0.0)
    found = found * (draw(shape, wide.dtype).neg() + 1).pow(power)
    return found.to(alpha.dtype).clamp(min=torch.finfo(alpha.dtype).tiny)


@_for("_sample_dirichlet")
def _dirichlet(draw: UniformSource, given: Given) -> Tensor:
    gamma = _standard_gamma(draw, given)
    return torch.div(gamma, gamma.sum(-1, keepdim=True))


# waiting times and counts


def _waiting(draw: UniformSource, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Exponential waiting times of rate 1; never 0, so that the logarithm is finite."""
    least = 2.0**-54 if dtype == torch.float64 else 2.0**-25
    return (draw(shape, dtype).neg() + 1).log().neg().clamp(min=least)


@_for("exponential")
def _exponential(draw: UniformSource, given: Given) -> Tensor:
    dtype = _dtype(given)
    numbers = _waiting(draw, given["self"].shape, _wide(dtype)).div(given["lambd"])
    return numbers.to(dtype).clamp(min=torch.finfo(dtype).tiny)


@_for("geometric")
def _geometric(draw: UniformSource, given: Given) -> Tensor:
    """The number of trials up to the first success, at least 1."""
    p = given["p"]
    rate = -math.log1p(-p) if p < 1 else math.inf
    return (_waiting(draw, given["self"].shape, torch.float64) / rate).ceil().clamp(min=1).to(_dtype(given))


@_for("multinomial")
def _multinomial(draw: UniformSource, given: Given) -> Tensor:
    """Positions int64[..., num_samples] along the last dim, with probabilities in proportion to ``self``.

    Without replacement, it takes the positions with the shortest exponential waiting times.
    """
    weights, count = given["self"], given["num_samples"]
    wide = weights.to(_wide(weights.dtype))
    if not given["replacement"]:
        speed = torch.div(wide, _waiting(draw, wide.shape, wide.dtype))
        return speed.argmax(-1, keepdim=True) if count == 1 else speed.topk(count).indices
    total = weights.to(torch.float64).cumsum(-1)
    wanted = draw((*weights.shape[:-1], count), torch.float64) * total[..., -1:]
    return torch.searchsorted(total, wanted, right=True).clamp(max=weights.shape[-1] - 1)


@_for("poisson")
def _poisson(draw: UniformSource, given: Given) -> Tensor:
    rate = given["self"]
    numbers = draw(rate.shape, torch.float64)
    count: Tensor = poisson_quantile(rate.to(torch.float64), numbers)
    return count.to(rate.dtype)


@_for("binomial")
def _binomial(draw: UniformSource, given: Given) -> Tensor:
    count, prob = given["count"], given["prob"]
    shape = _broadcast(count, prob)
    wide = (x.to(torch.float64).expand(shape) for x in (count, prob))
    found: Tensor = binomial_quantile(*wide, draw(shape, torch.float64))
    return found.to(count.dtype)
