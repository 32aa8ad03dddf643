"""One rank of actorflow: checkpoint.py starts it with ``actorflow run``."""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor
from training import Setting, loss_of, serve

import actorflow as flow
from actorflow.checkpoint import Saving
from actorflow.session.process import current


class Planned:
    """A job whose parameters, gradients and optimizer's state are split over the ranks (ZeRO 3)."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._saving: Saving | None = None
        with flow.deferred_init():
            self._model = model = setting.model()
        self._optimizer = optimizer = torch.optim.AdamW(model.parameters(), lr=setting.lr)
        flow.zero(model, 3)

        @flow.global_function(type="train")
        def train_step(tokens: Tensor, targets: Tensor) -> Tensor:
            loss = loss_of(model(tokens), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        self._train_step = train_step

    def step(self, number: int) -> float:
        """See ``Trainer``."""
        loss = self._train_step(*self._setting.batch_of(number))
        worker = current().worker
        assert worker is not None
        worker.wait_all()  # the loss is there before the optimizer is done
        return float(loss)

    def save(self, how: str, path: str) -> None:
        """See ``Trainer``."""
        self._saving = flow.checkpoint.save(path, model=self._model, optimizer=self._optimizer)

    def saved(self) -> bool:
        """See ``Trainer``."""
        return self._saving is None or self._saving.done

    def finish(self) -> None:
        """See ``Trainer``."""
        if self._saving is not None:
            self._saving.wait()
            self._saving = None

    def load(self, how: str, path: str) -> None:
        """See ``Trainer``."""
        if path:
            flow.checkpoint.load(path, model=self._model, optimizer=self._optimizer)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(sys.argv[1], int(os.environ["RANK"]), Planned(Setting.from_json(sys.argv[2])))
