"""Fine-tuning, distillation, and layers that change their weights: adapters, frozen parts, parametrizations."""

import copy
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.ao import quantization
from torch.nn.utils import parametrizations, parametrize, prune

from recipes.data import classes, numbers, pairs, pictures
from recipes.recipe import Training, recipe

KIND = "tuning"
RANGES = "ranges move on with each forward pass, and so between micro-batches"


def classifier(job, model, optimizer, batches, penalty=lambda: 0.0, named=None):
    """The usual step, with a penalty."""

    @job
    def train_step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) + penalty()
        loss.backward()
        optimizer.step()
        return loss

    return Training(named or model, optimizer, train_step, batches)


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


class LoRA(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + (x @ self.down.t()) @ self.up.t() * 2.0


@recipe(KIND, "LoRA")
def lora(job):
    """Frozen layers with low-rank paths beside them; the optimizer has the trainable parameters alone."""
    model = network()
    model[0], model[2] = LoRA(model[0]), LoRA(model[2])
    trained = [p for p in model.parameters() if p.requires_grad]
    return classifier(job, model, torch.optim.AdamW(trained, 0.01, eps=1e-5), classes(6, 4))


@recipe(KIND, "a frozen backbone in eval mode")
def frozen(job):
    """Batch norm that uses and keeps its statistics, no_grad features, a new head."""
    backbone = (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()).requires_grad_(False).eval()
    )
    head = nn.Linear(144, 4)
    optimizer = torch.optim.SGD(head.parameters(), 0.05)

    @job
    def train_step(x, y):
        with torch.no_grad():
            features = backbone(x)
        optimizer.zero_grad()
        loss = F.cross_entropy(head(features), y)
        loss.backward()
        optimizer.step()
        return loss

    return Training({"backbone": backbone, "head": head}, optimizer, train_step, pictures())


@recipe(KIND, "layers that are thawed between calls")
def thawed(job):
    """requires_grad_ and add_param_group in the loop: each stage has a plan of its own."""
    model = network()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), 0.1, momentum=0.9)
    made = classifier(job, model, optimizer, classes(6, 4, steps=4))
    calls = []

    def run(x, y):
        if len(calls) == 2:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
        calls.append(made.run(x, y))
        return calls[-1]

    return Training(model, optimizer, run, made.batches)


@recipe(KIND, "distillation")
def distillation(job):
    """A teacher under no_grad, softened logits, features matched through a projection."""
    teacher, student, projection = (
        network().eval(),
        nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 4)),
        nn.Linear(4, 8),
    )
    optimizer = torch.optim.Adam([*student.parameters(), *projection.parameters()], 0.01, eps=1e-5)

    @job
    def train_step(x, y):
        with torch.no_grad():
            hint = teacher[1](teacher[0](x))
            wanted = teacher[2](hint)
        h = student[1](student[0](x))
        logits = student[2](h)
        kl = F.kl_div((logits / 3).log_softmax(-1), (wanted / 3).softmax(-1), reduction="batchmean") * 9
        loss = F.cross_entropy(logits, y) + kl + F.mse_loss(projection(h), hint)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss, kl

    models = {"student": student, "teacher": teacher, "projection": projection}
    return Training(models, optimizer, train_step, classes(6, 4))


@recipe(KIND, "a mean teacher and BYOL")
def byol(job):
    """A teacher by deepcopy that follows in the step, stopped gradients, a predictor on one side."""
    online, predictor = network(), nn.Linear(4, 4)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.SGD([*online.parameters(), *predictor.parameters()], 0.1, momentum=0.9)

    @job
    def train_step(a, b):
        p = F.normalize(predictor(online(a)), dim=-1)
        with torch.no_grad():
            z = F.normalize(target(b), dim=-1)
        loss = (2 - 2 * (p * z).sum(-1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
        return loss

    return Training({"online": online, "predictor": predictor, "target": target}, optimizer, train_step, pairs(6, 6))


@recipe(KIND, "MoCo's queue of keys")
def moco(job):
    """A queue in a buffer that is rolled on by torch.cat of the batch's keys."""
    query, key = network(), network()
    key.load_state_dict(query.state_dict())
    key.requires_grad_(False)
    query.register_buffer("queue", F.normalize(torch.randn(16, 4), dim=-1))
    optimizer = torch.optim.SGD(query.parameters(), 0.1)

    @job
    def train_step(a, b):
        q = F.normalize(query(a), dim=-1)
        with torch.no_grad():
            for slow, fast in zip(key.parameters(), query.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            k = F.normalize(key(b), dim=-1)
        logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ query.queue.t()], 1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        query.queue = torch.cat([k, query.queue])[:16]
        return loss

    return Training({"query": query, "key": key}, optimizer, train_step, pairs(6, 6))


@recipe(KIND, "weight norm and orthogonal weights")
def parametrized(job):
    """Two parametrizations of torch.nn.utils; their originals are trained."""
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 8)), nn.Tanh(),
        parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="cayley"), nn.Tanh(), nn.Linear(8, 4),
    )  # fmt: skip
    return classifier(job, model, torch.optim.SGD(model.parameters(), 0.05), classes(6, 4))


