"""``actorflow status``: print what the ranks of this machine's runs do, and who waits for whom."""

from __future__ import annotations

import click


@click.command(short_help="Say what the ranks of a running or stuck job wait for.")
@click.argument("pid", type=int, required=False)
def status(pid: int | None) -> None:
    """Say what the ranks of the runs of this machine are at, and who waits for whom; PID is one launcher's.

    Ranks of other machines are asked through one of this one.  SIGUSR1 has a launcher print the same
    to its terminal (kill -USR1 PID), and a rank what it is at itself.

    \b
      actorflow status
    """  # noqa: D301 -- click's own mark
    from actorflow.status.sockets import ask_ranks, find_runs
    from actorflow.status.text import to_text

    found = find_runs()
    if pid is not None:
        known = ", ".join(str(about.pid) for _, about in found) or "none"
        found = [(launcher, about) for launcher, about in found if about.pid == pid]
        if not found:
            raise click.ClickException(
                f"{pid} is no launcher of a run of this machine and user; there are: {known}. It is the process of "
                "`actorflow run`, started with the same TMPDIR."
            )
    if not found:
        raise click.ClickException("no run of this machine and user was found (of one started with the same TMPDIR).")
    click.echo("\n".join(to_text(about, ask_ranks(launcher, about)) for launcher, about in found), nl=False)
