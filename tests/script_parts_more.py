"""More of ``script_parts``: what a step is given, and what scripts do in the loop around it."""

__all__ = ["ARGUMENTS", "LOOPS"]

ARGUMENTS = """
# a number
arg: k%n: 0.5 + 0.1 * i
use: h = h * k%n

# a number that is computed with
arg: k%n: i
use: h = h * min(1.0, (k%n + 1) / 3) ** 2

# a number that decides
arg: k%n: i
use: h = h.sin() if k%n > 1 else h * 2

# a flag
arg: k%n: i % 2 == 0
use: h = h.sin() if k%n else h.cos()

# a word
arg: k%n: ("sin", "cos")[i % 2]
use: h = getattr(torch, k%n)(h)

# a tensor
arg: k%n: torch.full((WIDTH,), 0.5 + 0.1 * i)
use: h = h * k%n

# a tensor, or none
arg: k%n: torch.full((WIDTH,), 0.5) if i % 2 else None
use: h = h if k%n is None else h * k%n

# a tensor without dims
arg: k%n: torch.tensor(0.5 + 0.1 * i)
use: h = h * k%n

# a dictionary
arg: k%n: {"a": torch.full((WIDTH,), 0.5 + 0.1 * i), "b": 0.5, "c": [1.0, torch.ones(())]}
use: h = h * k%n["a"] + k%n["b"] * k%n["c"][1]

# a dictionary that gets another key
arg: k%n: {"a": 0.5} | ({"b": 2.0} if i > 1 else {})
use: h = h * sum(k%n.values())

# a dataclass
top:
    @dataclasses.dataclass
    class Given%n:
        a: object
        b: float
arg: k%n: Given%n(torch.full((WIDTH,), 0.5), 0.1 * i)
use: h = h * k%n.a + k%n.b

# the batch once more
arg: k%n: x
use: h = h + 0.1 * k%n

# a part of the batch
arg: k%n: x[:, 1]
use: h = h + 0.1 * k%n.unsqueeze(1)

# the batch transposed
arg: k%n: x.t()
use: h = h + 0.1 * k%n.t()

# a mask
arg: k%n: x[:, 0] > 0
use: h = torch.where(k%n.unsqueeze(1), h, 0.5 * h)

# an array of numpy
arg: k%n: np.full(WIDTH, 0.5 + 0.1 * i)
use: h = h * torch.as_tensor(k%n)

# a function
arg: k%n: torch.sin if i % 2 else torch.cos
use: h = k%n(h)

# a tensor of the script's that changes
top: given%n = torch.full((WIDTH,), 0.5)
always: given%n.mul_(0.9)
arg: k%n: given%n
use: h = h * k%n

# a tensor that the step keeps, too
make: $w = torch.full((WIDTH,), 0.5)
arg: k%n: $w
use:
    h = h * k%n + $w
    $w = 0.9 * $w

# what the call before has returned
top: last%n = torch.zeros(())
arg: k%n: last%n
use: h = h + 0.1 * k%n
after: last%n = loss_of(returned).detach()

# a number that the call before has returned
top: last%n = 0.5
arg: k%n: last%n
use: h = h + 0.1 * k%n
after: last%n = loss_of(returned).item()

# a parameter of the model
arg: k%n: model.head.bias
use: h = h + k%n.mean()

# a list of tensors that grows up to three
top: kept%n = collections.deque(maxlen=3)
always: kept%n.append(torch.full((WIDTH,), 0.1 * i))
arg: k%n: list(kept%n)
use:
    for t in k%n:
        h = h + t
"""

