"""Models and functions that torch.jit has compiled: scripted, traced, and parts of models that are plain otherwise."""

import torch
import torch.nn.functional as F
from torch import nn

from recipes.data import classes, pairs, pictures, tokens
from recipes.recipe import Training, recipe

KIND = "torch.jit"


def trained(job, model, optimizer, batches, loss_of):
    """The usual step."""

    @job
    def train_step(x, y):
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return Training(model, optimizer, train_step, batches)


class Looping(nn.Module):
    """Control flow over numbers, a buffer that is written, an attribute."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 8), nn.Linear(8, 4)
        self.times = 2
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, scale: float = 0.5):
        """Code as torch.jit takes it."""
        x = torch.relu(self.wide(x))
        for _ in range(self.times):
            x = x + scale * torch.tanh(x)
        if self.training and x.dim() == 2:
            self.calls += 1
            x = x * 1.5
        return self.narrow(x)


@recipe(KIND, "a scripted classifier")
def scripted(job):
    """torch.jit.script of a model with loops, branches and a counter."""
    model = torch.jit.script(Looping())
    return trained(job, model, torch.optim.AdamW(model.parameters(), 0.01, eps=1e-5), classes(6, 4), F.cross_entropy)


@recipe(KIND, "a traced regressor")
def traced(job):
    """torch.jit.trace of a model, whose plain twin shares the parameters."""
    plain = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
    model = torch.jit.trace(plain, torch.randn(8, 6))
    return trained(job, model, torch.optim.SGD(plain.parameters(), 0.05, momentum=0.9), pairs(6, 3), F.mse_loss)


@torch.jit.script
def swish(x, beta: float = 1.0):
    """An activation as timm has it."""
    return x * torch.sigmoid(x * beta)


class Block(nn.Module):
    """A convolution whose output goes in place through an activation, beside a path around it."""

    def __init__(self, channels):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.GroupNorm(2, channels)
        self.act = nn.SiLU(inplace=True)

    def forward(self, x):
        """Code as torch.jit takes it."""
        return x + self.act(self.norm(self.conv(x)))


@recipe(KIND, "scripted blocks in a plain model")
def blocks(job):
    """Scripted and traced submodules, a scripted activation, nn.Sequential around them."""

    class Swish(nn.Module):
        def forward(self, x):
            return swish(x, 1.1)

    traced_block = torch.jit.trace(Block(4), torch.randn(8, 4, 8, 8))
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), torch.jit.script(Block(4)), Swish(), traced_block, nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(4, 4),
    )  # fmt: skip
    return trained(job, model, torch.optim.Adam(model.parameters(), 0.01, eps=1e-5), pictures(), F.cross_entropy)


class Reading(nn.Module):
    """An embedding, a recurrent layer, attention and a head."""

    def __init__(self, words):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(words, 8), nn.GRU(8, 8, batch_first=True)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, words)

    def forward(self, x):
        """Code as torch.jit takes it."""
        h, _ = self.rnn(self.embed(x))
        q, k, v = self.qkv(h).view(h.size(0), h.size(1), 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(h.size())
        return {"logits": self.head(h), "hidden": h}


@recipe(KIND, "a scripted language model")
def language(job):
    """torch.jit.script of a recurrent layer with attention, which returns a dictionary."""
    model = torch.jit.script(Reading(11))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-5)

    @job
    def train_step(x, y):
        out = model(x)
        loss = F.cross_entropy(out["logits"].flatten(0, 1), y.flatten()) + 0.01 * out["hidden"].pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, train_step, tokens(5, 11))
