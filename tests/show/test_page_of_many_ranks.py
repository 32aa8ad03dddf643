"""The page of a plan of very many ranks: classes of those that are alike, what passes between them, and any rank."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import warm
from chromium import Opened, opened, path_of_chromium

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(400)  # a step is compiled, and a browser started
FEW, MANY = 128, 16384


def written(folder: Path, devices: int) -> Path:
    """The page of the small GPT on 2 stages of many devices."""
    path_of_chromium()
    out, data = folder / "plan.html", str(devices // 2)
    command = [warm.python(), "-m", "actorflow", "plan", "examples/gpt.py", "--devices", str(devices)]
    command += ["--out", str(out), "--hardware", "examples/h100x8.toml", "--"]
    command += ["--pipeline", "2", "--data", data, "--batch", str(2 * devices), "--layers", "2", "--width", "32"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert f"plan written to {out}" in done.stdout
    return out


def ask(found: Opened, rank: int) -> str:
    """What the page says of a rank whose number is typed."""
    found.page.fill("#rank", str(rank))
    found.page.press("#rank", "Enter")
    told = found.page.locator("#details")
    assert told.locator("h2").inner_text() == f"rank {rank}"
    return str(told.inner_text())


@pytest.mark.slow
def test_the_page_of_16384_ranks_is_small_and_opens(tmp_path: Path) -> None:
    path = written(tmp_path, MANY)  # this test is the first: browsers of a process do not run side by side
    assert path.stat().st_size < 20e6
    with opened(path) as found:
        told = ask(found, 12345)
        assert "receives from 4153 " in told
        assert "(8,191)" in told
        found.check()


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    with opened(written(tmp_path_factory.mktemp("few"), FEW)) as found:
        yield found


def test_the_page_lists_classes_of_ranks(few: Opened) -> None:
    rows = few.page.locator("#ranks tbody tr")
    assert [row.split("\t")[:3] for row in rows.all_inner_texts()] == [["0", "64", "0-63"], ["1", "64", "64-127"]]
    assert "128 ranks of 2 classes" in few.page.locator("h1").inner_text()
    few.check()


def test_the_page_has_a_matrix_of_what_passes_between_classes(few: Opened) -> None:
    """Activations and their gradients go both ways, and gradients of parameters are summed within a stage."""
    cells = few.page.locator("#links td")
    assert cells.count() == 4
    text = cells.all_inner_texts()
    assert all(text)
    assert text[1].split()[1] == "MiB"  # 512 samples × 128 positions × 32 floats, in an iteration
    assert float(text[1].split()[0]) == pytest.approx(256 * 128 * 32 * 4 / 2**20, rel=0.01)
    assert "between nodes" in str(cells.first.get_attribute("title"))
    few.check()


def test_any_rank_says_with_whom_it_communicates(few: Opened) -> None:
    told = ask(few, 77)
    assert "1: ranks 64-127" in told
    lines = [line for line in told.splitlines() if line.startswith(("sends", "receives", "all-reduce"))]
    assert any(line.startswith("receives from 13 ") for line in lines)
    assert any(line.startswith("sends to 13 ") for line in lines)
    assert any(line.startswith("all-reduce 64, 65, 66") and "(63)" in line for line in lines)
    few.page.locator("#details a[data-rank='13']").first.click()  # and on to the other
    assert few.page.locator("#details h2").inner_text() == "rank 13"
    assert few.page.evaluate("actorflow.peers(13).filter(p => p.what === 'sends to').map(p => p.others)") == [[77]]
    few.check()


def test_a_rank_that_does_not_exist_is_not_shown(few: Opened) -> None:
    told = ask(few, 5)
    few.page.fill("#rank", str(FEW))
    few.page.press("#rank", "Enter")
    assert few.page.locator("#details").inner_text() == told
    few.check()


def test_the_rest_of_the_page_shows_one_rank_of_each_class(few: Opened) -> None:
    few.page.evaluate("actorflow.open(actorflow.find('F1@64')[0][1].id)")
    assert few.page.locator("#details h2").inner_text() == "F1@64"
    assert few.page.evaluate("actorflow.find('F1@65').length") == 0
    few.page.evaluate("actorflow.openPart(actorflow.find('blocks.1').find(([, e]) => e.label === 'blocks.1')[1].id)")
    assert "cpu:[64,65,…,127]" in few.page.locator("#details").inner_text()
    few.check()
