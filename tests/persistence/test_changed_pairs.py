"""A script that was started before is captured again where anything differs that its step reads, and not otherwise.

``scripts/changed_pairs.py`` has pairs of scripts that differ by one thing.  The second of a pair must do, with what the
first has left in the cache, what it does without a cache: the same losses, the same output, the same errors.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import warm

SCRIPT = Path(__file__).parent.parent / "scripts" / "changed_pairs.py"
NAMES = re.findall(r"^@pair\ndef (\w+)", SCRIPT.read_text(), re.MULTILINE)
QUICK = (  # values, code, settings of torch, names, output
    "same_values", "a_global_number", "a_kernel_of_the_script", "the_dtype_of_autocast", "a_branch_on_a_buffer",
    "it_prints", "one_of_two_classes_of_one_name", "a_dtype",
)  # fmt: skip
KEPT = {"ACTORFLOW_CACHE_CAPTURES": "1"}
CAPTURED = frozenset((  # at each start, as it is not known what they read, or as they say something
    "an_item_of_sys_argv", "a_variable_of_the_environment", "a_branch_on_a_buffer", "it_prints", "it_warns",
    "torch_warns", "it_uses_an_op_of_the_script", "it_writes_through_a_function_it_was_given",
    "it_asks_for_an_identity", "threads_by_name", "a_function_that_reads_a_file_by_another_name",
    "a_method_that_reads_a_state_by_another_name", "an_array_in_torch", "a_namespace_in_torch",
    "a_value_deep_inside_torch", "an_object_among_the_builtins", "an_object_in_torch", "a_method_in_torch",
    "a_function_of_text_in_torch", "a_function_that_torch_wraps_in_torch",
    "a_hook_of_a_state_dictionary",  # which the step does not name
    "it_formats",  # by a __str__, to which no search follows a step
))  # fmt: skip


def run(name: str, knob: int, cache: str) -> tuple[str, str, int]:
    """What a script prints, what it says beside it, and how often its steps were captured."""
    env = {"KNOB": str(knob), "ACTORFLOW_CACHE": cache, "ACTORFLOW_CACHE_PLANS": str(int(cache != "0")), **KEPT}
    done = subprocess.run(
        [warm.python(), str(SCRIPT), name], capture_output=True, text=True, timeout=250, check=True,
        env={**os.environ, **env, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    captures = re.search(r"captures (\d+)\n", done.stderr)
    assert captures is not None
    said = re.sub(r"captures \d+\n|actorflow: .*\n|  .*\n", "", done.stderr)  # without what depends on time
    return done.stdout, said, int(captures[1])


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_the_second_of_a_pair_does_what_it_does_without_a_cache(name: str, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    first = run(name, 0, cache)
    again = run(name, 0, cache)
    assert again[:2] == first[:2]
    assert (again[2] == 0) == (name not in CAPTURED)
    assert run(name, 1, cache)[:2] == run(name, 1, "0")[:2]


@pytest.mark.slow
@pytest.mark.parametrize("seeds", ["12", "1123"])
def test_a_process_that_orders_strings_in_sets_otherwise_captures_its_step(seeds: str, tmp_path: Path) -> None:
    source = tmp_path / "train.py"
    source.write_text(
        "import torch, actorflow as flow\nfrom actorflow.session.plan_store import KEPT\n"
        "held, values = {'ab', 'cc', 'xyz'}, {'ab': 1.0, 'cc': 2.0, 'xyz': 4.0}\n"
        "first = flow.global_function(type='predict')(lambda x: x.sum() * values[next(iter({'ab', 'cc', 'xyz'}))])\n"
        "second = flow.global_function(type='predict')(lambda x: x.sum() * values[next(iter(held))])\n"
        "print(float(first(torch.ones(1))), float(second(torch.ones(1))), KEPT.skipped)\n"
    )
    found = []
    for seed in seeds:  # which order these three strings differently
        env = {"ACTORFLOW_CACHE": str(tmp_path / "cache"), "ACTORFLOW_CACHE_PLANS": "1", "PYTHONHASHSEED": seed, **KEPT}
        found.append(
            subprocess.run(
                [sys.executable, str(source)], capture_output=True, text=True, timeout=250, check=True,
                env={**os.environ, **env},
            ).stdout.split()
        )  # fmt: skip
    firsts = [one[:2] for one in found]
    losses = {"1": "4.0", "2": "2.0", "3": "1.0"}
    assert firsts == [[losses[seed]] * 2 for seed in seeds]
    assert [one[2] != "0" for one in found] == [seed in seeds[:at] for at, seed in enumerate(seeds)]


def test_two_scripts_that_only_differ_in_a_comment_are_two(tmp_path: Path) -> None:
    """Errors quote lines, and a plan names them."""
    source = tmp_path / "train.py"
    env = {"ACTORFLOW_CACHE": str(tmp_path / "cache"), "ACTORFLOW_CACHE_PLANS": "1", **KEPT}
    text = (
        "import torch, actorflow as flow\nfrom actorflow.session.plan_store import KEPT\n"
        "model = torch.nn.Linear(4, 4)\njob = flow.global_function(type='predict')(lambda x: model(x).sum())\n"
        "job(torch.ones(2, 4))\nprint(KEPT.skipped)\n"
    )
    found = []
    for comment in ("", "", "# another\n"):
        source.write_text(text + comment)
        found += subprocess.run(
            [warm.python(), str(source)],
            capture_output=True,
            text=True,
            timeout=250,
            check=True,
            env={**os.environ, **env},
        ).stdout.split()
    assert found == ["0", "1", "0"]
