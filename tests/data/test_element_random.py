"""What a sample draws follows from seed, epoch and its place alone, whichever generator it draws from."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import actorflow as flow
from actorflow.data.element_random import ElementRandom

ROWS = 10
OF_MODULE = np.random.default_rng(0)


def of_module() -> float:
    return float(OF_MODULE.random())


def of_closure() -> Callable[[], float]:
    generator = random.Random(0)
    return lambda: generator.random()


class Jitter:
    """A transform with a generator of its own."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self) -> float:
        if isinstance(self.generator, torch.Generator):
            return float(torch.rand((), generator=self.generator))
        return float(self.generator.random())


class Transformed:
    """Samples of their number and what a transform draws."""

    def __init__(self, transform: Callable[[], float]) -> None:
        self.transforms = [{"jitter": transform}]

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, *[self.transforms[0]["jitter"]() for _ in range(2)]], dtype=torch.float64)


class AllAtOnce(Transformed):
    """Fetches many samples at once."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]


DRAWS: dict[str, Callable[[], Callable[[], float]]] = {
    "torch": lambda: lambda: float(torch.rand(())),
    "python": lambda: random.random,
    "numpy": lambda: lambda: float(np.random.rand()),
    "gauss of numpy": lambda: lambda: float(np.random.randn()),
    "a torch.Generator": lambda: Jitter(torch.Generator()),
    "a numpy Generator": lambda: Jitter(np.random.default_rng()),
    "a RandomState": lambda: Jitter(np.random.RandomState()),
    "a random.Random": lambda: Jitter(random.Random()),
    "one of the module": lambda: of_module,
    "one of a closure": of_closure,
}


def drawn(draw: Callable[[], float]) -> list[float]:
    return [draw() for _ in range(2)]


@pytest.mark.parametrize("kind", [Transformed, AllAtOnce])
@pytest.mark.parametrize("name", DRAWS)
def test_samples_draw_the_same_in_whichever_parts_they_are_read(name: str, kind: type[Transformed]) -> None:
    def batches(seed: int = 4, batch: int = 5) -> list[Any]:
        data = kind(DRAWS[name]())
        loader = flow.data.loader(data, batch, seed=seed)
        return [[*loader] for _ in range(2)]

    epochs = [torch.cat([batch.whole() for batch in epoch]) for epoch in batches()]
    values = torch.cat([epoch[:, 1:].flatten() for epoch in epochs])
    assert len(values.unique()) == 4 * ROWS  # by place and epoch, and two draws are two numbers
    for epoch, (first, second) in zip(epochs, batches(), strict=True):
        for batch, rows in ((second, ((3, 4),)), (first, ((1, 2), (4, 5))), (second, ((0, 5),)), (first, ((0, 5),))):
            wanted = epoch[:5] if batch is first else epoch[5:]
            assert torch.equal(batch.batch.read(rows).leaf(0), torch.cat([wanted[lo:hi] for lo, hi in rows]))
    others = [torch.cat([batch.whole() for batch in epoch]) for epoch in batches(5)]
    assert not torch.isin(torch.cat(others)[:, 1:], values).any()  # by seed
    sizes = [torch.cat([batch.whole() for batch in epoch]) for epoch in batches(batch=3)]
    assert all(torch.equal(a, b) for a, b in zip(epochs, sizes, strict=True))


@pytest.mark.parametrize("name", DRAWS)
def test_the_scripts_random_numbers_are_as_if_nothing_was_read(name: str) -> None:
    draw = DRAWS[name]()
    saved = ElementRandom(draw).saved()
    expected = drawn(draw)
    ElementRandom(draw).put_back(saved)
    loader = flow.data.loader(Transformed(draw), 4)
    for batch in loader:
        batch.whole()
    assert drawn(draw) == expected
    holders = ElementRandom(draw)
    for own in (True, False):
        state = holders.state()
        with holders.aside(own=own):
            drawn(draw)
            assert holders.state() != state
        kept = own or len(state) == 3 or name == "python"  # random.random is a method of the global one
        assert (holders.state() == state) == kept


def test_a_collate_that_draws_is_given_whole_batches_and_draws_by_batch(capfd: pytest.CaptureFixture[str]) -> None:
    def noisy(samples: list[Tensor]) -> Tensor:
        return torch.stack(samples) + torch.rand(len(samples))

    def found() -> list[list[float]]:
        loader = flow.data.loader([torch.zeros(())] * 9, 3, collate=noisy)
        return [batch.tolist() for _ in range(2) for batch in loader]

    first = found()
    assert len({value for batch in first for value in batch}) == 18
    torch.rand(5)
    assert found() == first
    assert "every rank reads whole batches of the loader of" in (said := capfd.readouterr().err)
    assert "test_a_collate_that_draws_is_given_whole_batches" in said
    assert "draws random numbers" in said


def test_a_collate_that_begins_to_draw_later_is_named() -> None:
    def later(samples: list[Tensor]) -> Tensor:
        rows = torch.stack(samples)
        return rows + torch.rand(len(samples)) if 4 in rows else rows

    (first, second) = flow.data.loader([torch.tensor(float(at)) for at in range(6)], 3, collate=later)
    assert first.tolist() == [0, 1, 2]
    with pytest.raises(flow.DataError, match="draws random numbers, which would be others on other numbers of ranks"):
        second.whole()


def test_a_collate_that_makes_another_form_of_several_samples_is_named_or_given_whole_batches() -> None:
    def pads(samples: list[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)

    uneven = [torch.ones(size) for size in (2, 3, 1, 4)]
    assert [batch.shape for batch in flow.data.loader(uneven, 2, collate=pads)] == [(2, 3), (2, 4)]
    late = [torch.ones(size) for size in (2, 2, 2, 4)]
    with pytest.raises(
        flow.DataError, match=r"sample 3 has another form .*float32\[1,4\]; the batch: float32\[rows,2\]"
    ):
        [batch.whole() for batch in flow.data.loader(late, 2, collate=pads)]

    rows = [torch.tensor([float(at)]) for at in range(4)]
    whole = flow.data.loader(rows, 2, collate=lambda samples: torch.stack(samples) - torch.stack(samples).mean())
    assert [batch.tolist() for batch in whole] == [[[-0.5], [0.5]]] * 2

    def counts(samples: list[Tensor]) -> Tensor:
        return torch.zeros(len(samples), max(1, len(samples) - 1))

    said = r"collate .*counts \(.*:\d+\) of 3 samples gave the batch: float32\[3,2\]; the batch: float32\[rows,1\] was"
    with pytest.raises(flow.DataError, match=said):
        [batch.whole() for batch in flow.data.loader(rows, 3, collate=counts)]


def seldom(index: int) -> float:
    """Most samples draw nothing."""
    return float(np.random.rand()) if index % 7 == 3 else 0.0


def seeds_itself(index: int) -> float:
    random.seed(index)
    return random.random() + float(np.random.rand())


def looks_at_states(index: int) -> float:
    numpy = np.random.get_state(legacy=False)["state"]["key"]
    return float(sum(random.getstate()[1][:-1]) + int(numpy.sum()) + int(torch.get_rng_state().long().sum()))


def puts_states_back(index: int) -> float:
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        found = random.random() + float(np.random.rand()) + float(torch.rand((), dtype=torch.float64))
    random.setstate(python)
    np.random.set_state(numpy)
    return found


def of_one_in_another(index: int) -> float:
    return OUTER.generator.generator.random() if index % 2 else OF_MODULE.random()


OUTER = Jitter(Jitter(np.random.RandomState(0)))


class Drawing:
    """Samples of what a function draws for each."""

    def __init__(self, draw: Callable[[int], float]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(self.draw(index), dtype=torch.float64)


class MadeLate(Drawing):
    """Makes its generator when its first sample is read."""

    def __init__(self) -> None:
        super().__init__(self.late)
        self.generator: np.random.Generator | None = None
        self.before: np.random.Generator | None = np.random.default_rng()

    def late(self, index: int) -> float:
        if self.generator is None:
            self.generator = np.random.default_rng()
        return float(self.generator.random() + (self.before.random() if self.before is not None else 0.0))


class MadeLateAllAtOnce(MadeLate):
    """Fetches many samples at once."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]


