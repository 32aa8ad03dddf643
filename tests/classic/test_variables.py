"""Variables of job functions: made once, shared by name, equal everywhere; layers make theirs by OneFlow's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import actorflow as flow
from actorflow.classic.registry import REGISTRY
from actorflow.classic.variables import RehearsalRecord, current_recording, is_rehearsing
from actorflow_compiler.core.errors import CallError, LayoutError, StateError
from actorflow_compiler.hints.hints import resolve
from classic.rehearsed import play, rehearse, run

pytestmark = pytest.mark.usefixtures("forget")
normal = flow.random_normal_initializer()


def variable(name: str = "v", shape: Any = (3, 2), **more: Any) -> Tensor:
    return flow.get_variable(name, shape, initializer=normal, **more)


def test_a_variable_is_made_by_a_rehearsal_and_returned_in_every_run():
    seen: list[Any] = []

    def body() -> Tensor:
        seen.append((is_rehearsing(), current_recording() is not None))
        return variable()

    recording = rehearse(body)
    made = play(recording, body)
    assert recording.variables == ("v",)
    assert isinstance(made, nn.Parameter)
    assert play(recording, body) is made
    assert play(rehearse(body, job="another"), body) is made
    assert seen[:2] == [(True, True), (False, True)]
    assert current_recording() is None


def test_values_depend_on_the_seed_and_the_name_alone(forget: Callable[[], None]):
    def body() -> tuple[Tensor, ...]:
        return variable("a"), variable("b"), variable("c", random_seed=3)

    flow.manual_seed(5)
    torch.rand(100)  # other random numbers in between
    a, b, c = (t.detach().clone() for t in run(body))
    forget()
    flow.manual_seed(5)
    again = run(lambda: (variable("b"), variable("a"), variable("c", random_seed=3)))  # in another order
    torch.testing.assert_close(again, (b, a, c), rtol=0, atol=0)
    assert not a.equal(b)
    forget()
    flow.manual_seed(6)
    a_6, _, c_6 = run(body)
    assert not a_6.equal(a)
    assert c_6.equal(c)


def test_what_is_not_trainable_is_a_buffer():
    made = run(lambda: variable("frozen", trainable=False))
    assert not isinstance(made, nn.Parameter)
    assert not made.requires_grad
    assert dict(REGISTRY.named_buffers())["frozen"] is made


def test_any_name_will_do():
    run(lambda: [variable(name) for name in ("a.b", "type", "encoder/layer-0", "forward")])
    assert REGISTRY.names() == ("a.b", "type", "encoder/layer-0", "forward")
    assert [n for n, _ in REGISTRY.named_parameters()] == list(REGISTRY.names())


def test_dtype_and_shape_may_be_left_to_the_first_call():
    assert run(lambda: variable("whole", 4, dtype=flow.float64)).dtype == torch.float64
    assert run(lambda: flow.get_variable("whole")).shape == (4,)


def test_distribute_becomes_a_hint():
    of = {"v.1": flow.distribute.split(axis=0), "w": flow.distribute.broadcast(), "auto": flow.distribute.auto()}
    run(lambda: [variable(name, distribute=layout) for name, layout in of.items()])
    hints = resolve({"variables": REGISTRY}).layouts
    assert {name: str(hint.wish[0]) for name, hint in hints.items()} == {"variables.v.1": "S(0)", "variables.w": "B"}


def test_an_axis_that_is_no_number_is_told():
    with pytest.raises(LayoutError, match=r"split\('0'\)"):
        flow.distribute.split("0")  # type: ignore[arg-type]


def test_distribute_is_still_called_with_models():
    model = nn.Linear(4, 4)
    flow.distribute(model, {"weight": flow.distribute.split(1)})
    assert str(resolve({"model": model}).layouts["model.weight"].wish[0]) == "S(1)"


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], list[str]]] = {
    "another shape": (lambda: (variable(), variable(shape=(2, 3))), StateError, ["[2, 3]", "made with shape=[3, 2]"]),
    "another dtype": (lambda: (variable(), variable(dtype=flow.float64)), StateError, ["torch.float64", "float32"]),
    "frozen now": (lambda: (variable(), variable(trainable=False)), StateError, ["trainable=False", "trainable=True"]),
    "another layout": (
        lambda: (variable(distribute=flow.distribute.split(0)), variable(distribute=flow.distribute.split(1))),
        StateError, ["distribute=S(1)", "distribute=S(0)"],
    ),
    "no shape": (lambda: flow.get_variable("v", initializer=normal), StateError, ["without shape"]),
    "no initializer": (lambda: flow.get_variable("v", (2,)), StateError, ["without initializer"]),
    "an initializer that is a function": (
        lambda: flow.get_variable("v", (2,), initializer=flow.truncated_normal), StateError, ["truncated_normal(0.1)"],
    ),
    "a regularizer that is a number": (lambda: variable(regularizer=0.1), StateError, ["regularizers.l2"]),
    "no name": (lambda: variable(""), StateError, ["not empty"]),
    "a second one": (lambda: (variable(), variable(reuse=False)), StateError, ["reuse=False"]),
    "a partial sum": (lambda: variable(distribute=flow.sbp.partial_sum), LayoutError, ["distribute=P"]),
    "a dim that is not there": (lambda: variable(distribute=flow.distribute.split(2)), LayoutError, ["S(2)"]),
    "dense of one dim": (lambda: flow.layers.dense(torch.ones(3), 2), StateError, ["layers.dense", "[3]"]),
    "groups that do not divide": (
        lambda: flow.layers.conv2d(torch.ones(1, 3, 4, 4), 4, groups=2), StateError, ["groups=2", "3 channels"],
    ),
    "an axis beyond": (
        lambda: flow.layers.batch_normalization(torch.ones(2, 3), axis=2), StateError, ["axis=2", "[2, 3]"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_told_with_what_was_expected(case: str):
    body, kind, said = MISTAKES[case]
    with pytest.raises(kind) as error:
        rehearse(body)
    assert [text for text in said if text not in str(error.value)] == []
    assert f"{__file__}:" in str(error.value)  # the line


def test_a_variable_whose_layout_does_not_fit_is_not_made():
    with pytest.raises(LayoutError):
        rehearse(lambda: variable(distribute=flow.distribute.split(2)))
    assert REGISTRY.names() == ()
    assert dict(REGISTRY.named_parameters()) == {}


@pytest.mark.parametrize("call", [variable, lambda: flow.layers.dense(torch.ones(2, 2), 3)])
def test_outside_of_a_job_function_is_an_error(call: Callable[[], Any]):
    with pytest.raises(CallError, match=r"outside of a job function[^@]*@flow\.global_function"):
        call()


def test_a_variable_that_the_first_call_did_not_make_is_an_error():
    with pytest.raises(StateError, match="'v' was not there at this job's first call"):
        play(RehearsalRecord("job"), variable)


# -- layers ----------------------------------------------------------------------------------------


def layer(make: Callable[..., Tensor], x: Tensor, training: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    """A layer's output and its variables."""
    with torch.set_grad_enabled(training):
        before = rehearse(make, x)
        values = {n: v for n, v in flow.get_all_variables().items() if n in before.variables}
        return play(before, make, x), values


