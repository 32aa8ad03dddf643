"""Run random scripts under the launcher and report what becomes of each, also where one kills or stops its run.

    python tests/random_script_runs.py 0 1000                            # on one device
    python tests/random_script_runs.py 0 100 --devices 2 --layout each   # data 2, tensor 2, pipeline 2, ZeRO 3, in turn

prints a line for each that is not the same, and counts.  Many scripts share a run, as starting one takes seconds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from watched import lines_of, watched

__all__ = ["FINE", "Outcome", "outcomes"]

SCRIPT = Path(__file__).parent / "random_scripts.py"
PATIENCE = 180.0  # seconds that one script may take: a machine that does much else takes some for what is done in one
FINE = ("same", "skipped", "refused", "refused as documented")  # from better to worse


@dataclass(frozen=True)
class Outcome:
    """What became of a script; beside what ``random_scripts`` says it may have "died"."""

    seed: int
    kind: str
    text: str = ""
    layout: str = ""
    titles: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = self.text.strip().splitlines() or [""]
        said = lines[-1] if self.kind in ("failed", "hung", "died") else " ".join(lines)[:600]
        return f"{self.seed} {self.kind} | {', '.join(self.titles)} | {self.layout} | {said}"


def outcomes(
    seeds: range, devices: int = 1, layout: str = "one device", python: str = sys.executable,
    tell: Callable[[Outcome], object] = lambda _: None,
) -> list[Outcome]:  # fmt: skip
    """Run scripts; ``tell`` is called with each outcome as soon as its run has ended."""
    found: list[Outcome] = []
    at = seeds.start
    while at < seeds.stop:
        ended = _run(range(at, seeds.stop), devices, layout, python)
        for one in ended:
            tell(one)
        found += ended
        at = ended[-1].seed + 1
    return found


def _run(seeds: range, devices: int, layout: str, python: str) -> list[Outcome]:
    """Run scripts until one has failed; there is at least one outcome."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = [] if devices == 1 else ["-m", "actorflow", "run"]
        options = [] if devices == 1 else ["--devices", str(devices), "--no-bar", "--"]
        command = [python, *launcher, str(SCRIPT), *options, str(seeds.start), "--until", str(seeds.stop)]
        path = os.pathsep.join([str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")])
        with (Path(folder) / "said").open("w+") as said:
            process = subprocess.Popen(
                [*command, "--layout", layout, "--into", folder], stdout=said, stderr=said,
                env={**os.environ, "PYTHONPATH": path},
            )  # fmt: skip
            stuck = not watched(process, Path(folder), PATIENCE)
            said.seek(0)
            words = "\n".join(said.read().splitlines()[-12:])
        lines = [lines_of(Path(folder) / f"rank {rank}") for rank in range(devices)]
    found = []
    for seed in seeds:
        of = [[line for line in mine if line["seed"] == seed] for mine in lines]
        ended = [line for mine in of for line in mine if line["kind"]]
        if len(ended) < devices and not any(line["kind"] not in FINE for line in ended):
            if any(of) or not found:
                known: dict[str, Any] = next((line for mine in of for line in mine), {})
                titles = tuple(known.get("titles", ()))
                found.append(Outcome(seed, "hung" if stuck else "died", words, known.get("layout", ""), titles))
            break
        found.append(_worst(ended))
        if len(ended) < devices or found[-1].kind in ("hung", "failed"):
            break
    return found


def _worst(lines: Sequence[dict[str, Any]]) -> Outcome:
    """What became of a script on all ranks."""
    line = max(lines, key=lambda line: FINE.index(line["kind"]) if line["kind"] in FINE else len(FINE))
    kinds = {line["kind"] for line in lines}
    kind = f"ranks apart: {sorted(kinds)}" if len(kinds) > 1 and line["kind"] in FINE else line["kind"]
    return Outcome(line["seed"], kind, line["text"], line["layout"], tuple(line["titles"]))


def main() -> None:
    """Run scripts, and print what is not the same."""
    parser = argparse.ArgumentParser()
    parser.add_argument("start", type=int)
    parser.add_argument("stop", type=int)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--layout", default="one device")
    parser.add_argument("--at-once", type=int, default=25, help="scripts of one run")
    asked = parser.parse_args()
    counts: Counter[str] = Counter()

    def tell(one: Outcome) -> None:
        counts[one.kind] += 1
        if one.kind != "same":
            print(one, flush=True)

    for first in range(asked.start, asked.stop, asked.at_once):
        seeds = range(first, min(first + asked.at_once, asked.stop))
        outcomes(seeds, asked.devices, asked.layout, tell=tell)
        print(f"up to {seeds.stop}:", dict(counts), flush=True)


if __name__ == "__main__":
    main()
