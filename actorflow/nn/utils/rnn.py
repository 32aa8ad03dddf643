"""Sequences of several lengths: ``torch.nn.utils.rnn``, by a stated list."""

from __future__ import annotations

from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    pad_sequence,
    unpack_sequence,
    unpad_sequence,
)

from actorflow.support.nearest_names import answer_with_nearest

__all__ = [
    "PackedSequence", "pack_padded_sequence", "pack_sequence", "pad_packed_sequence", "pad_sequence",
    "unpack_sequence", "unpad_sequence",
]  # fmt: skip

answer_with_nearest(__name__)
