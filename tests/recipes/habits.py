"""Scripts in the ways in which people write them: what is passed, what old tutorials do with ``.data``."""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from recipes.data import classes, numbers, pairs, tokens
from recipes.recipe import Training, recipe


def classifier():
    """A small network."""
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


@dataclass
class Settings:
    """What a command line says."""

    alpha: float = 0.1
    lasso: bool = False
    clip: float = 1.0


@recipe("habits", "everything is an argument")
def everything(job):
    """The step is a function of model, criterion, optimizer, batch and settings, which change between calls."""
    model, settings = classifier(), Settings()
    optimizer, criterion = torch.optim.Adam(model.parameters(), 1e-2), nn.CrossEntropyLoss(label_smoothing=0.05)

    @job
    def train_one_step(model, criterion, optimizer, batch, args):
        x, y = batch
        loss = criterion(model(x), y)
        if args.lasso:
            loss = loss + args.alpha * sum(p.abs().sum() for p in model.parameters())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        return loss

    @job(type="predict")
    def evaluate(model, criterion, batch):
        return criterion(model(batch[0]), batch[1])

    def run(x, y, i):
        settings.lasso, settings.clip = i >= 2, 0.1 if i == 3 else 1.0
        loss = train_one_step(model, criterion, optimizer, (x, y), settings)
        return loss, evaluate(model, criterion, (x, y))

    return Training(model, optimizer, run, [(*b, i) for i, b in enumerate(classes(5, 3, steps=5))])


@recipe("habits", "one step for several models", whole="the folds differ in their batches only")
def folds(job):
    """Cross-validation: a job that is given another model and another optimizer in turn."""
    models = {str(i): classifier() for i in range(2)}
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in models.values()]

    @job
    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    def run(x, y, fold):
        return step(models[str(fold)], optimizers[fold], x, y)

    return Training(models, optimizers, run, [(*b, i % 2) for i, b in enumerate(classes(5, 3, steps=5))])


@recipe("habits", "updates by hand of .data")
def by_hand(job):
    """``p.data -= …``, ``p.data = p.data * …``, momentum in a list, the rate in a global."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.Linear(6, 1))
    momenta = [torch.zeros_like(p.data) for p in model.parameters()]
    rate = 0.1

    @job
    def step(x, y):
        loss = ((model(x) - y) ** 2).mean()
        model.zero_grad()
        loss.backward()
        for p, momentum in zip(model.parameters(), momenta, strict=True):
            momentum.mul_(0.9).add_(p.grad.data)
            p.data -= rate * momentum
            p.data = p.data * (1 - 1e-3)
        return loss.data

    def run(x, y, i):
        nonlocal rate
        rate = 0.1 if i < 2 else 0.05
        return step(x, y)

    batches = [(*b, i) for i, b in enumerate(pairs(4, 1, steps=4))]
    return Training(model, [], run, batches, kept=lambda: momenta)


@recipe("habits", "Newton's method with conjugate gradients", whole="its products are with all parameters at once")
def newton(job):
    """Hessian-vector products, ``parameters_to_vector`` and ``vector_to_parameters``."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    params = list(model.parameters())

    @job
    def step(x):
        loss = F.mse_loss(model(x), x[:, :2])
        flat = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, params, create_graph=True)])

        def product(v):
            found = torch.autograd.grad(flat @ v, params, retain_graph=True)
            return torch.cat([h.reshape(-1) for h in found]) + 0.5 * v

        way = torch.zeros_like(flat).detach()
        left = -flat.detach()
        direction, size = left.clone(), left @ left
        for _ in range(3):
            along = product(direction)
            far = size / (direction @ along)
            way, left = way + far * direction, left - far * along
            before, size = size, left @ left
            direction = left + size / before * direction
        vector = nn.utils.parameters_to_vector(params).detach() + 0.5 * way
        nn.utils.vector_to_parameters(vector, params)
        return loss

    return Training(model, [], step, numbers(4))


@recipe("habits", "a recurrent network with init_hidden", whole="the hidden state is that of all rows")
def hidden(job):
    """``next(self.parameters()).new_zeros(…)`` and ``repackage_hidden`` outside of the step, between calls."""

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn, self.out = (
                nn.Embedding(12, 10),
                nn.LSTM(10, 10, 2, batch_first=True),
                nn.Linear(10, 12),
            )

        def forward(self, x, state):
            h, state = self.rnn(self.embed(x), state)
            return self.out(h), state

        def init_hidden(self, rows):
            weight = next(self.parameters())
            return weight.new_zeros(2, rows, 10), torch.zeros(2, rows, 10).type_as(weight)

    model = Network()
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-2, alpha=0.9)
    state = None

    @job
    def step(x, y, state):
        model.zero_grad()
        out, state = model(x, state)
        loss = F.cross_entropy(out.flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        return loss, tuple(v.detach() for v in state)

    def run(x, y, i):
        nonlocal state
        if i % 2 == 0:
            state = model.init_hidden(len(x))
        loss, state = step(x, y, state)
        state = tuple(v.detach() for v in state)
        return loss

    return Training(model, optimizer, run, [(*b, i) for i, b in enumerate(tokens(4, 12, steps=4))])


@recipe("habits", "outer steps between calls")
def outer(job):
    """Reptile: weights are copied before some steps, and put between both afterwards by ``load_state_dict``."""
    model = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1))

    @job
    def inner(x, y, rate=0.05):
        model.zero_grad()
        loss = (model(x) - y).pow(2).mean()
        loss.backward()
        for p in model.parameters():
            p.data -= rate * p.grad.data
        return loss

    def run(x, phase):
        before = copy.deepcopy(model.state_dict())
        losses = [inner(x + k, torch.sin(x + phase)) for k in range(2)]
        after = model.state_dict()
        model.load_state_dict({n: before[n] + 0.3 * (after[n] - before[n]) for n in before})
        return losses

    return Training(model, [], run, [(*b, i) for i, b in enumerate(numbers(1))])


@recipe("habits", "an attentive reader with a flag")
def reader(job):
    """Another value of an argument is another plan, over the same state of the optimizer."""

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.bridge = nn.GRU(8, 12, bidirectional=True, batch_first=True), nn.Linear(24, 12)
            self.score, self.cell, self.out = nn.Linear(36, 1), nn.GRUCell(24, 12), nn.Linear(12, 11)

        def forward(self, x, strong):
            seen, last = self.rnn(x)
            h = torch.tanh(self.bridge(torch.cat((last[-2], last[-1]), 1)))
            both = torch.cat((h[:, None].expand(-1, seen.shape[1], -1), seen), 2)
            weights = self.score(both).squeeze(2).softmax(1)
            h = self.cell(torch.bmm(weights[:, None], seen).squeeze(1), h)
            return self.out(h * 2 if strong else h)

    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)

    @job
    def step(x, strong):
        optimizer.zero_grad()
        loss = model(x, strong).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, step, [(*b, i == 1) for i, b in enumerate(numbers(5, 8))])
