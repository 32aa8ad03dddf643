"""The device on which a step is traced decides which of torch's kernels are in its plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import warm
from actorflow.script_state.search import find_state
from actorflow_compiler.capture.capture import StepToTrace, TensorArgument, capture
from actorflow_compiler.core.torch_internals import fake_mode, plain_layers, traced_on
from actorflow_compiler.infer.notes import tell_traced
from actorflow_compiler.values.variables import ScriptState

PRETENDED = Path(__file__).parents[1] / "scripts" / "pretended.py"


@pytest.mark.timeout(300)  # of which its process takes 12 on a machine that does nothing else
def test_training_steps_are_traced_on_another_kind_of_device_with_its_kernels():
    done = subprocess.run(
        [warm.python(), str(PRETENDED)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["clipped gpt, kinds"] == found["lstm, kinds"] == ["cuda"]
    flash = "aten._scaled_dot_product_flash_attention"
    assert {f"{flash}.default", f"{flash}_backward.default", "actorflow.adam_"} <= set(found["clipped gpt"])
    assert "aten._thnn_fused_lstm_cell.default" in found["lstm"]  # not one of cuDNN's, which keeps a workspace


def forward_of(model: nn.Module, shape: tuple[int, ...], device: torch.device) -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(x)
        return result

    state: ScriptState = find_state(step, model=model)
    batch = [TensorArgument("x", shape, torch.float32, True)]
    return capture(StepToTrace(lambda tensors: [step(*tensors)], batch, state, False, device=device)).graph


def test_tensors_that_a_step_makes_lie_where_it_is_traced():
    class Positions(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.arange(x.shape[1], device=x.device).to(x.dtype)

    graph = forward_of(Positions(), (4, 3), torch.device("cuda"))
    made = [dict(n.kwargs)["device"].text for n in graph.nodes if n.op.startswith("aten.arange")]
    assert made == ["device:cuda"]


def test_tensors_without_a_device_follow_a_script_that_a_placement_moves():
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))  # on the CPU

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight + torch.ones(3)

    assert len(forward_of(Shifted(), (4, 3), torch.device("cuda")).nodes) == 3  # ones, a product and a sum


def test_attention_that_drops_is_made_of_plain_ops_and_other_attention_is_torchs_choice(
    monkeypatch: pytest.MonkeyPatch,
):
    seen: list[tuple[float, bool]] = []

    def attention(q: Any, k: Any, v: Any, mask: Any = None, p: float = 0.0, causal: bool = False, **_: Any) -> Any:
        seen.append((p, torch.backends.cuda.flash_sdp_enabled()))
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    x = torch.zeros(1, 1, 2, 4)
    with plain_layers():
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.5, scale=0.1)
        F.scaled_dot_product_attention(x, x, x, is_causal=True)
    assert F.scaled_dot_product_attention is attention
    assert seen == [(0.5, False), (0.0, True)]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.AdamW])
def test_a_fused_optimizer_is_traced_without_memory(kind: Any):
    with fake_mode() as mode:
        mode.allow_fallback_kernels = False  # which would run the real kernel on real zeros
        weight = nn.Parameter(torch.empty(3, 3))
        weight.grad = torch.empty(3, 3)
        kind([weight], lr=0.1, fused=True).step()


def test_a_plan_for_a_gpu_that_is_traced_without_one_says_so():
    if torch.cuda.is_available():
        assert traced_on("cuda").type == "cuda"
    else:
        assert traced_on("cuda").type == "cpu"
        assert "reaches no cuda device" in "".join(tell_traced(traced_on("cuda"), "cuda"))
    assert traced_on("cpu").type == "cpu"
    assert tell_traced(torch.device("cuda", 0), "cuda") == ()
