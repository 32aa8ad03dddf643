"""End all ranks on purpose, so that nodes that wait are taken in when they start again (``--nnodes MIN:MAX``)."""

from __future__ import annotations

from actorflow.control.alone import Alone
from actorflow.control.cluster import Cluster
from actorflow.rendezvous.reports import Regroup, report_to_launcher
from actorflow.rendezvous.waiting_nodes import nodes_wait

__all__ = ["RunRegroups", "should_regroup", "regroup"]


class RunRegroups(SystemExit):
    """Ends the script on every rank, so that the run starts again with more nodes."""


def should_regroup(run: Cluster | Alone) -> bool:
    """Whether nodes wait to be taken in, as the master says; collective where the run may grow."""
    if run.settings.nnodes >= run.settings.most_nodes:
        return False
    said = None if run.rank else [b"1" if nodes_wait(run.settings.launcher) else b"0"] * run.world
    return run.scatter("do nodes wait", said) == b"1"


def regroup(run: Cluster | Alone) -> None:
    """End the script on every rank; its state must have been saved.  Raises RunRegroups."""
    report_to_launcher(run.settings.launcher, Regroup())
    raise RunRegroups(0)
