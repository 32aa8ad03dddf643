"""Forecast published configurations of training runs, and compare with the published figures.

python benchmarks/foresight.py                              all rows, and the tables of docs/foresight.md
python benchmarks/foresight.py --row "Megatron 1.7B" --table ours --output -

Each model is captured without memory for its parameters, and *their* configuration (mesh, stages, micro-batches, ZeRO,
what is computed again) is compiled for one rank of each class, scheduled and forecast on a hardware file of
``examples/clusters``.  Nothing is tuned for a row: a hardware file has the figures of data sheets and one efficiency.
The second table has what ``parallel="auto"`` chooses for the same model, batch and devices.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import actorflow as flow
from actorflow.auto_parallel.search import ALIKE, Choice, Compared, PlanSearch
from actorflow.auto_parallel.space import marked_for_zero, open_choices
from actorflow.script_state.search import find_state
from actorflow.session.compiling import left_for_registers, memory_limit, room_beside_variables
from actorflow_compiler.capture.capture import TensorArgument
from actorflow_compiler.capture.from_fx import Capture
from actorflow_compiler.capture.request import Preferences, StepRequest, TargetDevices, UserStep
from actorflow_compiler.compile import capture_step, fold_captured
from actorflow_compiler.core.errors import ActorflowError
from actorflow_compiler.core.garbage_collection import young_only
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.hints.goal import Goal, goal_of
from actorflow_compiler.hints.hints import resolve
from actorflow_compiler.plan.folded import FoldedPlan
from actorflow_compiler.plan.modes import Mode
from actorflow_compiler.plan.rank_location import RankLocation
from actorflow_compiler.plan.variant import PLAIN, Variant
from actorflow_scheduler.fewer_pieces import forecast_draft
from actorflow_scheduler.forecast import Forecast, forecast
from actorflow_scheduler.hardware_file import read_hardware
from actorflow_scheduler.schedule import schedule_folded

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "docs" / "foresight.md"
END = "<!-- end -->"


class Block(nn.Module):
    """A layer of GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Samples × positions × width → the same."""
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """GPT as Megatron-LM has it, with its input and output embeddings tied where they are on one stage."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int, tied: bool) -> None:
        super().__init__()
        self.recompute = True  # each block in the backward pass
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Samples × positions → the same × vocabulary."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = x.to(torch.bfloat16)  # the residual stream, which autocast would keep in float32
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))


class LlamaBlock(nn.Module):
    """A layer of Llama 3, without the rotation of queries and keys, which takes no matrix product."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.size, self.shared = width // heads, heads // kv_heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv_heads * self.size, bias=False) for _ in range(2))
        self.proj = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Samples × positions × width → the same."""
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.q, self.k, self.v))
        k, v = (part.repeat_interleave(self.shared, dim=1) for part in (k, v))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
)


def every_second_product() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Selective checkpointing as torchtitan's ``selective_ac_option = "op"``.

    It keeps attention and every second matrix product.
    """
    made = [0, 0]  # products of the forward pass, and when it is computed again

    def policy(context: SelectiveCheckpointContext, op: object, *_: object, **__: object) -> CheckpointPolicy:
        made[context.is_recompute] += op in PRODUCTS
        kept = op in ATTENTION or (op in PRODUCTS and made[context.is_recompute] % 2 == 1)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Llama(nn.Module):
    """Llama 3."""

    def __init__(self, layers: int, width: int, heads: int, kv_heads: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.recompute = True  # as ``every_second_product`` says
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Samples × positions → the same × vocabulary."""
        x = self.tokens(tokens).to(torch.bfloat16)  # as FSDP's mixed precision has it there
        for block in self.blocks:
            keep = every_second_product
            x = checkpoint(block, x, use_reentrant=False, context_fn=keep) if self.recompute else block(x)
        return self.head(self.norm(x))


MEGATRON = {  # of weights over (data, tensor): as in "Megatron-LM: Training Multi-Billion Parameter Language Models"
    r".*\.(q|k|v|up)\.(weight|bias)": (None, flow.sbp.split(0)),
    r".*\.(proj|down)\.weight": (None, flow.sbp.split(1)),
    r"(tokens|head)\.weight": (None, flow.sbp.split(0)),
}


