"""What is around a step: optimizers of one's own, averages that are swapped in, checks."""

import torch
import torch.nn.functional as F
from torch import nn

from recipes.data import classes, numbers, pairs
from recipes.recipe import Training, recipe


def network(inside=6, out=4):
    return nn.Sequential(nn.Linear(inside, 8), nn.ReLU(), nn.Linear(8, out))


@recipe("trainers", "LAMB and LARS, written by hand")
def lamb(job):
    """Trust ratios of norms, counts in Python, a subclass of SGD with a step of its own."""

    class Lamb(torch.optim.Optimizer):
        def __init__(self, p, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, wd=0.0):
            super().__init__(p, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": wd})

        @torch.no_grad()
        def step(self, closure=None):
            for g in self.param_groups:
                for p in g["params"]:
                    if p.grad is None:
                        continue
                    s = self.state[p]
                    if len(s) == 0:
                        s["step"] = 0
                        s["m"] = torch.zeros_like(p)
                        s["v"] = torch.zeros_like(p)
                    s["step"] += 1
                    b1, b2 = g["betas"]
                    s["m"].mul_(b1).add_(p.grad, alpha=1 - b1)
                    s["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                    mh = s["m"] / (1 - b1 ** s["step"])
                    vh = s["v"] / (1 - b2 ** s["step"])
                    u = mh / (vh.sqrt() + g["eps"]) + g["weight_decay"] * p
                    wn, un = p.norm().clamp(0, 10), u.norm()
                    tr = torch.where((wn > 0) & (un > 0), wn / un, torch.ones_like(wn))
                    p.add_(u * tr, alpha=-g["lr"])

    class LARS(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for g in self.param_groups:
                for p in g["params"]:
                    if p.grad is None:
                        continue
                    d = p.grad + g["weight_decay"] * p
                    pn, gn = torch.norm(p), torch.norm(d)
                    one = torch.ones_like(pn)
                    q = torch.where(pn > 0.0, torch.where(gn > 0, (0.01 * pn / gn), one), one)
                    d = d.mul(q)
                    st = self.state[p]
                    if "mu" not in st:
                        st["mu"] = torch.zeros_like(p)
                    mu = st["mu"]
                    mu.mul_(g["momentum"]).add_(d)
                    p.add_(mu, alpha=-g["lr"])

    m, n = (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2))
    o1, o2 = Lamb(m.parameters(), 1e-2, wd=0.01), LARS(n.parameters(), 0.1, momentum=0.9, weight_decay=1e-3)

    @job
    def step(x, y):
        for o in (o1, o2):
            o.zero_grad()
        loss = F.cross_entropy(m(x), y) + F.cross_entropy(n(x), y)
        loss.backward()
        o1.step()
        o2.step()
        return loss

    return Training({"m": m, "n": n}, [o1, o2], step, classes(6, 4, steps=4))


@recipe("trainers", "a wrapper around an optimizer that steps slowly")
def wrapped(job):
    """Lookahead that counts over RAdam, warm restarts of the rate within the step."""

    class Lookahead:
        def __init__(self, opt, k=2, alpha=0.5):
            self.opt, self.k, self.alpha, self.n = opt, k, alpha, 0
            self.slow = [[p.clone().detach() for p in g["params"]] for g in opt.param_groups]

        def zero_grad(self):
            self.opt.zero_grad()

        def step(self):
            self.opt.step()
            self.n += 1
            if self.n % self.k:
                return
            for g, sl in zip(self.opt.param_groups, self.slow, strict=False):
                for p, q in zip(g["params"], sl, strict=False):
                    q.data.add_(self.alpha * (p.data - q.data))
                    p.data.copy_(q.data)

    m = network()
    base = torch.optim.RAdam(m.parameters(), 1e-2)
    opt = Lookahead(base)
    sch = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(base, 3)

    @job
    def step(x, y):
        opt.zero_grad()
        loss = F.cross_entropy(m(x), y)
        loss.backward()
        opt.step()
        sch.step()
        return loss

    return Training(m, base, step, classes(6, 4, steps=6), kept=lambda: opt.slow)


@recipe("trainers", "a trainer with an average that is swapped in", whole="batch norm sees one micro-batch at a time")
def trainer(job):
    """Shadow weights in a dictionary, p.data = shadow for evaluation and back, a meter, ReduceLROnPlateau."""

    class EMA:
        def __init__(self, model, decay):
            self.model, self.decay = model, decay
            self.shadow = {n: p.data.clone() for n, p in model.named_parameters() if p.requires_grad}
            self.backup = {}

        def update(self):
            for n, p in self.model.named_parameters():
                if p.requires_grad:
                    self.shadow[n] = (1 - self.decay) * p.data + self.decay * self.shadow[n]

        def apply_shadow(self):
            for n, p in self.model.named_parameters():
                self.backup[n] = p.data
                p.data = self.shadow[n]

        def restore(self):
            for n, p in self.model.named_parameters():
                p.data = self.backup[n]
            self.backup = {}

    class AverageMeter:
        def __init__(self):
            self.reset()

        def reset(self):
            self.val = self.avg = self.sum = self.count = 0

        def update(self, v, n=1):
            self.val = v
            self.sum += v * n
            self.count += n
            self.avg = self.sum / self.count

    class Trainer:
        def __init__(self, m):
            self.m = m
            self.opt = torch.optim.Adam(m.parameters(), 1e-2)
            self.ema = EMA(m, 0.9)
            self.sch = torch.optim.lr_scheduler.ReduceLROnPlateau(self.opt, patience=0)
            self.meter = AverageMeter()
            self.best = float("inf")
            self.bad = 0
            self.global_step = 0

        @job
        def step(self, x, y):
            self.m.train()
            self.opt.zero_grad()
            loss = F.cross_entropy(self.m(x), y, label_smoothing=0.1)
            loss.backward()
            self.opt.step()
            self.ema.update()
            return loss

        @job(type="predict")
        def valid(self, x, y):
            return F.cross_entropy(self.m(x), y)

        def epoch(self, x, y):
            loss = self.step(x, y)
            self.meter.update(loss.item(), x.size(0))
            self.global_step += 1
            self.m.eval()
            self.ema.apply_shadow()
            v = self.valid(x, y).item()
            self.ema.restore()
            self.m.train()
            self.sch.step(v)
            if v < self.best:
                self.best, self.bad = v, 0
                self.state = {k: t.clone() for k, t in self.m.state_dict().items()}
            else:
                self.bad += 1
            return self.meter.avg, v, self.bad

    t = Trainer(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)))
    return Training(t.m, t.opt, t.epoch, classes(6, 4, steps=5), kept=lambda: (t.ema.shadow, t.state))


