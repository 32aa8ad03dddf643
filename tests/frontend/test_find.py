"""The search through what a job's function can reach."""

from __future__ import annotations

import functools
import weakref
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorflow as flow
from actorflow.script_state.name_registry import NameRegistry
from actorflow.script_state.search import find_state
from actorflow.script_state.set_order import stable_order
from actorflow.standins.owned_tensor import OwnedTensor
from actorflow_compiler.values.variables import ScriptState, stand_ins

Pair = namedtuple("Pair", ["left", "right"])

global_model = nn.Linear(2, 3)
global_optimizer = torch.optim.SGD(global_model.parameters(), lr=0.1)
global_scale = torch.ones(3)
unused_model = nn.Linear(4, 4)


def names(state: ScriptState) -> list[str]:
    return list(state.held)


def uses_globals(x: Tensor) -> Tensor:
    out: Tensor = global_model(x) * global_scale
    global_optimizer.step()
    return out


def test_globals_that_the_function_names_are_found_and_no_others():
    state = find_state(uses_globals)
    assert names(state) == ["global_model.weight", "global_model.bias", "global_scale"]
    assert list(state.modules) == ["global_model"]
    assert state.optimizers == {"global_optimizer": global_optimizer}
    assert [h.kind for h in state.held.values()] == ["parameter", "parameter", "tensor"]


def test_a_closure_is_searched_and_named_by_its_variables():
    encoder, decoder = nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3)

    def step(x: Tensor) -> Tensor:
        out: Tensor = decoder(encoder(x))
        return out

    state = find_state(step)
    assert set(names(state)) == {
        "encoder.weight", "decoder.weight", "decoder.bias", "decoder.running_mean", "decoder.running_var",
        "decoder.num_batches_tracked",
    }  # fmt: skip
    assert state.held["decoder.running_mean"].kind == "buffer"


def helper(x: Tensor) -> Tensor:
    out: Tensor = global_model(x)
    return out


def test_functions_that_the_function_calls_are_searched_too():
    def inner(x: Tensor) -> Tensor:
        return helper(x)

    def step(x: Tensor) -> Tensor:
        return (lambda y: inner(y))(x)

    assert list(find_state(step).modules) == ["global_model"]


def test_functions_inside_decorators_of_libraries_are_found():
    @torch.no_grad()
    def evaluate(x: Tensor) -> Tensor:
        return helper(x)

    def step(x: Tensor) -> Any:
        return evaluate(x), torch.func.vmap(lambda y: y * global_scale)(x)

    state = find_state(step)
    assert list(state.modules) == ["global_model"]
    assert "global_scale" in state.held


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, x: Tensor) -> Tensor:
        return self.loss(self.model(x))

    def loss(self, y: Tensor) -> Tensor:
        return (y * global_scale.sum()).sum()


def test_a_bound_method_reaches_what_self_holds_and_what_its_other_methods_name():
    state = find_state(Trainer().step)
    assert list(state.modules) == ["self.model"]
    assert list(state.optimizers) == ["self.optimizer"]
    assert "global_scale" in state.held


def test_an_object_in_a_global_is_searched_like_self():
    trainer = Trainer()

    def step(x: Tensor) -> Tensor:
        return trainer.step(x)

    state = find_state(step)
    assert list(state.modules) == ["trainer.model"]
    assert "global_scale" in state.held


@dataclass(frozen=True)
class Parts:
    heads: dict[str, nn.Module]
    masks: tuple[Tensor, ...] = field(default_factory=lambda: (torch.zeros(2), torch.ones(2)))


class Slotted:
    __slots__ = ("mask", "model")

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        self.mask = torch.zeros(1)


def test_containers_dataclasses_slots_and_namespaces_are_opened():
    models = [nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]
    parts = Parts({"a": nn.Linear(1, 1, bias=False)})
    space = SimpleNamespace(model=nn.Linear(1, 1, bias=False))
    slotted = Slotted()

    def step(x: Tensor) -> Any:
        return models, parts, space, slotted, x

    assert set(names(find_state(step))) == {
        "models.0.weight", "models.1.weight", "parts.heads.a.weight", "parts.masks.0", "parts.masks.1",
        "space.model.weight", "slotted.model.weight", "slotted.mask",
    }  # fmt: skip


def test_defaults_and_partials_are_searched():
    one, pair = torch.ones(1), (torch.ones(2),)

    def step(x: Tensor, model: nn.Module, *, offset: Tensor = one, scale: Any = pair) -> Tensor:
        return model(x) + offset + scale[0]  # type: ignore[no-any-return]

    state = find_state(functools.partial(step, model=nn.Linear(1, 1, bias=False)))
    assert set(names(state)) == {"model.weight", "offset", "scale.0"}


