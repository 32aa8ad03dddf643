"""What a step reads by rarer ways of Python and torch is guarded, as the script has it at each call, or refused."""

from __future__ import annotations

import collections
import copy
import ctypes
import dataclasses
import decimal
import enum
import inspect
import io
import logging
import math
import multiprocessing
import os
import queue
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.preprocessing import StandardScaler  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import actorflow as flow

Case = Callable[[], tuple[Callable[[Tensor], Any], Callable[[], object]]]  # what reads, and what changes what it reads


@pytest.fixture(autouse=True)
def context() -> Iterator[None]:
    with decimal.localcontext():
        yield


class Thing:
    def __init__(self, by: float) -> None:
        self.by = by


class Rate(float):
    more: float


class Pair(tuple[float, ...]):
    more: float


class Scaled(tuple[float, ...]):
    more = 2.0


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Settings:
    by: float = 2.0
    table: dict[str, float] = dataclasses.field(default_factory=lambda: {"x": 2.0})


def user_lists() -> Any:
    kept = collections.UserList([2.0])
    return lambda x: x * kept[0], lambda: kept.__setitem__(0, 3.0)


def user_texts() -> Any:
    kept = collections.UserString("ab")
    return lambda x: x * len(kept), lambda: setattr(kept, "data", "abc")


def arrays_of_objects() -> Any:
    kept = np.array([2.0, None], dtype=object)
    return lambda x: x * kept[0], lambda: kept.__setitem__(0, 3.0)


def objects_in_sets() -> Any:
    kept = {Thing(2.0)}
    return lambda x: x * sum(t.by for t in kept), lambda: setattr(next(iter(kept)), "by", 3.0)


def objects_in_weak_sets() -> Any:
    thing = Thing(2.0)
    kept = weakref.WeakSet([thing])
    return lambda x: x * sum(t.by for t in kept), lambda: setattr(thing, "by", 3.0)


def levels_of_loggers() -> Any:
    log = logging.getLogger("test_rarer_state.inner")
    outer = logging.getLogger("test_rarer_state")
    outer.setLevel(logging.WARNING)
    return lambda x: x * (2 if log.isEnabledFor(logging.DEBUG) else 1), lambda: outer.setLevel(logging.DEBUG)


def contexts_of_decimal_numbers() -> Any:
    def change() -> None:
        decimal.getcontext().prec = 2

    decimal.getcontext().prec = 28
    return lambda x: x * float(decimal.Decimal(1) / decimal.Decimal(3)), change


def proxies() -> Any:
    thing = Thing(2.0)
    kept = [weakref.proxy(thing)]
    return lambda x: x * kept[0].by, lambda: setattr(thing, "by", 3.0)


def objects_as_keys() -> Any:
    kept = {Thing(2.0): 1}
    return lambda x: x * sum(t.by for t in kept), lambda: setattr(next(iter(kept)), "by", 3.0)


def parameters_as_keys() -> Any:
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    kept = {weight: 2.0}
    return lambda x: x * weight * kept[weight], lambda: kept.__setitem__(next(iter(kept)), 3.0)


def numbers_with_attributes() -> Any:
    rate = Rate(2.0)
    rate.more = 1.0
    return lambda x: x * rate * rate.more, lambda: setattr(rate, "more", 2.0)


class Registered:
    by = 1.0


def classes_that_have_come_since() -> Any:
    kept = [type("First", (Registered,), {"by": 2.0})]
    return (
        lambda x: x * math.prod(one.by for one in Registered.__subclasses__()),
        lambda: kept.append(type("Second", (Registered,), {"by": 3.0})),
    )


def tuples_with_attributes_of_their_class() -> Any:
    kept = Scaled((1.0, 2.0))
    return lambda x: x * kept[1] * kept.more, lambda: setattr(kept, "more", 3.0)


def tuples_with_attributes() -> Any:
    pair = Pair((2.0,))
    pair.more = 1.0
    return lambda x: x * pair[0] * pair.more, lambda: setattr(pair, "more", 2.0)


