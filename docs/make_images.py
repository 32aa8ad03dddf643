"""Plans of examples go in; the pictures in docs/images/ come out.  Needs playwright and Chromium.

python docs/make_images.py
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
WIDTH = 1360
LARGEST = 300_000  # bytes of a picture
DRAWN = "globalThis.actorflow?.charts"
SECTIONS = ("timeline", "memory", "logical", "actors")  # of the example of docs/concepts.md


def main() -> None:
    """Make all pictures anew."""
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.exit("make_images.py needs a Chromium; none of chromium, chromium-browser and google-chrome was found")
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        gpt = planned(folder / "gpt.html", "examples/gpt.py", "--", "--pipeline", "2", "--data", "2")
        for scheme in ("light", "dark"):  # of the README
            page = opened(browser, gpt, 940, scheme)
            page.screenshot(path=IMAGES / f"plan-{scheme}.png")
            page.close()
        text = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
        script = folder / "pipeline.py"
        script.write_text(re.search(r"```python\n(# pipeline\.py\n.*?)```", text, re.DOTALL)[1], encoding="utf-8")
        page = opened(browser, planned(folder / "pipeline.html", str(script)), 1900, "light")
        for section in SECTIONS:
            fit = page.locator(f"#{section} button[data-zoom=fit]")
            if fit.count():
                fit.click()
            page.locator(f"#{section} .chart, #{section} .canvas").first.screenshot(path=IMAGES / f"{section}.png")
        browser.close()
    for path in sorted(IMAGES.glob("*.png")):
        size = path.stat().st_size
        print(f"{path.relative_to(ROOT)}: {size // 1000} kB")
        if size > LARGEST:
            sys.exit(f"{path.name} has {size} bytes; at most {LARGEST} were expected: make the picture smaller")


def planned(out, script, *arguments):
    """The page of a script's plan for four devices."""
    command = [sys.executable, "-m", "actorflow", "plan", script, "--devices", "4", "--out", str(out), *arguments]
    subprocess.run(command, cwd=ROOT, check=True)
    return out


def opened(browser, path, height, scheme):
    """A page, when its charts are drawn."""
    page = browser.new_page(viewport={"width": WIDTH, "height": height}, color_scheme=scheme)
    page.goto(path.as_uri())
    page.wait_for_function(DRAWN)
    page.wait_for_timeout(500)  # until canvases are on the screen
    return page


if __name__ == "__main__":
    main()
