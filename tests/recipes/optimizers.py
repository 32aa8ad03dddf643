"""Every optimizer of torch.optim, over one small network, and the things that scripts do with optimizers."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import swa_utils

from recipes.data import classes, pairs, tokens
from recipes.recipe import Refused, Training, recipe

KIND = "optimizers"
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD with momentum, dampening and decay": lambda p: torch.optim.SGD(p, 0.1, 0.9, dampening=0.1, weight_decay=0.01),
    "SGD with Nesterov's momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "SGD that maximises": lambda p: torch.optim.SGD(p, 0.01, maximize=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, eps=1e-5),
    "Adam with AMSGrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True, weight_decay=0.1, eps=1e-5),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01, betas=(0.8, 0.95), eps=1e-5),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01, eps=1e-5),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 1.0),
    "RMSprop, centred, with momentum": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True, eps=1e-4),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.1, t0=1),
}  # fmt: skip


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def training(job, model, optimizer, batches, after=None):
    """The usual step of a classifier, and what the loop does behind it."""

    @job
    def train_step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    def run(x, y):
        loss = train_step(x, y)
        if after is not None:
            after(loss)
        return loss

    return Training(model, optimizer, run, batches)


def _plain(name, make):
    @recipe(KIND, name)
    def plain(job):
        """Four steps, and every tensor of the optimizer's state."""
        model = network()
        return training(job, model, make(model.parameters()), classes(6, 4, steps=4))


@recipe(KIND, "Adafactor")
def adafactor(job):
    """Factored second moments."""
    model = network()
    return training(job, model, torch.optim.Adafactor(model.parameters(), 0.01), classes(6, 4))


for _name, _make in OPTIMIZERS.items():
    _plain(_name, _make)


@recipe(KIND, "Muon for matrices and AdamW for the rest", within=0.05)
def muon(job):
    """Newton-Schulz iterations in bfloat16 within the optimizer's step."""
    model = network()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    optimizers = [torch.optim.Muon(matrices, 0.02), torch.optim.AdamW(rest, 0.01, eps=1e-5)]

    @job
    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return Training(model, optimizers, train_step, classes(6, 4))


@recipe(KIND, "SparseAdam's kind of rows by hand")
def lazy(job):
    """An optimizer of one's own that moves only rows with a gradient, with its state in tensors."""

    class Lazy(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if not state:
                        state["mean"] = torch.zeros_like(p)
                    used = (p.grad != 0).any(-1, keepdim=True)
                    state["mean"] = torch.where(used, 0.9 * state["mean"] + 0.1 * p.grad, state["mean"])
                    p.sub_(group["lr"] * state["mean"] * used)

    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))
    optimizer = Lazy(model.parameters(), 0.5)

    @job
    def train_step(words, following):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(words).flatten(0, 1), following.flatten())
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, train_step, tokens(2, 11))


@recipe(KIND, "Lion, written by hand")
def lion(job):
    """In-place lerp_, add_ and mul_ on parameters and state."""

    class Lion(torch.optim.Optimizer):
        def __init__(self, params, lr=0.01, decay=0.1):
            super().__init__(params, {"lr": lr, "decay": decay})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if "average" not in state:
                        state["average"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                    p.mul_(1 - group["lr"] * group["decay"])
                    p.add_(state["average"].lerp(p.grad, 0.1).sign(), alpha=-group["lr"])
                    state["average"].lerp_(p.grad, 0.01)

    model = network()
    return training(job, model, Lion(model.parameters()), classes(6, 4))


@recipe(
    KIND, "L-BFGS",
    refused=Refused(
        "closure|as often as",
        "How often it evaluates the loss in a step depends on the loss.",
        "Another optimizer; or L-BFGS outside of a job.",
    ),
)  # fmt: skip
def lbfgs(job):
    """A closure that the optimizer calls as often as its line search wants."""
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)

    @job
    def train_step(x, y):
        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    return Training(model, optimizer, train_step, classes(6, 4))


@recipe(KIND, "a closure of SGD")
def closure(job):
    """optimizer.step(closure), which evaluates the loss once and returns it."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @job
    def train_step(x, y):
        def again():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(again)

    return Training(model, optimizer, train_step, classes(6, 4))


@recipe(KIND, "layers with rates of their own")
def layerwise(job):
    """Parameter groups with several learning rates, betas and decays; a rate that decays by depth."""
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(6, 6), nn.Tanh())), nn.Linear(6, 4))
    groups = [
        {"params": layer.parameters(), "lr": 0.01 * 0.8**i, "weight_decay": 0.1 * i, "betas": (0.9 - 0.1 * i, 0.99)}
        for i, layer in enumerate(m for m in model if isinstance(m, nn.Linear))
    ]
    return training(job, model, torch.optim.AdamW(groups, eps=1e-5), classes(6, 4))


@recipe(KIND, "a warm-up and a cosine behind each call")
def cosine(job):
    """SequentialLR of LinearLR and CosineAnnealingLR, stepped by the loop."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05, eps=1e-5)
    rates = torch.optim.lr_scheduler
    scheduler = rates.SequentialLR(
        optimizer, [rates.LinearLR(optimizer, 0.1, total_iters=2), rates.CosineAnnealingLR(optimizer, 3)], [2]
    )
    return training(job, model, optimizer, classes(6, 4, steps=5), lambda _: scheduler.step())


