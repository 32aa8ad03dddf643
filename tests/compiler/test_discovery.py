"""Signatures of ops without a line: found by running them, kept on disk, and never an error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actorflow_compiler.core.cache_folder import cache_folder
from actorflow_compiler.core.op_call import OpCall
from actorflow_compiler.core.sbp import P, Split
from actorflow_compiler.signatures import discovery, local_op, signatures
from actorflow_compiler.signatures.discovery import cache, discovered, forget
from actorflow_compiler.signatures.discovery.sandbox import SANDBOX, from_plain, to_plain
from models import CASES
from signature_checks import failures, instance, wrong
from signature_samples import calls
from trained import Layout, train_eagerly, train_planned

SHAPES: set[tuple[int, ...]] = set()  # on which the op "shaped" ran


@torch.library.custom_op("discovery_test::scale", mutates_args=())
def scale(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.tanh(w)


@scale.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("discovery_test::shaped", mutates_args=())
def shaped(x: Tensor, w: Tensor) -> Tensor:
    """The op that tells on which shapes it ran."""
    SHAPES.add(tuple(x.shape))
    return x * torch.tanh(w)


@shaped.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("discovery_test::scale_backward", mutates_args=())
def scale_backward(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    t = torch.tanh(w)
    return grad * t, (grad * x * (1 - t * t)).flatten(0, -2).sum(0)


@scale_backward.register_fake
def _(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(w)


def _backward(ctx: Any, grad: Tensor) -> Any:
    return scale_backward(grad, *ctx.saved_tensors)


for _op in (scale, shaped):
    _op.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


@torch.library.custom_op("discovery_test::rows", mutates_args=())
def rows(x: Tensor, n: int) -> Tensor:
    """The op that needs to be told how many rows there are."""
    assert x.shape[0] == n
    return x.reshape(n * x.shape[1], x.shape[2]) + 1


@rows.register_fake
def _(x: Tensor, n: int) -> Tensor:
    return x.new_empty(n * x.shape[1], x.shape[2])


@torch.library.custom_op("discovery_test::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand(x.shape, dtype=x.dtype)


@noisy.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("discovery_test::late", mutates_args=())
def late(x: Tensor, mask: Tensor) -> Tensor:
    """The op that nearly looks linear and element by element, and looks at its mask only in large sums."""
    return torch.where(x.sum() > 1e6, x + mask.sum(), x * (1 + 1e-6 * x))


@late.register_fake
def _(x: Tensor, mask: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACTORFLOW_CACHE", str(tmp_path / "cache"))
    forget()
    yield
    forget()


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops that were searched, not read from disk."""
    found: list[str] = []
    search = discovery._search

    def counted(call: OpCall) -> Any:
        found.append(call.op)
        return search(call)

    monkeypatch.setattr(discovery, "_search", counted)
    return found


def texts(op: str, *args: Any, parts: int = 2, used: list[bool] | None = None) -> list[str]:
    return sorted(map(str, discovered(instance(op, args, used=used).call, parts)))


# ---- what is found


KNOWN = (
    "mm addmm bmm _softmax_backward_data sum.dim_IntList t transpose.int permute add.Tensor sub.Tensor mul.Tensor "
    "div.Tensor neg exp where.self gelu_backward _log_softmax unsqueeze embedding"
)


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("op", KNOWN.split())
def test_discovery_finds_what_the_table_says(op: str) -> None:
    name = f"aten.{op}" if "." in op else f"aten.{op}.default"
    for args, kwargs in calls(name)[:3]:
        call = instance(name, args, kwargs).call
        found = {(s.ins, s.outs) for s in discovered(call, 2)}
        plain = {
            (s.ins, s.outs)
            for s in signatures(call, 2)[1:]
            if not (op == "embedding" and s.ins[0] == Split(0))  # shifted and masked, which no run can show
        }
        assert found == plain, f"{[str(m) for m in call.ins]}: {found ^ plain}"


