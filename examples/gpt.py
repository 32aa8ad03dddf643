"""Train a byte-level GPT on the source of Python's standard library, then let it write some.

actorflow run examples/gpt.py --devices 4 -- --pipeline 2 --data 2 --micro-batches 4
actorflow run examples/gpt.py --devices 2
python examples/gpt.py
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import actorflow as flow

BYTES = 256  # the vocabulary
SAMPLES = 4  # texts that are written at the end, at a time


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and beside a residual."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Tokens int64[batch, length] to logits float32[batch, length, vocabulary]."""

    def __init__(self, layers=4, width=128, heads=4, context=128, vocabulary=BYTES):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(_initialise)

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _initialise(module):
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02 if isinstance(module, nn.Linear) else 0.2)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def stdlib_bytes(limit=2 << 20):
    """The first bytes of the modules of the standard library, in the order of their names, as uint8[≤ limit]."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text, dtype=torch.uint8)[:limit]


def draw_batch(text, batch, context, generator):
    """Random windows of the text and, for each byte, the one that follows it: int64[batch, context] twice."""
    starts = torch.randint(len(text) - context, (batch,), generator=generator)
    windows = text.unfold(0, context + 1, 1)[starts].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def place_stages(model, layers, pipeline, data, device_type):
    """Cut the model into ``pipeline`` stages of ``data`` devices each."""
    placements = {}
    for stage in range(pipeline):
        blocks = range(stage * layers // pipeline, (stage + 1) * layers // pipeline)
        modules = [rf"blocks\.{i}" for i in blocks]
        modules += ["embed", "positions"] if stage == 0 else []
        modules += ["norm", "head"] if stage == pipeline - 1 else []
        devices = range(stage * data, (stage + 1) * data)
        placements["|".join(modules)] = flow.placement(device_type, list(devices))
    flow.place(model, placements)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32, help="texts in a step, over all devices")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128, help="bytes that the model sees at once")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--pipeline", type=int, default=1, help="stages that the layers are cut into")
    parser.add_argument("--data", type=int, default=1, help="devices of each stage, which share its batch")
    parser.add_argument("--micro-batches", type=int, default=None, help="default: 4 in a pipeline, else 1")
    parser.add_argument("--sample", type=int, default=200, help="bytes to write at the end")
    parser.add_argument("--device-type", choices=("cpu", "cuda"), default=None, help="default: cuda where there is one")
    options = parser.parse_args()
    if not 1 <= options.pipeline <= options.layers:
        parser.error(f"{options.layers} layers cannot be cut into {options.pipeline} stages")
    device_type = options.device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    micro_batches = options.micro_batches or (4 if options.pipeline > 1 else 1)

    torch.manual_seed(0)
    model = GPT(options.layers, options.width, options.heads, options.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    if options.pipeline * options.data > 1:  # without a hint: data-parallel on all devices
        place_stages(model, options.layers, options.pipeline, options.data, device_type)

    @flow.global_function(type="train", micro_batches=micro_batches)
    def train_step(tokens, targets):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    @flow.global_function(type="predict")
    def next_byte(tokens):
        return model(tokens)[:, -1]

    text = stdlib_bytes()
    generator = torch.Generator().manual_seed(0)
    for step in range(1, options.steps + 1):
        loss = train_step(*draw_batch(text, options.batch, options.context, generator))
        if step == 1 or step % 10 == 0:
            print(f"step {step:4d}   loss {float(loss):.3f}", flush=True)  # reading the loss waits for it

    if options.sample:
        window, _ = draw_batch(text, SAMPLES, options.context, generator)
        written = []
        for _ in range(options.sample):
            logits = torch.from_numpy(next_byte(window).numpy())
            drawn = torch.multinomial(F.softmax(logits / 0.7, dim=1), 1, generator=generator)
            window = torch.cat([window[:, 1:], drawn], dim=1)
            written.append(drawn)
        sample = bytes(torch.cat(written, dim=1)[0].tolist())
        print(f"\nThe model writes:\n{sample.decode(errors='replace')}")


if __name__ == "__main__":
    main()
