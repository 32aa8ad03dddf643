"""Local ops whose operands and arguments do not fit each other are found before they run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import actorflow as flow
from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.ops import Arg, Meta
from actorflow_compiler.signatures import OpCall, signatures
from actorflow_compiler.signatures.local_mismatch import find_mismatch
from actorflow_compiler.signatures.localise import local_call
from models import Case
from signature_checks import instance
from signature_samples import calls
from test_memory_layouts import ADAMW, row_loss, rows
from trained import Layout, plan_of

GROUP_NORM = "aten.native_group_norm_backward.default"


def sample(op: str) -> OpCall:
    args, kwargs = calls(op)[0]
    return instance(op, args, kwargs).call


def argument_changed(call: OpCall, at: int, value: Arg) -> OpCall:
    return replace(call, args=(*call.args[:at], value, *call.args[at + 1 :]))


def operand_changed(call: OpCall, at: int, *shape: int) -> OpCall:
    return replace(call, ins=(*call.ins[:at], Meta(shape, call.ins[at].dtype), *call.ins[at + 1 :]))


@pytest.mark.parametrize("op", [GROUP_NORM, "aten.native_layer_norm_backward.default", "aten.unfold_backward.default"])
def test_what_signatures_make_fits(op: str) -> None:
    call = sample(op)
    for signature in signatures(call, 2):
        assert find_mismatch(call, local_call(call, signature, 2, 0)) is None


@pytest.mark.parametrize("at", [5, 6, 7, 8])
def test_a_group_norm_whose_numbers_are_not_those_of_its_operands_is_found(at: int) -> None:
    call = sample(GROUP_NORM)
    found = find_mismatch(call, argument_changed(call, at, 2 * call.args[at]))
    assert found is not None
    assert GROUP_NORM in found


@pytest.mark.parametrize("at", range(5))
def test_a_group_norm_of_operands_of_different_parts_is_found(at: int) -> None:
    call = sample(GROUP_NORM)
    first, *rest = call.ins[at].shape
    assert find_mismatch(call, operand_changed(call, at, 2 * first, *rest)) is not None


def test_sizes_that_are_those_of_the_whole_are_found() -> None:
    call = sample("aten.embedding_dense_backward.default")
    whole = argument_changed(call, 2, 7)
    assert find_mismatch(replace(whole, outs=call.outs), whole) is None  # nothing is known of a wrong whole
    assert find_mismatch(call, argument_changed(call, 2, call.args[2] + 1)) is not None


@torch.library.custom_op("test_local_mismatch::rows", mutates_args=())
def take_rows(x: Tensor, count: int) -> Tensor:
    """The first rows."""
    return x[:count].clone()


@take_rows.register_fake
def _(x: Tensor, count: int) -> Tensor:
    return x.new_empty(count, *x.shape[1:])


class Taking(nn.Module):
    """An op that is told the size of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        out: Tensor = self.head(h + torch.ops.test_local_mismatch.rows(h.detach(), h.shape[0]))
        return out


@pytest.mark.parametrize("layout", [Layout(2), Layout(1, 2)], ids=["data 2", "two micro-batches"])
def test_an_op_that_a_wrong_signature_cuts_is_refused_with_its_line(layout: Layout) -> None:
    flow.register_signature("test_local_mismatch::rows", ".,_->.", verify=False)
    case = Case(lambda: Taking().double(), ADAMW, rows, ("first", "head"), loss=row_loss)
    with pytest.raises(PlanError, match=r"(?s)test_local_mismatch.py:\d+.*mismatch.rows.*register_signature"):
        plan_of(case, layout, 4)
