"""What people read where their script raises: their own lines, the message, and one line for what is left out."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import warm
from actorflow.launch.entry import run_script
from actorflow.support.script_error import FULL, one_line, print_script_error

STEP = """
import torch
import actorflow as flow
from net import Net

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@flow.global_function(type="train")
def step(x):
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    return loss

def main():
    print(float(step(torch.randn(8, 4))))

main()
"""
NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 6), torch.nn.Linear(5, 2)

    def forward(self, x):
        hidden = self.first(x).relu()
        return self.second(hidden)
"""
LINES = (  # the user's, from the outermost in
    'train.py", line 19, in <module>\n    main()',
    'train.py", line 17, in main\n    print(float(step(torch.randn(8, 4))))',
    'train.py", line 11, in step\n    loss = model(x).sum()',
    'net.py", line 11, in forward\n    return self.second(hidden)',
)


PLAIN, PACKAGE = ("train.py",), ("-m", "recipes.train")
BY_ACTORFLOW = ("-m", "actorflow", "run", "train.py")


@pytest.mark.parametrize("command", [BY_ACTORFLOW, PLAIN, PACKAGE], ids=["actorflow", "python", "python -m"])
def test_an_error_in_a_step_shows_the_users_lines_and_then_the_message(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    folder = tmp_path / "recipes" if command is PACKAGE else tmp_path
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(STEP.replace("from net", "from .net") if command is PACKAGE else STEP)
    (folder / "net.py").write_text(NET)
    done = subprocess.run(
        [warm.python() if command is BY_ACTORFLOW else sys.executable, *command],
        capture_output=True, text=True, timeout=250, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    traceback, message, rest = re.split(r"(?m)^(\S*CallError: .*\n)", done.stderr, maxsplit=1)
    places = [traceback.index(line) for line in LINES]
    assert places == sorted(places)
    assert traceback.count("File ") == len(LINES)
    assert re.search(r"(?m)^Traceback \(most recent call last\):\n  File", traceback)
    assert re.search(r"\[\d+ frames of actorflow and torch; ACTORFLOW_FULL_TRACEBACK=1 shows them\]\n$", traceback)
    assert message.rstrip().endswith("net.py:11: return self.second(hidden)")
    assert rest.startswith("  RuntimeError: a and b must have same reduction dim, but got [8, 6] X [5, 2].\n")


WRONG_INDEX = """
import torch
import torch.nn.functional as F
import actorflow as flow

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@flow.global_function(type="train")
def step(x, y):
    hidden = model(x)
    loss = F.cross_entropy(hidden, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

for last in (1, 99):  # the second batch is wrong in rank 1's half
    loss = float(step(torch.tensor([0, 1, 2, last]), torch.zeros(4, dtype=torch.int64)))
"""


def test_an_op_that_fails_while_it_runs_is_told_with_the_users_line_by_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WRONG_INDEX)
    options = ("--devices", "2", "--device-type", "cpu", "--oversubscribe")
    done = subprocess.run(
        [warm.python(), "-m", "actorflow", "run", "train.py", *options],
        capture_output=True, text=True, timeout=250, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    cause = r"rank 1, actor \S+, firing 1, aten\.embedding\.default, line train\.py:12: hidden = model\(x\): IndexError"
    assert re.search(rf"(?s)Traceback.*line 20, in <module>.*ActorError: {cause}", done.stderr)
    assert re.search(r"actorflow: rank \d \(.*\) raised \S*ActorError: ", done.stderr)
    assert "gloo" not in done.stderr.lower()  # that a connection closed is no cause
    assert "The call has changed nothing, and other calls are done as ever" in done.stderr
    assert "--oversubscribe has no effect: " in done.stderr


def shown(script: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """What is printed of the exception that a script raises, and the sentence that others hear."""
    script.write_text(text)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    printed = io.StringIO()
    with pytest.raises(Exception) as raised:  # noqa: PT011 -- which one is for the caller to say
        run_script(str(script), ())
    print_script_error(raised.value, str(script), printed)
    return printed.getvalue(), one_line(raised.value, str(script))


EAGER = """
import torch
from actorflow_compiler.core.errors import CallError

def train():
    try:
        torch.nn.Linear(4, 6)(torch.zeros(8, 5))
    except RuntimeError as error:
        raise CallError("no such batch") from error

train()
"""


def test_frames_of_torch_and_the_cause_of_our_own_error_are_told_as_one_story(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, _ = shown(tmp_path / "train.py", EAGER, monkeypatch)
    assert "torch/nn" not in text
    assert "The above exception" not in text
    code, left_out, message = (line.strip() for line in text.splitlines()[-3:])
    assert code == "torch.nn.Linear(4, 6)(torch.zeros(8, 5))"
    assert re.fullmatch(r"\[\d+ frames of actorflow and torch; ACTORFLOW_FULL_TRACEBACK=1 shows them\]", left_out)
    assert message == "actorflow_compiler.core.errors.CallError: no such batch"


def test_all_frames_are_shown_where_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FULL, "1")
    text, _ = shown(tmp_path / "train.py", EAGER, monkeypatch)
    assert "torch/nn/modules/linear.py" in text
    assert "The above exception was the direct cause" in text
    assert "frames of" not in text
    assert "runpy" not in text.partition("The above exception")[2]


def test_what_a_script_raises_itself_is_shown_as_python_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    raising = (
        "import json\n\ndef read(text):\n    try:\n        return json.loads(text)\n"
        "    except ValueError as error:\n        raise KeyError('no settings') from error\n\nread('{')\n"
    )
    text, said = shown(script, raising, monkeypatch)
    plain = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert text == plain.stderr
    assert said == "KeyError: 'no settings' (train.py:7: raise KeyError('no settings') from error)"


IN_STEP = """
import sys
import torch
import actorflow as flow

@flow.global_function(type="predict")
def step(x):
    raise KeyError("none")

if "--hook" in sys.argv:
    sys.excepthook = lambda kind, error, at: print("mine:", kind.__name__, file=sys.stderr)
if "--own" in sys.argv:
    torch.nn.Linear(4, 6)(torch.zeros(8, 5))
step(torch.ones(2))
"""


def test_under_plain_python_only_errors_with_frames_of_ours_are_told_anew(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(IN_STEP)

    def told(*options: str, **variables: str) -> str:
        done = subprocess.run(
            [sys.executable, str(script), *options],
            capture_output=True, text=True, timeout=250, check=False, env={**os.environ, **variables},
        )  # fmt: skip
        assert done.returncode == 1
        return done.stderr

    assert told("--hook").endswith("mine: CallError\n")
    assert "Traceback" not in told("--hook")
    assert "torch/nn/modules/linear.py" in told("--own")  # as Python shows it
    assert "actorflow/session" in told(**{FULL: "1"})
    text = told()
    assert text.count("File ") == 2
    assert "frames of actorflow and torch" in text
    assert re.search(r"\S*CallError: .*raise KeyError\(\"none\"\)\n  KeyError: 'none'\n  while step was captured", text)
    assert "The above exception" not in text


def test_a_syntax_error_is_pythons_own_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    text, said = shown(script, "import torch\nx = (1\n", monkeypatch)
    plain = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert text == plain.stderr
    assert said == "SyntaxError: '(' was never closed (train.py:2: x = (1)"


def test_a_bug_of_ours_is_shown_with_our_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raising = "from actorflow.runtime.bodies.kernels import culprit\nculprit(None, ValueError())\n"
    text, _ = shown(tmp_path / "train.py", raising, monkeypatch)
    assert "actorflow/runtime/bodies/kernels.py" in text
    assert "AttributeError" in text
    assert "frames of" not in text
