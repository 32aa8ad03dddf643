"""``torch.compile`` beside this package: plain tensors are compiled, and ops on global tensors run as they stand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from second.launching import command, run

COMPILED = """
import sys, torch
import actorflow as flow

@torch.compile(backend="eager")
def double(x):
    return (x * 2).relu().sum(1)

where = flow.placement.all("cpu")
x = flow.arange(16, dtype=torch.float32, placement=where, sbp=flow.sbp.split(0)).reshape(4, 4)
torch.manual_seed(0)
layer = flow.nn.Linear(4, 1).to_global(where, flow.sbp.broadcast)
compiled = torch.compile(layer, backend="eager")
compiled(x).sum().backward()
told = double(torch.ones(2, 2)).tolist(), double(x).tolist(), layer.weight.grad.tolist()
open(sys.argv[1] + f"/{flow.env.get_rank()}", "w").write(repr(told))
"""


@pytest.mark.slow
def test_a_compiled_function_takes_plain_and_global_tensors(tmp_path: Path) -> None:
    script = tmp_path / "compiled.py"
    script.write_text(COMPILED)
    done = run(command("run", str(script), "--", str(tmp_path), python=sys.executable), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = [4.0, 4.0], [12.0, 44.0, 76.0, 108.0], [[24.0, 28.0, 32.0, 36.0]]
    assert [(tmp_path / f"{rank}").read_text() for rank in range(2)] == [repr(expected)] * 2