LOOPS = """
# losses in a list
top: losses%n = []
after: losses%n.append(loss_of(returned))

# numbers of losses in a list
top: losses%n = []
after: losses%n.append(loss_of(returned).item())

# a sum of losses
top: total%n = SimpleNamespace(sum=0.0)
after: total%n.sum += loss_of(returned).detach()

# a mean of losses in place
top: mean%n = torch.zeros(())
after: mean%n.mul_(0.9).add_(loss_of(returned).detach(), alpha=0.1)

# the best weights so far
top: best%n = {"loss": float("inf"), "state": None}
after:
    if loss_of(returned).item() < best%n["loss"]:
        best%n.update(loss=loss_of(returned).item(), state=copy.deepcopy(model.state_dict()))

# the best weights, which come back
top: best%n = {"loss": float("inf"), "state": None}
between:
    if best%n["state"] is not None:
        model.load_state_dict(best%n["state"])
after:
    if loss_of(returned).item() < best%n["loss"]:
        best%n.update(loss=loss_of(returned).item(), state=copy.deepcopy(model.state_dict()))

# snapshots of model and optimizer, one of which comes back
top: snapshots%n = []
between:
    if snapshots%n:
        model.load_state_dict(snapshots%n[0][0])
        optimizer.load_state_dict(copy.deepcopy(snapshots%n[0][1]))
after: snapshots%n.append((copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())))

# a state that is loaded without a part
between: model.load_state_dict({"head.bias": torch.full((CLASSES,), %f)}, strict=False)

# a checkpoint in memory
top: import io
between:
    file%n = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file%n)
    file%n.seek(0)
    loaded%n = torch.load(file%n)
    model.load_state_dict(loaded%n["model"])
    optimizer.load_state_dict(copy.deepcopy(loaded%n["optimizer"]))

# a copy of the model
top: copies%n = []
always: copies%n.append(copy.deepcopy(model))

# a copy that is trained outside
top: held%n = []
between:
    twin%n = copy.deepcopy(model)
    F.cross_entropy(twin%n(x), y).backward()
    held%n.append(twin%n.head.weight.grad)

# a model that is looked at
top: norms%n = []
always:
    with torch.no_grad():
        norms%n.append(sum(p.norm() for p in model.parameters()))

# a model that is evaluated without gradients
top: seen%n = []
always:
    model.eval()
    with torch.no_grad():
        seen%n.append(model(x).argmax(1))
    model.train()

# a mean of weights outside
top: shadow%n = {}
after:
    with torch.no_grad():
        for name, p in model.named_parameters():
            shadow%n.setdefault(name, torch.zeros_like(p)).lerp_(p, 0.1)

# a mean of weights outside through data
top: shadow%n = {}
after:
    for name, p in model.named_parameters():
        shadow%n[name] = 0.9 * shadow%n.get(name, 0.0) + 0.1 * p.data

# a mean of weights that is put into the model
top: shadow%n = {}
after:
    for name, p in model.named_parameters():
        shadow%n[name] = 0.9 * shadow%n.get(name, p.data) + 0.1 * p.data
between:
    for name, p in model.named_parameters():
        if name in shadow%n and shadow%n[name].shape == p.shape:
            p.data.copy_(shadow%n[name])

# weights as a vector
between:
    with torch.no_grad():
        vector%n = torch.nn.utils.parameters_to_vector(model.parameters())
    torch.nn.utils.vector_to_parameters(0.9 * vector%n, model.parameters())

# a model that is initialised again
between:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.1)

# a weight of which an element is set
between:
    with torch.no_grad():
        model.head.weight[0, 1] = %f

# a bias of which a view is changed
between: model.head.bias.data[1:].mul_(%f)

# a model that is moved to where it is
between: model.to("cpu")

# a schedule by cosine
top: schedule%n = None
always:
    if schedule%n is None or schedule%n.optimizer is not optimizer:
        schedule%n = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
after: schedule%n.step()

# one cycle
top: schedule%n = None
always:
    if schedule%n is None or schedule%n.optimizer is not optimizer:
        schedule%n = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
after: schedule%n.step()

# a schedule by a plateau
top: schedule%n = None
always:
    if schedule%n is None or schedule%n.optimizer is not optimizer:
        schedule%n = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
after: schedule%n.step(loss_of(returned))

# schedules one behind the other
top: schedule%n = None
always:
    if schedule%n is None or schedule%n.optimizer is not optimizer:
        first%n = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        second%n = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: 0.9**e)
        schedule%n = torch.optim.lr_scheduler.SequentialLR(optimizer, [first%n, second%n], [2])
after: schedule%n.step()

# a phase by the number of the call
top: PHASE%n = "warm"
loss: loss = loss * 0.1 if PHASE%n == "warm" else loss
always: PHASE%n = "warm" if i < 2 else "hot"

# a layer that thaws with the number of the call
always: model.first.requires_grad_(i > 1)

# a momentum that changes
always:
    for group in optimizer.param_groups:
        if "momentum" in group and group["momentum"]:
            group["momentum"] = 0.9 - 0.1 * i

# betas that change
always:
    for group in optimizer.param_groups:
        if "betas" in group:
            group["betas"] = (0.9 - 0.05 * i, 0.99)

# an optimizer's state that is replaced
between: optimizer.state = collections.defaultdict(dict)

# the state of one parameter that is cleared
between: optimizer.state.pop(model.head.weight, None)

# momenta that are zeroed
between:
    for values in optimizer.state.values():
        for name in ("momentum_buffer", "exp_avg"):
            if values.get(name) is not None:
                values[name].zero_()

# momenta that are replaced
between:
    for p, values in optimizer.state.items():
        for name in ("momentum_buffer", "exp_avg"):
            if values.get(name) is not None:
                values[name] = torch.full_like(p, 0.01)

# a hook of the optimizer
top: hooked%n = []
always:
    if not any(o is optimizer for o in hooked%n):
        hooked%n.append(optimizer)
        optimizer.register_step_post_hook(halve_first)

# a hook before the optimizer
top: hooked%n = []
always:
    if not any(o is optimizer for o in hooked%n):
        hooked%n.append(optimizer)
        optimizer.register_step_pre_hook(shrink_gradients)

# a hook that comes and goes
top: handle%n = None
always:
    if i % 2:
        handle%n = model.first.register_forward_hook(lambda module, args, out: out * 0.5)
    elif handle%n is not None:
        handle%n.remove()

# a tensor hook of a weight that comes and goes
top: handle%n = None
always:
    if i % 2:
        handle%n = model.first.weight.register_hook(lambda g: g * 0.5)
    elif handle%n is not None:
        handle%n.remove()

# gradients that are looked at
top: seen%n = []
after: seen%n.append([None if p.grad is None else p.grad.norm() for p in model.head.parameters()])

# gradients that are cleared before each call
always: optimizer.zero_grad()

# a model in evaluation within the step
loss:
    model.eval()
    loss = loss + 0.1 * model(x).pow(2).mean()
    model.train()

# a model that the step leaves in evaluation
post: model.eval()
always: model.train()

# a part that is frozen within the step
loss:
    for p in model.first.parameters():
        p.requires_grad_(False)
    loss = loss + 0.1 * model(x).pow(2).mean()
    for p in model.first.parameters():
        p.requires_grad_(True)

# gradients that are set to none within the step
grad:
    for p in model.head.parameters():
        p.grad = None

# no gradients by a decorator
top:
    @torch.no_grad()
    def looked_at%n(t):
        return t.softmax(1).mean(0)
loss: loss = loss + 0.1 * (out.softmax(1).mean(0) - looked_at%n(out)).pow(2).sum() + 0.1 * looked_at%n(out)[0]

# a function that the step makes
make: $by = %f
loss:
    def scaled%n(t):
        return t * $by
    loss = scaled%n(loss)
between: $by = %v

# a generator expression
make: $weights = [0.1, 0.2]
loss: loss = loss + sum(w * t for w, t in zip($weights, (out.pow(2).mean(), out.abs().mean())))
between: $weights[0] = %v

# weights of losses that are trained
top: logs%n = nn.Parameter(torch.zeros(2))
loss:
    loss = (loss * torch.exp(-logs%n) + logs%n).sum()
always:
    if not any(logs%n is p for group in optimizer.param_groups for p in group["params"]):
        optimizer.add_param_group({"params": [logs%n], "lr": 0.01})

# two models against each other
top:
    critic%n = nn.Linear(CLASSES, 1)
    of_critic%n = torch.optim.SGD(critic%n.parameters(), lr=0.05)
loss:
    of_critic%n.zero_grad()
    (critic%n(out.detach()).mean() - critic%n(torch.zeros_like(out)).pow(2).mean()).backward()
    of_critic%n.step()
    loss = loss + 0.1 * critic%n(out).mean()

# a scaler that does nothing
top: scaler%n = torch.amp.GradScaler("cpu", enabled=False)
loss: loss = scaler%n.scale(loss)

# autocast by a flag
make: $on = False
loss:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=$on):
        loss = loss + 0.1 * (out @ out.t()).pow(2).mean()
between: $on = not $on

# an average of torch's in the step
top: average%n = SimpleNamespace(model=None)
always:
    if average%n.model is None:
        average%n.model = torch.optim.swa_utils.AveragedModel(model)
post: average%n.model.update_parameters(model)

# an average with a factor of torch's in the step
top: average%n = SimpleNamespace(model=None)
always:
    if average%n.model is None:
        average%n.model = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
post: average%n.model.update_parameters(model)

# an exception that the step catches
top:
    class Stop%n(Exception):
        pass
make: $stop = False
loss:
    try:
        if $stop:
            raise Stop%n
        loss = loss * 2
    except Stop%n:
        loss = loss * 0.5
between: $stop = not $stop

# two layers that change places behind the model's back
between: model.first.weight.data, model.first.bias.data = model.first.weight.data * 0.5, model.first.bias.data + 0.1

# a loose tensor that is changed through data
make: $w = torch.ones(WIDTH)
use: h = h * $w
between: $w.data.mul_(%v)

# a loose tensor that is changed through numpy
make: $w = torch.ones(WIDTH)
top: views%n = []
use: h = h * $w
always:
    if not views%n:
        views%n.append($w.numpy())
between: views%n[0][2] = %f

# a copied model with a view
init:
    self.w%n = torch.ones(2, WIDTH)
    self.v%n = self.w%n[0]
use: h = h * self.w%n.sum(0)
between: model = copy.deepcopy(model); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
after: (model.v%n if hasattr(model, "v%n") else model.block.v%n).mul_(0.9)

# a kept tensor that the script holds across a call (held)
make: $w = torch.zeros(WIDTH)
top: held%n = []
use:
    h = h + $w
    $w = 0.1 * h.detach().mean(0)
after: held%n.append($w)

# a kept tensor that is changed in place and held (held)
make: $w = torch.zeros(WIDTH)
top: held%n = []
use:
    $w.add_(h.detach().mean(0), alpha=0.1)
    h = h + $w
after: held%n.append($w)

# a copy of a kept tensor that the script holds
make: $w = torch.zeros(WIDTH)
top: held%n = []
use:
    h = h + $w
    $w = 0.1 * h.detach().mean(0)
after: held%n.append($w.clone())

# a kept tensor that is read as a number
make: $w = torch.zeros(WIDTH)
top: read%n = []
use:
    h = h + $w
    $w = 0.1 * h.detach().mean(0)
after: read%n.append(($w.sum().item(), $w[1].item(), $w.numpy().copy()))

# kept tensors that the script sets back
make: $w = torch.zeros(WIDTH)
use:
    h = h + $w
    $w = 0.1 * h.detach().mean(0)
between: $w = torch.zeros(WIDTH)

# kept tensors that the script changes
make: $w = torch.zeros(WIDTH)
use:
    h = h + $w
    $w = 0.1 * h.detach().mean(0)
between: $w.mul_(0.5)

# a kept tensor that the script replaces by a copy
make: $w = torch.zeros(WIDTH)
use:
    h = h + $w
    $w = 0.1 * h.detach().mean(0)
between: $w = $w.detach().clone() * 0.5

# results that are changed by the script
top: results%n = []
after:
    results%n.append(loss_of(returned).detach())
    results%n[-1].mul_(2)

# a list of memories that is replaced
make: $m = [torch.zeros(WIDTH), torch.ones(WIDTH)]
use:
    h = h + 0.1 * sum($m)
    $m = $m[1:] + [h.detach().mean(0)]

# a table of memories that is replaced
make: $m = {"a": torch.zeros(WIDTH), "b": torch.ones(WIDTH)}
use:
    h = h + 0.1 * ($m["a"] + $m["b"])
    $m = {"a": $m["b"], "b": h.detach().mean(0)}
"""
