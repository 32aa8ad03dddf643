"""Loops as repositories that many people copy from have them: what they read and change between calls."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from recipes.data import classes, pairs
from recipes.recipe import Training, recipe

KIND = "zoo"


def classifier():
    """A small network."""
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


@recipe(KIND, "schedules in NumPy arrays")
def schedules(job):
    """As DINO: rates and decay from arrays into the groups, a momentum for the teacher, a temperature by epoch."""
    student, teacher = classifier(), classifier()
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in student.parameters() if p.dim() > 1]},
            {"params": [p for p in student.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ]
    )
    rates, decays = np.linspace(1e-2, 1e-3, 6), 0.4 - 0.3 * (1 + np.cos(np.pi * np.arange(6) / 6)) / 2
    temperatures = np.concatenate((np.linspace(0.4, 0.7, 2), np.ones(4) * 0.7))

    @job
    def step(x, temperature):
        with torch.no_grad():
            wanted = (teacher(x) / temperature).softmax(-1)
        loss = -(wanted * (student(x + 0.1) / 0.5).log_softmax(-1)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def run(x, i):
        for number, group in enumerate(optimizer.param_groups):
            group["lr"] = rates[i]
            if number == 0:
                group["weight_decay"] = decays[i]
        loss = step(x, temperatures[i])
        with torch.no_grad():
            for p, q in zip(student.parameters(), teacher.parameters(), strict=True):
                q.data.mul_(0.9).add_((1 - 0.9) * p.detach().data)
        return loss

    batches = [(x, i) for i, (x, _) in enumerate(pairs(5, 1, steps=6))]
    return Training({"student": student, "teacher": teacher}, optimizer, run, batches)


@recipe(KIND, "mixup that NumPy draws")
def mixup(job):
    """np.random.beta as an argument, a LambdaLR of np.cos, Nesterov's momentum."""
    model, draws = classifier(), np.random.default_rng(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.5 * (1 + np.cos(np.pi * k / 6)))
    lams = draws.beta(1.0, 1.0, 5)

    @job
    def step(x, a, b, lam):
        out = model(x)
        loss = lam * F.cross_entropy(out, a) + (1 - lam) * F.cross_entropy(out, b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right = lam * out.argmax(1).eq(a).sum() + (1 - lam) * out.argmax(1).eq(b).sum()
        return loss, right

    def run(x, y, i):
        mixed = lams[i] * x + (1 - lams[i]) * x.flip(0)
        said = step(mixed, y, y.flip(0), lams[i])
        scheduler.step()
        return said

    return Training(model, optimizer, run, [(*b, i) for i, b in enumerate(classes(5, 3, steps=5))])


@recipe(KIND, "a temperature that the loop reads")
def temperature(job):
    """As CleanRL's SAC: alpha = log_alpha.exp().item() between calls, an argument of the next one."""
    policy, critic = nn.Linear(5, 2), nn.Sequential(nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 1))
    log_alpha = torch.zeros(1, requires_grad=True)
    optimizers = [
        torch.optim.Adam(critic.parameters(), 1e-2),
        torch.optim.Adam(policy.parameters(), 1e-2),
        torch.optim.Adam([log_alpha], 1e-1),
    ]

    @job
    def step(x, noise, alpha):
        action = torch.tanh(policy(x) + noise)
        certain = (1 - action.square() + 1e-6).log().sum(1, keepdim=True)
        value = critic(torch.cat([x, action.detach()], 1))
        first = F.mse_loss(value, x[:, :1] - alpha * certain.detach())
        optimizers[0].zero_grad()
        first.backward()
        optimizers[0].step()
        second = (alpha * certain - critic(torch.cat([x, action], 1))).mean()
        optimizers[1].zero_grad()
        second.backward()
        optimizers[1].step()
        third = (-log_alpha.exp() * (certain.detach() - 2)).mean()
        optimizers[2].zero_grad()
        third.backward()
        optimizers[2].step()
        return first, second, third

    alpha = [log_alpha.exp().item()]

    def run(x, noise):
        said = step(x, noise, alpha[0])
        alpha[0] = log_alpha.exp().item()
        return *said, alpha[0], sum(p.norm() for p in policy.parameters()).item()

    return Training({"policy": policy, "critic": critic}, optimizers, run, pairs(5, 2, steps=5), kept=lambda: log_alpha)


