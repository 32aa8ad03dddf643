"""Of a test with many parameters `make test` runs representatives, in which each value of each parameter is."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from matrices import representatives

CONFTEST = """
import matrices

def pytest_collection_modifyitems(items):
    matrices.thin(items)
"""

TESTS = """
import pytest

SLOW = pytest.param("deep", marks=pytest.mark.slow)

@pytest.mark.matrix{how}
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("layout", [object(), object()], ids=["data", "tensor"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt", SLOW])
def test_it(name, layout, devices): pass
"""


def kept(folder: Path, how: str) -> list[list[str]]:
    """The parameters of the tests that ``make test`` would run."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(TESTS.format(how=how))
    options = ["-p", "no:cacheprovider", "--rootdir", str(folder), "-W", "ignore"]
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not slow", *options, "test_it.py"],
        capture_output=True, text=True, cwd=folder, env={"PYTHONPATH": str(Path(__file__).parent)},
    )  # fmt: skip
    return [line.split("[")[1].rstrip("]").split("-") for line in found.stdout.splitlines() if "[" in line]


def test_a_matrix_keeps_each_value_once(tmp_path: Path) -> None:
    found = kept(tmp_path, "")
    assert found == [["mlp", "data", "1"], ["cnn", "tensor", "2"], ["gpt", "data", "4"]]


def test_or_as_often_as_it_says(tmp_path: Path) -> None:
    found = kept(tmp_path, "(times=2)")
    assert len(found) == 6
    for value in ("mlp", "cnn", "gpt", "data", "tensor", "1", "2", "4"):
        assert sum(value in one for one in found) >= 2


def test_a_matrix_of_one_parameter_keeps_every_nth() -> None:
    assert representatives([{"seed": seed} for seed in range(7)])[::3] == [0, 3, 6]


@pytest.mark.parametrize("times", [1, 2])
def test_representatives_spread_over_the_other_parameters(times: int) -> None:
    matrix = [{"step": step, "layout": layout} for step, layout in itertools.product(range(10), "ab")]
    chosen = [matrix[number] for number in representatives(matrix, times)]
    assert [sum(one["step"] == step for one in chosen) for step in range(10)] == [times] * 10
    assert [sum(one["layout"] == layout for one in chosen) for layout in "ab"] == [5 * times] * 2
