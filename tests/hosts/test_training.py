"""What is trained across hosts is what one host trains; the plan and the logs reach where they belong."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from hosts.clusters import Cluster

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(240)]

FEW = ("digits:data", "gpt:data × pipeline")
MORE = ("gpt:data", "digits:data × pipeline", "digits:pipeline", "gpt:pipeline", "digits:zero", "gpt:zero")
CASES = FEW if os.environ.get("ACTORFLOW_NODES") == "2" else FEW + MORE
WORLD = 4  # ranks of all hosts together
LIMIT = 240.0


@pytest.fixture(scope="module")
def alone(whole: Cluster) -> dict[str, Any]:
    """What one host trains, in eager PyTorch: model → losses."""
    program = whole.on(whole.hosts[0], "python", f"{whole.scripts}/train.py", "--eager")
    assert program.wait(LIMIT) == 0, program.output
    return dict(json.loads(program.output.splitlines()[-1]))


@pytest.fixture(scope="module")
def trained(whole: Cluster) -> list[dict[str, Any]]:
    """What each rank of a run of all hosts has seen, by the logs that the master has: case → losses, plans."""
    runs = whole.start("train.py", *CASES, devices=WORLD // len(whole.hosts))
    statuses = [one.wait(LIMIT) for one in runs]
    assert statuses == [0] * len(runs), "\n".join(one.output for one in runs)
    printed = [runs[0].output, *(whole.hosts[0].read(f"logs/rank{r}.stdout.log") for r in range(1, WORLD))]
    return [json.loads(text.splitlines()[-1]) for text in printed]


@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize("case", CASES)
def test_losses_across_hosts_are_those_of_one_host(
    case: str, trained: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    expected = alone[case.partition(":")[0]]["losses"]
    for rank, seen in enumerate(trained):
        assert seen[case]["losses"] == pytest.approx(expected, rel=1e-5), f"rank {rank}"
    assert expected[0] != pytest.approx(expected[-1], rel=1e-3)  # they are those of a training


@pytest.mark.parametrize("case", CASES)
def test_every_rank_has_the_plan_that_the_master_made_for_it(case: str, trained: list[dict[str, Any]]) -> None:
    made = trained[0][case]["plans"]
    assert len(set(made.values())) == len(trained)  # each its own
    for rank, seen in enumerate(trained[1:], 1):
        assert seen[case]["plans"] == {str(rank): made[str(rank)]}
