"""Draw a random model with its training step and layout from a seed, and compare the job with eager PyTorch.

    python tests/random_programs.py 17            # what seed 17 is, and how its training compares
    python tests/random_programs.py 17 0,3        # the same with only these of its moves
    python tests/random_programs.py 17 --shrink   # leave out moves, micro-batches, hints, for as long as it still fails

A program is a sequence of moves on a pool of values: each takes one or two of them and adds one.  A move draws from its
own stream of random numbers, so that the others hold when one is left out.
"""

from __future__ import annotations

import argparse
import inspect
import linecache
import math
import random
import re
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from actorflow_compiler.core.errors import ActorflowError
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, Split
from actorflow_compiler.hints.goal import goal_of
from actorflow_compiler.hints.hints import distribute, place, zero
from models import Batch, Case, reference
from random_moves import MOST, OFTEN, ONE, TOKENS, TWO, Draw
from trained import Layout, differences, train_planned

STEPS = 2
BOUND = 1e-9  # relative
NOISE = 1e-11  # relative, of parameters: a program that makes more than CHAOS of it is not compared
CHAOS = 1e-8
LENGTH = 4  # tokens of a sample
CLASSES = 5
STATE = ("running", "cached", "kept", "running", "cached", "kept", "linear", "centred")  # buffers, read and written


class Move(nn.Module):
    """One move with its parameters and buffers; ``takes`` are the numbers of its operands in the pool."""

    def __init__(self, name: str, takes: tuple[int, ...]) -> None:
        super().__init__()
        self.name, self.takes = name, takes
        self.fn: Callable[..., Tensor] = lambda *_: torch.zeros(())
        self.again = False

    @property
    def is_pure(self) -> bool:
        """Whether it changes no buffer, so that it may be run twice."""
        return self.name not in ("running", "cached", "kept", "batch_norm")

    def forward(self, *tensors: Tensor) -> Tensor:
        """What it makes of its operands."""
        if self.again:
            found: Tensor = checkpoint(self.fn, *tensors, use_reentrant=False)
            return found
        return self.fn(*tensors)


