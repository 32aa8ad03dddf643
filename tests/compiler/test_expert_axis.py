"""Plans whose experts are split over devices: what lies where, what moves, and that they train as one device does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from actorflow_compiler.core.errors import LayoutError, PlanError
from actorflow_compiler.core.sbp import B, Split
from actorflow_compiler.hints.goal import goal_of
from actorflow_compiler.hints.hints import distribute, zero
from actorflow_compiler.infer import layout_assignment
from actorflow_compiler.infer.expert_axis import ExpertProducts
from actorflow_compiler.plan.plan import Plan
from comms import communications
from models import CASES, Batch, Case
from trained import Layout, differences, in_float64, plan_of, train_eagerly, train_planned

EXPERTS, CHOICES, WIDTH, INNER, SIZE = 4, 2, 8, 32, 12


class Routed(nn.Module):
    """Each row goes to two of four experts: sorted by expert, as libraries do it, for torch's grouped product."""

    def __init__(self, looked_at: bool = False) -> None:
        super().__init__()
        self.first, self.router, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, 1)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * INNER) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * INNER) / 4)
        self.looked_at = looked_at

    def bias_of(self, number: Tensor) -> Tensor | float:
        return self.bias[number] if self.looked_at else 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        weights, chosen = self.router(x).softmax(-1).topk(CHOICES)
        number, places = torch.sort(chosen.view(-1))
        ends = torch.histc(number.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0, dtype=torch.int32)
        rows = x[places // CHOICES].bfloat16()  # as torch's grouped product wants them
        gate, up = (F.grouped_mm(rows, self.up.bfloat16(), offs=ends) + self.bias_of(number)).chunk(2, -1)
        h = F.silu(gate) * up
        y = F.grouped_mm(h.bfloat16(), self.down.bfloat16(), offs=ends).float()
        inverse = torch.empty_like(places)
        inverse[places] = torch.arange(len(places))
        out: Tensor = self.last(x + (y[inverse].view(*chosen.shape, WIDTH) * weights[..., None]).sum(1))
        return out + h[inverse].float().square().mean() if self.looked_at else out


class Dense(nn.Module):
    """Every expert sees every row, and the router weighs what they say."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, 1)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        h = torch.bmm(x.expand(EXPERTS, -1, -1), self.up).relu()
        y = torch.bmm(h, self.down.transpose(1, 2))
        out: Tensor = self.last(x + torch.einsum("te,etd->td", self.router(x).softmax(-1), y))
        return out


class Separate(nn.Module):
    """Experts that are modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        said = torch.cat([expert(x) for expert in self.experts], -1)
        return (self.router(x).softmax(-1) * said).sum(-1, keepdim=True)


def _rows(sizes: Sequence[int]) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(n, WIDTH, generator=generator), torch.randn(n, 1, generator=generator)) for n in sizes]


def case(make: Callable[[], nn.Module]) -> Case:
    return Case(
        make, lambda m: AdamW(m.parameters(), lr=1e-2, eps=1e-3), _rows, ("", ""),
        loss=lambda m, x, y: F.mse_loss(m(x), y),
    )  # fmt: skip


IN_BFLOAT16 = torch.finfo(torch.bfloat16).eps / 2  # of one rounding; sums of parts are rounded before they are added
MODELS: dict[str, tuple[Case, float]] = {  # with the bound of ``differences``
    "routed": (case(Routed), IN_BFLOAT16),  # torch's grouped product is in bfloat16; transformers' below are exact
    "biased, hidden rows looked at": (case(functools.partial(Routed, True)), IN_BFLOAT16),
    "dense": (in_float64(case(Dense)), 1e-9),
}
LAYOUTS: dict[str, Layout] = {
    "2": Layout(2, goal=goal_of("expert", None)),
    "3, uneven": Layout(3, goal=goal_of("expert", None)),
    "data 2 × 2": Layout(4, goal=goal_of({"data": 2, "expert": 2}, None)),
    "2 × tensor 2": Layout(4, goal=goal_of({"expert": 2, "tensor": 2}, None)),
    "2, micro-batches": Layout(2, 3, goal=goal_of("expert", None)),
    "2, ZeRO 3": Layout(2, goal=goal_of("expert", None), prepare=functools.partial(zero, stage=3)),
}