def test_dense_is_torchs_linear_and_split_by_output_column():
    x = torch.randn(4, 6)
    out, v = layer(
        lambda x: flow.layers.dense(
            x, 5, activation=flow.nn.relu, kernel_initializer=normal, bias_initializer=normal, name="fc",
            model_distribute=flow.distribute.split(axis=0),
        ),
        x,
    )  # fmt: skip
    assert {n: tuple(t.shape) for n, t in v.items()} == {"fc-weight": (5, 6), "fc-bias": (5,)}
    torch.testing.assert_close(out, F.linear(x, v["fc-weight"], v["fc-bias"]).relu())
    assert [str(REGISTRY.layout(n)) for n in v] == ["S(0)", "S(0)"]
    deep, _ = layer(lambda x: flow.layers.dense(x, 3, use_bias=False, kernel_initializer=normal), torch.randn(2, 3, 6))
    assert deep.shape == (2, 3, 3)


def test_dense_starts_from_zeros_as_in_oneflow():
    out, _ = layer(lambda x: flow.layers.dense(x, 5), torch.randn(4, 6))
    assert not out.any()


def test_layers_without_a_name_are_counted_and_equal_names_share():
    def body(x: Tensor) -> Tensor:
        x = flow.layers.dense(x, 6)
        x = flow.layers.dense(x, 6)
        x = flow.layers.dense(x, 6, name="shared", use_bias=False)
        return flow.layers.dense(x, 6, name="shared", use_bias=False)

    recording = rehearse(body, torch.ones(2, 6))
    names = ("Dense-weight", "Dense-bias", "Dense_1-weight", "Dense_1-bias", "shared-weight")
    assert recording.variables == names
    assert rehearse(body, torch.ones(2, 6), job="evaluation").variables == names


