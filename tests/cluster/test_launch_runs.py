"""Whole runs through the real launcher that go well, and the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import warm
from actorflow.cli import main
from cluster.ranks import LIMIT, free_port
from cluster.runs import Run

Start = Callable[..., Run]

SHOW = """
import os, random, sys
import torch
from actorflow.control.cluster import current

cluster = current()
seen = [cluster.rank, cluster.world, sys.argv[1:], os.path.basename(sys.path[0]), sys.stdin.read(), __name__]
random_numbers = (random.random(), torch.rand(1).item(), hash("actorflow"))
everybody = cluster.gather("random numbers", repr(random_numbers).encode())
print("seen", seen)
if everybody is not None:
    print("equal", len(set(everybody)) == 1)
"""


def test_every_rank_runs_the_script_and_the_master_has_the_terminal(start: Start, tmp_path: Path) -> None:
    run = start(SHOW, "--devices", "2", "--", "--epochs", "3", "$5 ${local_rank}")
    assert run.wait() == 0
    arguments = "['--epochs', '3', '$5 ${local_rank}']"
    assert f"seen [0, 2, {arguments}, '{tmp_path.name}', '', '__main__']" in run.output
    assert "equal True" in run.output
    assert "seen [1" not in run.output
    assert f"seen [1, 2, {arguments}" in (tmp_path / "logs0/rank1.stdout.log").read_text()
    assert run.ranks_left() == []


KEPT = """
import os
print({k: v for k, v in sorted(os.environ.items()) if k.startswith(("MALLOC", "GLIBC", "GOMP"))})
"""


@pytest.mark.slow
def test_a_rank_keeps_the_memory_that_it_frees_and_spins_for_a_short_time_but_for_what_the_user_says(
    start: Start,
) -> None:
    said = {"MALLOC_ARENA_MAX": "7", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=3"}
    run = start(KEPT, "--devices", "1", env=said, python=warm.python())
    assert run.wait() == 0
    kept = {
        "GLIBC_TUNABLES": "glibc.malloc.tcache_count=3:glibc.malloc.hugetlb=1",
        "GOMP_SPINCOUNT": "10000",
        "MALLOC_ARENA_MAX": "7",
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    }
    assert str(kept) in run.output


FORKS = """
import os, signal
pid = os.fork()
if not pid:
    if signal.set_wakeup_fd(-1) == -1:  # nor does the rank hear of signals that the child handles
        os.kill(os.getpid(), signal.SIGTERM)
    os._exit(5)
print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
for _ in range(20):
    pid = os.fork()
    if not pid:
        signal.pause()
    os.kill(pid, signal.SIGTERM)  # perhaps before it has run a line of Python
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
from multiprocessing import get_context
with get_context("fork").Pool(2) as pool:
    print("pool", pool.map(abs, range(-2, 2)))  # whose processes are ended by SIGTERM
"""


def test_a_signal_to_a_process_that_the_script_forks_is_not_one_to_the_rank(start: Start) -> None:
    run = start(FORKS, "--devices", "2", python=warm.python())
    assert run.wait() == 0, run.output
    assert "child -15\npool [2, 1, 0, 1]" in run.output


ONE_CALL = """
import torch
import actorflow as flow

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@flow.global_function(type="train")
def step(x):
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

step(torch.ones(4, 2))
"""


ENDS_OF_FORKS = (
    ONE_CALL
    + """
import os, sys
for ending in ("exit", "raise", "the last line"):
    pid = os.fork()
    if not pid:
        if ending == "exit":
            sys.exit(3)
        if ending == "raise":
            raise ValueError("of a child")
        break
    print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    float(step(torch.ones(4, 2)))
    print("went on")
"""
)


FORKS_THAT_READ = (
    ONE_CALL
    + """
import multiprocessing
def read():
    with torch.no_grad():
        assert torch.equal(model.weight + 0, weight), (model.weight, weight)

def call():
    step(torch.ones(4, 2))

weight = model.weight.detach().clone()  # when the call is done
for target in (read, call):
    process = multiprocessing.get_context("fork").Process(target=target)
    process.start()
    process.join()
    print(target.__name__, process.exitcode, flush=True)
