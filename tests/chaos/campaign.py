"""Run many scenarios of the fault suite, one after the other, and make a table of what was promised and kept.

    make chaos ARGS="--runs 50 --seed 1"

A scenario is all in its seed: ``--seed 17 --runs 1`` repeats it.  ``--peer ddp`` gives the same faults to the same
model under torchrun and DistributedDataParallel.  What is not as promised is kept in ``--out``, and makes the exit
status 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from chaos.grounds import Ground, temporary_ground
from chaos.scenarios import IN_SCRIPT, OF_NETWORKS, Kind, Scenario, draw
from chaos.trial import Trial, run_trial, undisturbed

PEER_KINDS = frozenset(
    {Kind.KILL_RANK, Kind.KILL_LAUNCHER, Kind.STOP_RANK, Kind.PAUSE_RANK, *IN_SCRIPT, *OF_NETWORKS}
) - {Kind.SLOW_NETWORK}


class Campaign:
    """Trials of one ground, with the losses of undisturbed runs that they are compared with."""

    def __init__(self, ground: Ground, out: Path, peer: bool = False) -> None:
        self._ground, self._out, self._peer = ground, out, peer
        self._references: dict[Scenario, Mapping[int, set[str]]] = {}

    def trial(self, scenario: Scenario) -> Trial:
        """Run a scenario, and before it an undisturbed run of the same shape, once for all."""
        calm = undisturbed(scenario, self._peer)
        if calm not in self._references:
            found = run_trial(calm, self._ground, None, self._out, self._peer)
            if found.wrong and not self._peer:
                wrong = [f"where nothing happened: {one}" for one in found.wrong]
                return dataclasses.replace(found, scenario=scenario, wrong=wrong)
            if not found.missing:
                self._references[calm] = found.losses
        return run_trial(scenario, self._ground, self._references.get(calm), self._out, self._peer)


def of_peer(scenario: Scenario) -> Scenario:
    """The scenario as torchrun can have it: data parallel, with processes that are started whole."""
    return dataclasses.replace(scenario, layout="data", elastic=False, whole=True, faults=scenario.faults[:1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print a line for each scenario, and a table at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the first run; each next one has the next")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=1e9, help="no run is begun after so many")
    parser.add_argument("--only", default="", help="kinds of faults, parted by commas")
    parser.add_argument("--peer", choices=("ddp",), help="torchrun with DDP instead")
    parser.add_argument("--out", type=Path, default=Path("build/chaos"))
    options = parser.parse_args(arguments)
    kinds = [Kind(one.strip()) for one in options.only.split(",") if one.strip()] or list(Kind)
    if options.peer:
        kinds = [kind for kind in kinds if kind in PEER_KINDS]
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that networks and disks are removed
    results = options.out / f"results{options.peer or ''}.{options.seed}.jsonl"
    begun, trials = time.monotonic(), []
    with temporary_ground() as ground, results.open("w") as file:
        campaign = Campaign(ground, options.out, bool(options.peer))
        for seed in range(options.seed, options.seed + options.runs):
            if time.monotonic() - begun > 60 * options.minutes:
                break
            scenario = draw(seed, kinds)
            found = campaign.trial(of_peer(scenario) if options.peer else scenario)
            trials.append(found)
            print(line(found), flush=True)
            file.write(json.dumps(record(found)) + "\n")
            file.flush()
    print("\n" + table(trials))
    return int(any(not trial.kept for trial in trials) and not options.peer)


def line(trial: Trial) -> str:
    """A trial for people."""
    if trial.missing:
        return f"left out ({trial.missing}): {trial.scenario.text}"
    how = "kept" if trial.kept else "NOT KEPT: " + "; ".join(trial.wrong)
    came = f"{len(trial.came)}/{len(trial.scenario.faults)} came"
    return f"{trial.whole:5.1f} s, {trial.seconds:5.1f} s after, {trial.statuses}, {came}: {trial.scenario.text}: {how}"


def record(trial: Trial) -> dict[str, object]:
    """A trial as plain data."""
    return {
        "seed": trial.scenario.seed,
        "shape": trial.scenario.shape,
        "text": trial.scenario.text,
        "kinds": [fault.kind for fault in trial.scenario.faults],
        "came": [fault.kind for fault in trial.came],
        "restarts": trial.scenario.restarts,
        "statuses": trial.statuses,
        "seconds": trial.seconds,
        "whole": trial.whole,
        "named": trial.named,
        "hang": trial.hang,
        "losses": len(trial.losses),
        "missing": trial.missing,
        "wrong": trial.wrong,
    }


def table(trials: Sequence[Trial]) -> str:
    """How many runs each kind of fault was in, and in how many of them all was as promised."""
    runs, kept, left_out = Counter[str](), Counter[str](), Counter[str]()
    for trial in trials:
        if trial.missing:
            left_out[trial.missing] += 1
            continue
        for kind in {fault.kind for fault in trial.came} or {"none came"}:
            runs[str(kind)] += 1
            kept[str(kind)] += trial.kept
    lines = [f"| {kind} | {runs[kind]} | {kept[kind]} |" for kind in sorted(runs)]
    lines += [f"left out, for want of {name}: {count}" for name, count in sorted(left_out.items())]
    whole = [trial for trial in trials if not trial.missing]
    lines.append(f"{len(whole)} runs, {sum(trial.kept for trial in whole)} as promised")
    return "\n".join(["| fault | runs | kept |", "|---|---|---|", *lines])


if __name__ == "__main__":
    sys.exit(main())