@recipe(KIND, "symmetric and positive weights by own parametrizations")
def own(job):
    """register_parametrization with cached weights, right_inverse."""

    class Symmetric(nn.Module):
        def forward(self, x):
            return x.triu() + x.triu(1).mT

    class Positive(nn.Module):
        def forward(self, x):
            return F.softplus(x)

        def right_inverse(self, y):
            return torch.log(torch.expm1(y.abs() + 0.1))

    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    parametrize.register_parametrization(model[1], "weight", Positive())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    @job
    def train_step(x, y):
        optimizer.zero_grad()
        with parametrize.cached():
            loss = F.cross_entropy(model(x), y) + F.cross_entropy(model(-x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, train_step, classes(6, 4))


@recipe(KIND, "pruned weights")
def pruned(job):
    """torch.nn.utils.prune: masks in buffers, weights that a hook makes before each forward pass."""
    model = network()
    prune.l1_unstructured(model[0], "weight", 0.5)
    prune.ln_structured(model[2], "weight", 0.25, n=2, dim=0)
    return classifier(job, model, torch.optim.SGD(model.parameters(), 0.1), classes(6, 4))


@recipe(KIND, "quantisation-aware training", whole=RANGES)
def quantised(job):
    """Fake quantisation with straight-through rounding, ranges in buffers that follow activations."""

    class Quantise(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("most", torch.tensor(1.0))

        def forward(self, x):
            if self.training:
                self.most.mul_(0.9).add_(0.1 * x.detach().abs().max())
            scale = self.most / 7
            q = (x / scale).round().clamp(-8, 7) * scale
            return x + (q - x).detach()

    model = nn.Sequential(nn.Linear(6, 8), Quantise(), nn.ReLU(), nn.Linear(8, 4))
    return classifier(job, model, torch.optim.SGD(model.parameters(), 0.1), classes(6, 4))


@recipe(KIND, "a model that torch.ao prepared", whole=RANGES, within=1e-6)
def prepared(job):
    """prepare_qat with the default qconfig in float32, observers that are switched off after some steps."""
    model = nn.Sequential(
        quantization.QuantStub(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), quantization.DeQuantStub()
    ).float()
    model.qconfig = quantization.get_default_qat_qconfig("x86")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao will have it one day
        quantization.prepare_qat(model.train(), inplace=True)
    model.float()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    @job
    def train_step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    def run(number, x, y):
        if number == 2:
            model.apply(quantization.disable_observer)
        return train_step(x, y)

    batches = [(number, x.float(), y) for number, (x, y) in enumerate(classes(6, 4, steps=4))]
    return Training(model, optimizer, run, batches)


@recipe(KIND, "elastic weight consolidation")
def ewc(job):
    """Old values and their importances in dictionaries of tensors by name."""
    model = network()
    old = {name: p.detach().clone() for name, p in model.named_parameters()}
    weight = {name: torch.rand_like(p) for name, p in model.named_parameters()}

    def penalty():
        return sum((weight[n] * (p - old[n]).square()).sum() for n, p in model.named_parameters())

    return classifier(job, model, torch.optim.SGD(model.parameters(), 0.1), classes(6, 4), penalty)


@recipe(KIND, "L1, elastic net and orthogonality penalties")
def penalties(job):
    """Norms of parameters in the loss, by name and by dim."""
    model = network()

    def penalty():
        l1 = sum(p.abs().sum() for n, p in model.named_parameters() if n.endswith("weight"))
        w = model[0].weight
        return (
            1e-3 * l1 + 1e-2 * (w.t() @ w - torch.eye(6)).norm() + 1e-2 * torch.linalg.matrix_norm(model[2].weight, 2)
        )

    return classifier(job, model, torch.optim.SGD(model.parameters(), 0.05), classes(6, 4), penalty)


@recipe(KIND, "a hypernetwork")
def hyper(job):
    """A network that makes another one's weights for each row, applied by bmm."""
    model = nn.ModuleDict({"code": nn.Linear(3, 4), "weights": nn.Linear(4, 6 * 3)})
    optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-5)

    @job
    def train_step(x, condition):
        made = model["weights"](torch.tanh(model["code"](condition))).view(-1, 6, 3)
        out = torch.bmm(x.unsqueeze(1), made).squeeze(1)
        loss = F.mse_loss(out, condition)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(model, optimizer, train_step, pairs(6, 3))


@recipe(KIND, "prompts before a frozen transformer")
def prompts(job):
    """Learnt tokens that are expanded over the batch, FiLM in a hook of a frozen layer."""
    body = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).requires_grad_(False)
    tuned = nn.ModuleDict({"head": nn.Linear(8, 4)})
    tuned.register_parameter("prompt", nn.Parameter(torch.randn(2, 8) / 5))
    tuned.register_parameter("scale", nn.Parameter(torch.ones(16)))
    body.linear1.register_forward_hook(lambda _, args, out: out * tuned.scale)
    optimizer = torch.optim.AdamW(tuned.parameters(), 0.01, eps=1e-5)

    @job
    def train_step(x):
        x = torch.cat([tuned.prompt.expand(len(x), -1, -1), x], 1)
        loss = tuned["head"](body(x)[:, 0]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training({"body": body, "tuned": tuned}, optimizer, train_step, numbers(3, 8))


@recipe(KIND, "a model that grows")
def grown(job):
    """A head that is replaced by a wider one between calls, with an optimizer of its own."""
    model = network()
    holder = {"optimizer": torch.optim.SGD(model.parameters(), 0.1)}

    @job
    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        holder["optimizer"].step()
        holder["optimizer"].zero_grad()
        return loss

    calls = []

    def run(x, y):
        if len(calls) == 2:
            wider = nn.Linear(8, 6)
            with torch.no_grad():
                wider.weight[:4] = model.state_dict()["2.weight"]
                wider.weight[4:] = 0.1
                wider.bias.fill_(0.0)
            model[2] = wider
            holder["optimizer"] = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        calls.append(train_step(x, y))
        return calls[-1]

    return Training(model, [], run, classes(6, 4, steps=4))
