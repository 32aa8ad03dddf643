"""``p.data = x`` in a step goes in; a copy of ``x`` into ``p``, which a trace can see, comes out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from actorflow_compiler.errors import CaptureError

_SET = Tensor.data.__set__  # type: ignore[attr-defined]


class DataAssigned(TorchFunctionMode):
    """A mode in which a tensor that is given other data takes its values, and keeps its own memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func != _SET:
            return func(*args, **(kwargs or {}))
        tensor, data = args
        if tensor.shape != data.shape or tensor.dtype != data.dtype:
            raise CaptureError(
                f".data of a tensor {tensor.dtype}{list(tensor.shape)} is set to {data.dtype}{list(data.shape)}; "
                f"expected: data of the same shape and dtype, as variables of a plan keep theirs"
            )
        with torch.no_grad():
            tensor.copy_(data)
        return None