def test_every_place_of_a_tensor_gets_another_one_and_the_first_one_back():
    loose = torch.ones(2)
    cell = torch.zeros(2)
    holder = {"list": [loose], "pair": Pair(loose, (loose, 3))}
    parts = Parts({}, (loose,))
    slotted = Slotted()
    slotted.mask = loose

    def inner(x: Tensor, scale: Tensor = loose, *, other: Tensor = loose) -> Tensor:
        return x + scale + other

    partial = functools.partial(inner, loose)

    def step(x: Tensor) -> Any:
        return holder, parts, slotted, cell, partial(x)

    def held_now() -> list[Tensor]:
        pair = holder["pair"]
        assert isinstance(pair, Pair)
        assert inner.__defaults__
        assert inner.__kwdefaults__
        return [
            holder["list"][0], pair.left, pair.right[0], parts.masks[0], slotted.mask, cell, inner.__defaults__[0],
            inner.__kwdefaults__["other"], partial.args[0],
        ]  # fmt: skip

    before = held_now()
    state = find_state(step)
    with stand_ins(state, lambda t: t + 10):
        assert all(torch.equal(a, b + 10) for a, b in zip(held_now(), before, strict=True))
        assert isinstance(holder["pair"], Pair)
    assert all(a is b for a, b in zip(held_now(), before, strict=True))


def test_a_tied_parameter_is_one_variable_with_all_its_places():
    model = nn.ModuleDict({"embed": nn.Embedding(5, 2), "head": nn.Linear(2, 5, bias=False)})
    model["head"].weight = model["embed"].weight  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> Any:
        return model, optimizer

    state = find_state(step)
    assert names(state) == ["model.embed.weight"]
    fake = nn.Parameter(torch.zeros(5, 2))
    state.held["model.embed.weight"].put(fake)
    assert model["embed"].weight is fake
    assert model["head"].weight is fake
    assert optimizer.param_groups[0]["params"][0] is fake


def test_the_outermost_module_is_the_root():
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    inner = model[0]

    def step(x: Tensor) -> Any:
        return inner(x), model(x)

    state = find_state(step)
    assert list(state.modules) == ["model"]
    assert names(state) == ["model.0.weight"]


class WithPlainList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = [nn.Linear(1, 1, bias=False)]  # not registered
        self.mask = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.heads[0](x) + self.mask + global_scale.sum()
        return out


def test_what_modules_hold_or_name_outside_their_parameters_is_found():
    model = WithPlainList()

    def step(x: Tensor) -> Any:
        return model(x)

    assert set(names(find_state(step))) == {"model.heads.0.weight", "model.mask", "global_scale"}


def test_an_lstm_holds_its_weights_in_a_list_too():
    model = nn.LSTM(2, 3)

    def step(x: Tensor) -> Any:
        return model(x)

    state = find_state(step)
    assert len(state.held) == 4
    with stand_ins(state, lambda t: nn.Parameter(torch.zeros_like(t))):
        assert not model._flat_weights[0].any()  # type: ignore[union-attr]
        model(torch.ones(1, 2))  # makes the list anew
    assert model._flat_weights[0] is model.weight_ih_l0


def test_given_models_and_optimizers_are_found_without_being_named():
    model, other = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        return x

    one = find_state(step, model, optimizer)
    assert names(one) == ["model.weight"]
    assert list(one.optimizers) == ["optimizer"]
    assert names(find_state(step, [model, other])) == ["model.0.weight", "model.1.weight"]
    assert names(find_state(step, {"a": model, "b": other})) == ["model.a.weight", "model.b.weight"]


def test_a_scheduler_leads_to_its_optimizer():
    model = nn.Linear(1, 1, bias=False)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 1)

    def step() -> Any:
        return model, scheduler

    assert list(find_state(step).optimizers) == ["scheduler.optimizer"]


def test_names_stay_with_their_things_and_are_given_once():
    def make() -> tuple[Any, nn.Module]:
        model = nn.Linear(1, 1, bias=False)

        def step(x: Tensor) -> Any:
            return model(x)

        return step, model

    given = NameRegistry()
    first, second = make(), make()
    assert names(find_state(first[0], names=given)) == ["model.weight"]
    assert names(find_state(second[0], names=given)) == ["model_2.weight"]
    assert names(find_state(first[0], names=given)) == ["model.weight"]

    def other(x: Tensor) -> Any:
        return encoder(x)

    encoder = first[1]
    assert names(find_state(other, names=given)) == ["model.weight"]


