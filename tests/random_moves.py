"""Draw random ops that a user might write, for given tensors and a random number generator.

A *move* is a few ops of PyTorch: its maker draws what it needs (dims, sizes, parameters, which it registers) for the
tensors that are there, and returns the function that does it; None where it does not fit them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Fn = Callable[..., Tensor]
MOST = 2000  # elements of a value, about


class Draw:
    """What a maker draws from, and the module that its parameters and buffers become part of."""

    def __init__(self, rng: random.Random, home: nn.Module, pieces: int) -> None:
        self.rng, self.home, self.pieces = rng, home, pieces
        self.generator = torch.Generator().manual_seed(rng.randrange(1 << 30))

    def dim(self, x: Tensor, *, inner: bool = False) -> int:
        """Any dim; seldom the first one, and never with ``inner``."""
        if x.dim() == 1 or (not inner and self.rng.random() < 0.15):
            return 0
        return self.rng.randrange(1, x.dim())

    def dims(self, x: Tensor) -> list[int]:
        """One or two of them."""
        return sorted({self.dim(x) for _ in range(self.rng.randint(1, 2))})

    def either(self) -> bool:
        return self.rng.random() < 0.5

    def one(self, *choices):  # type: ignore[no-untyped-def]
        return self.rng.choice(choices)

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale

    def parameter(self, *shape: int, scale: float | None = None) -> str:
        """A new parameter's name."""
        name = f"p{len(list(self.home.parameters(recurse=False)))}"
        fan = math.prod(shape[1:]) if len(shape) > 1 else shape[0] if shape else 1
        value = self.randn(*shape, scale=scale if scale is not None else 1 / math.sqrt(max(fan, 1)))
        self.home.register_parameter(name, nn.Parameter(value))
        return name

    def buffer(self, value: Tensor) -> str:
        name = f"b{len(list(self.home.buffers(recurse=False)))}"
        self.home.register_buffer(name, value)
        return name

    def module(self, module: nn.Module) -> nn.Module:
        """Part of the model, with parameters that are drawn."""
        module = module.double()
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(self.randn(*p.shape, scale=0.3) + (1 if p.dim() == 1 else 0) * 0.5)
        self.home.add_module("m", module)
        return module

    def ints(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator)

    def factors(self, n: int) -> list[int]:
        """Sizes whose product is ``n``."""
        parts: list[int] = []
        while n > 1 and len(parts) < 2 and self.rng.random() < 0.8:
            f = self.rng.choice([d for d in range(1, n + 1) if n % d == 0])
            parts.append(f)
            n //= f
        return [*parts, n]


# ---- layers


def linear(d: Draw, x: Tensor) -> Fn:
    m = nn.Linear(x.size(-1), d.rng.randint(1, 8), bias=d.either())
    m = d.module(m)
    return lambda x: m(x)


def matmul(d: Draw, x: Tensor) -> Fn | None:
    if x.dim() < 2:
        return None
    home, k, n = d.home, x.size(-1), d.rng.randint(1, 7)
    kind = d.one("right", "left", "batched", "vector")
    if kind == "right":
        w = d.parameter(k, n, scale=k**-0.5)
        return lambda x: x @ getattr(home, w)
    if kind == "vector" and x.dim() > 2:
        w = d.parameter(k, scale=k**-0.5)
        return lambda x: x @ getattr(home, w)
    if kind == "batched" and x.dim() == 3:
        w = d.parameter(x.size(0), k, n, scale=k**-0.5)
        return lambda x: torch.bmm(x, getattr(home, w))
    w = d.parameter(n, x.size(-2), scale=x.size(-2) ** -0.5)
    return lambda x: getattr(home, w) @ x


def einsum(d: Draw, x: Tensor) -> Fn | None:
    n = d.rng.randint(1, 5)
    terms = {
        2: ["bi,ij->bj", "bi,ij->jb", "bi,i->b", "bi,bj->bij", "bi,b->bi"],
        3: ["bij,jk->bik", "bij,ik->bjk", "bij,kij->bk", "bij,ij->bij", "bij,j->ib"],
        4: ["bijk,kl->bijl", "bijk,jl->bikl", "bijk,i->bjk", "bijk,jk->bi"],
    }
    if x.dim() not in terms:
        return None
    term = d.rng.choice(terms[x.dim()])
    left, right = term.split("->")[0].split(",")
    sizes = dict(zip(left, x.shape, strict=True))
    w, home = d.parameter(*(sizes.get(c, n) for c in right), scale=0.5), d.home
    return lambda x: torch.einsum(term, x, getattr(home, w))


