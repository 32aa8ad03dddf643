"""The token of a run is in nothing that the run writes, and in no environment or command line but the launcher's."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from actorflow.cli import main
from actorflow.commands.launcher_settings import LaunchFlags
from actorflow.launch.ray_run import RayRun
from actorflow.rendezvous.options import TOKEN
from actorflow.rendezvous.script_request import RunShape, check_token
from actorflow.rendezvous.secret import (
    check_token_text,
    put_into_pipe,
    take_token,
    why_not_inherited,
    without_token,
)
from actorflow.rendezvous.settings import Settings
from actorflow_compiler.core.errors import ClusterError

SECRET = "recognisable-3141592653589793"
SCRIPT = """
import json, os, subprocess, sys
import psutil, torch
import actorflow as flow

child = subprocess.Popen([sys.executable, "-c", "import os; print(dict(os.environ)); input()"],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
said = child.stdout.readline()
if not os.fork():  # as loader workers are
    os.read(os.open(sys.argv[1], os.O_RDONLY), 1)
    os._exit(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@flow.global_function(type="train")
def train_step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

float(train_step(torch.ones(4, 4)))
launcher = psutil.Process(int(os.environ["ACTORFLOW_LAUNCHER_PID"]))
places = {"own": str(dict(os.environ)), "child": said}
for process in launcher.children(recursive=True):
    for name in ("environ", "cmdline"):
        try:
            places[f"{name} of {process.pid}"] = open(f"/proc/{process.pid}/{name}").read()
        except OSError:
            pass
places["cmdline of the launcher"] = open(f"/proc/{launcher.pid}/cmdline").read()
found = [name for name, text in places.items() if sys.argv[2][::-1] in text]
print(json.dumps([sum(map(bool, places.values())), found]), flush=True)
child.communicate("\\n")
float(train_step(torch.ones(4, 4)))  # which waits for the other rank: it has printed its line
os.close(os.open(sys.argv[1], os.O_WRONLY))
flow.env.rank()
raise ValueError(f"an error whose traceback is shown, of {flow.env.world_size()} ranks")
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["--fork", pytest.param("--no-fork", marks=pytest.mark.slow)])
def test_only_the_launcher_is_started_with_it(start: Callable[..., Any], tmp_path: Path, way: str) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    run = start(
        SCRIPT, way, "--devices", "2", "--trace", str(tmp_path / "trace"), "--", str(gate), SECRET[::-1],
        env={TOKEN.variable: SECRET, "ACTORFLOW_FULL_TRACEBACK": "1"}, python=sys.executable,
    )  # fmt: skip
    assert run.wait() == 1
    found = [json.loads(line) for line in run.output.splitlines() if line.startswith("[")]
    assert found, run.output
    for count, places in found:
        assert count > 8
        assert places == []
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "script.py"]
    assert len(written) > 4
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []
    assert "an error whose traceback is shown" in run.output


@pytest.mark.parametrize(
    "shown", [Settings(token=SECRET), LaunchFlags(token=SECRET), RayRun("s", (), (), 1, 1, token=SECRET)]
)
def test_it_is_not_shown_with_what_holds_it(shown: object) -> None:
    assert SECRET not in repr(shown)
    assert SECRET not in f"{shown}"


def test_it_is_taken_out_of_an_environment_and_goes_through_a_pipe() -> None:
    given = {TOKEN.variable: f" {SECRET} ", "OTHER": "1"}
    assert without_token(given) == {"OTHER": "1"}
    environment, descriptor = put_into_pipe({TOKEN.variable: SECRET, "OTHER": "1"})
    assert descriptor is not None
    assert stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    assert SECRET not in str(environment)
    assert take_token(environment) == SECRET
    assert environment == {"OTHER": "1"}
    assert take_token(environment) == ""
    assert put_into_pipe(environment) == (environment, None)
    assert take_token(given) == SECRET


@pytest.mark.parametrize("text", ["two\nlines", "gefäß", "x" * 2000], ids=["lines", "letters", "long"])
def test_a_token_that_grpc_cannot_carry_is_named_and_not_shown(text: str, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="in one line were expected") as e:
        check_token_text(text, "the file")
    assert text not in str(e.value)
    (tmp_path / "script.py").write_text("")
    (tmp_path / "token").write_text(text)
    arguments = ["run", str(tmp_path / "script.py"), "--token-file", str(tmp_path / "token")]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert "in one line were" in " ".join(done.output.split())


@pytest.mark.parametrize("inside", [True, False])
def test_a_launcher_that_a_rank_has_started_is_told_why_it_has_none(inside: bool, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    several = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", "4242"]
    variables = Settings(launcher_pid=7).to_env() if inside else {}
    done = CliRunner().invoke(main, ["run", str(tmp_path / "script.py"), *several], env=variables)
    assert done.exit_code == 2
    told = " ".join(done.output.split())
    assert "several nodes need a shared secret" in told
    assert ("A rank of another run has started this process, and hands its own token to nothing" in told) is inside
    with pytest.raises(ClusterError, match=r"there is no secret that they share.*does without\. A rank of another run"):
        check_token(RunShape(2, 2, 0, "", 0, False, ""), "", why_not_inherited(Settings(launcher_pid=7).to_env()))
