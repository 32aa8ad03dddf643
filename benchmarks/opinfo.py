"""Run torch's own operator samples on global tensors and on DTensors, and count those that pass.

python benchmarks/opinfo.py                        all operators, a few samples of each, three layouts of each sample
python benchmarks/opinfo.py --ops 'nn.functional'  those whose name holds the pattern
python benchmarks/opinfo.py --axes 2               on a mesh of 2 x 2
python benchmarks/opinfo.py --verbose              with a list of what has failed, and why

Four ranks are four threads of one process.  Operands are split, sums or whole, chosen by chance but the same each
time.  An operator *passes* when all of its cases do; it is *refused* if a case raises where one device does not,
*wrong* if a case gives another value, shape or dtype, and *not applicable* where there is nothing to compare: it draws
random numbers, has no gradient, takes no tensor, or torch cannot run its samples on this machine.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import re
import signal
import sys
import time
import warnings
from collections import Counter, defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

KINDS = ("passed", "refused", "wrong", "none")
LIMIT = 900.0  # seconds for one operator
Found = dict[str, list[tuple[str, str, str, str]]]  # system → of each case, forward and why, backward and why


def serve(pipe: Connection, systems: list[str], samples: int, layouts: int, axes: int, in_place: bool) -> None:
    """In a process of its own: an operator's name in, what became of its cases out."""
    import actorflow.eager.tensor_methods  # noqa: F401 -- so that global tensors know their ops
    from opinfo_dtensor import Theirs
    from opinfo_runs import Ours, cases, judge, operators

    faulthandler.register(signal.SIGUSR1)  # shows where all threads are
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    known = operators(in_place)
    running: dict[str, Any] = {name: {"actorflow": Ours, "DTensor": Theirs}[name](axes) for name in systems}
    while True:
        info = known[pipe.recv()]
        found: Found = {name: [] for name in systems}
        for case in cases(info, samples, layouts, axes):
            for name, system in running.items():
                forward, backward = judge(system, case)
                found[name].append((forward.kind, forward.why, backward.kind, backward.why))
        pipe.send(found)


class Worker:
    """A process that judges operators; one that crashes or hangs is replaced."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, *self._arguments), daemon=True)
        self._process.start()
        theirs.close()

    def judge(self, operator: str) -> Found | str:
        """What became of the operator's cases, or how the process ended over it."""
        try:
            self._pipe.send(operator)
            if self._pipe.poll(LIMIT):
                found: Found = self._pipe.recv()
                return found
            why = f"did not end in {LIMIT:.0f} s"
        except (EOFError, OSError):
            self._process.join()
            why = f"crashed: exit status {self._process.exitcode}"
        self._process.kill()
        self._process.join()
        self._start()
        return why

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def of_operator(kinds: list[str]) -> str:
    """The kind of an operator, of those of its cases."""
    order = ("wrong", "refused", "passed", "none")
    return min(kinds, key=order.index) if kinds else "none"


@click.command(help=__doc__)
@click.option("--ops", default=".", help="A regular expression that is looked for in names of operators.")
@click.option("--limit", default=3, help="Samples of each operator, spread over all that there are.")
@click.option("--layouts", default=3, help="Ways in which the operands of a sample lie.")
@click.option("--axes", type=click.IntRange(1, 2), default=1, help="Of the mesh: 4 ranks, or 2 x 2.")
@click.option("--in-place", is_flag=True, help="The forms that change their first operand.")
@click.option("--only", type=click.Choice(["actorflow", "DTensor"]), help="Judge one of the two.")
@click.option("--verbose", is_flag=True, help="List what was refused or wrong.")
@click.option("--json", "as_json", type=click.Path(), help="Write all of it to a file.")
def main(
    ops: str, limit: int, layouts: int, axes: int, in_place: bool, only: str | None, verbose: bool, as_json: str | None
) -> None:
    """See ``__doc__``."""
    from opinfo_runs import operators

    systems = [only] if only else ["actorflow", "DTensor"]
    names = [name for name in operators(in_place) if re.search(ops, name)]
    begun = time.monotonic()
    verdicts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)  # (system, direction) → operators
    cases: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    reasons: dict[str, dict[str, list[str]]] = {name: {"refused": [], "wrong": []} for name in systems}
    worker = Worker(systems, limit, layouts, axes, in_place)
    try:
        with click.progressbar(names, label="operators", file=sys.stderr) as bar:
            for operator in bar:
                found = worker.judge(operator)
                if as_json:
                    with Path(f"{as_json}.log").open("a") as log:
                        print(operator, found if isinstance(found, str) else "", file=log)
                for system in systems:
                    for at, direction in ((0, "forward"), (2, "backward")):
                        if isinstance(found, str):
                            kinds, whys = ["refused"], [f"{operator}: {found}"]
                        else:
                            kinds = [case[at] for case in found[system]]
                            whys = [case[at + 1] for case in found[system]]
                        verdicts[system, direction][of_operator(kinds)] += 1
                        cases[system, direction].update(kinds)
                        for kind in ("refused", "wrong"):
                            why = next((w for k, w in zip(kinds, whys, strict=True) if k == kind), None)
                            if why is not None and not (direction == "backward" and why in reasons[system][kind]):
                                reasons[system][kind].append(why)
    finally:
        worker.close()
    show(systems, names, verdicts, cases, time.monotonic() - begun)
    if verbose:
        for system in systems:
            for kind, lines in reasons[system].items():
                print(f"\n{system}: {kind}")
                for line in lines:
                    print(f"  {line}")
    if as_json:
        Path(as_json).write_text(json.dumps(reasons, indent=1))


def show(
    systems: list[str],
    names: list[str],
    verdicts: dict[tuple[str, str], Counter[str]],
    cases: dict[tuple[str, str], Counter[str]],
    seconds: float,
) -> None:
    """The table."""
    print(f"{len(names)} operators of OpInfo, torch {torch.__version__}, 4 ranks as threads, {seconds:.0f} s")
    header = f"{'':22}" + "".join(f"{kind:>9}" for kind in ("passed", "refused", "wrong", "n/a"))
    print(f"{'operators':22}{header[22:]}   {'cases':>8}{header[22:]}")
    for system in systems:
        for direction in ("forward", "backward"):
            ops, each = verdicts[system, direction], cases[system, direction]
            left = "".join(f"{ops[kind]:9}" for kind in KINDS)
            right = "".join(f"{each[kind]:9}" for kind in KINDS)
            print(f"{system + ' ' + direction:22}{left}   {'':8}{right}")


if __name__ == "__main__":
    main()