def test_a_signature_is_found_for_every_dim_and_linear_operand_of_a_custom_op() -> None:
    x, w = torch.randn(512, 8, 64), torch.randn(64)
    assert texts("discovery_test.scale.default", x, w) == [
        "P, B -> P",
        "S(0), B -> S(0)",
        "S(1), B -> S(1)",
        "S(2), S(0) -> S(2)",
    ]
    assert "S(0), S(0), B -> S(0), P" in texts("discovery_test.scale_backward.default", x, x, w)


@pytest.mark.parametrize("shape", [(5, 3, 4), (3, 3, 3), (64, 16, 128)])
def test_sizes_among_the_arguments_follow_what_is_split(shape: tuple[int, ...]) -> None:
    case = instance("discovery_test.rows.default", [torch.randn(shape, dtype=torch.float64), shape[0]])
    (by_row,) = (s for s in signatures(case.call, 2) if s.ins == (Split(0),))
    assert by_row.outs == (Split(0, 1, shape[1]) if shape[0] % 2 else Split(0),)
    assert local_op(case.call, by_row, 2, 1)[1][1] == shape[0] // 2
    assert [line for parts in (2, 3) for line in failures(case, parts)] == []


def test_rules_hold_for_other_sizes_than_those_they_were_found_at() -> None:
    found = 0
    for shape in ((4, 6, 8), (5, 3, 7), (33, 2, 9)):
        case = instance("discovery_test.scale.default", [torch.randn(shape).double(), torch.randn(shape[-1]).double()])
        found += len(signatures(case.call, 2))
        assert [line for parts in (2, 3) for line in failures(case, parts)] == []
    assert found == 15


def test_no_device_gets_nothing() -> None:
    case = instance("discovery_test.scale.default", [torch.randn(2, 9), torch.randn(9)])
    assert [str(s) for s in discovered(case.call, 3)] == ["S(1), S(0) -> S(1)", "P, B -> P"]


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("aten.nan_to_num.default", [torch.randn(20, 20)]),  # linear but for what is no number
        ("aten.clamp.default", [torch.randn(20, 20), -1e5, 1e5]),  # linear up to there
        ("aten.threshold_backward.default", [torch.randn(()), torch.randn(()), 3.0]),  # one number, mostly below
        ("aten.hardtanh_backward.default", [torch.randn(9, 9), torch.randn(9, 9), -50.0, 50.0]),
    ],
)
def test_what_is_linear_only_within_bounds_is_not_linear(op: str, args: list[Any]) -> None:
    last = len([a for a in args if isinstance(a, Tensor)]) - 1
    assert not [s for s in discovered(instance(op, args).call, 2) if s.ins[last] == P]


@pytest.mark.parametrize(
    ("op", "args", "splits"),
    [
        ("aten.slice.Tensor", [torch.randn(100, 7), 0, 0, 12], ["S(1) -> S(1)"]),
        ("aten.slice.Tensor", [torch.randn(100, 7), 0, 0, 100], ["S(0) -> S(0)", "S(1) -> S(1)"]),
        ("aten.tril.default", [torch.randn(3, 90, 90), 40], ["S(0) -> S(0)"]),
        ("aten.permute.default", [torch.randn(2, 3, 5), [0, 2, 1]], ["S(0) -> S(0)", "S(1) -> S(2)", "S(2) -> S(1)"]),
    ],
)
def test_numbers_among_the_arguments_mean_on_small_tensors_what_they_mean_on_the_real_ones(
    op: str, args: list[Any], splits: list[str]
) -> None:
    assert texts(op, *args) == ["P -> P", *splits]


def test_a_rare_case_and_a_tiny_coefficient_do_not_pass_for_linear() -> None:
    found = texts("discovery_test.late.default", torch.randn(8, 4), torch.randn(8, 4))
    assert not [s for s in found if "P" in s]


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("discovery_test.noisy.default", [torch.randn(4, 4)]),
        ("aten.nonzero.default", [torch.randn(4, 4)]),
        ("aten.randperm.default", [8]),
        ("aten.zeros_like.default", [torch.randn(4)]),
        ("aten.cholesky_inverse.default", [torch.eye(3)]),
        ("aten.arange.default", [8]),
    ],
)
def test_where_nothing_can_be_decided_the_op_is_broadcast(op: str, args: list[Any]) -> None:
    assert texts(op, *args) == []


