"""The training step of a GPT, whose compilation is measured, as a request to the compiler."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actorflow.script_state.search import find_state
from actorflow_compiler.capture.capture import TensorArgument
from actorflow_compiler.capture.request import Listeners, Preferences, StepRequest, TargetDevices, UserStep
from actorflow_compiler.hints.goal import goal_of
from actorflow_compiler.hints.hints import resolve

__all__ = ["training_request"]


def training_request(
    model: nn.Module,
    shape: tuple[int, int],  # of the batch: samples, tokens of each
    devices: TargetDevices,
    mesh: Mapping[str, int],  # axis → its devices: {"data": 4, "tensor": 2}
    micro_batches: int = 1,
    listeners: Listeners | None = None,
) -> StepRequest:
    """A step of AdamW on the mean cross-entropy of the next tokens; hints are given on the model before."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    state = find_state(step, model, optimizer)
    batch = [TensorArgument(name, shape, torch.int64, True) for name in ("tokens", "targets")]
    return StepRequest(
        UserStep("step", lambda given: [step(*given)], batch, state, train=True),
        devices,
        Preferences(resolve(state.modules), micro_batches, goal_of(dict(mesh), None)),
        listeners=listeners or Listeners(),
    )
