"""Graphs, recommendations and sets."""

import torch
import torch.nn.functional as F
from torch import nn

from recipes.data import numbers
from recipes.recipe import Training, recipe

SOURCE, TARGET = torch.tensor([0, 1, 2, 3, 4, 5, 0, 2, 4]), torch.tensor([1, 2, 3, 4, 5, 0, 3, 5, 1])
WHOLE = "the batch is one graph, whose nodes all see each other"


def training(job, model, loss_of, batches, optimizer=None):
    """One step of Adam on a loss of the model and the batch."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), 1e-2, eps=1e-5)

    @job
    def train_step(*batch):
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(model, optimizer, train_step, batches)


@recipe("graphs", "a graph convolution over one graph", whole=WHOLE)
def gcn(job):
    """Messages by index and index_add, degrees by bincount, a mask of training nodes."""
    model = nn.ModuleDict({"one": nn.Linear(4, 8), "two": nn.Linear(8, 3)})

    def spread(x):
        degree = torch.bincount(TARGET, minlength=6).clamp(min=1)[:, None]
        return torch.zeros_like(x).index_add(0, TARGET, x[SOURCE]) / degree + x

    def loss(model, x, y, known):
        logits = model["two"](spread(F.relu(model["one"](spread(x)))))
        each = F.cross_entropy(logits, y, reduction="none")
        return (each * known).sum() / known.sum()

    g = torch.Generator().manual_seed(3)
    batches = [
        (x, torch.randint(3, (6,), generator=g), torch.tensor([1.0, 1, 0, 1, 0, 1])) for (x,) in numbers(4, rows=6)
    ]
    return training(job, model, loss, batches)


@recipe("graphs", "graph attention over one graph", whole=WHOLE)
def gat(job):
    """A softmax over the edges of each node by scatter_reduce and index_add."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.map, self.score = nn.Linear(4, 5), nn.Linear(10, 1)

        def forward(self, x):
            h = self.map(x)
            e = F.leaky_relu(self.score(torch.cat([h[SOURCE], h[TARGET]], -1))).squeeze(-1)
            most = torch.full((6,), -1e9).scatter_reduce(0, TARGET, e.detach(), "amax")
            e = (e - most[TARGET]).exp()
            weights = e / torch.zeros(6).index_add(0, TARGET, e)[TARGET]
            return torch.zeros_like(h).index_add(0, TARGET, weights[:, None] * h[SOURCE])

    return training(job, Attention(), lambda m, x: (m(x) - 1).square().mean(), numbers(4, rows=6))


@recipe("graphs", "a batch of graphs with dense adjacency")
def dense(job):
    """Matrix products with normalised adjacencies, a readout over nodes, virtual nodes by a mask."""
    model = nn.ModuleDict({"one": nn.Linear(3, 6), "two": nn.Linear(6, 6), "head": nn.Linear(6, 1)})

    def loss(model, x):
        near = torch.sigmoid(5 * (x @ x.mT))
        near = near / near.sum(-1, keepdim=True)
        h = F.relu(model["one"](near @ x))
        h = F.relu(model["two"](near @ h)) + h
        return model["head"](h.amax(1)).square().mean()

    return training(job, model, loss, numbers(5, 3))


@recipe("graphs", "a batch of graphs side by side, pooled by scatter", whole=WHOLE)
def pooled(job):
    """Rows of several graphs with the graph of each row; sums, means and maxima by graph."""
    model = nn.ModuleDict({"node": nn.Linear(4, 6), "head": nn.Linear(18, 2)})
    graph = torch.tensor([0, 0, 1, 1, 1, 2, 3, 3])

    def loss(model, x):
        h = torch.tanh(model["node"](x))
        index = graph[:, None].expand_as(h)
        sums = torch.zeros(4, 6).scatter_add(0, index, h)
        means = torch.zeros(4, 6).scatter_reduce(0, index, h, "mean", include_self=False)
        maxima = torch.zeros(4, 6).scatter_reduce(0, index, h, "amax", include_self=False)
        return F.cross_entropy(model["head"](torch.cat([sums, means, maxima], -1)), torch.tensor([0, 1, 0, 1]))

    return training(job, model, loss, numbers(4))


@recipe("graphs", "EdgeConv with nearest neighbours of each batch")
def edges(job):
    """The smallest of distances, neighbours by gather and take_along_dim, a maximum over them."""
    model = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 4))

    def loss(model, points):
        near = torch.cdist(points, points).topk(3, largest=False).indices
        others = points.unsqueeze(1).expand(-1, 5, -1, -1)
        others = torch.take_along_dim(others, near[..., None], 2)
        here = points.unsqueeze(2).expand_as(others)
        return model(torch.cat([here, others - here], -1)).amax(2).square().mean()

    return training(job, model, loss, numbers(5, 3))


