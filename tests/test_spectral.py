"""Steps that go to the frequencies and back: as in eager PyTorch, also where windows leave a gap in the signal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorflow as flow
from actorflow_compiler.core.errors import CallError

SIZE, HOP = 16, 4


def trainer(model: nn.Module, window: Tensor, options: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def step(x: Tensor) -> Tensor:
        spectrum = torch.stft(x, SIZE, HOP, window=window, return_complex=True)
        mask = torch.sigmoid(model(spectrum.abs().transpose(1, 2))).transpose(1, 2)
        found = torch.istft(spectrum * mask, SIZE, HOP, window=window, **options)
        loss = (found - x[:, : found.shape[1]]).square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return step


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("options", [{}, {"length": 64}, {"length": 61, "normalized": False}], ids=str)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_masked_spectrum_trains_as_eagerly(options: dict[str, Any], micro_batches: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(SIZE // 2 + 1, SIZE // 2 + 1).double()
    eager, window = copy.deepcopy(model), torch.hann_window(SIZE).double()
    step = flow.global_function(trainer(model, window, options), micro_batches=micro_batches)
    eagerly = trainer(eager, window, options)
    for x in torch.randn(3, 4, 64).double():
        assert abs(float(step(x)) - eagerly(x).item()) < 1e-12
    for mine, theirs in zip(model.state_dict().values(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=1e-12)


def test_windows_that_leave_a_gap_raise_as_they_do_eagerly() -> None:
    model, window = nn.Linear(SIZE // 2 + 1, SIZE // 2 + 1), torch.zeros(SIZE)
    x, step = torch.randn(2, 64), trainer(model, window, {})
    with pytest.raises(RuntimeError, match="window overlap add min"):
        step(x)
    with pytest.raises(CallError, match=r"_spectral\.py:\d+: found = torch\.istft(?s:.*)window overlap add min"):
        flow.global_function(step)(x)
