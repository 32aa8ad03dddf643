"""The run's token on its way from a launcher to its ranks, and out of every other environment.

A process hands its environment on to what it starts, and the system shows the one that a program began with.  So a
launcher and a rank take the token out of theirs as they read it, and a launcher hands it to its ranks by a pipe, or, to
forks, by the socket of their server.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from actorflow.rendezvous.options import TOKEN, TOKEN_FILE
from actorflow_compiler.core.errors import ClusterError

__all__ = ["check_token_text", "put_into_pipe", "take_token", "why_not_inherited", "without_token"]

LAUNCHER_PID = "ACTORFLOW_LAUNCHER_PID"  # a variable of ranks, and of what they start
PIPE = "ACTORFLOW_TOKEN_PIPE"  # the variable with the descriptor of a pipe that holds the token
LONGEST = 1024  # characters, so that gRPC and a pipe take it as it is


def take_token(environ: MutableMapping[str, str]) -> str:
    """The token in an environment, which does not have it any more; empty where there is none."""
    pipe, token = environ.pop(PIPE, ""), environ.pop(TOKEN.variable, "")
    if not pipe:
        return token.strip()
    with os.fdopen(int(pipe), "rb") as file:
        return file.read().decode()


def without_token(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy of an environment without it."""
    return {name: value for name, value in environ.items() if name not in (PIPE, TOKEN.variable)}


def put_into_pipe(environ: Mapping[str, str]) -> tuple[dict[str, str], int | None]:
    """An environment for a new process, and the descriptor that it has to inherit, if there is a token."""
    rest, token = without_token(environ), environ.get(TOKEN.variable, "")
    if not token:
        return rest, None
    source, into = os.pipe()
    with os.fdopen(into, "wb") as file:
        file.write(token.encode())
    return {**rest, PIPE: str(source)}, source


def why_not_inherited(environ: Mapping[str, str]) -> str:
    """In a process that a rank has started, a sentence on why it has not the token of that rank's run; else empty."""
    if LAUNCHER_PID not in environ:
        return ""
    return (
        " A rank of another run has started this process, and hands its own token to nothing that it starts: let the "
        f"script give it one, by {TOKEN_FILE.flag} or by {TOKEN.variable} in its environment."
    )


def check_token_text(token: str, whose: str) -> str:
    """The token; raises ClusterError where gRPC could not carry it."""
    if len(token) > LONGEST or not (token.isascii() and token.isprintable()):
        what = f"of {len(token)} characters" if len(token) > LONGEST else "with characters other than those of ASCII"
        raise ClusterError(
            f"{whose} has a token {what}; up to {LONGEST} characters of ASCII in one line were expected, such as "
            "`openssl rand -hex 16` prints"
        )
    return token