@pytest.mark.parametrize("data_format", ["NCHW", "NHWC"])
def test_conv2d_is_torchs(data_format: str):
    last = data_format == "NHWC"
    x = torch.randn(2, 3, 6, 5)

    def make(x: Tensor) -> Tensor:
        return flow.layers.conv2d(
            x, 4, [3, 2], strides=2, padding="SAME_UPPER", data_format=data_format, name="c", bias_initializer=normal
        )

    out, v = layer(make, x.movedim(1, -1) if last else x)
    assert v["c-weight"].shape == ((4, 3, 2, 3) if last else (4, 3, 3, 2))
    weight = v["c-weight"].movedim(-1, 1) if last else v["c-weight"]
    expected = F.conv2d(F.pad(x, (0, 1, 0, 1)), weight, v["c-bias"], stride=2)
    torch.testing.assert_close(out.movedim(-1, 1) if last else out, expected)


def test_other_windows_and_names_of_variables():
    line, volume = torch.randn(2, 4, 7), torch.randn(1, 2, 4, 4, 4)
    out, v = layer(
        lambda x: flow.layers.conv1d(x, 6, 3, groups=2, use_bias=False, weight_name="kernel", activation=torch.tanh),
        line,
    )
    torch.testing.assert_close(out, F.conv1d(line, v["kernel"], groups=2).tanh())
    out, v = layer(lambda x: flow.layers.conv3d(x, 3, 2), volume)
    torch.testing.assert_close(out, F.conv3d(volume, v["Conv3d-weight"]))
    assert list(v) == ["Conv3d-weight", "Conv3d-bias"]


def test_an_activation_that_wants_a_name_gets_one():
    out, _ = layer(
        lambda x: flow.layers.dense(x, 3, activation=lambda x, name: x + len(name), name="a"), torch.ones(2, 2)
    )
    assert out.tolist() == [[10.0] * 3] * 2  # "activation"


@pytest.mark.parametrize("axis", [1, -1])
def test_batch_normalization_keeps_moving_statistics(axis: int):
    x = torch.randn(8, 3, 4, 4) * 2 + 1
    given = x if axis == 1 else x.movedim(1, -1)
    reference = nn.BatchNorm2d(3, eps=1e-3, momentum=0.1)

    def make(x: Tensor) -> Tensor:
        return flow.layers.batch_normalization(x, axis=axis, momentum=0.9, name="bn")

    out, v = layer(make, given)
    assert list(v) == ["bn-beta", "bn-gamma", "bn-moving_mean", "bn-moving_variance"]
    torch.testing.assert_close(out if axis == 1 else out.movedim(-1, 1), reference(x))
    torch.testing.assert_close(REGISTRY["bn-moving_mean"], reference.running_mean)
    torch.testing.assert_close(REGISTRY["bn-moving_variance"], reference.running_var)
    out, v = layer(make, given, training=False)
    torch.testing.assert_close(out if axis == 1 else out.movedim(-1, 1), reference.eval()(x))
    assert REGISTRY["bn-moving_mean"].equal(v["bn-moving_mean"])


def test_batch_normalization_without_scale_and_center_and_with_relu():
    x = torch.randn(8, 3)
    out, v = layer(
        lambda x: flow.layers.batch_normalization_add_relu(x, x, axis=1, center=False, scale=False, name="bn"), x
    )
    assert list(v) == ["bn-moving_mean", "bn-moving_variance"]
    torch.testing.assert_close(out, (F.batch_norm(x, None, None, training=True, eps=1e-3) + x).relu())
    out, v = layer(lambda x: flow.layers.batch_normalization_relu(x, trainable=False, name="frozen"), x)
    torch.testing.assert_close(out, (x / (1 + 1e-3) ** 0.5).relu())  # moving statistics, which stay
    assert not any(REGISTRY[n].requires_grad for n in v)


def test_layer_norm_is_torchs():
    x = torch.randn(4, 3, 5)
    out, v = layer(lambda x: flow.layers.layer_norm(x, begin_norm_axis=2), x)
    assert {n: tuple(t.shape) for n, t in v.items()} == {"LayerNorm-beta": (5,), "LayerNorm-gamma": (5,)}
    torch.testing.assert_close(out, F.layer_norm(x, [5]))
    out, _ = layer(lambda x: flow.layers.layer_norm(x, center=False, name="all"), x)
    torch.testing.assert_close(out, F.layer_norm(x, [3, 5]))