@recipe("graphs", "matrix factorisation")
def factorisation(job):
    """Embeddings of users and items, biases, a decay of used rows alone."""

    class Factors(nn.Module):
        def __init__(self):
            super().__init__()
            self.users, self.items = nn.Embedding(10, 4), nn.Embedding(12, 4)
            self.user_bias, self.item_bias = nn.Embedding(10, 1), nn.Embedding(12, 1)

        def forward(self, u, i):
            p, q = self.users(u), self.items(i)
            return (p * q).sum(-1) + (self.user_bias(u) + self.item_bias(i)).squeeze(-1), p, q

    def loss(model, u, i, rating):
        found, p, q = model(u, i)
        return F.mse_loss(found, rating) + 0.01 * (p.square().sum(-1) + q.square().sum(-1)).mean()

    model = Factors()
    return training(job, model, loss, _ratings(), torch.optim.SGD(model.parameters(), 0.1))


@recipe("graphs", "skip-gram with negative samples")
def skipgram(job):
    """Batched products with sampled rows of a table, log-sigmoid, an embedding with a maximal norm for padding."""
    model = nn.ModuleDict({"words": nn.Embedding(10, 4), "contexts": nn.Embedding(12, 4, padding_idx=0)})
    optimizer = torch.optim.Adagrad(model.parameters(), 0.1, initial_accumulator_value=0.1)
    g = torch.Generator().manual_seed(5)
    batches = [(u, i, torch.randint(12, (8, 3), generator=g)) for u, i, _ in _ratings()]

    def loss(model, word, context, wrong):
        w = model["words"](word)
        right = (w * model["contexts"](context)).sum(-1)
        others = torch.bmm(model["contexts"](wrong), w.unsqueeze(-1)).squeeze(-1)
        return -(F.logsigmoid(right) + F.logsigmoid(-others).sum(-1)).mean()

    return training(job, model, loss, batches, optimizer)


@recipe("graphs", "a two-tower recommender with wide and deep parts")
def towers(job):
    """Hashed crosses, buckets of numbers, softmax over the items of the batch with a correction."""
    model = nn.ModuleDict({
        "user": nn.Embedding(10, 6), "item": nn.Embedding(12, 6), "cross": nn.Embedding(16, 1),
        "deep": nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)),
    })  # fmt: skip

    def loss(model, u, i, rating):
        buckets = torch.bucketize(rating, torch.tensor([-1.0, 0, 1]))
        scores = model["deep"](model["user"](u)) @ model["item"](i).t() - torch.log1p(buckets.to(rating.dtype))
        wide = model["cross"]((u * 31 + i) % 16).squeeze(-1)
        own = torch.arange(len(u))
        return F.cross_entropy(scores, own) + F.binary_cross_entropy_with_logits(wide, (rating > 0).to(rating.dtype))

    return training(job, model, loss, _ratings())


@recipe("graphs", "deep sets")
def sets(job):
    """Sums, maxima and logsumexp over the elements of a set."""
    model = nn.ModuleDict({"each": nn.Linear(3, 6), "all": nn.Linear(18, 1)})

    def loss(model, x):
        h = F.elu(model["each"](x))
        pooled = torch.cat([h.sum(1), h.max(1).values, h.logsumexp(1)], -1)
        return F.mse_loss(model["all"](pooled).squeeze(-1), x.amax((1, 2)))

    return training(job, model, loss, numbers(5, 3))


@recipe("graphs", "a factorisation machine")
def machine(job):
    """Sums of squares minus squares of sums, a field of embeddings in one table with offsets."""
    table, first = nn.Embedding(22, 4), nn.Embedding(22, 1)
    model = nn.ModuleDict({"table": table, "first": first})
    model.register_parameter("bias", nn.Parameter(torch.zeros(1)))

    def loss(model, u, i, rating):
        fields = torch.stack([u, i], 1) + torch.tensor([0, 10])
        v = model["table"](fields)
        crosses = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(-1)
        found = model.bias + model["first"](fields).sum((1, 2)) + crosses
        return F.binary_cross_entropy_with_logits(found, (rating > 0).to(rating.dtype))

    return training(job, model, loss, _ratings())


def _ratings():
    g = torch.Generator().manual_seed(4)
    return [
        (torch.randint(10, (8,), generator=g), torch.randint(12, (8,), generator=g), torch.randn(8, generator=g))
        for _ in range(3)
    ]
