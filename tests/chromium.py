"""Open pages in a headless Chromium, and record their network requests and errors."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 60_000  # milliseconds, on a machine that does much else


@dataclass(slots=True)
class Opened:
    """A page, and what it should not have done."""

    page: Any
    requests: list[str] = field(default_factory=list)  # to anywhere but its own file
    errors: list[str] = field(default_factory=list)

    def check(self) -> None:
        """No request left the page, and nothing went wrong in it."""
        assert self.requests == []
        assert self.errors == []


def settled(found: Opened) -> list[Any]:
    """What the page's charts show, once what was asked for is drawn."""
    two_frames = "done => requestAnimationFrame(() => requestAnimationFrame(() => done(actorflow.charts.list())))"
    listed: list[Any] = found.page.evaluate(f"new Promise({two_frames})")
    return listed


def path_of_chromium() -> str:
    """Where Chromium is; the test is skipped, with a reason, where there is none."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("there is no Chromium on this machine")
    return found


@contextlib.contextmanager
def opened(path: Path, *, dark: bool = False, width: int = 1440, height: int = 900) -> Iterator[Opened]:
    """The page of a file, when its charts are drawn."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path_of_chromium(), args=["--no-sandbox"])
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", offline=True
        )
        context.set_default_timeout(PATIENCE)
        found = Opened(context.new_page())
        found.page.on(
            "request", lambda r: r.url.startswith(("file:", "data:", "blob:")) or found.requests.append(r.url)
        )
        found.page.on("console", lambda m: m.type in ("error", "warning") and found.errors.append(m.text))
        found.page.on("pageerror", lambda e: found.errors.append(str(e)))
        found.page.goto(path.resolve().as_uri())
        found.page.wait_for_function("globalThis.actorflow?.charts")
        try:
            yield found
        finally:
            browser.close()
