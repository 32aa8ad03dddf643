"""Train a few steps of one of many small scripts, each of which differs by one thing where KNOB is 1.

python changed_pairs.py NAME

What differs is nothing in the file, as a script differs that reads a configuration, its arguments or the environment.
"""

import contextlib
import dataclasses
import enum
import functools
import os
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import actorflow as flow
from actorflow.session import compiling

K = int(os.environ["KNOB"])
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
SCALE, TABLE, LISTED, NESTED = 1.0, {"a": 1.0}, [1.0, 2.0], {"deep": [{"x": 1.0}]}
ARRAY = np.array([1.0, 2.0])
captures = 0


def counted(*given):
    global captures
    captures += 1
    return before(*given)


before, compiling.capture_step = compiling.capture_step, counted


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def training(loss_of, model=None, optimizer=None, calls=3, inputs=(X,), **options):
    """Train with a loss of the model and the batch, and print losses and weights."""
    model = net() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer(model)

    def step(x):
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    job = flow.global_function(**options)(step)
    show([job(inputs[n % len(inputs)]) for n in range(calls)], model)


def show(losses, model):
    print([float(loss) for loss in losses], [float(p.detach().double().sum()) for p in model.parameters()])


PAIRS = {}


def pair(function):
    PAIRS[function.__name__] = function
    return function


def plain(model, x):
    return model(x).square().mean()


# -- nothing differs that a capture reads ----------------------------------------------------------


@pair
def same_nothing():
    training(plain)


@pair
def same_values():
    model = net()
    with torch.no_grad():
        model[0].weight.mul_(1 + K)
    training(plain, model)


@pair
def same_rate():
    training(plain, optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.1 * (1 + K)))


@pair
def same_other_global():
    globals()["UNREAD"] = K
    training(plain)


# -- values of Python ------------------------------------------------------------------------------


@pair
def a_global_number():
    globals()["SCALE"] = 1.0 + K
    training(lambda model, x: plain(model, x) * SCALE)


@pair
def a_global_of_another_type():
    globals()["SCALE"] = 1 if K else 1.0
    training(lambda model, x: plain(model, x) * (2.0 if isinstance(SCALE, int) else 1.0))


@pair
def an_item_of_a_dictionary():
    TABLE["a"] = 1.0 + K
    training(lambda model, x: plain(model, x) * TABLE["a"])


@pair
def the_order_of_a_dictionary():
    TABLE.clear()
    TABLE.update({"b": 3.0, "a": 2.0} if K else {"a": 2.0, "b": 3.0})
    training(lambda model, x: plain(model, x) * next(iter(TABLE.values())))


@pair
def an_item_of_a_list():
    LISTED[1] = 2.0 + K
    training(lambda model, x: plain(model, x) * LISTED[1])


@pair
def a_value_deep_inside():
    NESTED["deep"][0]["x"] = 1.0 + K
    training(lambda model, x: plain(model, x) * NESTED["deep"][0]["x"])


@pair
def an_array():
    ARRAY[1] = 2.0 + K
    training(lambda model, x: plain(model, x) * float(ARRAY[1]))


@pair
def an_array_that_cannot_be_written():
    fixed = np.array([1.0, 2.0])
    fixed.flags.writeable = not K
    training(lambda model, x: plain(model, x) * (2.0 if fixed.flags.writeable else 1.0))


@pair
def two_arrays_that_share_memory():
    first, second = ARRAY, (ARRAY if K else ARRAY.copy())[1:]
    training(lambda model, x: plain(model, x) * (2.0 if np.shares_memory(first, second) else 1.0))


@pair
def two_lists_or_one_twice():
    first = [1.0]
    second = first if K else [1.0]
    training(lambda model, x: plain(model, x) * (2.0 if first is second else 1.0))


@pair
def the_first_of_two_lists_or_the_second():
    first, second = [1.0], [1.0]
    third = second if K else first
    training(lambda model, x: plain(model, x) * len(second) * (2.0 if first is third else 1.0))


