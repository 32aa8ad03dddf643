"""Send the output of each local rank to the terminal, or to two files in a folder of its own."""

from __future__ import annotations

from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

__all__ = ["STDERR", "STDOUT", "ElasticLogs", "log_folder"]

STDOUT, STDERR = "stdout", "stderr"  # files of a process in its folder


class ElasticLogs(LogsSpecs):
    """Files for tracebacks in ``errors``, and with ``folder`` ``FOLDER/local_rank_K/stdout`` and ``stderr``."""

    def __init__(self, errors: str, folder: str) -> None:
        super().__init__(errors)
        self._errors = Path(errors)
        self._folder = folder

    @property
    def root_log_dir(self) -> str:
        """The folder of the tracebacks."""
        return str(self._errors)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The files of each local rank; an empty name is the terminal."""
        errors = {local: str(self._errors / f"{local}.json") for local in envs}
        for local, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = errors[local]
        return LogsDest(stdouts=self._files(envs, STDOUT), stderrs=self._files(envs, STDERR), error_files=errors)

    def _files(self, ranks: dict[int, dict[str, str]], name: str) -> dict[int, str]:
        if not self._folder:
            return dict.fromkeys(ranks, "")
        for local in ranks:
            log_folder(self._folder, local).mkdir(parents=True, exist_ok=True)
        return {local: str(log_folder(self._folder, local) / name) for local in ranks}


def log_folder(folder: str, local: int) -> Path:
    """The folder of a local rank's output."""
    return Path(folder, f"local_rank_{local}")