def test_sources_are_told_apart() -> None:
    call = instance("discovery_test.scale.default", [torch.randn(4, 9), torch.randn(9)]).call
    assert {s.source for s in signatures(call, 2)[1:]} == {"discovered"}
    assert {s.source for s in signatures(instance("aten.t.default", [torch.randn(4, 9)]).call, 2)} == {"table"}


# ---- what is kept


def test_what_was_found_is_read_from_disk_the_second_time(searches: list[str]) -> None:
    args = torch.randn(6, 8), torch.randn(8)
    first = texts("discovery_test.scale.default", *args)
    assert searches == ["discovery_test.scale.default"]
    forget()
    assert texts("discovery_test.scale.default", torch.randn(40, 24), torch.randn(24)) == first
    assert len(searches) == 1


def test_what_depends_on_more_than_is_known_is_searched_by_every_process(searches: list[str]) -> None:
    args = torch.randn(6, 8), torch.randn(8)
    first = texts("discovery_test.shaped.default", *args)
    forget()
    assert texts("discovery_test.shaped.default", *args) == first
    assert len(searches) == 2
    path = cache.path_of("discovery_test.shaped.default")
    assert path is not None
    assert not path.exists()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"format": 1}',
        '{"format": 999, "rules": {}}',
        "keep the head, break the rules",
        "keep the head, another operand",
    ],
)
def test_a_file_that_is_broken_or_not_ours_is_ignored_and_written_anew(content: str) -> None:
    args = torch.randn(6, 8), torch.randn(8)
    first = texts("discovery_test.scale.default", *args)
    path = cache.path_of("discovery_test.scale.default")
    assert path is not None
    good = json.loads(path.read_text())
    if content.startswith("keep"):
        (key,) = good["rules"]
        ins = ["S(0)"] if content.endswith("operand") else ["S(9)", "B"]
        content = json.dumps(good | {"rules": {key: [{"ins": ins, "outs": ["S(0)"], "sizes": []}]}})
    path.write_text(content)
    forget()
    assert texts("discovery_test.scale.default", *args) == first
    assert json.loads(path.read_text()) == good
    assert list(path.parent.iterdir()) == [path]


def test_rules_of_another_implementation_are_not_read(searches: list[str]) -> None:
    args = torch.randn(6, 8), torch.randn(8)
    first = texts("discovery_test.scale.default", *args)
    path = cache.path_of("discovery_test.scale.default")
    assert path is not None
    path.write_text(json.dumps(json.loads(path.read_text()) | {"implementation": "another"}))
    forget()
    assert texts("discovery_test.scale.default", *args) == first
    assert len(searches) == 2


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ACTORFLOW_CACHE", "")
    assert cache.path_of("aten.mm.default") is None
    assert texts("discovery_test.scale.default", torch.randn(6, 8), torch.randn(8))
    monkeypatch.delenv("ACTORFLOW_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "actorflow"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert cache_folder() == Path.home() / ".cache" / "actorflow"


def test_a_directory_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ACTORFLOW_CACHE", str(tmp_path / "file"))
    assert texts("discovery_test.scale.default", torch.randn(6, 8), torch.randn(8))


# ---- the sandbox


CRASHING = """
import os, time, torch
from torch import Tensor

PARENT = int(os.environ["THE_PARENT"])

def define(name, condition):
    @torch.library.custom_op(f"crashing_test_ops::{name}", mutates_args=())
    def op(x: Tensor) -> Tensor:
        if os.getpid() != PARENT and condition(x):
            end(name)
        return x.exp()
    op.register_fake(lambda x: torch.empty_like(x))

def end(name):
    print("not an answer")
    while name == "hangs":
        pass
    os._exit(1)

define("always", lambda x: True)
define("sometimes", lambda x: x.shape[-1] == 2)
define("hangs", lambda x: True)
"""


@pytest.fixture
def _crashing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "crashing_test_ops.py").write_text(CRASHING)
    monkeypatch.setenv("THE_PARENT", str(os.getpid()))
    monkeypatch.syspath_prepend(str(tmp_path))
    SANDBOX.close()
    __import__("crashing_test_ops")
    yield
    SANDBOX.close()
    sys.modules.pop("crashing_test_ops")


