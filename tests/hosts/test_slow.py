"""A network that is slow and loses packets: the same losses, in the time that the forecast says."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from hosts.clusters import Cluster
from hosts.machines import Running
from hosts.slow import slow

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300), pytest.mark.slow]

LATENCY, LOST = 0.1, 0.001  # seconds each way, fraction of packets
STEPS = "40"
ROUND_TRIP = 2 * LATENCY  # a step: the first piece goes there, its gradient comes back, the others follow close
HARDWARE = f"""
name = "two hosts far from each other"
[device]
type = "cpu"
flops = 2e10
[network]
latency = {LATENCY}
bandwidth = 1e8
"""


def _last(program: Running) -> dict[str, Any]:
    return dict(json.loads(program.output.splitlines()[-1]))


@pytest.mark.parametrize("pieces", [1, 4, 8])
def test_with_latency_and_loss_a_pipeline_takes_what_the_forecast_says(cluster: Cluster, pieces: int) -> None:
    first, second = cluster.hosts[:2]
    arguments = (STEPS, str(pieces))
    script = f"{cluster.scripts}/pipeline.py"
    first.write("far.toml", HARDWARE)
    plan = cluster.on(first, "actorflow", "plan", script, "--devices", "2", "--hardware", "far.toml", "--forecast",
                      "--", *arguments)  # fmt: skip
    near = cluster.on(first, "actorflow", "run", script, "--devices", "2", "--log-dir", "near", "--", *arguments)
    Cluster.ended([plan, near], 0)
    found = re.search(r"period +([\d.]+) ms", plan.output)
    assert found is not None, plan.output
    expected = float(found[1]) / 1000
    assert expected == pytest.approx(ROUND_TRIP, rel=0.1)  # it is the network that is forecast
    with slow((first, second), LATENCY, LOST) as (master, _):
        far = [cluster.node(n, "pipeline.py", *arguments, nodes=2, devices=1, master=master) for n in range(2)]
        Cluster.ended(far, 0)
    seen = _last(far[0])
    assert seen["losses"] == pytest.approx(_last(near)["losses"], rel=1e-6)
    assert seen["period"] == pytest.approx(expected, rel=0.25)
