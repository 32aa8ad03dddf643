"""Tensors that a step puts into caches, under keys of any kind, are there for the next call and for the script."""

from __future__ import annotations

import enum
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorflow as flow
from actorflow.script_state import sources
from actorflow.script_state.sources import CacheEntriesSource


class Form(enum.Enum):
    ROW = 1


class Owner:
    pass


def test_a_cache_of_functools_holds_tensors_for_later_plans_and_for_the_script() -> None:
    level = [2.0]

    @functools.cache
    def table(size: int, *, by: float = 1.0) -> Tensor:
        return torch.arange(size) * level[0] * by

    @flow.global_function(type="predict")
    def job(x: Tensor) -> Tensor:
        return (x * table(3, by=2.0)).sum()

    x = torch.ones(3)
    assert float(job(x)) == 12
    level[0] = 5.0
    assert float(job(x)) == 12  # it is in the cache
    assert float(job(torch.ones(2, 3))) == 24
    assert table(3, by=2.0).tolist() == [0, 4, 8]
    assert table.cache_info().currsize == 1
    table.cache_clear()
    assert float(job(x)) == 30
    table(3, by=2.0).mul_(2)
    assert float(job(x)) == 60


def test_a_cached_method_of_a_module_holds_tensors() -> None:
    class Layer(nn.Module):
        scale = 2.0

        @functools.cache  # noqa: B019
        def table(self, size: int) -> Tensor:
            return torch.full((size,), self.scale)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.table(x.shape[-1])

    layer = Layer()

    @flow.global_function(type="predict")
    def job(x: Tensor) -> Tensor:
        return layer(x).sum()

    assert [float(job(torch.ones(3))), float(job(torch.ones(2)))] == [6, 4]
    layer.scale = 3.0
    assert [float(job(torch.ones(3))), layer.table(2).tolist()] == [6, [2, 2]]
    Layer.table.cache_clear()
    assert float(job(torch.ones(3))) == 9


def test_a_tensor_in_a_cache_with_a_limit_is_refused() -> None:
    @functools.lru_cache
    def table(size: int) -> Tensor:
        return torch.arange(size).float()

    @flow.global_function(type="predict")
    def job(x: Tensor) -> Tensor:
        return (x * table(3)).sum()

    with pytest.raises(flow.CaptureError, match=r"test_caches\.py:\d+: the cache of table gets a tensor") as error:
        job(torch.ones(3))
    assert "@functools.cache in place of @functools.lru_cache" in str(error.value)
    assert table(3).tolist() == [0, 1, 2]
    assert float(job(torch.ones(3))) == 3  # as it is there


def test_a_cache_with_a_limit_may_hold_numbers() -> None:
    @functools.lru_cache
    def by(size: int) -> float:
        return size * 2.0

    @flow.global_function(type="predict")
    def job(x: Tensor) -> Tensor:
        return (x * by(3)).sum()

    assert [float(job(torch.ones(3))), float(job(torch.ones(2)))] == [18, 12]


def test_what_a_cache_with_a_limit_keeps_is_what_it_keeps_at_each_call() -> None:
    level = [2.0]

    @functools.lru_cache
    def by(size: int) -> float:
        return size * level[0]

    @flow.global_function(type="predict")
    def job(x: Tensor) -> Tensor:
        return (x * by(3)).sum()

    x = torch.ones(1)
    assert [float(job(x)), float(job(x))] == [6, 6]
    level[0] = 5.0
    assert float(job(x)) == 6  # it is in the cache
    by(4)
    by(3)
    plans = len(job.plans)
    assert float(job(x)) == 6
    assert len(job.plans) == plans
    by.cache_clear()
    assert float(job(x)) == 15
    by.cache_clear()
    level[0] = 7.0
    by(3)
    level[0] = 5.0
    assert float(job(x)) == 21


@pytest.mark.parametrize("limit", [4, 5000])
def test_what_a_cache_with_a_limit_forgets_makes_no_difference(limit: int) -> None:
    @functools.lru_cache(maxsize=limit)
    def by(size: int) -> float:
        return 2.0 * size

    @flow.global_function(type="predict")
    def job(x: Tensor) -> Tensor:
        return (x * by(3)).sum()

    for size in range(limit - 1):
        by(10 + size)
    for size in range(5):
        assert float(job(torch.ones(1))) == 6
        by(-size)
    assert len(job.plans) == 1


def test_a_cache_with_many_results_is_not_looked_into_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []

    @functools.lru_cache(maxsize=500)
    def by(size: int) -> float:
        return 2.0 * size

    source = CacheEntriesSource("by", by)
    cached = sources._cached

    def counted(function: Any) -> Any:
        looked.append(function)
        return cached(function)

    monkeypatch.setattr(sources, "_cached", counted)
    for size in range(300):
        by(size)
    kept = source.values()
    assert len(kept) == 300
    by(7)
    assert source.compared(source.values(), kept) is kept
    assert len(looked) == 1
    by(300)
    assert len(source.values()) == 301
    assert source.compared(source.values(), kept) == kept
    by.cache_clear()
    assert not source.compared(source.values(), kept)


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    "key", [("a", 1), ("a", (1, 0.5)), torch.float32, (torch.device("cpu"), None), Form.ROW, (nn.Linear, 3), Owner()]
)
def test_a_dictionary_may_have_any_key(key: Any) -> None:
    table: dict[Any, Tensor] = {}

    @flow.global_function(type="predict")
    def job(x: Tensor) -> Tensor:
        if key not in table:
            table[key] = torch.full((3,), 2.0)
        return (x * table[key]).sum()

    assert [float(job(torch.ones(3))), float(job(torch.ones(2, 3)))] == [6, 12]
    assert table[key].tolist() == [2, 2, 2]


@pytest.mark.parametrize("key", [("a", 1), torch.float32, Form.ROW])
def test_a_tensor_under_any_key_may_be_replaced_in_each_call(key: Any) -> None:
    table = {key: torch.zeros(3)}

    @flow.global_function
    def job(x: Tensor) -> Tensor:
        table[key] = table[key] + x
        return table[key].sum()

    assert [float(job(torch.ones(3))) for _ in range(3)] == [3, 6, 9]
    assert table[key].tolist() == [3, 3, 3]


def test_a_key_that_the_step_makes_is_refused() -> None:
    table: dict[Any, Tensor] = {}

    @flow.global_function(type="predict")
    def job(x: Tensor) -> Tensor:
        table[Owner()] = x + 1
        return x.sum()

    with pytest.raises(flow.CaptureError, match=r"test_caches\.py:\d+: table\[<.*that no other rank could find"):
        job(torch.ones(3))
