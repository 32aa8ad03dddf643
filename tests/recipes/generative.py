"""Autoencoders, flows and diffusion, whose noise is data."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from recipes.data import classes, numbers, pairs, tokens
from recipes.recipe import Refused, Training, recipe

MOVES = "the code book moves on with each forward pass, and so between micro-batches"


def training(job, model, loss_of, batches, rate=1e-2):
    """One step of Adam on a loss of the model and the batch."""
    optimizer = torch.optim.Adam(model.parameters(), rate, eps=1e-5)

    @job
    def train_step(*batch):
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(model, optimizer, train_step, batches)


@recipe("generative", "a variational autoencoder")
def vae(job):
    """Reparametrisation, free bits, several outputs of a module."""

    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.decode = nn.Linear(6, 8), nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 6))
            self.mean, self.spread = nn.Linear(8, 2), nn.Linear(8, 2)

        def forward(self, x, noise):
            h = torch.tanh(self.encode(x))
            mean, spread = self.mean(h), self.spread(h)
            return self.decode(mean + noise * (spread / 2).exp()), mean, spread

    def loss(model, x, noise):
        made, mean, spread = model(x, noise)
        kl = -0.5 * (1 + spread - mean**2 - spread.exp())
        return F.mse_loss(made, x, reduction="sum") / len(x) + kl.mean(0).clamp(min=0.1).sum()

    return training(job, VAE(), loss, pairs(6, 2))


@recipe("generative", "a VAE of torch.distributions with importance weights")
def iwae(job):
    """kl_divergence, Independent, log probabilities of samples, logsumexp over them."""
    model = nn.ModuleDict({"encode": nn.Linear(6, 4), "decode": nn.Linear(2, 6)})

    def loss(model, x, noise):
        mean, spread = model["encode"](x).chunk(2, -1)
        q = torch.distributions.Normal(mean, F.softplus(spread) + 0.1, validate_args=False)
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean), validate_args=False)
        z = q.mean + q.stddev * noise.view(-1, 3, 2).transpose(0, 1)
        likelihood = torch.distributions.Bernoulli(logits=model["decode"](z), validate_args=False)
        log_p = likelihood.log_prob((x > 0).to(x.dtype).expand(3, -1, -1)).sum(-1)
        weights = log_p + (prior.log_prob(z) - q.log_prob(z)).sum(-1)
        kl = torch.distributions.kl_divergence(q, prior).sum(-1).mean()
        return -(weights.logsumexp(0) - math.log(3)).mean() + 0.1 * kl

    return training(job, model, loss, pairs(6, 6))


class Codes(nn.Module):
    """A code book of 5 vectors; ``average`` keeps it by running means instead of gradients."""

    def __init__(self, average):
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 3), nn.Linear(3, 6)
        self.average = average
        book = torch.randn(5, 3)
        if average:
            self.register_buffer("book", book)
            self.register_buffer("counts", torch.ones(5))
            self.register_buffer("sums", book.clone())
        else:
            self.book = nn.Parameter(book)

    def forward(self, x):
        z = self.encode(x)
        nearest = torch.cdist(z, self.book).argmin(-1)
        code = F.embedding(nearest, self.book)
        loss = 0.25 * F.mse_loss(z, code.detach())
        if not self.average:
            loss = loss + F.mse_loss(code, z.detach())
        elif self.training:
            with torch.no_grad():
                chosen = F.one_hot(nearest, 5).to(x.dtype)
                self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(chosen.t() @ z, alpha=0.1)
                self.book.copy_(self.sums / (self.counts[:, None] + 1e-5))
        return self.decode(z + (code - z).detach()), loss, nearest


@recipe("generative", "a VQ-VAE with a straight-through code book")
def vqvae(job):
    """argmin, embedding, detach on both sides, whole numbers as results."""

    def loss(model, x):
        made, commitment, _ = model(x)
        return F.mse_loss(made, x) + commitment

    return training(job, Codes(average=False), loss, numbers(6))


@recipe("generative", "a VQ-VAE whose code book is a running mean", whole=MOVES)
def vqvae_ema(job):
    """Buffers that the forward pass changes in place from sums over the whole batch."""

    def loss(model, x):
        made, commitment, _ = model(x)
        return F.mse_loss(made, x) + commitment

    return training(job, Codes(average=True), loss, numbers(6))


@recipe("generative", "RealNVP")
def realnvp(job):
    """Coupling layers with masks in buffers, log determinants, a change of variables."""

    class Coupling(nn.Module):
        def __init__(self, mask):
            super().__init__()
            self.register_buffer("mask", mask)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))

        def forward(self, x):
            scale, shift = self.net(x * self.mask).chunk(2, -1)
            scale = torch.tanh(scale) * (1 - self.mask)
            return x * scale.exp() + shift * (1 - self.mask), scale.sum(-1)

    mask = torch.tensor([1.0, 0, 1, 0])
    model = nn.ModuleList([Coupling(mask), Coupling(1 - mask), Coupling(mask)])

    def loss(model, x):
        total = 0
        for layer in model:
            x, determinant = layer(x)
            total = total + determinant
        return (0.5 * x.square().sum(-1) + 2 * math.log(2 * math.pi) - total).mean()

    return training(job, model, loss, numbers(4))


@recipe(
    "generative",
    "Glow's invertible linear layer",
)
def glow(job):
    """The log determinant of a weight, a triangular factorisation, and act-norm's scale in logs."""

    class Invertible(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.linalg.qr(torch.randn(4, 4))[0])
            self.lower, self.diagonal = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4))

        def forward(self, x):
            other = self.lower.tril(-1) + torch.diag(self.diagonal.exp())
            return x @ self.weight @ other, torch.linalg.slogdet(self.weight)[1] + self.diagonal.sum()

    def loss(model, x):
        z, determinant = model(x)
        return 0.5 * z.square().sum(-1).mean() - determinant

    return training(job, Invertible(), loss, numbers(4))


