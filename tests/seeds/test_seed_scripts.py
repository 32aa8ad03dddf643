"""The scripts of examples/seeds, started by hand as their documents say, against the one-device script."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import warm

SCRIPTS = Path(__file__).parents[2] / "examples" / "seeds"
STEPS = 17
CPU = {
    **os.environ,
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
}


def run(*command: str) -> str:
    done = subprocess.run(
        [warm.python(), *command], env=CPU, capture_output=True, text=True, timeout=250, cwd=SCRIPTS,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(output: str) -> list[float]:
    found = [float(loss) for loss in re.findall(r"^\d+ loss: (\S+)$", output, re.MULTILINE)]
    assert len(found) == STEPS, output  # once: other ranks than the master are not shown
    return found


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[float]]:
    """The losses of the one-device script with these names of its layers, from which their first values come.

    It is launched, as the others launch themselves: that seeds it.
    """

    @cache
    def found(hidden: str = "dense1", output: str = "dense2") -> list[float]:
        text = (SCRIPTS / "single.py").read_text().replace('"dense1"', f'"{hidden}"').replace('"dense2"', f'"{output}"')
        path = tmp_path_factory.mktemp("seeds") / "single.py"
        path.write_text(text)
        return losses(run("-m", "actorflow", "run", str(path), "--devices", "1"))

    return found


@pytest.mark.parametrize(
    "script",
    [
        "consistent.py",
        *(pytest.param(script, marks=pytest.mark.slow) for script in ("distributed.py", "mirrored.py", "hybrid.py")),
    ],
)
def test_a_script_on_two_devices_has_the_losses_of_one_device(
    script: str, one_device: Callable[..., list[float]]
) -> None:
    found = losses(run(script))
    assert found == pytest.approx(one_device(), abs=2e-6)
    assert found[-1] < found[0] / 2


@pytest.mark.slow
def test_a_pipeline_on_two_devices_has_the_losses_of_one_device(one_device: Callable[..., list[float]]) -> None:
    assert losses(run("pipelining.py")) == pytest.approx(one_device("hidden", "outlayer"), abs=2e-6)
