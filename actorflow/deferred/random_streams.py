"""Positions in the random streams of generators: where each recorded op draws, and the numbers at that position.

Recording an op draws nothing.  Meanwhile the script's generators hold placeholder states (called tokens in this file),
each of which stands for a position in the stream.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from actorflow.deferred import mersenne
from actorflow_compiler.core.torch_internals import MERSENNE

__all__ = [
    "BLOCK",
    "StreamPosition",
    "Sampler",
    "StreamReader",
    "GeneratorStream",
    "default_generator",
    "draw",
    "words_drawn",
]

BLOCK = 16  # torch's normal_ turns this many uniform numbers at a time into as many normal ones
FAR = 2 << 20  # words; for longer distances, computing a state is faster than drawing up to it
CURSORS = 8
MARK = 0xAC70F107  # first word of a token; the second is its number
NUMBERS = itertools.count()


class Sampler(enum.StrEnum):
    """The in-place random ops of torch whose use of the generator is known."""

    NORMAL = "normal"
    UNIFORM = "uniform"


SAMPLERS = {Sampler.NORMAL: Tensor.normal_, Sampler.UNIFORM: Tensor.uniform_}


@dataclass(frozen=True, slots=True, eq=False)
class StreamPosition:
    """A position in a stream, counted in 32-bit words from a known state of the generator."""

    state: Tensor
    words: int = 0

    @property
    def digest(self) -> str:
        """A hash that is equal for equal positions that were recorded in the same way."""
        return f"{hashlib.sha256(self.state.numpy().data).hexdigest()[:16]}+{self.words}"

    def after(self, words: int) -> StreamPosition:
        """The position so many words later."""
        return StreamPosition(self.state, self.words + words)


class GeneratorStream:
    """The random stream of one of the script's generators."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self._tokens: dict[bytes, StreamPosition] = {}

    def now(self) -> StreamPosition:
        """The generator's position."""
        state = self.generator.get_state()
        return self._tokens.get(bytes(state.numpy().data)) or StreamPosition(state)

    def move(self, to: StreamPosition) -> None:
        """Move the generator to a position without computing its state there: it gets a token as its state."""
        token = to.state.clone()
        token[MERSENNE.key : MERSENNE.key + 16].view(torch.int64).copy_(torch.tensor([MARK, next(NUMBERS)]))
        self._tokens[bytes(token.numpy().data)] = to
        self.generator.set_state(token)

    def settle(self) -> None:
        """If the generator's state is a token, replace it by the real state at that position."""
        point = self.now()
        if point.words:
            self.generator.set_state(StreamReader().at(point).get_state())
        elif bytes(self.generator.get_state().numpy().data) in self._tokens:
            self.generator.set_state(point.state)


@dataclass(slots=True)
class _Cursor:
    generator: torch.Generator
    point: StreamPosition


class StreamReader:
    """A small pool of generators, advanced to the positions at which recorded ops begin to draw."""

    def __init__(self) -> None:
        self._cursors: list[_Cursor] = []

    def at(self, point: StreamPosition, then: int = 0) -> torch.Generator:
        """A CPU generator at ``point``, from which the caller will draw ``then`` 32-bit words."""
        behind = [c for c in self._cursors if c.point.state is point.state and c.point.words <= point.words]
        if behind:
            cursor = max(behind, key=lambda c: c.point.words)
            self._cursors.remove(cursor)
        else:
            cursor = _Cursor(torch.Generator(), StreamPosition(point.state))
            cursor.generator.set_state(point.state)
        _skip(cursor.generator, point.words - cursor.point.words)
        cursor.point = point.after(then)
        self._cursors = [*self._cursors[1 - CURSORS :], cursor]
        return cursor.generator


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that random ops on a device use if the script passes none."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    return module.default_generators[module.current_device() if device.index is None else device.index]  # type: ignore[no-any-return]


def words_drawn(kind: Sampler | None, dtype: torch.dtype, count: int) -> int | None:
    """How many words ``normal_`` or ``uniform_`` draws for ``count`` contiguous elements; None if unknown."""
    if kind is None or (kind == Sampler.NORMAL and count < BLOCK):
        return None
    if not mersenne.works() or not _is_known(kind, dtype):
        return None
    return _count(kind, dtype, count)


def draw(
    reader: StreamReader, kind: Sampler, start: StreamPosition, count: int, lo: int, out: Tensor, a: float, b: float
) -> None:
    """Fill ``out`` with elements ``lo`` and following of ``count`` elements drawn from ``start`` on.

    ``a`` and ``b`` are mean and standard deviation (normal) or bounds (uniform).  ``words_drawn`` must know the op.
    """
    sample: Callable[..., Tensor] = SAMPLERS[kind]
    each, hi = _words(out.dtype), lo + out.numel()
    if kind == Sampler.UNIFORM:
        sample(out, a, b, generator=reader.at(start.after(lo * each), out.numel() * each))
        return
    end = count // BLOCK * BLOCK
    first, last = lo // BLOCK * BLOCK, min(-(-hi // BLOCK) * BLOCK, end)
    if first < last:
        exact = first == lo and last <= hi
        blocks = out[: last - first] if exact else torch.empty(last - first, dtype=out.dtype)
        sample(blocks, a, b, generator=reader.at(start.after(first * each), len(blocks) * each))
        if not exact:
            until = min(hi, last)
            out[: until - lo] = blocks[lo - first : until - first]
    if end < count and hi > count - BLOCK:  # torch draws the last BLOCK elements again, after all others
        tail = torch.empty(BLOCK, dtype=out.dtype)
        sample(tail, a, b, generator=reader.at(start.after(count * each), BLOCK * each))
        since = max(lo, count - BLOCK)
        out[since - lo :] = tail[since - (count - BLOCK) : BLOCK - (count - hi)]


def _words(dtype: torch.dtype) -> int:
    return 2 if dtype == torch.float64 else 1


def _count(kind: Sampler, dtype: torch.dtype, count: int) -> int:
    again = BLOCK if kind == Sampler.NORMAL and count % BLOCK else 0
    return (count + again) * _words(dtype)


def _skip(generator: torch.Generator, words: int) -> None:
    """Advance a generator as if it had drawn so many 32-bit words."""
    if words > FAR:
        generator.set_state(mersenne.advance(generator.get_state(), words))
        return
    waste = torch.empty(min(words, FAR), dtype=torch.uint8, device="cpu")
    while words:
        words -= waste[:words].random_(generator=generator).numel()


@functools.cache
def _is_known(kind: Sampler, dtype: torch.dtype) -> bool:
    """Whether this torch draws in the way that ``draw`` assumes, found by comparing a few samples."""
    if not dtype.is_floating_point or dtype.itemsize == 1:
        return False
    sample: Callable[..., Tensor] = SAMPLERS[kind]
    start, count = torch.Generator().manual_seed(7).get_state(), 5 * BLOCK + 7
    for n in (count, 5 * BLOCK):
        generator = torch.Generator()
        generator.set_state(start)
        whole = sample(torch.empty(n, dtype=dtype, device="cpu"), -0.5, 2.0, generator=generator)
        reader, point = StreamReader(), StreamPosition(start)
        for lo, hi in ((0, n), (0, 2 * BLOCK), (2 * BLOCK, n), (5, BLOCK + 1), (n - 9, n - 1)):
            part = torch.empty(hi - lo, dtype=dtype, device="cpu")
            draw(reader, kind, point, n, lo, part, -0.5, 2.0)
            if not torch.equal(part, whole[lo:hi]):
                return False
        if not torch.equal(reader.at(point.after(_count(kind, dtype, n))).get_state(), generator.get_state()):
            return False
    return True