@recipe("generative", "a masked autoregressive network")
def made(job):
    """Linear layers whose weights are multiplied by masks in buffers."""

    class Masked(nn.Linear):
        def __init__(self, inside, out, mask):
            super().__init__(inside, out)
            self.register_buffer("mask", mask)

        def forward(self, x):
            return F.linear(x, self.mask * self.weight, self.bias)

    inside, hidden = torch.arange(6), torch.arange(12) % 5
    first, last = (hidden[:, None] >= inside).double(), (inside[:, None] > hidden).double()
    model = nn.Sequential(Masked(6, 12, first), nn.ReLU(), Masked(12, 6, last))

    def loss(model, x):
        x = (x > 0).to(x.dtype)
        return F.binary_cross_entropy_with_logits(model(x), x, reduction="none").sum(-1).mean()

    return training(job, model, loss, numbers(6))


@recipe("generative", "a diffusion model")
def ddpm(job):
    """Sinusoidal embeddings of the time, a noise schedule in a buffer that is indexed, scale and shift."""

    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.times = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 16))
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 6)
            self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-4, 0.1, 50), 0))

        def forward(self, x, t):
            frequencies = torch.exp(-math.log(100) * torch.arange(4) / 4)
            angles = t[:, None] * frequencies
            scale, shift = self.times(torch.cat([angles.sin(), angles.cos()], -1)).chunk(2, -1)
            return self.last(F.silu(self.first(x) * (1 + scale) + shift))

    def loss(model, x, noise, t):
        kept = model.kept[t][:, None]
        found = model(kept.sqrt() * x + (1 - kept).sqrt() * noise, t)
        weight = (kept / (1 - kept)).clamp(max=5)
        return (weight * (found - noise).square()).mean()

    g = torch.Generator().manual_seed(6)
    return training(job, Denoiser(), loss, [(*b, torch.randint(50, (8,), generator=g)) for b in pairs(6, 6)])