def test_what_took_a_tensors_place_is_found_where_the_tensor_still_is():
    class Values:
        def read(self, name: str) -> Tensor:
            return torch.zeros(2)

        def write(self, name: str, value: Tensor) -> None:
            raise AssertionError

    given = NameRegistry()
    loose = torch.ones(2)
    boxes = [loose]

    def step() -> Any:
        return boxes

    held = find_state(step, names=given).held["boxes.0"]
    owned = OwnedTensor.of(loose, "boxes.0", Values())
    given.replace(loose, owned)
    again = find_state(step, names=given)
    assert boxes[0] is owned
    assert again.held["boxes.0"].tensor is owned
    assert held.tensor is loose


def test_libraries_are_not_searched():
    torch_like = functools

    def step(x: Tensor) -> Any:
        return torch.nn.functional.relu(x), torch_like.partial(helper_free, x)

    assert names(find_state(step)) == []


def helper_free(x: Tensor) -> Tensor:
    return x


def test_a_cell_that_is_not_set_yet_is_no_harm():
    def step(x: Tensor) -> Any:
        return later(x)

    assert names(find_state(step)) == []
    later = global_model


def test_the_scaler_of_a_loss_is_found_with_its_tensors_unless_it_is_off():
    tools = SimpleNamespace(scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    off = torch.amp.GradScaler("cpu", enabled=False)

    def step(loss: Tensor) -> None:
        off.scale(tools.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        tools.scaler.step(global_optimizer)
        tools.scaler.update()

    state = find_state(step)
    assert state.scalers == {"tools.scaler": tools.scaler}
    assert names(state)[:2] == ["tools.scaler._scale", "tools.scaler._growth_tracker"]
    assert [state.held[name].tensor.item() for name in names(state)[:2]] == [8.0, 0]
    assert state.beside == {"tools.scaler._growth_tracker": "tools.scaler._scale"}
    with stand_ins(state, lambda t: torch.full_like(t, 2)):
        assert tools.scaler.get_scale() == 2.0
    assert tools.scaler.get_scale() == 8.0


class Hashed(nn.Linear):
    """Where it is in a set is the test's choice, as another rank has other addresses."""

    def __init__(self, place: int, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(2, 2)
        self.place = place

    def __hash__(self) -> int:
        return self.place

    def __eq__(self, other: object) -> bool:
        return self is other


class Task:
    """An object of the script's, with such a place."""

    def __init__(self, place: int, seed: int) -> None:
        self.model, self.seed, self.place = Hashed(0, 0), seed, place

    __hash__ = Hashed.__hash__


class Head(Task):
    """The same, but for the values of its parameters."""

    def __init__(self, place: int, seed: int) -> None:
        super().__init__(place, 0)
        self.model = Hashed(0, seed)


@pytest.mark.parametrize("kind", [Hashed, Task, Head])
@pytest.mark.parametrize("collection", [set, frozenset, weakref.WeakSet])
def test_members_of_a_set_that_look_alike_are_the_same_ones_on_every_rank(kind: Any, collection: Any) -> None:
    """The order of a set is that of addresses, of which ranks have others."""

    def found(places: Sequence[int]) -> dict[str, Any]:
        members = [kind(place, seed) for seed, place in enumerate(places)]
        group = collection(members)

        def step(x: Tensor) -> list[Tensor]:
            return [one.model(x) if isinstance(one, Task) else one(x) for one in group]

        seeds = {id(getattr(one, "model", one).weight): seed for seed, one in enumerate(members)}
        return {name: seeds[id(held.tensor)] for name, held in find_state(step).held.items() if name.endswith("weight")}

    assert len(found([1, 2, 3])) == 3
    assert found([1, 2, 3]) == found([3, 2, 1]) == found([2, 3, 1])


def test_functions_in_a_set_are_ordered_by_what_they_are_called() -> None:
    kinds = [torch.relu, torch.tanh, nn.Linear, nn.ReLU, names, find_state, ("b", 1), ("a", 1), 2.0, 1.0, None]
    for _ in range(5):
        kinds = [*kinds[3:], *kinds[:3]]
        assert stable_order(kinds, NameRegistry().known) == stable_order(reversed(kinds), NameRegistry().known)


def test_members_of_a_set_that_plans_own_are_told_apart_without_their_values() -> None:
    def trained(job: bool) -> list[float]:
        group = {Hashed(2, 0), Hashed(1, 1)}
        optimizer = torch.optim.SGD([p for one in sorted(group, key=hash) for p in one.parameters()], lr=0.1)

        def step(x: Tensor) -> Tensor:
            loss = torch.stack([one(x).square().sum() for one in group]).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            return loss

        call = flow.global_function(step) if job else step
        return [call(torch.ones(rows, 2)).item() for rows in (2, 3, 2, 4)]

    assert trained(True) == pytest.approx(trained(False))
