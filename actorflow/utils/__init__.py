"""``utils.data``: datasets and loaders, as in ``torch.utils``."""

from __future__ import annotations

from actorflow.utils import data as data
