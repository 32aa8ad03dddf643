"""bfloat16: autocast, models in bfloat16, and loss scaling.  Judged by float32's distance."""

import torch
import torch.nn.functional as F
from torch import nn

from recipes.data import classes, pairs, pictures, tokens
from recipes.recipe import Training, recipe

KIND = "bfloat16"


def mixed(job):
    return torch.autocast("cpu", torch.bfloat16, enabled=job.mixed)


@recipe(KIND, "autocast over a classifier", bfloat16=True)
def classifier(job):
    """Linear layers in bfloat16, the loss in float32."""
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-4)

    @job
    def train_step(x, y):
        with mixed(job):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return Training(model, optimizer, train_step, classes(6, 4))


@recipe(KIND, "autocast over a CNN", bfloat16=True)
def cnn(job):
    """Convolutions in bfloat16, group norm in float32."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.Flatten(), nn.Linear(32, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    @job
    def train_step(x, y):
        with mixed(job):
            logits = model(x)
        loss = F.cross_entropy(logits.float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, train_step, pictures())


@recipe(KIND, "autocast over attention", bfloat16=True)
def attention(job):
    """nn.TransformerEncoderLayer, an island of float32 within autocast, a loss outside of it."""
    model = nn.ModuleDict({
        "embed": nn.Embedding(11, 8),
        "body": nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), "head": nn.Linear(8, 11),
    })  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-4)

    @job
    def train_step(words, following):
        with mixed(job):
            h = model["body"](model["embed"](words))
            with torch.autocast("cpu", enabled=False):
                h = h.float() / h.float().norm(dim=-1, keepdim=True)
            logits = model["head"](h)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, train_step, tokens(5, 11))


@recipe(KIND, "a recurrent network under autocast", bfloat16=True)
def recurrent(job):
    """nn.LSTM with autocast as a decorator of the forward pass."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 1)

        @torch.autocast("cpu", torch.bfloat16, enabled=job.mixed)
        def forward(self, x):
            return self.head(self.lstm(x)[0])

    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-4)

    @job
    def train_step(x, y):
        loss = F.mse_loss(model(x.view(-1, 4, 6)).squeeze(-1).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, train_step, pairs(24, 4))


@recipe(KIND, "a model in bfloat16 with masters in float32", bfloat16=True)
def masters(job):
    """Gradients copied up to float32 parameters, steps there, and copied down."""
    low = torch.bfloat16 if job.mixed else torch.float32
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    master = nn.ParameterList(p.detach().clone() for p in model.parameters())
    model.to(low)
    optimizer = torch.optim.AdamW(master.parameters(), 0.01, eps=1e-4)

    @job
    def train_step(x, y):
        loss = F.cross_entropy(model(x.to(low)).float(), y)
        loss.backward()
        for up, p in zip(master, model.parameters(), strict=True):
            up.grad = p.grad.float()
            p.grad = None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for up, p in zip(master, model.parameters(), strict=True):
                p.copy_(up)
        return loss

    return Training({"model": model, "master": master}, optimizer, train_step, classes(6, 4), uncalled=("master",))


@recipe(KIND, "everything in bfloat16", bfloat16=True)
def pure(job):
    """Parameters, optimizer and inputs in bfloat16; the loss in float32."""
    low = torch.bfloat16 if job.mixed else torch.float32
    model = nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 4)).to(low)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    @job
    def train_step(x, y):
        loss = F.cross_entropy(model(x.to(low)).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, train_step, classes(6, 4))


@recipe(KIND, "a GAN under autocast", bfloat16=True)
def gan(job):
    """Two optimizers, two regions of autocast, a penalty with create_graph outside of them."""
    generator, critic = (
        nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6)),
        nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)),
    )
    of_g, of_c = (torch.optim.SGD(m.parameters(), 0.05) for m in (generator, critic))

    @job
    def train_step(real, noise):
        with mixed(job):
            made = generator(noise)
            loss = F.softplus(critic(made.detach())).mean() + F.softplus(-critic(real)).mean()
        points = real.clone().requires_grad_()
        (slope,) = torch.autograd.grad(critic(points).sum(), points, create_graph=True)
        of_c.zero_grad()
        (loss + slope.square().sum(1).mean()).backward()
        of_c.step()
        with mixed(job):
            fooled = F.softplus(-critic(made)).mean()
        of_g.zero_grad()
        fooled.backward()
        of_g.step()
        return loss, fooled

    return Training({"generator": generator, "critic": critic}, [of_g, of_c], train_step, pairs(6, 3))


@recipe(KIND, "checkpoints under autocast", bfloat16=True)
def checkpointed(job):
    """Recomputation in the dtype of the forward pass."""
    from torch.utils.checkpoint import checkpoint

    blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)) for _ in range(2))
    head = nn.Linear(6, 4)
    model = nn.ModuleDict({"blocks": blocks, "head": head})
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    @job
    def train_step(x, y):
        with mixed(job):
            for block in blocks:
                x = x + checkpoint(block, x, use_reentrant=False)
            loss = F.cross_entropy(head(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, train_step, classes(6, 4))
