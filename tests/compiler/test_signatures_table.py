"""Every line of the table of signatures, by running the op on parts of its operands."""

from __future__ import annotations

import pytest
import torch

from actorflow_compiler.signatures.call import overload
from actorflow_compiler.signatures.table import TABLE
from signature_checks import failures, instance
from signature_samples import calls

ON_GPU_ONLY = {
    name
    for name in TABLE
    if any(
        kind in name
        for kind in (
            "flash_attention.",
            "flash_attention_backward.",
            "efficient_",
            "cudnn_",
            "_fused_rms_norm_backward",
        )
    )
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_every_line_names_an_op_that_exists() -> None:
    assert [name for name in TABLE if name.startswith("aten.") and overload(name) is None] == []


@pytest.mark.parametrize("op", sorted(TABLE.keys() - ON_GPU_ONLY))
def test_each_signature_of_a_line_gives_what_the_whole_op_gives(op: str) -> None:
    wrong = []
    for args, kwargs in calls(op):
        case = instance(op, args, kwargs)
        for parts in (2, 3):
            wrong += list(failures(case, parts))
    assert not wrong, "\n".join(wrong)
