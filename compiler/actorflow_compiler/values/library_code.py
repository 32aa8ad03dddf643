"""Handle known data-dependent code in libraries: answer conditions that do not matter, name a remedy for the rest.

Some conditions only decide about a warning, or about a faster way to the same result; they get an answer that is right
whatever the values are.  For other code that reads values, or makes tensors whose sizes depend on them, the error
message suggests an alternative.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable
from traceback import FrameSummary
from types import FrameType

import torch

__all__ = ["NESTED", "cannot_be_traced", "irrelevant_condition", "remedy"]

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
KNOWN = (  # (end of a file's name, function or "", what to do)
    ("transformers/generation/utils.py", "", GENERATES),
    ("torch/ao/quantization/observer.py", "", OBSERVES),
    ("torch/ao/quantization/fake_quantize.py", "", OBSERVES),
    ("torch/nn/utils/rnn.py", "", LENGTHS),
    ("actorflow_compiler/nested/construction.py", "", NESTED),
)  # fmt: skip
CONDITION_LINES = 6  # at most, of a condition that spans several lines
ALWAYS_FALSE = (  # (end of a file, function, pattern of its code): conditions for which False is always right
    # transformers warns of padding on the right, and leaves out a mask of ones
    ("transformers/generation/utils.py", "generate", re.compile(r"\bhas_right_padding = ")),
    ("transformers/generation/utils.py", "generate", re.compile(r'\bmodel_kwargs\["attention_mask"\] == 1\)\.all\(\)')),
    # and no embedding takes a token below zero
    ("transformers/generation/utils.py", "_get_logits_processor", re.compile(r"\bencoder_input_ids < 0\)\.any\(\)")),
)


def remedy(frames: Iterable[FrameSummary]) -> str:
    """What to do instead of the library's code, in parentheses after a space; empty if that is not known."""
    for frame in reversed([*frames]):
        for file, function, text in KNOWN:
            if frame.filename.endswith(file) and function in ("", frame.name):
                return f" ({text})"
    return ""


def cannot_be_traced(node: torch.fx.Node) -> str:
    """The error text for an op that torch itself cannot trace."""
    return f"torch cannot make {node.target} a part of a plan; expected: other ops, or this outside of the job"


def irrelevant_condition(frame: FrameType | None) -> bool | None:
    """The answer for the condition in the innermost frame outside torch; None where the answer makes a difference."""
    while frame is not None and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return None
    code = frame.f_code
    for file, function, pattern in ALWAYS_FALSE:
        if code.co_name == function and code.co_filename.endswith(file):
            lines = (linecache.getline(code.co_filename, frame.f_lineno + more) for more in range(CONDITION_LINES))
            if pattern.search("".join(lines)):
                return False
    return None