def check(case: Case, layout: Layout, bound: float, size: int = SIZE) -> Plan:
    """Train two steps; compare with eager training."""
    losses, state, plan = train_planned(case, layout, [size] * 2)
    expected, reference = train_eagerly(case, [size] * 2, 1)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=max(1e-5, bound / 4), atol=0)
    worst = max(differences(state, reference).items(), key=lambda item: item[1])
    assert worst[1] <= bound, worst
    return plan


def planned(case: Case, layout: Layout) -> Plan:
    return plan_of(case, layout, SIZE)[0]


def split_dims(plan: Plan) -> dict[str, Any]:
    return {v.name: v.sbp for v in plan.variables if v.kind == "parameter" and any(s != B for s in v.sbp)}


# ---- equal to eager training


@pytest.mark.matrix(every=6)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_experts_on_several_devices_train_as_on_one(name: str, layout: str) -> None:
    case, bound = MODELS[name]
    assert {"model.up", "model.down"} <= split_dims(check(case, LAYOUTS[layout], bound)).keys()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["2", "data 2 × 2", "2 × tensor 2", "2, micro-batches", "2, ZeRO 3"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "deepseek-v3", "gpt-oss"])
def test_mixtures_of_transformers_train_with_their_experts_split(name: str, layout: str) -> None:
    from hf import FURTHER, PROMISED, exact  # which imports transformers

    case, bound = exact(name, {**PROMISED, **FURTHER}[name](0.0))
    laid = replace(LAYOUTS[layout], micro_batches=2) if LAYOUTS[layout].micro_batches > 1 else LAYOUTS[layout]
    plan = check(case, laid, bound, 8)
    assert any("experts" in name for name in split_dims(plan))


# ---- what lies where, and what moves


def test_nothing_is_exchanged_between_the_products_of_an_expert() -> None:
    plan = planned(MODELS["routed"][0], Layout(2, goal=goal_of("expert", None)))
    assert split_dims(plan) == {"model.up": (Split(0),), "model.down": (Split(0),)}
    hidden = SIZE * CHOICES * 2 * INNER * 2  # bytes of what the first product gives
    assert not [c for c in communications(plan) if c.nbytes >= hidden]
    assert plan.summary.redundant_flops == 0
    looked_at = planned(MODELS["biased, hidden rows looked at"][0], Layout(2, goal=goal_of("expert", None)))
    assert [c for c in communications(looked_at) if c.nbytes >= hidden]


def test_a_plan_whose_rows_between_products_are_read_by_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The verifier does not rely on what the pass has found."""
    found = layout_assignment.expert_products

    def careless(graph: Any) -> ExpertProducts:
        products = found(graph)
        makers = {n.outs[0] for n in graph.nodes if n.op == "actorflow.grouped_mm"}
        return replace(products, inside=products.inside | (makers & products.grouped))

    monkeypatch.setattr(layout_assignment, "expert_products", careless)
    with pytest.raises(PlanError, match="reads rows of experts that other devices have"):
        planned(MODELS["biased, hidden rows looked at"][0], Layout(2, goal=goal_of("expert", None)))


@pytest.mark.slow
def test_hints_of_users_hold_beside_it() -> None:
    layout = Layout(
        4,
        goal=goal_of({"expert": 2, "data": 2}, None),
        prepare=lambda m: distribute(m, {"up": (None, Split(2)), "first.weight": Split(0)}),
    )
    lies = split_dims(planned(MODELS["dense"][0], layout))
    assert lies["model.up"] == (Split(0), Split(2))
    assert lies["model.first.weight"] == (Split(0), B)


# ---- what is refused


@pytest.mark.parametrize("make", [CASES["mlp"], case(Separate)], ids=["no experts", "experts that are modules"])
def test_a_model_without_stacked_experts_is_refused_with_what_was_looked_for(make: Case) -> None:
    with pytest.raises(LayoutError, match=r'"expert" was asked for; no parameter with experts .* 3 dims, one matrix'):
        planned(make, Layout(2, goal=goal_of("expert", None)))


@pytest.mark.slow
def test_fewer_experts_than_devices_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"over 5 devices; model\.up of shape \(4, 8, 32\) has 4 experts"):
        planned(MODELS["dense"][0], Layout(5, goal=goal_of("expert", None)))
