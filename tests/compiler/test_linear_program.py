"""Linear programs are solved in a process of their own while a step is compiled, and scipy stays out of this one."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import psutil
import pytest

from actorflow_compiler.core import linear_program
from actorflow_compiler.core.linear_program import (
    LinearProgram,
    Solution,
    SparseMatrix,
    expect_programs,
    solve,
    solver_apart,
)

PROGRAM = """
import sys
import numpy as np
import psutil
from actorflow_compiler.core.linear_program import *
from test_linear_program import drawn

def children():
    return psutil.Process().children()
"""


def drawn(seed: int) -> LinearProgram:
    """A program with a solution: float64 of 30 variables, 40 constraints and 5 sums."""
    rng = np.random.default_rng(seed)
    point = rng.random(30)

    def matrix(rows: int) -> tuple[SparseMatrix, np.ndarray]:
        dense = rng.normal(size=(rows, 30)) * (rng.random((rows, 30)) < 0.3)
        at, columns = np.nonzero(dense)
        return SparseMatrix(dense[at, columns], at, columns, dense.shape), dense @ point

    at_most, most = matrix(40)
    equal, sums = matrix(5)
    return LinearProgram(rng.normal(size=30), at_most, most + rng.random(40), (0, 1), equal, sums)


def same(a: Solution | None, b: Solution | None) -> bool:
    """Whether two solutions are the same, bit by bit."""
    assert a is not None
    assert b is not None
    return (a.best, a.cost) == (b.best, b.cost) and all(
        bool((one == other).all()) for one, other in ((a.x, b.x), (a.marginals, b.marginals), (a.reduced, b.reduced))
    )


def in_python(lines: str) -> str:
    """What lines print in a Python of their own, which has not imported scipy."""
    folder = str(Path(__file__).parent)
    program = f"import sys; sys.path.append({folder!r}); sys.path.append({str(Path(folder).parent)!r})\n{PROGRAM}"
    command = [sys.executable, "-c", program + textwrap.dedent(lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_program_is_solved_apart_as_it_is_here_and_scipy_is_not_imported() -> None:
    printed = in_python("""
        with solver_apart():
            expect_programs()
            apart = [solve(drawn(seed)) for seed in range(5)]
            print('scipy' in sys.modules, len(children()))
        print(len(children()))
        here = [solve(drawn(seed)) for seed in range(5)]
        print('scipy.optimize' in sys.modules, len(children()))
        from test_linear_program import same
        print([same(a, b) for a, b in zip(apart, here)])
    """)
    assert printed == f"False 1\n0\nTrue 0\n{[True] * 5}\n"


@pytest.mark.slow
def test_whole_numbers_are_found_apart_as_they_are_here_within_limits() -> None:
    printed = in_python("""
        def program(sign=-1.0):  # a knapsack with several limits
            rng = np.random.default_rng(0)
            at, columns = np.divmod(np.arange(1800), 60)
            weights = SparseMatrix(rng.random(1800), at, columns, (30, 60))
            return LinearProgram(sign * rng.random(60), weights, np.full(30, 8.3), (0, 3))

        def found(nodes, seconds, all_whole=True):
            return solve_integer(program(), np.full(60, all_whole), IntegerLimits(0.01, nodes, seconds))

        def text(s):
            return s.ended, None if s.x is None else s.x.tolist(), s.bound

        with solver_apart():
            apart = [found(1, 100), found(20, 100), found(20, 100, False), found(1000, 0.001)]
            print('scipy' in sys.modules)
        here = [found(1, 100), found(20, 100), found(20, 100, False), found(1000, 0.001)]
        print([str(a.ended) for a in apart], [text(a) == text(b) for a, b in zip(apart, here)])
        one, relaxed = apart[1], apart[2]
        print(abs(one.x - one.x.round()).max() < 1e-6, abs(relaxed.x - relaxed.x.round()).max() < 1e-6)
        print(relaxed.bound <= one.bound <= program().cost @ one.x, apart[3].x)
        impossible = SparseMatrix(np.array([1.0, -1.0]), np.arange(2), np.zeros(2, int), (2, 1))
        between = LinearProgram(np.ones(1), impossible, np.array([0.6, -0.4]), (0, 1))
        print(solve_integer(between, np.ones(1, bool), IntegerLimits(0.01, 10, 100)).ended)
    """)
    assert printed == (
        "False\n['nodes', 'nodes', 'best', 'seconds'] [True, True, True, True]\nTrue False\nTrue None\nnone\n"
    )


def test_no_process_is_started_where_none_is_needed() -> None:
    printed = in_python("""
        with solver_apart():
            print(len(children()))
        expect_programs()
        print(len(children()))
        import scipy.optimize
        with solver_apart():
            expect_programs()
            solve(drawn(0))
            print(len(children()))
    """)
    assert printed == "0\n0\n0\n"


@pytest.mark.slow
def test_modules_of_the_script_with_names_of_pythons_own_are_not_run_again(tmp_path: Path) -> None:
    for name in ("fractions", "heapq", "json", "platform", "random", "secrets", "statistics", "tempfile", "uuid"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')")
    printed = in_python(f"""
        program = drawn(0)
        sys.path.insert(0, {str(tmp_path)!r})
        with solver_apart():
            print(solve(program).best, 'scipy' in sys.modules)
    """)
    assert printed == "True False\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_blocks_within_one_another_share_a_process_which_ends_with_the_outermost() -> None:
    printed = in_python("""
        with solver_apart():
            with solver_apart():
                solve(drawn(0))
                first = children()
            solve(drawn(1))
            print(first == children(), len(first))
        print(len(children()))
    """)
    assert printed == "True 1\n0\n"


def test_a_program_without_a_solution_has_none_and_the_next_one_is_solved() -> None:
    printed = in_python("""
        one = np.ones(1), np.zeros(1, int), np.zeros(1, int), (1, 1)
        with solver_apart():
            print(solve(LinearProgram(np.ones(1), SparseMatrix(*one), -np.ones(1), (0, None))))
            print(solve(drawn(0)).best, 'scipy' in sys.modules)
    """)
    assert printed == "None\nTrue False\n"


def test_a_process_that_is_lost_is_done_without() -> None:
    printed = in_python("""
        with solver_apart():
            first = solve(drawn(0))
            [process] = children()
            process.kill()
            process.wait()
            second = solve(drawn(0))
            from test_linear_program import same
            print(same(first, second), len(children()), 'scipy.optimize' in sys.modules)
    """)
    assert printed == "True 0 True\n"


def test_a_process_that_cannot_be_started_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_program, "SOLVER", "never imported")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with solver_apart():
        expect_programs()
        found = solve(drawn(3))
    assert same(found, solve(drawn(3)))


def test_a_program_that_is_none_raises_the_error_that_it_raises_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_program, "SOLVER", "never imported")
    with solver_apart(), pytest.raises(ValueError, match="b_ub"):
        solve(LinearProgram(np.ones(1), SparseMatrix(*[np.zeros(0, int)] * 3, (0, 1)), np.ones(3), (0, None)))


def test_the_process_ends_with_one_that_is_killed() -> None:
    program = (
        "import sys, time; from actorflow_compiler.core.linear_program import *\n"
        "with solver_apart():\n    expect_programs(); print(flush=True); time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        [solver] = psutil.Process(process.pid).children()
        process.kill()
    solver.wait(200)
    assert not solver.is_running()


@pytest.mark.slow
def test_a_rank_that_has_compiled_a_pipeline_has_not_imported_scipy(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
            import os, sys
            import psutil, torch
            import actorflow as flow

            model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
            flow.place(model, {"0|1": flow.placement("cpu", [0]), "2": flow.placement("cpu", [1])})
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            @flow.global_function(type="train", micro_batches=4)
            def step(x):
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss

            first = step(torch.ones(8, 8))
            second = step(torch.ones(8, 8))
            solvers = [p for p in psutil.Process().children() if "linear_program" in " ".join(p.cmdline())]
            if os.environ["RANK"] == "0":
                slots = max(r.slots for r in step.plan.registers)
                print(float(second) < float(first), slots > 1, "scipy" in sys.modules, solvers)
        """)
    )
    command = [sys.executable, "-m", "actorflow", "run", str(script), "--devices", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True True False []\n"
