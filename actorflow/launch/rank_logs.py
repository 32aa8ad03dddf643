"""Make torch's agent send the output of rank 0 to the terminal, and that of other ranks to files."""

from __future__ import annotations

from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs


class RankLogs(LogsSpecs):
    """``LOG_DIR/rankK.stdout.log``, ``.stderr.log`` and ``.error.json`` by global rank; rank 0 keeps the terminal."""

    def __init__(self, log_dir: str, first_rank: int) -> None:
        super().__init__(log_dir)
        self._folder = Path(log_dir)
        self._first = first_rank

    @property
    def root_log_dir(self) -> str:
        """The folder."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The files of each local rank; an empty name is the terminal."""

        def path(local: int, what: str) -> str:
            return str(self._folder / f"rank{self._first + local}.{what}")

        shown = {local for local in envs if self._first + local == 0}
        for local, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = path(local, "error.json")
        return LogsDest(
            stdouts={local: "" if local in shown else path(local, "stdout.log") for local in envs},
            stderrs={local: "" if local in shown else path(local, "stderr.log") for local in envs},
            error_files={local: path(local, "error.json") for local in envs},
        )