@pair
def minus_zero():
    globals()["SCALE"] = -0.0 if K else 0.0
    training(lambda model, x: plain(model, x) * (1.0 if str(SCALE)[0] == "-" else 2.0))


@pair
def a_value_of_a_closure():
    scale = 1.0 + K
    training(lambda model, x: plain(model, x) * scale)


@pair
def a_default():
    def loss(model, x, scale=1.0 + K):
        return plain(model, x) * scale

    training(loss)


@pair
def a_default_of_a_keyword():
    def loss(model, x, *, scale=1.0 + K):
        return plain(model, x) * scale

    training(loss)


@pair
def an_argument_of_a_partial():
    def loss(scale, model, x):
        return plain(model, x) * scale

    training(functools.partial(loss, 1.0 + K))


class Color(enum.Enum):
    RED, BLUE = 1, 2


@pair
def a_member_of_an_enumeration():
    color = Color.BLUE if K else Color.RED
    training(lambda model, x: plain(model, x) * (2.0 if color is Color.BLUE else 1.0))


@dataclasses.dataclass
class Options:
    scale: float = 1.0
    deep: bool = False


@pair
def a_field_of_a_dataclass():
    options = Options(scale=1.0 + K)
    training(lambda model, x: plain(model, x) * options.scale)


@pair
def an_attribute_of_a_namespace():
    options = types.SimpleNamespace(scale=1.0 + K)
    training(lambda model, x: plain(model, x) * options.scale)


@pair
def an_attribute_that_is_there():
    options = types.SimpleNamespace(scale=1.0)
    if K:
        options.twice = True
    training(lambda model, x: plain(model, x) * (2.0 if hasattr(options, "twice") else 1.0))


class Holder:
    factor = 1.0

    @property
    def twice(self):
        return 2.0 * self.factor

    def loss(self, model, x):
        return plain(model, x) * self.factor


class Other(Holder):
    def loss(self, model, x):
        return 3.0 * plain(model, x)


@pair
def an_attribute_of_a_class():
    Holder.factor = 1.0 + K
    training(Holder().loss)


@pair
def an_attribute_behind_a_property():
    Holder.factor = 1.0 + K
    holder = Holder()
    training(lambda model, x: plain(model, x) * holder.twice)


@pair
def a_method_of_a_subclass():
    training((Other if K else Holder)().loss)


@pair
def a_method_that_was_replaced():
    if K:
        Holder.loss = Other.loss
    training(Holder().loss)


@pair
def a_class_that_was_exchanged():
    holder = Holder()
    if K:
        holder.__class__ = Other
    training(lambda model, x: holder.loss(model, x))


@pair
def an_item_of_sys_argv():
    sys.argv[1:] = ["--double"] if K else ["--single"]
    training(lambda model, x: plain(model, x) * (2.0 if "--double" in sys.argv else 1.0))


@pair
def a_variable_of_the_environment():
    os.environ["SCALED"] = str(1 + K)
    training(lambda model, x: plain(model, x) * float(os.environ["SCALED"]))


# -- functions -------------------------------------------------------------------------------------


def squared(x):
    return x.square()


def cubed(x):
    return x.pow(3)


@pair
def a_function_that_is_called():
    globals()["inner"] = cubed if K else squared
    training(lambda model, x: inner(model(x)).mean())  # noqa: F821


@pair
def a_function_of_text():
    made = {}
    exec(f"def made(x):\n    return x * {1.0 + K}", made)
    called = made["made"]
    training(lambda model, x: called(model(x)).square().mean())


@pair
def a_body_with_another_constant():
    code = squared.__code__
    if K:
        squared.__code__ = cubed.__code__
    training(lambda model, x: squared(model(x)).mean())
    squared.__code__ = code


@pair
def a_decorator():
    def twice(function):
        @functools.wraps(function)
        def call(*given):
            return function(*given) * (1.0 + K)

        return call

    training(twice(plain))


