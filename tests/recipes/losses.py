"""Losses, over a small network."""

import torch
import torch.nn.functional as F
from torch import nn

from recipes.data import classes, numbers, pairs, tokens
from recipes.recipe import Training, recipe


def network(inside=6, out=4):
    return nn.Sequential(nn.Linear(inside, 8), nn.Tanh(), nn.Linear(8, out))


def training(job, model, loss_of, batches, rate=0.1):
    """One step of SGD on a loss of the model and the batch."""
    optimizer = torch.optim.SGD(model.parameters(), rate)

    @job
    def train_step(*batch):
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, train_step, batches)


@recipe("losses", "cross entropy with weights, smoothing and an ignored class")
def weighted(job):
    """A weighted mean over what is not ignored, whatever each device holds of it."""
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 0.5, 3]), label_smoothing=0.1, ignore_index=2)
    return training(job, network(), lambda m, x, y: criterion(m(x), y), classes(6, 4))


@recipe("losses", "soft targets and a temperature")
def soft(job):
    """Probabilities as targets of cross entropy, KL divergence with log targets and batchmean."""

    def loss(model, x, y):
        logits, wanted = model(x), y.softmax(-1)
        kl = F.kl_div(F.log_softmax(logits / 2, -1), F.log_softmax(y / 2, -1), reduction="batchmean", log_target=True)
        return F.cross_entropy(logits, wanted) + 4 * kl

    return training(job, network(), loss, pairs(6, 4))


@recipe("losses", "labels that do not exclude each other")
def multilabel(job):
    """BCE with logits with pos_weight and weights of classes, MultiLabelSoftMarginLoss, BCELoss behind a sigmoid."""
    positive, by_class = torch.tensor([1.0, 2, 3, 0.5]), torch.tensor([0.5, 1, 1, 2])

    def loss(model, x, y):
        logits, wanted = model(x), (y > 0).to(y.dtype)
        first = F.binary_cross_entropy_with_logits(logits, wanted, by_class, pos_weight=positive)
        return (
            first
            + F.multilabel_soft_margin_loss(logits, wanted)
            + nn.BCELoss(reduction="sum")(logits.sigmoid(), wanted)
        )

    return training(job, network(), loss, pairs(6, 4), 0.01)


@recipe("losses", "focal loss")
def focal(job):
    """Probabilities picked by gather, weights that depend on them."""

    def loss(model, x, y):
        log_p = model(x).log_softmax(-1).gather(1, y[:, None]).squeeze(1)
        alpha = torch.tensor([0.25, 0.5, 1, 1])[y]
        return -(alpha * (1 - log_p.exp()) ** 2 * log_p).mean()

    return training(job, network(), loss, classes(6, 4))


@recipe("losses", "regression that forgives outliers")
def huber(job):
    """Huber, smooth L1, log-cosh, quantiles, and a Gaussian likelihood with a variance of its own."""

    def loss(model, x, y):
        mean, spread = model(x).chunk(2, -1)
        gap = y - mean
        pinball = torch.maximum(0.9 * gap, -0.1 * gap).mean()
        variance = F.softplus(spread) + 1e-3
        likelihood = 0.5 * (variance.log() + gap.square() / variance).mean()
        logcosh = (gap + F.softplus(-2 * gap) - 0.693).mean()
        return F.huber_loss(mean, y, delta=0.5) + F.smooth_l1_loss(mean, y, beta=0.3) + pinball + likelihood + logcosh

    return training(job, network(6, 8), loss, pairs(6, 4))


@recipe("losses", "counts and survival times")
def counts(job):
    """A Poisson likelihood with Stirling's term, Cox's partial likelihood over a sorted batch."""

    def loss(model, x, y):
        out = model(x)
        poisson = F.poisson_nll_loss(out[:, 0], y.to(x.dtype) * 3, full=True)
        time, order = x[:, 0].sort(descending=True)
        risk = out[:, 1][order]
        cox = -((risk - risk.logcumsumexp(0)) * (y[order] > 0)).sum() / (y > 0).sum().clamp(min=1)
        return poisson + cox + 0 * time.sum()

    return training(job, network(6, 2), loss, classes(6, 4))