@pytest.mark.slow
@pytest.mark.usefixtures("_crashing")
def test_an_op_that_always_ends_the_process_is_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorflow_compiler.signatures.discovery.sandbox.CRASHES", 2)
    assert texts("crashing_test_ops.always.default", torch.randn(10, 10)) == []
    assert texts("aten.diagonal.default", torch.randn(4, 5, 6)) == ["P -> P", "S(2) -> S(0)"]


@pytest.mark.slow
@pytest.mark.usefixtures("_crashing")
def test_an_op_that_hangs_is_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorflow_compiler.signatures.discovery.sandbox.CRASHES", 1)
    assert texts("crashing_test_ops.hangs.default", torch.randn(10, 10)) == []


@pytest.mark.slow
@pytest.mark.usefixtures("_crashing")
def test_what_ends_the_process_is_left_out_and_the_rest_is_found() -> None:
    assert texts("crashing_test_ops.sometimes.default", torch.randn(10, 10)) == ["S(0) -> S(0)"]


def test_a_call_survives_the_way_to_the_sandbox() -> None:
    for op in ("aten.cat.default", "aten.full.default", "aten.index.Tensor", "aten.sum.dim_IntList"):
        for args, kwargs in calls(op):
            call = instance(op, args, kwargs).call
            assert from_plain(json.loads(json.dumps(to_plain(call)))) == call
    call = instance("aten.mul.Tensor", [torch.randn(3), 2 + 1j]).call
    assert from_plain(json.loads(json.dumps(to_plain(call)))) == call


def test_an_op_of_torch_is_found_out_about_in_the_sandbox() -> None:
    case = instance("aten.channel_shuffle.default", [torch.randn(5, 8, 3, 3).double(), 2])
    found = discovered(case.call, 3)
    assert [s.ins[0] for s in found] == [Split(0), Split(2), Split(3), P]
    assert [wrong(case, s, 3) for s in found] == [None] * 4


@pytest.mark.slow
def test_a_child_that_has_ended_in_the_meantime_is_started_again() -> None:
    call = instance("aten.channel_shuffle.default", [torch.randn(5, 8, 3, 3).double(), 2]).call
    found = SANDBOX.search(call)
    child = SANDBOX._child
    assert found
    assert child is not None
    child.kill()
    child.wait()
    assert SANDBOX.search(call) == found
    assert SANDBOX._child is not child


# ---- a training


class Scaled(nn.Module):
    """A perceptron with a custom op between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 24)
        self.weight = nn.Parameter(torch.randn(24))
        self.head = nn.Linear(24, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(shaped(self.first(images), self.weight))
        return logits


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        (Layout(2), {(7, 24), (6, 24)}),
        (Layout(3), {(5, 24), (4, 24)}),
        (Layout(1, 13), {(1, 24)}),
        (Layout(2, hints={r"(first\..*|weight|head\.weight)": Split(0)}), set()),
    ],
    ids=["data 2", "data 3", "micro-batches", "tensor"],
)
def test_a_model_with_a_custom_op_trains_in_parts_as_the_eager_one_does(
    layout: Layout, parts: set[tuple[int, ...]]
) -> None:
    case = replace(CASES["mlp"], make=Scaled)
    expected, parameters = train_eagerly(case, [13] * 3, 1)
    SHAPES.clear()
    losses, found, plan = train_planned(case, layout, [13] * 3)
    assert parts <= SHAPES
    assert (13, 24) not in SHAPES
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
    torch.testing.assert_close(found, parameters, rtol=1e-4, atol=1e-6)
    if layout.world > 1:
        (note,) = (n for n in plan.notes if "shaped.default" in n)
        assert note == (
            "discovery_test.shaped.default: signatures discovered: S(0), B -> S(0); S(1), S(0) -> S(1); P, B -> P"
        )
        assert not [n for n in plan.notes if "runs on whole tensors" in n]
