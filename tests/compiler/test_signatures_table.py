"""Every line of the table of signatures, by running the op on parts of its operands."""

from __future__ import annotations

import pytest
import torch

from actorflow_compiler.core.op_call import overload
from actorflow_compiler.signatures import signatures
from actorflow_compiler.signatures.table import TABLE, has_line
from signature_checks import ON_GPU_ONLY, failures, instance
from signature_samples import calls, has_calls


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


NOT_IN_GRAPHS = {  # core ops that no graph has when signatures are asked for
    **dict.fromkeys(("rand", "randn", "randperm", "native_dropout"), "written out as numbers that depend on the place"),
    **dict.fromkeys(("resize_", "atan2.out"), "changes its argument; graphs have the form that returns"),
    "_local_scalar_dense": "returns a number, which only the script can use",
    **dict.fromkeys(
        ("sym_is_contiguous", "sym_numel", "sym_size.int", "sym_storage_offset", "sym_stride.int"),
        "shapes are numbers when a step is captured",
    ),
}


def core_ops() -> set[str]:
    """The names of the ops that torch calls core."""
    found = set()
    for name in torch._C._dispatch_get_all_op_names():
        short, _, kind = name.removeprefix("aten::").partition(".")
        op = overload(f"aten.{short}.{kind or 'default'}") if name.startswith("aten::") else None
        if op is not None and torch.Tag.core in op.tags:
            found.add(str(op))
    return found


def test_every_core_op_of_torch_has_a_line() -> None:
    core = core_ops()
    assert len(core) > 180
    without = {op.removeprefix("aten.").removesuffix(".default") for op in core if not has_line(op)}
    assert without <= NOT_IN_GRAPHS.keys()


def test_an_op_that_says_it_is_pointwise_needs_no_line() -> None:
    call = instance("aten.special_bessel_j0.default", [torch.rand(4, 3)]).call
    assert call.op not in TABLE
    assert {s.letter for s in signatures(call, 2)} == {None, "a", "b"}
    assert not has_line("aten.rrelu.default")  # draws random numbers


def test_every_line_names_an_op_that_exists() -> None:
    assert [name for name in TABLE if name.startswith("aten.") and overload(name) is None] == []


@pytest.mark.parametrize("op", sorted(op for op in TABLE.keys() - ON_GPU_ONLY if has_calls(op)))
def test_each_signature_of_a_line_gives_what_the_whole_op_gives(op: str) -> None:
    wrong = []
    for args, kwargs in calls(op):
        case = instance(op, args, kwargs)
        for parts in (2, 3):
            wrong += list(failures(case, parts))
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("op", sorted(op for op in TABLE.keys() - ON_GPU_ONLY if has_calls(op)))
def test_each_signature_of_a_line_is_right_where_devices_share_by_weights(op: str) -> None:
    wrong = []
    for args, kwargs in calls(op):
        case = instance(op, args, kwargs)
        for parts in ((2, 1), (1, 3), (1, 2, 1)):
            wrong += list(failures(case, parts))
    assert not wrong, "\n".join(wrong)