float(step(torch.ones(4, 2)))
print("went on")
"""
)


def test_processes_that_a_script_forks_read_what_calls_left_and_make_none(start: Start) -> None:
    run = start(FORKS_THAT_READ, "--devices", "2", python=warm.python())
    assert run.wait() == 0, run.output
    said = [line for line in run.output.splitlines() if line.startswith(("read", "call", "went on"))]
    assert said == ["read 0", "call 1", "went on"], run.output
    assert "a process that the script has forked uses a job" in run.output


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("ranks", [0, 2], ids=["without a launcher", "as ranks"])
def test_processes_that_a_script_forks_end_as_they_please(ranks: int, start: Start, tmp_path: Path) -> None:
    if ranks:
        run = start(ENDS_OF_FORKS, "--devices", str(ranks), python=warm.python())
        assert run.wait() == 0, run.output
        output = run.output
    else:
        script = tmp_path / "script.py"
        script.write_text(ENDS_OF_FORKS)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run([warm.python(), script], env=env, capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 0, done.stderr
        output = done.stdout + done.stderr
    said = [line for line in output.splitlines() if line.startswith(("child", "went on", "ValueError"))]
    assert sorted(said) == ["ValueError: of a child", "child 0", "child 1", "child 3", "went on"]


@pytest.mark.slow
def test_a_module_of_the_scripts_with_the_name_of_one_of_pythons_is_the_scripts(start: Start, tmp_path: Path) -> None:
    (tmp_path / "statistics.py").write_text("OWNER = 'script'")
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile/__init__.py").write_text("OWNER = 'script, too'")
    (tmp_path / "unittest").mkdir()
    (tmp_path / "unittest/__init__.py").write_text("")
    (tmp_path / "unittest/mock.py").write_text("OWNER = 'script'")
    (tmp_path / "encodings").mkdir()  # plain Python has its own long before
    (tmp_path / "encodings/__init__.py").write_text("OWNER = 'script'")
    show = (
        "import encodings, profile, statistics, unittest.mock\n"
        "print([getattr(one, 'OWNER', 'Python') for one in (encodings, profile, statistics, unittest.mock)])"
    )
    run = start(show, "--devices", "1")
    assert run.wait() == 0, run.output
    assert "['Python', 'script, too', 'script', 'script']" in run.output


@pytest.mark.slow
def test_a_launcher_whose_standard_input_is_closed_runs_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print('read', repr(sys.stdin.read()))")
    command = [sys.executable, "-m", "actorflow", "run", str(script), "--devices", "2", "--log-dir", str(tmp_path)]
    closed = ["/bin/sh", "-c", 'exec "$@" <&-', "sh", *command]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(closed, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "read ''\n"
    assert (tmp_path / "rank1.stdout.log").read_text() == "read ''\n"


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--fork", pytest.param("--no-fork", marks=pytest.mark.slow)])
def test_a_launcher_hears_how_ranks_end_where_its_parent_ignored_that(option: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    os.kill(os.getpid(), signal.SIGKILL)\nprint('ran')"
    )
    command = [sys.executable, "-m", "actorflow", "run", str(script), option, "--max-restarts", "1"]
    ignoring = "from signal import *; import os, sys; signal(SIGCHLD, SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    whole = [sys.executable, "-c", ignoring, *command]
    ran = subprocess.run(whole, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert (ran.returncode, ran.stdout) == (0, "ran\n"), ran.stderr
    assert "was killed by SIGKILL" in ran.stderr


def test_two_nodes_with_one_token_are_one_run(start: Start, tmp_path: Path) -> None:
    node = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    token = {"ACTORFLOW_TOKEN": "secret"}
    runs = [start(SHOW, *node, "--node-rank", str(n), env=token, python=warm.python()) for n in (0, 1)]
    assert [run.wait() for run in runs] == [0, 0]
    assert "seen [0, 2, []" in runs[0].output
    assert "equal True" in runs[0].output
    assert "seen [1, 2, []" in (tmp_path / "logs1/rank1.stdout.log").read_text()


def test_one_device_needs_no_cluster_and_keeps_the_scripts_exit_status(start: Start) -> None:
    run = start("import sys; print('alone'); sys.exit(3)", "--devices", "1", python=warm.python())
    assert run.wait() == 3
    assert "alone" in run.output
    assert "rank 0" in run.output
    assert "ended with exit status 3" in run.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "missing.py"], "missing.py"),
        (["run", "script.py", "--devices", "0"], "--devices"),
        (["run", "script.py", "--devices", "two"], "--devices"),
        (["run", "script.py", "--join-timeout", "0"], "--join-timeout"),
        (["run", "script.py", "--join-timeout", "nan"], "'nan' is no number of seconds"),
        (["run", "script.py", "--lost-after", "0"], "'--lost-after': 0.0 is not in the range 5.0<x<=86400.0"),
        (["run", "script.py", "--lost-after", "-1"], "'--lost-after': -1.0 is not in the range"),
        (["run", "script.py", "--lost-after", "5"], "'--lost-after': 5.0 is not in the range"),
        (["run", "script.py", "--lost-after", "inf"], "'--lost-after': inf is not in the range"),
        (["run", "script.py", "--lost-after", "nan"], "'nan' is no number of seconds"),
        (["run", "script.py", "--lost-after", "soon"], "'soon' is not a valid float"),
        (["run", "script.py", "--ctrl-port", "70000"], "--ctrl-port"),
        (["run", "script.py", "--epochs", "3"], "after --: actorflow run SCRIPT -- --epochs"),
        (["run", "script.py", "--nnodes", "2", "--node-rank", "2"], "2 is not below --nnodes 2"),
        (["run", "script.py", "--nnodes", "2"], "--master-addr"),
        (["run", "script.py", "--nnodes", "2", "--master-addr", "a", "--master-port", "1"], "ACTORFLOW_TOKEN"),
        (["run", "script.py", "--token-file", "empty"], "long random text"),
        (["run", "script.py", "--token-file", "token", "--insecure"], "--insecure contradicts"),
        (["plan", "script.py"], "--devices"),
        (["plan", "script.py", "--devices", "2", "--out", "plan.yaml"], ".json"),
        (["plan", "script.py", "--devices", "2"], "without a call"),
        (["plan", "script.py", "--devices", "2", "--job", "evaluate"], "'evaluate'"),
    ],
)
def test_a_wrong_command_line_says_what_to_do(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ACTORFLOW_TOKEN", raising=False)
    monkeypatch.setattr("actorflow.control.cluster._current", None)  # which `plan` pretends to be many ranks
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("script.py").write_text("pass\n")
    Path("empty").write_text("\n")
    Path("token").write_text("secret\n")
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code != 0
    assert told in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("command", "example"),
    [
        ([], "actorflow run train.py --devices 4            four devices on this machine"),
        (["run"], "actorflow run train.py --devices 4 -- --epochs 3"),
        (["plan"], "actorflow plan train.py --devices 4 --out plan.html"),
        (["doctor"], "actorflow doctor train.py --nodes 10.0.0.1,10.0.0.2 --master-port 29400"),
    ],
)
def test_help_shows_commands_to_copy(command: list[str], example: str) -> None:
    result = CliRunner().invoke(main, [*command, "--help"])
    assert result.exit_code == 0
    assert example in [line.strip() for line in result.output.splitlines()]
