"""What plans are written as: every format holds all that it should, and bad requests are answered before compiling."""

from __future__ import annotations

import csv
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

import pytest

import actorflow as flow
import warm
from actorflow.plan_view import plan as plan_of
from actorflow.show.formats import FORMATS, check_place, write_compared
from actorflow.show.poster import poster
from actorflow.show.timeline import TimelineView
from actorflow_compiler.core.errors import CallError, ShowError
from actorflow_compiler.plan.plan import ConsideredPlan
from actorflow_compiler.plan.text import from_json
from shown_plans import batch, job, view
from test_runs import actorflow

ROOT = Path(__file__).parents[2]
GPT = ROOT / "examples" / "gpt.py"


def test_dot_has_every_actor_and_an_edge_for_every_reader(tmp_path: Path) -> None:
    dot = shutil.which("dot")
    if dot is None:
        pytest.skip("Graphviz's dot is not installed")
    plan = view().plan
    path = view().write(tmp_path / "plan.dot")
    done = subprocess.run([dot, "-Tplain", path], capture_output=True, text=True, check=True, timeout=250)
    kinds = [line.split(maxsplit=1)[0] for line in done.stdout.splitlines()]
    assert kinds.count("node") == len(plan.actors)
    assert kinds.count("edge") == sum(len(r.readers) for r in plan.registers)
    drawn = subprocess.run([dot, "-Tsvg", path], capture_output=True, text=True, check=True, timeout=250).stdout
    assert all(f">rank {rank}<" in drawn for rank in range(4))


def test_the_still_picture_has_every_actor_register_module_and_boxing() -> None:
    plan = view().plan
    tree = ElementTree.fromstring(view().svg())
    found = [dict(e.attrib) for e in tree.iter()]
    assert {int(e["data-actor"]) for e in found if "data-actor" in e} == {a.id for a in plan.actors}
    assert {int(e["data-register"]) for e in found if "data-register" in e} == {
        r.id for r in plan.registers if r.tensors
    }
    words = "\n".join(tree.itertext())
    for name in ("blocks.0", "blocks.3", "head", "all-reduce P → B", "send", "cpu:[0,1]", "cpu:[2,3]", "micro-batches"):
        assert name in words
    assert "var(" not in words  # few programs but browsers know variables of CSS


def test_json_gives_the_plan_back_with_where_it_comes_from() -> None:
    plan = view().plan
    again = from_json(view().json())
    assert again == plan
    assert again.origins.flows
    sent = plan.for_rank(0)
    assert sent.origins.parts == sent.origins.flows == ()  # what a rank is sent has the lines of its ops, and no more
    assert {s.actor for s in sent.origins.steps} <= {a.id for a in sent.actors if a.rank == 0}
    assert any(p.line for s in sent.origins.steps for p in map(sent.origins.places.__getitem__, s.places))


def test_csv_has_a_row_for_each_stage(tmp_path: Path) -> None:
    rows = list(csv.reader(view().write(tmp_path / "plan.csv").read_text().splitlines()))
    assert [cell for cell in rows[0] if "F" in cell] == ["0F0", "0F1", "0F2", "0F3"]
    assert len(rows) == 2


def test_text_ends_with_a_forecast() -> None:
    text = str(view())
    assert text.startswith("plan step: 4 ranks, 4 micro-batches")
    assert "\nforecast on " in text


def test_an_unknown_format_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ShowError, match=r"plan\.pdf.* expected: .*\.html, \.svg, \.dot, \.json, \.txt, \.csv"):
        view().write(tmp_path / "plan.pdf")
    assert list(FORMATS) == [".html", ".svg", ".dot", ".json", ".txt", ".csv"]


@pytest.mark.parametrize(
    ("where", "what"),
    [("file/plan.svg", "is a file"), ("file/deep/plan.svg", "is a file"), ("folder.svg", "is a folder")],
)
def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, where: str, what: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(ShowError, match=what):
        check_place(tmp_path / where)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder.svg"]  # nothing is left behind


