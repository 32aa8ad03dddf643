"""The helpers of ``torch.nn.utils``, by a stated list."""

from __future__ import annotations

from torch.nn.utils import (
    clip_grad_norm_,
    clip_grad_value_,
    fuse_conv_bn_eval,
    parameters_to_vector,
    parametrizations,
    parametrize,
    remove_spectral_norm,
    remove_weight_norm,
    skip_init,
    spectral_norm,
    vector_to_parameters,
    weight_norm,
)

from actorflow.support.nearest_names import answer_with_nearest

__all__ = [
    "clip_grad_norm_", "clip_grad_value_", "fuse_conv_bn_eval", "parameters_to_vector", "parametrizations",
    "parametrize", "remove_spectral_norm", "remove_weight_norm", "skip_init", "spectral_norm", "vector_to_parameters",
    "weight_norm",
]  # fmt: skip

answer_with_nearest(__name__)