@pair
def a_function_that_reads_a_file_by_another_name():
    read = np.loadtxt  # a function of Python
    Path("/proc/self/comm").write_text(str(1 + K))
    training(lambda model, x: plain(model, x) * float(read("/proc/self/comm")))


@pair
def a_method_that_reads_a_state_by_another_name():
    read = torch.Generator().manual_seed(1 + K).initial_seed  # a method of C
    training(lambda model, x: plain(model, x) * read())


@pair
def a_function_of_torch():
    activation = F.gelu if K else F.relu
    training(lambda model, x: activation(model(x)).square().mean())


@pair
def a_function_of_torch_that_was_replaced():
    original = F.relu
    if K:
        F.relu = lambda x, inplace=False: original(x) * 2.0
    training(plain)


@pair
def an_operator_of_tensors():
    if K:
        original = torch.Tensor.__sub__
        torch.Tensor.__sub__ = lambda self, other: original(self, other) * 2.0
    training(lambda model, x: (model(x) - 1.0).square().mean())


def annotated(scale: float):
    """2."""


class Annotated:
    scale: float


@pair
def annotations_of_a_function():
    annotated.__annotations__["scale"] = 1.0 + K
    training(lambda model, x: (model(x) * annotated.__annotations__["scale"]).square().mean())


@pair
def annotations_of_a_class():
    Annotated.__annotations__["scale"] = 1.0 + K
    training(lambda model, x: (model(x) * Annotated.__annotations__["scale"]).square().mean())


@pair
def the_docstring_of_a_function():
    annotated.__doc__ = str(1.0 + K)
    training(lambda model, x: (model(x) * float(annotated.__doc__)).square().mean())


@pair
def the_name_of_a_class():
    Annotated.__name__ = "A" * (1 + K)
    training(lambda model, x: (model(x) * len(Annotated.__name__)).square().mean())


@pair
def a_function_of_torch_in_place_of_another():
    if K:
        F.relu = F.gelu
    training(plain, nn.Sequential(nn.Linear(4, 8), Activated(), nn.Linear(8, 4)))


class Activated(nn.Module):
    def forward(self, x):
        return nn.functional.relu(x)


@pair
def a_function_that_only_torch_calls():
    if K:
        F.linear = lambda x, w, b=None: torch.addmm(b, x, w.t()) * 2.0
    training(plain)


@pair
def a_torch_function_swapped_inside_torch():
    if K:
        torch.nn.functional.relu = torch.nn.functional.silu
    training(plain)


@pair
def a_method_of_a_layer_of_torch():
    if K:
        nn.ReLU.forward = lambda self, x: x.abs()
    training(plain)


@pair
def a_method_of_tensors():
    if K:
        torch.Tensor.square = torch.Tensor.abs
    training(plain)


@pair
def a_builtin():
    import builtins

    if K:
        builtins.max = min
    training(lambda model, x: plain(model, x) * max(1.0, 2.0))


@pair
def a_builtin_that_was_added():
    import builtins

    builtins.OPTIONS = {"scale": 1.0 + K}
    training(lambda model, x: plain(model, x) * OPTIONS["scale"])  # noqa: F821


@pair
def an_object_among_the_builtins():
    import builtins

    builtins.OPTIONS = Options(scale=1.0 + K)
    training(lambda model, x: plain(model, x) * OPTIONS.scale)  # noqa: F821


@pair
def a_dictionary_in_torch():
    torch.options = {"scale": 1.0 + K}
    training(lambda model, x: plain(model, x) * torch.options["scale"])


@pair
def a_dictionary_of_all_modules():
    nn.Module.options = {"scale": 1.0 + K}
    training(lambda model, x: plain(model, x) * model.options["scale"])


@pair
def an_object_in_torch():
    torch.options = Options(scale=1.0 + K)
    training(lambda model, x: plain(model, x) * torch.options.scale)


@pair
def a_partial_in_torch():
    F.relu = functools.partial(F.leaky_relu, negative_slope=0.1 * (1 + K))
    training(plain)


