"""What runs in a process that has imported torch and ours already sees and leaves what a new process would."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import warm

SHOWS = """
import os, resource, sys, tempfile
print(sys.argv, os.getcwd(), sys.executable, __name__, os.environ.get("ASKED"), "PATH" in os.environ)
print(tempfile.gettempdir())
print(resource.getrlimit(resource.RLIMIT_NOFILE), sys.stdin.read(), sys.path[0], [p for p in sys.path if "beside" in p])
print("an error", file=sys.stderr)
sys.exit(7)
"""

WAITS = """
import pathlib, os, sys, time
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(300)
"""

ENDS = """
import atexit, sys, threading
atexit.register(lambda: print("at exit\\nunfinished", end=""))
threading.Thread(target=lambda: threading.main_thread().join() or print("a thread")).start()
"""


def run(python: str, script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, script, *arguments], cwd=script.parent, capture_output=True, text=True, timeout=100, input="typed",
        env={"ASKED": "ß", "PYTHONPATH": "beside", "TMPDIR": str(script.parent)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200)),
    )  # fmt: skip


def test_a_script_sees_its_arguments_folder_variables_limits_and_files(tmp_path: Path) -> None:
    script = tmp_path / "shows.py"
    script.write_text(SHOWS)
    new, forked = (run(python, script, "--lr", "0.1", "a b") for python in (sys.executable, warm.python()))
    assert new.returncode == forked.returncode == 7
    assert forked.stdout == new.stdout.replace(sys.executable, warm.python())
    assert forked.stderr == new.stderr == "an error\n"


def test_a_program_of_the_standard_library_is_no_fork() -> None:
    code = "import sys; print(sys.executable, 'torch' in sys.modules, sys.flags.isolated)"
    done = subprocess.run([warm.python(), "-I", "-S", "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout == f"{sys.executable} False 1\n", done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_signal_ends_it_as_it_ends_a_new_process(number: signal.Signals, tmp_path: Path) -> None:
    script, there = tmp_path / "waits.py", tmp_path / "there"
    script.write_text(WAITS)
    process = subprocess.Popen([warm.python(), script, there], stderr=subprocess.PIPE, text=True)
    while not (there.exists() and there.read_text()):
        assert process.poll() is None
        time.sleep(0.01)
    pid = int(there.read_text())
    process.send_signal(number)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == -number
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    deadline = time.monotonic() + 100
    while os.path.exists(f"/proc/{pid}"):  # where its stub was killed it follows
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_fork_and_its_stub_that_end_in_one_moment_do_not_end_the_server(tmp_path: Path) -> None:
    script, there = tmp_path / "waits.py", tmp_path / "there"
    script.write_text(WAITS)
    process = subprocess.Popen([warm.python(), script, there])
    while not (there.exists() and there.read_text()):
        assert process.poll() is None
        time.sleep(0.01)
    pid = int(there.read_text())
    fork = psutil.Process(pid)
    server = fork.ppid()
    os.kill(server, signal.SIGSTOP)  # as where other processes have both cores
    try:
        fork.kill()
        while fork.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        process.kill()
        process.wait(100)
    finally:
        os.kill(server, signal.SIGCONT)
    script.write_text("print('served')")
    assert run(warm.python(), script).stdout == "served\n"


def test_it_has_torch_and_ours_and_has_begun_nothing(tmp_path: Path) -> None:
    script = tmp_path / "begun.py"
    script.write_text(
        "import os, sys\n"
        "print('torch' in sys.modules, 'actorflow.jobs.job' in sys.modules, len(os.listdir('/proc/self/task')))\n"
        "from actorflow.control import cluster; from actorflow.rendezvous import start; import torch\n"
        "print(cluster._current, start._settled, torch.distributed.is_initialized(), torch.cuda.is_initialized())"
    )
    assert run(warm.python(), script).stdout == "True True 1\nNone False False False\n"


@pytest.mark.parametrize("last", ["", "sys.exit()", "sys.exit(300)", "sys.exit('a reason')", "sys.exit(True)", "1 / 0"])
def test_it_ends_as_a_new_process_does(last: str, tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(ENDS + last)
    new, forked = (run(python, script) for python in (sys.executable, warm.python()))
    assert forked.returncode == new.returncode
    assert forked.stdout == new.stdout == "a thread\nat exit\nunfinished"
    assert new.stderr.splitlines()[-1:] == forked.stderr.splitlines()[-1:]
