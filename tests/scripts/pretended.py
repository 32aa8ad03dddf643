"""Compile training steps for a device type that torch knows and this machine does not have, and print their ops.

A backward pass over tensors of another device runs on a thread of its own, and torch asks the device for streams: what
a GPU does while a step is traced, without one.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

KIND = "pretended"


def pretend() -> None:
    """Make torch believe in a device of this kind."""

    class Hooks(torch._C._acc.PrivateUse1Hooks):  # type: ignore[misc]  # no stubs
        def is_available(self) -> bool:
            return True

        def is_built(self) -> bool:
            return True

        def has_primary_context(self, index: int) -> bool:
            return False

    class Guard(torch._C._acc.DeviceGuard):  # type: ignore[misc]  # no stubs
        def type_(self) -> Any:
            return torch._C._autograd.DeviceType.PrivateUse1

    torch.utils.rename_privateuse1_backend(KIND)
    kept.extend((Hooks(), Guard()))
    torch._C._acc.register_python_privateuseone_hook(kept[0])
    torch._C._acc.register_python_privateuseone_device_guard(kept[1])
    known = {"is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 1}
    module = types.SimpleNamespace(
        **known, current_device=lambda: 0, _is_in_bad_fork=lambda: False, manual_seed_all=lambda seed: None
    )
    torch._register_device_module(KIND, module)


def flash(query: Tensor, key: Tensor, value: Tensor, mask: Any = None, p: float = 0.0, causal: bool = False) -> Tensor:
    """Attention by the ops of a GPU, without dropout."""
    if p > 0 or query.device.type != KIND:
        return plain(query, key, value, mask, p, causal)
    found: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)[0]
    return found


kept: list[Any] = []
plain: Callable[..., Tensor] = torch.nn.functional.scaled_dot_product_attention

if __name__ == "__main__":
    pretend()
    from actorflow_compiler import compile
    from actorflow_compiler.capture import request
    from actorflow_compiler.plan.verify import verify
    from models import CASES
    from trained import LAYOUTS, plan_of

    compile.traced_on = request.traced_on = lambda kind: torch.device(KIND if kind == "cuda" else kind)
    torch.nn.functional.scaled_dot_product_attention = flash
    found: dict[str, list[str]] = {}
    for title, layout in (("clipped gpt", "pipeline 2"), ("lstm", "one device")):
        plan, *_ = plan_of(CASES[title], replace(LAYOUTS[layout], kind="cuda"), 16)
        found[title] = sorted({step.op for body in verify(plan).bodies for step in body.steps})
        found[f"{title}, kinds"] = sorted({v.placement.type for v in plan.variables})
    print(json.dumps(found))
