"""``actorflow run --on ray``: start the run on a Ray cluster, as it was typed, and return its exit status."""

from __future__ import annotations

import os
from collections.abc import Mapping

import click
from click.core import ParameterSource

from actorflow.commands.launcher_settings import LaunchFlags
from actorflow.rendezvous.engines import RAY
from actorflow.rendezvous.options import RUN_OPTIONS
from actorflow_compiler.core.errors import ClusterError

__all__ = ["on_ray", "starts_on_ray"]


def starts_on_ray(on: str, environ: Mapping[str, str]) -> bool:
    """Whether this process is to start a run on Ray, and is not one that such a run has started."""
    return on == RAY.option and not any(environ.get(mark) for mark in RAY.marks)


def on_ray(context: click.Context, flags: LaunchFlags) -> int:
    """Start the run and see it to its end; raises UsageError where it cannot be started."""
    from actorflow.launch.ray_run import RayRun, run_on_ray

    parameters = context.params
    try:
        _check(context, flags)
        return run_on_ray(
            RayRun(
                script=os.path.abspath(parameters["script"]),
                argv=tuple(parameters["arguments"]),
                options=tuple(_passed_on(context)),
                devices=flags.devices,
                nnodes=None if flags.nnodes is None else flags.nnodes.most,
                gpus=flags.gpus,
                token=flags.token,
                timeout=flags.join_timeout,
            )
        )
    except ClusterError as e:
        raise click.UsageError(str(e)) from e


def _check(context: click.Context, flags: LaunchFlags) -> None:
    for flag, value in (("--node-rank", flags.node_rank), ("--master-addr", flags.master_addr)):
        if value is not None:
            raise ClusterError(
                f"{flag} {value} contradicts --on ray, which starts the ranks on all nodes of the Ray cluster by "
                "itself; drop one of them"
            )
    if context.params["module"]:
        raise ClusterError("-m is not there with --on ray, whose nodes run a file by its path; name the file instead")
    if flags.restarts:
        raise ClusterError(
            "--max-restarts and --nnodes MIN:MAX are not there with --on ray; start `actorflow run` on each node, or "
            "have Ray start the run again (a job's max_retries)"
        )
    if flags.insecure:
        raise ClusterError("--insecure contradicts --on ray, which gives the ranks a secret by itself; drop it")


def _passed_on(context: click.Context) -> list[str]:
    """The options that each rank's launcher gets, as they were typed."""
    return [
        word
        for option in RUN_OPTIONS
        if not option.by_driver and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
        for word in option.words(context.params[option.name])
    ]
