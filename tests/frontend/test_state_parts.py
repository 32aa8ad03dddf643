"""Parts of variables, agreement between ranks, and the state that optimizers start from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from actorflow.runtime.parts import assemble, part, sources
from actorflow.script_state.search import find_state
from actorflow.session.agreement import StateReport, check_agreement, differing_variables, report_state
from actorflow.variables.optimizer_state import initial_state
from actorflow_compiler.core.errors import CallError
from actorflow_compiler.core.placement import placement
from actorflow_compiler.core.sbp import parse_nd
from actorflow_compiler.hints.hints import ResolvedHints

LAYOUTS = [
    ([1, 0], "B"), ([0, 1, 2], "S(0)"), ([2, 0, 1], "S(1)"), ([0, 1], "S(0,3)"), ([[0, 1], [2, 3]], "[S(0),B]"),
    ([[0, 1], [2, 3]], "[S(0),S(1)]"), ([[0, 1], [2, 3]], "[S(1),S(1)]"), ([[0, 1], [2, 3]], "[B,S(1)]"),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "text"), LAYOUTS, ids=[f"{text} on {ranks}" for ranks, text in LAYOUTS])
@pytest.mark.parametrize("rank", [0, 1, 7])
def test_the_parts_of_the_sources_make_the_tensor(ranks: Any, text: str, rank: int):
    place, sbp = placement("cpu", ranks), parse_nd(text)
    whole = torch.arange(12 * 7.0).reshape(12, 7)
    parts = {i: part(whole, place, sbp, i) for i in sources(place, sbp, rank)}
    assert torch.equal(assemble(parts, whole.shape, place, sbp), whole)
    if rank in place:
        assert place.index(rank) in parts
    if text == "B":
        assert len(parts) == 1


def test_partial_sums_are_added_up():
    place, sbp = placement("cpu", [[0, 1], [2, 3]]), parse_nd("[P,S(0)]")
    parts = {0: torch.tensor([1.0]), 1: torch.tensor([2.0]), 2: torch.tensor([10.0]), 3: torch.tensor([20.0])}
    assert sources(place, sbp, 0) == (0, 1, 2, 3)
    assert assemble(parts, (2,), place, sbp).tolist() == [11, 22]


def test_a_part_is_a_copy():
    whole = torch.ones(4)
    mine = part(whole, placement("cpu", [0]), parse_nd("B"), 0)
    mine.zero_()
    assert whole.sum() == 4


def make(**layers: nn.Module) -> Any:
    model = nn.ModuleDict(layers)

    def step() -> Any:
        return model

    return report_state(find_state(step), ResolvedHints(), contents=True)


def test_equal_state_is_agreed_on_and_differing_contents_are_listed():
    torch.manual_seed(0)
    one = make(a=nn.Linear(2, 2), b=nn.Linear(2, 2, bias=False))
    torch.manual_seed(0)
    same = make(a=nn.Linear(2, 2), b=nn.Linear(2, 2, bias=False))
    other = StateReport(one.lines, one.checksums | {"model.b.weight": 1})
    check_agreement("job", [one, StateReport.from_bytes(same.to_bytes()), other])
    assert differing_variables([one, same, other]) == {"model.b.weight": [2]}


def test_the_first_difference_between_ranks_is_shown_with_both_sides():
    with pytest.raises(CallError) as caught:
        check_agreement("job", [make(a=nn.Linear(2, 2)), make(a=nn.Linear(2, 2)), make(a=nn.Linear(2, 3))])
    assert "rank 0 has parameter model.a.weight: float32[2, 2]" in str(caught.value)
    assert "rank 2 has parameter model.a.weight: float32[3, 2]" in str(caught.value)
    with pytest.raises(CallError, match=r"rank 1 has module model\.b: Linear"):
        check_agreement("job", [make(a=nn.Linear(2, 2)), make(a=nn.Linear(2, 2), b=nn.Linear(2, 2))])


ADAM = {"step": 0, "exp_avg": 0, "exp_avg_sq": 0}
FIRST: dict[str, tuple[Any, dict[str, float]]] = {
    "SGD with momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {"momentum_buffer": 0}),
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1), {}),
    "Adam": (lambda p: torch.optim.Adam(p, amsgrad=True), {**ADAM, "max_exp_avg_sq": 0}),
    "AdamW": (lambda p: torch.optim.AdamW(p, fused=True), ADAM),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, centered=True), {"step": 0, "square_avg": 0, "grad_avg": 0}),
    "ASGD": (lambda p: torch.optim.ASGD(p, lr=0.25), {"step": 0, "eta": 0.25, "mu": 1, "ax": 0}),
    "Rprop": (lambda p: torch.optim.Rprop(p, lr=0.25), {"step": 0, "prev": 0, "step_size": 0.25}),
    "NAdam": (lambda p: torch.optim.NAdam(p), {**ADAM, "mu_product": 1}),
    "RAdam": (lambda p: torch.optim.RAdam(p), ADAM),
    "Adamax": (lambda p: torch.optim.Adamax(p), {"step": 0, "exp_avg": 0, "exp_inf": 0}),
    "Adadelta": (lambda p: torch.optim.Adadelta(p), {"step": 0, "square_avg": 0, "acc_delta": 0}),
}


@pytest.mark.parametrize("kind", FIRST)
def test_an_optimizers_first_state_is_what_torch_creates(kind: str):
    make, expected = FIRST[kind]
    parameter = nn.Parameter(torch.ones(3, 2))
    optimizer = make([parameter])
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("the user's hooks are not for this"))
    state = initial_state(optimizer, optimizer.param_groups[0], torch.zeros(2, 2))
    created = {k: v for k, v in state.items() if v is not None}
    assert {k: v.flatten()[0].item() for k, v in created.items()} == expected
    assert not optimizer.state
    assert (parameter == 1).all()