class Program(nn.Module):
    """Moves on a pool of values; the first of these are x and the tokens."""

    def __init__(
        self, seed: int, pieces: int, batch: Batch, keep: Sequence[int] | None = None, only: Sequence[str] = ()
    ) -> None:
        super().__init__()
        rng = random.Random(f"{seed} program")
        count = rng.randint(2, 9)
        self.moves = nn.ModuleList()
        pool: dict[int, Tensor] = {-2: batch[0], -1: batch[1]}
        names = [*ONE, *OFTEN]
        if rng.random() < 0.5:  # a theme: few kinds of moves, that meet in many ways
            names = rng.sample([*ONE], 4)
        if rng.random() < 0.3:
            names += ["running", "cached", "kept"]
        else:
            names = [n for n in names if n not in ("running", "cached", "kept")] or ["linear"]
        names = [*only] or names
        again = rng.choice([0, 0.15, 0.15, 0.7])
        for number in range(count):
            rng = random.Random(f"{seed} move {number}")
            if keep is None or number in keep:
                for _ in range(4):
                    made = _move(rng, pool, pieces, number, names, again)
                    if made is not None:
                        move, pool[number] = made
                        self.moves.append(move)
                        break
        rng = random.Random(f"{seed} loss")
        self.kind = rng.choice(["mean", "square", "entropy", "weighted", "sum", "masked"])
        self.last = max(pool) if max(pool) >= 0 else -2
        self.head = nn.Linear(_rows(pool[self.last], batch[0].size(0)).size(1), CLASSES).double()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.head.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3)
        self.used = {n for m in self.moves for n in m.takes} | {self.last}
        rng = random.Random(f"{seed} block")
        ends = sorted(rng.sample(range(count + 1), 2)) if rng.random() < 0.3 else [0, 0]
        inside = [m for m in self.moves if ends[0] <= m.number < ends[1]]
        self.block = inside if all(m.is_pure for m in inside) else []

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and what is added to the loss."""
        pool = {-2: x, -1: tokens}
        more = torch.zeros((), dtype=torch.float64)
        for move in self.moves:
            if self.block and move is self.block[0]:
                self._run_block(pool)
            if move.number not in pool:
                pool[move.number] = move(*(pool[n] for n in move.takes))
            if move.number not in self.used:
                more = more + 0.1 * pool[move.number].mean()
        return self.head(_rows(pool[self.last], x.size(0))), more

    def _run_block(self, pool: dict[int, Tensor]) -> None:
        """Several moves in one checkpoint."""
        outer = [n for n in dict.fromkeys(n for m in self.block for n in m.takes) if n in pool]

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            values = dict(zip(outer, tensors, strict=True))
            for m in self.block:
                values[m.number] = m(*(values[n] for n in m.takes))
            return tuple(values[m.number] for m in self.block)

        made = checkpoint(run, *(pool[n] for n in outer), use_reentrant=False)
        pool.update(zip((m.number for m in self.block), made, strict=True))


def _rows(x: Tensor, batch: int) -> Tensor:
    """Any value as a few features for each sample."""
    if x.dim() and x.size(0) == batch:
        return x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)
    return x.mean().expand(batch, 1) if x.dim() < 2 else x.mean(0).flatten().expand(batch, -1)


def _move(
    rng: random.Random, pool: dict[int, Tensor], pieces: int, number: int, names: Sequence[str], again: float
) -> tuple[Move, Tensor] | None:
    floats = [n for n in pool if n != -1]
    recent = floats[-1] if rng.random() < 0.75 else rng.choice(floats)
    takes: tuple[int, ...]
    if rng.random() < 0.1:
        name, takes = rng.choice([*TOKENS]), (-1,)
    elif rng.random() < 0.2 and len(floats) > 1:
        name, takes = "combined", (recent, rng.choice(floats))
    else:
        name, takes = rng.choice(names), (recent,)
    operands = [pool[n] for n in takes]
    move = Move(name, takes)
    move.number = number
    if not operands[0].dim():
        return None
    fn = {**ONE, **TWO, **TOKENS}[name](Draw(rng, move, pieces), *operands)
    if fn is None:
        return None
    saved = {n: b.clone() for n, b in move.named_buffers()}
    try:
        with torch.no_grad():
            value = fn(*operands)
    except (RuntimeError, IndexError, ValueError):
        return None
    for n, b in saved.items():
        at, _, last = n.rpartition(".")
        setattr(move.get_submodule(at), last, b)
    size = value.abs().mean().item() if value.numel() else math.nan
    if not (1 <= value.numel() <= MOST and value.is_floating_point() and math.isfinite(size)):
        return None
    if size > 3:
        factor, plain = 1 / size, fn
        fn = lambda *t: plain(*t) * factor  # noqa: E731
        value = value * factor
    move.fn = fn
    move.again = rng.random() < again and move.is_pure
    return move, value


def loss_of(model: Program, x: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
    logits, more = model(x, tokens)
    classes = targets % CLASSES
    kinds: dict[str, Callable[[], Tensor]] = {
        "mean": lambda: logits.tanh().mean(),
        "square": lambda: F.mse_loss(logits, F.one_hot(classes, CLASSES).double()),
        "entropy": lambda: F.cross_entropy(logits, classes),
        "weighted": lambda: (
            (F.cross_entropy(logits, classes, reduction="none") * (1 + targets)).sum() / targets.add(1).sum()
        ),
        "sum": lambda: F.smooth_l1_loss(logits, classes.unsqueeze(1).double().expand(-1, CLASSES), reduction="sum") / 7,
        "masked": lambda: F.cross_entropy(logits, classes.masked_fill(targets == 7, -100), label_smoothing=0.1),
    }
    return kinds[model.kind]() + more


@dataclass(frozen=True)
class Drawn:
    """What a seed stands for."""

    case: Case
    layout: Layout
    size: int  # of the batch
    words: str  # what the layout is


def draw(seed: int, keep: Sequence[int] | None = None, plain: Sequence[str] = (), only: Sequence[str] = ()) -> Drawn:
    """The program and the layout of a seed; ``keep``: only these moves; ``plain``: no "pieces", no "hints".

    ``only``: of these kinds of moves.
    """
    rng = random.Random(f"{seed} layout")
    world = rng.choice([1, 2, 2, 3, 3, 4, 4])
    pieces = rng.choice([1, 1, 2, 3, 4])
    if "pieces" in plain:
        pieces = 1
    each = rng.randint(1, 4) if pieces > 1 else rng.randint(2, 9)
    size = pieces * each
    features = [rng.randint(1, 6) for _ in range(rng.randint(1, 3))]
    batches_seed = rng.randrange(1 << 30)
    optimizer = rng.choice(["sgd", "momentum", "adam", "adamw"])
    clip = rng.choice([None, None, None, 0.5])

    def batches(sizes: Sequence[int]) -> list[Batch]:
        generator = torch.Generator().manual_seed(batches_seed)
        return [
            (
                torch.randn(n, *features, generator=generator, dtype=torch.float64),
                torch.randint(7, (n, LENGTH), generator=generator),
                torch.randint(9, (n,), generator=generator),
            )
            for n in sizes
        ]

    def make() -> nn.Module:
        return Program(seed, pieces, batches([size])[0], keep, only)

    optimizers: dict[str, Callable[[nn.Module], Optimizer]] = {
        "sgd": lambda m: SGD(m.parameters(), lr=0.1),
        "momentum": lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2),
        "adam": lambda m: Adam(m.parameters(), lr=1e-2, eps=1e-4),
        "adamw": lambda m: AdamW(m.parameters(), lr=1e-2, eps=1e-4),
    }
    case = Case(
        make, optimizers[optimizer], batches, ("", ""), clip=clip, loss=loss_of, names=("x", "tokens", "targets")
    )
    layout, words = _layout(rng, world, pieces, plain)
    return Drawn(case, layout, size, f"x {size}×{features}, {optimizer}, clip {clip}, {pieces} pieces, {words}")


def _layout(rng: random.Random, world: int, pieces: int, plain: Sequence[str]) -> tuple[Layout, str]:
    mode = rng.choice(["data", "data", "tensor", "auto", "mesh", "stages", "places", "zero", "zero stages"])
    mode = "data" if world == 1 else mode
    goal = None
    prepare: list[Callable[[nn.Module], None]] = []
    words = [f"{mode} on {world}"]
    hints = rng.random() < 0.4 and world > 1
    wide = 1
    if mode in ("tensor", "auto"):
        goal = goal_of(mode, None)
    elif mode == "mesh" and world == 4:
        wide = 2
        goal = goal_of(rng.choice([{"data": 2, "tensor": 2}, {"data": 2, "auto": 2}, {"tensor": 2, "data": 2}]), None)
    if mode in ("stages", "zero stages"):
        count = rng.choice([n for n in range(1, world + 1) if world % n == 0 and n > 1])
        words.append(f"{count} stages")
        prepare.append(lambda m: place(m, stages=count))
    if mode == "places":
        words.append("places")
        place_seed = rng.random()
        prepare.append(lambda m: _place(random.Random(place_seed), m, world))
    if mode in ("zero", "zero stages"):
        stage = rng.randint(1, 3)
        words.append(f"zero {stage}")
        prepare.append(lambda m: zero(m, stage))
    parts, hint_seed = 2 if wide == 2 else world, rng.random()
    if hints and mode != "places" and "hints" not in plain:
        words.append("hints")
        prepare.append(lambda m: _distribute(random.Random(hint_seed), m, parts, wide))

    def all_of(model: nn.Module) -> None:
        for p in prepare:
            p(model)

    layout = Layout(world, pieces, prepare=all_of)
    return (layout if goal is None else replace(layout, goal=goal)), ", ".join(words)


def _place(rng: random.Random, model: nn.Module, world: int) -> None:
    moves = list(model.moves)
    for n, _ in enumerate(moves):
        if rng.random() < 0.6:
            ranks = sorted(rng.sample(range(world), rng.randint(1, world)))
            place(model, {rf"moves\.{n}": Placement("cpu", tuple(ranks), (len(ranks),))})
    if rng.random() < 0.5:
        ranks = sorted(rng.sample(range(world), rng.randint(1, world)))
        place(model, {"head": Placement("cpu", tuple(ranks), (len(ranks),))})


def _distribute(rng: random.Random, model: nn.Module, parts: int, axes: int) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        large = [dim for dim, n in enumerate(tensor.shape) if n >= parts]
        if rng.random() < 0.3 and large:
            sbp = Split(rng.choice(large)) if rng.random() < 0.8 else B
            wish = sbp if axes == 1 else tuple(rng.sample([sbp, None], 2))
            distribute(model, {re.escape(name): wish})


@dataclass(frozen=True)
class Outcome:
    """What became of a seed."""

    kind: str  # same | different | refused | failed | skipped
    text: str = ""


def eagerly(drawn: Drawn, noise: int = 0) -> tuple[list[float], dict[str, Tensor]]:
    """The eager training; with ``noise`` its parameters differ a little."""
    case = drawn.case
    model = case.model()
    if noise:
        generator = torch.Generator().manual_seed(noise)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + NOISE * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return reference(model, case.optimizer(model), case.loss, case.batches([drawn.size] * STEPS), 1, case.clip)


def apart(found: tuple[Any, ...], expected: tuple[Any, ...]) -> dict[str, float]:
    """By name how far losses and state are apart, relative."""
    losses = [abs(a - b) / max(abs(b), 1e-3) for a, b in zip(found[0], expected[0], strict=True)]
    state = {n: v for n, v in expected[1].items() if v.numel()}
    return {"losses": max(losses)} | differences(found[1], state)


def outcome(drawn: Drawn) -> Outcome:
    """Train it by a plan, and compare."""
    try:
        expected = eagerly(drawn)
        if not all(math.isfinite(v) for v in expected[0]):
            return Outcome("skipped", "no finite loss")
        shaken = max(max(apart(eagerly(drawn, noise), expected).values()) for noise in (1, 2))
        if not shaken <= CHAOS:
            return Outcome("skipped", f"chaotic: {shaken}")
    except Exception as e:  # the program itself is wrong
        return Outcome("skipped", f"eager: {type(e).__name__} {e}")
    try:
        *found, _ = train_planned(drawn.case, drawn.layout, [drawn.size] * STEPS)
    except ActorflowError as e:
        if "can be cut into" in str(e):
            return Outcome("skipped", str(e))
        text = "".join(traceback.format_exception(e)[-3:])
        return Outcome("refused", f"{type(e).__name__}: {e}\n{text}")
    except Exception:
        return Outcome("failed", traceback.format_exc())
    wrong = {n: v for n, v in apart(tuple(found), expected).items() if not v <= BOUND}
    return Outcome("different", str(wrong)) if wrong else Outcome("same")


def describe(seed: int, keep: Sequence[int] | None = None, plain: Sequence[str] = (), only: Sequence[str] = ()) -> str:
    """What a seed stands for, for people."""
    drawn = draw(seed, keep, plain, only)
    lines = [f"seed {seed}: {drawn.words}"]
    model = drawn.case.model()
    pool = {-2: drawn.case.batches([drawn.size])[0][0], -1: drawn.case.batches([drawn.size])[0][1]}
    for move in model.moves:
        pool[move.number] = move(*(pool[n] for n in move.takes))
        told = f"{'in the block, ' * (move in model.block)}{'checkpointed ' * move.again}{move.name}"
        lines.append(f"  {move.number}: {told} of {move.takes} -> {list(pool[move.number].shape)}  {_source(move.fn)}")
    return "\n".join([*lines, f"  loss: {model.kind}"])


def _source(fn: Callable[..., Tensor]) -> str:
    """What a move does, as far as its source says it: the line that it is in, and what it was drawn with."""
    if not inspect.isfunction(fn):
        return getattr(fn, "__name__", repr(fn))
    drawn = inspect.getclosurevars(fn).nonlocals
    if "plain" in drawn:
        return f"{drawn['factor']:.3g} * {_source(drawn['plain'])}"
    text = fn.__name__
    spots = [s for s in fn.__code__.co_positions() if s[0] is not None and s[0] == s[1] and s[2] is not None]
    if text == "<lambda>" and spots:
        row = spots[-1][0]
        line = linecache.getline(fn.__code__.co_filename, row)
        text = line[min(s[2] for s in spots if s[0] == row) : max(s[3] for s in spots if s[0] == row)].strip()
    values = {k: v for k, v in drawn.items() if isinstance(v, (int, str, list, tuple, float, torch.Size))}
    return f"{text}  with {values}" if values else text


def shrink(seed: int, only: Sequence[str] = ()) -> tuple[list[int], list[str], Outcome]:
    """The fewest moves that fail alike, by leaving out one after the other."""
    first = outcome(draw(seed, only=only))
    keep, plain = [m.number for m in draw(seed, only=only).case.model().moves], []  # type: ignore[var-annotated]

    def alike(o: Outcome) -> bool:
        def last(t: str) -> str:
            return re.sub(r"\d+", "", t.strip().splitlines()[-1])[:40] if o.kind == "failed" and t else ""

        return o.kind == first.kind and last(o.text) == last(first.text)

    for what in ("pieces", "hints"):
        if alike(found := outcome(draw(seed, keep, [*plain, what], only))):
            plain.append(what)
            first = found
    again = True
    while again:
        again = False
        for number in reversed(keep):
            fewer = [n for n in keep if n != number]
            if alike(found := outcome(draw(seed, fewer, plain, only))):
                keep, first, again = fewer, found, True
    return keep, plain, first


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("keep", nargs="?")
    parser.add_argument("--until", type=int, help="all seeds up to this one, what is not the same alone")
    parser.add_argument("--plain", default="")
    parser.add_argument("--state", action="store_true", help="of moves that read and write buffers")
    parser.add_argument("--shrink", action="store_true")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    if asked.until is not None:
        counts: dict[str, int] = {}
        for seed in range(asked.seed, asked.until):
            found = outcome(draw(seed, only=STATE if asked.state else ()))
            counts[found.kind] = counts.get(found.kind, 0) + 1
            if found.kind not in ("same", "skipped"):
                print(seed, found.kind, found.text.strip().splitlines()[-(found.kind == "failed")], flush=True)
        print(counts)
        return
    keep = None if asked.keep is None else [int(n) for n in asked.keep.split(",")]
    plain = [p for p in asked.plain.split(",") if p]
    only = STATE if asked.state else ()
    if asked.shrink:
        keep, plain, found = shrink(asked.seed, only)
        print("keep", ",".join(map(str, keep)), "plain", ",".join(plain))
    else:
        found = outcome(draw(asked.seed, keep, plain, only))
    print(describe(asked.seed, keep, plain, only))
    print(found.kind)
    print(found.text)


if __name__ == "__main__":
    main()
