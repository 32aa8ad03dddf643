"""What a step reads of libraries, of the environment and of classes is what the script has there at each call."""

from __future__ import annotations

import colorsys
import datetime
import functools
import importlib
import io
import itertools
import operator
import os
import pickle
import random
import re
import secrets
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime as DateTime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import actorflow as flow
import trained
from actorflow.script_state.bytecode import CodeNames, code_names
from actorflow.script_state.user_code import is_installed, is_user_file
from actorflow_compiler.core.errors import CaptureError
from test_runs import actorflow

NOW, SYSTEM, NUMBERS = DateTime.now, random.SystemRandom(), itertools.count(1)


@flow.global_function
def reading(x: Tensor) -> Tensor:
    factor = float(os.environ.get("ACTORFLOW_TEST_FACTOR", "1")) * float(os.getenv("ACTORFLOW_TEST_OTHER", "1"))
    if getattr_free_flag():
        factor += 100
    if torch.get_float32_matmul_precision() == "high":
        factor += 1000
    return (x * factor * colorsys.ONE_THIRD).sum()


def getattr_free_flag() -> bool:
    return F.flag_of_a_test  # type: ignore[attr-defined, no-any-return]


def test_the_environment_and_flags_of_libraries_are_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "flag_of_a_test", False, raising=False)
    x = torch.ones(3)

    def check(wanted: float, plans: int) -> None:
        for _ in range(2):
            assert float(reading(x).detach()) == pytest.approx(wanted)
        assert len(reading.plans) == plans

    check(1, 1)
    monkeypatch.setenv("ACTORFLOW_TEST_FACTOR", "2")  # which was not there before
    check(2, 2)
    monkeypatch.setenv("ACTORFLOW_TEST_OTHER", "3")
    check(6, 3)
    monkeypatch.setenv("ACTORFLOW_TEST_UNREAD", "3")
    check(6, 3)
    monkeypatch.setattr(F, "flag_of_a_test", True)
    check(106, 4)
    monkeypatch.setattr(colorsys, "ONE_THIRD", 2 / 3)
    check(212, 5)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        check(2212, 6)
    finally:
        torch.set_float32_matmul_precision(before)
    monkeypatch.delenv("ACTORFLOW_TEST_OTHER")
    check((2 + 100) * 2, 7)


class Tables:
    """Tensors of a class: one that is read, one that is replaced, and one that is changed in place."""

    table = torch.full((3,), 2.0, dtype=torch.float64)
    running = torch.zeros(3, dtype=torch.float64)
    calls = torch.zeros((), dtype=torch.float64)

    def of(self, x: Tensor) -> Tensor:
        return x * self.table


def test_tensors_of_classes_are_state_as_any_other() -> None:
    tables, x = Tables(), torch.ones(2, 3, dtype=torch.float64)

    @flow.global_function
    def step(x: Tensor) -> Tensor:
        Tables.calls += 1
        Tables.running = 0.5 * Tables.running + x.sum(0)
        return tables.of(x).sum()

    running = torch.zeros(3, dtype=torch.float64)
    for number in range(1, 6):
        if number == 4:
            Tables.table = torch.full((3,), 5.0, dtype=torch.float64)
        found = float(step(x * number).detach())
        running = 0.5 * running + number * 2
        assert found == number * 6 * (5 if number >= 4 else 2)
        assert float(Tables.calls.detach()) == number
        torch.testing.assert_close(Tables.running.detach(), running)
    assert len(step.plans) == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_in_a_step_is_refused_in_plain_words(workers: int) -> None:
    loader: Any = DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=2, num_workers=workers)

    @flow.global_function
    def step() -> Tensor:
        return torch.stack([x.sum() for (x,) in loader]).sum()

    with pytest.raises(CaptureError, match=r"_read\.py:\d+: the step takes batches from a DataLoader.*pass each batch"):
        step()


def test_the_gradient_that_a_computed_tensor_has_not_is_told_with_the_users_line() -> None:
    layer = nn.Linear(3, 3)

    @flow.global_function
    def step(x: Tensor) -> Tensor:
        h = layer(x)
        h.sum().backward()
        assert h.grad is None
        return h.sum().detach()

    with pytest.warns(UserWarning, match=r"retain_grad\(\) before backward") as told:
        step(torch.ones(2, 3))
    assert [Path(one.filename).name for one in told if "grad" in str(one.message)] == ["test_what_is_read.py"]


