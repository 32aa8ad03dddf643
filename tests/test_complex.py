"""Steps that compute with complex numbers train under every plan as eagerly."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import Case
from test_memory_layouts import ADAMW, LAYOUTS, check, row_loss, rows


class Waves(nn.Module):
    """Rows are filtered by their frequencies, with complex numbers and constants of the script."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.filter, self.head = nn.Linear(4, 4), nn.Parameter(torch.randn(3, 2)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(self.first(x)) * torch.view_as_complex(self.filter) * (1 - 2j) + 1j
        waves = waves * torch.tensor([1j, 2, 3 - 1j], dtype=torch.complex128)
        back = torch.fft.irfft(waves + waves.conj() * waves.abs(), n=4)
        out: Tensor = self.head(back + F.pad(waves.imag + waves.angle(), (0, 1)))
        return out


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("layout", ["one device", "two micro-batches", "data 2", "tensor 2"])
def test_a_filter_of_frequencies_trains_as_eagerly(layout: str) -> None:
    check(Case(lambda: Waves().double(), ADAMW, rows, ("first", "head"), loss=row_loss), LAYOUTS[layout])
