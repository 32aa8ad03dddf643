"""torch.func, gradients of one's own, hooks and recomputation."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jvp, stack_module_state, vmap
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from recipes.data import classes, numbers, pairs
from recipes.recipe import Training, recipe

KIND = "functional"


def network(inside=6, out=4):
    return nn.Sequential(nn.Linear(inside, 8), nn.Tanh(), nn.Linear(8, out))


def training(job, model, loss_of, batches, rate=0.05):
    """One step of SGD with momentum on a loss of the model and the batch."""
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)

    @job
    def train_step(*batch):
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, train_step, batches)


@recipe(KIND, "MAML")
def maml(job):
    """Inner steps by autograd.grad with create_graph, functional_call with moved parameters, tasks in a Python loop."""

    def loss(model, x, y):
        total = 0
        for inside, out in zip(x.view(2, -1, 6), y.view(2, -1, 4), strict=True):
            fast = dict(model.named_parameters())
            for _ in range(2):
                inner = F.mse_loss(functional_call(model, fast, (inside[:2],)), out[:2])
                slopes = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
                fast = {name: p - 0.1 * s for (name, p), s in zip(fast.items(), slopes, strict=True)}
            total = total + F.mse_loss(functional_call(model, fast, (inside[2:],)), out[2:])
        return total / 2

    return training(job, network(), loss, pairs(6, 4))


@recipe(KIND, "MAML over tasks by vmap and grad")
def vmapped(job):
    """torch.func.grad within vmap over a dimension of tasks."""

    def loss(model, x, y):
        parameters = dict(model.named_parameters())

        def error(parameters, x, y):
            return F.mse_loss(functional_call(model, parameters, (x,)), y)

        def adapted(x, y):
            slopes = grad(error)(parameters, x, y)
            return error({n: p - 0.1 * slopes[n] for n, p in parameters.items()}, x, y)

        return vmap(adapted)(x.view(2, 4, 6), y.view(2, 4, 4)).mean()

    return training(job, network(), loss, pairs(6, 4))


@recipe(KIND, "Reptile")
def reptile(job):
    """Weights that are kept, moved by an inner loop of plain SGD and pulled back."""
    model = network()

    @job
    def train_step(x, y):
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(2):
            loss = F.mse_loss(model(x), y)
            slopes = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, s in zip(model.parameters(), slopes, strict=True):
                    p.sub_(0.1 * s)
        with torch.no_grad():
            for p, b in zip(model.parameters(), before, strict=True):
                p.copy_(b + 0.5 * (p - b))
        return loss

    return Training(model, [], train_step, pairs(6, 4))


@recipe(KIND, "an ensemble by stack_module_state and vmap")
def ensemble(job):
    """Three networks as one batched product, each with a loss of its own."""
    networks = [network() for _ in range(3)]
    stacked, _ = stack_module_state(networks)
    held = nn.ParameterDict({name.replace(".", "_"): p.detach().clone() for name, p in stacked.items()})
    base = network().to("meta")
    optimizer = torch.optim.Adam(held.parameters(), 0.01, eps=1e-5)

    @job
    def train_step(x, y):
        parameters = {name: held[name.replace(".", "_")] for name in stacked}
        logits = vmap(lambda p, x: functional_call(base, p, (x,)), in_dims=(0, None))(parameters, x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.repeat(3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss, logits.var(0).mean()

    return Training(held, optimizer, train_step, classes(6, 4))


@recipe(KIND, "an ensemble whose stacked tensors are trained as they are")
def stacked_tensors(job):
    """What stack_module_state gives, parameters and buffers of a batch norm, in AdamW and vmap."""
    networks = [nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).eval() for _ in range(3)]
    parameters, buffers = stack_module_state(networks)
    base = networks[0].to("meta")
    optimizer = torch.optim.AdamW(parameters.values(), 0.01, eps=1e-5)

    @job
    def train_step(x, y):
        logits = vmap(lambda p, b: functional_call(base, (p, b), (x,)))(parameters, buffers)
        loss = F.cross_entropy(logits.flatten(0, 1), y.repeat(3))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training({}, optimizer, train_step, classes(6, 4), kept=lambda: [p.detach() for p in parameters.values()])


@recipe(KIND, "an ensemble of modules in a list")
def members(job):
    """A ModuleList of networks, the disagreement of their outputs as a bonus."""
    model = nn.ModuleList(network() for _ in range(3))

    def loss(model, x, y):
        logits = torch.stack([m(x) for m in model])
        each = F.cross_entropy(logits.mean(0), y)
        return each - 0.01 * logits.softmax(-1).var(0, unbiased=False).sum(-1).mean()

    return training(job, model, loss, classes(6, 4))


@recipe(KIND, "clipped gradients of each sample")
def private(job):
    """DP-SGD: vmap of grad over the batch, norms by sample, noise that is given."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @job
    def train_step(x, y):
        parameters = dict(model.named_parameters())

        def error(parameters, x, y):
            return F.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

        slopes = vmap(grad(error), in_dims=(None, 0, 0))(parameters, x, y)
        norms = torch.stack([s.flatten(1).norm(dim=1) for s in slopes.values()]).norm(dim=0)
        factor = (0.5 / (norms + 1e-6)).clamp(max=1)
        for name, p in model.named_parameters():
            s = slopes[name]
            p.grad = (s * factor.view(-1, *[1] * (s.ndim - 1))).mean(0)
        optimizer.step()
        optimizer.zero_grad()
        return norms.mean()

    return Training(model, optimizer, train_step, classes(6, 4))