def scale_and_shift(d: Draw, x: Tensor) -> Fn:
    dim = d.dim(x)
    shape = [1] * (x.dim() - dim)
    shape[0] = x.size(dim)
    w, b, home = d.parameter(*shape), d.parameter(*shape), d.home
    return lambda x: x * (1 + getattr(home, w)) + getattr(home, b)


def elementwise(d: Draw, x: Tensor) -> Fn:
    return d.one(
        torch.tanh,
        torch.sigmoid,
        F.relu,
        F.gelu,
        F.silu,
        F.softplus,
        torch.sin,
        torch.abs,
        F.elu,
        lambda x: F.leaky_relu(x, 0.2),
        lambda x: x * x,
        lambda x: (-x * x).exp(),
        lambda x: 1 / (1 + x * x),
        lambda x: (x * x + 0.5).sqrt(),
        lambda x: -x,
        lambda x: x.clamp(-0.7, 0.9),
        lambda x: 2 * x - 1,
        lambda x: (x.abs() + 1).log(),
        lambda x: torch.where(x > 0, x, 0.3 * x),
        lambda x: x.masked_fill(x < -0.5, 0.1),
        lambda x: x.detach() + x.tanh(),
        lambda x: torch.atan2(x, x * x + 1),
        lambda x: x.clone().mul_(1.3).add_(0.1),
        lambda x: x.lerp(x.sin(), 0.3),
        lambda x: F.hardtanh(x) + F.mish(x),
        lambda x: torch.addcmul(x, x, x, value=0.2),
        lambda x: torch.logaddexp(x, 1 - x),
        lambda x: x.sign() * 0.2 + x,
        lambda x: F.logsigmoid(x),
    )


def prelu(d: Draw, x: Tensor) -> Fn:
    m = d.module(nn.PReLU(x.size(1) if x.dim() > 1 and d.either() else 1))
    return lambda x: m(x)


# ---- reductions, norms


def reduction(d: Draw, x: Tensor) -> Fn:
    dims, keep = d.dims(x), d.either()
    return d.one(
        lambda x: x.mean(dims, keep),
        lambda x: x.sum(dims, keep) / 3,
        lambda x: x.amax(dims, keep),
        lambda x: x.amin(dims, keep),
        lambda x: torch.logsumexp(x, dims, keep),
        lambda x: x.var(dims, keepdim=keep, correction=0),
        lambda x: (x.var(dims, keepdim=keep, correction=0) + 0.1).sqrt(),
        lambda x: torch.linalg.vector_norm(x + 0.1, 2, dims, keep),
        lambda x: torch.linalg.vector_norm(x, 1, dims, keep),
        lambda x: x.tanh().prod(dims[0], keepdim=keep),
        lambda x: x.max(dims[0], keepdim=keep)[0],
        lambda x: x.median(dims[0], keepdim=keep)[0],
        lambda x: x.mean() + x,
        lambda x: x.sum() * 0.1 + x,
        lambda x: x / (x.abs().max() + 1),
        lambda x: x / (x.norm() + 1),
    )


def centred(d: Draw, x: Tensor) -> Fn:
    dim = d.dim(x)
    return d.one(
        lambda x: x - x.mean(dim, keepdim=True),
        lambda x: x / (1 + x.abs().sum(dim, keepdim=True)),
        lambda x: F.normalize(x + 0.2, dim=dim),
        lambda x: x - x.logsumexp(dim, keepdim=True),
        lambda x: (x - x.mean(dim, True)) / (x.var(dim, keepdim=True, correction=0) + 0.3).sqrt(),
        lambda x: x * x.detach().mean(dim, keepdim=True),
        lambda x: x - x.amax(dim, keepdim=True).detach(),
    )


def softmax(d: Draw, x: Tensor) -> Fn:
    dim = d.dim(x)
    return d.one(
        lambda x: 3 * x.softmax(dim),
        lambda x: x.log_softmax(dim),
        lambda x: F.softmin(x, dim),
        lambda x: (x * x.softmax(dim)).sum(dim, keepdim=True) + x,
    )


