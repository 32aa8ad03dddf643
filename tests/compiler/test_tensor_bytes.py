"""The bytes of tensors that lie in memory in all sorts of ways."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from actorflow.transport.small_tensors import decode, encode
from actorflow_compiler.core.tensor_bytes import as_bytes, flat
from actorflow_compiler.plan.plan import TensorSpec

MAKES: dict[str, Callable[[], Tensor]] = {
    "row by row": lambda: torch.arange(6.0).view(2, 3),
    "column by column": lambda: torch.arange(6.0).view(2, 3).t(),
    "with gaps": lambda: torch.arange(6.0)[::2],
    "one element of several": lambda: torch.arange(6.0)[1::2][:1],
    "no element of several": lambda: torch.arange(6.0)[1::2][:0],
    "one row of a column": lambda: torch.arange(6.0).view(2, 3)[1:, 1:2],
    "repeated": lambda: torch.arange(2.0).expand(3, 2),
    "a number": lambda: torch.tensor(2.0),
    "conjugated": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negated": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "truth values": lambda: torch.tensor([True, False, True])[::2],
}


@pytest.mark.parametrize("name", MAKES)
def test_a_tensor_is_its_bytes(name: str) -> None:
    x = MAKES[name]()
    assert flat(x).stride() == (1,)
    assert flat(x).tolist() == x.reshape(-1).tolist()
    assert as_bytes(x).dtype == torch.uint8
    (back,) = decode(encode([x]), [TensorSpec(tuple(x.shape), str(x.dtype).removeprefix("torch."), "B")])
    assert torch.equal(back, x)


def test_what_lies_row_by_row_is_not_copied() -> None:
    x = torch.arange(6.0).view(2, 3)[1:]
    assert flat(x).data_ptr() == x.data_ptr()
