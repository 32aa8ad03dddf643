"""Memory and threads of the host that a step uses again and again: huge pages of the heap, teams of OpenMP."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import warm
from actorflow.support import heap, openmp

LIMIT = 300  # seconds, which only a hang reaches
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

TRAIN = """
import os, sys, threading, time
import torch
import actorflow as flow

def threads():
    return len(os.listdir("/proc/self/task"))

def until(count):  # a thread that has been let go takes a moment to end
    end = time.monotonic() + 60
    while threads() != count and time.monotonic() < end:
        os.sched_yield()
    return threads()

def of_heap(name):  # in KiB
    with open("/proc/self/smaps") as maps:
        inside, found = False, 0
        for line in maps:
            if "-" in line.split()[0]:
                inside = line.endswith("[heap]\\n")
            elif inside and line.startswith(name + ":"):
                found += int(line.split()[1])
    return found

torch.set_num_threads(2)
model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

@flow.global_function(type="train")
def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

x = torch.randn(2048, 512)
for _ in range(3):
    float(step(x))
alone = threads()
x.exp()  # the script's thread computes, with a thread more
print("own", threads() - alone)
float(step(x))
print("left", until(alone) - alone)
print("huge", of_heap("AnonHugePages") >> 10)
"""


def run(tmp_path: Path, text: str, without: Sequence[str] = (), **variables: str) -> dict[str, int]:
    script = tmp_path / "script.py"
    script.write_text(text)
    env = {k: v for k, v in os.environ.items() if k not in without} | {"OMP_NUM_THREADS": "2"} | variables
    done = subprocess.run(
        [warm.python(), str(script)], env=env, capture_output=True, text=True, timeout=LIMIT, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    return {name: int(number) for name, number in (line.split() for line in done.stdout.splitlines())}


def test_a_step_runs_beside_no_team_of_the_scripts_own_and_in_huge_pages(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2 or "OpenMP" not in torch.__config__.parallel_info():
        pytest.skip("torch computes with one thread here")
    found = run(tmp_path, TRAIN, without=[heap.TUNABLES, *heap.variables({})])
    assert (found["own"], found["left"]) == (1, 0)
    if HUGE_PAGES.exists() and "[never]" not in HUGE_PAGES.read_text():
        assert found["huge"] >= 8  # MiB; weights and gradients alone are 16


class OpenMP:
    """Stands for an OpenMP library: notes what it is told."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def omp_pause_resource_all(self, kind: int) -> int:
        self.told.append(kind)
        return 0


class OpenMPOfLLVM(OpenMP):
    def kmp_get_blocktime(self) -> int:
        return 200


@pytest.mark.parametrize(
    ("library", "threads", "told"), [(OpenMP, 2, [1]), (OpenMP, 1, []), (OpenMPOfLLVM, 2, []), (object, 2, [])]
)
def test_only_gnu_openmp_with_several_threads_is_told(
    library: type, threads: int, told: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = library()
    monkeypatch.setattr(openmp, "_gnu_openmp", openmp._gnu_openmp.__wrapped__)  # without what this process has found
    monkeypatch.setattr(openmp.ctypes, "CDLL", lambda name: loaded)
    openmp.leave_team(threads)
    assert getattr(loaded, "told", []) == told


@pytest.mark.parametrize(
    ("said", "set_here"),
    [({}, 1), ({"OMP_NUM_THREADS": "4"}, 1), ({"OMP_WAIT_POLICY": "a"}, 0), ({"GOMP_SPINCOUNT": "7"}, 0)],
)
def test_threads_spin_for_a_short_time_unless_the_user_says_how_they_wait(said: dict[str, str], set_here: int) -> None:
    assert len(openmp.variables(said)) == set_here


class CLibrary:
    """Stands for glibc: notes what it is told; its heap ends where the test says."""

    def __init__(self, *ends: int) -> None:
        self.ends = list(ends)
        self.options: dict[int, int] = {}
        self.advised: list[tuple[int, int]] = []

    def mallopt(self, option: int, value: int) -> int:
        self.options[option] = value
        return 1

    def sbrk(self, more: int) -> int:
        assert more == 0
        return self.ends.pop(0)

    def madvise(self, begin: int, nbytes: int, advice: int) -> int:
        self.advised.append((begin + nbytes, advice))
        return 0


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in heap.variables({}):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("unset")
def test_a_heap_that_does_not_grow_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    library = CLibrary(1 << 50, 1 << 50, 1 << 51)
    monkeypatch.setattr(heap, "_glibc", lambda: library)
    ours = heap.Heap()
    assert library.options == {-8: 1, -3: 32 << 20, -1: (1 << 31) - 1, -2: 64 << 20}
    for _ in range(3):
        ours.settle()
    assert library.advised == [(1 << 50, 14), (1 << 50, 25), (1 << 51, 14), (1 << 51, 25)]


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_a_heap_that_the_user_or_a_launcher_has_set_up_is_theirs(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    library = CLibrary()
    monkeypatch.setattr(heap, "_glibc", lambda: library)
    monkeypatch.setenv(name, "1")
    heap.Heap().settle()
    assert not library.options
    assert not library.advised


@pytest.mark.usefixtures("unset")
def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: object())
    heap.Heap().settle()


def test_what_the_user_says_of_huge_pages_stays() -> None:
    said = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    assert heap.variables(said)["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=0"
