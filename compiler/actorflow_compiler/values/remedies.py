"""The frames that an error has gone through go in; what to do instead comes out, where that is known.

It is for code that looks at values, or makes tensors whose sizes depend on them, and that has a form which does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from traceback import FrameSummary

import torch

__all__ = ["NESTED", "cannot_be_traced", "remedy"]

GENERATES = (
    "a model of transformers generates in a job where nothing that it finds ends it: with a number of new tokens, "
    "model.generation_config.eos_token_id = None and .pad_token_id = None, and do_sample=False; cut the answers at "
    "their ends afterwards"
)
OBSERVES = (
    "this observer of torch.ao looks at its values in Python; those that keep the smallest and the largest value do "
    "not: MinMaxObserver, MovingAverageMinMaxObserver, PerChannelMinMaxObserver, and what get_default_qat_qconfig() "
    "takes"
)
LENGTHS = (
    "lengths decide sizes here: give them as a list, or as a tensor that the script keeps and that is no argument of "
    "the job (another list is another plan); where they differ in each call, pad, and multiply by a mask"
)
NESTED = (
    "the step works on a nested tensor here, whose sizes are values, and a plan has fixed sizes; expected: lengths "
    "that are constants (slices by numbers, offsets of the script), or a padded tensor and a mask (attn_mask of "
    "F.scaled_dot_product_attention, src_key_padding_mask of nn.TransformerEncoder), or packed sequences for "
    "recurrent layers"
)
KNOWN = (  # (end of a file, function or nothing, what to do)
    ("transformers/generation/utils.py", "", GENERATES),
    ("torch/ao/quantization/observer.py", "", OBSERVES),
    ("torch/ao/quantization/fake_quantize.py", "", OBSERVES),
    ("torch/nn/utils/rnn.py", "", LENGTHS),
    ("actorflow_compiler/nested/making.py", "", NESTED),
)  # fmt: skip


def remedy(frames: Iterable[FrameSummary]) -> str:
    """What to do instead, in brackets and after a space; nothing where that is not known."""
    for frame in reversed([*frames]):
        for file, function, text in KNOWN:
            if frame.filename.endswith(file) and function in ("", frame.name):
                return f" ({text})"
    return ""


def cannot_be_traced(node: torch.fx.Node) -> str:
    """What is said of an op that torch's own tracing does not carry."""
    return f"torch cannot make {node.target} a part of a plan; expected: other ops, or this outside of the job"
