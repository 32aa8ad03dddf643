"""Search for layouts (rules) with which an op run on parts gives the same result as on whole tensors.

The search assumes nothing about the op.  It runs the op on small random operands, whole and on the parts of
every candidate combination of layouts, with several draws, numbers of devices, and even and uneven sizes.
A combination that holds in all of these runs is a rule.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from actorflow_compiler.core.op_call import ArgumentPath, OpCall, bind, overload, put, rebind
from actorflow_compiler.core.ops import Arg, Meta
from actorflow_compiler.core.sbp import B, P, Sbp, Split, local_shape, local_size
from actorflow_compiler.core.shards import shard, unshard
from actorflow_compiler.core.torch_internals import schema_of
from actorflow_compiler.signatures.discovery.execute import FINITE_KINDS, DrawKind, Outs, draw, is_close, on_meta, run
from actorflow_compiler.signatures.discovery.rules import Rule
from actorflow_compiler.signatures.discovery.small_calls import SizePosition, SmallCall, paths, small_calls

T = TypeVar("T")
PARTS = (2, 3, 3, 2, 2)  # numbers of devices; successive draws cycle through them
ENOUGH = 64  # elements of an output, in all draws together
DRAWS = 24  # at most
COMBINATIONS = 64  # most combinations of layouts for one index
LINEAR = 6  # most operands that are tried as partial sums together
SECONDS = 10.0  # of CPU time for one op
NOTHING: frozenset[int] = frozenset()
# ops whose parts can never equal the whole, or whose result sizes depend on values
EXCLUDED = frozenset(
    {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
)


class OutOfTimeError(Exception):
    """The search took too long."""


class Trials:
    """Runs numbered trials one after another; each may fail, hang or crash the process.

    ``announce(number)`` is called before each; those in ``avoid`` are not run, and count as failed.
    """

    def __init__(self, announce: Callable[[int], None] = lambda _: None, avoid: frozenset[int] = NOTHING) -> None:
        self.announce, self.avoid = announce, avoid
        self.number = -1
        self.end = time.thread_time() + SECONDS

    def attempt(self, what: Callable[[], T | None]) -> T | None:
        """The function's result; None if it raises.  Raises OutOfTimeError once the search has used its time."""
        self.number += 1
        if time.thread_time() > self.end:
            raise OutOfTimeError
        if self.number in self.avoid:
            return None
        self.announce(self.number)
        try:
            return what()
        except Exception:  # whatever an op raises about shapes that do not fit
            return None


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """A small call with operands, and its results on whole tensors, with which runs on parts are compared."""

    small: SmallCall
    operands: tuple[Tensor, ...]
    results: tuple[Tensor | None, ...]
    parts: int
    seed: int
    with_nans: bool = False  # some elements of the operands are NaN


@dataclass(frozen=True, slots=True)
class CutCandidate:
    """Layouts for the operands, and the index that is cut: its size, and the arguments that are its size."""

    ins: tuple[Sbp, ...]
    group: frozenset[SizePosition] = frozenset()


def searchable(call: OpCall) -> bool:
    """Whether the search can handle the op: an op of torch that is a deterministic function of its arguments."""
    found = overload(call.op)
    if found is None or schema_of(found).is_mutable or EXCLUDED & set(found.tags):
        return False
    return any(n > 1 for m in (*call.ins, *call.outs) if m is not None for n in m.shape) or any(
        m.is_float for m in call.ins
    )


def find_rules(call: OpCall, trials: Trials) -> tuple[Rule, ...]:
    """The rules of a call's structure; empty if the search cannot decide any."""
    rules: list[Rule] = []
    with contextlib.suppress(OutOfTimeError), torch.no_grad(), torch.random.fork_rng(devices=[]):
        found, tolerance = small_calls(call, trials.attempt)
        wholes = reference_runs(found, trials)
        if len(wholes) >= 2 and _varied(wholes):
            rules.extend(_Search(wholes, tolerance, trials).run())
    return tuple(rules)


def reference_runs(found: Sequence[SmallCall], trials: Trials) -> list[ReferenceRun]:
    """Reference runs with finite results; none if the op is not a function of its operands."""
    wholes: list[ReferenceRun] = []
    seen = 0
    for seed in range(DRAWS if found else 0):
        turn, j = divmod(seed, len(found))
        small, kind = found[j], FINITE_KINDS[(turn + j) % len(FINITE_KINDS)]
        call, operands = small.call, draw(small.call, seed, kind)
        results = trials.attempt(lambda call=call, operands=operands: _used(call, operands))  # type: ignore[misc]
        if results is None or not all(_mostly_finite(r) for r in results if r is not None):
            continue
        again = trials.attempt(lambda call=call, operands=operands: _used(call, operands))  # type: ignore[misc]
        if again is None or not _same(results, again):
            return []
        wholes.append(ReferenceRun(small, tuple(operands), tuple(results), PARTS[len(wholes) % len(PARTS)], seed))
        seen += min((r.numel() for r in results if r is not None), default=0)
        if len(wholes) >= len(PARTS) and (seen >= ENOUGH or not seen):
            break
    for small in found[:1] if len(wholes) > 1 else ():  # an op has to treat NaN alike on parts and whole
        call, operands = small.call, draw(small.call, 0, DrawKind.WITH_NANS)
        results = trials.attempt(lambda call=call, operands=operands: _used(call, operands))  # type: ignore[misc]
        if results is not None:
            wholes.append(ReferenceRun(small, tuple(operands), tuple(results), 2, 0, with_nans=True))
    return wholes