def members_of_enums_with_attributes() -> Any:
    member: Any = Level.LOW
    member.by = 2.0
    return lambda x: x * member * member.by, lambda: setattr(member, "by", 3.0)


def methods_of_dictionaries() -> Any:
    kept = {"a": 2.0}
    get = kept.get
    return lambda x: x * get("a", 0.0), lambda: kept.update(a=3.0)


def views_of_dictionaries() -> Any:
    kept = {"a": 2.0}
    values = kept.values()
    return lambda x: x * sum(values), lambda: kept.update(b=3.0)


def views_of_memory() -> Any:
    kept = bytearray(b"\2")
    seen = memoryview(kept)
    return lambda x: x * seen[0], lambda: kept.__setitem__(0, 3)


def numbers_of_c() -> Any:
    kept = ctypes.c_double(2.0)
    return lambda x: x * kept.value, lambda: setattr(kept, "value", 3.0)


def queues() -> Any:
    kept: queue.Queue[float] = queue.Queue()
    kept.put(2.0)
    return lambda x: x * kept.queue[0], lambda: kept.queue.__setitem__(0, 3.0)


def events() -> Any:
    kept = threading.Event()
    return lambda x: x * (3.0 if kept.is_set() else 2.0), kept.set


def files_in_memory() -> Any:
    kept = io.StringIO("2.0")
    return lambda x: x * float(kept.getvalue()), lambda: kept.write("3.0")


def texts_that_are_evaluated() -> Any:
    return lambda x: x * eval("BY * 2", globals()), lambda: globals().__setitem__("BY", 3.0)


def made_names_of_the_environment() -> Any:
    os.environ["ACTORFLOW_TEST_7"] = "2"
    number = 7
    return (
        lambda x: x * float(os.environ[f"ACTORFLOW_TEST_{number}"]),
        lambda: os.environ.__setitem__("ACTORFLOW_TEST_7", "3"),
    )


def dataclasses_as_dictionaries() -> Any:
    kept = Settings()
    return lambda x: x * dataclasses.asdict(kept)["table"]["x"], lambda: kept.table.update(x=3.0)


def attributes_that_modules_make() -> Any:
    made: Any = types.ModuleType("made_by_a_test")
    made.__file__ = __file__
    sys.modules["made_by_a_test"] = made
    levels = {"level": 2.0}
    made.__getattr__ = lambda name: levels[name]
    return lambda x: x * made.level, lambda: levels.update(level=3.0)


def functions_of_libraries() -> Any:
    return lambda x: F.hardsigmoid(x), lambda: setattr(F, "hardsigmoid", lambda t: t * BY)


def functions_of_python() -> Any:
    return lambda x: x * math.sqrt(4.0), lambda: setattr(math, "sqrt", lambda v: v)


def classes_of_libraries() -> Any:
    layer = nn.Hardsigmoid()
    return lambda x: layer(x), lambda: setattr(nn.Hardsigmoid, "forward", lambda self, t: t * BY)


def methods_of_tensors() -> Any:
    kind: Any = Tensor
    kind.of_a_test = lambda self: self * 2.0
    return lambda x: x.of_a_test(), lambda: setattr(kind, "of_a_test", lambda self: self * 3.0)  # type: ignore[attr-defined]


def annotations_of_functions() -> Any:
    def made(by: float) -> None: ...

    hints: dict[str, Any] = made.__annotations__
    hints["by"] = 2.0
    return lambda x: x * made.__annotations__["by"], lambda: hints.update(by=3.0)


def annotations_that_inspect_reads() -> Any:
    def made(by: float) -> None: ...

    hints: dict[str, Any] = made.__annotations__
    hints["by"] = 2.0
    return lambda x: x * inspect.signature(made).parameters["by"].annotation, lambda: hints.update(by=3.0)


def annotations_of_classes() -> Any:
    class Made:
        by: float

    hints: dict[str, Any] = Made.__annotations__
    hints["by"] = 2.0
    return lambda x: x * vars(Made)["__annotations__"]["by"], lambda: hints.update(by=3.0)


