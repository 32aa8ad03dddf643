"""Explain why a connection between nodes failed, as far as this machine can tell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from actorflow.control.join import FIRST_NOTICE, NOTICE
from actorflow.doctor.checks import why_alone, why_unreached
from actorflow.doctor.machine_facts import MachineFacts
from actorflow.rendezvous.reports import Notice, report_to_launcher
from actorflow.rendezvous.roster import Ticket
from actorflow.rendezvous.settings import Settings

__all__ = ["why_no_link", "master_hints", "why_no_master", "report_waiting"]


def _here(settings: Settings, others: tuple[str, ...] = ()) -> MachineFacts:
    node = 0 if settings.node == 0 else None  # of other nodes only the master's address is known
    return MachineFacts((settings.master_host, *others), node, settings.master_port)


async def why_no_master(settings: Settings) -> str:
    """Find out why this rank does not reach the master; takes some seconds."""
    s = settings
    return await asyncio.to_thread(why_unreached, _here(s), s.master_host, s.master_port, "the master")


async def report_waiting(settings: Settings) -> None:
    """While the master does not answer, print the reason on this node's terminal repeatedly, until cancelled."""
    wait = FIRST_NOTICE
    while True:
        await asyncio.sleep(wait)
        why = await why_no_master(settings)
        report_to_launcher(
            settings.launcher, Notice(f"rank {settings.rank} (node {settings.node}) waits for the master. {why}")
        )
        wait = NOTICE


async def why_no_link(settings: Settings, own: Ticket, other: Ticket, timeout: float) -> str:
    """Find out why this rank and another, which have both reached the master, cannot connect."""
    host, _, port = other.address.rpartition(":")
    host = host.strip("[]")
    why = await asyncio.to_thread(why_unreached, _here(settings, (host,)), host, int(port), other.place)
    return (
        f"rank {own.rank} ({own.address}) and {other.place} ({other.address}) could not connect within {timeout:g} s, "
        f"though both reached the master; all ports between the nodes have to be open. {why}"
    )


def master_hints(settings: Settings) -> Callable[[], str]:
    """A function that says why other ranks may not reach the master's machine; called when ranks are missing."""
    why = partial(why_alone, _here(settings))
    if settings.tls is None:
        return why
    # gRPC refuses those without a certificate of the CA before it knows of a call
    return lambda: f"This run uses TLS: who has no certificate of its CA is refused, and is not named here. {why()}"
