"""Measure how long a GPT-2 takes to compile, pass by pass, and how much memory the master needs.

python benchmarks/compile.py                    12 and 48 layers, each layout in a process of its own
python benchmarks/compile.py one 48 megatron    one of them: data, megatron, zero or auto (the solver)
"""

from __future__ import annotations

import itertools
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import click
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import actorflow as flow
from actorflow.script_state.search import find_state
from actorflow_compiler.capture.capture import TensorArgument
from actorflow_compiler.capture.request import Listeners, Preferences, StepRequest, TargetDevices, UserStep
from actorflow_compiler.compile import compile_step
from actorflow_compiler.core.garbage_collection import young_only
from actorflow_compiler.hints.goal import goal_of
from actorflow_compiler.hints.hints import resolve
from actorflow_scheduler.schedule import schedule

SIZES = {12: (768, 12), 48: (1600, 25)}  # layers: (width, heads) of GPT-2 and of its largest form
TARGETS = {12: 4.0, 48: 15.0}  # seconds of hinted plans on 2 cores
BATCH, CONTEXT = 8, 1024


def megatron(model: nn.Module) -> None:
    """Column, then row; the fused projection in three blocks, the tied embedding over the vocabulary."""
    from actorflow_compiler.core.sbp import Split

    flow.distribute(model, {
        r".*c_attn\.weight": Split(1, 3), r".*c_attn\.bias": Split(0, 3),
        r".*c_fc\.weight": flow.sbp.split(1), r".*c_fc\.bias": flow.sbp.split(0),
        r".*c_proj\.weight": flow.sbp.split(0), r"transformer\.wte\.weight": flow.sbp.split(0),
    })  # fmt: skip


LAYOUTS: dict[str, tuple[str, Callable[[nn.Module], None]]] = {
    "data": ("data", lambda _: None),
    "megatron": ("tensor", megatron),
    "zero": ("data", lambda model: flow.zero(model, stage=1)),
    "auto": ("auto", lambda _: None),
}


@click.group(invoke_without_command=True)
@click.option("--devices", default=4)
@click.pass_context
def main(context: click.Context, devices: int) -> None:
    """Measure compiling."""
    if context.invoked_subcommand is not None:
        return
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} threads")
    for layers in SIZES:
        for layout in LAYOUTS:
            command = [sys.executable, __file__, "one", str(layers), layout, "--devices", str(devices)]
            print(flush=True)
            subprocess.run(command, check=True)


@main.command()
@click.argument("layers", type=click.Choice([str(n) for n in SIZES]))
@click.argument("layout", type=click.Choice(list(LAYOUTS)))
@click.option("--devices", default=4)
def one(layers: str, layout: str, devices: int) -> None:
    """One model and one layout."""
    width, heads = SIZES[int(layers)]
    with flow.deferred_init():
        model = GPT2LMHeadModel(
            GPT2Config(n_layer=int(layers), n_embd=width, n_head=heads, n_positions=CONTEXT,
                       resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
        ).train()  # fmt: skip
    mode, hint = LAYOUTS[layout]
    hint(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    begun: list[tuple[str, float]] = []

    def doing(name: str) -> None:
        begun.append((name, time.perf_counter()))

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    state = find_state(step, model, optimizer)
    tokens = TensorArgument("tokens", (BATCH, CONTEXT), torch.int64, True)
    cpu = time.process_time()
    with young_only():  # as a session compiles
        laid = compile_step(
            StepRequest(
                UserStep("step", lambda given: [step(*given)], [tokens], state, train=True),
                TargetDevices(devices),
                Preferences(resolve(state.modules), goal=goal_of(mode, None)),
                listeners=Listeners(doing=doing),
            )
        )
        doing("cut")
        plan = laid.cut()
        doing("schedule")
        schedule(plan)
        doing("")
    cpu = time.process_time() - cpu
    total = begun[-1][1] - begun[0][1]
    passes = ", ".join(f"{name} {end - start:.1f}" for (name, start), (_, end) in itertools.pairwise(begun))
    size = sum(p.numel() for p in model.parameters()) / 1e6
    target = f" (target {TARGETS[int(layers)]:.0f} s)" if layout != "auto" else ""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KB
    print(f"GPT-2, {layers} layers, {size:.0f}M parameters, {layout}, {devices} devices: {total:.1f} s{target}, "
          f"{cpu:.1f} s of CPU time, "
          f"{memory:.2f} GB at most (target 4)\n  seconds: {passes}")  # fmt: skip
    for note in plan.notes:
        print(f"  {note}")


if __name__ == "__main__":
    main()