def layer_norm(d: Draw, x: Tensor) -> Fn | None:
    if x.dim() < 2 or x.size(-1) < 2:
        return None
    over = x.shape[-d.rng.randint(1, min(2, x.dim() - 1)) :]
    kind = d.one(nn.LayerNorm, nn.LayerNorm, nn.RMSNorm)
    m = d.module(kind(over, eps=0.1))
    return lambda x: m(x)


def batch_norm(d: Draw, x: Tensor) -> Fn | None:
    if d.pieces > 1 or not 2 <= x.dim() <= 4 or x.numel() // x.size(1) < 2:
        return None
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[x.dim()]
    m = d.module(kind(x.size(1), eps=0.1))
    return lambda x: m(x)


def group_norm(d: Draw, x: Tensor) -> Fn | None:
    if x.dim() < 3 or x[0].numel() < 4:
        return None
    m = d.module(nn.GroupNorm(d.rng.choice([g for g in range(1, x.size(1) + 1) if x.size(1) % g == 0]), x.size(1), 0.1))
    return lambda x: m(x)


# ---- shapes


def reshaped(d: Draw, x: Tensor) -> Fn:
    shape = [f for n in x.shape for f in ([n] if d.either() else d.factors(n))]
    while len(shape) > 1 and (len(shape) > 5 or d.rng.random() < 0.4):
        at = d.rng.randrange(len(shape) - 1)
        shape[at : at + 2] = [shape[at] * shape[at + 1]]
    if d.either():
        shape[d.rng.randrange(len(shape))] = -1
    return d.one(lambda x: x.reshape(shape), lambda x: x.contiguous().view(shape))


def flattened(d: Draw, x: Tensor) -> Fn:
    start = d.dim(x)
    end = d.rng.randrange(start, x.dim())
    return lambda x: x.flatten(start, end)


def unflattened(d: Draw, x: Tensor) -> Fn | None:
    dim = d.dim(x)
    if x.dim() > 4:
        return None
    sizes = d.factors(x.size(dim))
    return lambda x: x.unflatten(dim, sizes)


def any_order(d: Draw, x: Tensor) -> Fn:
    order = list(range(x.dim()))
    inner = order[1:]
    d.rng.shuffle(inner)
    order = [0, *inner]
    if d.rng.random() < 0.25:
        d.rng.shuffle(order)
    return lambda x: x.permute(order)


def transposed(d: Draw, x: Tensor) -> Fn:
    a, b = d.dim(x), d.dim(x)
    return lambda x: x.transpose(a, b)


def unsqueezed(d: Draw, x: Tensor) -> Fn | None:
    if x.dim() > 4:
        return None
    dim = d.rng.randrange(x.dim() + 1)
    n = d.rng.randint(1, 3)
    return d.one(
        lambda x: x.unsqueeze(dim),
        lambda x: x.unsqueeze(dim).expand(*x.shape[:dim], n, *x.shape[dim:]),
        lambda x: x.unsqueeze(dim).expand(*x.shape[:dim], n, *x.shape[dim:]).reshape(-1, x.size(-1)),
        lambda x: x.squeeze(),
    )


def repeated(d: Draw, x: Tensor) -> Fn:
    dim, n = d.dim(x), d.rng.randint(1, 3)
    times = [d.rng.choice([1, 1, 2, 3]) for _ in x.shape]
    return d.one(
        lambda x: x.repeat(times),
        lambda x: x.repeat_interleave(n, dim),
        lambda x: torch.tile(x, (n,)),
        lambda x: x.repeat(n, *[1] * x.dim()).mean(0),
    )


def moved(d: Draw, x: Tensor) -> Fn:
    dim, n = d.dim(x), d.rng.randint(-3, 3)
    return d.one(
        lambda x: x.flip(dim),
        lambda x: x.roll(n, dim),
        lambda x: x.roll(n),
        lambda x: x + x.flip(0),
        lambda x: torch.cat([x.roll(n, dim), x], dim),
    )