def docstrings_of_functions() -> Any:
    def made() -> None:
        """2."""

    return lambda x: x * float(str(made.__doc__)), lambda: setattr(made, "__doc__", "3")


def names_of_classes() -> Any:
    class Made: ...

    return lambda x: x * len(Made.__name__), lambda: setattr(Made, "__name__", "Another")


def a_layers_own_forward() -> Any:
    layer: Any = nn.Sequential(nn.Hardsigmoid())
    return lambda x: layer(x), lambda: setattr(layer, "forward", lambda t: t * BY)


def distributions() -> Any:
    kept = torch.distributions.Normal(torch.zeros(3).double(), torch.ones(3).double(), validate_args=False)
    return lambda x: kept.log_prob(x), lambda: kept.loc.add_(2.0)  # type: ignore[no-untyped-call]


def sets_of_data() -> Any:
    kept = TensorDataset(torch.ones(2, 3, dtype=torch.float64))
    return lambda x: x * kept[1][0], lambda: kept.tensors[0].mul_(2.0)


def first_classes_of_a_base() -> Any:
    class Base:
        by = 2.0

    kept: list[type] = []
    return (
        lambda x: x * sum(one.by for one in Base.__subclasses__()) + x,
        lambda: kept.append(type("Late", (Base,), {"by": 3.0})),
    )


def classes_of_a_base_with_a_metaclass() -> Any:
    class Registry(type):
        pass

    class Base(metaclass=Registry):
        by = 2.0

    class One(Base):
        by = 2.0

    return (
        lambda x: x * sum(one.by for one in Base.__subclasses__()),
        lambda: setattr(One, "by", 3.0),
    )


def arrays_of_c_of_a_type_of_the_users() -> Any:
    kind: Any = ctypes.c_double * 2
    kind.__module__ = __name__  # as where a script makes the type
    kept = kind(2.0, 3.0)
    return lambda x: x * kept[0], lambda: kept.__setitem__(0, 3.0)


class Record(ctypes.Structure):
    _fields_ = [("by", ctypes.c_double), ("count", ctypes.c_int)]


def records_of_c() -> Any:
    kept = Record(2.0, 1)
    return lambda x: x * kept.by, lambda: setattr(kept, "by", 3.0)


class Counts(bytearray):
    def first(self) -> int:
        return self[0]


def bytes_of_a_class_of_the_users() -> Any:
    kept = Counts(b"\2")
    return lambda x: x * kept.first(), lambda: kept.__setitem__(0, 3)


def precision_of_decimals() -> Any:
    context = decimal.getcontext()
    return lambda x: x * float(decimal.Decimal(1) / decimal.Decimal(3)), lambda: setattr(context, "prec", 2)


class Slotted:
    __slots__ = ("__hidden", "later")

    def __init__(self) -> None:
        self.__hidden = 2.0

    def hidden(self) -> float:
        return self.__hidden

    def hide(self, value: float) -> None:
        self.__hidden = value


def slots_that_are_set_later() -> Any:
    kept: Any = Slotted()
    return lambda x: x * getattr(kept, "later", 2.0), lambda: setattr(kept, "later", 3.0)


def private_slots() -> Any:
    kept = Slotted()
    return lambda x: x * kept.hidden(), lambda: kept.hide(3.0)


def attributes_for_others() -> Any:
    kept: Any = Thing(1.0)
    kept.idle = 1.0

    def change() -> None:
        del kept.idle
        kept.scale = 3.0

    return lambda x: x * getattr(kept, "scale", 2.0), change


def globals_that_hide_what_is_built_in() -> Any:
    return lambda x: x * hash(2), lambda: globals().__setitem__("hash", lambda value: value + 1)


def other_dictionaries_of_modules() -> Any:
    layer: Any = nn.Sequential(nn.Hardsigmoid(), nn.Softsign())
    return lambda x: layer(x), lambda: setattr(layer, "_modules", {"0": nn.Softsign()})


