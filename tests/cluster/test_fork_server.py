"""Ranks that are forks of one process: what they have of it and of their own, and how starts are cut short."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from actorflow.launch.fork_server import ForkServer, NoForks
from actorflow.launch.rank_processes import rank_command, rank_place
from cluster.ranks import LIMIT
from cluster.runs import Run

Start = Callable[..., Run]

SHOWN = """
import gc, os, sys
rank = os.environ["RANK"]
stat = open("/proc/self/stat").read().rpartition(")")[2].split()
print("rank", rank, "forked", gc.get_freeze_count() > 0, "collects", gc.isenabled())
print("parent", int(stat[1]) == int(os.environ["ACTORFLOW_LAUNCHER_PID"]), "leads", os.getsid(0) == os.getpid())
print("arguments", sys.argv[1:], "main", __name__, "torch", "torch" in sys.modules)
print("left over", [name for name in os.environ if "FORK_SERVER" in name])
print("hash", hash("actorflow"), file=sys.stderr)
unclosed = open(f"{sys.argv[1]}/said-{rank}", "w")
unclosed.write("all of it")
import atexit
atexit.register(print, "at the end")
"""


@pytest.mark.parametrize("option", ["--fork", pytest.param("--no-fork", marks=pytest.mark.slow)])
def test_a_rank_has_its_own_place_whether_it_is_a_fork_or_not(option: str, start: Start, tmp_path: Path) -> None:
    run = start(SHOWN, "--devices", "2", option, "--", str(tmp_path))
    assert run.wait() == 0, run.output
    other = (tmp_path / "logs0/rank1.stdout.log").read_text()
    for rank, output in enumerate((run.output, other)):
        lines = [line for line in output.splitlines() if not line.startswith(("actorflow", "hash"))]
        assert lines == [
            f"rank {rank} forked {option == '--fork'} collects True",
            "parent True leads True",
            f"arguments ['{tmp_path}'] main __main__ torch True",
            "left over []",
            "at the end",
        ]
        assert (tmp_path / f"said-{rank}").read_text() == "all of it"
    errors = (tmp_path / "logs0/rank1.stderr.log").read_text()
    assert errors.strip() in run.output  # hashes are equal on all ranks
    assert run.ranks_left() == []


def _server_of(run: Run) -> psutil.Process:
    """The launcher's fork server, once it runs Python."""
    launcher = psutil.Process(run.process.pid)
    found: list[psutil.Process] = []

    def there() -> bool:
        with suppress(psutil.Error):  # another child, which has just ended
            # before it is Python that imports, a child has the launcher's command line
            found[:] = [p for p in launcher.children() if "actorflow.launch.entry" in p.cmdline()]
        return bool(found)

    run.until(there)
    return found[0]


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_while_ranks_have_not_started_leaves_nothing(number: signal.Signals, start: Start) -> None:
    run = start("print('began')", "--devices", "2")
    server = _server_of(run)
    os.kill(run.process.pid, number)
    assert run.wait() != 0
    server.wait(LIMIT)
    assert run.ranks_left() == []
    assert "began" not in run.output


def test_a_launcher_that_is_killed_takes_its_server_along(start: Start) -> None:
    run = start("print('began')", "--devices", "2")
    server = _server_of(run)
    run.kill()
    server.wait(LIMIT)
    assert run.ranks_left() == []


@pytest.mark.slow
def test_ranks_start_without_a_server_that_was_killed(start: Start) -> None:
    run = start("import gc; print('forked', gc.get_freeze_count() > 0)", "--devices", "2")
    _server_of(run).kill()
    assert run.wait() == 0, run.output
    assert "each rank imports torch itself (--no-fork): the process that was to fork has ended" in run.output
    assert "forked False" in run.output


def test_a_server_that_stands_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorflow.launch.fork_server.LOOK", 0.1)
    server = ForkServer(rank_command(str(tmp_path / "script.py"), ()), {}, 0.3)
    os.kill(server._process.pid, signal.SIGSTOP)
    with pytest.raises(NoForks, match=r"the process that was to fork has not run for 0\.3 s"):
        server.fork([rank_place(str(tmp_path), 0, {})])
    server.close()
    assert server._process.poll() == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--fork", "--no-fork"])
