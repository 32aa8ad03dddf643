"""``flow.layers``: the layers of OneFlow's first generation, importable as ``import actorflow.layers as layers``."""

from __future__ import annotations

from actorflow.classic.layers import (
    batch_normalization,
    batch_normalization_add_relu,
    batch_normalization_relu,
    conv1d,
    conv2d,
    conv3d,
    dense,
    layer_norm,
)
from actorflow.support.nearest_names import answer_with_nearest

__all__ = [
    "batch_normalization",
    "batch_normalization_add_relu",
    "batch_normalization_relu",
    "conv1d",
    "conv2d",
    "conv3d",
    "dense",
    "layer_norm",
]

answer_with_nearest(__name__)