class MadeLateAndNoOther(MadeLateAllAtOnce):
    """Draws only from the generator that the first sample makes."""

    def __init__(self) -> None:
        super().__init__()
        self.before = None


@pytest.mark.parametrize("kind", [MadeLate, MadeLateAllAtOnce, MadeLateAndNoOther])
def test_generators_that_the_first_sample_makes_are_seeded_too(kind: type[MadeLate]) -> None:
    def read(batch: int, workers: int = 0) -> list[float]:
        loader = flow.data.loader(kind(), batch, seed=4, workers=workers)
        return [float(value) for _ in range(2) for rows in loader for value in rows.whole()]

    expected = read(ROWS)
    assert read(3) == expected
    assert read(2, workers=2) == expected
    assert len({*expected}) == 2 * ROWS


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("draw", [seldom, seeds_itself, looks_at_states, puts_states_back, of_one_in_another])
def test_samples_that_do_odd_things_with_generators_depend_on_their_place_alone(draw: Callable[[int], float]) -> None:
    def read(batch: int, workers: int = 0, start: int = 0) -> list[float]:
        loader = flow.data.loader(Drawing(draw), batch, seed=4, workers=workers)
        loader.load_state_dict({**loader.state_dict(), "row": start})
        return [float(value) for rows in loader for value in rows.whole()]

    expected = read(ROWS)
    random.random()  # the script's own numbers are of no account
    assert read(3) == expected
    assert read(2, workers=2) == expected
    assert read(1, start=4) == expected[4:]
    drew = len({value for value in expected if value})
    assert drew == (1 if draw is seldom else ROWS)
