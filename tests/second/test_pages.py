"""Programs as OneFlow's cookbook and tutorial pages write them, with the import renamed: their numbers are torch's.

Of each, what one device comes to is written here in plain torch; the GPT is in ``seeds/test_gpt_graph.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import warm
from second.launching import command, run

SCRIPT = Path(__file__).with_name("scripts") / "pages.py"
FEW = ("global_tensor", "hybrid", "sharded_files", "strategies")
OTHERS = ("amp", "data_parallel", "pipeline", "zero")


def told(world: int, pages: tuple[str, ...], folder: Path) -> list[dict[str, Any]]:
    """What the programs told on each rank of a run."""
    done = run(command("launch", str(SCRIPT), str(folder), *pages, processes=world, python=warm.python()), folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def few(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What those that are run always told."""
    return told(request.param, FEW, tmp_path_factory.mktemp("few"))


@pytest.fixture(scope="module", params=[pytest.param(n, marks=pytest.mark.slow) for n in (2, 4)])
def others(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the others told."""
    return told(request.param, OTHERS, tmp_path_factory.mktemp("others"))


def test_every_page_is_run() -> None:
    assert sorted(FEW + OTHERS) == sorted(p.stem.removeprefix("page_") for p in SCRIPT.parent.glob("page_*.py"))


def equal(found: Any, expected: Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), expected.detach(), rtol=1e-5, atol=1e-5)


def test_global_tensors_are_made_and_converted(few: list[dict[str, Any]]) -> None:
    world = len(few)
    for rank, one in enumerate([ran["global_tensor"] for ran in few]):
        part, whole = map(torch.tensor, one["parts"])
        assert torch.equal(part, whole.chunk(world)[rank])
        assert one["kinds"] == [True, False, False, True]
        assert one["shapes"] == [[2 * world, 5], [2 * world, 5], [2 * world, 5], [world, 2]]
        equal(one["whole"], torch.arange(float(world)).repeat_interleave(2)[:, None].expand(-1, 5))
        sbp, x, w, y = one["product"]
        assert sbp == "(flow.sbp.split(0),)"
        equal(y, torch.tensor(x) @ torch.tensor(w))


def test_a_product_has_one_value_by_each_strategy(few: list[dict[str, Any]]) -> None:
    for one in [ran["strategies"] for ran in few]:
        columns = "split(1)" if len(few) == 4 else "broadcast"  # over an axis of 2 devices, or of 1
        twice = f"(flow.sbp.{columns}, flow.sbp.split(0))"
        lies = {"data": "(flow.sbp.split(0),)", "model": "(flow.sbp.split(1),)", "two": twice}
        for name in ("data", "model", "two"):
            x, w, out, sbp = one[name]
            equal(out, torch.tensor(x) @ torch.tensor(w))
            assert sbp == lies[name]
        x, first, second, out = map(torch.tensor, one["stages"])
        equal(out.tolist(), x @ first @ second)


def test_stages_of_data_and_model_parallelism_train_as_one_device_does(few: list[dict[str, Any]]) -> None:
    for one in [ran["hybrid"] for ran in few]:
        x = torch.tensor(one["x"])
        weights = [torch.tensor(w, requires_grad=True) for w in one["weights"]]
        wanted = [x @ weights[0], x @ weights[0] @ weights[1]]
        for name in ("eager", "graph"):
            for found, expected in zip(one[name], wanted, strict=True):
                equal(found, expected)
        optimizer = torch.optim.SGD(weights, lr=0.01, momentum=0.9)
        for found in one["losses"]:
            loss = (x @ weights[0] @ weights[1]).square().mean()
            assert found == pytest.approx(loss.item(), rel=1e-5)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def trained(model: nn.Module, batches: Any, **options: float) -> list[float]:
    """The losses of cross entropy on one device."""
    optimizer = torch.optim.SGD(model.parameters(), **options)
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_pipeline_with_micro_batches_trains_as_one_device_does(others: list[dict[str, Any]]) -> None:
    torch.manual_seed(0)
    first = [nn.Flatten(), nn.Linear(64, 32), nn.ReLU()]
    model = nn.Sequential(*first, nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    one = others[0]["pipeline"]
    wanted = trained(model, [(torch.tensor(one["x"]), torch.tensor(one["y"]))] * 5, lr=0.1)
    for other in [ran["pipeline"] for ran in others]:
        assert other["losses"] == pytest.approx(wanted, rel=1e-5)


def test_each_stage_of_zero_with_accumulation_trains_as_one_device_does(others: list[dict[str, Any]]) -> None:
    found = [ran["zero"] for ran in others]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    losses = []
    for _ in range(4):
        x, y = torch.randn(8, 16), torch.randint(0, 10, (8,))
        preds = model(x)
        loss = F.cross_entropy(preds, y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for one in found:
        for stage in "123":
            assert one[stage]["losses"] == pytest.approx(losses, rel=1e-5)
            equal(one[stage]["preds"], preds)
            equal(one[stage]["logits"], model(x))


def test_a_graph_goes_on_from_a_file_for_each_of_two_ranks(few: list[dict[str, Any]]) -> None:
    found = [ran["sharded_files"] for ran in few]
    torch.manual_seed(0)
    first, second = nn.Linear(16, 8), nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    x, losses = torch.arange(32.0).reshape(2, 16) / 32, []
    for _ in range(2):
        loss = second(torch.relu(first(x))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    names = ("m_stage0.weight", "m_stage0.bias", "m_stage1.weight", "m_stage1.bias")
    shapes = dict(zip(names, ([4, 16], [4], [1, 4], [1]), strict=True))
    for rank, one in enumerate(found):
        assert one["losses"] == pytest.approx([*losses, losses[1]], rel=1e-5)
        assert one["shapes"] == (shapes if rank < 2 else {})


def test_data_parallelism_with_a_sampler_trains_as_one_device_does(others: list[dict[str, Any]]) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1), torch.arange(64.0).reshape(16, 4) % 7 / 7
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(3):
        for number in range(2):
            rows = torch.arange(number * 8, number * 8 + 8)
            loss = F.mse_loss(model(x[rows]), x[rows].sum(1, keepdim=True))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    for one in [ran["data_parallel"] for ran in others]:
        assert one["losses"] == pytest.approx(losses, rel=1e-5)
        assert one["keys"] == ["module.weight", "module.bias"]


def test_mixed_precision_and_activations_computed_again_are_near_what_one_device_has(
    others: list[dict[str, Any]],
) -> None:
    found = [ran["amp"] for ran in others]
    torch.manual_seed(0)
    part = [nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU()]
    model = nn.Sequential(*part, nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    labels = torch.ones(8, dtype=torch.int64)
    wanted = trained(model, [(torch.randn(8, 16), labels) for _ in range(6)], lr=0.1)
    for one in found:
        assert one["losses"] == pytest.approx(wanted[:3], rel=1e-5)
        assert one["amp"] == pytest.approx(wanted[3:], rel=0.02)
        assert one["amp"] != pytest.approx(wanted[3:], rel=1e-6)
