"""Collates that fail, for one sample, for all, or for less than several: what is named is what fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

import actorflow as flow

ROWS = [(torch.full((3,), float(i)), torch.tensor(i)) for i in range(10)]


def loaded(collate: Any) -> list[Any]:
    return [batch[1].tolist() for batch in flow.data.loader(ROWS, batch_size=4, collate=collate)]


def test_a_collate_that_needs_several_samples_is_given_whole_batches(capsys: pytest.CaptureFixture[str]) -> None:
    def pairs(samples: list[Any]) -> Any:
        samples[1][0].shape  # noqa: B018 - it fails without a second one
        return default_collate(samples)

    assert loaded(pairs) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert "fails for sample 0 alone" in capsys.readouterr().err


@pytest.mark.parametrize("index", [0, 1, 6])
def test_the_sample_that_a_collate_fails_on_is_named_with_the_line(index: int) -> None:
    def refuses(samples: list[Any]) -> Any:
        if any(int(label) == index for _, label in samples):
            raise KeyError("caption")
        return default_collate(samples)

    with pytest.raises(flow.DataError) as caught:
        loaded(refuses)
    assert f"of sample {index} alone raised KeyError: 'caption'" in str(caught.value)
    assert 'raise KeyError("caption")  (in refuses)' in str(caught.value)


def test_a_collate_that_fails_on_several_samples_is_named_with_its_own_line() -> None:
    def joins(samples: list[Any]) -> Any:
        if len(samples) > 2:
            raise ZeroDivisionError("three")
        if len(samples) == 1:
            raise IndexError("one")
        return default_collate(samples)

    with pytest.raises(flow.DataError) as caught:
        loaded(joins)
    assert "collating samples 0, 1, 2, 3 of batch 0 raised ZeroDivisionError: three" in str(caught.value)
    assert 'raise ZeroDivisionError("three")  (in joins)' in str(caught.value)


class _Open:
    """Samples of which nothing can be copied."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return (value for value in ROWS[index])


def test_samples_that_cannot_be_copied_are_read_by_rows_too(capsys: pytest.CaptureFixture[str]) -> None:
    def spent(samples: list[Any]) -> Any:
        return default_collate([tuple(sample) for sample in samples])

    batches = list(flow.data.loader(_Open(), batch_size=4, collate=spent))
    assert [tuple(x.shape) for x, _ in batches] == [(4, 3), (1, 3)]
    assert not capsys.readouterr().err  # they are not read whole
    assert [y.tolist() for _, y in batches] == [[0, 1, 2, 3], [4]]
