"""Find this process's place in a run that torch's launcher (``torchrun``, or ours like it) has started.

Its environment variables have this process's rank and the address of the ranks' ``torch.distributed`` store.  Jobs
need a control server as well: the master takes a free port, and publishes it in that store.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from actorflow.rendezvous.engines import MASTER_VARIABLE, TORCHRUN, half_set
from actorflow.rendezvous.network import hold_port
from actorflow.rendezvous.options import LOCAL, TLS_CA, TLS_CERT, TLS_KEY, TOKEN, TRACE, read_user_variables
from actorflow.rendezvous.secret import check_token_text, take_token
from actorflow.rendezvous.settings import Settings
from actorflow.rendezvous.tls import tls_files
from actorflow.support.terminal import say
from actorflow_compiler.core.errors import ClusterError

__all__ = ["agree_on_port", "torch_run_settings", "hold_free_port", "torch_settings"]

_E = TORCHRUN
NEEDED = (_E.rank, _E.world, _E.master, _E.port)  # torch's own init_method="env://" needs these
_NUMBERS = (_E.rank, _E.world, _E.port, _E.task, _E.tasks, _E.node, _E.nnodes)

_kept: list[
    Any
] = []  # kept alive with the process: the socket that holds the master's port, and the store if served here


def torch_settings(environ: Mapping[str, str] | None = None) -> Settings | None:
    """This process's settings from the variables of torch's launcher; None if no such launcher started it.

    A launcher that sets only the four variables of ``env://`` is assumed to start all ranks on one machine.
    Raises ClusterError if a variable is malformed, or one of the four is missing.
    """
    env = os.environ if environ is None else environ
    missing = [name for name in NEEDED if not env.get(name)]
    if missing:
        if any(env.get(mark) for mark in _E.marks):
            raise half_set(_E, env, NEEDED)
        return None
    try:
        given = {name: int(env[name]) for name in _NUMBERS if env.get(name)}
    except ValueError as e:
        found = {name: env[name] for name in _NUMBERS if name in env}
        raise ClusterError(
            f"the variables that torch's launcher sets are malformed ({e}); found {found}. Start the script with "
            "`actorflow run`, `python -m actorflow.distributed.launch` or `torchrun`, or unset RANK to run it alone."
        ) from e
    rank, world = given[_E.rank], given[_E.world]
    devices = given.get(_E.tasks, world)
    if not 0 <= rank < world or devices < 1:
        raise ClusterError(f"RANK={rank}, WORLD_SIZE={world}, LOCAL_WORLD_SIZE={devices} name no rank of a run")
    return Settings(
        rank=rank,
        local_rank=given.get(_E.task, rank),
        world=world,
        node=given.get(_E.node, rank // devices),
        nnodes=given.get(_E.nnodes, -(-world // devices)),
        devices=devices,
        master_host=env[_E.master],
        **read_user_variables(env),
    )


def torch_run_settings() -> Settings | None:
    """Settings with which this process of torch's launcher can join its run; collective.  None: it has no peers.

    Raises ClusterError where nodes have different numbers of ranks, or the store cannot be reached.
    """
    if MASTER_VARIABLE in os.environ or multiprocessing.parent_process() is not None:
        return None  # a child of a rank, such as a data loader's worker, is no rank itself
    settings = torch_settings()
    if settings is None or settings.world == 1:
        return None
    s = settings
    if s.nnodes * s.devices != s.world or s.rank != s.node * s.devices + s.local_rank:
        raise ClusterError(
            f"rank {s.rank} of {s.world} is local rank {s.local_rank} of {s.devices} on node {s.node} of {s.nnodes}: "
            "jobs need the same number of ranks on every node, numbered node by node; start the script with "
            "`actorflow run`"
        )
    s = replace(s, master_host="127.0.0.1" if s.one_node else s.master_host)
    tls = [option.read(os.environ) or "" for option in (TLS_CA, TLS_CERT, TLS_KEY)]
    if (files := tls_files(*tls)) is not None and not s.one_node:
        files.check(lambda text: say(text) if s.local_rank == 0 else None)
    port, token = agree_on_port(s, token=check_token_text(take_token(os.environ), TOKEN.variable))
    return replace(
        s,
        master_port=port,
        reserved_port=True,
        token=token,
        local=os.environ.get(LOCAL.variable) != "0",
        trace=TRACE.read(os.environ) or "",
        tls_ca=tls[0],
        tls_cert=tls[1],
        tls_key=tls[2],
        script=getattr(sys.modules.get("__main__"), "__file__", None) or "",
        argv=tuple(sys.argv[1:]),
    )


def agree_on_port(settings: Settings, port: int = 0, token: str = "") -> tuple[int, str]:
    """The master's port and the run's secret, through the store of torch's launcher; collective.

    Rank 0 chooses both: the given port, or a free one that this process then holds for its server; and the secret,
    which is the given one, or a new one.  Raises ClusterError where the store cannot be reached.
    """
    s = settings
    store = _store(s)
    if s.rank == 0:
        store.set("master", f"{port or hold_free_port(s.bind_host())} {token or secrets.token_hex(16)}")
    try:
        port_text, token = store.get("master").decode().split(" ", 1)
    except RuntimeError as error:
        raise ClusterError(f"rank {s.rank} heard nothing of rank 0 for {s.join_timeout:g} s: {error}") from error
    return int(port_text), token


def _store(settings: Settings) -> Any:
    """The store of torch's launcher, or one that rank 0 opens if there is none; with a prefix for each restart."""
    from datetime import timedelta

    from torch import distributed

    host, port = os.environ[_E.master], int(os.environ[_E.port])
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    make: Any = distributed
    try:
        store = make.TCPStore(
            host,
            port,
            None,
            settings.rank == 0 and not kept,
            timedelta(seconds=settings.join_timeout),
            wait_for_workers=False,
            multi_tenant=True,  # torch's init_process_group opens it too
        )
    except RuntimeError as error:
        raise ClusterError(
            f"rank {settings.rank} could not reach the ranks' store at {host}:{port} (MASTER_ADDR, MASTER_PORT): "
            f"{error}"
        ) from error
    _kept.append(store)
    return make.PrefixStore(f"actorflow/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def hold_free_port(host: str) -> int:
    """A free port of this machine, reserved for the life of this process by a bound socket that never listens."""
    holder = hold_port(host)
    _kept.append(holder)
    return int(holder.getsockname()[1])