@pair
def an_array_in_torch():
    torch.options = np.array([1.0 + K])
    training(lambda model, x: plain(model, x) * float(torch.options[0]))


@pair
def a_namespace_in_torch():
    torch.options = types.SimpleNamespace(scale=1.0 + K)
    training(lambda model, x: plain(model, x) * torch.options.scale)


@pair
def a_value_deep_inside_torch():
    torch.options = {"a": {"b": {"c": {"d": [{"scale": 1.0 + K}]}}}}
    training(lambda model, x: plain(model, x) * torch.options["a"]["b"]["c"]["d"][0]["scale"])


@pair
def a_method_in_torch():
    class Power:
        def __init__(self, scale):
            self.scale = scale

        def relu(self, x, inplace=False):
            return x * self.scale

    F.relu = Power(1.0 + K).relu
    training(plain)


@pair
def a_function_of_text_in_torch():
    made = {}
    exec(f"def relu(x, inplace=False):\n    return x * {1.0 + K}", made)
    F.relu = made["relu"]
    training(plain)


@pair
def a_function_that_torch_wraps_in_torch():
    scale = 1.0 + K

    def relu(x, inplace=False):
        return x * scale

    F.relu = torch.enable_grad()(relu)
    training(plain)


@pair
def the_code_of_a_function_of_torch():
    if K:
        F.relu.__code__ = F.relu6.__code__
    training(lambda model, x: plain(model, 50.0 * x))


@pair
def a_default_of_a_function_of_torch():
    F.layer_norm.__defaults__ = (None, None, 1.0 + K)
    training(lambda model, x: plain(model, F.layer_norm(x, (4,))))


@pair
def a_function_of_numpy():
    if K:
        np.sqrt = np.cbrt
    training(lambda model, x: plain(model, x) * float(np.sqrt(8.0)))


@pair
def how_numpy_prints():
    np.set_printoptions(precision=1 + K)
    training(lambda model, x: plain(model, x) * float(str(ARRAY / 3.0)[1:5]))


@pair
def how_numpy_takes_errors():
    np.seterr(divide="ignore" if K else "raise")
    training(lambda model, x: plain(model, x) * (2.0 if np.geterr()["divide"] == "raise" else 1.0))


@pair
def threads_by_name():
    torch.set_num_threads(1 + K)
    training(lambda model, x: plain(model, x) * getattr(torch, "get_num_threads")())  # noqa: B009


def class_of(scale):
    class Made:
        pass

    Made.scale = scale
    return Made


@pair
def one_of_two_classes_of_one_name():
    made = [class_of(1.0), class_of(2.0)]
    taken = made[K]
    training(lambda model, x: plain(model, x) * len(made) * taken.scale)


@pair
def an_object_of_one_of_two_classes():
    made = [class_of(1.0), class_of(2.0)]
    taken = made[K]()
    training(lambda model, x: plain(model, x) * len(made) * taken.scale)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad * SCALE


@pair
def what_a_backward_reads():
    globals()["SCALE"] = 1.0 + K
    training(lambda model, x: Scaled.apply(model(x)).square().mean())


# -- modules, tensors and hooks --------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, power=1.0, deep=False):
        super().__init__()
        self.inner, self.power, self.deep = net(), power, deep

    def forward(self, x):
        x = self.inner(x) * self.power
        return x.relu() if self.deep else x


@pair
def a_number_of_a_module():
    training(plain, Net(power=1.0 + K))


@pair
def a_flag_of_a_module():
    training(plain, Net(deep=bool(K)))


@pair
def a_forward_of_one_module():
    model = net()
    if K:
        model[1].forward = lambda x: x.abs()
    training(plain, model)


@pair
def a_hook_of_a_module():
    model = net()
    if K:
        model[1].register_forward_hook(lambda module, given, out: out * 2.0)
    training(plain, model)


@pair
def what_a_hook_reads():
    scale = 1.0 + K
    model = net()
    model[1].register_forward_hook(lambda module, given, out: out * scale)
    training(plain, model)


