"""Dataclasses that a step compares as a whole: by fields that may change without that a call could tell, or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import actorflow as flow


@dataclass
class Config:
    rate: int = 1
    sizes: list[int] = field(default_factory=lambda: [1])


@dataclass(slots=True)
class Slotted:
    rate: int = 1


@dataclass(order=True)
class Ordered:
    rate: int = 1


@dataclass(frozen=True)
class Frozen:
    rate: int = 1


def job(function: Callable[[Tensor], Tensor]) -> Any:
    return flow.global_function(type="predict")(function)


def whole(s: SimpleNamespace) -> Callable[[Tensor], Tensor]:
    return lambda x: x * (2 if s.one == s.other else 3)


def among(s: SimpleNamespace) -> Callable[[Tensor], Tensor]:
    return lambda x: x * (2 if s.one in [None, s.other] else 3)


@pytest.mark.parametrize("of", [Config, Slotted])
@pytest.mark.parametrize("compare", [whole, among])
def test_a_comparison_by_fields_that_no_code_names_is_refused(compare: Any, of: type) -> None:
    step = job(compare(SimpleNamespace(one=of(), other=of())))
    for _ in range(2):
        with pytest.raises(flow.CaptureError, match=r"test_compared.py:\d+: s.o\w+ is compared as a whole .*rate == "):
            step(torch.ones(2))
    assert Config() == Config()
    assert Config(2) != Config()


def test_a_list_that_is_compared_counts_as_a_field() -> None:
    one, other = Config(), Config()
    step = job(lambda x: x * (2 if one == other and one.rate == 1 else 3))
    with pytest.raises(flow.CaptureError, match=r"one.sizes"):
        step(torch.ones(2))


def test_where_code_names_all_fields_it_is_guarded() -> None:
    one, other = Config(), Config()
    ordered = Ordered(3)
    step = job(lambda x: x * (2 if one == other and one.rate and one.sizes[0] else 3) * max(ordered, Ordered(2)).rate)
    assert float(step(torch.ones(()))) == 6
    other.sizes.append(2)
    assert float(step(torch.ones(()))) == 9
    one.sizes.append(2)
    ordered.rate = 5
    assert float(step(torch.ones(()))) == 10


def test_what_is_frozen_or_made_in_the_step_may_be_compared() -> None:
    one, other = Frozen(), Frozen(2)
    step = job(lambda x: x * (2 if one == other else 3) * (5 if Config(4) == Config(4) else 7))
    assert float(step(torch.ones(()))) == 15
