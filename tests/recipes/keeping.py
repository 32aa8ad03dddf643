"""What a step keeps for the next one, what it takes and what it returns."""

import collections
import copy
import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

from recipes.data import classes, numbers, pairs, tokens
from recipes.recipe import Refused, Training, recipe

KIND = "state and structure"


@recipe(KIND, "truncated backpropagation through time")
def tbptt(job):
    """An LSTM's state, detached and kept in the module for the next call."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(3, 6, batch_first=True), nn.Linear(6, 3)
            self.state = None

        def forward(self, x):
            out, state = self.lstm(x, self.state)
            self.state = tuple(s.detach() for s in state)
            return self.head(out)

    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-5)

    @job
    def train_step(x):
        loss = F.mse_loss(model(x[:, :-1]), x[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, train_step, numbers(5, 3, steps=4), lambda: model.state)


@recipe(KIND, "a hidden state that goes through the loop")
def passed(job):
    """The state is an argument and a result of each call, a tuple of tensors."""
    model = nn.ModuleDict({"cell": nn.GRUCell(3, 5), "head": nn.Linear(5, 3)})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @job
    def train_step(x, state):
        hidden, mean = state
        hidden = model["cell"](x, hidden)
        loss = F.mse_loss(model["head"](hidden), x.roll(1, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss, (hidden.detach(), 0.9 * mean + 0.1 * hidden.detach().mean(1, keepdim=True))

    kept = {"state": (torch.zeros(8, 5), torch.zeros(8, 1))}

    def run(x):
        loss, kept["state"] = train_step(x, kept["state"])
        return loss

    return Training(model, optimizer, run, numbers(3, steps=4), lambda: kept["state"])


@recipe(
    KIND, "running means of inputs", whole="statistics move on with each forward pass, and so between micro-batches"
)
def normaliser(job):
    """Buffers assigned anew, a count in a tensor, a lazily made buffer, a momentum that depends on the count."""

    class Normaliser(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))
            self.register_buffer("square", torch.ones(6))
            self.register_buffer("count", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            if self.training:
                self.count += 1
                share = 1 / self.count.to(x.dtype)
                self.mean = self.mean + share * (x.detach().mean(0) - self.mean)
                self.square = self.square + share * (x.detach().square().mean(0) - self.square)
            return (x - self.mean) / (self.square - self.mean**2).clamp(min=1e-2).sqrt()

    model = nn.Sequential(Normaliser(), nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @job
    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(model, optimizer, train_step, classes(6, 4, steps=4))


@recipe(KIND, "a memory that is written to", whole="rows of the memory are those of the batch")
def memory(job):
    """index_copy_ and index assignment into a buffer at positions that are data."""
    model = nn.Linear(6, 4)
    model.register_buffer("memory", torch.zeros(12, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @job
    def train_step(x, where):
        z = model(x)
        loss = F.mse_loss(z, 0.5 * model.memory[where] + 0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.memory[where] = 0.5 * model.memory[where] + 0.5 * z.detach()
        return loss

    g = torch.Generator().manual_seed(3)
    return Training(
        model, optimizer, train_step, [(x, torch.randperm(12, generator=g)[:8]) for (x,) in numbers(6, steps=4)]
    )


@recipe(KIND, "a prioritised loss with a deque of past losses")
def history(job):
    """Tensors in a collections.deque of fixed length that the step appends to."""
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    past = collections.deque([torch.ones(()) for _ in range(3)], maxlen=3)

    @job
    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        scaled = loss / torch.stack(tuple(past)).mean()
        past.append(loss.detach())
        optimizer.zero_grad()
        scaled.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, train_step, classes(6, 4, steps=4), lambda: list(past))


@recipe(KIND, "metrics in a torch-like accumulator", whole="counts are of what a call has seen")
def metrics(job):
    """A confusion matrix by bincount and index_put with accumulate, in a buffer of a module that is no model."""

    class Confusion(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.zeros(4, 4, dtype=torch.long))
            self.register_buffer("seen", torch.zeros(4))

        def update(self, found, wanted):
            self.table += torch.bincount(wanted * 4 + found, minlength=16).view(4, 4)
            self.seen.index_put_((wanted,), torch.ones(len(wanted)), accumulate=True)

    model, metric = nn.Linear(6, 4), Confusion()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @job
    def train_step(x, y):
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metric.update(logits.argmax(-1), y)
        return loss, (logits.argmax(-1) == y).double().mean()

    return Training({"model": model, "metric": metric}, optimizer, train_step, classes(6, 4), uncalled=("metric",))


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
    hidden: list


@recipe(KIND, "dictionaries in and dataclasses out")
def structured(job):
    """A batch as a dictionary with nested tensors, a dataclass of a model, results that keep their structure."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
            self.head = nn.Linear(6, 4)

        def forward(self, x, labels=None):
            hidden = [x]
            for layer in self.layers:
                hidden.append(torch.tanh(layer(hidden[-1])))
            logits = self.head(hidden[-1])
            return Output(F.cross_entropy(logits, labels), logits, hidden[1:])

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-5)

    @job
    def train_step(batch):
        out = model(**batch["inputs"])
        loss = out.loss + sum(h.square().mean() * w for h, w in zip(out.hidden, batch["weights"], strict=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return out

    batches = [
        ({"inputs": {"x": x, "labels": y}, "weights": [torch.tensor(0.1), torch.tensor(0.2), torch.tensor(0.0)]},)
        for x, y in classes(6, 4)
    ]
    return Training(model, optimizer, train_step, batches)


Scales = collections.namedtuple("Scales", ["coarse", "fine", "nothing"])


@recipe(KIND, "nested lists and named tuples of outputs")
def nested(job):
    """Several scales, a namedtuple, None and numbers among the results."""
    model = nn.ModuleList([nn.Linear(6, 3), nn.Linear(3, 2)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @job
    def train_step(x, y):
        coarse = model[0](x)
        fine = model[1](coarse.tanh())
        loss = coarse.square().mean() + (fine - y).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return Scales([coarse.mean(), [coarse.detach(), fine.sum(0)]], {"fine": (fine, 3)}, None), loss

    return Training(model, optimizer, train_step, pairs(6, 2))


@recipe(KIND, "batches of two sizes and a phase that changes")
def phases(job):
    """A shorter last batch, a weight of a config object that the loop changes, a curriculum's string."""
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    config = {"phase": "warm-up", "weight": 0.1}

    @job
    def train_step(x, y):
        logits = model(x)
        loss = F.cross_entropy(logits, y) + config["weight"] * logits.square().mean()
        if config["phase"] == "hard":
            loss = loss + logits.amax(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def run(x, y):
        loss = train_step(x, y)
        if len(x) == 4:
            config.update(phase="hard", weight=0.2)
        return loss

    (a, b, c, d) = classes(6, 4, steps=4)
    return Training(model, optimizer, run, [a, (b[0][:4], b[1][:4]), c, d])


@recipe(KIND, "training and evaluation in turn", whole="batch norm sees one micro-batch at a time")
def evaluated(job):
    """train() and eval() around two jobs over a model with batch norm and dropout of none."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-5)

    @job
    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    @job(type="predict")
    def predict(x):
        return model(x).softmax(-1)

    def run(x, y):
        model.train()
        loss = train_step(x, y)
        model.eval()
        return loss, predict(x[:6])

    return Training(model, optimizer, run, classes(6, 4))


@recipe(KIND, "a checkpoint that is loaded in the middle")
def restored(job):
    """state_dict of model and optimizer saved, trained on, put back."""
    model = nn.Linear(6, 4)
    optimizer = torch.optim.Adam(model.parameters(), 0.05, eps=1e-5)
    calls, saved = [], {}

    @job
    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def run(x, y):
        calls.append(train_step(x, y))
        if len(calls) == 1:
            saved["model"] = {k: v.clone() for k, v in model.state_dict().items()}
            saved["state"] = copy.deepcopy(optimizer.state_dict())
        if len(calls) == 3:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["state"])
        return calls[-1]

    return Training(model, optimizer, run, classes(6, 4, steps=4))


@recipe(KIND, "dropout by given masks")
def dropout(job):
    """Dropout, variational dropout over time and drop path as products with masks that the loader draws."""
    model = nn.ModuleDict({"rnn": nn.GRU(4, 6, batch_first=True), "a": nn.Linear(6, 6), "head": nn.Linear(6, 2)})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @job
    def train_step(x, keep, path):
        out, _ = model["rnn"](x)
        out = out * keep[:, None] / 0.8
        out = out + model["a"](out).relu() * path[:, None, None]
        loss = model["head"](F.dropout(out, 0.5, training=False)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    g = torch.Generator().manual_seed(2)
    batches = [
        (x, (torch.rand(8, 6, generator=g) < 0.8).double(), (torch.rand(8, generator=g) < 0.5).double())
        for (x,) in numbers(5, 4)
    ]
    return Training(model, optimizer, train_step, batches)


@recipe(KIND, "a method of a trainer class")
def trainer(job):
    """The step is a method; model, optimizer, criterion and options are attributes."""

    class Trainer:
        def __init__(self):
            self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
            self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01, eps=1e-5)
            self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
            self.options = {"clip": 0.5, "weights": [1.0, 0.1]}
            self.train_step = job(self.train_step)

        def losses(self, x, y):
            logits = self.model(x)
            yield self.criterion(logits, y)
            yield logits.logsumexp(-1).square().mean()

        def train_step(self, x, y):
            self.optimizer.zero_grad(set_to_none=False)
            total = sum(w * part for w, part in zip(self.options["weights"], self.losses(x, y), strict=True))
            total.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.options["clip"])
            self.optimizer.step()
            return total

    it = Trainer()
    return Training(it.model, it.optimizer, it.train_step, classes(6, 4))


@recipe(
    KIND,
    "a decision on a value in the step",
    refused=Refused(
        "looks at the value of a tensor",
        "The step is captured once for all inputs, and an `if` on a value would keep one branch.",
        "`torch.where`, a product with a condition, or the decision in the loop.",
    ),
)
def values(job):
    """An ``if loss > 3`` in the step."""
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @job
    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        if loss > 3:
            loss = loss * 0.1
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, train_step, classes(6, 4))


@recipe(KIND, "a scheduler in the step")
def scheduled(job):
    """scheduler.step() among the tensors."""
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)

    @job
    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    return Training(model, optimizer, train_step, classes(6, 4))


@recipe(KIND, "a count of calls in Python")
def counted(job):
    """self.calls += 1, and an annealing weight that depends on it."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.calls = nn.Linear(6, 4), 0

        def forward(self, x):
            self.calls += 1
            return self.layer(x) * min(1.0, self.calls / 10)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @job
    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, train_step, classes(6, 4, steps=4))


@recipe(KIND, "a KL weight that is annealed by a tensor")
def annealed(job):
    """A count in a buffer instead of Python, min and max of tensors, and an argument that is a tensor of no dims."""
    model = nn.Linear(6, 4)
    model.register_buffer("calls", torch.zeros(()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @job
    def train_step(x, y, scale):
        with torch.no_grad():
            model.calls.add_(1)
        weight = torch.clamp(model.calls / 3, max=1.0)
        logits = model(x)
        loss = F.cross_entropy(logits, y) + weight * scale * logits.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss, weight

    return Training(
        model, optimizer, train_step, [(*b, torch.tensor(0.1 * i)) for i, b in enumerate(classes(6, 4, steps=4))]
    )


@recipe(KIND, "unused parameters and layers that are skipped")
def unused(job):
    """Parameters without a gradient, a branch by a flag of the batch's index, layer drop by given numbers."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
            self.never = nn.Linear(6, 6)
            self.head = nn.Linear(6, 11)

        def forward(self, x, kept):
            for layer, keep in zip(self.layers, kept.unbind(), strict=True):
                x = x + keep * torch.tanh(layer(x))
            return self.head(x)

    model = Model()
    embed = nn.Embedding(11, 6)
    optimizer = torch.optim.AdamW([*model.parameters(), *embed.parameters()], 0.01, eps=1e-5, weight_decay=0.1)

    @job
    def train_step(words, following, kept):
        loss = F.cross_entropy(model(embed(words), kept).flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    batches = [(*b, torch.tensor([1.0, i % 2, 0.5])) for i, b in enumerate(tokens(3, 11))]
    return Training({"model": model, "embed": embed}, optimizer, train_step, batches)


@recipe(KIND, "a queue with its pointer in a buffer")
def queue_with_a_pointer(job):
    """MoCo's queue: int(self.queue_ptr), a slice from there, and a pointer that goes round."""

    class Contrast(nn.Module):
        def __init__(self, dim=4, size=16):
            super().__init__()
            self.size = size
            self.query, self.key = nn.Linear(6, dim), nn.Linear(6, dim).requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(dim, size), dim=0))
            self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

        @torch.no_grad()
        def enqueue(self, keys):
            ptr, count = int(self.queue_ptr), keys.shape[0]
            assert self.size % count == 0
            self.queue[:, ptr : ptr + count] = keys.T
            self.queue_ptr[0] = (ptr + count) % self.size

        def forward(self, x):
            q, k = F.normalize(self.query(x), dim=-1), F.normalize(self.key(x * 1.1), dim=-1)
            logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ self.queue.clone()], 1) / 0.2
            self.enqueue(k)
            return logits

    model = Contrast()
    optimizer = torch.optim.SGD(model.query.parameters(), 0.05, momentum=0.9)

    @job
    def train_step(x):
        logits = model(x)
        loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, train_step, numbers(6, steps=5))


@recipe(KIND, "a replay memory that counts in Python")
def replay(job):
    """self.memory[self.at : self.at + n] = x, with numbers as attributes, and what is there so far as a divisor."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("memory", torch.zeros(24, 4))
            self.at = self.filled = 0

        def forward(self, x):
            h, rows = self.layer(x), x.shape[0]
            with torch.no_grad():
                self.memory[self.at : self.at + rows] = h
            self.at = (self.at + rows) % len(self.memory)
            self.filled = min(self.filled + rows, len(self.memory))
            return h + self.memory.sum(0) / self.filled

    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-5)

    @job
    def train_step(x, y):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, train_step, pairs(4, 4, steps=5))
