"""Write what fired on one rank to a file, in the notation of pipeline schedules."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from actorflow_compiler.plan.plan import Plan
from actorflow_scheduler.notation import observed

ITERATIONS = 100  # recorded of each plan; later iterations fire in the same order


def write(folder: str, rank: int, fired: Iterable[tuple[Plan, tuple[int, ...]]]) -> None:
    """Write ``rankN.txt``: for each plan its name, then one line of compute-queue firings for each iteration."""
    path = Path(folder) / f"rank{rank}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [line for plan, actors in fired for line in (f"plan {plan.name}", *observed(plan, rank, actors))]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
