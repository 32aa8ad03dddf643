"""The examples of docs/global_tensors.md do what the page says, on four ranks; what is shown is rank 0's."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import pytest
import torch

from actorflow.testing.thread_ranks import ThreadRanks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "global_tensors.md"


def shown(source: str, names: dict[str, Any]) -> str:
    """What an interactive session shows for a statement."""
    try:
        try:
            code = compile(source, "<example>", "eval")
        except SyntaxError:
            exec(compile(source, "<example>", "exec"), names)
            return ""
        value = eval(code, names)
        return "" if value is None else f"{value!r}\n"
    except Exception as error:
        kind = type(error)
        return f"Traceback (most recent call last):\n{kind.__module__}.{kind.__qualname__}: {error}\n"


def test_every_example_does_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where the examples write files
    examples = doctest.DocTestParser().get_examples(PAGE.read_text().replace("```\n", "\n"))
    assert len(examples) > 40

    def on_a_rank() -> list[str]:
        names: dict[str, Any] = {"__name__": "__main__"}
        return [shown(example.source, names) for example in examples]

    torch.manual_seed(0)
    with ThreadRanks(4) as threads:
        found, *_ = threads.run(on_a_rank)
    for example, text in zip(examples, found, strict=True):
        want = example.want
        if example.exc_msg is not None:
            want = f"Traceback (most recent call last):\n{example.exc_msg}"
        assert text == want, f"line {example.lineno + 1}: {example.source}"
