"""Measure time and memory of judging a plan for 16,384 devices and of cutting a model of 200 layers.

python benchmarks/forecast.py --hardware examples/h100x8.toml
"""

from __future__ import annotations

import resource
import time
from pathlib import Path

import click

from actorflow_compiler.placing.partition import PartitionUnit, partition
from actorflow_scheduler.forecast import forecast
from actorflow_scheduler.forecast_text import to_text
from actorflow_scheduler.hardware_file import read_hardware
from actorflow_scheduler.outline import outline

HARDWARE = Path(__file__).parent.parent / "examples" / "h100x8.toml"
TOKENS, WIDTH = 4096, 8192  # of a micro-batch; of the model
PARAMETERS = 12 * WIDTH**2  # of a layer
BLOCKS = 2  # residual blocks of a layer: attention and the rest


def memory() -> float:
    """MB that the process held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@click.command()
@click.option("--stages", default=64)
@click.option("--replicas", default=256)
@click.option("--micro-batches", default=512)
@click.option("--layers", default=200, help="Of the model that is cut into 16 stages.")
@click.option("--hardware", default=str(HARDWARE), type=click.Path(exists=True, dir_okay=False))
def main(stages: int, replicas: int, micro_batches: int, layers: int, hardware: str) -> None:
    """Describe a pipeline with two transformer layers in a stage, and forecast it; cut a deeper one."""
    machine = read_hardware(hardware)
    before = memory()
    start = time.perf_counter()
    plan = outline(
        stages, micro_batches, replicas, flops=2.0 * 2 * PARAMETERS * TOKENS, sent=TOKENS * WIDTH,
        saved=2 * TOKENS * WIDTH, parameters=2 * PARAMETERS, ahead=1,
    )  # fmt: skip
    described = time.perf_counter()
    found = forecast(plan, machine)
    done = time.perf_counter()
    firings = sum(a.rate for a in plan.plan.actors)
    print(to_text(found), end="")
    print(
        f"\n{found.world} devices, {firings} firings in an iteration of the ranks that differ: described in "
        f"{described - start:.2f} s, forecast in {done - described:.2f} s (target: 3 s together), {memory():.0f} MB at "
        f"most, {before:.0f} of them before"
    )
    block = PartitionUnit(
        seconds=6.0 * PARAMETERS * TOKENS / BLOCKS / machine.flops_per_s,
        parameters=16.0 * PARAMETERS / BLOCKS,
        activations=2.0 * TOKENS * WIDTH,
        crossing=4.0 * TOKENS * WIDTH,
    )
    head = PartitionUnit(seconds=3 * block.seconds, parameters=block.parameters, activations=block.activations)
    units = [block] * (BLOCKS * layers) + [head]
    start = time.perf_counter()
    cut = partition(units, 16, bytes_per_second=machine.bytes_per_s, pieces=64)
    print(f"{layers} layers cut into 16 stages in {time.perf_counter() - start:.2f} s (target: 1 s): {list(cut)}")


if __name__ == "__main__":
    main()