@pair
def a_hook_of_a_parameter():
    model = net()
    if K:
        model[0].weight.register_hook(lambda grad: grad * 2.0)
    training(plain, model)


@pair
def a_hook_of_all_modules():
    if K:
        nn.modules.module.register_module_forward_hook(lambda module, given, out: out * 1.5)
    training(plain)


@pair
def a_hook_of_an_optimizer():
    def optimizer(model):
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        if K:
            made.register_step_pre_hook(lambda opt, args, kwargs: None)
        return made

    training(plain, optimizer=optimizer)


@pair
def a_layer_in_place_of_another():
    model = net()
    if K:
        model[1] = nn.Tanh()
    training(plain, model)


@pair
def an_attribute_of_a_layer_of_torch():
    training(plain, nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.1 * (1 + K)), nn.Linear(8, 4)))


@pair
def an_eps_that_was_set_later():
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    model[1].eps = 0.1 * (1 + K)
    training(plain, model)


@pair
def a_training_flag():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    model[1].train(not K)
    training(plain, model)


@pair
def a_frozen_parameter():
    model = net()
    model[0].weight.requires_grad_(not K)
    training(plain, model)


@pair
def a_tied_parameter():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    if K:
        model[2].weight = model[0].weight
    training(plain, model)


@pair
def a_dtype():
    model = net().to(torch.float64 if K else torch.float32)
    training(lambda model, x: plain(model, x.to(model[0].weight.dtype)), model)


@pair
def a_width():
    training(plain, nn.Sequential(nn.Linear(4, 8 + K), nn.ReLU(), nn.Linear(8 + K, 4)))


@pair
def a_batch():
    training(plain, inputs=(X[: 8 - 4 * K],))


@pair
def the_values_of_a_batch():
    training(plain, inputs=(X + K,))


@pair
def the_value_of_a_buffer():
    training_with = net()
    training_with.register_buffer("scale", torch.tensor(1.0 + K))
    training(lambda model, x: plain(model, x) * model.scale, training_with)


@pair
def a_branch_on_a_buffer():
    model = net()
    model.register_buffer("flag", torch.tensor(bool(K)))
    training(lambda model, x: plain(model, x) * (2.0 if model.flag else 1.0), model)


@pair
def a_tensor_made_of_a_list():
    LISTED[:] = [1.0, 2.0 + K]
    training(lambda model, x: plain(model, x) * torch.tensor(LISTED).sum())


# -- optimizers and torch's settings -----------------------------------------------------------------


@pair
def an_option_of_an_optimizer():
    training(plain, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=bool(K)))


@pair
def a_decay():
    training(plain, optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5 * K))


@pair
def groups_of_an_optimizer():
    def optimizer(model):
        first, *rest = model.parameters()
        groups = [{"params": [first], "lr": 0.3}, {"params": rest}]
        return torch.optim.SGD(groups if K else [{"params": [first, *rest]}], lr=0.1)

    training(plain, optimizer=optimizer)


@pair
def a_kind_of_optimizer():
    kind = torch.optim.RMSprop if K else torch.optim.Adagrad
    training(plain, optimizer=lambda model: kind(model.parameters(), lr=0.1))


@pair
def autocast_around_the_step():
    context = torch.autocast("cpu", dtype=torch.bfloat16) if K else contextlib.nullcontext()

    def loss(model, x):
        with context:
            return plain(model, x).float()

    training(loss)


@pair
def the_dtype_of_autocast():
    context = torch.autocast("cpu", dtype=torch.float16 if K else torch.bfloat16)

    def loss(model, x):
        with context:
            return plain(model, x).float()

    training(loss)


@pair
def a_step_that_torch_wraps():
    training(torch.autocast("cpu", dtype=torch.float16 if K else torch.bfloat16)(plain))


