"""Every op that torch's own samples run, forward and backward, by running it on parts of its operands."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from actorflow_compiler.signatures import local_op, shard, signatures
from actorflow_compiler.signatures.table import TABLE, has_line, term_of
from signature_checks import ON_GPU_ONLY, Instance, failures, instance, real
from signature_samples import has_calls

pytest.importorskip("expecttest", reason="torch's samples need it")


@functools.cache
def recorded(samples_of_each: int | None) -> dict[str, list[Instance]]:
    """The calls that torch's samples make, by op, of ops that the table knows."""
    from signature_opinfo import recorded  # importing torch's samples takes seconds

    return {op: cases for op, cases in recorded(samples_of_each).items() if has_line(op)}


def checked(cases: dict[str, list[Instance]], most: int) -> Iterator[Instance]:
    """Some calls of each op, from all of its samples."""
    for found in cases.values():
        known = [case for case in found if term_of(case.call) is not None]
        yield from known[:: max(1, len(known) // most)]


def wrong(case: Instance, wanted: bool) -> list[str]:
    return [line for parts in (2, 3) for line in failures(case, parts, 1e-7, wanted=wanted)]


def parts_of(case: Instance) -> Iterator[Instance]:
    """What the last of two devices runs, for each signature: it is a call of its own."""
    used = [m is not None for m in case.call.outs]
    for signature in signatures(case.call, 2)[1:]:
        op, args, kwargs, _ = local_op(case.call, signature, 2, 1)
        tensors = [shard(x, s, 2)[1] for x, s in zip(case.operands, signature.ins, strict=True)]
        yield instance(op, [real(a, tensors) for a in args], {k: real(v, tensors) for k, v in kwargs}, used)


@pytest.mark.slow
def test_each_signature_of_torch_s_first_samples_gives_what_the_whole_op_gives() -> None:
    found = [line for case in checked(recorded(2), 8) for line in wrong(case, wanted=False)]
    assert not found, "\n".join(found)


def test_every_line_is_tried_on_a_sample_of_ours_or_of_torch_s() -> None:
    assert sorted(op for op in TABLE.keys() - ON_GPU_ONLY - recorded(2).keys() if not has_calls(op)) == []


@pytest.mark.slow
def test_what_a_device_runs_of_torch_s_first_samples_can_be_split_again() -> None:
    found = [line for case in checked(recorded(2), 1) for part in parts_of(case) for line in wrong(part, wanted=False)]
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_each_signature_of_all_of_torch_s_samples_gives_what_the_whole_op_gives() -> None:
    found = [line for case in checked(recorded(None), 200) for line in wrong(case, wanted=False)]
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_cuts_in_blocks_and_units_of_torch_s_samples_give_what_the_whole_op_gives() -> None:
    found = [line for case in checked(recorded(None), 12) for line in wrong(case, wanted=True)]
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_a_device_runs_of_torch_s_samples_can_be_split_again() -> None:
    found = [
        line for case in checked(recorded(None), 12) for part in parts_of(case) for line in wrong(part, wanted=False)
    ]
    assert not found, "\n".join(found)
