"""A chart of nothing, of one firing, and of very many."""

from __future__ import annotations

from pathlib import Path

import pytest

from actorflow.show.page import page
from actorflow.show.timeline import TimelineSpan, TimelineView
from chromium import opened, path_of_chromium, settled
from shown_plans import view

pytestmark = pytest.mark.timeout(240)  # a browser starts


def lone(count: int) -> TimelineView:
    """As many firings of the first actor, one after the other."""
    actor = view().plan.actors[0]
    length = 1e-3
    spans = tuple(
        TimelineSpan(actor.rank, actor.queue, actor.id, k, 0, actor.kind, k * length, (k + 0.9) * length)
        for k in range(count)
    )
    return TimelineView(spans, 0.0, max(1, count) * length)


@pytest.mark.slow
@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("count", [0, pytest.param(1, marks=pytest.mark.slow), 20_000])
def test_any_number_of_firings_is_drawn(tmp_path: Path, count: int) -> None:
    path_of_chromium()
    path = tmp_path / "plan.html"
    path.write_text(page(view().plan, lone(count)), encoding="utf-8")
    with opened(path) as found:
        listed = settled(found)
        assert [c["firings"] for c in listed] == ([count] if count else [])
        if count:
            assert listed[0]["drawn"] == count
        if count > 1:
            found.page.evaluate("actorflow.charts.show(1, 2)")
            assert settled(found)[0]["drawn"] == 1  # that of the second millisecond
        assert found.page.locator("#actors svg").count() == 1
        found.check()
