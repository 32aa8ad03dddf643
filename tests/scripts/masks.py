"""Train small models whose losses select by masks, as jobs and eagerly, and print what differs.

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

CALLS = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {}, "micro-batches": {"micro_batches": 2}, "tensor": {"parallel": "tensor"},
    "pipeline": {"micro_batches": 2}, "zero 3": {},
}  # fmt: skip
Loss = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]
CASES: dict[str, Loss] = {}


def case(loss: Loss) -> Loss:
    """Put a loss of (model, x [8, 5, 6], classes [8, 5] of which those below 0 do not count, targets) on the list."""
    CASES[loss.__name__] = loss
    return loss


@case
def masked_language_model(model: nn.Module, x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
    logits, mask = model(x), y >= 0
    return F.cross_entropy(logits[mask], y[mask])


@case
def two_masks_that_are_equal(model: nn.Module, x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
    labels = y.clone()
    labels[y == 2] = -1
    return F.cross_entropy(model(x)[labels >= 0], labels[labels >= 0], label_smoothing=0.1)


@case
def a_mean(model: nn.Module, x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
    return model(x)[y >= 0].mean()


@case
def squares_of_what_is_off(model: nn.Module, x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
    return (model(x) - wanted)[wanted > 0].pow(2).mean()


@case
def mse(model: nn.Module, x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
    mask = wanted.abs() < 1
    return F.mse_loss(model(x)[mask], wanted[mask])


@case
def other_losses(model: nn.Module, x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
    mask = y >= 0
    out, target = model(x)[mask], wanted[mask]
    share = (target > 0).to(out.dtype)
    return (
        F.l1_loss(out, target) + F.smooth_l1_loss(out, target, beta=0.3) + F.huber_loss(out, target, delta=0.4)
        + F.binary_cross_entropy_with_logits(out, share, pos_weight=torch.tensor([1.0, 2, 3, 4]))
        + F.binary_cross_entropy(out.sigmoid(), share, reduction="sum") / 100
        + F.kl_div(out.log_softmax(-1), target.softmax(-1), reduction="batchmean")
        + F.poisson_nll_loss(out, share) + F.soft_margin_loss(out, share * 2 - 1)
        + F.cosine_embedding_loss(out, target, share[:, 0] * 2 - 1, margin=0.1)
        + F.triplet_margin_loss(out, target, target * 2) + F.multi_margin_loss(out, y[mask])
        + F.multilabel_soft_margin_loss(out, share) + F.margin_ranking_loss(out[:, 0], out[:, 1], share[:, 0] * 2 - 1)
        + (1 - F.cosine_similarity(out, target)).mean() + F.pairwise_distance(out, target).mean()
        + F.cross_entropy(out, target.softmax(-1)) + F.nll_loss(out.log_softmax(1), y[mask], 1 + torch.arange(4.0))
        + F.cross_entropy(out, y[mask], reduction="none").square().mean()
    )  # fmt: skip


@case
def rarer_losses(model: nn.Module, x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
    mask, classes = y >= 0, torch.tensor([2, 0, -1, 1]).expand(8, 5, 4)
    out, target = model(x)[mask], wanted[mask]
    return (
        F.gaussian_nll_loss(out, target, target.square() + 0.1) + F.multilabel_margin_loss(out, classes[mask])
        + F.gaussian_nll_loss(out, target, out.exp()[:, :1], full=True, reduction="sum") / 100
        + F.prelu(out, torch.tensor([0.1, 0.2, 0.3, 0.4])).square().mean() + nn.PReLU()(target).mean() * out.mean()
    )  # fmt: skip


@case
def a_sum_by_a_count(model: nn.Module, x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
    mask = y > 0
    loss = F.cross_entropy(model(x).flatten(0, 1), y.clamp(min=0).flatten(), reduction="none").view(y.shape)
    return loss[mask].sum() / mask.sum()


@case
def counts_of_the_selection(model: nn.Module, x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
    rows = model(x)[y > 0]
    n, width = rows.shape
    means = rows.square().sum() / rows.shape[0] + rows.sum() / rows.numel()
    return means + rows.abs().sum() / (n * width + rows.size(0)) + torch.zeros(n, 1).add(rows).mean()


@case
def masked_select(model: nn.Module, x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
    out = model(x)
    return torch.masked_select(out, (y > 0)[..., None]).square().mean() + out.masked_select(wanted > 0).sum()


@case
def indices(model: nn.Module, x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
    out = model(x)
    rows, columns = (y > 0).nonzero(as_tuple=True)
    found = torch.where(y > 1)
    table = torch.nonzero(y.flatten() > 0).squeeze(1)
    return (
        out[rows, columns].square().mean() + out[found].sum() + out[:, 0][rows].mean()
        + out.flatten(0, 1)[table].abs().mean() + F.cross_entropy(out[rows, columns], y[rows, columns])
        + out.flatten(0, 1).index_select(0, table).square().sum()
        + out[:, 0][torch.where(y[:, 0] > 0)[0]].mean() + wanted[rows].mean() * out.mean()
    )  # fmt: skip


@case
def layers_over_rows(model: nn.Module, x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
    rows = model[0](x)[y >= 0]
    rows = F.gelu(F.layer_norm(rows, (8,)) @ model[0].weight.new_ones(8, 8).tril()).relu()
    return F.cross_entropy(model[2](model[1](rows)), y[y >= 0])


@case
def two_selections_behind_each_other(model: nn.Module, x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
    out = model(x)
    both = torch.cat([out[y > 1], out[y == 0] * 2, out[:, 0]])
    labels = torch.cat([y[y > 1], y[y == 0], y[:, 0].clamp(min=0)])
    return F.cross_entropy(both, labels) + both.std() + torch.cat([out[y > 1], wanted[y > 1]], -1).var(0).sum()


@case
def pairs_of_a_batch(model: nn.Module, x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
    z = F.normalize(model(x)[:, 0], dim=-1)
    alike = y[:, None, 0] == y[None, :, 0]
    i, j = torch.where(alike)
    apart = (z @ z.t())[~alike]
    return (z[i] - z[j]).pow(2).sum(-1).mean() + F.relu(apart - 0.2).mean()


@case
def what_is_not_finite_elsewhere(model: nn.Module, x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
    out = model(x)
    mask = out > 0.05
    gap = torch.where(wanted > 1, float("nan"), wanted)
    known = ~gap.isnan()
    return (
        out[mask].log().mean() + out[mask].sqrt().sum() + (1 / out[mask]).mean() + (out[mask] ** -0.5).mean()
        + F.mse_loss(out[known], gap[known]) + model[0].weight.mean() / out[mask].pow(1.5).sum()
        + (out[mask] - 0.05).log1p().mean() + torch.acos(out[mask].clamp(max=0.9)).mean()
    )  # fmt: skip


@case
def statistics(model: nn.Module, x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
    rows = model(x)[y > 0]
    return (
        rows.std() + rows.var(0, unbiased=False).sum() + rows.max() + rows.amin(0).sum() + rows.logsumexp(0).sum()
        + rows.norm() + torch.linalg.vector_norm(rows, dim=0).sum() + rows.mean(0).square().sum() + rows.sum(1).mean()
        + torch.linalg.norm(rows, dim=1).mean() + rows.softmax(0).square().sum() + rows.cumsum(0).mean()
        + rows.max(1).values.mean() + rows.argmax(-1).double().mean() + (rows - rows.mean(0)).abs().mean()
        + (rows > 0).sum() * rows.mean() + (rows.t() @ rows).square().mean()
        + torch.einsum("nd,ne->de", rows, rows).sum()
        + torch.std_mean(rows, 0)[0].sum() + rows.prod(1).mean() + rows.norm(dim=1).mean()
    )  # fmt: skip


@case
def accuracy_beside(model: nn.Module, x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
    out, mask = model(x), y >= 0
    right = (out[mask].argmax(-1) == y[mask]).double().mean()
    return F.cross_entropy(out[mask], y[mask]) + right * out.sum() * 0.01


@case
def what_was_chosen(model: nn.Module, x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
    mask = y >= 0
    log_p = model(x).log_softmax(-1)[mask]
    taken = log_p.gather(1, y[mask].unsqueeze(1)).squeeze(1)
    other = model(x)[:, 0][y[:, 0] >= 0, y[:, 0][y[:, 0] >= 0]]
    ratio = (taken - taken.detach() + 0.1).exp()
    advantage = wanted[mask][:, 0]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    return -torch.min(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage).mean() + other.mean()


@case
def written_back(model: nn.Module, x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
    out, mask = model(x), y > 0
    filled = torch.zeros_like(out)
    filled[mask] = model[2](model[1](model[0](x[mask])))
    filled[~mask] += 0.5
    filled[y == 0] = 0
    filled[y == 3] *= 2.0
    rows, columns = torch.where(y == 2)
    filled[rows, columns] = out[rows, columns] * 3
    return (filled * wanted).sum()


@case
def columns_of_rows_that_are_assigned(model: nn.Module, x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
    mask = y > 0
    rows = model(x)[mask]
    knots = F.pad(rows.cumsum(-1), (1, 0))
    knots[..., 0] = -1.0
    knots[..., -1] += 0.5
    new = rows.clone()
    new[:, 0] = rows[:, 1].sigmoid()
    new[:, 1:3] = rows[:, 2:] * wanted[mask][:, :1]
    new[:, 2:] = model[2].bias[:2]
    new[:, 3:] = model[2].weight[:1, :1]
    pairs = torch.stack([rows, new], 1)
    pairs[:, 1] = rows
    pairs[:, :, 2] = new[:, :2]
    return (knots[:, 1:] - knots[:, :-1]).tanh().sum() + (new * pairs[:, 0]).mean() + pairs.square().mean()


@case
def a_learnt_token(model: nn.Module, x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
    token = model[2].bias
    hidden = model(x)
    hidden[y == 2] = token
    hidden[y == 3, 0] = token.sum()
    hidden[x[..., 0] > 1, 1:3] = token[2:]
    hidden[:, x[0, :, 1] > 0] = token * 2
    turned = hidden.transpose(0, 1).contiguous()
    turned[:, y[:, 0] == 1] = model[2].weight[:, :1].view(1, 4).expand(5, 1, 4)
    turned[:, :, :2][y.T == 0] = token[:2]
    return (turned.transpose(0, 1) * wanted).sum()


@case
def messages_along_edges(model: nn.Module, x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
    h = model(x)[:, 0]
    edges = torch.stack([torch.arange(8).repeat(5), (torch.arange(40) * 7) % 8])
    kept = edges[:, y.flatten() >= 0]
    source, target = kept
    summed = torch.zeros_like(h).index_add(0, target, h[source])
    degree = torch.zeros(8).index_add_(0, target, torch.ones_like(target, dtype=h.dtype))
    return (summed / degree.clamp(min=1)[:, None]).square().mean() + (h[source] * h[target]).sum(-1).mean()


@case
def selected_again(model: nn.Module, x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
    mask = y >= 0
    rows, labels = model(x)[mask], y[mask]
    hard = F.cross_entropy(rows, labels, reduction="none")
    sure = rows.amax(-1) > 0
    return hard[hard > 1.2].mean() + rows[sure].square().mean() + rows[rows > 0].mean() + hard[labels == 1].sum()


@case
def by_columns(model: nn.Module, x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
    out = model(x)
    return (
        out[:, y[0] > 0].square().mean() + out[:, :, wanted[0, 0] > 0].sum(-1).mean() + out[0, y[0] > 0].mean()
        + out[y > 0, 1:].mean() + out[y > 0, 0].sum() + out[..., wanted[0, 0] > 0].mean() + out[y > 0, :].mean()
        + out[(y > 0), :2].view(-1).mean() + out[y > 0].flatten().std() + out[y > 0].reshape(-1, 2, 2).amax(-1).mean()
        + out[y > 0].view(-1, 2).norm(dim=1).mean() + out[y > 0].t().mean(1).square().sum()
    )  # fmt: skip


@case
def a_mask_that_is_constant(model: nn.Module, x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
    out = model(x)
    s = out[:, 0] @ out[:, 0].t()
    apart = ~torch.eye(8, dtype=torch.bool)
    upper = torch.ones_like(s).triu(1).bool()
    few = out[:, :, torch.tensor([True, False, True, True])]
    return (
        s[apart].view(8, 7).logsumexp(1).mean() + s[upper].square().mean() + few.topk(2).values.mean()
        + out[:, [True, False, True, False, True]].sort(1).values[:, 0].mean() + s[apart].median()
    )  # fmt: skip


@case
def nothing_is_selected(model: nn.Module, x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
    rows = model(x)[y > 7]
    return rows.sum() + rows.square().sum() / (y > 7).sum().clamp(min=1) + model(x).mean()


@case
def in_place(model: nn.Module, x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
    rows = model(x)[y > 0]
    side = rows[:, :2]
    rows.mul_(2).add_(1)
    rows += 0.5
    rows[:, 3] = 0
    rows[rows > 1.2] = 1
    rows.abs_().add_(0.1).log_()
    return side.square().mean() + rows.mean() + F.relu(rows - 1, inplace=True).mean()


class Trained:
    """A model, its optimizer and a job; eagerly, with a function in place of the job."""

    def __init__(self, layout: str | None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.layout = layout
        if layout == "pipeline":
            flow.place(self.model, stages=2)
        elif layout == "zero 3":
            flow.zero(self.model, stage=3)

    def run(self, loss_of: Loss) -> list[float]:
        """Losses of a few calls."""

        def train(x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
            self.optimizer.zero_grad()
            loss = loss_of(self.model, x, y, wanted)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            return loss.detach()

        step = train if self.layout is None else flow.global_function(**LAYOUTS[self.layout])(train)
        return [float(step(*batch)) for batch in batches()]


def batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of which the first half of a batch counts for more than the second."""
    torch.manual_seed(1)
    found = []
    for _ in range(CALLS):
        y = torch.randint(-1, 4, (8, 5))
        y[5:, 1:] = -1
        y[0] = torch.tensor([2, 1, 0, 3, 2])
        found.append((torch.randn(8, 5, 6), y, torch.randn(8, 5, 4)))
    return found


def difference(loss: Loss, layout: str) -> float:
    """The largest difference between a loss in a job and eagerly, in losses and parameters."""
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