class Shadow(nn.Module):
    """An average in buffers, with a count that it is warmed up by."""

    def __init__(self, model, decay=0.9):
        super().__init__()
        self.register_buffer("decay", torch.tensor(decay))
        self.register_buffer("updates", torch.tensor(0, dtype=torch.int))
        self.names = {}
        for name, p in model.named_parameters():
            self.names[name] = name.replace(".", "")
            self.register_buffer(self.names[name], p.clone().detach().data)

    def forward(self, model):
        """Move the average on."""
        self.updates += 1
        left = 1.0 - min(self.decay, (1 + self.updates) / (10 + self.updates))
        with torch.no_grad():
            mine = dict(self.named_buffers())
            for name, p in model.named_parameters():
                mine[self.names[name]].sub_(left * (mine[self.names[name]] - p))

    def swapped(self, model, function):
        """What a function gives with the average in the model."""
        mine, stored = dict(self.named_buffers()), [p.clone() for p in model.parameters()]
        for name, p in model.named_parameters():
            p.data.copy_(mine[self.names[name]].data)
        found = function()
        for p, was in zip(model.parameters(), stored, strict=True):
            p.data.copy_(was.data)
        return found


@recipe(KIND, "an average that is stored, swapped in and restored")
def stored(job):
    """As latent diffusion's LitEma: an average in buffers, p.clone() and p.data.copy_() around evaluation."""
    model = classifier()
    shadow = Shadow(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    @job
    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    @job(type="predict")
    def evaluate(x, y):
        return F.cross_entropy(model(x), y)

    def run(x, y):
        loss = step(x, y)
        shadow(model)
        return loss, evaluate(x, y), shadow.swapped(model, lambda: float(evaluate(x, y)))

    models = {"model": model, "shadow": shadow}
    return Training(models, optimizer, run, classes(5, 3, steps=4), uncalled=("shadow",))


@recipe(KIND, "a lottery ticket that is rewound")
def ticket(job):
    """p.data = what it was at first, masks by percentiles of weights, gradients of pruned ones set to zero."""
    model = classifier()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    masks = {name: torch.ones_like(p) for name, p in model.named_parameters() if p.dim() > 1}
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=1e-3)

    @job
    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        for name, p in model.named_parameters():
            if name in masks:
                p.grad.data = torch.where(p.data.abs() < 1e-6, torch.zeros_like(p.grad), p.grad.data)
        optimizer.step()
        return loss

    def run(x, y, i):
        losses = step(x, y).item(), step(x.flip(1), y).item()
        for name, p in model.named_parameters() if i % 2 else ():
            if name in masks:
                alive = p.data[p.data.abs() > 1e-6].abs().numpy()
                masks[name] = masks[name] * (p.data.abs() >= np.percentile(alive, 20))
                p.data = start[name] * masks[name]
            else:
                p.data = start[name]
        return losses

    return Training(model, optimizer, run, [(*b, i) for i, b in enumerate(classes(5, 3, steps=5))])


@recipe(KIND, "loads of experts and classes by bincount", whole="counts are of the whole batch")
def loads(job):
    """torch.bincount with minlength of what a router chooses, weights of classes by how often a batch has them."""
    router, heads = nn.Linear(5, 4), nn.ModuleList(nn.Linear(5, 3) for _ in range(4))
    model = nn.ModuleDict({"router": router, "heads": heads})
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    @job
    def step(x, y):
        gates = router(x).softmax(-1)
        chosen = gates.topk(2, -1).indices
        load = torch.bincount(chosen.flatten(), minlength=4) / chosen.numel()
        kept = gates * torch.zeros_like(gates).scatter(1, chosen, 1.0)
        out = sum(kept[:, i : i + 1] * head(x) for i, head in enumerate(heads))
        weight = 1 / (1 + torch.bincount(y, minlength=3).to(out.dtype))
        loss = F.cross_entropy(out, y, weight=weight) + 4 * (load * gates.mean(0)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss, load

    return Training({"router": router, "heads": heads}, optimizer, step, classes(5, 3, steps=4))