@recipe("losses", "triplets with the hardest negatives")
def triplets(job):
    """All distances of a batch, the hardest by a masked maximum; nn.TripletMarginLoss beside it."""

    def loss(model, x, y):
        z = F.normalize(model(x), dim=-1)
        apart = (z[:, None] - z[None]).square().sum(-1).clamp(min=1e-9).sqrt()
        same = y[:, None] == y[None]
        near = apart.masked_fill(same, 9.0).amin(1)
        far = apart.masked_fill(~same, 0.0).amax(1)
        return F.relu(far - near + 0.3).mean() + F.triplet_margin_loss(z, z.roll(1, 0), z.roll(2, 0))

    return training(job, network(), loss, classes(6, 2))


@recipe("losses", "CLIP")
def clip(job):
    """Two encoders, every text against every picture of the batch, a temperature that is learnt."""

    class Clip(nn.Module):
        def __init__(self):
            super().__init__()
            self.image, self.text = network(6, 4), network(5, 4)
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, images, texts):
            a, b = F.normalize(self.image(images), dim=-1), F.normalize(self.text(texts), dim=-1)
            return self.scale.exp() * a @ b.t()

    def loss(model, images, texts):
        logits = model(images, texts)
        own = torch.arange(len(logits))
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.t(), own)) / 2

    return training(job, Clip(), loss, pairs(6, 5))