def test_a_rank_that_is_stopped_before_it_begins_is_named_and_all_start_again(
    option: str, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(
        "import os, signal\nfrom pathlib import Path\n"
        "def stand():\n"
        f"    path = Path({str(tmp_path)!r}, 'stood')\n"
        "    if not path.exists() and path.touch() is None:\n"
        "        os.kill(os.getpid(), signal.SIGSTOP)\n"
        "if 'ACTORFLOW_FORK_SERVER' in os.environ:\n    os.register_at_fork(after_in_child=stand)\n"
        "elif os.environ.get('RANK') == '1':\n    stand()\n"
    )
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, sys.path)])
    script = "import os; print('attempt', os.environ['TORCHELASTIC_RESTART_COUNT'])"
    more = (option, "--max-restarts", "1", "--lost-after", "5.5")
    run = start(script, "--devices", "2", *more, env={"PYTHONPATH": path})
    assert run.wait() == 0, run.output
    assert re.search(r"rank \d \(.*, pid \d+\) stopped answering before it had begun; noticed by", run.output)
    assert "attempt 1" in run.output
    assert run.ranks_left() == []


@pytest.mark.slow
def test_a_thread_that_would_not_live_on_forbids_forks(start: Start, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, name='profiler', daemon=True).start()\n"
    )
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, sys.path)])
    show = "import threading; print([thread.name for thread in threading.enumerate()])"
    run = start(show, "--devices", "1", env={"PYTHONPATH": path})
    assert run.wait() == 0, run.output
    assert "threads do not live on in a fork (profiler)" in run.output
    assert "'profiler'" in run.output.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "loaded"),
    [("TORCH_COMPILE_DISABLE", False), pytest.param("SOMETHING_ELSE", True, marks=pytest.mark.slow)],
)
def test_variables_of_torchs_compiler_that_a_script_sets_are_heeded(variable: str, loaded: bool, start: Start) -> None:
    show = (
        f"import os, sys; os.environ['{variable}'] = '1'; print('loaded', 'torch._dynamo' in sys.modules)\n"
        "import torch._dynamo.config; print('disabled', torch._dynamo.config.disable)"
    )
    run = start(show, "--devices", "1")
    assert run.wait() == 0, run.output
    assert run.output.splitlines()[-2:] == [f"loaded {loaded}", f"disabled {not loaded}"]


@pytest.mark.slow
def test_forks_of_a_server_end_if_the_launcher_lets_go_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the launcher fails between the forks and its word."""
    script = tmp_path / "script.py"
    script.write_text("open('began', 'w')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setattr("actorflow.launch.fork_server._parent_of", lambda pid: 0)
    server = ForkServer(rank_command(str(script), ()), {}, LIMIT)
    forks: list[psutil.Process] = []
    ask = server._ask

    def asked(places: object) -> list[int]:
        pids = ask(places)  # type: ignore[arg-type]
        forks.extend(psutil.Process(pid) for pid in pids)
        return pids

    monkeypatch.setattr(server, "_ask", asked)
    with pytest.raises(NoForks, match="another parent"):
        server.fork([rank_place(str(tmp_path), rank, {}) for rank in range(2)])
    server.close()
    assert len(forks) == 2
    for fork in forks:
        assert os.waitpid(fork.pid, 0)[1] == 0
    assert not (tmp_path / "began").exists()


def printed(lines: str) -> str:
    """What lines print in a Python of their own."""
    return subprocess.run([sys.executable, "-c", lines], check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.slow
def test_what_ranks_are_forks_of_has_neither_the_solver_nor_what_draws_nor_a_thread() -> None:
    shown = (
        "import importlib, sys, threading, torch\n"
        "from actorflow.launch.fork_server import COMPILER, PRELOADED\n"
        "[importlib.import_module(name) for name in (*PRELOADED, COMPILER)]\n"
        "print([m for m in ('scipy', 'actorflow.show', 'actorflow.testing', 'actorflow.eager') if m in sys.modules])\n"
        "print(threading.active_count(), torch.cuda.is_initialized())"
    )
    assert printed(shown) == "[]\n1 False\n"


def test_a_launcher_imports_no_torch_before_it_has_started_the_server_and_never_a_compiler() -> None:
    shown = (
        "import sys, actorflow.cli, actorflow.launch.launcher\n"
        "early = [m for m in ('torch', 'numpy', 'grpc', 'google.protobuf') if m in sys.modules]\n"
        "import actorflow.launch.rank_agent\n"
        "late = [m for m in ('torch._dynamo', 'sympy', 'actorflow_compiler.compile') if m in sys.modules]\n"
        "print(early, late)"
    )
    assert printed(shown) == "[] []\n"
