"""Lines of fused recurrent cells, which torch runs on GPUs only: here by what they compute, written out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from actorflow_compiler.signatures import signatures
from signature_checks import failures, instance
from signature_values import f


def lstm(x: Tensor, h: Tensor, cx: Tensor, bx: Tensor | None = None, bh: Tensor | None = None) -> tuple[Tensor, ...]:
    gates = x + h if bx is None or bh is None else x + h + bx + bh
    i, forget, g, o = gates.chunk(4, 1)
    i, forget, g, o = i.sigmoid(), forget.sigmoid(), g.tanh(), o.sigmoid()
    cy = forget * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, forget, g, o], 1)


def lstm_backward(
    dh: Tensor | None, dc: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, ...]:
    i, forget, g, o = workspace.chunk(4, 1)
    dh = torch.zeros_like(cy) if dh is None else dh
    total = dh * o * (1 - cy.tanh() ** 2) + (0 if dc is None else dc)
    gates = torch.cat(
        [
            total * g * i * (1 - i),
            total * cx * forget * (1 - forget),
            total * i * (1 - g * g),
            dh * cy.tanh() * o * (1 - o),
        ],
        1,
    )
    return gates, total * forget, gates.sum(0)


def gru(x: Tensor, h: Tensor, hx: Tensor, bx: Tensor | None = None, bh: Tensor | None = None) -> tuple[Tensor, ...]:
    x, h = x if bx is None else x + bx, h if bh is None else h + bh
    (xr, xi, xn), (hr, hi, hn) = x.chunk(3, 1), h.chunk(3, 1)
    reset, keep = (xr + hr).sigmoid(), (xi + hi).sigmoid()
    new = (xn + reset * hn).tanh()
    return new + keep * (hx - new), torch.cat([reset, keep, new, hx, hn], 1)


def gru_backward(dy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor, ...]:
    reset, keep, new, hx, hn = workspace.chunk(5, 1)
    inner = dy * (1 - keep) * (1 - new * new)
    first = inner * hn * reset * (1 - reset)
    second = dy * (hx - new) * keep * (1 - keep)
    x, h = torch.cat([first, second, inner], 1), torch.cat([first, second, inner * reset], 1)
    return x, h, dy * keep, x.sum(0), h.sum(0)


KERNELS = {
    "_thnn_fused_lstm_cell": lstm,
    "_thnn_fused_lstm_cell_backward_impl": lstm_backward,
    "_thnn_fused_gru_cell": gru,
    "_thnn_fused_gru_cell_backward": gru_backward,
}


@pytest.fixture(scope="module", autouse=True)
def _on_cpu() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, "CPU")
    yield
    library._destroy()


def calls(op: str, batch: int, width: int) -> list[Any]:
    def state() -> Tensor:
        return f(batch, width)

    if op == "_thnn_fused_lstm_cell_backward_impl":
        return [state(), state(), state(), state(), f(batch, 4 * width), True]
    if op == "_thnn_fused_gru_cell_backward":
        return [state(), f(batch, 5 * width), True]
    gates = (4 if "lstm" in op else 3) * width
    return [f(batch, gates), f(batch, gates), state(), f(gates), f(gates)]


@pytest.mark.parametrize(("batch", "width"), [(5, 3), (2, 6)])
@pytest.mark.parametrize("op", KERNELS)
def test_batch_and_units_of_a_recurrent_cell_may_be_split(op: str, batch: int, width: int) -> None:
    case = instance(f"aten.{op}.default", calls(op, batch, width))
    assert {"b", "h"} <= {s.letter for s in signatures(case.call, 2)}
    assert [line for parts in (2, 3) for line in failures(case, parts)] == []
