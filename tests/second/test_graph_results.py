"""What graphs and jobs over global tensors give are global tensors, with one device's numbers however they are used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import warm
from second.launching import command, run

SCRIPT = Path(__file__).with_name("scripts") / "graph_results.py"
ROWS = ("data", "micro_batches", "mesh", "plain_modules", "a_job")  # where a batch was given by rows


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each case came to, on each rank of one run."""
    folder, world = tmp_path_factory.mktemp("results"), request.param
    done = run(command("run", str(SCRIPT), "--", str(folder), processes=world, python=warm.python()), folder)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    failed = [text for told in found for text in told.values() if isinstance(text, str)]
    assert not failed, failed[0]
    return found


def _used(told: dict[str, Any]) -> list[dict[str, Any]]:
    return [case for case in told.values() if "losses" in case] + [told["data"]["again"]]


def test_values_are_those_of_one_device_however_they_are_derived_and_read(ranks: list[dict[str, Any]]) -> None:
    for told in ranks:
        for found in _used(told):
            assert found["losses"] == pytest.approx([found["expected"]] * len(found["losses"]), abs=1e-5)
            assert found["shapes"] == [[4], [2, 4], [4 // len(ranks)]]
        for name, case in told.items():
            assert max(case["far"].values()) < 1e-5, name
        assert told["changed"]["shared"] == 0.0
        assert told["a_job"]["falls"]
    assert len(ranks[0]["data"]["losses"]) == 5
    assert len(ranks[1]["data"]["losses"]) == 2


def test_rows_lie_as_those_of_the_batch_and_all_else_is_whole_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    world = len(ranks)
    everywhere = [list(range(world)), "B"]
    for told in ranks:
        assert all(found["loss lies"] == everywhere for found in _used(told))
        for name in ROWS:
            lies = "S(0),B" if name == "mesh" else "S(0)"
            assert told[name]["lies"] == [everywhere[0], lies], name
            assert told[name]["part"] == [4 if name == "mesh" else 8 // world, 4], name
        for found in (told["tensor"], told["pipeline"], told["plain_batch"], told["data"]["again"]):
            assert (found["lies"], found["part"]) == (everywhere, [8, 4])
        assert told["all_plain"]["global"] == [False, False]


def test_ranks_that_count_in_their_own_rows_count_each_row_once(ranks: list[dict[str, Any]]) -> None:
    for told in ranks:
        for name in ("data", "micro_batches"):
            ours, correct = told[name]["counted"]
            assert ours == correct > 0
