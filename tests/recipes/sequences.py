"""Recurrent networks and transformers."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.map import map as over_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from recipes.data import classes, numbers, tokens
from recipes.recipe import Training, recipe

WORDS = 11


def language(job, model, optimizer, batches):
    """The next token's cross entropy, with clipped gradients."""

    @job
    def train_step(words, following):
        logits = model(words)
        loss = F.cross_entropy(logits.flatten(0, 1), following.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return Training(model, optimizer, train_step, batches)


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 6)
        self.body = kind(6, 8, batch_first=True, **options)
        self.head = nn.Linear(16 if options.get("bidirectional") else options.get("proj_size", 8), WORDS)

    def forward(self, words):
        return self.head(self.body(self.embed(words))[0])


@recipe("sequences", "an LSTM language model")
def lstm(job):
    """Two layers of nn.LSTM with projections."""
    model = Recurrent(nn.LSTM, num_layers=2, proj_size=5)
    return language(job, model, torch.optim.Adam(model.parameters(), 1e-2, eps=1e-4), tokens(5, WORDS))


@recipe("sequences", "a bidirectional GRU tagger")
def gru(job):
    """nn.GRU in both directions, a label for each word, padding that is ignored."""
    model = Recurrent(nn.GRU, bidirectional=True)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-4)

    @job
    def train_step(words, tags):
        loss = F.cross_entropy(model(words).transpose(1, 2), tags, ignore_index=0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(model, optimizer, train_step, tokens(5, WORDS))


@recipe("sequences", "a recurrent network with a shorter last batch")
def shorter(job):
    """An LSTM's weights are found again by the second plan."""
    model = Recurrent(nn.LSTM)
    batches = tokens(5, WORDS)
    return language(job, model, torch.optim.SGD(model.parameters(), 0.1), [*batches, tuple(t[:4] for t in batches[0])])


@recipe("sequences", "an RNN of cells in a Python loop")
def cells(job):
    """nn.RNNCell and nn.LSTMCell, one step after another, outputs that are stacked."""
    model = nn.ModuleDict({"rnn": nn.RNNCell(4, 6), "lstm": nn.LSTMCell(6, 5), "head": nn.Linear(5, 4)})
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-2, eps=1e-4)

    @job
    def train_step(x):
        h = x.new_zeros(x.shape[0], 6)
        hc = (x.new_zeros(x.shape[0], 5), x.new_zeros(x.shape[0], 5))
        outs = []
        for t in range(x.shape[1] - 1):
            h = model["rnn"](x[:, t], h)
            hc = model["lstm"](h, hc)
            outs.append(model["head"](hc[0]))
        loss = F.mse_loss(torch.stack(outs, 1), x[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(model, optimizer, train_step, numbers(5, 4))


@recipe("sequences", "sequences of several lengths by a mask")
def lengths(job):
    """The last output of each row by gather, means over what a row has."""
    model = nn.ModuleDict({"gru": nn.GRU(3, 6, batch_first=True), "head": nn.Linear(12, 2)})
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4)

    @job
    def train_step(x, length, labels):
        out, _ = model["gru"](x)
        last = out.gather(1, (length - 1)[:, None, None].expand(-1, 1, 6)).squeeze(1)
        there = (torch.arange(x.shape[1]) < length[:, None]).to(x.dtype)
        mean = (out * there[..., None]).sum(1) / length[:, None]
        loss = F.cross_entropy(model["head"](torch.cat([last, mean], -1)), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    g = torch.Generator().manual_seed(3)
    batches = [
        (x, torch.randint(1, 6, (8,), generator=g), torch.randint(2, (8,), generator=g)) for (x,) in numbers(5, 3)
    ]
    return Training(model, optimizer, train_step, batches)


class Decoder(nn.Module):
    """A GPT: causal attention written out, weights of input and output tied."""

    def __init__(self, dim=8, heads=2, layers=2):
        super().__init__()
        self.heads = heads
        self.embed, self.positions = nn.Embedding(WORDS, dim), nn.Embedding(16, dim)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({
                "norm1": nn.LayerNorm(dim), "qkv": nn.Linear(dim, 3 * dim, bias=False), "out": nn.Linear(dim, dim),
                "norm2": nn.LayerNorm(dim), "up": nn.Linear(dim, 4 * dim), "down": nn.Linear(4 * dim, dim),
            })
            for _ in range(layers)
        )  # fmt: skip
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def attend(self, block, x):
        n, t, dim = x.shape
        q, k, v = block["qkv"](x).view(n, t, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(dim // self.heads)
        hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return block["out"]((weights @ v).transpose(1, 2).reshape(n, t, dim))

    def forward(self, words):
        x = self.embed(words) + self.positions(torch.arange(words.shape[1]))
        for block in self.blocks:
            x = x + self.attend(block, block["norm1"](x))
            x = x + block["down"](F.gelu(block["up"](block["norm2"](x)), approximate="tanh"))
        return self.head(self.norm(x))


@recipe("sequences", "a causal language model with tied weights")
def gpt(job):
    """Attention by hand, one weight for input and output, no decay of norms and biases, clipping by the norm."""
    model = Decoder()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return language(job, model, torch.optim.AdamW(groups, 1e-2, betas=(0.9, 0.95), eps=1e-4), tokens(6, WORDS))


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Llama(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.embed = nn.Embedding(WORDS, dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, n, bias=False) for n in (dim, dim // 2, dim // 2, dim))
        self.gate, self.up, self.down = nn.Linear(dim, 12), nn.Linear(dim, 12), nn.Linear(12, dim)
        self.norms = nn.ModuleList(RMSNorm(dim) for _ in range(3))
        self.head = nn.Linear(dim, WORDS, bias=False)
        angles = torch.outer(torch.arange(16.0), 1 / 100 ** torch.linspace(0, 1, 2))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotate(self, x):
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def forward(self, words):
        x = self.embed(words)
        n, t, _ = x.shape
        h = self.norms[0](x)
        q = self.rotate(self.q(h).view(n, t, 2, 4).transpose(1, 2))
        k = self.rotate(self.k(h).view(n, t, 1, 4).transpose(1, 2)).repeat_interleave(2, 1)
        v = self.v(h).view(n, t, 1, 4).transpose(1, 2).expand(-1, 2, -1, -1)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return self.head(self.norms[2](x))


@recipe("sequences", "a Llama with rotary positions and grouped queries")
def llama(job):
    """RoPE from buffers that are not saved, RMS norm, SwiGLU, keys that two heads share."""
    model = Llama()
    return language(job, model, torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4), tokens(6, WORDS))


class Experts(nn.Module):
    def __init__(self, dim=6, count=4, chosen=2):
        super().__init__()
        self.chosen = chosen
        self.gate = nn.Linear(dim, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 8), nn.GELU(), nn.Linear(8, dim)) for _ in range(count)
        )

    def forward(self, x):
        probabilities = self.gate(x).softmax(-1)
        top, which = probabilities.topk(self.chosen, -1)
        weights = torch.zeros_like(probabilities).scatter(-1, which, top / top.sum(-1, keepdim=True))
        out = sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        used = (weights > 0).to(x.dtype).mean((0, 1))
        balance = len(self.experts) * (used * probabilities.mean((0, 1))).sum()
        return x + out, balance


@recipe("sequences", "a mixture of experts by masks")
def experts(job):
    """topk, scatter, every expert on every token, a loss that balances them over the whole batch."""
    model = nn.ModuleDict(
        {"embed": nn.Embedding(WORDS, 6), "one": Experts(), "two": Experts(), "head": nn.Linear(6, WORDS)}
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4)

    @job
    def train_step(words, following):
        x, first = model["one"](model["embed"](words))
        x, second = model["two"](x)
        loss = F.cross_entropy(model["head"](x).flatten(0, 1), following.flatten())
        (loss + 0.01 * (first + second)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, first, second

    return Training(model, optimizer, train_step, tokens(4, WORDS))


@recipe("sequences", "an encoder and decoder with cross attention")
def translator(job):
    """nn.Transformer with a causal mask and padding masks."""

    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(WORDS, 8, padding_idx=0)
            self.body = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
            self.head = nn.Linear(8, WORDS)

        def forward(self, source, target):
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            padding = (source == 0) & (torch.arange(source.shape[1]) > 0)
            x = self.body(
                self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True,
                src_key_padding_mask=padding, memory_key_padding_mask=padding,
            )  # fmt: skip
            return self.head(x)

    model = Translator()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-4)

    @job
    def train_step(source, target):
        logits = model(source, target[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(model, optimizer, train_step, tokens(5, WORDS))


@recipe("sequences", "BERT with masked words")
def bert(job):
    """Words of the batch replaced by a mask token, a loss of those alone, segments, pooled sentences."""

    class Bert(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.segments = nn.Embedding(WORDS + 1, 8), nn.Embedding(2, 8)
            self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
            self.pooler, self.head = nn.Linear(8, 8), nn.Linear(8, WORDS)

        def forward(self, words):
            segment = (torch.arange(words.shape[1]) >= 3).long()
            x = self.norm(self.words(words) + self.segments(segment))
            x = x + self.attention(x, x, x, need_weights=False)[0]
            return self.head(x), torch.tanh(self.pooler(x[:, 0]))

    model = Bert()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4)

    @job
    def train_step(words, drawn):
        hidden = drawn % 3 == 0
        logits, pooled = model(words.masked_fill(hidden, WORDS))
        labels = torch.where(hidden, words, -100)
        loss = F.cross_entropy(logits.view(-1, WORDS), labels.view(-1)) + pooled.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(model, optimizer, train_step, tokens(6, WORDS))


@recipe("sequences", "attention weights that are returned")
def weights(job):
    """nn.MultiheadAttention with weights and an ALiBi bias, and a penalty on their entropy."""
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "head": nn.Linear(8, 3)})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @job
    def train_step(x, labels):
        x = x.view(-1, 4, 8).transpose(0, 1)
        at = torch.arange(4)
        bias = -(at[:, None] - at).abs().to(x.dtype) / 4
        out, found = model["attention"](x, x, x, attn_mask=bias, average_attn_weights=False)
        entropy = -(found * (found + 1e-9).log()).sum(-1).mean()
        loss = F.cross_entropy(model["head"](out[-1]), labels)
        (loss + 0.1 * entropy).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, found.mean(0)

    return Training(model, optimizer, train_step, classes(32, 3))


@recipe("sequences", "decoding with a cache of keys and values")
def cache(job):
    """A predict job that fills its cache in a Python loop, between steps of training."""
    model = nn.ModuleDict({"embed": nn.Embedding(WORDS, 8), "qkv": nn.Linear(8, 24), "head": nn.Linear(8, WORDS)})
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-4)

    def attend(q, k, v):
        return (q @ k.mT / 8**0.5).softmax(-1) @ v

    @job
    def train_step(words, following):
        q, k, v = model["qkv"](model["embed"](words)).chunk(3, -1)
        out = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
        loss = F.cross_entropy(model["head"](out).flatten(0, 1), following.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    @job(type="predict")
    def decode(first):
        words, keys, values = [first], [], []
        for _ in range(4):
            q, k, v = model["qkv"](model["embed"](words[-1]))[:, None].chunk(3, -1)
            keys.append(k)
            values.append(v)
            out = attend(q, torch.cat(keys, 1), torch.cat(values, 1))
            words.append(model["head"](out[:, 0]).argmax(-1))
        return torch.stack(words, 1)

    def run(words, following):
        loss = train_step(words, following)
        return loss, decode(words[:, 0])

    return Training(model, optimizer, run, tokens(5, WORDS))


@recipe("sequences", "a temporal convolution network")
def temporal(job):
    """Causal convolutions by padding on the left, dilations, gated units, weight norm."""

    class Causal(nn.Module):
        def __init__(self, dilation):
            super().__init__()
            self.pad = 2 * dilation
            self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 8, 3, dilation=dilation))

        def forward(self, x):
            return x + F.glu(self.conv(F.pad(x, (self.pad, 0))), 1)

    model = nn.Sequential(Causal(1), Causal(2), nn.Conv1d(4, 4, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-4)

    @job
    def train_step(x):
        loss = F.l1_loss(model(x[..., :-1]), x[..., 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(model, optimizer, train_step, numbers(4, 7))


@recipe("sequences", "a linear state space model")
def states(job):
    """A scan by cumulative sums and products, softplus steps, a causal convolution by FFT."""

    class Scan(nn.Module):
        def __init__(self):
            super().__init__()
            self.step, self.inside, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
            self.decay = nn.Parameter(torch.linspace(0.1, 1, 4).log())

        def forward(self, x):
            dt = F.softplus(self.step(x))
            logs = -(dt * self.decay.exp()).cumsum(1)
            h = logs.exp() * ((dt * self.inside(x)) * (-logs).exp()).cumsum(1)
            n = x.shape[1]
            kernel = torch.exp(-self.decay.exp() * torch.arange(n)[:, None])
            y = torch.fft.irfft(torch.fft.rfft(h, 2 * n, 1) * torch.fft.rfft(kernel, 2 * n, 0), 2 * n, 1)[:, :n]
            return self.out(y)

    model = Scan()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4)

    @job
    def train_step(x):
        loss = F.huber_loss(model(x), x[..., :2].roll(-1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(model, optimizer, train_step, numbers(6, 4))


@recipe("sequences", "packed sequences")
def packed(job):
    """pack_padded_sequence with lengths that are equal for all batches, through an LSTM and back."""
    model = nn.ModuleDict({"lstm": nn.LSTM(3, 6, batch_first=True), "head": nn.Linear(6, 2)})
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-4)
    lengths = [5, 5, 4, 3, 3, 2, 2, 1]

    @job
    def train_step(x):
        rows = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        out, (h, _) = model["lstm"](rows)
        out, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
        loss = model["head"](out).square().mean() + h.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(model, optimizer, train_step, numbers(5, 3))


@recipe("sequences", "packed sequences in any order")
def packed_unsorted(job):
    """Lengths in a tensor of the script, enforce_sorted=False, a GRU in both directions, means over what a row has."""
    model = nn.ModuleDict({"gru": nn.GRU(3, 6, 2, bidirectional=True), "head": nn.Linear(12, 2)})
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-4)
    lengths = torch.tensor([2, 5, 4, 1, 3, 5, 2, 3])

    @job
    def train_step(x):
        rows = nn.utils.rnn.pack_padded_sequence(x.transpose(0, 1), lengths, enforce_sorted=False)
        out, h = model["gru"](rows)
        out, found = nn.utils.rnn.pad_packed_sequence(out, padding_value=0.0, total_length=6)
        loss = model["head"](out.sum(0) / found[:, None]).square().mean() + h.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(model, optimizer, train_step, numbers(5, 3))


@recipe("sequences", "a ring of rows that is written at a position", whole="the ring moves on with each forward pass")
def ring(job):
    """cache[t] = …, and memory[i] of it, with positions that are tensors without dims: a buffer, and an argument."""
    model = nn.Linear(4, 4)
    model.register_buffer("cache", torch.zeros(3, 4))
    model.register_buffer("at", torch.zeros((), dtype=torch.long))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @job
    def train_step(x, row):
        h = model(x)
        loss = (h * model.cache.sum(0)).mean() + (h[row] - model.cache[(model.at - 1) % 3]).square().sum()
        with torch.no_grad():
            model.cache[model.at % 3] = h.detach().mean(0)
            model.at += 1
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    batches = [(x, torch.tensor(3 * number % 8)) for number, (x,) in enumerate(numbers(4, steps=5))]
    return Training(model, optimizer, train_step, batches)


@recipe("sequences", "branches and loops of torch")
def higher(job):
    """torch.cond on a value, a scan over time, a loop of a constant number of rounds, a map over rows."""
    model = nn.ModuleDict({"cell": nn.GRUCell(3, 4), "head": nn.Linear(4, 3)})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @job
    def train_step(x):
        def cell(h, row):
            h = model["cell"](row, h)
            return h, h.sin()

        last, states = scan(cell, x.new_zeros(len(x), 4), x, dim=1)
        _, last = while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, h * 0.9), (torch.tensor(0), last))
        out = over_rows(lambda row: model["head"](row).tanh(), states.transpose(0, 1))
        loss = torch.cond(last.mean() > 0, lambda h: (h + 2).sqrt().mean(), lambda h: h.square().mean(), (last,))
        loss = loss + out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, train_step, numbers(5, 3))


