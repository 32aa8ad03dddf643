"""Forecast transformer layers whose sequence is split: keys and values gathered, heads exchanged, or a ring.

Of the ways in which attention can be split, each is forecast as if it were the only one.

python benchmarks/long_sequence.py --hardware examples/h100x8.toml
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from unittest.mock import patch

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actorflow.script_state.search import find_state
from actorflow_compiler.capture.capture import TensorArgument
from actorflow_compiler.capture.request import Preferences, StepRequest, TargetDevices, UserStep
from actorflow_compiler.compile import compile_step
from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.hints.goal import goal_of
from actorflow_compiler.hints.hints import resolve
from actorflow_compiler.infer import problem
from actorflow_compiler.infer.sequence_axis import SequenceOptions, along_sequence
from actorflow_scheduler.forecast import Forecast, forecast
from actorflow_scheduler.hardware_file import read_hardware
from actorflow_scheduler.schedule import schedule

HARDWARE = Path(__file__).parent.parent / "examples" / "h100x8.toml"
LAYERS, WIDTH, HEADS = 4, 4096, 32
GATHERED, EXCHANGED, AROUND = "keys and values gathered", "heads exchanged", "ring"


class Layer(nn.Module):
    """A layer of a decoder, float32[batch, positions, width] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Attention and a perceptron, each added to what comes in."""
        n, length, _ = x.shape
        q, k, v = self.qkv(self.before(x)).view(n, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        made: Tensor = x + self.down(F.gelu(self.up(self.between(x))))
        return made


def only(way: str, op: SequenceOptions) -> SequenceOptions:
    """The options of an op, of those of attention only the ones of this way."""
    among = {GATHERED: [o for o in op.sequence if o not in op.ring], EXCHANGED: op.heads, AROUND: op.ring}[way]
    kept = tuple(op.options[o] for o in among)
    return SequenceOptions(kept, tuple(range(len(kept))), attends=True) if op.attends and kept else op


def planned(way: str, tokens: int, devices: int, hardware: Hardware) -> tuple[Forecast, int]:
    """The forecast of a training step of a layer, and the bytes that attention moves in it between all devices."""
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    request = StepRequest(
        UserStep(
            "train", lambda given: [step(*given)], [TensorArgument("x", (1, tokens, WIDTH), torch.float32, True)],
            find_state(step, model=model, optimizer=optimizer), train=True,
        ),
        TargetDevices(devices, "cpu", hardware),
        Preferences(resolve({"": model}), 1, goal_of({"sequence": devices}, None)),
    )  # fmt: skip
    with patch.object(problem, "along_sequence", lambda *given: [only(way, op) for op in along_sequence(*given)]):
        plan = schedule(compile_step(request).cut, hardware)
    moved = dict(plan.summary.moved)
    return forecast(plan, hardware), sum(moved.values())


@click.command()
@click.option("--tokens", multiple=True, type=int, default=[32768, 131072], show_default=True)
@click.option("--devices", default=8)
@click.option("--hardware", default=str(HARDWARE), type=click.Path(exists=True, dir_okay=False))
def main(tokens: list[int], devices: int, hardware: str) -> None:
    """Print a row for each way, inside a node and with a node for each device."""
    machine = read_hardware(hardware)
    links = {"one node": machine, "a node each": dataclasses.replace(machine, inside=None, node_size=None)}
    print(f"| tokens | {devices} devices | attention | moves | step | activations and gradients |")
    print("|---|---|---|---|---|---|")
    for length in tokens:
        for where, of in links.items():
            for way in (GATHERED, EXCHANGED, AROUND):
                found, moved = planned(way, length, devices, of)
                held = max(rank.registers for rank in found.ranks)
                print(
                    f"| {length:,} | {where} | {way} | {moved / 1e9:.1f} GB | {found.period * 1e3:.1f} ms | "
                    f"{held / 1e9:.2f} GB |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