@recipe(KIND, "Jacobians and Hessian products")
def jacobians(job):
    """Derivatives along a direction by torch.func, second derivatives by grad of grad."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Softplus(), nn.Linear(8, 1))

    def loss(model, x, v):
        value, slope = jvp(lambda x: model(x), (x,), (v,))
        second = vmap(grad(lambda x: grad(lambda x: model(x).sum())(x)[0]))(x)
        return (value - slope).square().mean() + second.square().mean()

    return training(job, model, loss, pairs(3, 3))


@recipe(KIND, "evolution strategies")
def evolution(job):
    """No backward pass: losses of perturbed weights by vmap, an update by their ranks."""
    model = network()

    @job
    def train_step(x, y, seeds):
        with torch.no_grad():
            at, shapes = {}, dict(model.named_parameters())
            for name, p in shapes.items():
                angles = torch.arange(p.numel()).view(p.shape) + 1
                at[name] = torch.sin(seeds.view(-1, *[1] * p.ndim) * angles)

            def error(noise):
                moved = {n: p + 0.1 * noise[n] for n, p in shapes.items()}
                return F.cross_entropy(functional_call(model, moved, (x,)), y)

            losses = vmap(error)(at)
            ranks = losses.argsort().argsort().to(x.dtype) / (len(seeds) - 1) - 0.5
            for name, p in shapes.items():
                p.sub_(0.1 * torch.tensordot(ranks, at[name], 1))
        return losses.mean()

    g = torch.Generator().manual_seed(1)
    return Training(model, [], train_step, [(*b, torch.rand(4, generator=g) * 9) for b in classes(6, 4)])


@recipe(KIND, "an activation with a gradient of its own")
def function(job):
    """autograd.Function with saved tensors, several inputs and outputs, needs_input_grad."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            y = torch.sigmoid(x * scale)
            ctx.save_for_backward(x, scale, y)
            return x * y, y

        @staticmethod
        def backward(ctx, of_out, of_gate):
            x, scale, y = ctx.saved_tensors
            slope = of_out * x + of_gate
            inner = slope * y * (1 - y)
            of_scale = (inner * x).sum(0) if ctx.needs_input_grad[1] else None
            return of_out * y + inner * scale, of_scale

    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x):
            out, gate = Scaled.apply(x, self.scale)
            return out + 0.1 * gate

    model = nn.Sequential(nn.Linear(6, 8), Gate(), nn.Linear(8, 4))
    return training(job, model, lambda m, x, y: F.cross_entropy(m(x), y), classes(6, 4))


@recipe(KIND, "a spiking network with surrogate gradients")
def spiking(job):
    """A step function forward and a smooth gradient backward, membranes over time in a Python loop."""

    class Spike(torch.autograd.Function):
        @staticmethod
        def forward(ctx, v):
            ctx.save_for_backward(v)
            return (v > 0).to(v.dtype)

        @staticmethod
        def backward(ctx, slope):
            (v,) = ctx.saved_tensors
            return slope / (1 + 5 * v.abs()) ** 2

    model = nn.ModuleDict({"inside": nn.Linear(4, 8), "out": nn.Linear(8, 3)})

    def loss(model, x):
        v, total = 0, 0
        for t in range(x.shape[1]):
            v = 0.8 * v + model["inside"](x[:, t])
            spikes = Spike.apply(v - 0.5)
            v = v * (1 - spikes)
            total = total + model["out"](spikes)
        return F.cross_entropy(total, (x[:, 0, 0] > 0).long())

    return training(job, model, loss, numbers(5, 4))


@recipe(KIND, "checkpoints")
def checkpointed(job):
    """Blocks that are computed again in the backward pass, one by one and by checkpoint_sequential."""
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)) for _ in range(2))
    rest = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model = nn.ModuleDict({"blocks": blocks, "rest": rest})

    def loss(model, x, y):
        for block in model["blocks"]:
            x = x + checkpoint(block, x, use_reentrant=False)
        return F.cross_entropy(checkpoint_sequential(model["rest"], 2, x, use_reentrant=False), y)

    return training(job, model, loss, classes(6, 4))


