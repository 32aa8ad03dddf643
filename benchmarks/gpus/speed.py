"""A kind of device enters; how long a step of a GPT takes leaves: ours, eager and under torch.compile, in turns."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch

import actorflow as flow
from gpus.setting import Step, seconds, setting, settle, synchronize
from gpus.tell import tell

Batch = tuple[torch.Tensor, torch.Tensor]
ROUNDS, STEPS = 7, 5  # turns of each, steps in one


def main(kind: str) -> None:
    """Time the steps in turns; torch.compile apart, as it may take minutes before its first step."""
    sizes = setting(kind)
    batches = sizes.batches(STEPS if kind == "cuda" else 1)
    there = [(x.to(kind), y.to(kind)) for x, y in batches]
    model = sizes.model()
    about = f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters, batch {sizes.batch} × {sizes.context}"
    ours = flow.global_function(type="train")(sizes.step(model))

    def race(others: dict[str, Step], claimed: str) -> dict[str, float]:
        """Tell how long each takes, and ours in relation to it; the first losses."""
        variants: dict[str, Step] = {"actorflow": ours, **others}
        ends: dict[str, Callable[[], object]] = dict.fromkeys(variants, lambda: synchronize(kind))
        ends["actorflow"] = lambda: settle(kind)
        fed = dict.fromkeys(variants, there) | {"actorflow": batches}
        first = {}
        for name, step in variants.items():  # compiles, allocates and warms up
            losses = [float(step(*fed[name][i % len(batches)]).detach()) for i in range(3)]
            first[name] = losses[0]
        taken: dict[str, list[float]] = {name: [] for name in variants}
        for turn in range(ROUNDS if kind == "cuda" else 2):
            for name in list(variants) if turn % 2 else list(variants)[::-1]:

                def run(step: Step = variants[name], batches: list[Batch] = fed[name]) -> None:
                    for batch in batches:
                        step(*batch)

                taken[name].append(seconds(run, ends[name]) / len(batches))
        for name, times in taken.items():
            low, high = min(times) * 1e3, max(times) * 1e3
            found = f"{statistics.median(times) * 1e3:.2f} ms ({low:.2f} … {high:.2f})"
            tell(f"{name}: a step ({about}, bfloat16)", found)
        for name in others:
            ratio = statistics.median(a / b for a, b in zip(taken["actorflow"], taken[name], strict=True))
            target = name == claimed and kind == "cuda"
            tell(f"actorflow / {name}", f"{ratio:.3f}", "≤ 1.0" if target else "", ratio <= 1.0 if target else None)
        return first

    eager = {"eager": sizes.step(sizes.model()), "eager, fused AdamW": sizes.step(sizes.model(), fused=True)}
    first = race(eager, "eager")
    gap = abs(first["actorflow"] - first["eager"]) / first["eager"]
    tell("the first loss against eager's", f"{gap:.1e} apart, relatively", "≤ 1e-03", gap <= 1e-3)
    if kind != "cuda":
        tell("torch.compile", "left out on a CPU, where it compiles for minutes")
        return
    compiled = sizes.model()
    try:
        race({"torch.compile, fused AdamW": sizes.step(compiled, torch.compile(compiled), fused=True)}, "")
    except Exception as error:  # no compiler for the host, an unsupported GPU, …
        tell("torch.compile", f"fails here: {type(error).__name__}: {str(error).splitlines()[0][:100]}")


if __name__ == "__main__":
    main(sys.argv[1])