def part(d: Draw, x: Tensor) -> Fn | None:
    dim = d.dim(x)
    n = x.size(dim)
    if n < 2:
        return None
    start = d.rng.randrange(n - 1)
    end, step = d.rng.randint(start + 1, n), d.rng.randint(1, 2)
    at = (slice(None),) * dim
    return d.one(
        lambda x: x[(*at, slice(start, end, step))],
        lambda x: x.select(dim, start),
        lambda x: x.narrow(dim, start, end - start),
        lambda x: x[(*at, slice(start, end))].mean(dim, keepdim=True) + x,
        lambda x: x[(*at, slice(None, None, 2))],
        lambda x: torch.cat([x[(*at, slice(end, None))], x[(*at, slice(0, end))].tanh()], dim),
        lambda x: x[(*at, slice(1, None))] - x[(*at, slice(0, -1))],
    )


def split(d: Draw, x: Tensor) -> Fn | None:
    dim = d.dim(x)
    n = x.size(dim)
    if n < 2:
        return None
    size, count = d.rng.randint(1, n), d.rng.randint(2, 3)
    first = d.rng.randrange(1, n)
    sizes = [first, n - first]
    half = n // 2
    return d.one(
        lambda x: torch.cat(x.split(size, dim)[::-1], dim),
        lambda x: x.chunk(count, dim)[0],
        lambda x: x.split(sizes, dim)[1].sin(),
        lambda x: torch.stack(x.unbind(dim)[::2], dim),
        lambda x: x.split(sizes, dim)[0].mean(dim, keepdim=True) * x.split(sizes, dim)[1],
        lambda x: sum(t.tanh() for t in x.unbind(dim)) / n,
        lambda x: torch.cat([t.tanh() for t in x.tensor_split(count, dim)], dim),
        lambda x: x.split([half, n - half], dim)[0].tanh() * x.split([half, half, n - 2 * half], dim)[1],
        lambda x: torch.stack([t.mean(dim) for t in x.split(sizes, dim)], -1),
    )


def padded(d: Draw, x: Tensor) -> Fn | None:
    dim = d.dim(x)
    low, high = d.rng.randint(-1, 2), d.rng.randint(0, 2)
    if x.size(dim) < 2:
        return None
    pads = [0] * (2 * (x.dim() - dim))
    pads[-2:] = [low, high]
    choices = [lambda x: F.pad(x, pads), lambda x: F.pad(x, pads, value=0.5)]
    if x.dim() in (3, 4) and x.size(-1) > 2:
        mode = d.one("reflect", "replicate", "circular")
        sides = (1, 2) if x.dim() == 3 else (1, 1, 0, 0)
        choices.append(lambda x: F.pad(x, sides, mode=mode))
    return d.rng.choice(choices)


def joined(d: Draw, x: Tensor) -> Fn:
    dim = d.dim(x)
    at = d.rng.randrange(x.dim() + 1) if x.dim() < 5 else 0
    shape = list(x.shape)
    shape[dim] = d.rng.randint(1, 3)
    w, home = d.parameter(*shape, scale=1.0), d.home
    return d.one(
        lambda x: torch.cat([x, x.tanh()], dim),
        lambda x: torch.cat([getattr(home, w), x], dim),
        lambda x: torch.stack([x, -x.sin()], at),
        lambda x: torch.cat([x, getattr(home, w), x * 2], dim),
        lambda x: torch.cat([x.mean(dim, keepdim=True), x], dim),
    )


def corners(d: Draw, x: Tensor) -> Fn | None:
    if x.dim() < 2:
        return None
    n = d.rng.randint(-1, 2)
    a, b = d.rng.sample(range(x.dim()), 2)
    choices = [lambda x: x.tril(n), lambda x: x.triu(n), lambda x: x.diagonal(0, a, b)]
    if x.dim() < 4:
        choices += [lambda x: torch.diag_embed(x), lambda x: x.unfold(-1, 1, 1)]
    if x.size(-1) > 2 and x.dim() < 5:
        choices += [lambda x: x.unfold(-1, 2, d.rng.randint(1, 1))]
    return d.rng.choice(choices)


# ---- indices