@recipe(KIND, "one cycle of rate and momentum")
def cycle(job):
    """OneCycleLR, which changes betas, too."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-5)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=6)
    return training(job, model, optimizer, classes(6, 4, steps=5), lambda _: scheduler.step())


@recipe(KIND, "a rate that falls when the loss does not")
def plateau(job):
    """ReduceLROnPlateau on losses that are read, over RMSprop, which is traced op by op."""
    model = network()
    optimizer = torch.optim.RMSprop(model.parameters(), 0.05, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    return training(job, model, optimizer, classes(6, 4, steps=4), lambda loss: scheduler.step(loss.item()))


@recipe(KIND, "gradients clipped by norm and by value")
def clipping(job):
    """clip_grad_norm_ of two groups with another norm each, clip_grad_value_, the norm that is logged."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)

    @job
    def train_step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x) * 5, y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model[0].parameters(), 0.3)
        most = nn.utils.clip_grad_norm_(model[2].parameters(), 0.2, norm_type=float("inf"))
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        return loss, norm, most

    return Training(model, optimizer, train_step, classes(6, 4))


@recipe(KIND, "adaptive clipping and centred gradients")
def agc(job):
    """p.grad read and written between backward and step, unit-wise norms, gradient noise of given values."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    @job
    def train_step(x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim > 1:
                    p.grad -= p.grad.mean(1, keepdim=True)
                    most = 0.01 * p.norm(dim=1, keepdim=True).clamp(min=1e-3)
                    norm = p.grad.norm(dim=1, keepdim=True).clamp(min=1e-6)
                    p.grad.mul_(torch.where(norm > most, most / norm, 1.0))
                else:
                    p.grad = p.grad * 0.5
        optimizer.step()
        return loss

    return Training(model, optimizer, train_step, pairs(6, 4))


@recipe(KIND, "weights averaged by hand")
def ema(job):
    """A second model moved towards the first one in the step, and a predict job that uses it."""
    model, average = network(), network()
    average.load_state_dict(model.state_dict())
    average.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-5)

    @job
    def train_step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return loss

    @job(type="predict")
    def predict(x):
        return average(x).softmax(-1)

    def run(x, y):
        return train_step(x, y), predict(x)

    return Training({"model": model, "average": average}, optimizer, run, classes(6, 4), uncalled=("average",))


@recipe(KIND, "AveragedModel between calls")
def swa(job):
    """torch.optim.swa_utils outside of the job, on parameters that the plan owns."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    made = training(job, model, optimizer, classes(6, 4, steps=4), lambda _: average.update_parameters(model))
    return Training({"model": model, "average": average}, optimizer, made.run, made.batches, uncalled=("average",))


@recipe(KIND, "Lookahead")
def lookahead(job):
    """Slow weights in the script's own list, moved every second call by a flag that flips."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    slow = [p.detach().clone() for p in model.parameters()]
    turn = {"slow": False}

    @job
    def train_step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if turn["slow"]:
            with torch.no_grad():
                for s, p in zip(slow, model.parameters(), strict=True):
                    s.add_(p - s, alpha=0.5)
                    p.copy_(s)
        turn["slow"] = not turn["slow"]
        return loss

    return Training(model, optimizer, train_step, classes(6, 4, steps=4), lambda: slow)


@recipe(KIND, "optimizers fused into the backward pass, by parameter")
def looked_up(job):
    """An optimizer for each parameter in a dictionary, found by a hook behind the gradient."""
    model = network()
    each = {p: torch.optim.Adam([p], 0.01, eps=1e-5) for p in model.parameters()}

    def step(parameter):
        each[parameter].step()
        each[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)

    @job
    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return Training(model, list(each.values()), train_step, classes(6, 4))


@recipe(KIND, "optimizers fused into the backward pass")
def fused(job):
    """An optimizer for each parameter that steps in a hook behind its gradient."""
    model = network()
    optimizers = [torch.optim.SGD([p], 0.1, momentum=0.9) for p in model.parameters()]

    def hook(optimizer):
        def step(_):
            optimizer.step()
            optimizer.zero_grad()

        return step

    for p, optimizer in zip(model.parameters(), optimizers, strict=True):
        p.register_post_accumulate_grad_hook(hook(optimizer))

    @job
    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return Training(model, optimizers, train_step, classes(6, 4))


@recipe(KIND, "gradients added up over chunks within a step")
def chunks(job):
    """A Python loop over pieces of the batch, each with its backward pass, and one step."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-5)

    @job
    def train_step(x, y):
        total = 0
        for part, labels in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = F.cross_entropy(model(part), labels) / 4
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Training(model, optimizer, train_step, classes(6, 4))


@recipe(KIND, "gradients added up over calls")
def accumulated(job):
    """An optimizer's step in every second call, by a flag."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @job
    def train_step(x, y, last):
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    batches = [(*batch, i % 2 == 1) for i, batch in enumerate(classes(6, 4, steps=4))]
    return Training(model, optimizer, train_step, batches)


@recipe(KIND, "gradients added up by a job of their own")
def accumulating(job):
    """One job with backward, another one with the optimizer's step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    calls = []

    @job
    def backward(x, y):
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        return loss

    @job(micro_batches=1)
    def step():
        optimizer.step()
        optimizer.zero_grad()

    def run(x, y):
        calls.append(backward(x, y))
        if len(calls) % 2 == 0:
            step()
        return calls[-1]

    return Training(model, optimizer, run, classes(6, 4, steps=4))
