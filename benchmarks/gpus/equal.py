"""Check that every plan of the tests trains on the given device type as one device does.

All ranks are threads of this process and share the device; what passes between them is staged through host memory.
The reference is eager PyTorch on the same device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actorflow.devices import Device, make_device
from actorflow_compiler.core.placement import placement
from actorflow_compiler.core.sbp import Split
from actorflow_compiler.hints.goal import Goal, ParallelMode
from actorflow_compiler.hints.hints import distribute, zero
from gpus.tell import tell, told
from models import CASES, Case, reference
from trained import Layout, differences, in_float64, plan_of, train

STEPS = 3
LOSSES, PARAMETERS = 1e-7, 1e-6  # how far they may differ, relatively, in float64
HALF = 2e-2  # losses in bfloat16
MEGATRON = {r".*(qkv|up)\.weight": (None, Split(0)), r".*(projection|down)\.weight": (None, Split(1))}


def both(model: nn.Module) -> None:
    """ZeRO on one axis of a mesh, tensor parallelism on the other."""
    zero(model, 3)
    distribute(model, MEGATRON)


def layouts(kind: str) -> dict[str, Layout]:
    """The plans, for this kind of device."""
    mesh = placement(kind, [[0, 1], [2, 3]])
    found = {
        "1 rank": Layout(1),
        "1 rank, 4 micro-batches": Layout(1, 4),
        "data 2": Layout(2),
        "data 4": Layout(4),
        "tensor 2": Layout(2, goal=Goal((ParallelMode.TENSOR,))),
        "pipeline 2": Layout(2, 4, pipeline=True),
        "data 2 × pipeline 2": Layout(4, 4, pipeline=True),
        "data 2 × tensor 2": Layout(4, goal=Goal((ParallelMode.DATA, ParallelMode.TENSOR), mesh=(2, 2))),
        **{f"ZeRO {n}, 2 ranks": Layout(2, 2, prepare=lambda m, n=n: zero(m, n)) for n in (1, 2, 3)},
        "ZeRO 3, 4 ranks": Layout(4, prepare=lambda m: zero(m, 3)),
        "ZeRO 3 × tensor 2": Layout(4, mesh=mesh, prepare=both),
    }
    return {name: replace(layout, kind=kind) for name, layout in found.items()}


def on(case: Case, device: torch.device) -> Case:
    """The case with its model on the device, as a script for one device has it; batches stay on the host."""
    return replace(case, make=lambda: case.make().to(device))


def eagerly(case: Case, device: torch.device, size: int, pieces: int) -> tuple[list[float], dict[str, Tensor]]:
    """The reference."""
    model = case.model()
    batches = [tuple(t.to(device) for t in batch) for batch in case.batches([size] * STEPS)]
    losses, state = reference(
        model, case.optimizer(model), case.loss, batches, pieces if case.batch_norm else 1, case.clip
    )
    return losses, {name: value.cpu() for name, value in state.items()}


def planned(
    case: Case, layout: Layout, device: Callable[[int], Device], size: int
) -> tuple[list[float], dict[str, Tensor]]:
    """The same by a plan."""
    plan, values, optimizer = plan_of(case, layout, size)
    return train(case, plan, values, optimizer, [size] * STEPS, device)


def half(kind: str) -> Case:
    """A GPT under autocast, whose attention is what torch picks for bfloat16."""

    def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(kind, torch.bfloat16):
            return F.cross_entropy(model(tokens).flatten(0, -2), targets.flatten())

    return replace(CASES["clipped gpt"], loss=loss)


def apart(found: list[float], expected: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / max(abs(b), 1e-30) for a, b in zip(found, expected, strict=True))


def main(kind: str) -> None:
    """Train every case by every plan."""
    torch.backends.cudnn.allow_tf32 = False
    device = torch.device(kind)
    names = ["mlp", "cnn", "clipped gpt"] if kind == "cuda" else ["mlp", "clipped gpt"]
    cases = {name: on(in_float64(CASES[name]), device) for name in names}
    cases["gpt in bfloat16"] = on(half(kind), device)
    wanted: dict[tuple[str, int], tuple[list[float], dict[str, Tensor]]] = {}

    def compare(name: str, layout: Layout) -> None:
        """Train every case by one plan."""
        worst, most, culprit = 0.0, 0.0, ""
        chosen = {n: c for n, c in cases.items() if n == "clipped gpt"} if name == "ZeRO 3 × tensor 2" else cases
        near = True
        for title, case in chosen.items():
            key = (title, layout.micro_batches if case.batch_norm else 1)
            if key not in wanted:
                wanted[key] = eagerly(case, device, 16, key[1])
            losses, state = planned(case, layout, lambda rank: make_device(device), 16)
            gap = apart(losses, wanted[key][0])
            if "bfloat16" in title:
                near = near and gap <= HALF
                continue
            parameters = max(differences(state, wanted[key][1]).values())
            if max(gap, parameters) >= max(worst, most):
                culprit = title
            worst, most = max(worst, gap), max(most, parameters)
        holds = worst <= LOSSES and most <= PARAMETERS and near
        found = f"losses {worst:.0e}, parameters {most:.0e} apart ({culprit}){'' if near else '; bfloat16 further'}"
        tell(f"{name} ({', '.join(chosen)})", found, f"≤ {LOSSES:.0e}, {PARAMETERS:.0e} in float64", holds)

    for name, layout in layouts(kind).items():
        if kind == "cpu" and name not in ("1 rank", "data 2 × pipeline 2", "ZeRO 3 × tensor 2"):
            continue
        with told(name):
            compare(name, layout)


if __name__ == "__main__":
    main(sys.argv[1])
