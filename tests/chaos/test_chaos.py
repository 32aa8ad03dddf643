"""Runs to which things happen end as promised: a dozen kinds, once each; `make chaos` draws as many as one likes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chaos.campaign import Campaign
from chaos.grounds import temporary_ground
from chaos.promises import is_named, promise
from chaos.scenarios import HARMLESS, RESTARTS, Fault, Kind, Moment, Scenario, draw

SHORT = (  # of which no other test has it in a run that has to go on, or each needs a tool of its own
    Kind.KILL_RANK, Kind.KILL_LAUNCHER, Kind.STOP_RANK, Kind.PAUSE_ALL, Kind.PARTITION, Kind.BLINK, Kind.RESET,
    Kind.FULL_CHECKPOINTS, Kind.FULL_SHM, Kind.OUT_OF_MEMORY, Kind.CLOCK_JUMP, Kind.KILL_WORKER,
)  # fmt: skip


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    with temporary_ground() as made:
        yield Campaign(made, tmp_path_factory.mktemp("chaos"))


def test_a_scenario_is_all_in_its_seed() -> None:
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert len({draw(seed).text for seed in range(50)}) == 50


def test_every_kind_of_fault_and_every_moment_is_drawn() -> None:
    drawn = [draw(seed) for seed in range(1500)]
    assert {fault.kind for scenario in drawn for fault in scenario.faults} == set(Kind)
    assert {fault.moment for scenario in drawn for fault in scenario.faults} == set(Moment)
    assert {len(scenario.faults) for scenario in drawn} == {1, 2, 3}


def one(kind: Kind, restarts: int = 0, nodes: int = 1, elastic: bool = False, **more: object) -> Scenario:
    fault = Fault(kind, 1, Moment.STEP, 7, 0, 0.0, 1.0)
    return Scenario(0, nodes, 2 // nodes, "data", bool(restarts), restarts, elastic, False, (fault,), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scenario", "well", "badly", "statuses"),
    [
        (one(Kind.KILL_RANK), False, True, [{1}]),
        (one(Kind.EXIT), False, True, [{3}]),
        (one(Kind.EXIT, nodes=2), False, True, [{1, 3}, {3}]),
        (one(Kind.KILL_LAUNCHER), False, True, [{-9}]),
        (one(Kind.KILL_RANK, RESTARTS), True, False, None),
        (one(Kind.KILL_LAUNCHER, RESTARTS), False, True, [{-9}]),
        (one(Kind.KILL_LAUNCHER, RESTARTS, 2, elastic=True), True, False, None),
        (one(Kind.PARTITION, RESTARTS, 2), False, True, [{1}, {1}]),
        (one(Kind.FULL_LOGS, RESTARTS), False, True, [{1}]),
        *((one(kind), True, False, None) for kind in sorted(HARMLESS)),
    ],
    ids=lambda found: found.shape + " " + found.faults[0].kind if isinstance(found, Scenario) else "",
)
def test_what_is_promised(scenario: Scenario, well: bool, badly: bool, statuses: list[set[int]] | None) -> None:
    found = promise(scenario, scenario.faults)
    assert (found.well, found.badly) == (well, badly)
    assert statuses is None or [*found.statuses] == statuses
    assert found.exact is not scenario.elastic


def test_each_attempt_that_a_fault_has_ended_has_a_culprit() -> None:
    first = one(Kind.KILL_RANK, RESTARTS)
    second = Fault(Kind.EXIT, 0, Moment.RESTART, 0, 1, 0.0, 1.0)
    perhaps = Fault(Kind.RAISE, 0, Moment.SHUTDOWN, 0, 2, 0.0, 1.0)
    found = promise(first, (*first.faults, second, perhaps)).ended
    assert sorted(found) == [0, 1]
    assert is_named(found[0], "actorflow: rank 1 (vm, pid 7) was killed by SIGKILL; noticed by its launcher")
    assert is_named(found[1], "actorflow: rank 0 (vm, pid 8) ended with exit status 3")
    assert not is_named(found[1], "actorflow: rank 1 (vm, pid 7) was killed by SIGKILL; noticed by its launcher")


def test_a_fault_that_did_not_come_ends_nothing() -> None:
    found = promise(one(Kind.KILL_RANK), ())
    assert (found.well, found.badly, found.named) == (True, False, ())


def test_a_culprit_is_named_by_its_rank_and_what_it_did() -> None:
    named = promise(one(Kind.KILL_RANK), one(Kind.KILL_RANK).faults).named
    assert is_named(named, "actorflow: rank 1 (vm, pid 7) was killed by SIGKILL; noticed by rank 0")
    assert not is_named(named, "actorflow: rank 0 (vm, pid 7) was killed by SIGKILL; noticed by rank 1")
    assert not is_named(named, "actorflow: rank 1 (vm, pid 7) has not answered for 5 s; it is lost after 6 s")
    assert not is_named(named, "actorflow: rank 1 (vm, pid 7) raised ValueError")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", SHORT)
def test_a_run_to_which_something_happens_ends_as_promised(campaign: Campaign, kind: Kind) -> None:
    found = campaign.trial(draw([*Kind].index(kind), [kind]))
    if found.missing:
        pytest.skip(f"this machine has no {found.missing.replace('_', ' ')}")
    assert found.wrong == [], f"{found.scenario.text}\n{found.output}"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", [Kind.KILL_RANK, Kind.STOP_RANK])
@pytest.mark.parametrize("moment", [Moment.JOIN, Moment.RESTART])
def test_a_fault_that_falls_into_a_restart_is_followed_by_another_one(
    campaign: Campaign, kind: Kind, moment: Moment
) -> None:
    first = Fault(Kind.EXIT, 0, Moment.STEP, 17, 0, 0.0, 1.0)
    again = Fault(kind, 1, moment, 0, 1, 0.0, 1.0)
    found = campaign.trial(Scenario(0, 1, 2, "zero1", True, RESTARTS, False, False, (first, again)))
    assert found.wrong == [], found.output
    assert found.came == [first, again]
    assert found.statuses == [0]
