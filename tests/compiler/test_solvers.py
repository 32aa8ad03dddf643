"""Systems of equations are solved on several devices as on one, whatever torch takes a part's right sides for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from models import Batch, Case
from trained import Layout, train_planned
from trained import train_eagerly as eagerly

LAYOUTS = [Layout(2), Layout(3), Layout(2, 2)]


class Solver(nn.Module):
    """Solves systems of equations for right sides of some shape."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.sides = nn.Parameter(torch.randn(*shape, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        systems = x + 3 * torch.eye(x.shape[-1], dtype=x.dtype)
        found: Tensor = torch.linalg.solve(systems, self.sides)
        return found


def batches(sizes: list[int], *shape: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.rand(n, *shape, dtype=torch.float64, generator=generator),) for n in sizes]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["2", "3", "2, micro-batches"])
@pytest.mark.parametrize(
    ("sides", "systems"), [((2, 2), (2, 2)), ((2,), (2, 2)), ((4, 2, 2), (4, 2, 2)), ((1, 2, 3), (2, 2))]
)
def test_right_sides_are_those_of_all_systems_on_every_device(
    sides: tuple[int, ...], systems: tuple[int, ...], layout: Layout
) -> None:
    case = Case(
        lambda: Solver(*sides), lambda m: SGD(m.parameters(), lr=0.1), lambda n: batches([*n], *systems), ("", ""),
        loss=lambda m, x: m(x).square().mean(), names=("x",),
    )  # fmt: skip
    size = 4 if layout.micro_batches > 1 else 5
    losses, state, _ = train_planned(case, layout, [size] * 2)
    expected, reference = eagerly(case, [size] * 2, 1)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(state, reference)
