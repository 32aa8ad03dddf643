"""Every op instance of whole training steps, by running it on parts of its operands."""

from __future__ import annotations

import time

import pytest
import torch
from signature_checks import Collector, failures
from signature_models import models, step_graph

from actorflow_compiler.sbp import Split
from actorflow_compiler.signatures import notation, signatures
from actorflow_compiler.signatures.derive import _signatures
from actorflow_compiler.signatures.indexed import instance as indexed
from actorflow_compiler.signatures.table import TABLE

WITHOUT = {"aten.arange.default", "aten.arange.start", "aten.scalar_tensor.default", "aten.lift_fresh_copy.default"}


def collect(name: str, batch: int = 5) -> Collector:
    torch.set_num_threads(1)
    module, inputs = step_graph(*models(batch)[name])
    collector = Collector(module)
    collector.run(*inputs)
    return collector


@pytest.mark.parametrize("batch", [5, 2])
@pytest.mark.parametrize("name", list(models()))
def test_each_signature_of_each_op_of_a_step_gives_what_the_whole_op_gives(name: str, batch: int) -> None:
    found = collect(name, batch).found
    assert {call.op for call in found} - WITHOUT <= TABLE.keys()
    wrong = [line for case in found.values() for parts in (2, 3) for line in failures(case, parts, 1e-7, wanted=False)]
    assert not wrong, "\n".join(wrong)
