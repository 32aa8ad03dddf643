"""Quantiles of the Poisson and the binomial distribution, which turn uniform numbers into counts, element by element.

All tensors are float64 of one shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("actorflow::poisson_quantile", mutates_args=())
def poisson_quantile(rate: Tensor, level: Tensor) -> Tensor:
    """The smallest k with P(X ≤ k) > ``level``, X Poisson with mean ``rate``; NaN for a negative or NaN rate.

    Found by bisection on the regularised incomplete gamma function: P(X ≤ k) = Q(k + 1, rate).
    """
    low = torch.full_like(rate, -1.0)  # P(X ≤ low) ≤ level
    high = (rate + 10 * rate.sqrt() + 60).floor()  # P(X ≤ high) > 1 - 2⁻⁵³
    while bool((high - low > 1).any()):
        middle = ((low + high) / 2).floor()
        enough = torch.special.gammaincc(middle + 1, rate) > level
        high, low = torch.where(enough, middle, high), torch.where(enough, low, middle)
    return torch.where(rate >= 0, high, torch.nan)


@torch.library.custom_op("actorflow::binomial_quantile", mutates_args=())
def binomial_quantile(count: Tensor, prob: Tensor, level: Tensor) -> Tensor:
    """The smallest k with P(X ≤ k) > ``level``, X the successes of ``count`` trials with probability ``prob``.

    Found by adding up probabilities, in time proportional to the largest result.
    """
    rarer = torch.minimum(prob, 1 - prob)
    odds, failing = rarer.log() - torch.log1p(-rarer), count * torch.log1p(-rarer)
    k, term, total = torch.zeros_like(count), failing, failing.exp()
    going = (total <= level) & (k < count)
    while bool(going.any()):
        term = torch.where(going, term + odds + (count - k).log() - torch.log1p(k), term)
        total = torch.where(going, total + term.exp(), total)
        k = k + going
        going = (total <= level) & (k < count)
    return torch.where(prob > 0.5, count - k, k)


@poisson_quantile.register_fake
@binomial_quantile.register_fake
def _(first: Tensor, *_: Tensor) -> Tensor:
    return torch.empty_like(first)


OPS: dict[str, Callable[..., Any]] = {"poisson_quantile": poisson_quantile, "binomial_quantile": binomial_quantile}
