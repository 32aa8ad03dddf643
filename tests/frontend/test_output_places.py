"""Where output goes is one rule for all commands: missing folders are made, and what stands in the way is named."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from actorflow.cli import main
from actorflow.support.output_paths import why_not_writable
from actorflow.support.whole_files import write_whole

OPTIONS = {  # option → the command before it, and whether it is a folder
    "--trace": (["run", "train.py"], True),
    "--log-dir": (["run", "train.py"], True),
    "--out": (["plan", "train.py", "--devices", "2"], False),
    "trace --out": (["trace", "traced"], False),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_what_stands_in_the_way_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('started')")
    Path("file").touch()
    command, folder = OPTIONS[option]
    target = str(Path("file", "deep", "out" if folder else "out.html"))
    done = CliRunner().invoke(main, [*command, option.split()[-1], target])
    assert done.exit_code == 2
    shown = " ".join(done.output.split())
    assert f"'{target}'" in shown
    assert "file is a file; name another one" in shown
    assert "started" not in shown


def test_missing_folders_are_made_for_files_and_folders_alike(tmp_path: Path) -> None:
    assert why_not_writable(tmp_path / "new" / "traced", folder=True) == ""
    assert (tmp_path / "new" / "traced").is_dir()
    assert why_not_writable(tmp_path / "other" / "plan.html") == ""
    assert list((tmp_path / "other").iterdir()) == []  # the file itself is for whoever writes it


def test_a_folder_is_no_file_and_a_file_keeps_what_is_in_it(tmp_path: Path) -> None:
    assert "it is a folder" in why_not_writable(tmp_path)
    (tmp_path / "old.txt").write_text("old")
    assert why_not_writable(tmp_path / "old.txt") == ""
    assert (tmp_path / "old.txt").read_text() == "old"
    assert "cannot be written" in why_not_writable("/proc/page.html")


def test_a_link_to_a_file_that_is_yet_to_be_made_is_written_through(tmp_path: Path) -> None:
    link = tmp_path / "plan.html"
    link.symlink_to(tmp_path / "new" / "page.html")
    assert why_not_writable(link) == ""
    write_whole(link, b"a page")
    assert link.is_symlink()
    assert (tmp_path / "new" / "page.html").read_text() == "a page"


def test_a_file_that_cannot_be_written_whole_stays_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plan.txt"
    file.write_text("the old plan")
    monkeypatch.setattr("os.replace", _full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(file, b"a new plan")
    assert file.read_text() == "the old plan"
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_is_written_again_keeps_who_may_read_it(tmp_path: Path) -> None:
    file = tmp_path / "plan.txt"
    file.touch(mode=0o600)
    write_whole(file, b"a new plan")
    assert file.read_text() == "a new plan"
    assert file.stat().st_mode & 0o777 == 0o600


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
