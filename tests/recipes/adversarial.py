"""Generative adversarial networks and other games of two."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from recipes.data import classes, pairs
from recipes.recipe import Training, recipe


def players(critic=lambda layer: layer):
    generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6))
    discriminator = nn.Sequential(critic(nn.Linear(6, 8)), nn.LeakyReLU(0.2), critic(nn.Linear(8, 1)))
    return generator, discriminator


def adam(model):
    return torch.optim.Adam(model.parameters(), 1e-2, betas=(0.5, 0.9), eps=1e-5)


@recipe("adversarial", "a GAN in one step")
def gan(job):
    """Two optimizers that step in turn within a call, as PyTorch's DCGAN tutorial has it."""
    generator, discriminator = players()
    of_g, of_d = adam(generator), adam(discriminator)
    criterion = nn.BCEWithLogitsLoss()

    @job
    def train_step(real, noise):
        discriminator.zero_grad()
        right = discriminator(real)
        of_real = criterion(right, torch.full_like(right, 0.9))
        of_real.backward()
        made = generator(noise)
        wrong = discriminator(made.detach())
        of_made = criterion(wrong, torch.zeros_like(wrong))
        of_made.backward()
        of_d.step()
        generator.zero_grad()
        judged = discriminator(made)
        loss = criterion(judged, torch.ones_like(judged))
        loss.backward()
        of_g.step()
        return of_real + of_made, loss

    return Training({"generator": generator, "discriminator": discriminator}, [of_d, of_g], train_step, pairs(6, 3))


@recipe("adversarial", "WGAN with a gradient penalty")
def wgan_gp(job):
    """Gradients of gradients at points between real and made; two steps of the critic for each of the generator."""
    generator, critic = players()
    of_g, of_c = adam(generator), adam(critic)

    @job
    def critic_step(real, noise, between):
        made = generator(noise).detach()
        points = (between * real + (1 - between) * made).requires_grad_()
        (slope,) = torch.autograd.grad(critic(points).sum(), points, create_graph=True)
        penalty = 10 * ((slope.square().sum(1) + 1e-12).sqrt() - 1).square().mean()
        loss = critic(made).mean() - critic(real).mean() + penalty
        of_c.zero_grad()
        loss.backward()
        of_c.step()
        return loss, penalty

    @job
    def generator_step(noise):
        loss = -critic(generator(noise)).mean()
        of_g.zero_grad()
        loss.backward()
        of_g.step()
        return loss

    g = torch.Generator().manual_seed(3)

    def run(real, noise):
        found = [critic_step(real, noise, torch.rand(8, 1, generator=g)) for _ in range(2)]
        return found, generator_step(noise)

    return Training({"generator": generator, "critic": critic}, [of_c, of_g], run, pairs(6, 3))


@recipe("adversarial", "a GAN with spectral norm and hinge loss")
def spectral(job):
    """parametrizations.spectral_norm, whose vectors are buffers that each forward pass moves on."""
    generator, discriminator = players(parametrizations.spectral_norm)
    of_g, of_d = adam(generator), adam(discriminator)

    @job
    def train_step(real, noise):
        loss_d = F.relu(1 - discriminator(real)).mean() + F.relu(1 + discriminator(generator(noise).detach())).mean()
        of_d.zero_grad()
        loss_d.backward()
        of_d.step()
        loss_g = -discriminator(generator(noise)).mean()
        of_g.zero_grad()
        loss_g.backward()
        of_g.step()
        return loss_d, loss_g

    return Training({"generator": generator, "discriminator": discriminator}, [of_d, of_g], train_step, pairs(6, 3))


@recipe("adversarial", "WGAN with clipped weights")
def clipped(job):
    """Weights that are clamped in place behind the optimizer's step."""
    generator, critic = players()
    of_g, of_c = (torch.optim.RMSprop(m.parameters(), 1e-3) for m in (generator, critic))

    @job
    def train_step(real, noise):
        loss = critic(generator(noise).detach()).mean() - critic(real).mean()
        of_c.zero_grad()
        loss.backward()
        of_c.step()
        with torch.no_grad():
            for p in critic.parameters():
                p.clamp_(-0.1, 0.1)
        of_g.zero_grad()
        made = -critic(generator(noise)).mean()
        made.backward()
        of_g.step()
        return loss, made

    return Training({"generator": generator, "critic": critic}, [of_c, of_g], train_step, pairs(6, 3))


