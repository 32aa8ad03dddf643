"""The tables of docs/oneflow.md are those of names.toml, and what each line names is used on two ranks and on four."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import warm
from seeds.tables import PAGE, ROWS, page_of

SCRIPT = Path(__file__).with_name("rows_run.py")
SNIPPETS = sorted({row.snippet for row in ROWS})
LIMIT = 250.0  # seconds; a run takes ten


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each snippet came to, on each rank of one run."""
    folder = tmp_path_factory.mktemp("rows")
    done = subprocess.run(
        [warm.python(), str(SCRIPT), str(folder), str(request.param), *SNIPPETS],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(request.param)]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_what_a_row_names_is_used_as_programs_do(snippet: str, ranks: list[dict[str, str]]) -> None:
    assert [told[snippet] for told in ranks] == ["ran"] * len(ranks), ranks[0][snippet]


def test_the_page_is_what_its_rows_make() -> None:
    assert PAGE.read_text("utf-8") == page_of(PAGE.read_text("utf-8")), "run: python tests/seeds/tables.py"
    assert all(f"\n{row}" in PAGE.read_text("utf-8") for row in ROWS)


def test_no_two_rows_have_the_same_names() -> None:
    names = [row.names for row in ROWS]
    assert len(set(names)) == len(names)
    assert all(row.differs or row.here for row in ROWS)
