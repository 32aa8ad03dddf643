"""Checkpoints in the form of older OneFlow scripts: ``check_point = flow.train.CheckPoint(); check_point.init()``."""

from __future__ import annotations

import os

from actorflow import checkpoint
from actorflow.support.nearest_names import answer_with_nearest

__all__ = ["CheckPoint"]


class CheckPoint:
    """``flow.checkpoint`` as an object."""

    def init(self) -> None:
        """Do nothing: variables are initialised when the first call of a job makes them."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """See ``flow.checkpoint.save``."""
        checkpoint.save(path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """See ``flow.checkpoint.load``."""
        checkpoint.load(path)


answer_with_nearest(__name__)
