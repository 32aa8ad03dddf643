"""Measure the size of the page of a plan (a GPT of 48 layers on 16 ranks), and how fast a browser opens it.

python benchmarks/page.py [--layers 48] [--pipeline 4] [--data 4] [--page plan.html]

Needs playwright and a Chromium.  "CPU" is what all processes of the browser took until the charts were
drawn: on a machine that does nothing else, the page is there in less than that.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
DRAWN = "globalThis.actorflow?.charts && actorflow.charts.list().every(c => c.drawn)"
REPEATS = 5
STEPS = {  # what somebody does next, and what it takes
    "search": "actorflow.find('attention')",
    "details": "actorflow.open(actorflow.find('F0@0')[0][1].id)",
    "unfold": "[...document.querySelectorAll('#logical button[data-level]')].pop().click()",
    "zoom": "document.querySelector('#actors button[data-zoom]').click()",
}


def main() -> None:
    """Print sizes and times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--pipeline", type=int, default=4)
    parser.add_argument("--data", type=int, default=4)
    parser.add_argument("--page", type=Path, help="a page that is there, instead")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = options.page or Path(folder) / "plan.html"
        if options.page is None:
            ranks = str(options.pipeline * options.data)
            command = [sys.executable, "-m", "actorflow", "plan", "examples/gpt.py", "--devices", ranks, "--out", path]
            script: list[object] = ["--pipeline", options.pipeline, "--data", options.data, "--layers", options.layers]
            script += ["--micro-batches", 8, "--width", 64]
            subprocess.run([*map(str, command), "--", *map(str, script)], cwd=ROOT, check=True)
        print(f"page: {path.stat().st_size / 1e6:.1f} MB")
        chromium = shutil.which("chromium") or shutil.which("google-chrome") or sys.exit("there is no Chromium")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        print(f"{'':10}{'wall s':>8}{'CPU s':>8}")
        times = sorted(opens(browser, path) for _ in range(REPEATS))
        print(f"{'open':10}{times[REPEATS // 2][0]:8.2f}{sorted(t[1] for t in times)[REPEATS // 2]:8.2f}")
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(path.resolve().as_uri())
        page.wait_for_function(DRAWN)
        for name, action in STEPS.items():
            begin, taken = time.perf_counter(), cpu()
            page.evaluate(f"() => {{ {action}; return new Promise(done => requestAnimationFrame(done)); }}")
            print(f"{name:10}{time.perf_counter() - begin:8.2f}{cpu() - taken:8.2f}")
        browser.close()


def opens(browser: Browser, path: Path) -> tuple[float, float]:
    """Seconds, by the clock and of CPU, until all charts of the page are drawn."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    begin, taken = time.perf_counter(), cpu()
    page.goto(path.resolve().as_uri())
    page.wait_for_function(DRAWN)
    found = time.perf_counter() - begin, cpu() - taken
    page.close()
    return found


def cpu() -> float:
    """Seconds of CPU that the processes below this one have taken."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            if "chrom" in process.name():
                times = process.cpu_times()
                total += times.user + times.system
        except psutil.Error:
            continue  # it has ended
    return total


if __name__ == "__main__":
    main()