@recipe("generative", "flow matching with guidance that is dropped")
def matching(job):
    """A velocity at drawn times, labels that are dropped, Euler steps in a predict job."""
    model = nn.ModuleDict(
        {"labels": nn.Embedding(5, 4), "net": nn.Sequential(nn.Linear(11, 16), nn.GELU(), nn.Linear(16, 6))}
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-5)

    def velocity(x, t, y):
        return model["net"](torch.cat([x, t, model["labels"](y)], -1))

    @job
    def train_step(x, y, noise, t):
        kept = torch.where(t[:, 0] < 0.2, 4, y)
        loss = F.mse_loss(velocity((1 - t) * noise + t * x, t, kept), x - noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    @job(type="predict")
    def sample(noise, y):
        x = noise
        for i in range(3):
            t = torch.full((len(x), 1), i / 3)
            guided = 2 * velocity(x, t, y) - velocity(x, t, torch.full_like(y, 4))
            x = x + guided / 3
        return x

    g = torch.Generator().manual_seed(6)

    def run(x, y):
        noise, t = torch.randn(8, 6, generator=g), torch.rand(8, 1, generator=g)
        return train_step(x, y, noise, t), sample(noise, y)

    return Training(model, optimizer, run, classes(6, 4))


@recipe(
    "generative",
    "score matching with a double backward pass",
    refused=Refused(
        "cut into 1 part only",
        "What its backward pass differentiates again belongs to the layers of both stages.",
        "Other layouts.",
        ("pipeline 2",),
    ),
)
def score(job):
    """Hyvärinen's loss: the trace of an energy's second derivatives by autograd.grad."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Softplus(), nn.Linear(8, 1))

    def loss(model, x):
        x = x.detach().requires_grad_()
        (s,) = torch.autograd.grad(-model(x).sum(), x, create_graph=True)
        trace = sum(torch.autograd.grad(s[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(3))
        return (0.5 * s.square().sum(-1) + trace).mean()

    return training(job, model, loss, numbers(3))


@recipe("generative", "an energy-based model with Langevin steps")
def energy(job):
    """Samples that are moved along gradients of the model for a few steps in the step, on given noise."""
    model = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 1))

    def loss(model, real, noise):
        x = noise.detach()
        for _ in range(3):
            x = x.detach().requires_grad_()
            x = x - 0.1 * torch.autograd.grad(model(x).sum(), x)[0]
        x = x.detach()
        a, b = model(real), model(x)
        return a.mean() - b.mean() + 0.1 * (a.square() + b.square()).mean()

    return training(job, model, loss, pairs(4, 4))


@recipe("generative", "a sparse autoencoder with top-k codes")
def sparse(job):
    """Codes by topk and scatter, columns normalised behind the optimizer's step, dead codes counted in a buffer."""
    model = nn.ModuleDict({"up": nn.Linear(6, 12), "down": nn.Linear(12, 6)})
    model.register_buffer("silent", torch.zeros(12, dtype=torch.long))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-5)

    @job
    def train_step(x):
        codes = F.relu(model["up"](x - model["down"].bias))
        top, where = codes.topk(3, -1)
        kept = torch.zeros_like(codes).scatter(-1, where, top)
        loss = F.mse_loss(model["down"](kept), x) + 0.01 * codes.abs().sum(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model["down"].weight.div_(model["down"].weight.norm(dim=0, keepdim=True))
            used = (kept > 0).any(0)
            model.silent.copy_(torch.where(used, 0, model.silent + 1))
        return loss

    return Training(model, optimizer, train_step, numbers(6))


@recipe("generative", "Gumbel-softmax categories")
def gumbel(job):
    """Hard samples with soft gradients, on noise from outside."""
    model = nn.ModuleDict({"encode": nn.Linear(6, 8), "decode": nn.Linear(8, 6)})

    def loss(model, x, noise):
        logits = model["encode"](x).view(-1, 2, 4)
        gumbels = -torch.log(-torch.log(noise.sigmoid()))
        soft = ((logits + gumbels.view(-1, 2, 4)) / 0.7).softmax(-1)
        hard = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
        z = hard - soft.detach() + soft
        entropy = (logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        return F.mse_loss(model["decode"](z.flatten(1)), x) + 0.1 * entropy

    return training(job, model, loss, pairs(6, 8))


@recipe("generative", "discrete diffusion over tokens")
def discrete(job):
    """Absorbing states: tokens hidden at a rate for each row, weights by that rate."""
    model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 11))

    def loss(model, words, drawn):
        rate = (drawn[:, :1].to(torch.get_default_dtype()) + 1) / 12
        hidden = drawn.to(rate.dtype) / 11 < rate
        logits = model(torch.where(hidden, 11, words))
        each = F.cross_entropy(logits.transpose(1, 2), words, reduction="none")
        return (each * hidden / rate).mean()

    return training(job, model, loss, tokens(5, 11))
