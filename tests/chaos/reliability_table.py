"""Make the table of docs/reliability.md from what campaigns have found.

    python tests/chaos/reliability_table.py RESULTS … -- RESULTS OF THE PEER …

A run counts for the first of its faults that came, and for what it was to do: to end, to go on, or to start again.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PROMISED = {
    "kill a rank": "ends; starts again",
    "kill a launcher": "ends on all nodes",
    "kill the fork server": "goes on",
    "kill a data worker": "ends; starts again",
    "kill the solver process": "goes on",
    "stop a rank for good": "ends after `--lost-after`; starts again",
    "stop a rank and let it go on": "goes on",
    "stop a launcher and let it go on": "goes on",
    "stop all processes and let them go on": "goes on",
    "partition for good": "ends on both sides; 1:2 goes on",
    "partition that heals": "goes on",
    "reset links": "ends, or goes on",
    "slow network that loses packets": "goes on",
    "full disk of logs": "ends",
    "full disk of checkpoints": "ends",
    "full /dev/shm": "goes on",
    "out of memory in a cgroup": "ends; starts again",
    "exception on a rank": "ends; starts again",
    "sys.exit(3) on a rank": "ends with 3; starts again",
    "slow rank": "goes on",
    "clock jump": "goes on",
}


def read(paths: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """The runs of each kind of fault."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for path in paths:
        for line in Path(path).read_text().splitlines():
            run = json.loads(line)
            if not run["missing"] and run["came"]:
                found[run["came"][0]].append(run)
    return found


def of_peer(runs: Sequence[dict[str, Any]]) -> str:
    """What the peer's runs have come to, in words."""
    if not runs:
        return "–"
    hung = sum(run["hang"] for run in runs)
    ended = [run for run in runs if not run["hang"]]
    well = sum(all(status == 0 for status in run["statuses"]) for run in ended)
    badly = [run for run in ended if any(run["statuses"])]
    words = [f"{hung} of {len(runs)} still stood after 60 s"] if hung else []
    words += [f"{well} went on"] if well else []
    if badly:
        seconds = statistics.median(run["seconds"] for run in badly)
        named = sum(run["named"] for run in badly)
        words.append(f"{len(badly)} ended ({seconds:.0f} s), culprit named in {named}")
    left = sum(any("process" in wrong for wrong in run["wrong"]) for run in ended)
    words += [f"processes left in {left}"] if left else []
    return "; ".join(words)


def main(arguments: Sequence[str]) -> str:
    """The table."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    ours, theirs = read(arguments[:split]), read(arguments[split + 1 :])
    lines = ["| fault | promised | runs | as promised | torchrun and DDP |", "|---|---|---|---|---|"]
    for kind, promised in PROMISED.items():
        runs = ours.get(kind, [])
        kept = sum(not run["wrong"] for run in runs)
        peer = "–" if kind == "full disk of logs" else of_peer(theirs.get(kind, []))  # its ranks print to the terminal
        lines.append(f"| {kind} | {promised} | {len(runs)} | {kept} | {peer} |")
    total = [run for runs in ours.values() for run in runs]
    lines.append(f"| all | | {len(total)} | {sum(not run['wrong'] for run in total)} | |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(main(sys.argv[1:]))
