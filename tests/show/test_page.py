"""The page of examples/gpt.py (pipeline 2 × data 2), as somebody uses it in a browser without a network."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import warm
from chromium import Opened, opened, path_of_chromium

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(240)  # the first test compiles the example and starts a browser
SECTIONS = ["timeline", "memory", "logical", "actors", "communication", "notes"]


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    path_of_chromium()
    out = tmp_path_factory.mktemp("gpt") / "plan.html"
    command = [warm.python(), "-m", "actorflow", "plan", "examples/gpt.py", "--devices", "4", "--out", str(out)]
    done = subprocess.run(
        [*command, "--", "--pipeline", "2", "--data", "2"],
        cwd=ROOT, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"plan written to {out}" in done.stdout
    assert out.stat().st_size < 3 << 20
    with opened(out) as page:
        yield page


def test_the_page_has_all_its_sections_and_asks_the_network_for_nothing(gpt: Opened) -> None:
    assert [s.get_attribute("id") for s in gpt.page.query_selector_all("main > section")] == SECTIONS
    for section in ("timeline", "memory"):
        assert gpt.page.locator(f"#{section} canvas").count() > 0
    for section in ("logical", "actors"):
        assert gpt.page.locator(f"#{section} svg.graph:visible").count() == 1
    assert gpt.page.locator("#communication tbody tr").count() >= 4
    assert gpt.page.locator(".tile").count() >= 5
    gpt.check()


def test_the_search_finds_an_actor_and_enter_opens_it(gpt: Opened) -> None:
    gpt.page.keyboard.press("/")
    gpt.page.keyboard.type("F1@2")
    assert gpt.page.locator("#results li code").first.inner_text() == "F1@2"
    gpt.page.keyboard.press("Enter")
    assert gpt.page.locator("#details h2").inner_text() == "F1@2"
    facts = gpt.page.locator("#details dl").inner_text()
    assert "compute" in facts
    assert "4× in an iteration" in facts
    gpt.page.fill("#search", "scaled_dot_product")  # an op leads to the actors that run it
    assert "F0@0" in gpt.page.locator("#results").inner_text()
    gpt.page.fill("#search", "")
    gpt.page.keyboard.press("Escape")
    assert gpt.page.locator("#details").is_hidden()
    gpt.check()


def test_a_click_on_an_actor_shows_its_registers_its_ops_and_the_line_in_the_script(gpt: Opened) -> None:
    gpt.page.locator("g.actor", has_text="F0").first.click()
    told = gpt.page.locator("#details")
    assert told.locator("h2").inner_text() == "F0@0"
    assert "Reads" in told.inner_text()
    assert "slots of" in told.inner_text()
    assert "aten.addmm" in told.inner_text() or "aten.mm" in told.inner_text()
    told.get_by_text("gpt.py:37").first.click()
    line = (ROOT / "examples" / "gpt.py").read_text().splitlines()[37 - 1]
    assert told.locator("pre b").first.inner_text().split() == ["37", *line.split()]
    told.locator("a", has_text="B0@0").first.click()  # and on to who reads what it writes
    assert told.locator("h2").inner_text() == "B0@0"
    gpt.check()


def test_a_click_on_a_firing_opens_its_actor(gpt: Opened) -> None:
    gpt.page.keyboard.press("Escape")
    gpt.page.evaluate("document.getElementById('timeline').scrollIntoView({behavior: 'instant'})")
    actor = gpt.page.evaluate("Number(actorflow.find('F1@3')[0][1].id)")
    x, y = gpt.page.evaluate("id => actorflow.charts.place('forecast', id)", actor)
    gpt.page.mouse.click(x, y)
    gpt.page.wait_for_selector("#details:not([hidden])")
    assert gpt.page.locator("#details h2").inner_text() == "F1@3"
    gpt.check()


def test_the_logical_graph_says_what_passes_and_unfolds(gpt: Opened) -> None:
    gpt.page.keyboard.press("Escape")
    words = gpt.page.locator("#logical svg:visible").text_content()
    assert "float32[8,128,128] S(0) 512.0 KiB" in words
    assert "all-reduce P → B" in words
    names = gpt.page.locator("#logical svg:visible g.part text.name")
    assert "blocks.0" in names.all_text_contents()
    assert "blocks.0.qkv" not in names.all_text_contents()
    gpt.page.locator("#logical button[data-level]").last.click()
    assert "blocks.0.qkv" in names.all_text_contents()
    gpt.page.locator("#logical svg:visible g.part", has_text="blocks.3.up").first.click()
    told = gpt.page.locator("#details").inner_text()
    assert "cpu:[2,3]" in told
    assert "blocks.3.up" in told
    gpt.page.locator("#logical button[data-level]").first.click()
    gpt.check()


def test_light_becomes_dark_and_charts_follow(gpt: Opened) -> None:
    gpt.page.keyboard.press("Escape")
    colour = "new Promise(done => requestAnimationFrame(() => done(actorflow.charts.list()[0].colours.soft)))"
    assert gpt.page.evaluate("document.documentElement.dataset.theme") == "light"
    light = gpt.page.evaluate(colour)
    gpt.page.click("#theme")
    assert gpt.page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert gpt.page.evaluate(colour) != light
    gpt.page.click("#theme")
    gpt.check()
