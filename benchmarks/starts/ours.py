"""What a user writes for actorflow: a GPT, one step."""

import torch
import torch.nn.functional as F
from common import BATCH, CONTEXT, end_of_step, model_of_gpt, rows

import actorflow as flow

torch.manual_seed(0)
model = model_of_gpt()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


@flow.global_function(type="train", parallel="data")
def train_step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """One step of training."""
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


tokens, targets = rows(BATCH, CONTEXT)
loss = float(train_step(tokens, targets))
if flow.env.get_rank() == 0:
    end_of_step(loss)