def _used(call: OpCall, operands: Sequence[Tensor]) -> Outs:
    made = run(call.op, call.args, call.kwargs, [x.clone() for x in operands])
    return [None if m is None else r for m, r in zip(call.outs, made, strict=True)]


def _mostly_finite(result: Tensor) -> bool:
    """Whether most of the elements are numbers."""
    return not result.numel() or result.isfinite().double().mean().item() > 0.9


def _same(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(x is y or (x is not None and y is not None and is_close(y, x, 0.0)) for x, y in pairs)


def _varied(wholes: Sequence[ReferenceRun]) -> bool:
    """Whether every output varies over its elements or draws; for a constant one every layout would seem right."""
    for j, meta in enumerate(wholes[0].small.call.outs):
        if meta is not None:
            values = torch.cat([r.flatten() for w in wholes if not w.with_nans and (r := w.results[j]) is not None])
            if values.numel() and torch.equal(values, values[0].expand_as(values)):
                return False
    return True


class _Search:
    def __init__(self, wholes: Sequence[ReferenceRun], tolerance: float, trials: Trials) -> None:
        self.wholes, self.tolerance, self.trials = wholes, tolerance, trials
        self.call = wholes[0].small.call
        self.refused = False
        self.unread = {i for i in range(len(self.call.ins)) if all(self.ignores_values(w, i) for w in wholes)}

    def ignores_values(self, whole: ReferenceRun, i: int) -> bool:
        """Whether the op's results do not depend on the values of an operand."""
        other = list(whole.operands)
        other[i] = draw(whole.small.call, whole.seed + 100, DrawKind.POSITIVE)[i]
        results = self.trials.attempt(lambda: _used(whole.small.call, other))
        return results is not None and _same(results, whole.results)

    def run(self) -> Iterator[Rule]:
        for group in self.wholes[0].small.groups:
            found = list(self.split(group))
            dims = frozenset(s for s in group if s[0] == "dim")
            yield from found or (self.split(dims) if dims != group else ())  # a number may be equal by chance
        for terms in self.sums(range(len(self.call.ins))):
            cut = CutCandidate(tuple(P if i in terms else B for i in range(len(self.call.ins))))
            outs = self.outs(cut)
            if outs and "P" in outs:
                yield _rule(cut, outs)

    def split(self, group: frozenset[SizePosition]) -> Iterator[Rule]:
        """Cut one index wherever it may be."""
        dims = [[d for kind, p in sorted(group) if kind == "dim" and p[0] == i for d in p[1:]] for i in self.operands()]
        choices: list[list[Sbp]] = [
            [*map(Split, d), *([B] if len(d) != 1 or i in self.unread else [])] for i, d in enumerate(dims)
        ]
        combinations = list(itertools.islice(itertools.product(*choices), COMBINATIONS))
        done = set()
        for ins in sorted(combinations, key=lambda ins: [isinstance(ins[i], Split) for i in self.unread]):
            relevant = tuple(s for i, s in enumerate(ins) if i not in self.unread)
            if relevant in done or (relevant.count(B) == len(relevant) and not paths(group)):
                continue
            for cut in self.with_terms(CutCandidate(ins, group)):
                outs = self.outs(cut)
                if outs and _cuts(cut, outs):
                    done.add(relevant)
                    yield _rule(cut, outs)
                    if cut.ins == ins:
                        break  # an op that is not linear in an operand needs no partial sums there

    def operands(self) -> range:
        return range(len(self.call.ins))

    def with_terms(self, cut: CutCandidate) -> Iterator[CutCandidate]:
        """The cut with all uncut operands broadcast, and then with sets of these as partial sums."""
        yield cut
        if self.refused:
            return
        for terms in self.sums([i for i, s in enumerate(cut.ins) if s == B]):
            yield replace(cut, ins=tuple(P if i in terms else s for i, s in enumerate(cut.ins)))

    def sums(self, operands: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Sets of operands that may be sums of terms together."""
        able = [i for i in operands if self.call.ins[i].is_float and i not in self.unread]
        if len(able) <= LINEAR:
            for count in range(1, min(3, len(able)) + 1):
                yield from itertools.combinations(able, count)
        if len(able) > 3:
            yield tuple(able)

    def outs(self, cut: CutCandidate) -> tuple[str | None, ...] | None:
        """The layouts that the outputs have in all draws; None if one has none.

        ``refused`` then says whether the op does not even run on such parts.
        """
        possible: list[list[str]] | None = None
        for whole in self.wholes:
            now = self.trials.attempt(lambda whole=whole: self.possible(whole, cut))  # type: ignore[misc]
            self.refused = now is None
            if now is None:
                return None
            before = now if possible is None else possible
            possible = [[o for o in a if o in b] for a, b in zip(before, now, strict=True)]
            if not all(possible):
                return None
        assert possible is not None
        left = iter(possible)
        return tuple(None if m is None else next(left)[0] for m in self.call.outs)

    def possible(self, whole: ReferenceRun, cut: CutCandidate) -> list[list[str]] | None:
        """For each used output, the layouts that it may have in one draw."""
        call, parts = whole.small.call, whole.parts
        n = size_of(call, cut.group)
        if n is not None and n < parts:
            parts = 2
        metas = [m for m in call.outs if m is not None]
        calls = [_local(call, cut, n, parts, index) for index in range(parts)]
        on_meta_parts = [on_meta(c) for c in calls]
        candidates = [list(_layouts(m, n)) for m in metas]
        if all(g is not None for g in on_meta_parts):
            candidates = self.fitting(call, metas, candidates, [g for g in on_meta_parts if g is not None])
            if not all(candidates):
                return None
        generator = torch.Generator().manual_seed(whole.seed)
        shards = [shard(x, s, parts, generator) for x, s in zip(whole.operands, cut.ins, strict=True)]
        made = [_used(c, [x[index] for x in shards]) for index, c in enumerate(calls)]
        candidates = self.fitting(call, metas, candidates, made)
        results = [r for r in whole.results if r is not None]
        used = [[r for r in outs if r is not None] for outs in made]
        tolerance = self.tolerance * (10 if P in cut.ins else 1)
        return [
            [text for text, layout in options if is_right([outs[j] for outs in used], results[j], layout, tolerance)]
            for j, options in enumerate(candidates)
        ]

    @staticmethod
    def fitting(
        call: OpCall, metas: Sequence[Meta], candidates: Sequence[list[tuple[str, Sbp]]], made: Sequence[Outs]
    ) -> list[list[tuple[str, Sbp]]]:
        """The candidate layouts that agree with the shapes of the parts that were made."""
        used = [[r for r, m in zip(outs, call.outs, strict=True) if m is not None] for outs in made]
        return [
            [
                (text, layout)
                for text, layout in options
                if all(
                    (r := outs[j]) is not None and tuple(r.shape) == local_shape(meta.shape, layout, len(made), index)
                    for index, outs in enumerate(used)
                )
            ]
            for j, (meta, options) in enumerate(zip(metas, candidates, strict=True))
        ]


def size_of(call: OpCall, group: frozenset[SizePosition]) -> int | None:
    """The size of an index in a call."""
    for kind, path in sorted(group, reverse=True):
        return call.ins[path[0]].shape[path[1]] if kind == "dim" else _at(call, path)
    return None


def _at(call: OpCall, path: ArgumentPath) -> int:
    arg: Arg = bind(call)
    for i in path:
        arg = arg[i]
    assert isinstance(arg, int)
    return arg


def _local(call: OpCall, cut: CutCandidate, n: int | None, parts: int, index: int) -> OpCall:
    """The call that one device runs."""
    ins = tuple(Meta(local_shape(m.shape, s, parts, index), m.dtype) for m, s in zip(call.ins, cut.ins, strict=True))
    new: dict[int, Arg] = {}
    for path in paths(cut.group):
        assert n is not None
        part = local_size(n, Split(0), parts, index)
        new[path[0]] = put(new.get(path[0], bind(call)[path[0]]), path[1:], part)
    args, kwargs = rebind(call, new)
    return OpCall(call.op, args, kwargs, ins, call.outs)


def _layouts(meta: Meta, n: int | None) -> Iterator[tuple[str, Sbp]]:
    """The layouts that an output may have where an index of size n is cut."""
    for dim, size in enumerate(meta.shape if n else ()):
        if size == n:
            yield f"S({dim})", Split(dim)
        elif n and size % n == 0 and size:
            yield f"S({dim},1,k)", Split(dim, 1, size // n)
            yield f"S({dim},k)", Split(dim, size // n)
    yield "B", B
    if meta.is_float:
        yield "P", P


def is_right(made: Sequence[Tensor], whole: Tensor, layout: Sbp, tolerance: float) -> bool:
    """Whether the parts, joined by their layout, equal the whole; broadcast parts also have to be identical."""
    if layout == B and not all(is_close(m, made[0], 0.0) for m in made):
        return False
    return is_close(unshard(made, layout), whole, tolerance)


def _cuts(cut: CutCandidate, outs: tuple[str | None, ...]) -> bool:
    """Whether a rule cuts some dim plainly and some output is not broadcast, so that devices share the work."""
    plain = any(text is not None and re.fullmatch(r"S\(\d+\)", text) for text in (*map(str, cut.ins), *outs))
    return plain and any(o not in ("B", None) for o in outs)


def _rule(cut: CutCandidate, outs: tuple[str | None, ...]) -> Rule:
    return Rule(tuple(map(str, cut.ins)), outs, paths(cut.group))
