"""``flow.save_plan`` and ``flow.load_plan``: the plan of a job in a file, for a later run of the same script."""

from __future__ import annotations

import os
from pathlib import Path

from actorflow.control import cluster as clusters
from actorflow.jobs.job import Job
from actorflow.session.plan_store import KEPT, file_of
from actorflow.support.whole_files import write_whole
from actorflow_compiler.core.errors import CallError, PlanError

__all__ = ["load_plan", "save_plan"]


def save_plan(job: Job, path: str | os.PathLike[str]) -> None:
    """Write the plan of a job's last call to a file, for ``flow.load_plan``.

    Rank 0 writes, whole or not at all; other ranks may make the call, and do nothing.  The file has the plan as
    protobuf (no pickle), a checksum, and digests of all that the plan was made from.  Plans are kept in the user's
    cache anyway; a file of one's own can be put beside a script, and says what differs where it does not fit.

    Raises CallError if ``job`` is no job or was not called yet, and PlanError if its plan depends on something of which
    there is no way to tell whether it is equal in another process, or if the file cannot be written.

    >>> flow.save_plan(train_step, "train_step.actorflow")
    """
    if not isinstance(job, Job):
        raise CallError(f"flow.save_plan was given {job!r}; expected: a job, a function with @flow.global_function")
    if job.last is None:
        raise CallError(f"job {job.name!r} has no plan yet: it is compiled when it is first called; call it before")
    if clusters.current().rank != 0:
        return
    made, file = job.last.made, Path(path)
    if made is None or made.key is None:
        why = KEPT.why.get(job.name, "something unknown")
        raise PlanError(
            f"the plan of {job.name} cannot be saved: it depends on {why}, which cannot be compared between processes"
        )
    try:
        write_whole(file, file_of(made.key, made.plan))
    except OSError as error:
        raise PlanError(f"the plan of {job.name} cannot be written to {file}: {error.strerror or error}") from None


def load_plan(path: str | os.PathLike[str]) -> None:
    """Have the job whose plan ``flow.save_plan`` has written to this file use that plan, from its first call on.

    Make the call on every rank, before the job is called; rank 0 reads the file.  The step is captured at the first
    call, and the plan is used if it was made from the same: the step, its arguments, hints and options, the devices,
    and the versions of torch, Python and actorflow.  Costs of devices may have been measured anew.  It is checked like
    a plan that has just been made.  A job whose first call needs another plan raises PlanError, which says what
    differs; what later calls need beside it, such as a shorter last batch, is compiled.  Several files may be loaded
    for one job.

    Raises PlanError if the file cannot be read, is damaged, or is of another version.

    >>> flow.load_plan("train_step.actorflow")
    >>> loss = train_step(tokens, targets)
    """
    if clusters.current().rank == 0:
        KEPT.load(Path(path))
