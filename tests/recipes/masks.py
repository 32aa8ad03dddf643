"""Losses over what a mask selects."""

import torch
import torch.nn.functional as F
from torch import nn

from recipes.data import classes, numbers, pairs, tokens
from recipes.losses import network, training
from recipes.recipe import Refused, recipe


@recipe("masks", "a label mask by indexing")
def picked(job):
    """logits[mask], whose shape depends on values, and labels[mask]."""

    def loss(model, words, following):
        x = F.one_hot(words, 11).to(torch.get_default_dtype())
        mask = following > 3
        return F.cross_entropy(model(x)[mask], following[mask])

    return training(job, network(11, 11), loss, tokens(4, 11))


@recipe("masks", "masked language modelling with a head over masked words alone")
def bert(job):
    """Hidden states by a mask, a dense layer, GELU and LayerNorm over them, weights tied to the embedding."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(12, 8)
            self.body = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.dense, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
            self.bias = nn.Parameter(torch.zeros(12))

        def forward(self, words, mask):
            hidden = self.body(self.embed(words.masked_fill(mask, 11)))
            picked = self.norm(F.gelu(self.dense(hidden[mask])))
            return picked @ self.embed.weight.t() + self.bias

    def loss(model, words, following):
        mask = (words + following) % 4 == 0
        logits = model(words, mask)
        right = (logits.argmax(-1) == words[mask]).sum() / mask.sum()
        return F.cross_entropy(logits, words[mask]) + 0 * right

    return training(job, Model(), loss, tokens(6, 11))


@recipe("masks", "detection with boxes of positive anchors")
def anchors(job):
    """Smooth L1 of the boxes that have an object by the number of these, IoU over them, BCE of all."""
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5))

    def loss(model, x, y):
        out = model(x)
        boxes, score = out[..., :4], out[..., 4]
        positive = y[..., 0] > 0
        count = positive.sum().clamp(min=1)
        found, wanted = boxes[positive].exp(), y[positive].abs() + 0.1
        inside = torch.minimum(found, wanted).prod(-1)
        iou = inside / (found.prod(-1) + wanted.prod(-1) - inside)
        box = F.smooth_l1_loss(boxes[positive], y[positive], reduction="sum") / count
        return box + (1 - iou).mean() + F.binary_cross_entropy_with_logits(score, positive.to(score.dtype))

    g = torch.Generator().manual_seed(7)
    batches = [(torch.randn(8, 5, 6, generator=g), torch.randn(8, 5, 4, generator=g)) for _ in range(3)]
    return training(job, model, loss, batches)


@recipe("masks", "imputation of missing values")
def imputation(job):
    """NaN in the data, which no gradient sees; a scale from what is known; gaps filled by x[gap] = found[gap]."""

    def loss(model, x):
        gap = x > 1
        holes = x.masked_fill(gap, float("nan"))
        known = ~torch.isnan(holes)
        scale = holes[known].std()
        filled = holes.clone()
        filled[gap] = 0.0
        found = model(filled / scale)
        filled[gap] = found[gap].detach()
        again = model(filled)
        return F.mse_loss(found[known], holes[known]) + F.l1_loss(again[known], holes[known]) + found[gap].abs().mean()

    return training(job, network(6, 6), loss, numbers(6, steps=3), 0.02)


@recipe("masks", "returns of steps that are not over")
def episodes(job):
    """Ratios of taken actions by gather, advantages normalised over what the mask leaves, entropy of a Categorical."""

    def loss(model, x, y):
        alive = y > 0
        policy = torch.distributions.Categorical(logits=model(x)[alive])
        log_p = policy.log_prob(y[alive])
        advantage = x.sum(-1)[alive]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = (log_p - log_p.detach()).exp()
        clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return -clipped.mean() - 0.01 * policy.entropy().mean()

    return training(job, network(), loss, classes(6, 4))


@recipe("masks", "experts by indexing")
def experts(job):
    """Each expert computes the rows that are routed to it, by torch.where and index_add_, and by a mask."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(6, 3)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 4)) for _ in range(3))

        def forward(self, x):
            weights, chosen = self.gate(x).softmax(-1).topk(2)
            out = torch.zeros(len(x), 4)
            first = torch.zeros(len(x), 4)
            for number, expert in enumerate(self.experts):
                row, which = torch.where(chosen == number)
                out.index_add_(0, row, expert(x[row]) * weights[row, which, None])
                mine = chosen[:, 0] == number
                first[mine] = expert(x[mine])
            return out + 0.1 * first

    return training(job, Experts(), lambda m, x, y: F.mse_loss(m(x), y), pairs(6, 4))