GRADIENTS = """
import torch
import actorflow as flow

torch.manual_seed(0)
layer = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
{made}

@flow.global_function
def step(x):
    loss = layer(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

step(torch.ones(2, 3))
print("weight", layer.weight.detach().sum().item())
"""


@pytest.mark.parametrize(
    ("made", "status", "said"),
    [
        ("layer(torch.ones(2, 3) * (flow.env.rank() + 1)).sum().backward()", 0, r"layer\.weight\.grad .* on rank 1"),
        ("if flow.env.rank(): layer(torch.ones(2, 3)).sum().backward()", 1, r"rank 1 has gradient layer\.weight\.grad"),
    ],
)
def test_gradients_of_the_script_that_differ_between_ranks_are_named(
    tmp_path: Path, made: str, status: int, said: str
) -> None:
    (tmp_path / "train.py").write_text(GRADIENTS.format(made=made))
    run = actorflow("run", str(tmp_path / "train.py"), "--devices", "2")
    assert run.returncode == status, run.stdout + run.stderr
    assert re.search(said, run.stdout + run.stderr)


@pytest.mark.parametrize(("folder", "own"), [("site-packages", False), ("dist-packages", False), ("packages", True)])
def test_libraries_of_a_folder_that_only_pythonpath_names_are_not_the_scripts_own_code(
    tmp_path: Path, folder: str, own: bool
) -> None:
    assert is_user_file(str(tmp_path / folder / "numpy" / "__init__.py")) is own


class Point:
    """An object that code reads in many ways."""

    __match_args__ = ("scale", "mode")

    def __init__(self) -> None:
        self.scale, self.mode, self.unread = 1.0, "one", 0


points = {"first": Point()}
found = getattr


def point(name: str) -> Point:
    return points[name]


def by_keyword_pattern(x: Tensor) -> Tensor:
    match points["first"]:
        case Point(scale=2.0, mode="one"):
            return x * 2
    return x


def by_pattern_of_positions(x: Tensor) -> Tensor:
    match points["first"]:
        case Point(2.0):
            return x * 2
    return x


def by_pattern_of_numbers(x: Tensor) -> Tensor:
    match len(points):
        case int(count):
            return x * count
    return x


def by_name_of_a_result(x: Tensor) -> Any:
    return x * getattr(point("first"), "scale", [1.0][0])


def by_two_names(x: Tensor) -> Any:
    return x * operator.attrgetter("scale", "mode.size")(point("first"))[0]


def by_name_in_a_key(x: Tensor) -> Any:
    return x * max(points.values(), key=operator.attrgetter("scale")).scale


def by_method_name(x: Tensor) -> Any:
    return x * operator.methodcaller("scale")(point("first"))


def by_another_name(x: Tensor) -> Any:
    return x * found(point("first"), "scale")


def by_format(x: Tensor) -> Any:
    return x * len("{0.mode}{1:{0.scale}}".format(point("first"), 1.0))


def by_the_method_of_object(x: Tensor) -> Any:
    return x * object.__getattribute__(point("first"), "scale")


def by_a_name_in_a_variable(x: Tensor, name: str) -> Any:
    return x * getattr(point("first"), name)


def by_a_made_name(x: Tensor) -> Any:
    return x * getattr(point("first"), f"sc{len(points)}le")


def by_an_argument(x: Tensor) -> Any:
    return [*map(getattr, [point("first")], ["scale"])]


def by_a_branch(x: Tensor) -> Any:
    return x * getattr(point("first"), "scale" if len(points) else "mode")


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (by_keyword_pattern, {"scale", "mode"}), (by_pattern_of_positions, {"scale", "__match_args__"}),
        (by_pattern_of_numbers, set()), (by_name_of_a_result, {"scale"}), (by_two_names, {"scale", "mode", "size"}),
        (by_name_in_a_key, {"scale"}), (by_method_name, {"scale"}), (by_another_name, {"scale"}),
        (by_format, {"scale", "mode"}), (by_the_method_of_object, {"scale"}), (by_a_name_in_a_variable, None),
        (by_a_made_name, None), (by_an_argument, None), (by_a_branch, None),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_attributes_that_code_names_in_other_ways_are_found(function: Any, names: set[str] | None) -> None:
    read: CodeNames = code_names(function)
    assert read.any == (names is None)
    if names is not None:
        assert {*read.others} - {"values", "attrgetter", "methodcaller", "format", "__getattribute__"} == names


