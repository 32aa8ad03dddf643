"""Device strings of the first generation, and views and placements as scopes."""

from __future__ import annotations

import pytest
import torch

import actorflow as flow
from actorflow.classic.devices import device_texts, ranks_of
from actorflow.classic.logical_views import MIRRORED, within_view
from actorflow.rendezvous import script_request
from actorflow.rendezvous.settings import Settings
from actorflow_compiler.core.errors import CallError, LayoutError

TWO_NODES = Settings(world=8, nnodes=2, devices=4)


@pytest.mark.parametrize(
    ("texts", "ranks"),
    [
        ("0:0", (0,)),
        ("0:0-3", (0, 1, 2, 3)),
        ("1:0-1", (4, 5)),
        (["0:0-1", "1:0-1"], (0, 1, 4, 5)),
        (("1:3", "0:3"), (7, 3)),
        ("0:0,2", (0, 2)),
        (" 1 : 1-2,0 ", (5, 6, 4)),
    ],
)
def test_a_text_names_a_node_and_its_devices(texts: object, ranks: tuple[int, ...]) -> None:
    found = device_texts(texts)
    assert found is not None
    assert ranks_of(found, TWO_NODES) == ranks


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2:0", r"node 2 is not in the run, which has 2 nodes with 4 devices each: 0:0-3, 1:0-3; name one of these"),
        ("1:2-4", r"a device of node 1 is not in the run.*0:0-3, 1:0-3"),
        ("0:3-1", "whose devices begin after their end"),
        ("0", r'"node:devices" was expected, such as "0:0"'),
        ("0:0-", "was expected"),
        ("-1:0", "was expected"),
    ],
)
def test_what_is_not_in_the_run_is_refused_with_what_is(text: str, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        ranks_of([text], TWO_NODES)


def test_ranks_are_not_texts() -> None:
    assert [device_texts(other) for other in ([0, 1], [], [[0], [1]], range(2), None)] == [None] * 5


def test_gpu_is_cuda_or_cpu_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script_request, "_gpu_noted", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    scope = flow.scope.placement("gpu", "0:0")
    assert capsys.readouterr().err == ""  # the run is not asked for before it is needed
    assert [scope.placement, flow.scope.placement("gpu", [0]).placement] == [flow.placement("cpu", [0])] * 2
    assert capsys.readouterr().err.count("this machine has no CUDA device: the script runs on CPU devices") == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert scope.placement == flow.placement("cuda", [0])


def test_a_scope_may_be_entered_again_and_inside_of_itself() -> None:
    scope = flow.scope.placement("cpu", [0])
    with scope, scope, flow.scope.placement(flow.placement("cpu", [0])):
        pass
    with scope:
        pass
    with pytest.raises(LayoutError, match="ranks"):
        flow.scope.placement("cpu", [0, 0])
    with pytest.raises(LayoutError, match="not in the run"), flow.scope.placement("cpu", "0:7"):
        pass


def test_a_view_as_a_scope_says_what_the_job_has() -> None:
    with flow.scope.consistent_view(), flow.scope.mirrored_view():  # outside of a job
        pass
    with within_view(MIRRORED):
        with flow.scope.mirrored_view():
            pass
        with pytest.raises(CallError, match=r"inside of a job of the mirrored view; one view for the whole job"):
            flow.scope.consistent_view().__enter__()
