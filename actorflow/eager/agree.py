"""An op whose layouts have to be found out goes in; what rank 0 finds out is known to all ranks after it.

Finding out takes time and can fail for want of it, so that ranks could come to different layouts, each by itself.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from typing import Any

from actorflow.eager.communicator import Doing, Wires
from actorflow.eager.held import GlobalTensor
from actorflow.eager.plans import unknown_call
from actorflow_compiler.signatures.discovery import learn, rules_of
from actorflow_compiler.signatures.discovery.rules import from_json, structure, to_json

_agreed: weakref.WeakKeyDictionary[Wires, set[str]] = weakref.WeakKeyDictionary()


def agree(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[GlobalTensor]) -> None:
    """Let all ranks know how the tensors of this op may lie; collective the first time for each kind of call."""
    wires = operands[0]._spec.wires
    call = None if wires.world == 1 else unknown_call(func, args, kwargs, operands)
    if call is None:
        return
    kind = structure(call)
    done = _agreed.setdefault(wires, set())
    if kind in done:
        return
    mine = json.dumps(to_json(rules_of(call))).encode() if wires.rank == 0 else b""
    found, *_ = wires.gather(Doing.of(f"agreement on the layouts of {func}"), wires.everybody, mine)
    learn(call, from_json(json.loads(found), call))
    done.add(kind)
