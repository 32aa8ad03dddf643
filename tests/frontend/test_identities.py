"""Sets of tensors, tensors as keys, their ids, references and types mean in a job what they mean in eager PyTorch."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorflow as flow
from actorflow_compiler.core.errors import CaptureError

Parameters = Iterable[nn.Parameter]
Decay = Callable[[Parameters], Callable[[nn.Parameter], float]]


def members(chosen: Parameters) -> Callable[[nn.Parameter], float]:
    group = set(chosen)
    return lambda p: 1.0 if p in group else 0.0


def frozen_members(chosen: Parameters) -> Callable[[nn.Parameter], float]:
    group = frozenset(chosen)
    return lambda p: float(p in group)


class Group(frozenset[nn.Parameter]):
    """A frozen set of the script's own."""


def own_members(chosen: Parameters) -> Callable[[nn.Parameter], float]:
    group = Group(chosen)
    return lambda p: float(p in group)


def frozen_in_a_tuple(chosen: Parameters) -> Callable[[nn.Parameter], float]:
    groups = (frozenset(chosen), 0.5)
    return lambda p: groups[1] if p in groups[0] else 0.0


def keys(chosen: Parameters) -> Callable[[nn.Parameter], float]:
    rates = {p: 0.5 + k for k, p in enumerate(chosen)}
    return lambda p: rates.get(p, 0.0)


def ids(chosen: Parameters) -> Callable[[nn.Parameter], float]:
    group = {id(p) for p in chosen}
    return lambda p: 1.0 if id(p) in group else 0.0


def ids_by_map(chosen: Parameters) -> Callable[[nn.Parameter], float]:
    rates = dict.fromkeys(map(id, chosen), 0.5)
    return lambda p: sum(rates.get(found, 0.0) for found in map(id, [p]))


