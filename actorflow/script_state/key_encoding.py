"""Encode the keys of values that a step writes as JSON, so that every rank can find its own key for each."""

from __future__ import annotations

import enum
import functools
import gc
import sys
from collections.abc import Sequence
from typing import Any

import torch

from actorflow.script_state.sources import HooksSource, StateSource, TypeSource

__all__ = ["decode_key", "encode_key"]

PLAIN = (str, int, float, bool, type(None))  # types that JSON has
KEYWORDS = next(one for one in gc.get_referents(functools.cache(id)) if type(one) is object)  # between (args) and names


def encode_key(key: Any, sources: Sequence[StateSource]) -> Any:
    """A key as JSON; raises LookupError for an object that other ranks could not find."""
    if type(key) in PLAIN:
        return key
    if type(key) is tuple:
        return {"tuple": [encode_key(item, sources) for item in key]}
    if isinstance(key, torch.dtype | torch.device):
        return {type(key).__name__: str(key).removeprefix("torch.")}
    if isinstance(key, enum.Enum):
        return {"member": [type(key).__module__, type(key).__qualname__, key.name]}
    if isinstance(key, type):
        return {"class": [key.__module__, key.__qualname__]}
    if key is KEYWORDS:
        return {"keywords": True}
    for at, one in enumerate(sources):
        if isinstance(one, TypeSource | HooksSource) and one.holder is key:
            return {"holder": at}
    raise LookupError(f"no other rank could find {key!r}")


def decode_key(key: Any, sources: Sequence[StateSource]) -> Any:
    """Decode a key that another rank has encoded, with the sources of this rank's search."""
    if not isinstance(key, dict):
        return key
    ((kind, content),) = key.items()
    if kind == "tuple":
        return tuple([decode_key(item, sources) for item in content])
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "device":
        return torch.device(content)
    if kind == "keywords":
        return KEYWORDS
    if kind == "holder":
        return sources[content].holder
    module, path, *member = content
    found: Any = sys.modules[module]
    for name in path.split("."):
        found = getattr(found, name)
    return found[member[0]] if member else found