@pytest.mark.parametrize("function", [by_keyword_pattern, by_name_of_a_result, by_another_name])
def test_an_attribute_that_is_named_in_another_way_is_guarded(function: Any) -> None:
    held, x = points["first"], torch.ones(1)
    held.scale, held.unread = 1.0, 0

    @flow.global_function(type="predict")
    def step(x: Tensor) -> Any:
        return function(x).sum()

    assert float(step(x)) == 1
    held.unread = 1
    assert float(step(x)) == 1
    assert len(step.plans) == 1
    held.scale = 2.0
    assert float(step(x)) == 2


# -- what is called by another way than by its name --------------------------------------------------


SETTINGS = {"gain": 1.0, "printed": 1.0}


class Weighted:
    def __init__(self) -> None:
        self.weight, self.unread = 1.0, 0.0

    def weighted(self, x: Tensor) -> Tensor:
        return x * self.weight


class FirstWeighted(Weighted):
    pass


class SecondWeighted(Weighted):
    pass


class UnrelatedWeighted:
    def __init__(self) -> None:
        self.weight, self.unread = 1.0, 0.0


@pytest.mark.parametrize("bound", [True, False])
def test_a_function_of_several_classes_reads_the_attributes_of_each(bound: bool) -> None:
    first, second, third = FirstWeighted(), SecondWeighted(), UnrelatedWeighted()
    methods = [first.weighted, second.weighted]

    @flow.global_function(type="predict")
    def step(x: Tensor) -> Any:
        return sum(method(x) for method in methods) if bound else Weighted.weighted(third, x)  # type: ignore[arg-type]

    x = torch.ones(1)
    held: Any = second if bound else third
    before = float(step(x))
    held.unread = 1.0
    assert float(step(x)) == before
    assert len(step.plans) == 1
    held.weight = 10.0
    assert float(step(x)) == before + 9