def other_dictionaries_of_parameters() -> Any:
    layer: Any = nn.Linear(3, 3, bias=False, dtype=torch.float64)
    other = {"weight": nn.Parameter(torch.eye(3, dtype=torch.float64)), "bias": None}
    return lambda x: layer(x), lambda: setattr(layer, "_parameters", other)


def in_configurations() -> Any:
    class Open:  # as libraries of configurations have them
        def __init__(self, **fields: Any) -> None:
            self._fields = fields

        def __getattr__(self, name: str) -> Any:
            return self._fields[name]

    Open.__module__ = "json"  # a library's
    kept = Open(loss=Open(by=2.0))
    return lambda x: x * kept.loss.by, lambda: kept.loss._fields.update(by=3.0)


def values_between_processes() -> Any:
    kept = multiprocessing.Value("d", 2.0)
    return lambda x: x * kept.value, lambda: setattr(kept, "value", 3.0)


def arrays_of_a_librarys_object() -> Any:
    kept = StandardScaler().fit(np.arange(1.0, 13.0).reshape(6, 2))
    return lambda x: x * float(kept.mean_[0]), lambda: kept.mean_.__setitem__(0, 3.0)


def arguments_of_the_command() -> Any:
    sys.argv.append("2.0")
    return lambda x: x * float(sys.argv[-1]), lambda: sys.argv.__setitem__(-1, "3.0")


def lengths_of_loaders() -> Any:
    rows = [0, 1]
    kept = DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
    return lambda x: x / len(kept), lambda: rows.extend([2, 3])


def defaults_of_optimizers() -> Any:
    kept = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    return lambda x: x * kept.defaults["lr"], lambda: kept.defaults.update(lr=0.2)


def makers_of_what_is_missing() -> Any:
    kept: collections.defaultdict[str, float] = collections.defaultdict(lambda: 2.0)
    return lambda x: x * kept.default_factory(), lambda: setattr(kept, "default_factory", lambda: 3.0)  # type: ignore[misc]


def records_of_arrays() -> Any:
    kept = np.zeros(1, dtype=[("by", "f8")])
    kept["by"] = 2.0
    record = kept[0]
    return lambda x: x * float(record["by"]), lambda: kept.__setitem__("by", 3.0)


BY = 0.5
CASES: tuple[Case, ...] = (
    user_lists, user_texts, arrays_of_objects, objects_in_sets, objects_in_weak_sets, proxies,
    levels_of_loggers, contexts_of_decimal_numbers,
    objects_as_keys, parameters_as_keys, numbers_with_attributes, tuples_with_attributes,
    tuples_with_attributes_of_their_class, classes_that_have_come_since, members_of_enums_with_attributes,
    methods_of_dictionaries, views_of_dictionaries, views_of_memory, numbers_of_c, queues, events, files_in_memory,
    texts_that_are_evaluated, made_names_of_the_environment, dataclasses_as_dictionaries,
    attributes_that_modules_make, functions_of_libraries, functions_of_python, classes_of_libraries,
    annotations_of_functions, annotations_that_inspect_reads, annotations_of_classes, docstrings_of_functions,
    names_of_classes, methods_of_tensors, a_layers_own_forward, distributions, sets_of_data,
    first_classes_of_a_base, classes_of_a_base_with_a_metaclass,
    arrays_of_c_of_a_type_of_the_users, records_of_c, bytes_of_a_class_of_the_users,
    precision_of_decimals, slots_that_are_set_later, private_slots, attributes_for_others,
    globals_that_hide_what_is_built_in, other_dictionaries_of_modules, other_dictionaries_of_parameters,
    in_configurations, values_between_processes, arrays_of_a_librarys_object, arguments_of_the_command,
    makers_of_what_is_missing, records_of_arrays, lengths_of_loaders, defaults_of_optimizers,
)  # fmt: skip