@dataclass(frozen=True, slots=True)
class Published:
    """A configuration whose speed was published."""

    name: str
    source: str
    hardware: str  # file in examples/clusters
    devices: int
    data: int
    tensor: int
    stages: int
    batch: int  # samples of the whole step
    micro_batch: int  # samples of one replica at a time
    length: int  # tokens of a sample
    model: Callable[[], Gpt | Llama]
    flops: float  # of a step, as the source counts them
    figure: float  # TFLOP/s of a device
    remark: str = ""
    zero: int = 0  # stage of ZeRO
    chunks: int = 1  # stages of each device, between which others come (interleaving)
    mode: Mode = Mode.INDUCTOR  # or eager; Megatron-LM has fused kernels of its own

    @property
    def pieces(self) -> int:
        """The number of micro-batches."""
        return self.batch // (self.data * self.micro_batch)

    def placements(self) -> list[Placement]:
        """The devices of each stage, a mesh of data × tensor."""
        ranks = torch.arange(self.devices).reshape(self.stages, self.data, self.tensor)
        return [flow.placement("cpu", each.tolist()) for each in ranks]


def megatron(
    size: str, layers: int, width: int, heads: int, tensor: int, stages: int, devices: int, batch: int, micro: int,
    figure: float, chunks: int = 1,
) -> Published:  # fmt: skip
    """A row of table 1 of arXiv:2104.04473; micro-batches and chunks from examples/sc21/run_table_1.sh there."""
    length, vocabulary = 2048, 51200
    tokens = batch * length
    flops = 96 * tokens * layers * width**2 * (1 + length / (6 * width) + vocabulary / (16 * layers * width))
    return Published(
        f"Megatron {size}", "arXiv:2104.04473, table 1", "a100x8.toml", devices, devices // (tensor * stages), tensor,
        stages, batch, micro, length, lambda: Gpt(layers, width, heads, vocabulary, length, stages == 1), flops, figure,
        f"interleaved, {chunks} chunks a device" if chunks > 1 else "", chunks=chunks,
    )  # fmt: skip


def torchtitan_8b(devices: int, tokens_per_s: float, how: str) -> Published:
    """Llama 3.1 8B by FSDP without Float8, of benchmarks/llama3_h100_202412_torchtitan.md there.

    FLOPs are 6 for each of 8.03e9 parameters and token, and 12 · layers · width · length for attention.
    """
    length, batch = 8192, 2 * devices
    each = 6 * 8.03e9 + 12 * 32 * 4096 * length
    return Published(
        f"torchtitan 8B, {how}, {devices}", "torchtitan, benchmarks, December 2024", "grand-teton.toml",
        devices, devices, 1, 1, batch, 2, length, lambda: Llama(32, 4096, 32, 8, 14336, 128256), each * batch * length,
        tokens_per_s * each / 1e12, "keeps every second product", zero=3,
        mode=Mode.EAGER if how == "eager" else Mode.INDUCTOR,
    )  # fmt: skip


ROWS: Sequence[Published] = (
    megatron("1.7B", 24, 2304, 24, 1, 1, 32, 512, 16, 137),
    megatron("3.6B", 30, 3072, 32, 2, 1, 64, 512, 16, 138),
    megatron("7.5B", 36, 4096, 32, 4, 1, 128, 512, 16, 142),
    megatron("18.4B", 40, 6144, 48, 8, 1, 256, 1024, 8, 135),
    megatron("39.1B", 48, 8192, 64, 8, 2, 512, 1536, 4, 138),
    megatron("76.1B", 60, 10240, 80, 8, 4, 1024, 1792, 2, 140, chunks=3),
    megatron("145.6B", 80, 12288, 96, 8, 8, 1536, 2304, 2, 148, chunks=2),
    megatron("310.1B", 96, 16384, 128, 8, 16, 1920, 2160, 1, 155, chunks=2),
    megatron("529.6B", 105, 20480, 128, 8, 35, 2520, 2520, 1, 163, chunks=3),
    megatron("1008B", 128, 25600, 160, 8, 64, 3072, 3072, 1, 163),
    torchtitan_8b(8, 5762, "eager"),
    torchtitan_8b(8, 6667, "compiled"),
    torchtitan_8b(128, 5605, "eager"),
    torchtitan_8b(128, 6514, "compiled"),
)


