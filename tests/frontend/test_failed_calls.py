"""One bad batch: what its call raises, and that the calls after it are those of eager PyTorch."""

from __future__ import annotations

import copy
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import actorflow as flow
import warm
from actorflow_compiler.core.errors import ActorError

Step = Callable[[Tensor, Tensor], Tensor]


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(3, 4), nn.Flatten(), nn.Linear(16, 3))


def trainer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def batches(count: int, bad: int) -> list[tuple[Tensor, Tensor]]:
    """Of labels, one of which is out of range."""
    found = [(torch.randn(6, 4), torch.randint(0, 3, (6,))) for _ in range(count)]
    found[bad][1][2] = 7
    return found


def indices(count: int, bad: int) -> list[tuple[Tensor, Tensor]]:
    """Of indices, one of which is out of range."""
    found = [(torch.randint(0, 3, (6, 4)), torch.randint(0, 3, (6,))) for _ in range(count)]
    found[bad][0][1, 2] = 3
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize(
    ("make", "draw", "micro_batches"),
    [(embedding, indices, 1), (embedding, indices, 3), (plain, batches, 1), (plain, batches, 3), (normed, batches, 1)],
)
def test_after_a_bad_batch_the_good_ones_train_as_in_eager_pytorch(
    make: Callable[[], nn.Module], draw: Callable[[int, int], list[tuple[Tensor, Tensor]]], micro_batches: int, bad: int
) -> None:
    model = make()
    eager = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, eager))
    step = flow.global_function(trainer(model, optimizer), micro_batches=micro_batches)
    eagerly = trainer(eager, other)
    for number, (x, y) in enumerate(draw(5, bad)):
        if number == bad:
            with pytest.raises(IndexError):
                eagerly(x, y)
            before = {name: value.detach().clone() for name, value in model.named_buffers()}
            with pytest.raises(ActorError, match=r"_calls\.py:\d+: loss = F\.cross_entropy.* has changed nothing"):
                float(step(x, y))
            assert all(torch.equal(before[name], value.detach()) for name, value in model.named_buffers())
        else:
            torch.testing.assert_close(float(step(x, y)), eagerly(x, y).item(), rtol=1e-5, atol=1e-6)
    expected = dict(eager.named_parameters())
    for name, value in model.state_dict().items():
        if name in expected:
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)


ENDS = """
import torch
from torch import nn
from torch.nn import functional as F
import actorflow as flow

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

class Kept:
    seen = None

kept = Kept()

@flow.global_function
def {step}

def tried(*batch):
    try:
        return round(float(step(*batch)), 6)
    except Exception as error:
        print("RAISED", error)

x, good, bad = torch.randn(4, 4), torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, 2, 7])
"""
AFTER = """step(x, y):
    loss = F.cross_entropy(model(x), y.clamp(max=2))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return F.cross_entropy(model(x), y)
"""
KEPT = """step(x, y):
    kept.seen = x * 2
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
"""
ACCUMULATED = """step(x, y, last=True):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()
    return loss
"""
PLAIN = KEPT.replace("    kept.seen = x * 2\n", "")


def ended(folder: Path, step: str, lines: str) -> tuple[int, str]:
    """The exit status of a script, and what it prints."""
    (folder / "train.py").write_text(ENDS.format(step=step) + lines)
    done = subprocess.run(
        [warm.python(), "train.py"], capture_output=True, text=True, timeout=250, check=False, cwd=folder
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    ("step", "changed"),
    [(AFTER, r"model\.0\.\w+, .*"), (KEPT, r"kept\.seen"), (ACCUMULATED, "which gradients there are")],
)
def test_a_call_that_had_changed_something_when_it_failed_says_so_and_ends_the_job(
    tmp_path: Path, step: str, changed: str
) -> None:
    first = "tried(x, good, False)\n" if step is ACCUMULATED else "tried(x, good)\n"
    code, text = ended(tmp_path, step, first + "tried(x, bad)\ntried(x, good)\n")
    assert code == 1
    raised = [line for line in text.splitlines() if line.startswith("RAISED")]
    assert len(raised) == 2, text
    for line in raised:
        assert re.search(rf"train\.py:\d+: .*The call had changed {changed} before.*load a checkpoint", line), line


def test_a_failure_that_the_script_never_reads_ends_it_with_an_error(tmp_path: Path) -> None:
    code, text = ended(tmp_path, PLAIN, "step(x, good)\nstep(x, bad)\n")
    assert code == 1
    assert re.search(r"ActorError: .*train\.py:\d+: .*out of bounds", text), text