@recipe("trainers", "a GAN with spectral_norm and weight_norm of torch.nn.utils")
def old_norms(job):
    """Hooks that make weights, whose first value is a view of another one."""
    D = nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 8)), nn.ReLU(), nn.utils.spectral_norm(nn.Linear(8, 1)))
    g = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 6))
    od, og = torch.optim.Adam(D.parameters(), 1e-2, betas=(0.5, 0.9)), torch.optim.Adam(g.parameters(), 1e-2)

    @job
    def step(x, z):
        ld = F.relu(1 - D(x)).mean() + F.relu(1 + D(g(z).detach())).mean()
        od.zero_grad()
        ld.backward()
        od.step()
        lg = -D(g(z)).mean()
        og.zero_grad()
        lg.backward()
        og.step()
        return ld, lg

    return Training({"D": D, "g": g}, [od, og], step, pairs(6, 4, steps=4))


@recipe("trainers", "weights that change places by p.data")
def swapped(job):
    """T = a.data; a.data = b.data; b.data = t between calls."""
    m = network(6, 8)
    opt = torch.optim.SGD(m.parameters(), 1e-1)

    @job
    def step(x):
        loss = m(x).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss

    a, b = nn.Linear(6, 4), nn.Linear(6, 4)
    o2 = torch.optim.SGD([*a.parameters(), *b.parameters()], 0.1)

    @job
    def st(x):
        loss = a(x).pow(2).mean() + b(x).sin().mean()
        o2.zero_grad()
        loss.backward()
        o2.step()
        return loss

    def run(x):
        loss = step(x)
        k = st(x)
        with torch.no_grad():
            t = a.weight.data
            a.weight.data = b.weight.data
            b.weight.data = t
        return loss, k

    return Training({"m": m, "a": a, "b": b}, [opt, o2], run, numbers(6, steps=4))


@recipe("trainers", "a step that looks after itself")
def careful(job):
    """Checks of several conditions, of each gradient, and of what the batch has, before and behind backward."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    @job
    def step(x, y):
        if x.isnan().any() or (x.abs().max() > 1e3 and not x.isinf().any()):
            raise ValueError("the batch is out of range")
        loss = F.cross_entropy(model(x), y)
        if not (torch.isfinite(loss) and 0 <= loss < 1e4):
            raise FloatingPointError(f"the loss is {loss}")
        optimizer.zero_grad()
        loss.backward()
        for name, p in model.named_parameters():
            if not p.grad.isfinite().all() and name:
                raise RuntimeError(name)
        optimizer.step()
        return loss

    def run(x, y, bad):
        try:
            return step(x * 1e9 if bad else x, y)
        except ValueError as error:
            return len(str(error))

    return Training(model, optimizer, run, [(*b, i == 1) for i, b in enumerate(classes(6, 4, steps=4))])
