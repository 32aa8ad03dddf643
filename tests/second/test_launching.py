"""The second generation's scripts under each launcher: the same numbers, the options, the ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import actorflow.distributed.launch as launcher
import warm
from actorflow.support import openmp
from actorflow_compiler.core.errors import ClusterError
from second.launching import LIMIT, command, environment, run

BOTH = Path(__file__).with_name("scripts") / "both.py"
DDP = Path(__file__).parents[2] / "examples" / "seeds" / "ddp.py"


@pytest.fixture(scope="module", params=["launch", "torchrun", "run"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What ``scripts/both.py`` found, on each of two ranks, under one of the launchers."""
    folder = tmp_path_factory.mktemp(request.param)
    between = ["--"] if request.param == "run" else []
    done = run(command(request.param, str(BOTH), *between, str(folder), python=warm.python()), folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


COLLECTIVES: dict[str, tuple[Any, Any]] = {  # of what rank 0 has, 0 and 1, and of what rank 1 has, 10 and 11
    "all_reduce": ([10, 12], [10, 12]),
    "all_gather": ([0, 1, 10, 11], [0, 1, 10, 11]),
    "all_gather_into_tensor": ([0, 1, 10, 11], [0, 1, 10, 11]),
    "all_to_all": ([0, 10], [1, 11]),
    "broadcast": ([10, 11], [10, 11]),
    "gather": ([0, 1, 10, 11], None),
    "reduce": ([10, 12], None),
    "reduce_scatter": ([10], [12]),
    "reduce_scatter_tensor": ([10], [12]),
    "scatter": ([0], [1]),
    "recv": ([0, 1], [0, 1]),
}


def test_ranks_find_their_place_each_other_and_the_same_numbers(results: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(results):
        assert found["place"] == [rank, 2, rank, 1]
        assert found["ranks"] == [rank, 2]
        assert not found["before"]  # asking for the rank makes no group
        for room in ("comm", "distributed"):
            assert found[room] == {name: values[rank] for name, values in COLLECTIVES.items()}
        assert found["max"] == [10, 11]
        assert found["rows"] == [[[0, 1], [2, 3]][: rank + 1], [[10, 11], [12, 13]][: rank + 1]]
        assert found["ours"] == found["theirs"]
        assert found["job"] == pytest.approx(found["alone"][0], abs=1e-6)
    halves = zip(results[0]["ours"][0], results[1]["ours"][0], strict=True)
    assert [sum(pair) / 2 for pair in halves] == pytest.approx(results[0]["alone"][0], abs=1e-6)
    assert results[0]["ours"][1] == results[1]["ours"][1] == pytest.approx(results[0]["alone"][1], abs=1e-5)


def test_the_documents_script_learns_under_their_launcher(tmp_path: Path) -> None:
    script = tmp_path / "ddp.py"
    script.write_text(DDP.read_text().replace('"cuda"', '"cpu"'))
    logs = ("--redirect_stdout_and_stderr", "--logdir", "logs")
    done = run(command("launch", *logs, str(script), python=warm.python()), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == ""
    for rank in range(2):
        out = (tmp_path / "logs" / f"local_rank_{rank}" / "stdout").read_text()
        losses = [float(loss) for loss in re.findall(r"^\d+/500 loss:(\S+)$", out, re.MULTILINE)]
        assert len(losses) == 10
        assert losses[-1] < 1e-6 < losses[0]
        assert (tmp_path / "logs" / f"local_rank_{rank}" / "stderr").exists()


def test_a_module_that_is_alone_trains_alone(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(
        "import actorflow as flow\n"
        "m = flow.nn.parallel.DistributedDataParallel(flow.nn.Linear(2, 1))\n"
        "m(flow.ones(1, 2)).sum().backward()\n"
        "print(m.in_features, m.weight.grad.tolist(), flow.env.get_rank(), flow.env.get_world_size())\n"
    )
    done = run([warm.python(), str(script)], tmp_path)
    assert (done.returncode, done.stdout) == (0, "2 [[1.0, 1.0]] 0 1\n"), done.stderr


@pytest.mark.slow
def test_the_first_failure_ends_all_and_gives_the_status(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, sys, time\n"
        "open(f'{os.environ[\"RANK\"]}.pid', 'w').write(str(os.getpid()))\n"
        "while not (os.path.exists('0.pid') and os.path.exists('1.pid')): time.sleep(0.01)\n"
        "sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(1000)\n"
    )
    done = run(command("launch", str(script)), tmp_path)
    assert done.returncode == 7
    assert re.search(r"actorflow: rank 1 \(pid \d+\) ended with exit status 7", done.stderr)
    assert left(tmp_path) == []


def test_ranks_of_torchs_launcher_hear_why_a_job_of_another_failed(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import actorflow as flow\n"
        "@flow.global_function(type='predict')\n"
        "def twice(x): return x * 2\n"
        "import os, time\n"
        "os.write(1, f'{float(twice(flow.ones(2)).sum())}\\n'.encode())  # whole, beside the other's\n"
        "if flow.env.get_rank() == 0: open('read', 'w').close()\n"
        "while not os.path.exists('read'): time.sleep(0.01)  # a result that is on its way is lost with the run\n"
        "if flow.env.get_rank() == 1: raise ValueError('one is enough')\n"
        "twice(flow.ones(2)).sum().item()\n"
    )
    done = run(command("torchrun", str(script), python=warm.python()), tmp_path)
    assert done.returncode != 0
    assert done.stdout.splitlines() == ["4.0", "4.0"]
    assert re.search(r"the run ended because rank 1 \(.*\) raised ValueError: one is enough", done.stderr)


def test_no_process_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    arguments = ["-c", "echo $$ > $RANK.pid; exec sleep 1000"]
    process = subprocess.Popen(
        command("launch", "--no_python", "bash", *arguments), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE
    )
    try:
        wait_for(lambda: all((tmp_path / f"{rank}.pid").exists() for rank in range(2)))
        wait_for(lambda: len(left(tmp_path)) == 2)
    finally:
        process.kill()
        process.communicate()
    wait_for(lambda: left(tmp_path) == [])


def test_a_signal_to_the_launcher_ends_the_processes(tmp_path: Path) -> None:
    (tmp_path / "stays.py").write_text(
        "import os, time\nopen(os.environ['RANK'] + '.pid', 'w').write(str(os.getpid()))\ntime.sleep(1000)\n"
    )
    process = subprocess.Popen(
        command("launch", "-m", "stays", python=warm.python()), cwd=tmp_path, env=environment(), stderr=subprocess.PIPE
    )
    wait_for(lambda: len(left(tmp_path)) == 2)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + signal.SIGTERM
    assert b"ended by SIGTERM" in error
    assert left(tmp_path) == []


def left(folder: Path) -> list[int]:
    """The processes of a launch that have said their number in the folder and still run."""
    pids = [int(text) for path in folder.glob("*.pid") if (text := path.read_text().strip())]
    return [pid for pid in pids if state(pid) not in ("", psutil.STATUS_ZOMBIE)]


def state(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.Error:
        return ""


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# -- the command line ------------------------------------------------------------------------------


def test_the_help_shows_the_documents_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        launcher.parse(["-h"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    shown = set(re.findall(r"(?<!\w)--?[a-z]\w*", text.replace("python -m", "")))
    assert shown == {
        "-h", "--help", "--nnodes", "--node_rank", "--nproc_per_node", "--master_addr", "--master_port", "-m",
        "--module", "--no_python", "--redirect_stdout_and_stderr", "--logdir",
    }  # fmt: skip
    assert "launch helper utility that will spawn up multiple distributed processes" in text
    assert "write the stdout and stderr to files 'stdout' and 'stderr'. Only available when logdir is set" in text
    assert "training_script ..." in text


def test_options_may_be_written_with_hyphens_and_arguments_are_the_scripts() -> None:
    found = launcher.parse(["--nproc-per-node", "2", "--master-port=29511", "x.py", "--nnodes", "9", "-h"])
    assert found == launcher.ElasticLaunch("x.py", ("--nnodes", "9", "-h"), nproc_per_node=2, master_port=29511)
    assert found.command == [sys.executable, "-u", "x.py", "--nnodes", "9", "-h"]
    assert launcher.parse(["-m", "pkg.train"]).command == [sys.executable, "-u", "-m", "pkg.train"]
    assert launcher.parse(["--no-python", "./x.sh"]).command == ["./x.sh"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--nnodes", "2", "--node_rank", "2", "x.py"], "--node_rank 2 is not one of --nnodes 2: it must be 0 to 1"),
        (["--nproc_per_node", "0", "x.py"], "both must be at least 1"),
        (["--master_port", "70000", "x.py"], "--master_port 70000 is no port"),
        (["--no_python", "-m", "x"], "--no_python and --module contradict each other"),
        (["--redirect_stdout_and_stderr", "x.py"], "--redirect_stdout_and_stderr needs --logdir"),
        (["--logdir", __file__, "x.py"], "is a file; it must be a folder"),
        ([], "the following arguments are required: training_script"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        launcher.parse(arguments)
    assert end.value.code == 2
    assert text in capsys.readouterr().err


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ClusterError, match=rf"--master_port {port} cannot be used on this machine, node 0"):
            launcher.launch(launcher.ElasticLaunch("x.py", master_port=port))


def test_threads_of_their_launcher_spin_for_a_short_time_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nprint(os.environ['OMP_NUM_THREADS'], os.environ['GOMP_SPINCOUNT'])\n")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    done = run(command("launch", str(script), processes=1), tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"1 {openmp.SPINS}" in done.stdout
    done = run(command("launch", str(script), processes=1), tmp_path, GOMP_SPINCOUNT="7")
    assert "1 7" in done.stdout


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    wrapper = Path(launcher.__file__).with_name("die_with_parent.py")
    arguments = [sys.executable, "-I", "-S", str(wrapper), str(os.getpid()), "/no/such/program"]
    done = run(arguments, tmp_path)
    assert done.returncode == 1
    assert "/no/such/program cannot be started: No such file or directory" in done.stderr
