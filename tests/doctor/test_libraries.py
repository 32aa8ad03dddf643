"""The communication library of a machine is known without importing torch."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from actorflow.rendezvous import ticket


def test_it_is_that_of_this_torch() -> None:
    assert f"of torch {torch.__version__}" in ticket.communication()
    assert ticket.communication().startswith("NCCL" if torch.version.cuda else "Gloo")


@pytest.mark.parametrize(
    ("cuda", "packages", "expected"),
    [
        ("None", {}, "Gloo of torch 2.13.0+x"),
        ("'12.8'", {"nvidia-nccl-cu12": "2.27.3"}, "NCCL 2.27.3 and CUDA 12.8 of torch 2.13.0+x"),
        ("'12.8'", {}, "NCCL of CUDA 12.8 of torch 2.13.0+x"),
        ("None", {"nvidia-nccl-cu12": "2.27.3"}, "Gloo of torch 2.13.0+x"),  # a torch that does not use it
    ],
)
def test_nccl_counts_where_torch_was_built_for_cuda(
    cuda: str, packages: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if package not in packages:
            raise metadata.PackageNotFoundError(package)
        return packages[package]

    lines = (
        "__all__ = ['cuda']",
        "__version__ = '2.13.0+x'",
        "debug = False",
        f"cuda: Optional[str] = {cuda}",
        "hip = None",
    )
    (tmp_path / "version.py").write_text("\n".join(lines))
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(ticket, "find_spec", lambda _: spec)
    monkeypatch.setattr(ticket.metadata, "version", version)
    assert ticket.communication() == expected


def test_the_command_line_stays_quick_because_nothing_imports_torch() -> None:
    imported = "actorflow.cli, actorflow.doctor.checks, actorflow.rendezvous.script_request"
    code = f"import sys, {imported}; print('torch' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert ran.stdout.strip() == "False"
