"""Annotations of job functions: what arguments have to be, and the form of results."""

from __future__ import annotations

import threading
from typing import Any, Dict, List, Tuple  # noqa: UP035 (as scripts of the time write it)

import numpy as np
import pytest
import torch

import actorflow as flow
import actorflow.typing as tp
from actorflow.classic.annotations import in_annotated_form, job_annotations, per_device_lists
from actorflow.classic.callbacks import CallbackQueue
from actorflow.classic.logical_views import CONSISTENT, MIRRORED
from actorflow_compiler.core.errors import CallError


def taken(placeholder: Any, value: Any, devices: int = 2) -> Any:
    """What becomes of one argument of a job."""

    def job(x: Any) -> None: ...

    job.__annotations__ = {"x": placeholder}
    view = MIRRORED if "ListNumpy" in str(placeholder) else CONSISTENT
    return job_annotations(job, "job", view).convert((value,), {}, devices).args[0]


IMAGES = tp.Numpy.Placeholder((4, 2), dtype=torch.float)
LABELS = tp.Numpy.Placeholder((4,), dtype=torch.int32)
BOTH = (LABELS, {"y": IMAGES})


@pytest.mark.parametrize(
    ("placeholder", "value", "dtype"),
    [
        (IMAGES, np.ones((4, 2)), torch.float32),
        (IMAGES, np.ones((2, 4), np.float16).T, torch.float32),
        (IMAGES, torch.ones(4, 2, dtype=torch.bfloat16), torch.float32),
        (IMAGES, np.full((4, 2), np.inf), torch.float32),
        (LABELS, np.arange(4), torch.int32),
        (LABELS, torch.arange(4, dtype=torch.uint8), torch.int32),
        (tp.Numpy.Placeholder((), dtype=torch.bool), np.bool_(True), torch.bool),
    ],
)
def test_numbers_of_one_kind_are_converted_to_the_placeholders_dtype(placeholder: Any, value: Any, dtype: Any) -> None:
    found = taken(placeholder, value)
    assert found.dtype == dtype
    assert found.shape == placeholder.shape
    np.testing.assert_array_equal(found.numpy(), value.float() if isinstance(value, torch.Tensor) else value)