@pair
def a_job_that_torch_wraps():
    model = net()

    def step(x):
        loss = plain(model, x).float()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        return loss

    wrapped = torch.autocast("cpu", dtype=torch.float16 if K else torch.bfloat16)(step)
    job = flow.global_function(wrapped)
    show([job(X) for _ in range(2)], model)


class Cast(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()

    @torch.autocast("cpu", dtype=torch.float16 if K else torch.bfloat16)
    def forward(self, x):
        return self.inner(x)


@pair
def a_forward_that_torch_wraps():
    training(lambda model, x: plain(model, x).float(), Cast())


@pair
def a_method_as_a_job():
    class Trainer:
        def __init__(self):
            self.model, self.scale, self.loader = net(), 1.0 + K, torch.utils.data.DataLoader([1, 2])

        def step(self, x):
            loss = plain(self.model, x) * self.scale
            loss.backward()
            return loss

    trainer = Trainer()
    job = flow.global_function(trainer.step)
    show([job(X) for _ in range(2)], trainer.model)


@pair
def a_number_as_an_argument():
    model = net()
    job = flow.global_function(type="predict")(lambda x, scale: plain(model, x) * scale)
    show([job(X, 1.0 + K), job(X, 3.0 + K)], model)


@pair
def a_flag_as_an_argument():
    model = net()
    job = flow.global_function(type="predict")(lambda x, twice: plain(model, x) * (2.0 if twice else 1.0))
    show([job(X, bool(K)), job(X, not K)], model)


@pair
def a_number_that_is_compared():
    model = net()
    job = flow.global_function(type="predict")(lambda x, n: plain(model, x) * (2.0 if n > 3 else 1.0) * n)
    show([job(X, 3 + K), job(X, 2)], model)


@pair
def an_object_as_an_argument():
    model = net()
    job = flow.global_function(type="predict")(lambda x, options: plain(model, x) * options.scale)
    show([job(X, Options(scale=1.0 + K))], model)


@pair
def a_schedule_in_the_step():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5 if K else 0.9)

    @flow.global_function
    def step(x):
        loss = plain(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return loss

    show([step(X) for _ in range(5)], model)
    print(optimizer.param_groups[0]["lr"])


@pair
def a_gradient_that_stands():
    model = net()
    if K:
        plain(model, X).backward()
    training(plain, model)


@pair
def an_optimizer_that_has_stepped():
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if K:
        plain(model, X).backward()
        optimizer.step()
        optimizer.zero_grad()
    training(plain, model, lambda _: optimizer)


@pair
def a_kernel_of_the_script():
    if K:
        library = torch.library.Library("aten", "IMPL")
        library.impl("gelu", lambda x, approximate="none": x * 2.0, "CompositeImplicitAutograd")
        globals()["LIBRARY"] = library
    training(lambda model, x: F.gelu(model(x)).square().mean())


def milestones(second=3, prepare=None):
    """Train with momentum, which an optimizer has after its first step, and two milestones of its learning rate."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, second])
    has_hook = prepare is not None
    if has_hook:
        prepare(optimizer)

    @flow.global_function
    def step(x):
        loss = plain(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return loss * (optimizer.state_dict()["param_groups"][0]["scale"] if has_hook else 1.0)

    show([step(X) for _ in range(5)], model)


@pair
def a_milestone_of_a_schedule():
    milestones(3 + K)


@pair
def a_hook_of_a_state_dictionary():
    def scaled(_, state):
        state["param_groups"][0]["scale"] = 1.0 + K
        return state

    milestones(prepare=lambda optimizer: optimizer.register_state_dict_post_hook(scaled))


@pair
def it_formats():
    class Shown:
        def __str__(self):
            return "2" if K else "1"

    shown = Shown()
    training(lambda model, x: plain(model, x) * float(f"{shown}"))


@pair
def it_reads_random_numbers_outside():
    scale = float(np.random.default_rng(K).random())
    training(lambda model, x: plain(model, x) * scale)


@pair
def a_default_dtype():
    torch.set_default_dtype(torch.float64 if K else torch.float32)
    model = net().float()
    training(lambda model, x: plain(model, x) + torch.zeros(()).sum(), model)


@pair
def a_flag_of_einsum():
    torch.backends.opt_einsum.enabled = not K
    weight = [torch.randn(4, 6), torch.randn(6, 4)]
    training(lambda model, x: torch.einsum("bi,ij,jk->bk", model(x), *weight).square().mean())


@pair
def a_flag_of_attention():
    torch.backends.cuda.enable_flash_sdp(not K)
    training(lambda model, x: F.scaled_dot_product_attention(*[model(x)[None, None]] * 3).square().mean())


@pair
def strict_algorithms():
    torch.use_deterministic_algorithms(bool(K))
    training(plain)


@pair
def threads_of_torch():
    torch.set_num_threads(1 + K)
    training(plain)


# -- the job ---------------------------------------------------------------------------------------


@pair
def micro_batches():
    training(plain, micro_batches=1 + K)


@pair
def a_hint():
    model = net()
    if K:
        flow.distribute(model, {r"0\.weight": flow.sbp.split(0)})
    training(plain, model)


@pair
def a_job_that_predicts():
    model = net()
    job = flow.global_function(type="predict")(lambda x: plain(model, x) * (1.0 + K))
    show([job(X) for _ in range(2)], model)


# -- what a capture shows, counts and refuses --------------------------------------------------------


@pair
def it_prints():
    def loss(model, x):
        print("here", K)
        return plain(model, x)

    training(loss)


@pair
def it_warns():
    def loss(model, x):
        warnings.warn(f"careful {K}", stacklevel=1)
        return plain(model, x)

    training(loss)


@pair
def torch_warns():
    training(lambda model, x: F.mse_loss(model(x), torch.zeros(4 if K else 1)))


@pair
def it_uses_an_op_of_the_script():
    model, scale = net(), 1.0 + K

    @torch.library.custom_op("pairs::scaled", mutates_args=())
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * scale

    scaled.register_fake(torch.empty_like)
    job = flow.global_function(type="predict")(lambda x: scaled(model(x)).sum())
    show([job(X) for _ in range(2)], model)


@pair
def it_writes_through_a_function_it_was_given():
    write = sys.stdout.write

    def loss(model, x):
        write("written\n")
        return plain(model, x)

    training(loss)


@pair
def it_counts():
    holder = types.SimpleNamespace(count=K)

    def loss(model, x):
        holder.count += 1
        return plain(model, x) * holder.count

    training(loss)
    print(holder.count)


@pair
def it_keeps_a_loss():
    holder = types.SimpleNamespace(last=None)

    def loss(model, x):
        found = plain(model, x) * (1.0 + K)
        holder.last = found.detach()
        return found

    training(loss)
    print(float(holder.last))


@pair
def it_sets_a_flag():
    holder = types.SimpleNamespace(seen=bool(K))

    def loss(model, x):
        holder.seen = True
        return plain(model, x)

    training(loss)
    print(holder.seen)


@pair
def it_raises():
    def loss(model, x):
        if K:
            raise ValueError("no")
        return plain(model, x)

    training(loss)


@pair
def it_checks_values():
    def loss(model, x):
        found = plain(model, x)
        if found > 1e9 * (1 - K) - 1.0:
            raise ValueError(f"too much {K}")
        return found

    training(loss)


@pair
def it_caches():
    @functools.cache
    def scale(_):
        return 1.0 + K

    scale(0)
    training(lambda model, x: plain(model, x) * scale(0))


@pair
def it_draws():
    training(lambda model, x: F.dropout(model(x), 0.1 * (1 + K)).square().mean())


@pair
def it_asks_for_an_identity():
    training(lambda model, x: plain(model, x) * (1.0 if id(X) else 2.0) * (1.0 + K * 0.5))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    name = sys.argv[1]
    try:
        PAIRS[name]()
    except Exception as error:
        print(type(error).__name__, error)
    print("captures", captures, file=sys.stderr)
