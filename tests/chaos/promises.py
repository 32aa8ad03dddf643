"""What the documentation promises of a scenario: how its run may end, who is named, and within which time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chaos.scenarios import HARMLESS, STEPS, Fault, Kind, Moment, Scenario

LOST_AFTER = 6.0  # seconds, of all runs
LATER = 5.0  # and until a launcher says itself that a rank is lost
JOIN = 20.0  # --join-timeout of runs
SOON = 20.0  # seconds for an end that nobody waits for; some 5 are needed, on a machine with nothing else to do
WHOLE = 40.0  # seconds more where each process imports torch itself, on such a machine
RUNS = 40.0  # seconds that a run takes at most, start included, where nothing ends it


@dataclass(frozen=True, slots=True)
class Promise:
    """How a run may end, after the faults that did come."""

    well: bool  # with status 0 and all losses
    badly: bool  # with an error
    statuses: tuple[frozenset[int], ...]  # of each node's launcher, where it ends badly
    named: tuple[str, ...]  # patterns, of which each launcher that is not killed prints one, where it ends badly
    within: float  # seconds from the last fault to the end of all launchers
    ended: Mapping[int, tuple[str, ...]]  # attempts that have failed for certain → patterns, one for each node
    exact: bool  # losses are equal bit by bit to those of a run that nothing happens to


def promise(scenario: Scenario, came: Sequence[Fault]) -> Promise:
    """What is promised of a run to which these of its faults did come."""
    fatal = [fault for fault in came if fault.kind not in HARMLESS]
    final = [fault for fault in fatal if _is_final(scenario, fault)]
    goes_on = not final and len(fatal) <= scenario.restarts
    certain = [fault for fault in fatal if _is_certain(scenario, fault)]
    waits = (LOST_AFTER + LATER) * any(f.kind in (Kind.STOP_RANK, Kind.PARTITION, Kind.RESET) for f in came)
    meets = scenario.nodes > 1 and (scenario.restarts or any(f.moment in (Moment.JOIN, Moment.RESTART) for f in fatal))
    waits += JOIN * bool(meets and fatal)
    attempts = scenario.restarts + 1 if final else 1  # a disk stays full
    return Promise(
        well=goes_on or not certain,
        badly=bool(fatal) and not goes_on,
        statuses=tuple(_statuses(scenario, fatal, node) for node in range(scenario.nodes)),
        named=tuple(name for fault in fatal for name in _names(scenario, fault)),
        within=SOON + waits + (RUNS + WHOLE * scenario.whole) * (goes_on or not certain or attempts > 1) * attempts,
        ended={
            attempt: tuple(name for fault in fatal if fault.attempt == attempt for name in _names(scenario, fault))
            for attempt in sorted({fault.attempt for fault in certain})
        },
        exact=not scenario.elastic,
    )


def _is_final(scenario: Scenario, fault: Fault) -> bool:
    """Whether a run with restarts ends by it all the same."""
    if fault.kind in (Kind.FULL_LOGS, Kind.FULL_CHECKPOINTS):
        return True
    if fault.kind is Kind.KILL_LAUNCHER:
        return not scenario.elastic or scenario.node_of(fault.rank) == 0
    return fault.kind is Kind.PARTITION and not scenario.elastic


def _is_certain(scenario: Scenario, fault: Fault) -> bool:
    """Whether the attempt cannot have ended before the fault could harm it."""
    if fault.moment is Moment.SHUTDOWN or fault.kind is Kind.RESET:  # nothing may be sent while links are reset
        return False
    if fault.kind is Kind.KILL_WORKER:  # which may have read all rows
        return fault.moment is Moment.STEP and fault.number < STEPS // 2
    if fault.moment is Moment.STEP:
        return fault.number < STEPS - 5
    return True


def _statuses(scenario: Scenario, fatal: Sequence[Fault], node: int) -> frozenset[int]:
    """With which a node's launcher may end where the run ends badly."""
    found = {1}
    for fault in fatal:
        own = scenario.node_of(fault.rank) == node
        if fault.kind is Kind.EXIT:
            found.add(3)
        if fault.kind is Kind.KILL_LAUNCHER and own:
            return frozenset({-9})
    if fatal and all(f.kind is Kind.EXIT and scenario.node_of(f.rank) == node for f in fatal):
        return frozenset({3})
    return frozenset(found)


def _names(scenario: Scenario, fault: Fault) -> list[str]:
    """Patterns for the culprit, as launchers may name it."""
    node = scenario.node_of(fault.rank)
    ranks = range(node * scenario.devices, (node + 1) * scenario.devices)
    if fault.kind in (Kind.PARTITION, Kind.RESET):
        return [rf"rank {rank} \(" for rank in range(scenario.ranks)] + [r"\d of \d nodes are ready", "node 0"]
    if fault.kind is Kind.KILL_LAUNCHER:
        return [*(rf"rank {rank} \(" for rank in ranks), rf"node {node}\b", r"\d of \d nodes are ready"]
    how = {
        Kind.KILL_RANK: r"(was killed|cannot be reached|ended|stopped answering)",
        Kind.OUT_OF_MEMORY: r"was killed",
        Kind.STOP_RANK: r"(stopped answering|cannot be reached|was killed)",
        Kind.RAISE: r"raised ValueError: this rank has had enough",
        Kind.EXIT: r"ended with exit status 3",
        Kind.KILL_WORKER: r"(raised|failed).*worker",
        Kind.FULL_LOGS: r"raised .*the disk with the logs of rank \d is full",
        Kind.FULL_CHECKPOINTS: r".*[Nn]o space left on device",
    }[fault.kind]
    if fault.kind is Kind.FULL_CHECKPOINTS:
        return [how]
    missing = []
    if fault.moment in (Moment.JOIN, Moment.RESTART):  # as other nodes see it
        missing = [rf"ranks? [\d-]* ?\(node {node}\) did not join", rf"the ranks of node {node} \(.*\) have failed"]
    return [rf"rank {fault.rank} \([^)]*\) {how}", *missing]


def is_named(patterns: Sequence[str], output: str) -> bool:
    """Whether a launcher's output names one of the culprits."""
    lines = [line for line in output.splitlines() if "has not answered" not in line]
    return any(re.search(pattern, line) for pattern in patterns for line in lines)
