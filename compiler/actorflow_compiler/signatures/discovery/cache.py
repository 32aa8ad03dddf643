"""Keep discovered rules on disk, one file for each op and version of torch, for later runs."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from actorflow_compiler.core.cache_folder import cache_folder
from actorflow_compiler.core.op_call import OpCall
from actorflow_compiler.signatures.discovery.rules import Rule, from_json, structure, to_json

FORMAT = 1  # increase it when the file format, or the rules that the search can find, change


def path_of(op: str) -> Path | None:
    """The file of an op."""
    where = cache_folder()
    return None if where is None else where / "signatures" / f"torch-{torch.__version__}" / f"{op}.json"


def read(call: OpCall, implementation: str) -> tuple[Rule, ...] | None:
    """The rules of calls like this one; None if there are none for this implementation of the op."""
    with contextlib.suppress(OSError, ValueError):
        found = _load(call.op, implementation).get(structure(call))
        if found is not None:
            return from_json(found, call)
    return None


def write(call: OpCall, implementation: str, rules: Sequence[Rule]) -> None:
    """Store rules on disk; if that is not possible, later runs search again."""
    path = path_of(call.op)
    if path is None:
        return
    try:
        kept = _load(call.op, implementation)
    except (OSError, ValueError):  # no file, or not ours: start with an empty one
        kept = {}
    content = {**_head(call.op, implementation), "rules": {**kept, structure(call): to_json(rules)}}
    keep(path, content)


def keep(path: Path, content: Any) -> str:
    """Write JSON atomically; returns why the file system did not let it, empty if it did."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            try:
                json.dump(content, file, indent=1)
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _head(op: str, implementation: str) -> dict[str, Any]:
    return {"format": FORMAT, "op": op, "torch": torch.__version__, "implementation": implementation}


def _load(op: str, implementation: str) -> dict[str, Any]:
    """The rules in a file, by structure; raises OSError without a file, ValueError for unexpected content."""
    path = path_of(op)
    if path is None:
        raise FileNotFoundError
    content = json.loads(path.read_text())
    rules = content.pop("rules", None) if isinstance(content, dict) else None
    if not isinstance(rules, dict) or content != _head(op, implementation):
        raise ValueError("another file")
    return rules
