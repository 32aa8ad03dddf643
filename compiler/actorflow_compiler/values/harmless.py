"""A frame of a library that asks for a condition goes in; an answer that is right whatever the values are comes out.

Some conditions of libraries decide of a warning, or of a faster way to the same result.
"""

from __future__ import annotations

import linecache
import re
from types import FrameType

__all__ = ["either_way"]

AHEAD = 6  # lines of a condition that goes over several
FALSE = (  # (file, function, what is written there): False is right
    # transformers warns of padding on the right, and leaves out a mask of ones
    ("transformers/generation/utils.py", "generate", re.compile(r"\bhas_right_padding = ")),
    ("transformers/generation/utils.py", "generate", re.compile(r'\bmodel_kwargs\["attention_mask"\] == 1\)\.all\(\)')),
    # and no embedding takes a token below zero
    ("transformers/generation/utils.py", "_get_logits_processor", re.compile(r"\bencoder_input_ids < 0\)\.any\(\)")),
)


def either_way(frame: FrameType | None) -> bool | None:
    """The answer to what the innermost frame that is not torch's asks for; None where it matters."""
    while frame is not None and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return None
    code = frame.f_code
    for file, function, written in FALSE:
        if code.co_name == function and code.co_filename.endswith(file):
            lines = (linecache.getline(code.co_filename, frame.f_lineno + more) for more in range(AHEAD))
            if written.search("".join(lines)):
                return False
    return None