@recipe(KIND, "hooks of modules")
def hooks(job):
    """Forward pre-hooks and hooks that change values, features taken out by a hook for a loss, backward hooks."""
    model = network()
    features = {}
    model[0].register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    model[1].register_forward_hook(lambda _, args, out: features.update(hidden=out))
    model[2].register_full_backward_hook(lambda _, inside, out: (inside[0] * 0.5,))

    def loss(model, x, y):
        return F.cross_entropy(model(x), y) + 0.1 * features["hidden"].square().mean()

    return training(job, model, loss, classes(6, 4))


@recipe(KIND, "hooks of tensors and parameters")
def tensor_hooks(job):
    """Gradients scaled, masked and clipped where they pass, hooks behind a parameter's gradient."""

    def halve(parameter):
        parameter.grad.mul_(0.5)

    model = network()
    model[0].weight.register_hook(lambda g: g * (torch.arange(6) > 1))
    model[2].bias.register_hook(lambda g: g.clamp(-0.05, 0.05))
    model[2].weight.register_post_accumulate_grad_hook(halve)

    def loss(model, x, y):
        h = model[1](model[0](x))
        h.register_hook(lambda g: g * 3)
        return F.cross_entropy(model[2](h), y)

    return training(job, model, loss, classes(6, 4))


@recipe(
    KIND,
    "GradNorm and conflicting gradients",
)
def pcgrad(job):
    """Gradients of each task by autograd.grad, projected onto each other, put into p.grad."""
    model = nn.ModuleDict({"body": nn.Linear(6, 8), "a": nn.Linear(8, 4), "b": nn.Linear(8, 1)})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @job
    def train_step(x, y):
        h = torch.tanh(model["body"](x))
        losses = [F.cross_entropy(model["a"](h), y), model["b"](h).square().mean()]
        shared = list(model["body"].parameters())
        one, two = (torch.autograd.grad(each, shared, retain_graph=True) for each in losses)
        flat = [torch.cat([g.flatten() for g in of]) for of in (one, two)]
        dot = flat[0] @ flat[1]
        moved = flat[0] - torch.minimum(dot, torch.zeros(())) / flat[1].square().sum() * flat[1] + flat[1]
        optimizer.zero_grad()
        (losses[0] + losses[1]).backward()
        for p, g in zip(shared, moved.split([p.numel() for p in shared]), strict=True):
            p.grad = g.view_as(p)
        optimizer.step()
        return losses

    return Training(model, optimizer, train_step, classes(6, 4))


@recipe(KIND, "a deep equilibrium model")
def equilibrium(job):
    """A fixed point without a graph, one step with it, a backward pass that is solved in a hook."""

    class Equilibrium(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.inject = nn.Linear(6, 6), nn.Linear(6, 6)
            with torch.no_grad():
                self.inner.weight.mul_(0.5)

        def f(self, z, x):
            return torch.tanh(self.inner(z) + self.inject(x))

        def forward(self, x):
            with torch.no_grad():
                z = torch.zeros_like(x)
                for _ in range(8):
                    z = self.f(z, x)
            z = self.f(z, x)
            z0 = z.detach().requires_grad_()
            f0 = self.f(z0, x)

            def solve(g):
                found = g
                for _ in range(5):
                    found = torch.autograd.grad(f0, z0, found, retain_graph=True)[0] + g
                return found

            z.register_hook(solve)
            return z

    model = nn.Sequential(Equilibrium(), nn.Linear(6, 4))
    return training(job, model, lambda m, x, y: F.cross_entropy(m(x), y), classes(6, 4))


@recipe(KIND, "modules of torch.export, torch.fx and torch.compile")
def programs(job):
    """An exported program with a batch of any size, a module that was traced symbolically, a compiled module."""
    batch = torch.export.Dim("batch")
    part = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
    exported = torch.export.export(part, (torch.randn(8, 6),), dynamic_shapes=({0: batch},)).module()
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.GELU()))
    compiled = torch.compile(nn.Linear(8, 4), backend="eager")
    model = nn.Sequential(exported, traced, compiled)
    optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-5)

    @job
    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(model, optimizer, train_step, classes(6, 4))


@recipe(KIND, "second derivatives in forward mode")
def curvature(job):
    """A Laplacian by vmap over hessian, jacfwd of jacfwd, a Hessian times a vector, over SiLU and Tanh."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 1))

    def loss(model, x, y):
        parameters = dict(model.named_parameters())

        def value(point):
            return functional_call(model, parameters, (point,)).squeeze(-1)

        laplacian = vmap(lambda point: hessian(value)(point).diagonal().sum())(x)
        forward = vmap(jacfwd(jacfwd(value)))(x)
        _, product = jvp(grad(lambda points: value(points).square().sum()), (x,), (torch.ones_like(x),))
        return (laplacian + value(x) - y[:, 0]).square().mean() + forward.square().mean() + product.square().mean()

    return training(job, model, loss, pairs(3, 1), 0.01)
