"""In-place changes, and views of what they change, as a pass over a trace writes them: equal to running them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from actorflow_compiler.capture.functional import rewrite_in_place_ops
from actorflow_compiler.core.errors import CaptureError
from actorflow_compiler.core.torch_internals import fake_mode
from fewer import fewer

Step = Callable[[Tensor, Tensor], list[Tensor]]


def _raise(node: Node, error: Exception) -> NoReturn:
    raise error


def rewritten(step: Step, *real: Tensor, table: dict[Any, Any] | None = None) -> GraphModule:
    """The trace of a step on tensors like ``real``, rewritten; checks that it changes no tensor but its inputs."""
    with fake_mode():
        inputs = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in real]
        trace = make_fx(step, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
        rewrite_in_place_ops(trace, table or {}, lambda node, op: None, _raise)
    trace.graph.lint()
    calls = [n for n in trace.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    changing = [n for n in calls if n.target._schema.is_mutable]
    assert all(n.target is torch.ops.aten.copy_.default and n.args[0].op == "placeholder" for n in changing)
    trace.graph.set_codegen(torch.fx.graph.CodeGen())
    trace.recompile()
    return trace


def check(step: Step, *real: Tensor) -> None:
    """The rewritten step gives the results, and leaves the inputs, that the step itself does."""
    mine, own = [t.clone() for t in real], [t.clone() for t in real]
    expected, found = step(*own), rewritten(step, *real)(*mine)
    for a, b in zip([*found, *mine], [*expected, *own], strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def of_two(change: Callable[[Tensor, Tensor], Any]) -> Step:
    """A step that makes a tensor and views of it, changes them or the inputs, and returns all of these."""

    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        made = x * 2
        views = [made[1:], made.t(), made.view(-1), made.detach()]
        result = change(made, y)
        return [made, *views, *([result] if isinstance(result, Tensor) else []), x + y]

    return step


def _two_views(made: Tensor, y: Tensor) -> Tensor:
    a, b = made[0], made[:, 1]
    a.add_(1)
    b.mul_(a.clone())
    made.sub_(b.clone())
    return a + b


def _parts(made: Tensor, y: Tensor) -> Tensor:
    first, second = made.split(2)
    second.copy_(first + 1)
    first.zero_()
    rows = made.unbind(1)
    rows[0].add_(rows[1])
    return rows[0] + rows[1]


def _shape_in_place(made: Tensor, y: Tensor) -> Tensor:
    made.unsqueeze_(0)
    made.add_(1)
    made.squeeze_(0).transpose_(0, 1)
    made.mul_(y)
    return made.t_()


def _out(made: Tensor, y: Tensor) -> Tensor:
    torch.add(made, y, out=made)
    values, indices = torch.empty(4), torch.empty(4, dtype=torch.long)
    torch.max(made, 1, out=(values, indices))
    torch.mul(made[0], 2, out=made[1])
    return values + indices


def _out_of_no_size(made: Tensor, y: Tensor) -> Tensor:
    out = torch.empty(0)
    torch.add(made, y, out=out)
    return out


def _set(made: Tensor, y: Tensor) -> Tensor:
    other, third = made * 3, y * 2
    other.set_(third)
    other.add_(1)
    return third


def _resized(made: Tensor, y: Tensor) -> Tensor:
    out = torch.empty(0)
    out.resize_(4, 4).copy_(made)
    out.resize_(2, 3).add_(1)
    (made * 2).t().resize_(4, 4).add_(1)  # of the same size: nothing changes
    return out + (made * 2).t().resize_as_(y.t()).mul_(y)[:2, :3]


def _complex_parts(made: Tensor, y: Tensor) -> Tensor:
    numbers = torch.view_as_complex(torch.stack([made, y], -1))
    torch.view_as_real(numbers)[..., 1].mul_(3)
    numbers.real.add_(1)
    return torch.view_as_real(numbers * 2)


def _lists(made: Tensor, y: Tensor) -> Tensor:
    torch._foreach_add_([made[0], made[1]], 1.5)
    sums = torch._foreach_mul([made, y], 2)
    torch._foreach_copy_([y], [sums[0]])
    return sums[0] + sums[1]


def _lists_that_overlap(made: Tensor, y: Tensor) -> Tensor:
    torch._foreach_add_([made, made], 1.0)
    torch._foreach_mul_([made[0], made[:, 0], y, y[1]], 3.0)
    return made + y


CHANGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "all of it": lambda made, y: made.add_(1),
    "a row": lambda made, y: made[2].mul_(3),
    "a view of a view": lambda made, y: made[1:].t()[0].add_(1).sub_(2),
    "two views": _two_views,
    "parts": _parts,
    "an input": lambda made, y: y.copy_(made).add_(1),
    "a view of an input": lambda made, y: y[1:].copy_(made[1:]),
    "an input, twice": lambda made, y: (y.add_(1), y.t().mul_(made))[1],
    "its data": lambda made, y: (made.data.add_(1), y.detach().mul_(2))[0],
    "by itself": lambda made, y: made.add_(made),
    "by its other half": lambda made, y: made[:2].copy_(made[2:]),
    "another dtype": lambda made, y: made.copy_(y.to(torch.int64)),
    "a wider dtype": lambda made, y: made.add_(y.double()),
    "one number": lambda made, y: made.copy_(y[0, 0]),
    "fill": lambda made, y: (made[0].fill_(7), y.zero_(), made.diagonal().fill_(3)),
    "indices": lambda made, y: (made.index_add_(0, torch.tensor([1, 1]), y[:2]), made.__setitem__([0, 2], 5.0))[0],
    "a mask": lambda made, y: (made.masked_fill_(y > 0, 2.0), made.__setitem__((slice(None), 1), y[0]))[0],
    "a long slice": lambda made, y: made[::2, 1:3].add_(y[::2, 1:3]),
    "strides": lambda made, y: made.as_strided((2, 2), (5, 1), 1).mul_(4),
    "shape in place": _shape_in_place,
    "out": _out,
    "out of no size": _out_of_no_size,
    "set": _set,
    "resized": _resized,
    "complex parts": _complex_parts,
    "lists": _lists,
    "lists that overlap": _lists_that_overlap,
    "relu": lambda made, y: torch.relu_(torch.nn.functional.leaky_relu_(made, 0.1)),
    "expanded": lambda made, y: (made[:1].expand(4, 4).clone().add_(y), y.sum(0).expand(4, 4)[0])[0],
    "chunks": lambda made, y: [c.add_(i) for i, c in enumerate(made.chunk(4, 1))][-1],
    "constant": lambda made, y: made.add_(torch.tensor([1.0, 2.0, 3.0, 4.0])),
    "new values": lambda made, y: torch.zeros(4, 4).copy_(made).index_fill_(0, torch.tensor([1]), 2.0),
}


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("transposed", [False, True])
def test_changes_of_tensors_and_views(change: Callable[[Tensor, Tensor], Any], transposed: bool) -> None:
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    if transposed and change is not CHANGES["strides"]:
        y = y.t()
    check(of_two(change), x, y)


@pytest.mark.parametrize(
    "change",
    [lambda y: y.t_(), lambda y: y.resize_(2, 2), lambda y: y.add_(1).unsqueeze_(0), lambda y: y.set_(y.clone())],
    ids=["transposed", "resized", "changed before", "set"],
)
def test_an_input_keeps_its_shape_and_its_memory(change: Callable[[Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match=r"in place; a plan keeps it|set_ gives"):
        rewritten(lambda x, y: [x + change(y).sum()], torch.ones(3, 4), torch.ones(3, 4))


def test_more_memory_than_a_tensor_has_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"changes a tensor \[4\] to \[8\]"):
        rewritten(lambda x, y: [(x * 2).resize_(8) * y], torch.ones(4), torch.ones(8))


def test_a_change_in_inference_mode() -> None:
    @torch.inference_mode()
    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        made = x * 2
        made.t()[1].add_(y[0])
        made += 1
        return [made * y]

    check(step, torch.randn(4, 4), torch.randn(4, 4))


def test_a_decomposition_runs_in_place_of_its_op() -> None:
    def halves(x: Tensor) -> Any:
        return NotImplemented if x.dim() == 1 else (x * 0.5).tanh_().mul_(2)

    trace = rewritten(
        lambda x, y: [torch.sigmoid(x) + torch.sigmoid(y)], torch.ones(2, 2), torch.ones(2),
        table={torch.ops.aten.sigmoid.default: halves},
    )  # fmt: skip
    ops = [str(n.target) for n in trace.graph.nodes if n.op == "call_function"]
    assert ops == ["aten.mul.Tensor", "aten.tanh.default", "aten.mul.Tensor", "aten.sigmoid.default", "aten.add.Tensor"]


VIEWS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: t,
    lambda t: t.t(),
    lambda t: t[:, :4],
    lambda t: t.flip(0),
    lambda t: t.detach(),
    lambda t: t[[0, 1, 2, 3]],
    lambda t: torch.cat(t.split(2)),
    lambda t: t.reshape(2, 2, 4).transpose(0, 1).reshape(4, 4),
    lambda t: t.reshape(16).view(4, 4),
    lambda t: t.diagonal().expand(4, 4),
    lambda t: t.narrow(0, 0, 4),
    lambda t: t.unbind(0)[1].expand(4, 4),
)
WRITES: tuple[Callable[[Tensor, Tensor], Any], ...] = (
    lambda t, other: t[1:3].add_(other[1:3]), lambda t, other: t.mul_(2), lambda t, other: t.copy_(other + 1),
    lambda t, other: t.t()[0].sub_(other[0]), lambda t, other: t.view(2, 8)[0].zero_() if t.is_contiguous() else None,
    lambda t, other: t.__setitem__((slice(None), 2), other[1]), lambda t, other: t.split(2, 1)[1].add_(1),
)  # fmt: skip


@settings(max_examples=fewer(50))  # a trace each
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("view"), st.integers(0, 30), st.sampled_from(range(len(VIEWS)))),
            st.tuples(st.just("write"), st.integers(0, 30), st.sampled_from(range(len(WRITES)))),
        ),
        max_size=10,
    )
)
def test_drawn_views_and_changes(program: list[tuple[str, int, int]]) -> None:
    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        tensors = [x, y, x + y]
        for at, (kind, source, which) in enumerate(program):
            tensor = tensors[source % len(tensors)]
            if kind == "view":
                tensors.append(VIEWS[which](tensor))
            elif 0 not in tensor.stride():  # torch refuses a change of one number through several elements
                WRITES[which](tensor, tensors[at % len(tensors)].clone())
        return [t.clone() for t in tensors[2:]]

    check(step, torch.randn(4, 4), torch.randn(4, 4))
