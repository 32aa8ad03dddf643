"""``flow.plan``: the plan of a job, to show in a notebook or to write to a file."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from actorflow.control.alone import Alone
from actorflow.jobs.job import Job
from actorflow.rendezvous.settings import Settings, threads_of
from actorflow.runtime.measured_costs import Target
from actorflow.session.process import current
from actorflow.session.session import PlanReady, Session
from actorflow.show import formats
from actorflow_compiler.core.errors import CallError, ShowError
from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.plan.summary import device_type

__all__ = ["PlanView", "plan"]

HEIGHT = 900  # height of the page in a notebook, in pixels


@dataclass(frozen=True, slots=True)
class PlanView:
    """A plan for people: it can be printed, shown in a notebook, or written to a file.

    ``plan`` is the plan itself, ``hardware`` the devices of its forecast.  Each file format has a method of its name.
    """

    plan: Plan
    hardware: Hardware

    def write(self, path: str | Path) -> Path:
        """Write the plan to a file: .html, .svg, .dot, .json, .txt, or only the orders as .csv.

        Raises ShowError for another suffix, and if the file cannot be written.
        """
        return formats.write(self.plan, self.hardware, path)

    def html(self) -> str:
        """One HTML page with graphs, timeline, memory and communications."""
        return self._export(".html")

    def svg(self) -> str:
        """Timeline, logical graph and actors as one static picture."""
        return self._export(".svg")

    def dot(self) -> str:
        """The actors by rank and queue, for Graphviz."""
        return self._export(".dot")

    def json(self) -> str:
        """The whole plan; ``actorflow_compiler.plan.text.from_json`` reads it."""
        return self._export(".json")

    def text(self) -> str:
        """The plan and a short forecast, as text for people."""
        return self._export(".txt")

    def csv(self) -> str:
        """The orders in the format that torch's pipeline schedules load."""
        return self._export(".csv")

    def _export(self, suffix: str) -> str:
        return formats.FORMATS[suffix](self.plan, self.hardware)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        found = self.plan
        ranks = f"{found.world} rank{'s' if found.world > 1 else ''}"
        return f"<plan {found.name} for {ranks}, {len(found.actors)} actors; .write('plan.html') draws it>"

    def _repr_html_(self) -> str:
        """The page in an iframe, for a notebook."""
        return (
            f'<iframe srcdoc="{escape(self.html())}" style="width:100%;height:{HEIGHT}px;border:0" '
            f'title="plan of {escape(self.plan.name)}"></iframe>'
        )


def plan(job: Job, *args: Any, devices: int | None = None, hardware: str = "", **kwargs: Any) -> PlanView:
    """The plan of a job, for people.

    After a call of the job, ``flow.plan(train_step)`` is the plan of its last call; call it on the master, because only
    the master has the plan of all ranks.  With the arguments of a call the job is compiled for them and for ``devices``
    devices, which need not exist; nothing runs and nothing changes:

    >>> flow.plan(train_step, tokens, targets, devices=4).write("plan.html")

    ``hardware`` is a file that describes the devices (docs/hardware.md); without it they are assumed to be like those
    of this machine.  Raises CallError if ``job`` is no job, if ``devices`` is no number of devices, if the job has not
    been called yet and no arguments are given, and on a rank other than the master.
    """
    if not isinstance(job, Job):
        raise CallError(f"flow.plan was given {job!r}; expected: a job, a function with @flow.global_function")
    if devices is not None and (isinstance(devices, bool) or not isinstance(devices, int) or devices < 1):
        raise CallError(f"flow.plan was given devices={devices!r}; expected: how many devices, a whole number above 0")
    if devices is None and (args or kwargs):
        devices = current().context.world
    if devices is not None:
        made = _compiled_for(job, devices, hardware, args, kwargs)
    else:
        found = job.plan
        if found is None:
            raise CallError(
                f"job {job.name!r} has no plan yet: it is compiled when it is first called; call it before flow.plan, "
                f"or give arguments and devices: flow.plan({job.name}, …, devices=4)"
            )
        if found.ranks:
            raise CallError(
                f"flow.plan({job.name}) was called on rank {found.ranks[0]}, which has its own part of the plan alone; "
                f"call it where flow.env.get_rank() == 0"
            )
        made, devices = found, found.world
    target = Target(hardware, threads=threads_of(devices), ranks=devices)
    return PlanView(made, target.hardware(device_type(made)))


def _compiled_for(job: Job, devices: int, hardware: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """The plan of a call on a pretended cluster; it is compiled on a copy of the job, so the job does not change."""
    apart = copy(job)
    apart.body, apart.keys = job.body.copied(), None
    settings = Settings(world=devices, devices=devices, pretend=True, plan_job=job.name, hardware=hardware)
    try:
        Session(Alone(settings)).call(apart, args, kwargs)
    except PlanReady as ready:
        return ready.made.plan
    raise ShowError(f"job {job.name!r} was called inside a job, where it is a plain function and has no plan")
