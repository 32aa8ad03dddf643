"""pyproject.toml allows what the generated code works with, and nothing older."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
GENERATED = sorted((ROOT / "protos" / "actorflow_protos").glob("*_pb2*.py"))


def floors() -> dict[str, Version]:
    """The oldest version of each dependency that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = {}
    for requirement in map(Requirement, project["dependencies"]):
        (least,) = [s.version for s in requirement.specifier if s.operator == ">="]
        found[requirement.name] = Version(least)
    return found


def generators() -> dict[str, Version]:
    """What `make protos` generates with."""
    lines = (ROOT / "protos" / "generator.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name: Version(version) for name, version in pairs}


def test_the_oldest_protobuf_that_is_allowed_is_not_older_than_the_generated_code() -> None:
    said = [re.search(r"# Protobuf Python Version: (\S+)", path.read_text()) for path in GENERATED]
    versions = [Version(found[1]) for found in said if found is not None]
    assert len(versions) == 2  # plan_pb2, runtime_pb2; those of gRPC say nothing of protobuf
    assert floors()["protobuf"] >= max(versions)


def test_the_oldest_grpcio_that_is_allowed_is_not_older_than_the_generator() -> None:
    assert floors()["grpcio"] >= generators()["grpcio-tools"]


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.name)
def test_generated_code_checks_no_version_at_import(path: Path) -> None:
    """Code that does warns or raises beside a protobuf of another major version, or a grpcio that is a little older."""
    assert not re.search("runtime_version|GRPC_GENERATED_VERSION", path.read_text())


def test_every_dependency_has_a_floor_and_is_tested_with_a_version_that_it_allows() -> None:
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for name, floor in floors().items():
        assert Version(pinned[name]) >= floor