def step_request(row: Published, model: nn.Module, goal: Goal, micro_batches: int) -> StepRequest:
    """The request for a training step of a model, of the row's batch, on its devices."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    state = find_state(step, model, optimizer)
    batch = [TensorArgument(name, (row.batch, row.length), torch.int64, True) for name in ("tokens", "targets")]
    return StepRequest(
        UserStep("step", lambda given: [step(*given)], batch, state, train=True),
        TargetDevices(row.devices, "cpu", read_hardware(ROOT / "examples" / "clusters" / row.hardware)),
        Preferences(resolve(state.modules), micro_batches, goal),
    )


def scheduled(captured: Capture, request: StepRequest, name: str, mode: Mode) -> FoldedPlan:
    """The plan of a captured step in a schedule within the memory of the devices."""
    make, memory, room = foldable(captured, request, mode)
    return schedule_folded(make, request.devices.hardware, memory, name, room)


def foldable(
    captured: Capture, request: StepRequest, mode: Mode, alike: float = 0.0
) -> tuple[Callable[[Variant], FoldedPlan], Mapping[int, int] | None, Mapping[int, int] | None]:
    """The variants of a captured step's plan, with NCCL's collectives, and the memory of the devices for registers."""
    hardware = request.devices.hardware
    step, size = fold_captured(captured, request, alike), hardware.node_size or 1
    spots = tuple(
        [RankLocation(f"node {rank // size}", f"GPU {rank}", nccl=True) for rank in range(request.devices.world)]
    )

    @functools.cache
    def make(variant: Variant) -> FoldedPlan:
        made = replace(step.cut(variant), spots=spots)
        return replace(made, plan=replace(made.plan, mode=mode))

    plan, budget = make(PLAIN).plan, memory_limit(request.preferences.goal.budget, hardware.memory_bytes)
    return make, left_for_registers(plan, budget), room_beside_variables(plan, budget, hardware.memory_bytes, ())


@young_only()  # as all that compiles
def foreseen(row: Published, told: Callable[[str], None]) -> Forecast:
    """The forecast of their configuration."""
    with flow.deferred_init():
        model = row.model().train()
    if row.chunks > 1:
        flow.place(model, row.placements() * row.chunks)
    elif row.stages > 1:
        flow.place(model, stages=row.stages)
    if row.tensor > 1:
        flow.distribute(model, MEGATRON)
    if row.zero:
        flow.zero(model, stage=row.zero)
    mode = {"data": row.data, "tensor": row.tensor} if row.tensor > 1 else "data"
    request = step_request(row, model, goal_of(mode, None), row.pieces)
    began = time.perf_counter()
    captured = capture_step(request)
    told(f"captured {time.perf_counter() - began:.0f} s")
    began = time.perf_counter()
    name = "auto" if row.stages == 1 else "1f1b" if row.chunks == 1 else "interleaved"
    folded = scheduled(captured, request, name, row.mode)
    found = forecast(folded, request.devices.hardware)
    told(f"planned {time.perf_counter() - began:.0f} s, {len(folded.rank_classes)} classes of ranks")
    return found


@young_only()
def chosen(row: Published, told: Callable[[str], None], seconds: float) -> Compared:
    """What ``parallel="auto"`` chooses for the same model, batch and devices, with all of it left open.

    The search ends after about so many ``seconds``.  Raises LayoutError if no plan fits.
    """
    with flow.deferred_init():
        model = row.model().train()
    model.recompute = False  # what is computed again is a part of the choice
    asked = step_request(row, model, goal_of("auto", None), 1)
    captured = capture_step(marked_for_zero(asked))
    hardware = asked.devices.hardware
    budget = memory_limit(None, hardware.memory_bytes)

    def draft(captured: Capture, request: StepRequest, name: str) -> tuple[Forecast, int]:
        make, memory, room = foldable(captured, request, row.mode, ALIKE)
        return forecast_draft(make, hardware, memory, name, room)

    choices = open_choices(captured, asked, micro_batches=True, budget=budget)
    search = PlanSearch(captured, asked, choices, draft, budget, beside=True, doing=told, enough=seconds)

    def make(choice: Choice) -> FoldedPlan:
        told(f"{choice.best.strategy} as a whole; its draft: {choice.best.seconds:.2f} s")
        return scheduled(choice.captured, choice.request, choice.schedule, row.mode)

    choice = search.run()
    if choice.best.drafted:
        choice, _ = search.settled(choice, make, lambda whole: forecast(whole, hardware))
    for one in (choice.best, *choice.others):
        why = f"  {one.refused}" if one.refused else ""
        told(f"{one.seconds:8.2f} s {one.nbytes / 1e9:6.1f} GB  {one.strategy}{why}")
    return choice.best


def table_row(row: Published, told: Callable[[str], None], _: float) -> str:
    """A line of the table of their configurations."""
    found = foreseen(row, told)
    achieved = row.flops / found.period / row.devices / 1e12
    mesh = f"{row.data} × {row.tensor} × {row.stages}"
    return as_line(
        row.name, row.devices, mesh, row.pieces, f"{row.figure:.0f}", f"{achieved:.0f}",
        f"{round(100 * (achieved / row.figure - 1)):+d}%", f"{found.period:.2f} s", gigabytes(found), row.remark,
    )  # fmt: skip


def choice_row(row: Published, told: Callable[[str], None], seconds: float) -> str:
    """A line of the table of what is chosen, beside their configuration."""
    theirs, ours = foreseen(row, told), chosen(row, told, seconds)
    assert ours.forecast is not None
    return as_line(
        row.name, row.devices, f"{theirs.period:.2f} s", gigabytes(theirs), ours.strategy, f"{ours.seconds:.2f} s",
        gigabytes(ours.forecast), f"{ours.seconds / theirs.period:.2f}",
    )  # fmt: skip


def gigabytes(found: Forecast) -> str:
    """The peak memory of the rank that holds most."""
    return f"{max(rank.total for rank in found.ranks) / 1e9:.0f} GB"


def as_line(*cells: object) -> str:
    """A line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table of the page, between two comments; its first column has the names of rows."""

    name: str
    head: str
    rows: Sequence[Published]
    line: Callable[[Published, Callable[[str], None], float], str]

    @property
    def begin(self) -> str:
        """The comment before it."""
        return f"<!-- made by benchmarks/foresight.py: {self.name} -->"

    def lines_of(self, page: str) -> dict[str, str]:
        """The lines that a page has, by the names of their rows."""
        text = page.partition(self.begin)[2].partition(END)[0]
        return {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}

    def on(self, page: str, made: Mapping[str, str]) -> str:
        """The page with these lines."""
        before, _, rest = page.partition(self.begin)
        lines = (made[row.name] for row in self.rows if row.name in made)
        return "\n".join([f"{before}{self.begin}\n", self.head, *lines, f"\n{END}{rest.partition(END)[2]}"])


TABLES = (
    PageTable(
        "theirs",
        "| configuration | devices | data × tensor × stages | micro-batches | published TFLOP/s a device | forecast | "
        "miss | forecast step | forecast peak memory | |\n|---|--:|--:|--:|--:|--:|--:|--:|--:|---|",
        ROWS,
        table_row,
    ),
    PageTable(
        "ours",
        "| configuration | devices | their step | their peak memory | chosen | its step | its peak memory | "
        "its step by theirs |\n|---|--:|--:|--:|---|--:|--:|--:|",
        [row for row in ROWS if "compiled" not in row.name],  # of each two that differ in how ops run, one
        choice_row,
    ),
)


@click.command()
@click.option("--row", "names", multiple=True, help="Only these rows; the others stay as they are in the table.")
@click.option("--table", "tables", multiple=True, type=click.Choice([t.name for t in TABLES]), help="Only this.")
@click.option("--seconds", default=300.0, show_default=True, help="How long each choice is searched for.")
@click.option("--output", default=str(OUTPUT), help="The page whose tables are made anew; - for none.")
def main(names: Sequence[str], tables: Sequence[str], seconds: float, output: str) -> None:
    """Forecast the rows, print them, and write the tables; each row is written as soon as it is there."""
    unknown = set(names) - {row.name for row in ROWS}
    if unknown:
        raise click.UsageError(f"no row {min(unknown)!r}; there are {', '.join(row.name for row in ROWS)}")
    for table in (table for table in TABLES if not tables or table.name in tables):
        click.echo(table.head)
        for row in (row for row in table.rows if not names or row.name in names):
            try:
                line = table.line(row, lambda text: click.echo(f"  {text}", err=True), seconds)
            except ActorflowError as error:
                line = as_line(row.name, row.devices, f"no plan: {error}")
            click.echo(line)
            if output != "-":  # rows that are not made anew stay
                page = Path(output)
                page.write_text(table.on(page.read_text(), {**table.lines_of(page.read_text()), row.name: line}))


if __name__ == "__main__":
    sys.exit(main())