@recipe("masks", "pairs of the same class")
def alike(job):
    """torch.where over all pairs, rows by both indices, and what a mask leaves of their products."""

    def loss(model, x, y):
        z = F.normalize(model(x), dim=-1)
        same = y[:, None] == y[None]
        others = same & ~torch.eye(len(y), dtype=torch.bool)
        i, j = torch.where(others)
        near = (z[i] - z[j]).square().sum() / others.sum().clamp(min=1)
        return near + F.relu((z @ z.t())[~same] - 0.1).mean()

    return training(job, network(), loss, classes(6, 4))


@recipe("masks", "a graph without some of its edges")
def edges(job):
    """edges[:, kept], messages by both ends, sums and degrees by index_add."""
    g = torch.Generator().manual_seed(8)
    batches = [
        (torch.randn(8, 6, generator=g), torch.randint(8, (2, 24), generator=g), torch.rand(24, generator=g) < 0.7)
        for _ in range(3)
    ]

    def loss(model, x, edge, kept):
        source, target = edge[:, kept]
        h = model(x)
        summed = torch.zeros_like(h).index_add(0, target, h[source])
        degree = torch.zeros(len(h)).index_add(0, target, torch.ones_like(target, dtype=h.dtype))
        links = (h[source] * h[target]).sum(-1)
        return (h + summed / degree.clamp(min=1)[:, None]).square().mean() + F.softplus(-links).mean()

    return training(job, network(), loss, batches)


@recipe("masks", "losses by how many there are")
def counted(job):
    """len(rows), rows.shape[0] and numel() as divisors, zeros(len(rows)) as labels, rows[arange(len(rows)), y]."""

    def loss(model, x, y):
        keep = y > 0
        rows, wanted = model(x)[keep], y[keep]
        n = rows.shape[0]
        n += 1
        likely = rows.log_softmax(-1)[torch.arange(len(rows)), wanted].sum() / max(len(wanted), 1)
        first = F.binary_cross_entropy_with_logits(rows[:, 0], torch.zeros(len(rows)), reduction="sum") / n
        share = (rows.view(len(rows), -1).argmax(1) == wanted).sum().item() / float(len(wanted))
        return first - likely + rows.square().sum() / rows.numel() + share * rows.mean() / len(x)

    return training(job, network(), loss, classes(6, 4))


@recipe("masks", "whole sequences by a mask")
def sequences(job):
    """x[keep] through an LSTM, a bidirectional GRU, cells, nn.MultiheadAttention and an encoder layer."""

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.lstm, self.gru = nn.LSTM(8, 8, 2, batch_first=True), nn.GRU(8, 4, bidirectional=True)
            self.cell, self.attend = nn.GRUCell(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.head = nn.Linear(8, 11)

        def forward(self, words):
            padding = words == 10
            h, (last, _) = self.lstm(self.embed(words))
            both, _ = self.gru(h.transpose(0, 1))
            h = h + both.transpose(0, 1) + self.cell(h[:, -1], last[-1])[:, None]
            h = h + self.attend(h, h, h, key_padding_mask=padding)[0]
            return self.head(self.layer(h, src_key_padding_mask=padding))

    def loss(model, words, following):
        words = words.index_fill(1, torch.tensor([0]), 1)  # a row of padding alone would be NaN
        keep = following[:, 0] > 4
        return F.cross_entropy(model(words[keep]).flatten(0, 1), following[keep].flatten())

    return training(job, Reader(), loss, tokens(5, 11))


@recipe(
    "masks",
    "the hardest of what a mask leaves",
    refused=Refused(
        "topk goes along the rows that",
        "Which rows are the largest, and how many there are to choose from, depends on values.",
        "`torch.where(mask, each, float('-inf')).topk(3)`: what the error shows.",
    ),
)
def hardest(job):
    """Topk of each[mask]."""

    def loss(model, x, y):
        each = F.cross_entropy(model(x), y, reduction="none")
        return each[y > 0].topk(3).values.mean()

    return training(job, network(), loss, classes(6, 4))