@recipe("adversarial", "a conditional GAN with R1")
def r1(job):
    """Labels as embeddings on both sides, a projection discriminator, a penalty on gradients of the input."""

    class Discriminator(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head, self.labels = nn.Linear(6, 8), nn.Linear(8, 1), nn.Embedding(4, 8)

        def forward(self, x, y):
            h = F.softplus(self.body(x))
            return self.head(h).squeeze(-1) + (h * self.labels(y)).sum(-1)

    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.labels, self.body = nn.Embedding(4, 3), nn.Linear(6, 6)

        def forward(self, noise, y):
            return self.body(torch.cat([noise, self.labels(y)], -1))

    generator, discriminator = Generator(), Discriminator()
    of_g, of_d = adam(generator), adam(discriminator)

    @job
    def train_step(real, labels):
        noise = real[:, :3].flip(0)
        real = real.detach().requires_grad_(True)
        right = discriminator(real, labels)
        (slope,) = torch.autograd.grad(right.sum(), real, create_graph=True)
        loss_d = F.softplus(-right).mean() + slope.square().sum(1).mean()
        loss_d = loss_d + F.softplus(discriminator(generator(noise, labels).detach(), labels)).mean()
        of_d.zero_grad()
        loss_d.backward()
        of_d.step()
        loss_g = F.softplus(-discriminator(generator(noise, labels), labels)).mean()
        of_g.zero_grad()
        loss_g.backward()
        of_g.step()
        return loss_d, loss_g

    return Training({"generator": generator, "discriminator": discriminator}, [of_d, of_g], train_step, classes(6, 4))


@recipe("adversarial", "CycleGAN")
def cycle(job):
    """Four networks and two optimizers over chained parameters, frozen discriminators by requires_grad_ in the step."""
    there, back = nn.Linear(6, 6), nn.Linear(6, 6)
    judges = nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 1)])
    of_g = torch.optim.Adam([*there.parameters(), *back.parameters()], 1e-2, eps=1e-5)
    of_d = torch.optim.Adam(judges.parameters(), 1e-2, eps=1e-5)

    @job
    def train_step(a, b):
        judges.requires_grad_(False)
        made_b, made_a = there(a), back(b)
        cycle = F.l1_loss(back(made_b), a) + F.l1_loss(there(made_a), b)
        loss_g = (judges[1](made_b) - 1).square().mean() + (judges[0](made_a) - 1).square().mean() + 10 * cycle
        of_g.zero_grad()
        loss_g.backward()
        of_g.step()
        judges.requires_grad_(True)
        loss_d = sum(
            (judge(real) - 1).square().mean() + judge(made.detach()).square().mean()
            for judge, real, made in ((judges[0], a, made_a), (judges[1], b, made_b))
        )
        of_d.zero_grad()
        loss_d.backward()
        of_d.step()
        return loss_g, loss_d

    models = {"there": there, "back": back, "judges": judges}
    return Training(models, [of_g, of_d], train_step, pairs(6, 6))


@recipe("adversarial", "adversarial examples by FGSM and PGD")
def robust(job):
    """Gradients of the input by autograd.grad, inputs that are moved along their sign, in a loop."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @job
    def train_step(x, y):
        worse = x
        for _ in range(2):
            worse = worse.detach().requires_grad_()
            (slope,) = torch.autograd.grad(F.cross_entropy(model(worse), y), worse)
            worse = x + (worse + 0.05 * slope.sign() - x).clamp(-0.1, 0.1)
        loss = F.cross_entropy(model(worse.detach()), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, train_step, classes(6, 4))


@recipe("adversarial", "a domain classifier behind reversed gradients")
def reversal(job):
    """An autograd.Function whose backward turns the gradient round, with a strength from outside."""

    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, strength):
            ctx.strength = strength
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return -ctx.strength * gradient, None

    model = nn.ModuleDict({"body": nn.Linear(6, 8), "label": nn.Linear(8, 4), "domain": nn.Linear(8, 2)})
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    @job
    def train_step(x, y):
        h = torch.tanh(model["body"](x))
        domain = (torch.arange(len(x)) % 2).long()
        loss = F.cross_entropy(model["label"](h), y)
        fooled = F.cross_entropy(model["domain"](Reverse.apply(h, 0.3)), domain)
        optimizer.zero_grad()
        (loss + fooled).backward()
        optimizer.step()
        return loss, fooled

    return Training(model, optimizer, train_step, classes(6, 4))


@recipe("adversarial", "sharpness-aware minimisation")
def sam(job):
    """Two backward passes in a step; parameters are moved uphill in between and put back."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    @job
    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moves = [0.05 * p.grad / (norm + 1e-12) for p in model.parameters()]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(model, optimizer, train_step, classes(6, 4))
