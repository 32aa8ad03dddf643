"""The page of a plan whose job, actors and ops have names that HTML would take for its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import shown_plans
from actorflow.show.formats import to_html
from actorflow_compiler.core.hardware import Hardware
from chromium import opened, path_of_chromium

pytestmark = pytest.mark.timeout(240)  # a browser starts for each name


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    "name", ["</script><b>odd</b>", pytest.param("<!--<script>", marks=pytest.mark.slow), "]]>\u2028\u2029&lt;\"'\\"]
)
def test_names_that_look_like_html_are_shown_as_they_are(tmp_path: Path, name: str) -> None:
    path_of_chromium()
    plan = shown_plans.view().plan
    odd = replace(plan.actors[0], name=name)
    modules = tuple(replace(p, module=name) if p.module == "blocks.0" else p for p in plan.origins.parts)
    origins = replace(plan.origins, parts=modules)
    path = tmp_path / "plan.html"
    html = to_html(replace(plan, name=name, actors=(odd, *plan.actors[1:]), origins=origins), Hardware())
    path.write_text(html, encoding="utf-8")
    with opened(path) as found:
        assert found.page.title().split() == name.split()
        assert (found.page.locator("h1").text_content() or "").startswith(name)
        found.page.evaluate(f"actorflow.open({odd.id})")
        assert found.page.locator("#details h2").text_content() == name
        assert found.page.evaluate("name => actorflow.find(name).some(([, e]) => e.label === name)", name)
        assert found.page.locator("main b", has_text="odd").locator("visible=true").count() == 0
        found.check()
