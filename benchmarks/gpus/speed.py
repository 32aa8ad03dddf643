"""Measure the step time of a GPT in turns: with actorflow, in eager PyTorch and under torch.compile.

``python -m gpus.speed cuda autotuned`` is the same for kernels that are tried out, which compile for minutes.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import actorflow as flow
from gpus.setting import Setting, Step, seconds, setting, settle, synchronize
from gpus.tell import tell, told

Batch = tuple[torch.Tensor, torch.Tensor]
ROUNDS, STEPS, BATCHES = 7, 20, 5  # turns of each, steps in one, batches that they take in turn
LAYERS = 20  # 355M parameters


@dataclass(slots=True)
class Racer:
    """One way to make a step."""

    name: str
    step: Step
    batches: list[Batch]
    wait: Callable[[], object]  # until all steps are done
    steps: int  # in one turn
    times: list[float] = field(default_factory=list)  # seconds of a step, one for each turn

    def run(self) -> None:
        """The steps of one turn."""
        for number in range(self.steps):
            self.step(*self.batches[number % len(self.batches)])


def main(kind: str, which: str = "") -> None:
    """Time the steps in turns."""
    sizes, layers = setting(kind), LAYERS if kind == "cuda" else None
    batches, steps = (sizes.batches(BATCHES), STEPS) if kind == "cuda" else (sizes.batches(1), 1)
    there = [(x.to(kind), y.to(kind)) for x, y in batches]
    count = sum(p.numel() for p in sizes.model(layers).parameters()) / 1e6
    about = f"{count:.0f}M parameters, batch {sizes.batch} × {sizes.context}, bfloat16"

    def ours(mode: str | None) -> Racer:
        step = flow.global_function(type="train", compile=mode)(sizes.step(sizes.model(layers)))
        name = "actorflow" if mode is None else f"actorflow, {mode}"
        return Racer(name, step, batches, lambda: settle(kind), steps)

    def theirs(name: str, mode: str = "", fused: bool | None = True) -> Racer:
        return Racer(name, sizes.step(sizes.model(layers), mode, fused), there, lambda: synchronize(kind), steps)

    if which == "autotuned":
        race(sizes, about, [
            lambda: ours("max-autotune"),
            lambda: ours("max-autotune-no-cudagraphs"),
            lambda: theirs("torch.compile, max-autotune", "max-autotune"),
        ])  # fmt: skip
        return
    race(sizes, about, [
        lambda: ours(None),
        lambda: ours("inductor"),
        lambda: ours("reduce-overhead"),
        lambda: theirs("eager, AdamW as it is", fused=None),
        lambda: theirs("eager, fused AdamW"),
        *([lambda: theirs("torch.compile, fused AdamW", "default")] if kind == "cuda" else []),
    ])  # fmt: skip


def race(sizes: Setting, about: str, makers: list[Callable[[], Racer]]) -> None:
    """Tell how long each takes, and ours in relation to each of the others; and the first losses."""
    racers, first = [], {}
    for make in makers:  # compiles, allocates and warms up
        start = time.perf_counter()
        with told("a way to make a step"):
            racer = make()
            losses = [float(racer.step(*racer.batches[i % len(racer.batches)]).detach()) for i in range(5)]
            first[racer.name] = losses[0]
            racers.append(racer)
            tell(f"{racer.name}: until five steps are done", f"{time.perf_counter() - start:.1f} s")
    for turn in range(ROUNDS if sizes.kind == "cuda" else 2):
        for racer in racers if turn % 2 else racers[::-1]:
            racer.times.append(seconds(racer.run, racer.wait) / racer.steps)
    for racer in racers:
        low, high = min(racer.times) * 1e3, max(racer.times) * 1e3
        found = f"{statistics.median(racer.times) * 1e3:.2f} ms ({low:.2f} … {high:.2f})"
        tell(f"{racer.name}: a step ({about})", found)
    mine = [r for r in racers if r.name.startswith("actorflow")]
    others = [r for r in racers if r not in mine]
    best_of_theirs = min(others, key=lambda r: statistics.median(r.times), default=None)
    best_of_ours = min(mine, key=lambda r: statistics.median(r.times), default=None)
    for one in mine:
        for other in others:
            ratio = statistics.median(a / b for a, b in zip(one.times, other.times, strict=True))
            target = one is best_of_ours and other is best_of_theirs and sizes.kind == "cuda"
            holds = ratio <= 1.0 if target else None
            tell(f"{one.name} / {other.name}", f"{ratio:.3f}", "≤ 1.0 of the best" if target else "", holds)
    reference = next((r.name for r in others), "")
    for one in mine:
        if reference:
            gap = abs(first[one.name] - first[reference]) / first[reference]
            tell(f"{one.name}: the first loss against {reference}'s", f"{gap:.1e} apart", "≤ 1e-03", gap <= 1e-3)


if __name__ == "__main__":
    main(*sys.argv[1:])
