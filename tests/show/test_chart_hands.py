"""The charts of a page in a browser: move, zoom, choose, hover, click, hide, and what they draw."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from actorflow.show.page import page
from actorflow.show.timeline import TimelineView, forecast_timeline
from actorflow_compiler.core.hardware import Hardware
from chromium import Opened, opened, path_of_chromium, settled
from shown_plans import view

pytestmark = pytest.mark.timeout(240)  # a browser starts
CANVAS = "#timeline canvas"


@pytest.fixture(scope="module")
def charts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """A forecast, and a measured run that took twice as long."""
    path_of_chromium()
    plan = view().plan
    told = forecast_timeline(plan, Hardware())
    slow = TimelineView(
        tuple(replace(s, start=2 * s.start, end=2 * s.end) for s in told.spans),
        2 * told.begin, 2 * told.end,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("charts") / "plan.html"
    path.write_text(page(plan, told, slow), encoding="utf-8")
    with opened(path) as found:
        yield found


@pytest.fixture
def at_first(charts: Opened) -> Opened:
    """The page as it was when it was opened."""
    charts.page.keyboard.press("Escape")
    charts.page.evaluate("actorflow.charts.reset()")
    charts.page.evaluate("document.getElementById('timeline').scrollIntoView({behavior: 'instant'})")
    settled(charts)
    return charts


def middle(found: Opened, chart: int = 0) -> tuple[float, float]:
    box = found.page.locator(CANVAS).nth(chart).bounding_box()
    assert box is not None
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 3


def pixels(found: Opened, chart: int = 0) -> str:
    drawn: str = found.page.locator(CANVAS).nth(chart).evaluate("canvas => canvas.toDataURL()")
    return drawn


def test_both_timelines_and_the_memory_have_one_view(at_first: Opened) -> None:
    listed = settled(at_first)
    assert [c["name"] for c in listed] == ["forecast", "measured", "forecast-memory"]
    assert listed[0]["firings"] == listed[1]["firings"] > 0
    assert all(c["view"] == listed[0]["view"] and c["drawn"] for c in listed)
    labels = [at_first.page.locator(CANVAS).nth(k).get_attribute("aria-label") for k in range(2)]
    assert labels[0] is not None
    assert labels[0].startswith(f"Timeline (forecast): {listed[0]['firings']} firings")
    at_first.check()


@pytest.mark.slow
def test_dragging_moves_and_stops_where_there_is_nothing_more(at_first: Opened) -> None:
    (start, end), (low, high) = (settled(at_first)[0][key] for key in ("view", "bounds"))
    before = pixels(at_first)
    x, y = middle(at_first)
    at_first.page.mouse.move(x, y)
    at_first.page.mouse.down()
    at_first.page.mouse.move(x + 120, y, steps=4)
    at_first.page.mouse.up()
    moved = settled(at_first)[0]["view"]
    assert low <= moved[0] < start
    assert moved[1] - moved[0] == pytest.approx(end - start)
    assert pixels(at_first) != before
    assert at_first.page.locator("#details").is_hidden()  # which was no click
    for _ in range(30):
        at_first.page.locator(CANVAS).first.press("ArrowRight")
    last = settled(at_first)[0]["view"]
    assert last[1] == pytest.approx(high)
    assert last[1] - last[0] == pytest.approx(end - start)
    at_first.check()


@pytest.mark.slow
def test_zooming_keeps_what_is_under_the_mouse_and_reset_takes_it_back(at_first: Opened) -> None:
    first = settled(at_first)[0]["view"]
    x, y = middle(at_first)
    box = at_first.page.locator(CANVAS).first.bounding_box()
    assert box is not None
    at_first.page.mouse.move(x, y)
    at_first.page.mouse.wheel(0, -300)
    assert settled(at_first)[0]["view"] == first  # the page scrolls
    at_first.page.evaluate("document.getElementById('timeline').scrollIntoView({behavior: 'instant'})")
    x, y = middle(at_first)
    actor = at_first.page.evaluate("Number(actorflow.find('F0@0')[0][1].id)")
    at_first.page.evaluate("([a, b]) => actorflow.charts.show(a, b)", [first[0], (first[0] + first[1]) / 2])
    settled(at_first)
    place = at_first.page.evaluate("id => actorflow.charts.place('forecast', id)", actor)
    at_first.page.mouse.move(*place)
    at_first.page.keyboard.down("Control")
    at_first.page.mouse.wheel(0, -200)
    at_first.page.keyboard.up("Control")
    near = settled(at_first)[0]["view"]
    assert near[1] - near[0] < 0.7 * (first[1] - first[0]) / 2
    again = at_first.page.evaluate("id => actorflow.charts.place('forecast', id)", actor)
    assert again[0] == pytest.approx(place[0], abs=1.5)
    at_first.page.locator("#timeline button[data-time]", has_text="reset").click()
    assert settled(at_first)[0]["view"] == first
    at_first.page.locator("#timeline button[data-time]").first.click()  # +
    inside = settled(at_first)[0]["view"]
    assert first[0] < inside[0] < inside[1] < first[1]
    at_first.page.locator("#timeline button[data-time]").nth(1).click()  # −
    assert settled(at_first)[0]["view"] == pytest.approx(first, rel=0.01, abs=1e-3)
    for _ in range(80):
        at_first.page.locator(CANVAS).first.press("+")
    deep = settled(at_first)[0]["view"]
    assert 0 < deep[1] - deep[0] < 1e-3
    at_first.page.locator(CANVAS).first.press("0")
    assert settled(at_first)[0]["view"] == first
    at_first.check()


def test_shift_and_drag_choose_a_stretch(at_first: Opened) -> None:
    start, end = settled(at_first)[0]["view"]
    x, y = middle(at_first)
    at_first.page.keyboard.down("Shift")
    at_first.page.mouse.move(x, y)
    at_first.page.mouse.down()
    at_first.page.mouse.move(x - 150, y, steps=3)
    at_first.page.mouse.up()
    at_first.page.keyboard.up("Shift")
    found = settled(at_first)[0]["view"]
    assert start < found[0] < found[1] < end
    at_first.check()


def test_the_mouse_on_a_firing_tells_of_it_and_a_click_opens_its_actor(at_first: Opened) -> None:
    at_first.page.evaluate("document.getElementById('timeline').scrollIntoView({behavior: 'instant'})")
    actor = at_first.page.evaluate("Number(actorflow.find('F1@3')[0][1].id)")
    unmarked = pixels(at_first)
    x, y = at_first.page.evaluate("id => actorflow.charts.place('forecast', id)", actor)
    at_first.page.mouse.move(x, y)
    told = at_first.page.locator("#timeline .tip:visible").inner_text()
    assert told.startswith("F1@3 · micro-batch ")
    assert " ms, from " in told
    at_first.page.mouse.click(x, y)
    assert at_first.page.locator("#details h2").inner_text() == "F1@3"
    settled(at_first)
    assert pixels(at_first) != unmarked  # it is framed
    at_first.page.mouse.move(5, 5)
    assert at_first.page.locator("#timeline .tip:visible").count() == 0
    assert at_first.page.evaluate("actorflow.charts.place('forecast', -5)") is None
    at_first.check()


def test_a_kind_is_hidden_and_comes_back(at_first: Opened) -> None:
    before, drawn = pixels(at_first), settled(at_first)[0]["drawn"]
    entry = at_first.page.locator("#timeline .chart").first.locator(".legend button", has_text="backward")
    entry.focus()
    at_first.page.keyboard.press("Enter")
    listed = settled(at_first)
    assert listed[0]["hidden"] == ["backward (B)"]
    assert listed[1]["hidden"] == []
    assert 0 < listed[0]["drawn"] < drawn
    assert entry.get_attribute("aria-pressed") == "false"
    assert pixels(at_first) != before
    actor = at_first.page.evaluate("Number(actorflow.find('B1@3')[0][1].id)")
    at_first.page.mouse.move(*at_first.page.evaluate("id => actorflow.charts.place('forecast', id)", actor))
    assert "B1@3" not in "".join(at_first.page.locator("#timeline .tip:visible").all_inner_texts())
    entry.click()
    assert settled(at_first)[0]["drawn"] == drawn
    for words in ("bubble", "critical cycle"):
        shown = pixels(at_first)
        other = at_first.page.locator("#timeline .chart").first.locator(".legend button", has_text=words)
        other.click()
        settled(at_first)
        assert pixels(at_first) != shown
        other.click()
    at_first.check()


@pytest.mark.slow
def test_charts_follow_the_window_and_light_and_dark(at_first: Opened) -> None:
    light = pixels(at_first)
    at_first.page.click("#theme")
    settled(at_first)
    assert pixels(at_first) != light
    at_first.page.click("#theme")
    settled(at_first)
    assert pixels(at_first) == light
    wide = at_first.page.locator(CANVAS).first.evaluate("canvas => canvas.width")
    at_first.page.set_viewport_size({"width": 700, "height": 900})
    settled(at_first)
    narrow = at_first.page.locator(CANVAS).first.evaluate("canvas => [canvas.width, canvas.clientWidth]")
    assert narrow[0] < wide
    assert narrow[0] == narrow[1]
    assert at_first.page.evaluate("document.documentElement.scrollWidth") <= 700
    at_first.page.set_viewport_size({"width": 1440, "height": 900})
    at_first.check()