def trained(make: Decay, job: bool) -> tuple[list[float], list[Tensor]]:
    """Losses of some steps whose decay is what ``make`` makes of some parameters, and the parameters at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    nn.init.zeros_(model[0].bias)
    nn.init.zeros_(model[2].bias)
    decay = make(model[0].parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        penalty = sum((decay(p) * (p - 1).square().sum() for p in model.parameters()), torch.zeros(()))
        loss = model(x).square().mean() + penalty
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss

    call: Callable[[Tensor], Any] = flow.global_function(type="train")(step) if job else step
    losses = [float(call(torch.full((4, 4), 0.1 * n)).detach()) for n in range(3)]
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("make", [members, frozen_members, own_members, frozen_in_a_tuple, keys, ids, ids_by_map])
def test_a_job_knows_the_tensors_that_a_script_has_put_into_a_set(
    make: Decay,
) -> None:
    torch.testing.assert_close(trained(make, job=True), trained(make, job=False))


def test_a_set_of_tensors_can_be_gone_through_and_changes_between_calls_are_seen() -> None:
    def losses(job: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        group, ids = set(model.parameters()), {id(model.bias)}

        def step(x: Tensor) -> Tensor:
            found = sum((p.square().sum() for p in group), model(x).mean())
            return found + sum(p.sum() for p in model.parameters() if id(p) in ids)

        call = flow.global_function(step) if job else step
        found = [float(call(torch.ones(2, 3)).detach())]
        group.discard(model.bias)
        found.append(float(call(torch.ones(2, 3)).detach()))
        ids.add(id(model.weight))
        found.append(float(call(torch.ones(2, 3)).detach()))
        assert model.weight in group
        assert len(group) == 1
        return found

    assert losses(job=True) == pytest.approx(losses(job=False))


def test_a_tensor_that_is_in_a_set_alone_is_a_variable() -> None:
    def counted(job: bool) -> list[float]:
        counters = {torch.zeros(2), torch.ones(3)}

        def step(x: Tensor) -> Tensor:
            for one in counters:
                one.add_(x.sum())
            return sum((one.sum() for one in counters), torch.zeros(()))

        call = flow.global_function(step) if job else step
        return [float(call(torch.ones(2))) for _ in range(3)]

    assert counted(job=True) == counted(job=False)


@pytest.mark.parametrize("kind", [set, frozenset])
def test_tensors_that_only_a_set_holds_must_differ_as_ranks_have_no_other_name_for_them(kind: Any) -> None:
    group = kind([torch.zeros(2), torch.zeros(2)])
    with pytest.raises(CaptureError, match=r"group.* two of its tensors are equal.*expected: a list or a dict"):
        flow.global_function(lambda x: x + sum(one.sum() for one in group))(torch.ones(2))


def test_modules_that_are_copied_and_sets_of_them_are_not_refused() -> None:
    torch.manual_seed(0)
    one = nn.Linear(2, 2)
    other = copy.deepcopy(one)
    biases = {one.bias, other.bias}
    call = flow.global_function(lambda x: one(x) + other(x) + sum(b.sum() for b in biases))
    expected = one(torch.ones(1, 2)) + other(torch.ones(1, 2)) + one.bias.sum() + other.bias.sum()
    torch.testing.assert_close(call(torch.ones(1, 2)) + 0, expected)


# ---- hashes, weak references, types


def hashes(chosen: Parameters) -> Callable[[nn.Parameter], float]:
    group = {hash(p) for p in chosen}
    return lambda p: float(hash(p) in group)


def weak_references(chosen: Parameters) -> Callable[[nn.Parameter], float]:
    references = [weakref.ref(p) for p in chosen]
    return lambda p: float(any(reference() is p for reference in references))


@pytest.mark.parametrize("make", [hashes, weak_references])
def test_hashes_and_weak_references_are_those_of_the_scripts_tensors(make: Decay) -> None:
    torch.testing.assert_close(trained(make, job=True), trained(make, job=False))


def test_a_weak_reference_keeps_its_callback() -> None:
    dropped: list[Any] = []
    held = [torch.ones(3)]
    references = [weakref.ref(held[0], dropped.append)]

    def step(x: Tensor) -> Tensor:
        one = references[0]()
        assert one is not None
        return x + one

    before = references[0]
    assert (flow.global_function(step)(torch.ones(3)) + 0).tolist() == [2.0] * 3
    assert references[0] is before


def test_the_type_of_a_tensor_in_a_step_is_that_of_a_tensor() -> None:
    weight = nn.Parameter(torch.ones(3))
    scales = {Tensor: 2.0, nn.Parameter: 3.0}

    def step(x: Tensor) -> Tensor:
        assert [type(x), type(weight), type(x * 2), int] == [Tensor, nn.Parameter, Tensor, int]
        assert type(step).__name__ == "function"
        assert isinstance(int, type)
        assert repr(type[int]) == "type[int]"

        class Meta(type):
            """A metaclass of the step's own."""

        assert type(Meta("Made", (), {})) is Meta
        assert type("Own", (), {"a": 1})().a == 1  # type: ignore[attr-defined]
        return x * scales.get(type(x), 5.0) + weight * scales.get(type(weight), 7.0)

    found = flow.global_function(step)(torch.ones(3))
    assert (found + 0).tolist() == [5.0] * 3
    assert "type" not in globals()


def test_the_address_of_a_tensors_memory_is_refused() -> None:
    weight = nn.Parameter(torch.ones(3))
    addresses = {weight.untyped_storage().data_ptr()}
    with pytest.raises(CaptureError, match="asks for the memory of a tensor here"):
        flow.global_function(lambda x: x * (weight.untyped_storage().data_ptr() in addresses))(torch.ones(3))


@pytest.mark.parametrize("what", ["an argument", "a weak reference", "a member of a list beside the model"])
def test_a_parameter_that_others_hold_or_refer_to_is_the_same_object_after_a_call(what: str) -> None:
    def train(job: bool) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        bias, others = model.bias, [model.bias]
        kept = weakref.ref(bias) if what == "a weak reference" else None
        given = (lambda: model.bias) if what == "an argument" else lambda: torch.ones(3)

        def backward(x: Tensor, k: Tensor) -> Tensor:
            loss = (model(x) + k.sum()).square().mean()
            loss.backward()
            return loss

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        x, found = torch.randn(6, 4), []
        for _ in range(2):  # the optimizer has state before there is a job
            backward(x, torch.ones(3))
            update()
        steps = [flow.global_function(one) if job else one for one in (backward, update)]
        for _ in range(3):
            found.append(steps[0](x, given()).item())
            steps[1]()
            assert model.bias is bias is others[0]
            assert kept is None or kept() is bias
            assert set(optimizer.state) == set(model.parameters())
        return [*found, *bias.tolist(), float(optimizer.state_dict()["state"][1]["step"])]

    assert train(True) == pytest.approx(train(False))