@pytest.mark.matrix(every=8)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_what_is_read_is_what_is_there_at_each_call(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for holder, name in ((F, "hardsigmoid"), (math, "sqrt"), (nn.Hardsigmoid, "forward")):
        monkeypatch.setattr(holder, name, getattr(holder, name))  # which a case replaces
    monkeypatch.setitem(globals(), "BY", BY)
    monkeypatch.setattr(sys, "argv", ["a test"])
    monkeypatch.setattr(decimal.getcontext(), "prec", 28)
    monkeypatch.setitem(globals(), "hash", None)
    monkeypatch.delitem(globals(), "hash")  # and is gone in the end
    read, change = case()

    @flow.global_function(type="predict")
    def job(x: Tensor) -> Tensor:
        return read(x).sum()  # type: ignore[no-any-return]

    x = torch.linspace(0.1, 0.9, 6, dtype=torch.float64).view(2, 3)
    with torch.no_grad():
        before = read(x).sum().item()
        assert job(x).item() == pytest.approx(before, rel=1e-12)
        assert job(x).item() == pytest.approx(before, rel=1e-12)
        assert len(job.plans) == 1
        change()
        after = read(x).sum().item()
        assert abs(after - before) > 1e-3
        assert job(x).item() == pytest.approx(after, rel=1e-12)


def losses_and_weights(step: Callable[..., Tensor], model: nn.Module, given: Callable[[], Any]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = [step(torch.randn(4, 3, generator=generator, dtype=torch.float64), given()).detach() + 0 for _ in range(4)]
    return [*found, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("passed", ["parameter", pytest.param("list", marks=pytest.mark.slow)])
def test_parameters_that_are_passed_are_trained_through(passed: str) -> None:
    def trained(decorate: Callable[[Any], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: Tensor, given: Any) -> Tensor:
            penalty = sum(p.pow(2).sum() for p in (given if isinstance(given, list) else [given]))
            loss = model(x).pow(2).mean() + penalty
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss  # type: ignore[no-any-return]

        given = (lambda: model.bias) if passed == "parameter" else (lambda: [*model.parameters()])
        return losses_and_weights(decorate(step), model, given)

    for mine, wanted in zip(trained(flow.global_function), trained(lambda f: f), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-12)


def test_a_batch_that_takes_gradients_is_refused_by_its_name() -> None:
    model = nn.Linear(3, 2)
    inner = nn.Linear(3, 3)

    @flow.global_function
    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    for x in (torch.ones(2, 3, requires_grad=True), inner(torch.ones(2, 3))):
        with pytest.raises(flow.CallError, match=r"step was called with x, .* pass x\.detach\(\)"):
            step(x)
    wanted = model(torch.ones(2, 3)).sum().item()
    assert float(step(torch.ones(2, 3))) == pytest.approx(wanted)


def test_an_optimizers_own_step_is_what_runs() -> None:
    def trained(decorate: Callable[[Any], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        calls = []

        def halved(*args: Any) -> Any:
            with torch.no_grad():
                for p in model.parameters():
                    assert p.grad is not None
                    p.grad.mul_(0.5)
            return torch.optim.SGD.step(optimizer, *args)

        def given() -> None:
            calls.append(1)
            if len(calls) == 3:
                optimizer.step = halved  # type: ignore[method-assign]

        def step(x: Tensor, _: None) -> Tensor:
            loss: Tensor = model(x).pow(2).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return losses_and_weights(decorate(step), model, given)

    for mine, wanted in zip(trained(flow.global_function), trained(lambda f: f), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-12)


def test_a_buffer_that_becomes_another_kind_of_tensor_is_read_as_it_is() -> None:
    model: Any = nn.Linear(3, 3)
    model.register_buffer("by", torch.full((3,), 2.0))

    @flow.global_function(type="predict")
    def job(x: Tensor) -> Tensor:
        return (x * model.by.sum()).sum()

    x = torch.ones(2, 3)
    assert float(job(x)) == 36
    model.by = torch.full((2,), 3.0, dtype=torch.float64)
    assert float(job(x)) == 36
    model.by = torch.full((2,), 4.0, dtype=torch.float64)
    assert float(job(x)) == 48


@pytest.mark.parametrize("how", ["open", "path", "exists", "list"])
def test_a_file_that_the_step_looks_at_is_refused_with_its_line(how: str, tmp_path: Path) -> None:
    path = tmp_path / "level"
    path.write_text("2")

    def looked() -> float:
        if how == "open":
            with open(path) as file:
                return float(file.read())
        if how == "path":
            return float(path.read_text())
        if how == "list":
            return len([*tmp_path.iterdir()])
        return float(os.path.exists(path))

    @flow.global_function(type="predict")
    def job(x: Tensor) -> Tensor:
        return (x * looked()).sum()

    with pytest.raises(flow.CaptureError, match=r"test_rarer_state\.py:\d+: the step looks at a file"):
        job(torch.ones(2))


def test_a_file_may_be_written_while_a_step_is_captured(tmp_path: Path) -> None:
    path = tmp_path / "log"

    @flow.global_function(type="predict")
    def job(x: Tensor) -> Tensor:
        with open(path, "a") as file:
            file.write("here")
        return x.sum()

    assert float(job(torch.ones(2))) == 2


def test_an_ordered_dictionary_stays_one() -> None:
    state = types.SimpleNamespace(last=None)

    @flow.global_function(type="predict")
    def job(x: Tensor) -> dict[str, Tensor]:
        state.last = collections.OrderedDict(b=2, a=1)
        return collections.OrderedDict(b=x.sum(), a=x)

    for _ in range(2):
        found = job(torch.ones(2))
        assert type(found) is collections.OrderedDict
        assert [*found] == ["b", "a"]
        assert state.last == collections.OrderedDict(b=2, a=1)


def test_a_dictionary_of_another_kind_that_the_step_makes_is_refused() -> None:
    table: Any = collections.defaultdict(lambda: collections.defaultdict(lambda: 2.0))

    @flow.global_function(type="predict")
    def job(x: Tensor) -> Tensor:
        return (x * table["a"]["b"]).sum()  # type: ignore[no-any-return]

    with pytest.raises(flow.CaptureError, match=r"table\['a'\] is or holds a defaultdict that the step makes"):
        job(torch.ones(2))
    table["a"]["b"] = 3.0
    assert float(job(torch.ones(2))) == 6


def test_a_weight_norm_may_come_between_calls() -> None:
    def trained(decorate: Callable[[Any], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        calls = []

        def given() -> None:
            nonlocal optimizer
            calls.append(1)
            if len(calls) == 3:
                torch.nn.utils.parametrizations.weight_norm(model)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, _: None) -> Tensor:
            loss: Tensor = model(x).pow(2).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return losses_and_weights(decorate(step), model, given)

    for mine, wanted in zip(trained(flow.global_function), trained(lambda f: f), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-12)


def test_what_a_script_has_taken_is_what_stands_there_after_another_job() -> None:
    def run(decorate: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model, table = nn.Linear(3, 2, dtype=torch.float64), {"kept": torch.zeros(3, dtype=torch.float64)}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            loss = model(x + table["kept"]).pow(2).mean()
            table["kept"] = 0.1 * x.mean(0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss  # type: ignore[no-any-return]

        def evaluate(x: Tensor) -> Tensor:
            return model(x + table["kept"])  # type: ignore[no-any-return]

        train, predict = decorate(step, "train"), decorate(evaluate, "predict")
        generator, found, taken = torch.Generator().manual_seed(1), [], []
        for _ in range(4):
            x = torch.randn(4, 3, generator=generator, dtype=torch.float64)
            found.append(train(x).detach() + 0)
            taken.append(table["kept"])
            found.append(predict(x).detach() + 0)
            assert table["kept"] is taken[-1]
            with torch.no_grad():
                taken[-1].mul_(3.0)  # what the next call reads
        return [*found, *(one.detach().clone() for one in taken)]

    mine = run(lambda step, kind: flow.global_function(step, type=kind))
    for one, wanted in zip(mine, run(lambda step, kind: step), strict=True):
        torch.testing.assert_close(one, wanted, rtol=0, atol=1e-12)


def test_a_tensor_of_another_shape_stops_only_the_jobs_that_read_it() -> None:
    table = {"by": torch.ones(2)}

    @flow.global_function(type="predict")
    def reads(x: Tensor) -> Tensor:
        return x * table["by"].sum()

    @flow.global_function(type="predict")
    def other(x: Tensor) -> Tensor:
        return x + 1.0

    x = torch.ones(2)
    assert reads(x).tolist() == [2.0, 2.0]
    assert other(x).tolist() == [2.0, 2.0]
    table["by"].resize_(3).fill_(1.0)
    with pytest.raises(flow.StateError, match=r"float32\[3\] now; float32\[2\] was expected.*put another one"):
        reads(x)
    assert other(x).tolist() == [2.0, 2.0]
    table["by"] = table["by"].clone()
    assert reads(x).tolist() == [3.0, 3.0]


def test_a_copied_model_takes_gradients_of_its_plain_leaves_along() -> None:
    class Model(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2, dtype=torch.float64)
            self.by = torch.ones(3, dtype=torch.float64, requires_grad=True)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.by)

    def run(decorate: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(0)
        model = Model()
        step = decorate(lambda x: model(x).pow(2).mean().backward())
        step(torch.linspace(0.1, 0.6, 6, dtype=torch.float64).view(2, 3))
        twin = copy.deepcopy(model)
        return [twin.by.grad, twin.weight.grad]

    mine, wanted = run(flow.global_function), run(lambda step: step)
    assert mine[1] is wanted[1] is None  # of parameters torch copies none
    torch.testing.assert_close(mine[0], wanted[0])


def test_objects_that_make_any_attribute_are_looked_into() -> None:
    class Making(dict[str, Any]):
        def __getattr__(self, name: str) -> Any:
            return self[name] if name in self else Making()

    settings = Making(loss=Making(by=2.0))
    job = flow.global_function(lambda x: x * settings.loss.by, type="predict")
    assert job(torch.ones(2)).tolist() == [2.0, 2.0]
    settings.loss["by"] = 3.0
    assert job(torch.ones(2)).tolist() == [3.0, 3.0]


def test_whether_a_job_is_called_without_gradients_is_part_of_its_plan() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @flow.global_function(type="train")
    def step(x: Tensor) -> Tensor:
        loss = model(x).pow(2).mean()
        if torch.is_grad_enabled():
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss  # type: ignore[no-any-return]

    def losses(modes: list[Any]) -> list[float]:
        found = []
        for mode in modes:
            with mode:
                found.append(step(torch.ones(4, 3)).item())
        return found

    first, evaluated, again, last = losses(
        [torch.enable_grad(), torch.no_grad(), torch.inference_mode(), torch.enable_grad()]
    )
    assert first > evaluated == again == last
    assert len(step.plans) == 2
    with torch.no_grad():
        assert step(torch.ones(4, 3)).item() < last

    @flow.global_function(type="train")
    def trains(x: Tensor) -> None:
        model(x).sum().backward()

    with torch.no_grad(), pytest.raises(flow.CallError, match="does not require grad"):
        trains(torch.ones(4, 3))


def test_what_only_predicts_has_one_plan_in_any_mode() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).eval()
    job = flow.global_function(model.forward, type="predict")
    with torch.inference_mode():
        wanted = model(torch.ones(4, 3))
        first = job(torch.ones(4, 3))
        assert not torch.is_grad_enabled()
    found = [first, job(torch.ones(4, 3))]
    with torch.no_grad():
        found.append(job(torch.ones(4, 3)))
    with torch.inference_mode():
        batch = torch.ones(4, 3)
    found.append(job(batch))
    for one in found:
        torch.testing.assert_close(one + 0, wanted.clone())
    assert len(job.plans) == 1


def test_an_object_that_answers_for_every_name_is_refused() -> None:
    class Answers:
        def __getattribute__(self, name: str) -> Any:
            return 2

    answers: Any = Answers()

    @flow.global_function
    def job(x: Tensor) -> Tensor:
        made: Tensor = x * answers.by
        return made

    with pytest.raises(flow.CaptureError, match="answers is an object of Answers whose __getattribute__ answers"):
        job(torch.ones(2))