@pytest.mark.parametrize(
    ("placeholder", "value", "said"),
    [
        (IMAGES, np.ones((3, 2)), r"argument x is float64\[3,2\]; tp.Numpy.*\(\(4, 2\).*a shorter last batch"),
        (IMAGES, np.ones((4, 3)), r"float64\[4,3\]; tp.Numpy.*\(\(4, 2\), dtype=torch.float32\) was expected$"),
        (IMAGES, np.ones((4, 2), int), r"int64\[4,2\], which is another kind of number"),
        (IMAGES, np.full((4, 2), 1e300), "whose numbers do not all fit"),
        (LABELS, np.full(4, 2**40), r"int64\[4\], whose numbers do not all fit"),
        (LABELS, np.ones(4), "another kind of number"),
        (LABELS, np.array(["a"] * 4), "array of <U1, of which there are no tensors"),
        (LABELS, [1, 2, 3, 4], "is list; a NumPy array or a tensor was expected"),
        (tp.ListNumpy.Placeholder((2,)), [np.ones(2)], "a list with 1 item; 2 were expected, one for each of"),
        (tp.ListNumpy.Placeholder((2,)), np.ones((2, 2)), r"is float64\[2,2\]; a list with 2 items was expected"),
        (tp.ListNumpy.Placeholder((2,)), [np.ones(2), np.ones(1)], r"item 1 of argument x is float64\[1\]"),
        ((IMAGES, IMAGES), [np.ones((4, 2))], "is list of 1;"),
        ({"a": IMAGES}, {"b": np.ones((4, 2))}, "argument x is dict"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_was_found_and_expected(placeholder: Any, value: Any, said: str) -> None:
    with pytest.raises(CallError, match=said):
        taken(placeholder, value)


def test_arguments_may_be_mixed_nested_and_given_by_name() -> None:
    def job(x: tp.Numpy.Placeholder((2,)), flag: str, pair: BOTH, *more: LABELS) -> None: ...

    forms = job_annotations(job, "job", CONSISTENT)
    y, labels = np.ones((4, 2)), np.arange(4)
    given = forms.convert((np.ones(2), "yes", (labels, {"y": y}), labels), {}, 2)
    assert given.args[1] == "yes"
    dtypes = [given.args[0].dtype, given.args[2][1]["y"].dtype, given.args[3].dtype]
    assert dtypes == [torch.float32, torch.float32, torch.int32]
    assert forms.convert((np.ones(2),), {"pair": [labels, {"y": y}], "flag": 1}, 2).args[1] == 1
    assert forms.convert((), {}, 2).args == ()  # what does not fit the signature is said elsewhere


def test_lists_become_one_tensor_with_an_item_for_each_device() -> None:
    def job(x: tp.ListNumpy.Placeholder((2,)), y: Any) -> tp.ListNumpy: ...

    given = job_annotations(job, "job", MIRRORED).convert(([np.zeros(2), torch.ones(2)], 3), {}, 2)
    assert given.own == {"x"}
    assert torch.equal(given.args[0], torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    assert given.args[1] == 3


def test_a_list_of_arrays_without_a_placeholder_is_refused_in_the_mirrored_view_alone() -> None:
    def job(x: Any) -> None: ...

    arrays = [np.ones(2), np.ones(2)]
    with pytest.raises(CallError, match=r"x is a list of 2 arrays, and has no placeholder; .*tp\.ListNumpy"):
        job_annotations(job, "job", MIRRORED).convert((arrays,), {}, 2)
    assert job_annotations(job, "job", MIRRORED).convert((tuple(arrays),), {}, 2).own == frozenset()
    assert job_annotations(job, "job", CONSISTENT).convert((arrays,), {}, 2).args[0] is arrays


@pytest.mark.parametrize(
    ("shape", "dtype"), [("32", torch.float), ((1.5,), torch.float), (-1, torch.float), (4, torch.float), ((2,), float)]
)
def test_a_placeholder_of_no_shape_or_dtype_is_refused(shape: Any, dtype: Any) -> None:
    with pytest.raises(CallError, match="was found"):
        tp.Numpy.Placeholder(shape, dtype)


FORMS = [
    (tp.Numpy, torch.ones(2), np.ones(2, "f4")),
    (tp.Numpy, 3.5, np.array(3.5)),
    (tp.Numpy, torch.ones(1, dtype=torch.bfloat16), np.ones(1, np.float32)),
    (tp.ListNumpy, [torch.ones(2), torch.zeros(2)], [np.ones(2, "f4"), np.zeros(2, "f4")]),
    (Tuple[tp.Numpy, tp.Numpy], [torch.ones(1), torch.zeros(1)], (np.ones(1, "f4"), np.zeros(1, "f4"))),  # noqa: UP006
    (tuple[tp.Numpy, ...], (torch.ones(1),), (np.ones(1, "f4"),)),
    (List[tp.Numpy], (torch.ones(1),), [np.ones(1, "f4")]),  # noqa: UP006
    (Dict[str, tp.Numpy], {"loss": torch.ones(1)}, {"loss": np.ones(1, "f4")}),  # noqa: UP006
    (tuple[tp.Numpy, int], (torch.ones(1), 3), (np.ones(1, "f4"), 3)),
]


@pytest.mark.parametrize(("annotation", "value", "expected"), FORMS)
def test_the_annotation_decides_the_form_of_the_result(annotation: Any, value: Any, expected: Any) -> None:
    found = in_annotated_form(annotation, value, "job")
    assert type(found) is type(expected)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("annotation", "value", "said"),
    [
        (tp.Numpy, None, "the result is NoneType and annotated as tp.Numpy; a tensor was expected"),
        (tp.Numpy, (torch.ones(1),), "the result is tuple"),
        (tuple[tp.Numpy, tp.Numpy], (torch.ones(1),), "the result is tuple of 1, and is annotated as"),
        (tuple[tp.Numpy, tp.Numpy], (torch.ones(1), "a"), r"the result\[1\] is str"),
        (dict[str, tp.Numpy], torch.ones(1), "the result is Tensor, and is annotated as dict"),
    ],
)
def test_a_result_that_is_not_what_the_annotation_says_is_an_error(annotation: Any, value: Any, said: str) -> None:
    with pytest.raises(CallError, match=said):
        in_annotated_form(annotation, value, "job")


def test_mirrored_results_are_lists_wherever_there_was_a_tensor() -> None:
    found = per_device_lists({"loss": torch.tensor([1.0, 2.0]), "n": (3, [torch.zeros(2, 1)])})
    assert found == {"loss": [1.0, 2.0], "n": (3, [[torch.zeros(1), torch.zeros(1)]])}


def test_the_view_and_the_annotations_have_to_go_together() -> None:
    def consistent(x: tp.Numpy.Placeholder((2,))) -> None: ...
    def listed() -> tp.Callback[tp.ListNumpy]: ...
    def whole() -> Tuple[tp.Numpy, tp.Numpy]: ...  # noqa: UP006

    with pytest.raises(CallError, match=r"mirrored view, and argument x is tp.Numpy.*ListNumpy.Placeholder was exp"):
        job_annotations(consistent, "job", MIRRORED)
    with pytest.raises(CallError, match=r"mirrored view, and its result is tp.Numpy; tp.ListNumpy was expected"):
        job_annotations(whole, "job", MIRRORED)
    with pytest.raises(CallError, match=r"consistent view, and its result is tp.ListNumpy.*mirrored_view\(\)"):
        job_annotations(listed, "job", CONSISTENT)


def test_annotations_that_are_texts_are_read_where_the_function_is() -> None:
    size = 3

    def job(x: tp.Numpy.Placeholder((size,))) -> tp.Numpy:
        return x * size

    assert isinstance(job.__annotations__["x"], str)
    forms = job_annotations(job, "job", CONSISTENT)
    assert forms.placeholders["x"].shape == (3,)
    assert forms.result is tp.Numpy

    def unknown(x: tp.Numpy.Placeholder((nowhere,)), y: also_nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(CallError, match=r"the annotation .*nowhere.* of x was found, which cannot be read"):
        job_annotations(unknown, "job", CONSISTENT)


def test_annotations_of_other_kinds_change_nothing() -> None:
    def job(x: torch.Tensor, y: nowhere, z: int | None = None) -> torch.Tensor | None: ...  # type: ignore[name-defined]  # noqa: F821

    assert job_annotations(job, "job", CONSISTENT).plain
    assert job_annotations(job, "job", MIRRORED).plain
    value = torch.ones(1)
    assert in_annotated_form(None, value, "job") is value


def test_callbacks_are_called_once_in_turn_on_one_thread() -> None:
    callbacks, found = CallbackQueue(), []
    go = threading.Event()
    callbacks.add(lambda r: found.append((r, threading.current_thread())), lambda: go.wait(100))
    callbacks.add(lambda r: found.append((r, threading.current_thread())), lambda: 2)
    assert found == []
    go.set()
    callbacks.finish()
    assert [result for result, _ in found] == [True, 2]
    assert len({thread for _, thread in found} - {threading.main_thread()}) == 1


def test_what_a_callback_raises_comes_out_at_the_next_chance() -> None:
    callbacks = CallbackQueue()
    callbacks.add(lambda _: 1 / 0, lambda: None)
    with pytest.raises(ZeroDivisionError):
        callbacks.finish()
    callbacks.finish()
    found: list[int] = []
    callbacks.add(found.append, lambda: 3)
    callbacks.finish()
    assert found == [3]


def test_function_config_takes_what_it_knows_and_names_it_where_it_is_asked_for_more() -> None:
    config = flow.function_config()
    config.default_logical_view(flow.scope.mirrored_view())
    config.default_data_type(torch.float64)
    config.default_placement_scope(flow.scope.placement("cpu", "0:0"))
    assert (config.view, config.dtype, config.placed.placement) == (MIRRORED, torch.float64, flow.placement("cpu", [0]))
    with pytest.raises(CallError, match=r"default_logical_vew was found.*there are default_data_type, .*did you mean"):
        config.default_logical_vew(flow.scope.consistent_view())
    with pytest.raises(CallError, match=r"use torch\.autocast"):
        config.enable_auto_mixed_precision(True)
    with pytest.raises(CallError, match="no setting here"):
        config.enable_inplace = True
    with pytest.raises(CallError, match=r"a call was expected: default_data_type\(…\)"):
        config.default_data_type = torch.float
    assert not hasattr(config, "use_xla_jit")
    for setting, value in (("logical_view", "mirrored"), ("placement_scope", "0:0"), ("data_type", torch.int32)):
        with pytest.raises(CallError, match=rf"default_{setting}: .* was found"):
            getattr(config, f"default_{setting}")(value)


def test_what_the_mirrored_view_has_not_is_refused_when_the_job_is_made() -> None:
    config = flow.function_config()
    config.default_logical_view(flow.scope.mirrored_view())
    for option, value in (("micro_batches", 2), ("parallel", "tensor"), ("memory_budget", "1GB"), ("schedule", "1f1b")):
        with pytest.raises(CallError, match=f"{option}={value!r} was found; .*data parallelism only"):
            flow.global_function("train", config, **{option: value})(lambda x: x)
