"""Documents are packed into rows of one length, whose segments are computed as the documents alone."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset

import actorflow as flow
from actorflow_compiler.core.errors import DataError
from fewer import fewer
from scripts.sequences import WORDS, Words, documents, shuffled

SIZES = st.lists(st.integers(0, 20), max_size=25)
Row = dict[str, Tensor]


def texts(sizes: list[int]) -> list[list[int]]:
    """Documents whose tokens are all different."""
    return [[1000 * (index + 1) + at for at in range(size)] for index, size in enumerate(sizes)]


def segments(row: Row) -> list[list[int]]:
    """The tokens of each segment of a row, which must be numbered from 0 and lie one behind the other."""
    numbers = row["segments"].tolist()
    used = [number for number in numbers if number >= 0]
    assert numbers == used + [-1] * (len(numbers) - len(used))
    assert used == sorted(used)
    assert {*used} == {*range(max(used, default=-1) + 1)}
    return [row["tokens"][row["segments"] == number].tolist() for number in range(max(used, default=-1) + 1)]


def check(row: Row, length: int) -> None:
    """The form of a row, and that positions and targets are those of its segments."""
    assert [*row] == ["tokens", "segments", "positions", "targets"]
    assert {(x.dtype, tuple(x.shape)) for x in row.values()} == {(torch.int64, (length,))}
    found = segments(row)
    empty = length - sum(map(len, found))
    assert row["positions"].tolist() == [at for text in found for at in range(len(text))] + [0] * empty
    targets = [target for text in found for target in [*text[1:], -100]]
    assert row["targets"].tolist() == targets + [-100] * empty
    assert row["tokens"].tolist()[length - empty :] == [0] * empty


@settings(max_examples=fewer(100), deadline=None)
@given(SIZES, st.integers(1, 12), st.booleans())
def test_documents_are_cut_where_a_row_is_full(sizes: list[int], length: int, ends: bool) -> None:
    rows = flow.data.packed(texts(sizes), length, eos=7 if ends else None)
    every = [token for text in texts(sizes) for token in [*text, *[7] * ends]]
    assert len(rows) == -(-len(every) // length)
    found = [rows[at] for at in range(len(rows))]
    for row in found:
        check(row, length)
    assert [token for row in found for text in segments(row) for token in text] == every
    whole = [[*text, *[7] * ends] for text in texts(sizes)]
    borders = {sum(map(len, whole[:at])) for at in range(len(whole) + 1)}
    at = 0
    for row in found:  # a segment ends where a document or the row does
        for text in segments(row):
            assert not any(at < border < at + len(text) for border in borders)
            at += len(text)
            assert at in borders or at % length == 0


@settings(max_examples=fewer(100), deadline=None)
@given(st.lists(st.integers(0, 9), max_size=40), st.integers(10, 14), st.booleans())
def test_whole_documents_go_into_the_first_row_with_room(sizes: list[int], length: int, ends: bool) -> None:
    wanted: list[list[list[int]]] = []
    for text in ([*text, *[7] * ends] for text in texts(sizes)):
        fits = (row for row in wanted if sum(map(len, row)) + len(text) <= length)
        if text and (row := next(fits, None)) is not None:
            row.append(text)
        elif text:
            wanted.append([text])
    rows = flow.data.packed(texts(sizes), length, eos=7 if ends else None, split=False)
    assert len(rows) == len(wanted)
    for at, row in enumerate(wanted):
        check(rows[at], length)
        assert segments(rows[at]) == row


def test_only_the_last_rows_get_more_documents() -> None:
    sizes = [6] * 65 + [4, 4]  # each needs a row of its own, until the first has room and is closed already
    rows = flow.data.packed(texts(sizes), 10, split=False)
    assert len(rows) == 65
    assert [len(segments(rows[at])) for at in range(65)] == [1, 2, 2] + [1] * 62


KINDS: dict[str, Callable[[list[int]], Any]] = {
    "tensor": torch.tensor, "int32": lambda text: torch.tensor(text, dtype=torch.int32), "list": list,
    "array": lambda text: np.array(text, np.uint16), "big endian": lambda text: np.array(text, ">i4"), "tuple": tuple,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_tensors_arrays_or_lists(kind: str) -> None:
    rows = flow.data.packed([KINDS[kind](text) for text in ([1, 2, 3], [], [4, 5])], 4)
    assert [segments(rows[at]) for at in range(2)] == [[[1, 2, 3], [4]], [[5]]]
    assert [segments(row) for row in pickle.loads(pickle.dumps(rows))] == [[[1, 2, 3], [4]], [[5]]]


class Counting(Dataset[Any]):
    def __init__(self, sizes: list[int]) -> None:
        self.texts, self.read = texts(sizes), list[int]()

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> list[int]:
        self.read.append(index)
        return self.texts[index]


def test_a_row_reads_its_own_documents_and_lengths_read_all_once(capfd: pytest.CaptureFixture[str]) -> None:
    sizes = [3, 4, 2, 9]
    data = Counting(sizes)
    rows = flow.data.packed(data, 5)
    assert not data.read
    assert len(rows) == 4
    assert data.read == [0, 1, 2, 3]
    assert "each of its 4 documents is read once" in capfd.readouterr().err
    data.read.clear()
    check(rows[1], 5)
    assert data.read == [1, 2, 3]
    for lengths in (sizes, lambda index: sizes[index]):
        data = Counting(sizes)
        assert len(flow.data.packed(data, 5, lengths=lengths)) == 4
        assert not data.read
    data.lengths = sizes  # type: ignore[attr-defined]
    assert len(flow.data.packed(data, 5)) == 4
    assert not data.read
    assert "documents is read once" not in capfd.readouterr().err


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_gives_packed_rows(workers: int) -> None:
    rows = flow.data.packed(documents(), 16, eos=0)
    order = shuffled(len(rows), 4, 0)
    found = [*flow.data.loader(rows, 4, shuffle=True, seed=4, workers=workers)]
    assert torch.equal(torch.cat([batch["tokens"] for batch in found]), torch.stack([rows[i]["tokens"] for i in order]))


# -- attention -----------------------------------------------------------------------------------------


def test_the_mask_lets_tokens_attend_within_their_segment() -> None:
    some = torch.tensor([[0, 0, 1, -1, -1], [0, 1, 1, 1, 2]])
    for causal in (True, False):
        mask = flow.data.segment_mask(some, causal=causal)
        assert (mask.shape, mask.dtype) == ((2, 1, 5, 5), torch.bool)
        wanted = [
            [[bool(row[i] == row[j] and (j <= i or not causal)) for j in range(5)] for i in range(5)] for row in some
        ]
        assert mask[:, 0].tolist() == wanted
        assert torch.equal(torch.cat([flow.data.segment_mask(part, causal) for part in some.split(1)]), mask)
    assert flow.data.segment_mask(some.int()).any(-1).all()  # no softmax of nothing


@pytest.mark.parametrize("split", [False, True])
def test_losses_and_gradients_on_packed_rows_are_those_of_the_documents_alone(split: bool) -> None:
    texts = [text for text in documents() if len(text)]
    alone, together = Words(), Words()
    rows = flow.data.packed(texts, 16, eos=None, split=split)
    batch = {name: torch.stack([rows[at][name] for at in range(len(rows))]) for name in rows[0]}
    if split:  # what is cut is a document of its own
        texts = [torch.tensor(text) for at in range(len(rows)) for text in segments(rows[at])]
    logits = together(batch["tokens"], batch["positions"], flow.data.segment_mask(batch["segments"]))
    loss = F.cross_entropy(logits.view(-1, WORDS), batch["targets"].view(-1), reduction="sum")
    wanted = torch.zeros((), dtype=torch.float64)
    for text in texts:
        causal = torch.ones(1, 1, len(text), len(text), dtype=torch.bool).tril()
        found = alone(text[None], torch.arange(len(text))[None], causal)[0]
        wanted = wanted + F.cross_entropy(found[:-1], text[1:], reduction="sum")
    torch.testing.assert_close(loss, wanted, rtol=1e-9, atol=1e-9)
    loss.backward()
    wanted.backward()
    for a, b in zip(together.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-9)


# -- bad input -----------------------------------------------------------------------------------------

BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "a text": (lambda: flow.data.packed("words"), "a str was found; documents with __getitem__ and __len__"),
    "columns": (lambda: flow.data.packed({"input_ids": [[1]]}), "a dict was found; documents with"),
    "a generator": (lambda: flow.data.packed(iter([[1]])), "a list_iterator was found; documents with"),
    "no length": (lambda: flow.data.packed([[1]], 0), "length=0 was found; a whole number was expected"),
    "half an eos": (lambda: flow.data.packed([[1]], eos=0.5), "eos=0.5 was found"),  # type: ignore[arg-type]
    "a long one": (
        lambda: len(flow.data.packed([[1], [2] * 4, [3] * 7], 4, eos=0, split=False)),
        r"document 1 has 5 tokens with eos, and a row 4; pass length=8, or split=True, which cuts",
    ),
    "floats": (
        lambda: flow.data.packed([[1], torch.ones(2)], 3)[0],
        r"document 1 is a Tensor of torch.float32\[2\]; a tensor or an array of whole numbers",
    ),
    "two dims": (lambda: flow.data.packed([np.ones((2, 2), int)], 2)[0], r"document 0 is a ndarray of int64\[2, 2\]"),
    "ragged": (lambda: flow.data.packed([[[1, 2], [3]]], 2)[0], "document 0 is a list; a tensor or an array"),
    "words": (lambda: flow.data.packed([["a", "b"]], 2)[0], r"document 0 is a list of <U1\[2\]; a tensor"),
    "strings": (lambda: len(flow.data.packed(["ab"], 2)), "document 0 is a str; a tensor, array or list of tokens"),
    "rows of columns": (lambda: len(flow.data.packed([{"x": [1]}], 2)), "document 0 is a dict; a tensor, array"),
    "a wrong length": (
        lambda: flow.data.packed([[1, 2, 3]], 2, lengths=[2])[0], "document 0 has 3 tokens; its length says 2",
    ),
    "few lengths for documents": (
        lambda: flow.data.packed([[1], [2]], lengths=[1]), "1 lengths were found for 2 samples",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_documents_are_named(case: str) -> None:
    make, said = BAD[case]
    with pytest.raises(DataError, match=said):
        make()


def test_a_packed_dataset_ends() -> None:
    rows = flow.data.packed([[1, 2, 3]], 2)
    assert segments(rows[-1]) == [[3]]
    with pytest.raises(IndexError):
        rows[2]
    assert len(flow.data.packed([], 4)) == 0
