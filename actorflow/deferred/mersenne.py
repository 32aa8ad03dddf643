"""Advance the state of torch's CPU generator (MT19937) by any number of words, without drawing them.

The generator is a linear recurrence over GF(2), so the word after n others is a fixed sum of earlier ones:
the coefficients of x^n modulo the recurrence's characteristic polynomial.  Here the bits of a Python
integer are the coefficients of a polynomial.

Matsumoto and Nishimura, "Mersenne Twister" (1998); Haramoto et al., "Efficient jump ahead for F2-linear random
number generators" (2008).
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from actorflow_compiler.core.torch_internals import MERSENNE

__all__ = ["advance", "works"]

N, M = 624, 397  # words in a state; offset of the second old word that a new one is computed from
TWIST = 0x9908B0DF
DEGREE = 19937
PIECE = 28  # bytes that are reduced at a time: 224 bits, less than the 227 between the two highest terms
ROWS = 512  # windows that are summed at a time

Words = np.ndarray[tuple[int], np.dtype[np.uint32]]


def advance(state: Tensor, words: int) -> Tensor:
    """The state after ``words`` further 32-bit words; ``state`` has the form of ``torch.Generator.get_state``.

    This takes about 3 ms for any distance, and about 30 ms the first time that a distance is used.
    """
    if not words:
        return state.clone()
    raw = state.numpy().copy()
    left = raw[MERSENNE.left : MERSENNE.left + 4].view(np.int32)
    following = raw[MERSENNE.next : MERSENNE.next + 8].view(np.uint64)
    key = raw[MERSENNE.key : MERSENNE.key + 8 * N].view(np.uint64)
    ahead = N + 1 - int(left[0]) + words  # from the start of the current block
    blocks, used = (ahead - 1) // N, (ahead - 1) % N + 1
    if blocks:  # the last block by the recurrence itself, which also sets bits that it never reads
        key[:] = _next_block(_jump(key.astype(np.uint32), (blocks - 1) * N))
    left[0], following[0] = N + 1 - used, used
    return torch.from_numpy(raw)


@functools.cache
def works() -> bool:
    """Whether this torch stores its Mersenne Twister state in the layout that ``advance`` assumes, found by a test."""
    generator = torch.Generator().manual_seed(3)
    start = generator.get_state()
    if start.numel() != MERSENNE.size:
        return False
    torch.empty(100 * N + 7).uniform_(generator=generator)
    return torch.equal(advance(start, 100 * N + 7), generator.get_state())


def _jump(key: Words, count: int) -> Words:
    if not count:
        return key
    coefficients = _power(count)
    bits = np.frombuffer(coefficients.to_bytes(DEGREE // 8 + 1, "little"), dtype=np.uint8)
    at = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    blocks = [key]
    while len(blocks) * N < DEGREE + N:
        blocks.append(_next_block(blocks[-1]))
    windows = np.lib.stride_tricks.sliding_window_view(np.concatenate(blocks), N)
    out = np.zeros(N, dtype=np.uint32)
    for start in range(0, len(at), ROWS):
        out ^= np.bitwise_xor.reduce(windows[at[start : start + ROWS]], axis=0)
    return out


def _next_block(key: Words) -> Words:
    new = np.empty_like(key)
    step = N - M  # each run of N - M words depends on the run before it
    for lo in range(0, N, step):
        hi = min(lo + step, N)
        upper = key[lo:hi]
        lower = key[lo + 1 : hi + 1] if hi < N else np.append(key[lo + 1 :], new[0])
        mixed = (upper & np.uint32(0x80000000)) | (lower & np.uint32(0x7FFFFFFF))
        far = key[lo + M : hi + M] if hi + M <= N else new[lo + M - N : hi + M - N]
        new[lo:hi] = far ^ (mixed >> np.uint32(1)) ^ np.where(mixed & 1, np.uint32(TWIST), np.uint32(0))
    return new


@functools.lru_cache(maxsize=256)
def _power(count: int) -> int:
    """x^count modulo the characteristic polynomial."""
    bits = f"{count:b}"
    head = min(len(bits), 14)  # the first square beyond it would be of a higher degree
    found = 1 << int(bits[:head], 2)
    for bit in bits[head:]:
        found = int(f"{found:b}", 4)  # the square: its bits with zeros between them
        found = _remainder(found << 1 if bit == "1" else found)
    return _remainder(found)


def _remainder(polynomial: int) -> int:
    table = _multiples()
    while (excess := polynomial.bit_length() - DEGREE) > 0:
        take = min(excess, 8 * PIECE)
        shift = DEGREE + excess - take
        top = polynomial >> shift
        product = 0
        for i, byte in enumerate(top.to_bytes(PIECE, "little")):
            if byte:
                product ^= table[byte] << (8 * i)
        polynomial ^= (top << shift) ^ (product << (shift - DEGREE))
    return polynomial


@functools.cache
def _multiples() -> tuple[int, ...]:
    """The characteristic polynomial without its highest term, times each polynomial of less than 8 bits."""
    p, q = (1 << N) | (1 << M), (1 << N - 1) | (1 << M - 1)
    powers = [1]  # of q
    for _ in range(31):
        powers.append(_times(powers[-1], q))
    total = _times(p, powers[31]) ^ (TWIST >> 31 & 1)
    for i in range(31):
        if TWIST >> i & 1:
            total ^= _times(p, powers[30 - i])
    low = total ^ (1 << DEGREE)
    return tuple(_times(low, byte) for byte in range(256))


def _times(a: int, few: int) -> int:
    """The product of a polynomial and one of few terms."""
    out = 0
    while few:
        bit = few.bit_length() - 1
        out ^= a << bit
        few ^= 1 << bit
    return out
