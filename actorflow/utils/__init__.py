"""``utils.data``: datasets and loaders, as in ``torch.utils``; ``utils.global_view``: trees of global tensors."""

from __future__ import annotations

from actorflow.support.nearest_names import answer_with_nearest as _answer_with_nearest
from actorflow.support.nearest_names import unknown_name
from actorflow.utils import data as data

__all__ = ["data", "global_view"]


def __getattr__(name: str) -> object:
    """``global_view``, with which all of global tensors is imported, when it is used."""
    if name == "global_view":
        import actorflow.utils.global_view as global_view

        return global_view
    raise unknown_name(__name__, name)


_answer_with_nearest(__name__)