def indexed(d: Draw, x: Tensor) -> Fn:
    dim, home = d.dim(x), d.home
    n, k = x.size(dim), d.rng.randint(1, 6)
    one = d.buffer(d.ints(n, k))
    shape = list(x.shape)
    shape[dim] = k
    like = d.buffer(d.ints(n, *shape))
    to = d.rng.randint(n, n + 2)
    into = d.buffer(d.ints(to, *x.shape))
    rows = d.buffer(d.ints(k, n))
    grown = list(x.shape)
    grown[dim] = to
    fewer = list(x.shape)
    fewer[dim] = k
    at = (slice(None),) * dim
    return d.one(
        lambda x: x.index_select(dim, getattr(home, one)),
        lambda x: x[(*at, getattr(home, one))],
        lambda x: x.gather(dim, getattr(home, like)),
        lambda x: torch.take_along_dim(x, getattr(home, like), dim),
        lambda x: torch.zeros(grown, dtype=x.dtype).scatter_add(dim, getattr(home, into), x),
        lambda x: torch.zeros(fewer, dtype=x.dtype).index_add(dim, getattr(home, rows), x),
        lambda x: x.new_zeros(fewer).index_add_(dim, getattr(home, rows), x) + 0.1,
        lambda x: x.new_zeros(grown).scatter_reduce(dim, getattr(home, into), x, "sum"),
        lambda x: x.index_fill(dim, getattr(home, one), 0.2),
        lambda x: x[(*at, getattr(home, one), None)],
    )


def chosen(d: Draw, x: Tensor) -> Fn:
    """By values: what is taken depends on them."""
    dim = d.dim(x)
    k = d.rng.randint(1, x.size(dim))
    return d.one(
        lambda x: x.sort(dim)[0],
        lambda x: x.topk(k, dim)[0],
        lambda x: x.gather(dim, x.argsort(dim, descending=True)),
        lambda x: x.kthvalue(k, dim)[0],
        lambda x: x.gather(dim, x.argmax(dim, keepdim=True)),
        lambda x: x * (x > x.mean(dim, keepdim=True)),
        lambda x: x.max(dim, keepdim=True)[0] + x.cummax(dim)[0],
        lambda x: x.gather(dim, x.topk(k, dim)[1]) * 2,
        lambda x: F.one_hot(x.argmax(dim), x.size(dim)).double() + x.mean(),
        lambda x: x.sort(dim, descending=True)[0].cumsum(dim) / 3,
    )


def scan(d: Draw, x: Tensor) -> Fn:
    dim = d.dim(x)
    return d.one(
        lambda x: x.cumsum(dim),
        lambda x: x.tanh().cumprod(dim),
        lambda x: x.logcumsumexp(dim),
        lambda x: x.cummax(dim)[0],
        lambda x: x.cumsum(dim) / torch.arange(1, x.size(dim) + 1).view(-1, *[1] * (x.dim() - dim - 1)),
        lambda x: x.flip(dim).cumsum(dim).flip(dim),
        lambda x: x.diff(dim=dim, prepend=torch.zeros_like(x.narrow(dim, 0, 1))),
    )


