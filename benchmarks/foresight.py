"""Forecast published configurations of training runs, and compare with the published figures.

python benchmarks/foresight.py                              all rows, and the table of docs/foresight.md
python benchmarks/foresight.py --row "Megatron 1.7B" --output -

Each model is captured without memory for its parameters, and *their* configuration (mesh, stages, micro-batches, ZeRO,
what is computed again) is compiled for one rank of each class, scheduled and forecast on a hardware file of
``examples/clusters``.  Nothing is tuned for a row: a hardware file has the figures of data sheets and one efficiency.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import actorflow as flow
from actorflow.script_state.search import find_state
from actorflow_compiler.capture.capture import TensorArgument
from actorflow_compiler.capture.request import Preferences, StepRequest, TargetDevices, UserStep
from actorflow_compiler.compile import capture_step, fold_captured
from actorflow_compiler.core.errors import ActorflowError
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.hints.goal import goal_of
from actorflow_compiler.hints.hints import resolve
from actorflow_compiler.plan.folded import FoldedPlan
from actorflow_compiler.plan.plan import Plane
from actorflow_compiler.plan.variant import Variant
from actorflow_scheduler.forecast import Forecast, forecast
from actorflow_scheduler.hardware_file import read_hardware
from actorflow_scheduler.schedule import schedule_folded

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "docs" / "foresight.md"
BEGIN, END = "<!-- made by benchmarks/foresight.py: begin -->", "<!-- end -->"


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
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Samples × positions → the same × vocabulary."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
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


class Llama(nn.Module):
    """Llama 3."""

    def __init__(self, layers: int, width: int, heads: int, kv_heads: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Samples × positions → the same × vocabulary."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
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
    model: Callable[[], nn.Module]
    flops: float  # of a step, as the source counts them
    figure: float  # TFLOP/s of a device
    remark: str = ""
    zero: int = 0  # stage of ZeRO
    chunks: int = 1  # stages of each device, between which others come (interleaving)

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
        tokens_per_s * each / 1e12, "selective recomputation there, none here", zero=3,
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


def foreseen(row: Published, told: Callable[[str], None]) -> Forecast:
    """The forecast of a configuration."""
    hardware = read_hardware(ROOT / "examples" / "clusters" / row.hardware)
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
    mode = {"data": row.data, "tensor": row.tensor} if row.tensor > 1 else "data"
    request = StepRequest(
        UserStep("step", lambda given: [step(*given)], batch, state, train=True),
        TargetDevices(row.devices, "cpu", hardware),
        Preferences(resolve(state.modules), row.pieces, goal_of(mode, None)),
    )
    began = time.perf_counter()
    captured = capture_step(request)
    told(f"captured {time.perf_counter() - began:.0f} s")
    began = time.perf_counter()
    step = fold_captured(captured, request)

    def make(variant: Variant) -> FoldedPlan:
        return replace(step.cut(variant), plane=Plane.NCCL)

    name = "auto" if row.stages == 1 else "1f1b" if row.chunks == 1 else "interleaved"
    folded = schedule_folded(make, hardware, name=name)
    found = forecast(folded, hardware)
    told(f"planned {time.perf_counter() - began:.0f} s, {len(folded.rank_classes)} classes of ranks")
    return found


def table_row(row: Published, found: Forecast) -> str:
    """A line of the table."""
    achieved = row.flops / found.period / row.devices / 1e12
    memory = max(r.total for r in found.ranks) / 1e9
    mesh = f"{row.data} × {row.tensor} × {row.stages}"
    cells = (
        row.name, row.devices, mesh, row.pieces, f"{row.figure:.0f}", f"{achieved:.0f}",
        f"{achieved / row.figure - 1:+.0%}", f"{found.period:.2f} s", f"{memory:.0f} GB", row.remark,
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


HEAD = (
    "| configuration | devices | data × tensor × stages | micro-batches | published TFLOP/s a device | forecast | "
    "miss | forecast step | forecast peak memory | |\n|---|--:|--:|--:|--:|--:|--:|--:|--:|---|"
)


@click.command()
@click.option("--row", "names", multiple=True, help="Only these rows; the others stay as they are in the table.")
@click.option("--output", default=str(OUTPUT), help="The page whose table is made anew; - for none.")
def main(names: Sequence[str], output: str) -> None:
    """Forecast the rows, print them, and write the table; each row is written as soon as it is there."""
    unknown = set(names) - {row.name for row in ROWS}
    if unknown:
        raise click.UsageError(f"no row {min(unknown)!r}; there are {', '.join(row.name for row in ROWS)}")
    page = Path(output)
    before, _, rest = page.read_text().partition(BEGIN) if output != "-" else ("", "", "")
    known, _, after = rest.partition(END)
    made = {line.split("|")[1].strip(): line for line in known.splitlines() if line.startswith("|")}
    click.echo(HEAD)
    for row in ROWS:
        if names and row.name not in names:
            continue
        try:
            line = table_row(row, foreseen(row, lambda text: click.echo(f"  {text}", err=True)))
        except ActorflowError as error:
            line = f"| {row.name} | {row.devices} | | | {row.figure:.0f} | no plan: {error} | | | | {row.remark} |"
        made[row.name] = line
        click.echo(line)
        if output != "-":  # rows that are not made anew stay
            lines = (made[row.name] for row in ROWS if row.name in made)
            page.write_text("\n".join([f"{before}{BEGIN}\n", HEAD, *lines, f"\n{END}{after}"]))


if __name__ == "__main__":
    sys.exit(main())
