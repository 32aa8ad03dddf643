"""The page of a plan in narrow windows and on phones: nothing of it is cut off or covered."""

from __future__ import annotations

from pathlib import Path

import pytest

import shown_plans
from chromium import opened, path_of_chromium

pytestmark = pytest.mark.timeout(240)  # a browser starts for each width

# what of the header lies outside of the window, is cut off by what it stands in, or is covered by something else
OUT_OF_REACH = """() => [...document.querySelectorAll('header, header h1, header nav a, #search, #theme')].filter(e => {
  const {left, right, top, bottom, width} = e.getBoundingClientRect();
  const inside = left >= 0 && right <= innerWidth && top >= 0 && bottom <= innerHeight && width > 0;
  const under = document.elementFromPoint((left + right) / 2, (top + bottom) / 2);
  const cut = e.clientWidth > 0 && e.scrollWidth > e.clientWidth;
  return !inside || cut || !(e.contains(under) || under?.contains(e));
}).map(e => e.outerHTML.slice(0, 60))"""
BELOW_THE_HEADER = """{
  const section = document.getElementById('actors').getBoundingClientRect();
  const header = document.querySelector('header').getBoundingClientRect();
  section.top < innerHeight && section.top >= Math.max(0, header.bottom) - 1
}"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path_of_chromium()
    return shown_plans.view().write(tmp_path_factory.mktemp("page") / "plan.html")


@pytest.mark.slow
@pytest.mark.parametrize("width", [*(pytest.param(width, marks=pytest.mark.slow) for width in (1440, 1000)), 400])
def test_all_of_the_header_can_be_seen_and_used(page: Path, width: int) -> None:
    with opened(page, width=width) as found:
        assert found.page.locator("header nav a").count() >= 5
        assert found.page.evaluate(OUT_OF_REACH) == []
        assert found.page.evaluate("document.documentElement.scrollWidth") <= width  # no window is wider than it is
        found.page.click("header nav a[href='#actors']")
        found.page.wait_for_function(BELOW_THE_HEADER)
        found.page.fill("#search", "F0")
        found.page.keyboard.press("Enter")
        found.page.wait_for_selector("#details:not([hidden])")
        found.check()