def written(d: Draw, x: Tensor) -> Fn | None:
    """A copy that is written in place, in parts."""
    dim, home = d.dim(x), d.home
    n = x.size(dim)
    start = d.rng.randrange(n)
    at = (slice(None),) * dim
    rest = list(x.shape)
    del rest[dim]
    w = d.parameter(*rest, scale=1.0)
    one = d.buffer(d.ints(n, 2))

    def whole(x: Tensor) -> Tensor:
        y = x.clone()
        y[(*at, start)] = getattr(home, w)
        return y

    def added(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[(*at, slice(start, None))] += x[(*at, slice(start, None))].tanh()
        y[(*at, slice(0, start + 1))].mul_(0.5)
        return y + 0.1 * x

    def by_index(x: Tensor) -> Tensor:
        y = x.sin()
        y[(*at, getattr(home, one))] = 0.25
        return y

    def put(x: Tensor) -> Tensor:
        y = x * 2
        y.index_add_(dim, getattr(home, one), x.index_select(dim, getattr(home, one)))
        return y.masked_fill_(y > 1.5, 1.0)

    return d.one(whole, added, by_index, put)


# ---- matrices


def conditioned(x: Tensor) -> Tensor:
    """(…, n) to well conditioned symmetric (…, n, n)."""
    x = x.tanh()
    return x.unsqueeze(-1) * x.unsqueeze(-2) + 1.5 * torch.eye(x.size(-1), dtype=x.dtype)


def linalg(d: Draw, x: Tensor) -> Fn | None:
    if x.dim() > 3 or x.size(-1) > 6:
        return None
    home, n = d.home, x.size(-1)
    b, v, w = d.parameter(n, 2, scale=1.0), d.parameter(n, scale=1.0), d.parameter(n, n, scale=0.1)

    def matrix() -> Tensor:
        return getattr(home, w) + 2 * torch.eye(n, dtype=torch.float64)

    return d.one(
        lambda x: torch.linalg.inv(conditioned(x)),
        lambda x: torch.linalg.det(conditioned(x)).unsqueeze(-1),
        lambda x: torch.linalg.solve(conditioned(x), getattr(home, b)),
        lambda x: torch.linalg.solve(conditioned(x), x.unsqueeze(-1)),
        lambda x: torch.linalg.solve(conditioned(x), getattr(home, v).unsqueeze(-1)),
        lambda x: torch.linalg.solve(matrix(), x.unsqueeze(-1)),
        lambda x: torch.linalg.solve(matrix(), x, left=False) if x.dim() > 1 else torch.linalg.solve(matrix(), x),
        lambda x: torch.linalg.solve(conditioned(x), torch.cat([x.unsqueeze(-1), x.sin().unsqueeze(-1)], -1)),
        lambda x: torch.linalg.cholesky(conditioned(x)),
        lambda x: torch.cholesky_solve(getattr(home, b), torch.linalg.cholesky(conditioned(x))),
        lambda x: torch.linalg.slogdet(conditioned(x))[1].unsqueeze(-1),
        lambda x: torch.linalg.solve_triangular(matrix().tril(), x.unsqueeze(-1), upper=False),
        lambda x: torch.linalg.matrix_exp(0.3 * conditioned(x)),
        lambda x: torch.linalg.inv(matrix()) @ x.unsqueeze(-1),
        lambda x: torch.linalg.eigvalsh(conditioned(x) + torch.diag(torch.arange(n).double())),
        lambda x: torch.logdet(conditioned(x)).unsqueeze(-1) * x,
        lambda x: torch.linalg.solve(conditioned(x), conditioned(x.roll(1, 0))),
    )


# ---- images and sequences


def convolution(d: Draw, x: Tensor) -> Fn | None:
    if x.dim() not in (3, 4) or x.size(-1) < 2 or x.size(-2) < (1 if x.dim() == 3 else 2):
        return None
    groups = d.rng.choice([g for g in (1, 1, 2, 3) if x.size(1) % g == 0])
    out = groups * d.rng.randint(1, 3)
    kind = nn.Conv1d if x.dim() == 3 else nn.Conv2d
    if d.rng.random() < 0.25:
        kind = nn.ConvTranspose1d if x.dim() == 3 else nn.ConvTranspose2d
        m = d.module(kind(x.size(1), out, 2, stride=d.rng.randint(1, 2), groups=groups))
    else:
        m = d.module(kind(x.size(1), out, d.rng.randint(1, 3), d.rng.randint(1, 2), padding=1, groups=groups))
    return lambda x: m(x)


def pool(d: Draw, x: Tensor) -> Fn | None:
    if x.dim() not in (3, 4) or min(x.shape[2:]) < 2:
        return None
    if x.dim() == 3:
        return d.one(
            lambda x: F.max_pool1d(x, 2),
            lambda x: F.avg_pool1d(x, 2, 1),
            lambda x: F.adaptive_avg_pool1d(x, 2),
            lambda x: F.adaptive_max_pool1d(x, 2),
            lambda x: F.interpolate(x, scale_factor=2, mode="linear"),
        )
    return d.one(
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.avg_pool2d(x, 2, 1),
        lambda x: F.adaptive_avg_pool2d(x, (1, 2)),
        lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
        lambda x: F.interpolate(x, size=(3, 4), mode="bilinear"),
        lambda x: F.unfold(x, 2),
        lambda x: F.pixel_shuffle(torch.cat([x] * 4, 1), 2),
    )


def recurrent(d: Draw, x: Tensor) -> Fn | None:
    if x.dim() != 3 or x.size(1) > 6:
        return None
    kind, first = d.one(nn.LSTM, nn.GRU, nn.RNN), d.rng.random() < 0.8
    m = d.module(kind(x.size(2), d.rng.randint(1, 4), batch_first=first, bidirectional=d.rng.random() < 0.2))
    last = d.rng.random() < 0.3
    return lambda x: m(x)[0][:, -1] if last else m(x)[0]


def attention(d: Draw, x: Tensor) -> Fn | None:
    if x.dim() != 3:
        return None
    width = x.size(2)
    if d.either():
        m = d.module(
            nn.MultiheadAttention(width, d.rng.choice([h for h in (1, 2, 3) if width % h == 0]), batch_first=True)
        )
        return lambda x: m(x, x, x, need_weights=False)[0]
    w, home, causal = d.parameter(width, 3 * width, scale=width**-0.5), d.home, d.either()

    def heads(x: Tensor) -> Tensor:
        q, k, v = (x @ getattr(home, w)).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def plain(x: Tensor) -> Tensor:
        q, k, v = (x @ getattr(home, w)).split(width, -1)
        score = q @ k.transpose(-2, -1) / width**0.5
        if causal:
            score = score.masked_fill(torch.ones(score.shape[-2:]).triu(1).bool(), float("-inf"))
        return score.softmax(-1) @ v

    return d.one(heads, plain)


# ---- two tensors


def combined(d: Draw, x: Tensor, y: Tensor) -> Fn | None:
    choices: list[Fn] = []
    try:
        shape = torch.broadcast_shapes(x.shape, y.shape)
        if math.prod(shape) <= MOST:
            choices += [
                lambda x, y: x + y,
                lambda x, y: x * y.tanh(),
                lambda x, y: torch.maximum(x, y),
                lambda x, y: x / (1 + y * y),
                lambda x, y: torch.where(x > y, x, y.sin()),
                lambda x, y: x - y.mean(),
                lambda x, y: torch.hypot(x + 1, y),
            ]
    except RuntimeError:
        pass
    if x.dim() > 1 and y.dim() > 1:
        same = [
            i
            for i in range(min(x.dim(), y.dim()))
            if x.dim() == y.dim() and x.shape[:i] + x.shape[i + 1 :] == y.shape[:i] + y.shape[i + 1 :]
        ]
        if same:
            dim = d.rng.choice(same)
            choices += [lambda x, y: torch.cat([x, y], dim)] * 2
        if x.shape[:-1] == y.shape[:-1] and x.dim() < 4:
            choices += [lambda x, y: x.transpose(-1, -2) @ y / 3, lambda x, y: torch.einsum("...a,...b->...ab", x, y)]
        if x.shape[:-2] == y.shape[:-2] and x.size(-1) == y.size(-1):
            choices += [lambda x, y: x @ y.transpose(-1, -2) / 3, lambda x, y: torch.cdist(x, y + 0.3)]
        if x.size(-1) == y.size(-2) and x.dim() == y.dim() and x.shape[:-2] == y.shape[:-2]:
            choices += [lambda x, y: x @ y]
        if x.size(0) == y.size(0):
            choices += [
                lambda x, y: torch.cat([x.flatten(1), y.flatten(1)], 1),
                lambda x, y: x * y.flatten(1).mean(1).view(-1, *[1] * (x.dim() - 1)),
                lambda x, y: x.flatten(1).t() @ y.flatten(1) / 3,
                lambda x, y: torch.cat([x.flatten(1).mean(1), y.flatten(1).sum(1)]),
            ]
    if x.dim() > 0 and y.dim() > 0 and x.size(0) == y.size(0) and y.numel() // y.size(0) <= 6 and x[0].numel() <= 30:
        choices += [
            lambda x, y: (
                torch.linalg.solve(conditioned(y.flatten(1)), y.flatten(1).sin().unsqueeze(-1))
                * x.flatten(1).mean(1).view(-1, 1, 1)
            ),
        ]
    if x.shape == y.shape and x.dim() in (2, 3) and x.size(-1) <= 6:
        choices += [
            lambda x, y: torch.linalg.solve(conditioned(x), y.unsqueeze(-1)),
            lambda x, y: torch.stack([x, y]),
            lambda x, y: torch.linalg.solve(conditioned(x), conditioned(y)),
        ]
    return d.rng.choice(choices) if choices else None


# ---- inputs other than the first


def embedded(d: Draw, tokens: Tensor) -> Fn:
    if d.rng.random() < 0.2:
        bag = d.module(nn.EmbeddingBag(7, d.rng.randint(1, 5), mode=d.one("sum", "mean")))
        return lambda tokens: bag(tokens)
    m = d.module(nn.Embedding(7, d.rng.randint(1, 6), padding_idx=d.one(None, None, 2)))
    return d.one(lambda tokens: m(tokens), lambda tokens: m(tokens).mean(1), lambda tokens: m(tokens[:, 0]))


def counted(d: Draw, tokens: Tensor) -> Fn:
    w, home = d.parameter(7, 3, scale=1.0), d.home
    return d.one(
        lambda tokens: F.one_hot(tokens, 7).double() @ getattr(home, w),
        lambda tokens: getattr(home, w)[tokens],
        lambda tokens: F.embedding(tokens, getattr(home, w)).cumsum(1),
        lambda tokens: (tokens > 3).double() * 0.3,
    )


# ---- state


def running(d: Draw, x: Tensor) -> Fn:
    """A running average that is written whole or in place, and read before or after."""
    home = d.home
    b = d.buffer(torch.zeros(x.shape[1:], dtype=torch.float64))
    at_first = d.either()
    how = d.one("copy", "in place", "lerp")

    def fn(x: Tensor) -> Tensor:
        read = getattr(home, b) * 0.5 if at_first else 0
        new = x.detach().mean(0)
        if how == "copy":
            getattr(home, b).copy_(0.9 * getattr(home, b) + 0.1 * new)
        elif how == "in place":
            getattr(home, b).mul_(0.9).add_(new, alpha=0.1)
        else:
            with torch.no_grad():
                getattr(home, b).lerp_(new, 0.3)
        return x + read - 0.3 * getattr(home, b)

    return fn


def cached(d: Draw, x: Tensor) -> Fn:
    """A buffer that is written by index and read again."""
    home, n = d.home, d.rng.randint(2, 5)
    b = d.buffer(torch.zeros(n, *x.shape[1:], dtype=torch.float64))
    count = d.buffer(torch.zeros((), dtype=torch.int64))
    at = d.rng.randrange(n)
    how = d.one("constant", "counter", "slice", "copy", "twice")

    def fn(x: Tensor) -> Tensor:
        new = x.detach().mean(0)
        cache, counter = getattr(home, b), getattr(home, count)
        if how == "constant":
            cache[at] = new
        elif how == "counter":
            cache[counter.view(1) % n] = new
            counter += 1
        elif how == "slice":
            cache[at:].mul_(0.5).add_(new)
        elif how == "copy":
            cache.index_copy_(0, counter.view(1) % n, new.unsqueeze(0))
            counter.add_(1)
        else:
            cache[at] = new
            y = x * cache.mean(0)
            cache[0] = y.detach().mean(0)
            x = x + 0.1 * y
        return x + 0.2 * cache.sum(0)

    return fn


def kept(d: Draw, x: Tensor) -> Fn:
    """A cache with a dim for the batch, such as keys and values have."""
    home, n = d.home, d.rng.randint(2, 4)
    b = d.buffer(torch.zeros(x.size(0), n, *x.shape[1:], dtype=torch.float64))
    count = d.buffer(torch.zeros((), dtype=torch.int64))
    by_counter = d.either()

    def fn(x: Tensor) -> Tensor:
        cache, counter = getattr(home, b), getattr(home, count)
        if by_counter:
            cache.index_copy_(1, counter.view(1) % n, x.detach().unsqueeze(1))
            counter += 1
        else:
            cache[:, 1:] = cache[:, :-1].clone()
            cache[:, 0] = x.detach()
        return x + cache.mean(1)

    return fn


ONE: dict[str, Callable[[Draw, Tensor], Fn | None]] = {
    f.__name__: f
    for f in (
        linear, matmul, einsum, scale_and_shift, elementwise, prelu, reduction, centred, softmax, layer_norm,
        batch_norm, group_norm, reshaped, flattened, unflattened, any_order, transposed, unsqueezed, repeated, moved,
        part, split, padded, joined, corners, indexed, chosen, scan, written, linalg, convolution, pool, recurrent,
        attention, running, cached, kept,
    )
}  # fmt: skip
OFTEN = ("linear", "elementwise", "reshaped", "split", "any_order")
TWO = {"combined": combined}
TOKENS = {"embedded": embedded, "counted": counted}
