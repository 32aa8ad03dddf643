"""What does not fit is refused in plain words, whoever refuses it, and everything stays as it was."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import actorflow as flow
from actorflow.deferred import DeferredTensor
from actorflow_compiler.core.errors import StateError


def model_of(seed: int = 0, width: int = 64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(width, width)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> torch.optim.Optimizer:
    for _ in range(steps):
        model(torch.ones(2, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


class Counter:
    """An object with a state of its own, which may refuse one."""

    def __init__(self, count: int = 0, refuses: bool = False) -> None:
        self.count, self.refuses, self.noise = count, refuses, torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "noise": self.noise}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.noise.copy_(state["noise"])
        if self.refuses:
            raise KeyError("a count of another kind")


def test_an_object_that_refuses_its_state_leaves_all_others_as_they_were(tmp_path: Path) -> None:
    source = model_of(1)
    adam = stepped(source, torch.optim.Adam(source.parameters()))
    objects = {"first": Counter(5), "second": Counter(6), "model": source, "optimizer": adam}
    flow.checkpoint.save(tmp_path, **objects, wait=True)
    model, expected = model_of(), model_of()
    optimizer = stepped(model, torch.optim.Adam(model.parameters(), lr=0.5), 3)
    kept = {key: value.clone() for key, value in optimizer.state[model.weight].items()}
    expected.load_state_dict(model.state_dict())
    first, second = Counter(1), Counter(2, refuses=True)
    with pytest.raises(
        StateError,
        match=r"second is a Counter, which refused its state: KeyError: 'a count of another kind'; nothing was loaded",
    ):
        flow.checkpoint.load(tmp_path, model=model, optimizer=optimizer, first=first, second=second)
    assert (first.count, second.count) == (1, 2)
    assert model.weight.equal(expected.weight)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert all(optimizer.state[model.weight][key].equal(value) for key, value in kept.items())


def test_an_optimizer_that_refuses_its_state_has_the_one_before(tmp_path: Path) -> None:
    class Proud(torch.optim.Adam):
        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            raise RuntimeError("no")

    source = model_of(1)
    flow.checkpoint.save(tmp_path, optimizer=stepped(source, torch.optim.Adam(source.parameters())), wait=True)
    model = model_of()
    optimizer = stepped(model, Proud(model.parameters(), lr=0.5), 2)
    with pytest.raises(StateError, match=r"optimizer is a .*Proud, which refused its state: RuntimeError: no; nothing"):
        flow.checkpoint.load(tmp_path, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.state[model.weight]["step"] == 2
    stepped(model, optimizer)
    assert optimizer.state[model.weight]["step"] == 3


OPTIMIZERS = torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adamax, torch.optim.Adagrad


@pytest.mark.parametrize("own", OPTIMIZERS)
@pytest.mark.parametrize("saved", OPTIMIZERS)
def test_the_state_of_another_kind_of_optimizer_is_refused(saved: Any, own: Any, tmp_path: Path) -> None:
    source, model = model_of(), model_of()
    flow.checkpoint.save(tmp_path, optimizer=stepped(source, saved(source.parameters(), lr=0.1)), wait=True)
    optimizer = own(model.parameters(), lr=0.2)
    if own is saved:
        flow.checkpoint.load(tmp_path, optimizer=optimizer)
        stepped(model, optimizer)
        return
    with pytest.raises(StateError, match=rf"optimizer is a {own.__name__}.*as another kind of optimizer has.*nothing"):
        flow.checkpoint.load(tmp_path, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.2


def test_adam_goes_on_as_adamw_and_with_what_a_schedule_has_added(tmp_path: Path) -> None:
    source, model = model_of(), model_of()
    adam = torch.optim.Adam(source.parameters())
    torch.optim.lr_scheduler.OneCycleLR(adam, 0.1, total_steps=10)
    flow.checkpoint.save(tmp_path, optimizer=stepped(source, adam), wait=True)
    optimizer = torch.optim.AdamW(model.parameters())
    flow.checkpoint.load(tmp_path, optimizer=optimizer)
    stepped(model, optimizer)
    assert optimizer.state[model.weight]["step"] == 2


def test_the_state_of_another_kind_of_schedule_is_refused(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(model_of().parameters(), lr=0.1)
    flow.checkpoint.save(tmp_path, s=torch.optim.lr_scheduler.StepLR(optimizer, 2), wait=True)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    before = dict(cosine.state_dict())
    with pytest.raises(
        StateError, match=r"CosineAnnealingLR, which has T_max, eta_min; the checkpoint has gamma, step"
    ):
        flow.checkpoint.load(tmp_path, s=cosine)
    assert cosine.state_dict() == before
    flow.checkpoint.load(tmp_path, s=torch.optim.lr_scheduler.StepLR(optimizer, 5))


def test_the_state_of_a_model_is_none_of_an_optimizer(tmp_path: Path) -> None:
    model = model_of()
    flow.checkpoint.save(tmp_path, thing=model, wait=True)
    with pytest.raises(StateError, match=r"thing is a SGD; the state of an optimizer was expected, .*bias, weight was"):
        flow.checkpoint.load(tmp_path, thing=torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    "array",
    [np.array([{}, []], dtype=object), np.array(["a"]), np.zeros(2, ">f4"), np.zeros(2, np.longdouble),
     np.array(["2026-01-01"], "datetime64[D]"), np.zeros(2, [("a", "f4")])],
    ids=["objects", "texts", "byte order", "long doubles", "dates", "records"],
)  # fmt: skip
def test_an_array_that_torch_has_no_form_for_is_refused_with_its_dtype(array: Any, tmp_path: Path) -> None:
    with pytest.raises(
        StateError, match=r"thing\.a is an array of dtype .*which a checkpoint cannot hold; an array of"
    ):
        flow.checkpoint.save(tmp_path, thing={"a": array})


def test_a_number_of_a_dtype_that_python_has_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"thing is a numpy\.\w+, which cannot be kept"):
        flow.checkpoint.save(tmp_path, thing=np.longdouble(1))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("half", r"it is not whole: it ends after \d+ bytes"),
        ("nothing", r"it has 0 bytes, and begins with b''"),
        ("text", r"it has 8 bytes, and begins with b'nons'"),
        ("model", r"it is damaged, or holds objects that are neither tensors nor plain values"),
    ],
)
def test_a_broken_file_of_torch_says_what_is_wrong(kind: str, said: str, tmp_path: Path) -> None:
    path, model, expected = tmp_path / "model.pt", model_of(1), model_of(1)
    torch.save(model_of() if kind == "model" else model_of().state_dict(), path)
    if kind == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif kind != "model":
        path.write_text("nonsense" if kind == "text" else "")
    with pytest.raises(StateError, match=rf"model\.pt' cannot be read as a file of torch\.save: {said}"):
        flow.checkpoint.load(path, model=model)
    assert model.weight.equal(expected.weight)


def test_a_step_of_a_file_of_another_maker_is_refused(tmp_path: Path) -> None:
    torch.save(model_of().state_dict(), tmp_path / "model.pt")
    with pytest.raises(StateError, match=r"model\.pt' is of another maker, and has no steps; step 3 was asked for"):
        flow.checkpoint.load(tmp_path / "model.pt", model=model_of(), step=3)


def test_copies_of_an_optimizer_that_was_loaded_step_too(tmp_path: Path) -> None:
    source = model_of(1)
    saved = stepped(source, torch.optim.Adam(source.parameters()), 2)
    flow.checkpoint.save(tmp_path, model=source, optimizer=saved, wait=True)
    model, other = model_of(), model_of(1)
    optimizer = torch.optim.Adam(model.parameters())
    flow.checkpoint.load(tmp_path, model=model, optimizer=optimizer)
    another = stepped(other, torch.optim.Adam(other.parameters()), 1)
    other.load_state_dict(model.state_dict())
    another.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copied, of_copy = copy.deepcopy((model, optimizer))
    stepped(source, saved)
    for one, its in ((other, another), (copied, of_copy), (model, optimizer)):
        stepped(one, its)
        assert one.weight.equal(source.weight)


@pytest.mark.parametrize("times", [1, 2])
def test_an_optimizer_steps_after_it_was_loaded_without_any_job(times: int, tmp_path: Path) -> None:
    source, model = model_of(1), model_of()
    saved = stepped(source, torch.optim.Adam(source.parameters()), 2)
    flow.checkpoint.save(tmp_path, model=source, optimizer=saved, wait=True)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(times):
        flow.checkpoint.load(tmp_path, model=model, optimizer=optimizer)
    assert isinstance(optimizer.state[model.weight]["exp_avg"], DeferredTensor)
    stepped(source, saved, 3)
    stepped(model, optimizer, 3)
    assert model.weight.equal(source.weight)
    assert optimizer.state[model.weight]["exp_avg"].equal(saved.state[source.weight]["exp_avg"])