@pytest.mark.parametrize("out", ["plan.pdf", "file/plan.html"])
def test_the_command_refuses_before_it_compiles(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").touch()
    command = [warm.python(), "-m", "actorflow", "plan", GPT, "--devices", "4", "--out", tmp_path / out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 2
    assert out in re.sub(r"\s*\n\s*", " ", done.stderr)
    assert "compiling" not in done.stderr


@pytest.mark.slow
def test_a_page_is_drawn_with_nothing_but_what_a_plain_install_has() -> None:
    allowed = {_normal(re.split(r"[^\w.-]", r)[0]) for r in _core("actorflow")}
    todo = [*allowed]
    while todo:  # and what these need
        for needed in map(_normal, (re.split(r"[^\w.-]", r)[0] for r in _core(todo.pop()))):
            if needed not in allowed:
                allowed.add(needed)
                todo.append(needed)
    barred = {
        name for name, owners in packages_distributions().items()
        if not {_normal(owner) for owner in owners} & (allowed | {"actorflow", "setuptools"})
    }  # fmt: skip
    assert {"playwright", "hypothesis"} <= barred
    script = f"""
import sys
from importlib.machinery import PathFinder

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in {barred!r} else super().find_spec(name, path, target)

sys.meta_path = [Installed if finder is PathFinder else finder for finder in sys.meta_path]
import shown_plans
assert 'data-chart="forecast"' in shown_plans.view().html()
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr


def _normal(name: str) -> str:
    """As package indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _core(package: str) -> list[str]:
    """What a package needs without its extras; of what is not installed, nothing."""
    try:
        if package == "actorflow":
            found = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        else:
            found = requires(package) or []
    except PackageNotFoundError:
        return []
    return [one for one in found if "extra ==" not in one]


def test_a_job_without_a_plan_is_answered_with_how_to_get_one() -> None:
    with pytest.raises(CallError, match=r"call it before flow\.plan, or give arguments and devices"):
        flow.plan(job())
    with pytest.raises(CallError, match="expected: a job"):
        plan_of(print)  # type: ignore[arg-type]


def test_the_plan_of_a_job_that_was_called_is_that_of_its_call() -> None:
    step = job(micro_batches=2, stages=1)
    before = flow.plan(step, *batch(), devices=3 + 1)
    assert before.plan.world == 4
    float(step(*batch()))
    assert flow.plan(step).plan is step.plan
    assert repr(flow.plan(step)).startswith("<plan step for 1 rank, ")
    float(step(*batch()))  # looking at plans changes nothing


@pytest.mark.slow
def test_looking_at_plans_changes_nothing_on_any_rank() -> None:
    script = str(Path(__file__).parents[1] / "scripts" / "looked_at.py")
    said = []
    for what in ("looks", "does not"):
        run = actorflow("run", script, "--devices", "2", "--", what)
        assert run.returncode == 0, run.stdout + run.stderr
        said.append(run.stdout)
    assert said[0] == said[1]
    assert said[0].count("\n") == 25


def test_a_notebook_gets_the_page_in_a_frame() -> None:
    frame = view()._repr_html_()
    assert frame.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert frame.count("<") == 2  # all of the page is escaped


def test_a_plan_that_a_full_disk_has_no_room_for_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    path, shown = tmp_path / "plan.json", view()
    path.write_text("the old plan")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(ShowError, match=r"plan\.json' cannot be written: File too large; make room there"):
            shown.write(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "the old plan"
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_that_takes_nothing_is_an_error_of_what_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "plan.dot"
    path.symlink_to("/dev/full")
    with pytest.raises(ShowError, match="cannot be written: No space left on device"):
        view().write(path)


@pytest.mark.parametrize("devices", [0, -1, "4", 2.0, True])
def test_what_is_no_number_of_devices_is_refused(devices: Any) -> None:
    with pytest.raises(CallError, match=rf"devices={devices!r}; expected: how many devices"):
        plan_of(job(), *batch(), devices=devices)


def test_the_still_picture_speaks_of_a_timeline_and_of_micro_batches_where_there_are_several() -> None:
    plan = view().plan
    words = "\n".join(ElementTree.fromstring(view().svg()).itertext())
    assert "\nTimeline\n" in words
    assert "\n4 ranks, 4 micro-batches in an iteration\n" in words
    whole = poster(replace(plan, pieces=1), TimelineView((), 0.0, 1.0))
    assert "\n4 ranks\n" in "\n".join(ElementTree.fromstring(whole).itertext())


def test_pages_of_other_plans_are_in_a_folder_that_has_nothing_of_anybody_else(tmp_path: Path) -> None:
    chosen = tmp_path / "the plan #1.html"
    plan = replace(view().plan, considered=tuple(ConsideredPlan(f"data {n}", n, n, n, "slower") for n in (1, 2, 3)))
    theirs = [tmp_path / "the plan #1-2.html", tmp_path / "the plan #1-compared" / "2.html"]
    theirs[1].parent.mkdir()
    for file in theirs:
        file.write_text("<!doctype html> a page of somebody else")
    for _ in range(2):  # the second time its own pages are written anew
        first, *others = write_compared(plan, [plan, None], view().hardware, chosen)
        assert first == chosen
        assert others == [tmp_path / "the plan #1-compared-2" / "2.html"]
    assert all(file.read_text() == "<!doctype html> a page of somebody else" for file in theirs)
    assert len(list(tmp_path.iterdir())) == 4
    for page in (first, *others):
        links = set(re.findall(r'<a href="([^"#][^"]*)"', page.read_text()))
        found = {(page.parent / unquote(urlsplit(link).path)).resolve() for link in links}
        assert found == {first.resolve(), others[0].resolve()}


def test_a_plan_that_was_compared_with_none_that_was_made_has_no_folder(tmp_path: Path) -> None:
    write_compared(view().plan, [None], view().hardware, tmp_path / "plan.html")
    assert [file.name for file in tmp_path.iterdir()] == ["plan.html"]
