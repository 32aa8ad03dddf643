"""Models and optimizers whose code people copy from their papers' repositories, with what it counts and keeps."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from recipes.data import classes, numbers
from recipes.recipe import Training, recipe

KIND = "copied"


def generator(seed=0):
    """Of one script."""
    return torch.Generator().manual_seed(seed)


@recipe(KIND, "a beta-VAE whose capacity grows")
def capacity(job):
    """A count on the class, torch.clamp between a number and a value of a tensor, a dictionary of losses."""

    class BetaVAE(nn.Module):
        num_iter = 0

        def __init__(self):
            super().__init__()
            self.C_max, self.C_stop_iter = torch.Tensor([25]), 4
            self.encoder, self.mu, self.log_var = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 2)
            self.decoder = nn.Linear(2, 6)

        def forward(self, x, noise):
            h = F.leaky_relu(self.encoder(x))
            mu, log_var = self.mu(h), self.log_var(h)
            return [self.decoder(mu + torch.exp(0.5 * log_var) * noise), x, mu, log_var]

        def loss_function(self, *args, **kwargs):
            self.num_iter += 1
            found, x, mu, log_var = args
            reconstruction = F.mse_loss(found, x)
            kld = torch.mean(-0.5 * torch.sum(1 + log_var - mu**2 - log_var.exp(), dim=1), dim=0)
            self.C_max = self.C_max.to(x.device)
            C = torch.clamp(self.C_max / self.C_stop_iter * self.num_iter, 0, self.C_max.data[0])
            loss = reconstruction + 10.0 * kwargs["M_N"] * (kld - C).abs()
            return {"loss": loss, "Reconstruction_Loss": reconstruction, "KLD": kld}

    model = BetaVAE()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)

    @job
    def training_step(x, noise):
        losses = model.loss_function(*model(x, noise), M_N=0.1)
        optimizer.zero_grad()
        losses["loss"].backward()
        optimizer.step()
        return {key: value.detach() for key, value in losses.items()}

    g = generator()
    batches = [(torch.randn(8, 6, generator=g), torch.randn(8, 2, generator=g)) for _ in range(6)]
    return Training(model, optimizer, training_step, batches)


@recipe(KIND, "speech with a learnt mask and a Gumbel quantizer")
def wav2vec(job):
    """x[mask] = self.mask_emb, a temperature by updates, logits[mask], gradients divided by how many there were."""

    class Quantizer(nn.Module):
        def __init__(self):
            super().__init__()
            self.vars, self.proj = nn.Parameter(torch.rand(1, 8, 3)), nn.Linear(6, 8)
            self.curr_temp = 2

        def set_num_updates(self, n):
            self.curr_temp = max(2 * 0.9**n, 0.5)

        def forward(self, x, drawn):
            b, t, _ = x.shape
            x = self.proj(x).view(b * t * 2, 4)
            share = torch.softmax(x.view(b * t, 2, 4), -1).mean(0)
            perplexity = torch.exp(-torch.sum(share * torch.log(share + 1e-7), dim=-1)).sum()
            soft = ((x - torch.log(-torch.log(drawn.reshape(-1, 4)))) / self.curr_temp).softmax(-1)
            hard = torch.zeros_like(soft).scatter_(-1, soft.max(-1, keepdim=True)[1], 1.0)
            x = (hard - soft.detach() + soft).view(b * t, -1, 1)
            return (x * self.vars).view(b * t, 2, 4, -1).sum(-2).view(b, t, -1), perplexity

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(nn.Conv1d(1, 6, 4, 2), nn.GroupNorm(1, 6), nn.GELU())
            self.mask_emb = nn.Parameter(torch.rand(6))
            self.context, self.quantizer, self.out = nn.GRU(6, 6, batch_first=True), Quantizer(), nn.Linear(6, 6)

        def forward(self, wave, mask, drawn, others):
            found = self.features(wave.unsqueeze(1)).transpose(1, 2)
            y, perplexity = self.quantizer(found, drawn)
            x = found.clone()
            x[mask] = self.mask_emb
            c = self.out(self.context(x)[0])
            negatives = y[:, others]
            same = (y.unsqueeze(2) == negatives).all(-1)
            logits = torch.cosine_similarity(c.unsqueeze(2), torch.cat([y.unsqueeze(2), negatives], 2), dim=-1) / 0.1
            logits = torch.cat([logits[..., :1], logits[..., 1:].masked_fill(same, float("-inf"))], -1)
            return logits[mask], perplexity

    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    updates = {"num": 0}

    @job
    def train_step(wave, mask, drawn, others):
        model.quantizer.set_num_updates(updates["num"])
        logits, perplexity = model(wave, mask, drawn, others)
        target = logits.new_zeros(logits.size(0), dtype=torch.long)
        loss = F.cross_entropy(logits, target, reduction="sum")
        loss = loss + 0.1 * (8 - perplexity) / 8 * logits.size(0)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.data.div_(max(logits.size(0), 1))
        optimizer.step()
        updates["num"] += 1
        return loss, perplexity, model.quantizer.curr_temp

    g = generator()
    others = torch.randint(9, (9, 3), generator=g)
    batches = [
        (
            torch.randn(8, 20, generator=g),
            torch.rand(8, 9, generator=g) < 0.4,
            torch.rand(8, 9, 2, 4, generator=g),
            others,
        )
        for _ in range(5)
    ]
    return Training(model, optimizer, train_step, batches)


@recipe(KIND, "a neural spline flow")
def spline(job):
    """Bins of what lies inside by a mask, knots whose ends are assigned, a check of the domain, gather by bins."""

    def rational(x, widths, heights, slopes, bound):
        if torch.min(x) < -bound or torch.max(x) > bound:
            raise ValueError("outside of the domain")
        bins = widths.shape[-1]
        knots = []
        for raw in (widths, heights):
            share = 1e-3 + (1 - 1e-3 * bins) * F.softmax(raw, dim=-1)
            ends = 2 * bound * F.pad(torch.cumsum(share, dim=-1), pad=(1, 0), value=0.0) - bound
            ends[..., 0] = -bound
            ends[..., -1] = bound
            knots.append((ends, ends[..., 1:] - ends[..., :-1]))
        (at, width), (low, height) = knots
        slope = 1e-3 + F.softplus(slopes)
        search = at.clone()
        search[..., -1] += 1e-6
        where = (torch.sum(x[..., None] >= search, dim=-1) - 1)[..., None]
        at, low = at.gather(-1, where)[..., 0], low.gather(-1, where)[..., 0]
        delta = (height / width).gather(-1, where)[..., 0]
        width, height = width.gather(-1, where)[..., 0], height.gather(-1, where)[..., 0]
        first, second = slope.gather(-1, where)[..., 0], slope[..., 1:].gather(-1, where)[..., 0]
        theta = (x - at) / width
        mixed = theta * (1 - theta)
        below = delta + (first + second - 2 * delta) * mixed
        y = low + height * (delta * theta.pow(2) + first * mixed) / below
        rate = delta.pow(2) * (second * theta.pow(2) + 2 * delta * mixed + first * (1 - theta).pow(2))
        return y, torch.log(rate) - 2 * torch.log(below)

    def unconstrained(x, widths, heights, slopes, bound=3.0):
        inside = (x >= -bound) & (x <= bound)
        y, log_det = torch.zeros_like(x), torch.zeros_like(x)
        slopes = F.pad(slopes, pad=(1, 1))
        slopes[..., 0] = slopes[..., -1] = math.log(math.exp(1 - 1e-3) - 1)
        y[~inside] = x[~inside]
        y[inside], log_det[inside] = rational(
            x[inside], widths[inside, :], heights[inside, :], slopes[inside, :], bound
        )
        return y, log_det

    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2 * 11))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)

    @job
    def step(x):
        one, other = x.chunk(2, 1)
        y, log_det = unconstrained(other, *net(one).view(-1, 2, 11).split([4, 4, 3], -1))
        loss = (0.5 * (one**2 + y**2) - log_det).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Training(net, optimizer, step, [(x * 2,) for (x,) in numbers(4, steps=5)])


@recipe(KIND, "an average that counts in a buffer")
def average(job):
    """As ema_pytorch: flags and counts in buffers by .item(), a decay by the count, copies at first, lerp_ later."""

    class EMA(nn.Module):
        def __init__(self, model, beta=0.99, update_after_step=1, update_every=2):
            super().__init__()
            self.beta, self.update_after_step, self.update_every = beta, update_after_step, update_every
            self.online_model = [model]
            self.ema_model = copy.deepcopy(model).requires_grad_(False)
            self.register_buffer("initted", torch.tensor(False))
            self.register_buffer("step", torch.tensor(0))

        def pairs(self):
            return zip(self.ema_model.parameters(), self.online_model[0].parameters(), strict=True)

        def copy_params(self):
            for average, current in self.pairs():
                average.data.copy_(current.data)

        def get_current_decay(self):
            epoch = (self.step - self.update_after_step - 1).clamp(min=0.0)
            value = 1 - (1 + epoch) ** -(2 / 3)
            return 0.0 if epoch.item() <= 0 else value.clamp(min=0.0, max=self.beta).item()

        def update(self):
            step = self.step.item()
            self.step += 1
            if step % self.update_every != 0:
                return
            if step <= self.update_after_step:
                self.copy_params()
                return
            if not self.initted.item():
                self.copy_params()
                self.initted.data.copy_(torch.tensor(True))
            decay = self.get_current_decay()
            for average, current in self.pairs():
                average.data.lerp_(current.data, 1.0 - decay)

    model = nn.Sequential(nn.Linear(5, 8), nn.SiLU(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    ema = EMA(model)

    @job
    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update()
        return loss

    return Training({"model": model, "ema": ema}, optimizer, step, classes(5, 3, steps=7), uncalled=("ema",))


@recipe(KIND, "Kronecker factors that hooks keep")
def kfac(job):
    """Factors in dictionaries by module, made by hooks, inverted in every second step as a count says; no optimizer."""

    class KFAC:
        def __init__(self, model):
            self.steps, self.aa, self.gg, self.inverse = 0, {}, {}, {}
            self.modules = [m for m in model.modules() if isinstance(m, nn.Linear)]
            for m in self.modules:
                m.register_forward_pre_hook(self.save_input)
                m.register_full_backward_hook(self.save_grad)

        def running(self, held, module, rows):
            factor = rows.t() @ (rows / rows.size(0))
            if self.steps == 0:
                held[module] = torch.diag(factor.new(factor.size(0)).fill_(1))
            held[module] = 0.95 * held[module] + 0.05 * factor

        def save_input(self, module, inputs):
            rows = inputs[0].data
            self.running(self.aa, module, torch.cat([rows, rows.new(rows.size(0), 1).fill_(1)], 1))

        def save_grad(self, module, _, grads):
            self.running(self.gg, module, grads[0].data * grads[0].size(0))

        def step(self, rate=0.05, damping=0.03):
            updates, size = {}, 0
            for m in self.modules:
                if self.steps % 2 == 0:
                    held = self.aa[m], self.gg[m]
                    self.inverse[m] = [torch.linalg.inv(f + damping * torch.eye(f.size(0))) for f in held]
                grad = torch.cat([m.weight.grad.data, m.bias.grad.data.view(-1, 1)], 1)
                updates[m] = self.inverse[m][1] @ grad @ self.inverse[m][0]
                size += (updates[m] * grad * rate**2).sum()
            scale = torch.clamp(torch.sqrt(0.001 / size), max=1.0)
            for m in self.modules:
                m.weight.data.add_(updates[m][:, :-1] * scale, alpha=-rate)
                m.bias.data.add_(updates[m][:, -1] * scale, alpha=-rate)
            self.steps += 1

    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    preconditioner = KFAC(model)

    @job
    def step(x, y):
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        preconditioner.step()
        return loss

    return Training(model, [], step, classes(5, 3, steps=6))


@recipe(KIND, "the forward-forward algorithm")
def forward_forward(job):
    """Layers that hold their own optimizer and train themselves in a loop within the step, one after another."""

    class Layer(nn.Linear):
        def __init__(self, inside, out):
            super().__init__(inside, out)
            self.opt = torch.optim.Adam(self.parameters(), lr=0.03)
            self.threshold, self.num_epochs = 2.0, 3

        def forward(self, x):
            direction = x / (x.norm(2, 1, keepdim=True) + 1e-4)
            return torch.relu(torch.mm(direction, self.weight.T) + self.bias.unsqueeze(0))

        def train_layer(self, positive, negative):
            for _ in range(self.num_epochs):
                good, bad = self(positive).pow(2).mean(1), self(negative).pow(2).mean(1)
                loss = torch.log(1 + torch.exp(torch.cat([self.threshold - good, bad - self.threshold]))).mean()
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
            return self(positive).detach(), self(negative).detach()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer(6, 8), Layer(8, 8)])

        def train_net(self, positive, negative):
            for layer in self.layers:
                positive, negative = layer.train_layer(positive, negative)
            return positive.pow(2).mean(), negative.pow(2).mean()

    net = Net()
    g = generator()
    batches = [(torch.randn(8, 6, generator=g), torch.randn(8, 6, generator=g)) for _ in range(5)]
    return Training(net, [layer.opt for layer in net.layers], job(net.train_net), batches)


@recipe(KIND, "a neural ODE with its adjoint")
def adjoint(job):
    """autograd.Function whose backward pass solves an equation of autograd.grad's, and a count of evaluations."""

    def solve(f, y, start, end, steps=3):
        h, t = (end - start) / steps, start
        for _ in range(steps):
            one = f(t, y)
            two = f(t + h / 2, tuple(a + h / 2 * b for a, b in zip(y, one, strict=True)))
            three = f(t + h / 2, tuple(a + h / 2 * b for a, b in zip(y, two, strict=True)))
            four = f(t + h, tuple(a + h * b for a, b in zip(y, three, strict=True)))
            each = zip(y, one, two, three, four, strict=True)
            y, t = tuple(a + h / 6 * (p + 2 * q + 2 * r + s) for a, p, q, r, s in each), t + h
        return y

    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.nfe = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), 0

        def forward(self, t, y):
            self.nfe += 1
            return self.net(torch.cat([y, torch.ones_like(y[:, :1]) * t], 1))

    class Adjoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, flat, field):
            with torch.no_grad():
                (end,) = solve(lambda t, s: (field(t, s[0]),), (y,), 0.0, 1.0)
            ctx.field = field
            ctx.save_for_backward(end)
            return end

        @staticmethod
        def backward(ctx, grad):
            (end,), field = ctx.saved_tensors, ctx.field
            parameters = tuple(field.parameters())

            def augmented(t, state):
                with torch.enable_grad():
                    y = state[0].detach().requires_grad_(True)
                    out = field(t, y)
                    of_y, *rest = torch.autograd.grad(out, (y, *parameters), -state[1])
                return out.detach(), of_y, torch.cat([p.reshape(-1) for p in rest])

            begun = (end, grad, torch.zeros(sum(p.numel() for p in parameters)))
            state = solve(augmented, begun, 1.0, 0.0)
            return state[1], state[2], None

    field, head = Field(), nn.Linear(2, 3)
    optimizer = torch.optim.Adam([*field.parameters(), *head.parameters()], 1e-2)

    @job
    def step(x, y):
        optimizer.zero_grad()
        flat = torch.cat([p.contiguous().view(-1) for p in field.parameters()])
        loss = F.cross_entropy(head(Adjoint.apply(x, flat, field)), y)
        forward, field.nfe = field.nfe, 0
        loss.backward()
        optimizer.step()
        backward, field.nfe = field.nfe, 0
        return loss, forward, backward

    return Training({"field": field, "head": head}, optimizer, step, classes(2, 3, steps=5))
