"""Measure how compiling and forecasting grow with the number of devices: the same GPT on 16 to 16,384 of them.

python benchmarks/devices.py                    16, 256, 4,096 and 16,384 devices, each in a process of its own
python benchmarks/devices.py --write            the same, and the table of docs/performance.md
python benchmarks/devices.py one 4096           one of them, with the seconds of each pass
python benchmarks/devices.py run 256            a plan of all ranks, as for a run, and the messages to them

Stages of (data × tensor) devices, of which only the data axis grows, with as many samples for each replica.  Of ranks
that are alike one is compiled, as by ``actorflow plan --forecast``.  Times are CPU time of the one thread that does all
this; "plan" is what the plan takes when it is written.
"""

from __future__ import annotations

import itertools
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import click
from gpt_request import training_request

import actorflow as flow
from actorflow_compiler.capture.request import Listeners, StepRequest, TargetDevices
from actorflow_compiler.compile import capture_step, fold_captured
from actorflow_compiler.core.garbage_collection import young_only
from actorflow_compiler.core.sbp import Split
from actorflow_compiler.plan import proto
from actorflow_compiler.plan.rank_parts import split
from actorflow_scheduler.forecast import forecast
from actorflow_scheduler.hardware_file import read_hardware
from actorflow_scheduler.schedule import schedule, schedule_folded

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- made by benchmarks/devices.py: begin -->", "<!-- end -->"
DEVICES = (16, 256, 4096, 16384)
TENSOR, STAGES, MICRO_BATCHES = 2, 4, 8
LAYERS, WIDTH, HEADS, CONTEXT = 8, 1024, 16, 1024
MEGATRON = {  # of weights over (data, tensor)
    r".*qkv\.(weight|bias)": (None, Split(0, 3)),  # queries, keys and values are each split
    r".*up\.(weight|bias)": (None, flow.sbp.split(0)),
    r".*(projection|down)\.weight": (None, flow.sbp.split(1)),
}


@click.group(invoke_without_command=True)
@click.option("--write", is_flag=True, help="Write the table of docs/performance.md.")
@click.pass_context
def main(context: click.Context, write: bool) -> None:
    """Measure compiling and forecasting on ever more devices."""
    if context.invoked_subcommand is not None:
        return
    lines = [
        "| devices | classes of ranks | capture | compile | forecast | memory at most | plan |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    print("\n".join(lines), flush=True)
    for devices in DEVICES:
        command = [sys.executable, __file__, "one", str(devices), "--json"]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        lines.append(
            f"| {devices:,} | {found['classes']} | {found['capture']:.1f} s | {found['compile']:.1f} s | "
            f"{found['forecast']:.2f} s | {found['memory']:.0f} MB | {found['actors']} actors, "
            f"{found['bytes'] / 1e6:.2f} MB |"
        )
        print(lines[-1], flush=True)
    if write:
        before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text("\n".join([f"{before}{BEGIN}\n", *lines, f"\n{END}{after}"]), encoding="utf-8")


def request_of(devices: int, listeners: Listeners) -> StepRequest:
    """The training step of the GPT on so many devices."""
    sys.path.append(str(ROOT / "examples"))
    from gpt import GPT

    data = devices // (TENSOR * STAGES)
    with flow.deferred_init():
        model = GPT(LAYERS, WIDTH, HEADS, CONTEXT)
    flow.place(model, stages=STAGES)
    flow.distribute(model, MEGATRON)
    return training_request(
        model,
        (data * MICRO_BATCHES, CONTEXT),
        TargetDevices(devices, "cpu", read_hardware(ROOT / "examples" / "h100x8.toml")),
        {"data": data, "tensor": TENSOR},
        MICRO_BATCHES,
        listeners,
    )


@main.command()
@click.argument("devices", type=click.IntRange(2 * TENSOR * STAGES))
@click.option("--json", "as_json", is_flag=True, help="Only the figures.")
def one(devices: int, as_json: bool) -> None:
    """One number of devices."""
    begun: list[tuple[str, float]] = []

    def doing(name: str) -> None:
        begun.append((name, time.process_time()))

    request = request_of(devices, Listeners(doing=doing))
    with young_only():  # as a session compiles
        captured = capture_step(request)
        step = fold_captured(captured, request)
        doing("cut and schedule")
        folded = schedule_folded(step.cut, request.devices.hardware, name="1f1b")
        doing("forecast")
        forecast(folded, request.devices.hardware)
        doing("")
    passes = [(name, end - start) for (name, start), (_, end) in itertools.pairwise(begun)]
    seconds = dict(passes)
    figures = {
        "classes": len(folded.rank_classes),
        "capture": seconds["capture"],
        "compile": sum(s for name, s in passes if name not in ("capture", "forecast")),
        "forecast": seconds["forecast"],
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,  # KB
        "actors": len(folded.plan.actors),
        "bytes": len(proto.to_bytes(folded.plan)),
    }
    print(json.dumps(figures) if as_json else f"{figures}\nseconds: {', '.join(f'{n} {s:.1f}' for n, s in passes)}")


@main.command()
@click.argument("devices", type=click.IntRange(2 * TENSOR * STAGES))
def run(devices: int) -> None:
    """A plan that runs: compiled for all ranks, scheduled, proven, and made into the messages to them."""
    begun: list[tuple[str, float]] = []

    def doing(name: str) -> None:
        begun.append((name, time.process_time()))

    request = request_of(devices, Listeners(doing=doing))
    with young_only():
        step = fold_captured(capture_step(request), request, shown=True, runs=True)
        doing("cut, schedule and prove")
        plan = schedule(step.cut, request.devices.hardware, name="1f1b")
        doing("messages")
        parts = split(plan, range(1, devices))
        doing("")
    alone = len(proto.to_bytes(plan.for_rank(devices - 1)))
    passes = ", ".join(f"{name} {end - start:.1f}" for (name, start), (_, end) in itertools.pairwise(begun))
    print(
        f"{devices} devices, {len(plan.actors)} actors; a message of {len(parts.shared) / 1e6:.2f} MB to all, and one"
        f" to each of {len(parts.classes)} classes, {sum(map(len, parts.classes)) / 1e6:.2f} MB in all; one to each"
        f" rank would be {devices} of {alone / 1e6:.2f} MB\nseconds: {passes}"
    )


if __name__ == "__main__":
    main()
