"""Every line of the table on shapes that Hypothesis draws; parts may be empty."""

from __future__ import annotations

import functools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actorflow_compiler.signatures.table import TABLE
from fewer import fewer
from signature_checks import ON_GPU_ONLY, Instance, failures, instance
from signature_samples import calls, has_calls
from signature_shapes import indices, resized


@functools.cache
def samples() -> list[tuple[str, tuple[Instance, ...]]]:
    """By op, the calls that have an index to resize."""
    found = []
    for op in sorted(TABLE.keys() - ON_GPU_ONLY):
        cases = [instance(op, args, kwargs) for args, kwargs in calls(op)] if has_calls(op) else []
        known = tuple(case for case in cases if indices(case))
        if known:
            found.append((op, known))
    return found


@st.composite
def drawn(draw: st.DrawFn) -> Instance | None:
    _, cases = draw(st.sampled_from(samples()))
    case = draw(st.sampled_from(cases))
    letters = indices(case)
    sizes = draw(st.lists(st.integers(1, 7), min_size=len(letters), max_size=len(letters)))
    return resized(case, dict(zip(letters, sizes, strict=True)))


def check(case: Instance | None, parts: int, wanted: bool) -> None:
    found = [] if case is None else list(failures(case, parts, 1e-6, wanted=wanted))
    assert not found, "\n".join(found)


@given(case=drawn(), parts=st.sampled_from((2, 3)))
@settings(max_examples=fewer(250), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_each_signature_of_a_drawn_shape_gives_what_the_whole_op_gives(case: Instance | None, parts: int) -> None:
    check(case, parts, wanted=False)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@given(case=drawn(), parts=st.sampled_from((2, 3, 4)))
@settings(max_examples=6000, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_each_signature_of_many_drawn_shapes_gives_what_the_whole_op_gives(case: Instance | None, parts: int) -> None:
    check(case, parts, wanted=True)
