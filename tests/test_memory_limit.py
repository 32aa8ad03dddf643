"""A model whose parameters, gradients and optimizer state one process has no memory for trains in four stages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEMONSTRATION = Path(__file__).resolve().parents[1] / "benchmarks" / "memory.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep no limit on what a process writes to")
def test_four_stages_train_a_model_that_one_process_has_no_memory_for_with_the_same_losses() -> None:
    sizes = {"limit": 900, "layers": 4, "width": 1024, "context": 128, "batch": 8, "micro-batches": 4, "steps": 2}
    options = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    done = subprocess.run([sys.executable, str(DEMONSTRATION), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    eager, alone, one_device, staged = done.stdout.splitlines()[1:5]
    assert "losses" in eager
    assert "allocate memory" in alone
    assert "allocate memory" in one_device
    assert "losses" in staged
