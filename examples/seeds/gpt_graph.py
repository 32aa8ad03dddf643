"""A small GPT by nn.Graph: data x tensor x pipeline parallelism, with ZeRO, accumulation and activation checkpointing.

    python -m actorflow.distributed.launch --nproc_per_node 8 gpt_graph.py --tensor 2 --stages 2

What is left of the ranks is data parallel.  It prints the losses of one device on any number of them.
"""

from __future__ import annotations

import argparse
from typing import Any

import actorflow as flow
import actorflow.nn as nn
import actorflow.nn.functional as F

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 32, 8, 16, 4, 2, 8
B, S = flow.sbp.broadcast, flow.sbp.split


class Block(nn.Module):
    """Attention and an MLP; with a placement, it takes what it is given there."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.project = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.placement: Any = None

    def forward(self, x: Any) -> Any:
        if self.placement is not None:
            x = x.to_global(placement=self.placement, sbp=[S(0), B])
        y = self.norm1(x)
        q, k, v = (
            part(y).reshape(-1, CONTEXT, HEADS, WIDTH // HEADS).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(-1, CONTEXT, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def spread(self, placement: Any) -> None:
        """Lay out the block over (data, tensor): heads and hidden units are split, and added up where they join."""
        by_rows = {"weight": [B, S(0)], "bias": [B, S(0)]}
        by_columns = {"weight": [B, S(1)], "bias": [B, B]}
        for part in (self.query, self.key, self.value, self.up):
            part.to_global(placement=placement, sbp=by_rows)  # type: ignore[operator]
        for part in (self.project, self.down):
            part.to_global(placement=placement, sbp=by_columns)  # type: ignore[operator]
        for norm in (self.norm1, self.norm2):
            norm.to_global(placement=placement, sbp=[B, B])  # type: ignore[operator]
        self.placement = placement


class Embeddings(nn.Module):
    """Tokens and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(flow.randn(CONTEXT, WIDTH) * 0.1)

    def forward(self, x: Any) -> Any:
        return self.tokens(x) + self.positions


class Head(nn.Module):
    """The logits of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Any) -> Any:
        return self.logits(self.norm(x))


class Gpt(nn.Module):
    """A plain module, which ``spread`` lays out."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings, self.head = Embeddings(), Head()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Any) -> Any:
        x = self.embeddings(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def spread(self, stages: list[Any]) -> None:
        """Put the layers on stages, each a mesh of (data, tensor)."""
        self.embeddings.to_global(placement=stages[0], sbp=[B, B])  # type: ignore[operator]
        for number, block in enumerate(self.blocks):
            block.spread(stages[number * len(stages) // LAYERS])  # type: ignore[operator]
        self.head.norm.to_global(placement=stages[-1], sbp=[B, B])  # type: ignore[operator]
        self.head.logits.to_global(placement=stages[-1], sbp=[B, S(0)])  # type: ignore[operator]


class GptGraph(nn.Graph):
    """A training step."""

    def __init__(self, model: Gpt, optimizer: Any, stages: list[Any], zero: int) -> None:
        super().__init__()
        self.model, self.loss_fn = model, nn.CrossEntropyLoss()
        self.add_optimizer(optimizer)
        if len(stages) > 1:
            for number, block in enumerate(model.blocks):
                stage = number * len(stages) // LAYERS
                block.to(nn.graph.GraphModule).set_stage(stage, stages[stage])
        model.blocks[0].to(nn.graph.GraphModule).activation_checkpointing = True
        self.config.set_gradient_accumulation_steps(2)
        if zero:
            self.config.enable_zero(True, stage=zero)

    def build(self, x: Any, y: Any) -> Any:
        """The loss of a batch."""
        logits = self.model(x)
        loss = self.loss_fn(logits.reshape(-1, VOCABULARY), y.reshape(-1))
        loss.backward()
        return loss


def batches(steps: int) -> list[Any]:
    """Tokens, each of which follows from the one before."""
    generator = flow.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        first = flow.randint(0, VOCABULARY, (BATCH, 1), generator=generator)
        tokens = (first + 3 * flow.arange(CONTEXT + 1)) % VOCABULARY
        found.append((tokens[:, :-1], tokens[:, 1:]))
    return found


def train(tensor: int, stages: int, zero: int, steps: int) -> tuple[list[float], Gpt]:
    """The losses, and the model."""
    flow.manual_seed(0)
    model = Gpt()
    world = flow.env.get_world_size()
    data = world // (tensor * stages)
    each = data * tensor  # ranks of a stage
    meshes = [
        flow.placement("cpu", [[s * each + d * tensor + t for t in range(tensor)] for d in range(data)])
        for s in range(stages)
    ]
    model.spread(meshes)
    optimizer = flow.optim.AdamW(model.parameters(), lr=0.01)
    graph = GptGraph(model, optimizer, meshes, zero)
    losses = []
    for x, y in batches(steps):
        x = x.to_global(placement=meshes[0], sbp=[B, B]).to_global(sbp=[S(0), B])
        y = y.to_global(placement=meshes[-1], sbp=[B, B]).to_global(sbp=[S(0), B])
        losses.append(graph(x, y).to_local().item())
    return losses, model


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--zero", type=int, default=0)
    parser.add_argument("--steps", type=int, default=17)
    asked = parser.parse_args()
    found, _ = train(asked.tensor, asked.stages, asked.zero, asked.steps)
    if flow.env.get_rank() == 0:
        for step, loss in enumerate(found):
            print(f"{step} loss: {loss:.6f}")
