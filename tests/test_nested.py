"""Nested tensors with constant lengths train as eagerly under every layout; what cannot be is refused with its line."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actorflow as flow
from actorflow_compiler.core.errors import CaptureError
from scripts.nested import CASES, cases, difference, jagged, strided
from two_ranks import right_on_two_ranks

SCRIPT = Path(__file__).parent / "scripts" / "nested.py"


@pytest.mark.matrix(every=12)
@pytest.mark.parametrize("name", CASES)
def test_a_loss_over_nested_tensors_trains_as_eagerly(name: str) -> None:
    assert difference(CASES[name], "one") < 1e-9


def test_two_ranks_do_so_too(how: str) -> None:
    right_on_two_ranks(SCRIPT, cases, ["data", "tensor", "pipeline", "zero 3"], how)


def predicts(function: Callable[..., Any]) -> Callable[..., Any]:
    found: Callable[..., Any] = flow.global_function(type="predict")(function)
    return found


def test_other_offsets_of_the_script_are_another_plan() -> None:
    offsets = torch.tensor([0, 2, 7])

    def means(x: Tensor) -> Tensor:
        return torch.stack([t.mean(0) for t in torch.nested.nested_tensor_from_jagged(x, offsets).unbind()])

    job, x = predicts(means), torch.randn(7, 3, dtype=torch.float64)
    for end in (2, 5):
        offsets[1] = end
        torch.testing.assert_close(job(x), torch.stack([x[:end].mean(0), x[end:].mean(0)]))


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "offsets from values": (
        lambda x: torch.nested.nested_tensor_from_jagged(x[0], (x[0, :3, 0] > 0).cumsum(0)).values(),
        "lengths that are constants",
    ),
    "two ragged dims": (
        lambda x: torch.nested.as_nested_tensor([x[0, :2, :3], x[0, :3, :2]]).values(), "which differ in 2 dims",
    ),
    "holes": (
        lambda x: torch.nested.narrow(x, 1, torch.tensor([0, 1, 0, 0]), torch.tensor([3, 2, 1, 1]), layout=torch.jagged)
        .values(), "with holes here",
    ),
    "a result": (jagged, "return is called with a nested tensor.*3, 5, 1, 7 long.*a result is a plain tensor"),
    "an op that is not known": (lambda x: jagged(x).cumsum(1).values(), "cumsum is called with a nested.*unbind"),
    "a mask in attention": (
        lambda x: F.scaled_dot_product_attention(*[jagged(x)] * 3, dropout_p=0.5).values(), "with dropout_p",
    ),
    "tensors of other lengths": (
        lambda x: (jagged(x) + jagged(x)).values(), "PyTorch takes their lengths for different ones",
    ),
    "a plain tensor of all places": (lambda x: (jagged(x) * x).values(), "a size of its own in the ragged dim"),
    "arithmetic with the ragged size": (lambda x: jagged(x).values() / jagged(x).shape[1], "which is no number"),
    "along the batch": (lambda x: jagged(x).sum(0), "sum along dim 0"),
    "a view that joins": (lambda x: jagged(x).view(4, -1).values(), "joins the ragged dim|no place of its own"),
    "attention of modules": (
        lambda x: nn.MultiheadAttention(6, 2, batch_first=True, dtype=x.dtype)(*[jagged(x)] * 3)[0].values(), "nested",
    ),
    "two of them in a product": (
        lambda x: (strided(x) @ strided(x).transpose(1, 2)).to_padded_tensor(0.0), "nt @ weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_plan_cannot_do_is_refused_with_its_line(name: str) -> None:
    function, told = REFUSED[name]
    with pytest.raises(CaptureError, match=rf"(?s)nested\.py:\d+: .*{told}"):
        predicts(lambda x: function(x))(torch.randn(4, 7, 6, dtype=torch.float64))


def test_a_softmax_whose_gradient_is_wrong_in_pytorch_is_refused() -> None:
    with pytest.raises(CaptureError, match="PyTorch's gradient of it is wrong"):
        difference(lambda model, x: model(jagged(x)).softmax(1).values(), "one")


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("how", ["aligned", "not aligned", "numbers", "mask_check=False", "with gradients"])
def test_an_encoder_gives_zeros_in_padded_places_where_pytorch_does(norm: bool, how: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(
        layer, 2, nn.LayerNorm(8, dtype=torch.float64) if norm else None, mask_check=how != "mask_check=False"
    ).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    eager = copy.deepcopy(model)
    x, padding = torch.randn(3, 5, 8, dtype=torch.float64), torch.arange(5) >= torch.tensor([3, 5, 2])[:, None]
    if how == "not aligned":
        padding = padding.flip(1)
    if how == "numbers":
        padding = torch.zeros(3, 5, dtype=torch.float64).masked_fill(padding, float("-inf"))
    kind = "train" if how == "with gradients" else "predict"
    job = flow.global_function(type=kind)(lambda x, padding: model(x, src_key_padding_mask=padding))
    with torch.set_grad_enabled(kind == "train"):
        wanted = eager(x, src_key_padding_mask=padding)
    torch.testing.assert_close(job(x, padding), wanted, rtol=1e-9, atol=1e-9)
    zeros = not norm and how in ("aligned", "numbers", "mask_check=False")
    assert bool((wanted[0, 3:] == 0).all()) == zeros
