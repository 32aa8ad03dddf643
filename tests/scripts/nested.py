"""Train small models over nested tensors, as jobs and eagerly, and print what differs.

How to run it: ``trainings.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actorflow as flow
from scripts.trainings import apart, in_float64, main, off

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {}, "data": {}, "tensor": {"parallel": "tensor"}, "pipeline": {"micro_batches": 2}, "zero 3": {},
}  # fmt: skip
LENGTHS = (3, 5, 1, 7)
Loss = Callable[[nn.Module, Tensor], Any]
CASES: dict[str, Loss] = {}


def case(loss: Loss) -> Loss:
    """Put what a step gives of (model 6 -> 6, x [4, 7, 6]), tensors, on the list."""
    CASES[loss.__name__] = loss
    return loss


def strided(x: Tensor) -> Tensor:
    """The sequences of a batch."""
    return torch.nested.as_nested_tensor([x[i, :n] for i, n in enumerate(LENGTHS)])


def jagged(x: Tensor) -> Tensor:
    """The same, packed."""
    return torch.nested.as_nested_tensor([x[i, :n] for i, n in enumerate(LENGTHS)], layout=torch.jagged)


def heads(nested: Tensor) -> Tensor:
    """As attention has it."""
    return nested.unflatten(-1, [2, 3]).transpose(1, 2)


@case
def copies_of_a_list(model: nn.Module, x: Tensor) -> Any:
    nested = torch.nested.nested_tensor([x[0, :3], x[1, :5]])
    return torch.nested.to_padded_tensor(model(nested), 0.5)


@case
def jagged_copies(model: nn.Module, x: Tensor) -> Any:
    nested = torch.nested.nested_tensor([x[0, :3], x[1, :5]], layout=torch.jagged)
    return model(nested).to_padded_tensor(0.0, output_size=(2, 6, 6)), nested.offsets()


@case
def copies_take_no_gradient(model: nn.Module, x: Tensor) -> Any:
    copied = torch.nested.nested_tensor([*model(x)[:2]], layout=torch.jagged)
    assert not copied.requires_grad
    return model(copied).values(), copied.values()


@case
def views_of_values(model: nn.Module, x: Tensor) -> Any:
    nested = torch.nested.nested_tensor_from_jagged(model(x.flatten(0, 1)), torch.tensor([0, 4, 4, 28]))
    return nested.relu().values(), *nested.unbind(), nested.detach().sum(1)


OFFSETS = torch.tensor([0, 4, 4, 28])


@case
def over_the_same_offsets(model: nn.Module, x: Tensor) -> Any:
    one, other = (torch.nested.nested_tensor_from_jagged(h.flatten(0, 1), OFFSETS) for h in (model(x), x))
    again = torch.nested.nested_tensor_from_jagged(one.values() * 3, one.offsets())
    assert one.shape[1] == other.shape[1] == again.shape[1]
    return (one * other - again).values(), one.data.values()


@case
def the_longest_and_the_shortest(model: nn.Module, x: Tensor) -> Any:
    nested: Any = jagged(model(x))
    return nested.values() * nested._get_max_seqlen() / nested._get_min_seqlen()


@case
def values_by_lengths(model: nn.Module, x: Tensor) -> Any:
    nested = torch.nested.nested_tensor_from_jagged(model(x.flatten(0, 1)), lengths=torch.tensor([20, 8]))
    return nested.values() * 2, nested.offsets(), nested[1]


@case
def whole_batches(model: nn.Module, x: Tensor) -> Any:
    one, other = (torch.nested.as_nested_tensor(model(x), layout=layout) for layout in (torch.jagged, torch.strided))
    return (one * 2).values(), *other.relu().unbind()


@case
def elements(model: nn.Module, x: Tensor) -> Any:
    h = model(jagged(x))
    both = (h + 1).sigmoid() * (1 - h) / (h.abs() + 2) + F.gelu(2 * h) - F.silu(-h) + h.pow(2) + h**3 + h.exp().log1p()
    both = both.clamp(-3, 3) + torch.where(h > 0, h, 0 * h) + F.softplus(h) + F.elu(h) + h.square().sqrt()
    return both.values(), h.masked_fill(h > 0, 2.0).values(), h.float().to(h.dtype).values(), h.detach().values()


@case
def strided_elements(model: nn.Module, x: Tensor) -> Any:
    h = model(strided(x))
    both = h.relu() * 2 + F.gelu(h) - F.silu(h) * h / 3 + 1
    return both.to_padded_tensor(0.0), h.values(), h.unbind()[1]


@case
def beside_plain_tensors(model: nn.Module, x: Tensor) -> Any:
    h, plain = model(jagged(x)), model(x[:, :1]).detach()
    return (
        (h * plain).values(), (plain[:, :, :1] + h).values(), (h - plain[:1]).values(), (h * plain[0, 0]).values(),
        (h * torch.tensor(2.0)).values(), (h * h.detach().mean(-1, keepdim=True)).values(),
    )  # fmt: skip


@case
def layers(model: nn.Module, x: Tensor) -> Any:
    norm, rms, drop = nn.LayerNorm(6), nn.RMSNorm(6), nn.Dropout(0.5).eval()
    h = drop(norm(model(jagged(x))))
    return (rms(h) @ torch.ones(6, 2)).values(), drop(norm(model(strided(x)))).to_padded_tensor(-1.0)


@case
def embeddings(model: nn.Module, x: Tensor) -> Any:
    words = torch.nested.nested_tensor([torch.arange(3) % 6, torch.arange(5) % 6], layout=torch.jagged)
    return model(F.embedding(words, model[0].weight)).values()  # type: ignore[index]


@case
def reductions(model: nn.Module, x: Tensor) -> Any:
    h = model(jagged(x))
    kept, h = h, h.detach()
    return (
        kept.sum(), kept.mean(), h.sum(-1).values(), h.mean(-1, keepdim=True).values(), h.sum(1), h.mean(1), h.amax(1),
        h.sum(1, keepdim=True), h.max(), h.min(),
    )  # fmt: skip


@case
def a_strided_sum(model: nn.Module, x: Tensor) -> Any:
    h = model(strided(x))
    return h.sum(-1, keepdim=True).to_padded_tensor(0.0), h.softmax(-1).to_padded_tensor(0.0)


@case
def softmaxes(model: nn.Module, x: Tensor) -> Any:
    h = model(jagged(x))
    return h.softmax(-1).values(), F.log_softmax(h.detach(), dim=-1).values(), torch.softmax(h.detach(), 1).values()


@case
def shapes(model: nn.Module, x: Tensor) -> Any:
    h = model(jagged(x))
    batch, length, width = h.shape
    assert batch == len(h) == h.size(0) == 4
    assert (width, h.is_nested, h.dim(), h.layout) == (6, True, 3, torch.jagged)
    by_heads = h.view(batch, length, 2, width // 2)
    again = by_heads.transpose(1, 2).transpose(1, 2).flatten(-2)
    one, other = h.chunk(2, -1)
    return (
        by_heads.values(), again.values(), (one * other).values(), h.reshape(4, -1, 3, 2).values(),
        torch.cat([h, h * 2], -1).values(), h.unsqueeze(-1).squeeze(-1).values(), heads(h).values(),
        *[part.values() for part in h.detach().split([1, 5], -1)], h[-1], *h.unbind(), *(t * 2 for t in h),
    )  # fmt: skip


@case
def strided_shapes(model: nn.Module, x: Tensor) -> Any:
    h = model(strided(x))
    by_heads = h.view(4, -1, 2, 3).transpose(1, 2)
    return (
        by_heads.contiguous().to_padded_tensor(0.0),
        by_heads.transpose(1, 2).contiguous().reshape(4, -1, 6).to_padded_tensor(1.0),
        h[2],
    )


@case
def attention(model: nn.Module, x: Tensor) -> Any:
    h = jagged(x)
    query, key, value = heads(model(h)), heads(model(h * 2)), heads(model(h.relu()))
    out = F.scaled_dot_product_attention(query, key, value)
    return out.transpose(1, 2).flatten(-2).values(), model(out.transpose(1, 2).flatten(-2)).to_padded_tensor(0.0)


@case
def attention_across(model: nn.Module, x: Tensor) -> Any:
    other = torch.nested.as_nested_tensor([x[i, i:] for i in range(4)], layout=torch.jagged)
    query, key, value = heads(model(jagged(x))), heads(model(other)), heads(model(other) * 2)
    return F.scaled_dot_product_attention(query, key, value, scale=0.3).transpose(1, 2).flatten(-2).values()


@case
def changed_in_place(model: nn.Module, x: Tensor) -> Any:
    h = model(jagged(x)).clone()
    h.mul_(2)
    h += 1
    return F.relu(h, inplace=True).values()


@case
def a_loop(model: nn.Module, x: Tensor) -> Any:
    h = model(jagged(x))
    return torch.stack([sequence.mean(0) for sequence in h.unbind()]), torch.cat([t.cumsum(0) for t in h])


@case
def another_ragged_dim(model: nn.Module, x: Tensor) -> Any:
    h = model(x)
    nested = torch.nested.as_nested_tensor([h[0, :, :2], h[1, :, :4]], layout=torch.jagged)
    return nested.values(), nested.tanh().transpose(1, 2).to_padded_tensor(0.0), nested.detach().sum(1).values()


class Trained:
    """A layer, its optimizer and its step: eagerly, or as a job under a layout."""

    def __init__(self, layout: str | None) -> None:
        self.layout = layout
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        if layout == "pipeline":
            flow.place(self.model, stages=2)
        if layout == "zero 3":
            flow.zero(self.model, stage=3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def run(self, loss_of: Loss) -> list[float]:
        """Losses of some steps."""

        def train(x: Tensor) -> Tensor:
            self.optimizer.zero_grad()
            found = loss_of(self.model, x)
            found = found if isinstance(found, tuple) else (found,)
            loss = torch.stack([(t * weights(t)).sum() / 10 for t in found]).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            return loss.detach()

        step = train if self.layout is None else flow.global_function(**LAYOUTS[self.layout])(train)
        torch.manual_seed(1)
        return [float(step(torch.randn(4, 7, 6))) for _ in range(3)]


def weights(t: Tensor) -> Tensor:
    """Another one for each element."""
    return torch.linspace(0.5, 1.5, t.numel()).view(t.shape)


def difference(loss: Loss, layout: str) -> float:
    """The largest difference between losses and parameters of a job and eagerly."""
    with in_float64():
        eager, planned = Trained(None), Trained(layout)
        wanted, found = torch.tensor(eager.run(loss)), torch.tensor(planned.run(loss))
        assert wanted.isfinite().all(), wanted
        return apart([wanted, *eager.model.parameters()], [found, *planned.model.parameters()])


def cases(layout: str) -> list[str]:
    """Those for a layout: all."""
    return [*CASES]


if __name__ == "__main__":
    main(cases, lambda layout, name: off(difference(CASES[name], layout)))