@recipe("losses", "SimCLR")
def simclr(job):
    """Two views side by side, similarities without the diagonal, InfoNCE."""

    def loss(model, x):
        z = F.normalize(torch.cat([model(x), model(x * 1.1)]), dim=-1)
        logits = (z @ z.t() / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
        return F.cross_entropy(logits, torch.arange(len(z)).roll(len(x)))

    return training(job, network(), loss, numbers(6))


@recipe("losses", "VICReg and Barlow twins")
def vicreg(job):
    """Variances and covariances of the batch, a cross-correlation matrix, off-diagonals by a view."""

    def off_diagonal(x):
        n = len(x)
        return x.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()

    def loss(model, x):
        a, b = model(x), model(x + 0.1)
        std = a.var(0).add(1e-4).sqrt()
        centred = a - a.mean(0)
        covariance = centred.t() @ centred / (len(x) - 1)
        correlation = ((a - a.mean(0)) / a.std(0)).t() @ ((b - b.mean(0)) / b.std(0)) / len(x)
        barlow = (correlation.diagonal() - 1).square().sum() + 0.1 * off_diagonal(correlation).square().sum()
        return F.mse_loss(a, b) + F.relu(1 - std).mean() + off_diagonal(covariance).square().sum() + 0.1 * barlow

    return training(job, network(), loss, numbers(6), 0.01)


@recipe("losses", "Siamese twins")
def siamese(job):
    """One encoder for both inputs, cosine embedding, margin ranking and hinge losses."""

    def loss(model, a, b):
        u, v = model(a), model(b)
        sign = torch.where(a[:, 0] > 0, 1.0, -1.0)
        ranking = F.margin_ranking_loss(u[:, 0], v[:, 0], sign, margin=0.2)
        hinge = F.hinge_embedding_loss((u - v).abs().sum(-1), sign)
        return (
            F.cosine_embedding_loss(u, v, sign, margin=0.1) + ranking + hinge + (1 - F.cosine_similarity(u, v)).mean()
        )

    return training(job, network(), loss, pairs(6, 6))


@recipe("losses", "several classes with margins")
def margins(job):
    """Multi-margin and multi-label margin losses, soft margin, and ArcFace's angle of the right class."""

    def loss(model, x, y):
        logits = model(x)
        cosine = F.linear(F.normalize(logits), F.normalize(torch.eye(4) + 0.1))
        angle = torch.acos(cosine.clamp(-1 + 1e-6, 1 - 1e-6))
        arc = torch.cos(angle + 0.3 * F.one_hot(y, 4)) * 4
        labels = torch.stack([y, (y + 1) % 4, -torch.ones_like(y), -torch.ones_like(y)], 1)
        return (
            F.multi_margin_loss(logits, y) + F.multilabel_margin_loss(logits, labels) + F.cross_entropy(arc, y)
            + F.soft_margin_loss(logits[:, 0], (y > 1).to(x.dtype) * 2 - 1)
        )  # fmt: skip

    return training(job, network(), loss, classes(6, 4))


@recipe("losses", "a Gaussian likelihood that checks its variances")
def gaussian(job):
    """F.gaussian_nll_loss, which raises for negative variances."""

    def loss(model, x, y):
        mean, spread = model(x).chunk(2, -1)
        return F.gaussian_nll_loss(mean, y, F.softplus(spread), full=True)

    return training(job, network(6, 8), loss, pairs(6, 4))


def transcripts(steps=3):
    g = torch.Generator().manual_seed(6)
    return [(x, torch.randint(1, 4, (8, 2), generator=g)) for (x,) in numbers(6, 5, steps=steps)]


@recipe("losses", "CTC")
def ctc(job):
    """Connectionist temporal classification with lengths in tensors and in tuples."""

    def loss(model, x, labels):
        log_p = model(x).log_softmax(-1).transpose(0, 1)
        rows = x.shape[0]
        lengths = torch.full((rows,), 6, dtype=torch.long), (labels != 1).sum(1)
        return F.ctc_loss(log_p, labels, *lengths) + 0.1 * F.ctc_loss(log_p, labels, (5,) * rows, (2,) * rows)

    return training(job, nn.Linear(5, 4), loss, transcripts())


@recipe("losses", "CTC with the batch's lengths")
def lengths_of_a_batch(job):
    """nn.CTCLoss with lengths that the data has; infinite losses count as zero."""
    criterion = nn.CTCLoss(blank=3, zero_infinity=True)

    def loss(model, x, labels):
        times, lengths = 6 - labels[:, 0], 2 + 0 * labels[:, 1]
        times = torch.where(labels[:, 1] == 1, 1, times)  # too short for two labels
        return criterion(model(x).log_softmax(-1).transpose(0, 1), labels.clamp(max=2), times, lengths)

    return training(job, nn.Linear(5, 4), loss, transcripts())


@recipe("losses", "CTC by hand")
def alignments(job):
    """The forward variables of CTC in logarithms, by a loop over time, with blanks between labels."""

    def loss(model, x, labels):
        log_p = model(x).log_softmax(-1)
        path = torch.stack([torch.zeros_like(labels), labels], -1).flatten(1)
        path = torch.cat([path, torch.zeros_like(path[:, :1])], 1)
        skips = torch.cat([torch.zeros_like(path[:, :2]), (path[:, 2:] != path[:, :-2]).long()], 1) * (path > 0)
        emitted = log_p.gather(2, path[:, None].expand(-1, x.shape[1], -1))
        first = torch.arange(path.shape[1]) < 2
        alpha = torch.where(first, emitted[:, 0], -1e9)
        for t in range(1, x.shape[1]):
            one = F.pad(alpha[:, :-1], (1, 0), value=-1e9)
            two = torch.where(skips > 0, F.pad(alpha[:, :-2], (2, 0), value=-1e9), -1e9)
            alpha = torch.logsumexp(torch.stack([alpha, one, two]), 0) + emitted[:, t]
        return -torch.logsumexp(alpha[:, -2:], 1).mean()

    return training(job, nn.Linear(5, 4), loss, transcripts())


@recipe("losses", "an ordinal loss")
def ordinal(job):
    """Cumulative logits with ordered thresholds by a cumulative softplus."""
    model = nn.ModuleDict({"net": network(6, 1)})
    model.register_parameter("steps", nn.Parameter(torch.zeros(3)))

    def loss(model, x, y):
        thresholds = F.softplus(model.steps).cumsum(0) - 1
        logits = model["net"](x) - thresholds
        return F.binary_cross_entropy_with_logits(logits, (y[:, None] > torch.arange(3)).to(x.dtype))

    return training(job, model, loss, classes(6, 4))


@recipe("losses", "a listwise ranking")
def ranking(job):
    """ListNet and LambdaRank's gains of sorted scores within a query."""

    def loss(model, x, y):
        scores = model(x.view(-1, 4, 6)).squeeze(-1)
        gains = y.softmax(-1)
        found = gains.gather(1, scores.argsort(1, descending=True))
        discount = 1 / torch.log2(torch.arange(4.0) + 2)
        ndcg = (found * discount).sum(1) / (gains.sort(1, descending=True).values * discount).sum(1)
        return -((gains * scores.log_softmax(-1)).sum(1) * (2 - ndcg.detach())).mean()

    return training(job, network(6, 1), loss, pairs(24, 4))


@recipe("losses", "uncertainty weighting of three tasks")
def tasks(job):
    """Heads with a learnt weight for each, logs in a dictionary."""
    model = nn.ModuleDict({"body": network(6, 8), "a": nn.Linear(8, 4), "b": nn.Linear(8, 1), "c": nn.Linear(8, 2)})
    model.register_parameter("logs", nn.Parameter(torch.zeros(3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, dampening=0.1)

    @job
    def train_step(x, y):
        h = model["body"](x).relu()
        found = {
            "label": F.cross_entropy(model["a"](h), y),
            "value": F.mse_loss(model["b"](h).squeeze(-1), x.sum(-1)),
            "sign": F.nll_loss(model["c"](h).log_softmax(-1), (x[:, 0] > 0).long()),
        }
        each = torch.stack(list(found.values()))
        loss = (torch.exp(-model.logs) * each + model.logs).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"loss": loss, "tasks": found}

    return Training(model, optimizer, train_step, classes(6, 4))


@recipe("losses", "a label mask by multiplication")
def masked(job):
    """A loss of some tokens only, divided by how many there are in the whole batch."""

    def loss(model, words, following):
        x = F.one_hot(words, 11).to(torch.get_default_dtype())
        each = F.cross_entropy(model(x).flatten(0, 1), following.flatten(), reduction="none")
        mask = (following.flatten() > 3).to(x.dtype)
        return (each * mask).sum() / mask.sum()

    return training(job, network(11, 11), loss, tokens(4, 11))


@recipe("losses", "sliced Wasserstein and MMD")
def distances(job):
    """Sorted projections of the batch, a kernel over all pairs, cdist."""

    def loss(model, x, y):
        z = model(x)
        directions = torch.stack([torch.ones(4), torch.arange(4.0)], 1)
        wasserstein = ((z @ directions).sort(0).values - (y @ directions).sort(0).values).square().mean()
        kernel = [torch.exp(-torch.cdist(a, b).square() / 4).mean() for a, b in ((z, z), (y, y), (z, y))]
        return 0.1 * wasserstein + kernel[0] + kernel[1] - 2 * kernel[2]

    return training(job, network(), loss, pairs(6, 4))


@recipe("losses", "adaptive softmax")
def adaptive(job):
    """AdaptiveLogSoftmaxWithLoss with Adam, which passes over clusters that no target of a batch is in."""
    model = nn.ModuleDict({"body": network(6, 16), "top": nn.AdaptiveLogSoftmaxWithLoss(16, 20, [4, 10], 2.0, True)})
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    @job
    def train_step(x, y):
        optimizer.zero_grad()
        found, loss = model["top"](model["body"](x), y)
        loss.backward()
        optimizer.step()
        return loss, found

    batches = [(x, y % 10 if number % 2 else y) for number, (x, y) in enumerate(classes(6, 20))]
    return Training(model, optimizer, train_step, batches)
