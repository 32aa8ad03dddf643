"""Set up every test: one thread, fixed random numbers, no state of earlier runs; skip GPU tests without a GPU."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import scipy.optimize  # noqa: F401  # so that these processes start none to solve linear programs
import torch

import fewer
import warm
from actorflow.control import cluster
from actorflow.rendezvous import start
from actorflow.session.plan_store import KEPT
from matrices import thin
from scripts.trainings import EVERY, SOME

FOLDER = Path(__file__).parent
# Files that take longest, in order, as measured in three processes on two slow cores, from some 50 seconds to 19: what
# begins last is what all processes wait for at the end.
LONGEST_FIRST = (
    "docs/test_docs_commands.py",
    "compiler/test_signatures_table.py",
    "test_gathers_ahead.py",
    "compiler/test_stages.py",
    "persistence/test_kept_plans.py",
    "compiler/test_infer.py",
    "test_auto_parallel.py",
    "test_python_state.py",
    "compiler/test_folded_compile.py",
    "persistence/test_plans_for_all_runs.py",
    "cluster/test_fork_server.py",
    "frontend/test_ranks.py",
    "frontend/test_messages.py",
    "test_letting_go.py",
    "test_hf.py",
    "seeds/test_tables.py",
    "test_random_programs.py",
    "test_micro_batches.py",
    "compiler/test_rank_parts.py",
    "test_special_axes.py",
    "test_pipelines.py",
    "test_offloading.py",
    "second/test_launching.py",
    "compiler/test_signatures_decompositions.py",
    "compiler/test_hints.py",
    "cluster/test_node_meeting.py",
    "test_computed_again.py",
    "frontend/test_jobs.py",
    "test_memory_layouts.py",
    "test_equality.py",
    "test_loss_scaling.py",
    "compiler/test_reuse.py",
    "compiler/test_random.py",
    "compiler/test_discovery.py",
    "show/test_chart_hands.py",
)


MANY = 50  # modules
_known = 0  # modules that the collector does not look through any more


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fuzz", "messages for tests/fuzz (make fuzz)")
    group.addoption("--messages", type=int, default=0, help="how many each door refuses; 0: some")
    group.addoption("--from-seed", type=int, default=0, help="from which they are drawn")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_configure_node(node: Any) -> None:
    node.workerinput[warm.SHARED] = warm.python()  # one server for all of them: to import torch takes seconds


def pytest_configure(config: pytest.Config) -> None:
    if (given := getattr(config, "workerinput", {}).get(warm.SHARED)) is not None:
        os.environ[warm.SHARED] = given
    fewer.set_up(config)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell: so would be every Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)  # that tests send
    gc.disable()  # until all tests are collected: nearly nothing of what is made by then is garbage


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    _keep()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    ran = yield
    if nextitem is None or nextitem.path != item.path or len(sys.modules) > _known + MANY:
        _keep()
    return ran


def _keep() -> None:
    """Spare the collector what is there to stay: torch, 5000 tests, what torch imports late.

    Tests of what is let go of, and compiling, collect all garbage, each time through a million objects otherwise.
    """
    global _known
    gc.collect()
    gc.freeze()
    _known = len(sys.modules)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    thin(items)
    order = {FOLDER / name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="there is no GPU"))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)  # tests run several ranks at a time, on few cores


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:  # what a run finds out about ops says nothing about the next one
        folder = tmp_path_factory.getbasetemp()
        if "PYTEST_XDIST_WORKER" in os.environ:  # a process of several: what one finds out is there for all
            folder = folder.parent
        patch.setenv("ACTORFLOW_CACHE", str(folder / "found"))
        patch.setenv("ACTORFLOW_CACHE_PLANS", "0")  # but of plans, each test has its own
        patch.setenv("ACTORFLOW_CACHE_BODIES", "0")  # and of compiled bodies
        yield


@pytest.fixture(params=[SOME, pytest.param(EVERY, marks=pytest.mark.slow)])
def how(request: pytest.FixtureRequest) -> str:
    """Which trainings of a script are run: some cases, each under one layout, or every one under every layout."""
    told: str = request.param
    return told


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # without a note of the whole stack for each kind of device that might come later, which takes milliseconds
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _same_default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.fixture(autouse=True)
def _alone_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_current", cluster._current)  # `actorflow plan` pretends another one, for good
    monkeypatch.setattr(start, "_request", start.ScriptRequest())
    monkeypatch.setattr(start, "_settled", False)
    KEPT.forget()
