"""Every command in the documents that people read first is run, in a folder with the scripts that they show.

Links of all documents lead to files and headings that are there; ``make docs`` checks those of the site once more.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import runpy
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import actorflow as flow
import warm

ROOT = Path(__file__).parents[2]
RUN = ("quickstart", "concepts", "choosing", "steps", "troubleshooting")
PAGES = ("README.md", *(f"docs/{name}.md" for name in RUN))
QUICK = ("README.md", "docs/steps.md")  # whose commands take less than half a minute of a core
LINKED = sorted(str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")))
LIMIT = 240.0  # seconds of one command
_BLOCK = re.compile(r"(?:<!-- while: (.*?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r"# (\w+\.py)\n")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]+`(?!\])|^(?: {4}.*\n)+", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"\bflow((?:\.[A-Za-z_]\w*)+)")
_DECORATOR = re.compile(r"^@flow\.global_function.*\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """What stands between two fences."""

    language: str
    text: str
    meanwhile: str  # a command that runs while those of the block do

    @property
    def commands(self) -> list[str]:
        """The commands of a block of a console: what follows a "$"."""
        return [line[2:] for line in self.text.splitlines() if line.startswith("$ ")]

    @property
    def name(self) -> str:
        """The file that a script is to be saved as; empty where it has no name."""
        found = _NAMED.match(self.text)
        return found[1] if found else ""


def blocks(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [Block(language, body, meanwhile) for meanwhile, language, body in _BLOCK.findall(text)]


def programs(folder: Path, python: str, launches: str) -> None:
    """In this folder, ``python`` is an interpreter, and ``actorflow`` the program of another one."""
    for name, command in {"actorflow": f"{launches} -m actorflow", "python": python}.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        path.chmod(0o755)


def environment(folder: Path) -> dict[str, str]:
    """The variables for commands that run in a folder."""
    path = os.pathsep.join(filter(None, sys.path))
    return {**os.environ, "PYTHONPATH": path, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", command],
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page", [page if page in QUICK else pytest.param(page, marks=pytest.mark.slow) for page in PAGES]
)
def test_the_commands_of_a_page_run(page: str, tmp_path: Path) -> None:
    found = 0
    # the scripts of the first page are started as by a user; so is what is asked for by the number of its process
    python = sys.executable if page == "README.md" else warm.python()
    programs(tmp_path, python, sys.executable if any(block.meanwhile for block in blocks(page)) else warm.python())
    for block in blocks(page):
        if block.language == "python":
            name = block.name or f"block{found}.py"
            (tmp_path / name).write_text(block.text)
            if not block.name:
                check(f"python {name}", tmp_path)
        elif block.language in ("console", "bash"):
            assert block.commands, f"a block of {page} shows no command: {block.text}"
            with_it = meanwhile(block.meanwhile, tmp_path) if block.meanwhile else iter([None])
            for _ in with_it:
                for command in block.commands:
                    check(command, tmp_path)
        found += 1
    assert found


def check(command: str, folder: Path) -> None:
    done = run(command, folder)
    assert done.returncode == 0, f"$ {command}\n{done.stdout}\n{done.stderr}"


def meanwhile(command: str, folder: Path) -> Iterator[None]:
    """Run a command while a body does, from when it is known as a run on."""
    process = subprocess.Popen(
        shlex.split(command),
        cwd=folder,
        env=environment(folder),
        executable=str(folder / "bin" / shlex.split(command)[0]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        end = time.monotonic() + LIMIT
        while run(f"actorflow status {process.pid}", folder).returncode:
            assert process.poll() is None, f"$ {command}: it ended at once"
            assert time.monotonic() < end, f"$ {command}: not known"
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("page", PAGES)
def test_every_script_of_a_page_is_run_by_a_command_of_it(page: str) -> None:
    found = blocks(page)
    commands = [command for b in found for command in (*b.commands, b.meanwhile)]
    for name in filter(None, (b.name for b in found)):
        assert any(name in shlex.split(command) for command in commands), f"{name} of {page} is never run"


def test_the_hints_of_the_readme_do_in_its_script_what_they_say(tmp_path: Path) -> None:
    found = blocks("README.md")
    step, _, _ = next(b.text for b in found if b.name == "train.py").partition("\nfor step in ")
    plans = []
    for number, hint in enumerate(b.text for b in found if b.language == "py"):
        (decorator,) = _DECORATOR.findall(hint) or _DECORATOR.findall(step)
        path = tmp_path / f"hint{number}.py"
        before = _DECORATOR.sub("", hint) + decorator
        path.write_text(_DECORATOR.sub("", step).replace("def train_step", f"{before}def train_step"))
        names = runpy.run_path(str(path))
        images, targets = torch.randn(64, 64), torch.randint(0, 10, (64,))
        plans.append(flow.plan(names["train_step"], images, targets, devices=4).plan)
    placed = [{v.name.removeprefix("model."): (v.placement.ranks, v.sbp) for v in plan.variables} for plan in plans]
    assert len(plans) == 3
    assert placed[0]["0.weight"] == ((0, 1, 2, 3), (flow.sbp.split(0),))
    assert [placed[1][name][0] for name in ("0.weight", "2.weight")] == [(0, 1), (2, 3)]
    assert len({ranks for ranks, _ in placed[2].values()}) == 2
    assert plans[2].pieces == 8


@pytest.mark.parametrize("page", LINKED)
def test_links_of_a_page_lead_somewhere(page: str) -> None:
    text = _CODE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    for target in (link or source for link, source in _LINK.findall(text)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page} links to {target}, which is not there"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles], f"{page}: {target}"


@pytest.mark.parametrize("page", [page for page in LINKED if page != "CHANGELOG.md"])  # it names what is gone, too
def test_names_of_the_api_on_a_page_are_there(page: str) -> None:
    for found in sorted(set(_NAME.findall((ROOT / page).read_text(encoding="utf-8")))):
        thing: Any = flow
        for part in found[1:].split("."):
            if inspect.ismodule(thing) and not hasattr(thing, part):  # a module that nobody has imported
                importlib.import_module(f"{thing.__name__}.{part}")
            thing = getattr(thing, part)