@recipe("sequences", "a bag of words of several lengths")
def bag(job):
    """nn.EmbeddingBag with offsets and weights for each word, and the words' sums in other modes."""
    model = nn.ModuleDict({
        "bag": nn.EmbeddingBag(WORDS, 6, mode="sum"), "mean": nn.EmbeddingBag(WORDS, 6, mode="mean"),
        "head": nn.Linear(12, 3),
    })  # fmt: skip
    optimizer = torch.optim.Adagrad(model.parameters(), 0.1)

    @job
    def train_step(words, following):
        weights = (following.to(torch.get_default_dtype()) + 1) / WORDS
        x = torch.cat([model["bag"](words, per_sample_weights=weights), model["mean"](words)], -1)
        loss = F.cross_entropy(model["head"](x), following[:, 0] % 3)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(model, optimizer, train_step, tokens(4, WORDS))


@recipe("sequences", "attention over nested tensors")
def nested(job):
    """Jagged sequences of known lengths: layer norm, attention by heads and a linear layer over packed rows."""
    lengths = (2, 6, 1, 4, 6, 3, 5, 2)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.into, self.out = nn.LayerNorm(6), nn.Linear(6, 18), nn.Linear(6, 6)

        def forward(self, x):
            parts = self.into(self.norm(x)).chunk(3, dim=-1)
            query, key, value = (part.contiguous().unflatten(-1, [2, 3]).transpose(1, 2) for part in parts)
            found = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(-2)
            return x + F.gelu(self.out(found))

    model = nn.Sequential(Block(), Block())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    @job
    def train_step(x):
        rows = torch.nested.as_nested_tensor([s[:n] for s, n in zip(x, lengths, strict=True)], layout=torch.jagged)
        loss = model(rows).to_padded_tensor(0.0).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, train_step, numbers(6, 6))