class GainedConvolution(nn.Conv1d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv1d(input, weight * SETTINGS["gain"])

    def extra_repr(self) -> str:
        return f"{SETTINGS['printed']}{UNREAD_SETTINGS}"


UNREAD_SETTINGS = {"printed": 1.0}


class GainedFunction(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.gain = SETTINGS["gain"]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        made: Tensor = gradient * ctx.gain
        return made


def test_a_method_that_only_a_library_calls_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = GainedConvolution(1, 1, 1, bias=False)
    nn.init.ones_(layer.weight)

    @flow.global_function(type="predict")
    def step(x: Tensor) -> Any:
        return layer(x).sum()

    x = torch.ones(1, 1, 1)
    assert float(step(x)) == 1
    monkeypatch.setitem(UNREAD_SETTINGS, "printed", 2.0)
    assert float(step(x)) == 1
    assert len(step.plans) == 1
    monkeypatch.setitem(SETTINGS, "gain", 2.0)
    assert float(step(x)) == 2


def test_what_an_autograd_function_keeps_for_its_gradient_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(torch.ones(1))

    @flow.global_function
    def step(x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(GainedFunction.apply(weight * x).sum(), [weight])  # type: ignore[no-untyped-call]
        return gradient.sum()

    assert float(step(torch.ones(1))) == 1
    monkeypatch.setitem(SETTINGS, "gain", 2.0)
    assert float(step(torch.ones(1))) == 2


class Kinds:
    scale_of_one = 1.0

    def __init__(self) -> None:
        self.kind = "one"

    def loss_one(self, x: Tensor) -> Tensor:
        return x * SETTINGS["gain"]

    def shown(self) -> str:
        return str(UNREAD_SETTINGS)


@pytest.mark.parametrize("known", [True, False])
def test_what_a_name_that_is_made_may_stand_for_is_followed(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = Kinds()
    names = ["loss_one"]

    @flow.global_function(type="predict")
    def step(x: Tensor) -> Any:
        method = getattr(kinds, f"loss_{kinds.kind}") if known else getattr(kinds, names[0])
        return (method(x) * getattr(kinds, "scale_of_" + kinds.kind)).sum()

    x = torch.ones(1)
    assert float(step(x)) == 1
    assert len(step.plans) == 1
    monkeypatch.setitem(SETTINGS, "gain", 2.0)
    assert float(step(x)) == 2
    monkeypatch.setattr(Kinds, "scale_of_one", 3.0)
    assert float(step(x)) == 6


class NamedAsModules:
    def __init__(self) -> None:
        self._buffers, self._modules, self._flat_weights = 1.0, [1.0], 1.0


LIBRARY = """
import itertools
import torch
SETTINGS = {"scale": 1.0, "by": {"layer": [1.0]}}
class Config:
    scale = 1.0
class Options:
    def __init__(self):
        self.scale, self.weight = 1.0, torch.ones(1)
    def weighted(self, x):
        return x * self.weight
options = Options()
class Numbered:
    def __init__(self):
        self.calls = itertools.count()
    def scale(self):
        next(self.calls)
        return 1.0
numbered = Numbered()
def __getattr__(name):
    raise AttributeError(name) if name.startswith("_") or name == "LATER" else ImportError(name)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A library that somebody has installed."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "library_of_a_test.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(folder)
    is_installed.cache_clear()
    yield importlib.import_module("library_of_a_test")
    sys.modules.pop("library_of_a_test")


def check(read: Callable[[Tensor], Any], *changes: tuple[float, Callable[[], object]]) -> None:
    """A step that returns what is read of ones is run; after each change it returns another number."""
    step: Any = flow.global_function(type="predict")(lambda x: read(x).sum())
    x = torch.ones(1)
    assert [float(step(x)) for _ in range(2)] == [1, 1]
    for wanted, change in changes:
        change()
        assert [float(step(x)) for _ in range(2)] == [wanted, wanted]


def test_settings_of_an_installed_library_are_guarded(library: Any) -> None:
    made, options = library.SETTINGS, library.options
    check(
        lambda x: x * library.SETTINGS["scale"] * library.SETTINGS["by"]["layer"][0],
        (2, lambda: made.update(scale=2.0)),
        (6, lambda: made["by"]["layer"].__setitem__(0, 3.0)),
    )
    check(lambda x: x * library.Config.scale, (2, lambda: setattr(library.Config, "scale", 2.0)))
    check(lambda x: x * library.options.scale, (2, lambda: setattr(options, "scale", 2.0)))
    check(lambda x: x * getattr(library, "LATER", 1.0), (2, lambda: setattr(library, "LATER", 2.0)))
    check(lambda x: options.weighted(x), (2, lambda: options.weight.fill_(2.0)))


def test_objects_of_an_installed_library_may_hold_anything_that_the_step_does_not_read(library: Any) -> None:
    library.SETTINGS["itself"] = library.SETTINGS
    library.options.sparse, library.options.meta = torch.eye(2).to_sparse(), torch.ones(2, device="meta")
    library.options.quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    library.options.nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    check(
        lambda x: x * library.SETTINGS["scale"] * library.options.scale * library.numbered.scale(),
        (2, lambda: library.SETTINGS.update(scale=2.0)),
    )


def test_a_module_that_refuses_to_import_a_name_is_not_asked_for_it(library: Any) -> None:
    def read(x: Tensor) -> Any:
        try:
            from library_of_a_test import fast  # type: ignore[import-not-found]
        except ImportError:
            return x * library.SETTINGS["scale"]
        return fast(x)

    check(read, (2, lambda: library.SETTINGS.update(scale=2.0)))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package of the script's, whose module ``inner.reading`` imports others in its functions."""
    inner = tmp_path / "package_of_a_test" / "inner"
    inner.mkdir(parents=True)
    for name in ("above", "later", "beside"):
        (inner.parent / f"{name}.py").write_text("SCALE = 1.0\n")
    for folder in (inner, inner.parent):
        (folder / "__init__.py").touch()
    (inner / "reading.py").write_text(
        """
import importlib
def relative(x):
    from .. import beside
    from ..above import SCALE
    return x * SCALE * beside.SCALE
def first(x):
    from ..later import SCALE
    return x * SCALE
def named(x):
    return x * importlib.import_module("package_of_a_test.above").SCALE
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    is_user_file.cache_clear()
    for name in ("above", "beside"):
        importlib.import_module(f"package_of_a_test.{name}")
    yield importlib.import_module("package_of_a_test.inner.reading")
    for name in [one for one in sys.modules if one.startswith("package_of_a_test")]:
        del sys.modules[name]


def test_modules_that_a_function_imports_are_read(package: Any) -> None:
    def put(name: str, value: float) -> Callable[[], object]:
        return lambda: setattr(sys.modules[f"package_of_a_test.{name}"], "SCALE", value)

    check(package.relative, (2, put("above", 2.0)), (6, put("beside", 3.0)))
    put("above", 1.0)()
    check(package.named, (2, put("above", 2.0)))
    check(package.first, (2, put("later", 2.0)))  # the step is the first to import it


def from_environment(name: str) -> float:
    return float(os.environ.get(name, "1"))


class Environment:
    name = "ACTORFLOW_TEST_NAMED"

    def get(self) -> float:
        return float(ask(self.name, "1"))


NAME, ask = Environment.name, os.getenv


@pytest.mark.parametrize(
    "read",
    [
        lambda: from_environment("ACTORFLOW_TEST_NAMED"), lambda: float(os.environ.get(NAME, "1")), Environment().get,
        lambda: float(dict(os.environ.items()).get(NAME, "1")),
        lambda: float(os.environ[NAME]) if os.environ.__contains__(NAME) else 1,
        lambda: float(ask("ACTORFLOW_TEST_NAMED", "1")),
    ],
    ids=["helper", "global", "attribute", "all", "subscript", "alias"],
)  # fmt: skip
def test_environment_variables_whose_names_are_no_constants_are_guarded(
    read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(NAME, raising=False)
    check(
        lambda x: x * read(),
        (2, lambda: monkeypatch.setenv(NAME, "2")),
        (3, lambda: monkeypatch.setenv(NAME, "3")),
        (1, lambda: monkeypatch.delenv(NAME)),
    )


def test_environment_variables_that_libraries_set_for_themselves_need_no_other_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step: Any = flow.global_function(type="predict")(lambda x: x * float(os.environ.get(NAME, "1")))
    monkeypatch.delenv(NAME, raising=False)
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "GLOO_SOCKET_IFNAME", "GRPC_VERBOSITY"):
        monkeypatch.delenv(name, raising=False)
        assert float(step(torch.ones(1))) == 1
        monkeypatch.setenv(name, "other")
        assert float(step(torch.ones(1))) == 1
    assert len(step.plans) == 1
    monkeypatch.setenv(NAME, "2")
    assert float(step(torch.ones(1))) == 2


def in_environment(x: Tensor) -> Any:
    if "ACTORFLOW_TEST_FACTOR" in os.environ:
        return x * float(os.environ["ACTORFLOW_TEST_FACTOR"])
    os.environ["ACTORFLOW_TEST_SET"] = "1"
    return (
        x * float(os.getenv("ACTORFLOW_TEST_FACTOR", default="1")) * float(os.environ.get("ACTORFLOW_TEST_OTHER") or 1)
    )


def test_environment_variables_of_constant_names_are_guarded_alone() -> None:
    assert not code_names(in_environment).environment
    assert not code_names(reading.function).environment
    assert code_names(from_environment).environment


class Tag(str):
    def __new__(cls, text: str, scale: Any) -> Tag:
        made = str.__new__(cls, text)
        made.scale = scale  # type: ignore[attr-defined]
        return made


class Tagged:
    tag: Any = Tag("a", 1.0)


@pytest.mark.parametrize("kept", [2.0, "two"])
def test_texts_of_classes_of_the_script_are_equal_with_equal_attributes(kept: Any) -> None:
    held = Tagged()
    step: Any = flow.global_function(type="predict")(lambda x: (x * (held.tag.scale == kept)).sum())
    x = torch.ones(1)
    assert float(step(x)) == 0
    for _ in range(3):
        held.tag = Tag("a", kept)
        assert float(step(x)) == 1
    assert len(step.plans) == 2
    held.tag = Tag("a", 3)
    assert float(step(x)) == 0


class Shown:
    text = "{shown.scale}"

    def __init__(self) -> None:
        self.scale = self.unread = 1.0

    def shown(self) -> str:
        return self.text.format(shown=self)


def in_format(text: str, one: Shown) -> str:
    return text.format(one)


SHOWN, FORMAT = Shown(), "{0.scale}"


@pytest.mark.parametrize(
    "shown",
    [SHOWN.shown, lambda: FORMAT.format(SHOWN), lambda: in_format("{0.scale}", SHOWN)],
    ids=["attribute", "global", "passed on"],
)
def test_attributes_that_a_format_in_a_variable_names_are_guarded(shown: Any) -> None:
    SHOWN.scale = 1.0
    check(
        lambda x: x * float(shown()),
        (1, lambda: setattr(SHOWN, "unread", 2.0)),
        (2, lambda: setattr(SHOWN, "scale", 2.0)),
    )


def test_what_torch_or_numpy_loads_of_a_file_is_loaded_outside(tmp_path: Path) -> None:
    torch.save(torch.ones(1), tmp_path / "one.pt")
    np.save(tmp_path / "one.npy", np.ones(1))
    (tmp_path / "one.txt").write_text("1")
    buffer = io.BytesIO()
    np.save(buffer, np.ones(1))
    for read in (
        lambda x: x * torch.load(tmp_path / "one.pt"), lambda x: x * torch.from_file(str(tmp_path / "one.pt"), size=1),
        lambda x: x * np.load(tmp_path / "one.npy").item(), lambda x: x * np.loadtxt(str(tmp_path / "one.txt")).item(),
    ):  # fmt: skip
        with pytest.raises(CaptureError, match=r"the step looks at a file.*load it outside"):
            check(read)

    def from_memory(x: Tensor) -> Any:
        buffer.seek(0)
        return x * np.load(buffer).item()

    check(from_memory)


class Later:
    pass


class LaterModule(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x * getattr(self, "gain_of_a_test", 1.0)


class Doubling(LaterModule):
    def forward(self, x: Tensor) -> Any:
        return x * 2


def test_what_classes_and_modules_of_the_script_get_later_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    later, module = Later(), LaterModule()
    check(
        lambda x: x * getattr(later, "extra_of_a_test", 1.0),
        (2, lambda: monkeypatch.setattr(Later, "extra_of_a_test", 2.0, raising=False)),
    )
    check(lambda x: module(x), (2, lambda: monkeypatch.setattr(LaterModule, "gain_of_a_test", 2.0, raising=False)))
    check(
        lambda x: x * getattr(trained, "FACTOR_OF_A_TEST", 1.0),
        (2, lambda: monkeypatch.setattr(trained, "FACTOR_OF_A_TEST", 2.0, raising=False)),
    )


class Swapping(Later):
    unused = 1.0


def test_a_name_that_takes_the_place_of_another_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    swapping = Swapping()
    monkeypatch.setattr(Later, "swapped_of_a_test", 1.0, raising=False)
    monkeypatch.setattr(trained, "unused_of_a_test", 1.0, raising=False)

    def swap(holder: Any, was: str, name: str) -> None:
        monkeypatch.delattr(holder, was)
        monkeypatch.setattr(holder, name, 2.0, raising=False)

    check(
        lambda x: x * swapping.swapped_of_a_test,  # type: ignore[attr-defined]
        (2, lambda: swap(Swapping, "unused", "swapped_of_a_test")),
    )
    check(
        lambda x: x * getattr(trained, "SWAPPED_OF_A_TEST", 1.0),
        (2, lambda: swap(trained, "unused_of_a_test", "SWAPPED_OF_A_TEST")),
    )


class Backend:
    def __init__(self) -> None:
        self.scale = 1.0


BACKEND, USE_NUMPY = Backend(), False


def in_one_branch(x: Tensor) -> Any:
    if USE_NUMPY:
        import numpy as xp
    else:
        xp: Any = BACKEND  # type: ignore[no-redef]
    return x * xp.scale  # type: ignore[attr-defined]


def later_in_the_body(x: Tensor) -> Any:
    import math as m

    whole = m.pi * 0
    m: Any = BACKEND  # type: ignore[no-redef]
    return x * (m.scale + whole)  # type: ignore[attr-defined]


def of_a_parameter(x: Tensor, xp: Any = BACKEND) -> Any:
    if USE_NUMPY:
        import numpy as xp
    return x * xp.scale


def of_a_loop(x: Tensor) -> Any:
    import math as m

    for m in [BACKEND]:  # type: ignore[assignment]  # noqa: F402
        whole = m.scale  # type: ignore[attr-defined]
    return x * whole


def of_a_function_inside(x: Tensor) -> Any:
    import math as m

    def take() -> None:
        nonlocal m
        m = BACKEND  # type: ignore[assignment]

    take()
    return (lambda: x * m.scale)()  # type: ignore[attr-defined]


@pytest.mark.parametrize("read", [in_one_branch, later_in_the_body, of_a_parameter, of_a_loop, of_a_function_inside])
def test_a_variable_that_stands_for_a_module_may_stand_for_something_else(
    read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(read, (2, lambda: monkeypatch.setattr(BACKEND, "scale", 2.0)))


def test_a_module_that_becomes_another_class_runs_that_ones_code() -> None:
    model, activation = nn.Sequential(LaterModule()), nn.ReLU()
    check(lambda x: model(x), (2, lambda: setattr(model[0], "__class__", Doubling)))
    check(lambda x: activation(x), (0.5, lambda: setattr(activation, "__class__", nn.Softsign)))


def test_attributes_of_a_job_are_those_of_its_function() -> None:
    @flow.global_function(type="predict")
    def step(x: Tensor) -> Any:
        step.calls += 1  # type: ignore[attr-defined]
        return (x * step.scale).sum()  # type: ignore[attr-defined]

    step.scale, step.calls = 1.0, 0  # type: ignore[attr-defined]
    for calls, scale in enumerate([1.0, 1.0, 2.0, 2.0, 1.0], 1):
        step.scale = scale  # type: ignore[attr-defined]
        assert (float(step(torch.ones(1))), step.calls) == (scale, calls)  # type: ignore[attr-defined]
    assert len(step.plans) == 2
    assert step.name == "step"
    del step.scale  # type: ignore[attr-defined]
    assert not hasattr(step, "scale")


def test_attributes_of_partials_and_of_functions_that_a_library_wraps_are_guarded() -> None:
    @torch.no_grad()
    def wrapped(x: Tensor) -> Any:
        return x * wrapped.scale

    part: Any = functools.partial(torch.mul, 1.0)
    wrapped.scale = part.scale = 1.0
    check(lambda x: wrapped(x), (2, lambda: setattr(wrapped, "scale", 2.0)))
    check(lambda x: part(x) * part.scale, (2, lambda: setattr(part, "scale", 2.0)))


def test_attributes_of_plain_objects_may_have_the_names_of_modules() -> None:
    held = NamedAsModules()

    @flow.global_function(type="predict")
    def step(x: Tensor) -> Any:
        return (x * held._buffers * held._modules[0] * held._flat_weights).sum()

    x = torch.ones(1)
    for wanted, name, value in ((1, "_buffers", 2.0), (2, "_modules", [3.0]), (6, "_flat_weights", 5.0), (30, "", 0)):
        assert float(step(x)) == wanted
        setattr(held, name or "unread", value)


@pytest.mark.parametrize(
    "fresh",
    [
        lambda: np.random.default_rng().random(), lambda: random.Random().random(), lambda: uuid.uuid4().int,
        lambda: secrets.randbelow(9), lambda: time.clock_gettime(time.CLOCK_MONOTONIC), time.thread_time,
        lambda: datetime.datetime.now().microsecond, lambda: NOW().microsecond, lambda: datetime.date.today().year,
        lambda: DateTime.now().second, lambda: time.localtime().tm_sec, lambda: int(time.strftime("%S")),
        lambda: os.times().elapsed, SYSTEM.random,
    ],
    ids=[
        "default_rng", "Random", "uuid4", "randbelow", "clock_gettime", "thread_time", "now", "bound now", "today",
        "DateTime", "localtime", "strftime", "times", "SystemRandom",
    ],
)  # fmt: skip
def test_a_value_that_differs_each_time_is_refused(fresh: Any) -> None:
    @flow.global_function(type="predict")
    def step(x: Tensor) -> Any:
        return x * fresh()

    with pytest.raises(CaptureError, match=r"the step asks (the system for random numbers|for the time), which it"):
        step(torch.ones(1))


def test_dates_that_a_step_is_given_or_makes_are_what_they_are() -> None:
    begun = datetime.datetime(2020, 1, 1)

    @flow.global_function(type="predict")
    def step(x: Tensor) -> Any:
        made = datetime.datetime(2020, 1, 2)
        kinds = isinstance(made, DateTime) and type(made) == datetime.datetime and issubclass(DateTime, datetime.date)  # noqa: E721
        if x is None:
            datetime.datetime.now()
        year = time.gmtime(0).tm_year + int(time.strftime("%Y", time.gmtime(0)))
        return x * (made - begun).days * kinds * DateTime.fromisoformat("2020-01-03").day * year

    assert float(step(torch.ones(1))) == 3 * 2 * 1970
    assert datetime.datetime is DateTime


def test_the_classes_of_dates_are_themselves_in_a_step_that_may_ask_for_the_time() -> None:
    begun = datetime.datetime(2020, 1, 1)

    @flow.global_function(type="predict")
    def step(x: Tensor, kind: Any) -> Any:
        if x is None:
            DateTime.now()

        class Day(datetime.date):
            def next(self) -> int:
                return self.day + 1

        kept = pickle.loads(pickle.dumps(begun))
        return x * (type(begun) is DateTime is datetime.datetime is kind) * Day(2020, 1, 1).next() * (kept == begun)

    assert float(step(torch.ones(1), DateTime)) == 2
    assert sys.getprofile() is None


class Clock:
    at = time.gmtime

    def year(self) -> int:
        return self.at(0).tm_year


class HoldingPairs:
    def __init__(self) -> None:
        self.pair = self.same = time.time, 1.0
        self.partial: Any = functools.partial(max, iter([1.0]))
        self.partial.scale = 3.0


def test_what_may_be_refused_is_otherwise_what_it_is() -> None:
    clock, holding = Clock(), HoldingPairs()

    @flow.global_function(type="predict")
    def step(x: Tensor, asked: Any) -> Any:
        if x is None:
            holding.partial()
        same = holding.pair is holding.same and holding.pair[0] is time.time and asked is time.strftime
        return x * same * holding.partial.scale * clock.year()

    assert float(step(torch.ones(1), time.strftime)) == 3 * 1970
    assert vars(Clock)["at"] is time.gmtime


class Held(NamedTuple):
    numbers: Iterator[int]
    scale: float


def counting(*, numbers: Iterator[int] = NUMBERS) -> int:
    return next(numbers)


def counting_by_default(numbers: Iterator[int] = NUMBERS) -> int:
    return next(numbers)


def numbered() -> Iterator[int]:
    yield from itertools.count(1)


DATA = np.random.PCG64(3)
HELD = Held(itertools.count(1), 3.0)
IN_TUPLE = 3.0, itertools.count(1)
NEXT, SEND, OF_PARTIAL = itertools.count(1).__next__, numbered(), functools.partial(next, itertools.count(1))


@pytest.mark.parametrize(
    "draw",
    [
        counting, counting_by_default, lambda: next(HELD.numbers), lambda: next(IN_TUPLE[1]), lambda: NEXT(),
        lambda: SEND.send(None), lambda: OF_PARTIAL(),
    ],
    ids=["keyword", "default", "named tuple", "tuple", "__next__", "send", "partial"],
)  # fmt: skip
def test_the_next_item_is_taken_outside_wherever_the_iterator_is_held(draw: Any) -> None:
    @flow.global_function(type="predict")
    def step(x: Tensor) -> Any:
        return x * draw() * HELD.scale

    with pytest.raises(CaptureError, match=r"the step takes the next item of \w+( \(a default of \w+\)|\[\d\])?, wh"):
        step(torch.ones(1))
    assert type(HELD.numbers) is type(IN_TUPLE[1]) is itertools.count


def test_the_next_item_of_an_argument_is_taken_outside() -> None:
    @flow.global_function(type="predict")
    def step(x: Tensor, numbers: Iterator[int], scale: float, name: str) -> Any:
        return x * next(numbers) * scale * len(name)

    with pytest.raises(CaptureError, match="the step takes the next item of numbers, which"):
        step(torch.ones(1), itertools.count(1), 2.0, "a")


def test_a_tuple_with_an_iterator_may_be_read() -> None:
    @flow.global_function(type="predict")
    def step(x: Tensor) -> Any:
        return x * HELD.scale * IN_TUPLE[0]

    assert [float(step(torch.ones(1))) for _ in range(2)] == [9, 9]


def test_a_source_of_bits_draws_outside() -> None:
    @flow.global_function(type="predict")
    def step(x: Tensor) -> Any:
        return x * (DATA.random_raw() % 1000)

    before = str(DATA.state)
    with pytest.raises(CaptureError, match="draws random numbers of Python or NumPy"):
        step(torch.ones(1))
    assert str(DATA.state) == before


def test_random_numbers_of_a_seed_and_those_that_libraries_ask_for_are_none_that_differ() -> None:
    @flow.global_function(type="predict")
    def step(x: Tensor) -> Any:
        next(tempfile._get_candidate_names())  # type: ignore[attr-defined]
        return x * random.Random(3).random() * np.random.default_rng(3).random()

    wanted = random.Random(3).random() * np.random.default_rng(3).random()
    assert float(step(torch.ones(1))) == pytest.approx(wanted)
