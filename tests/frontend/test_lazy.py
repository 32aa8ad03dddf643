"""Results: tensors that know their shape at once and wait for their value when it is used."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from actorflow.standins.lazy_tensor import LazyTensor, TensorFuture

CPU = torch.device("cpu")


def result(value: Tensor) -> LazyTensor:
    return LazyTensor.of(TensorFuture(lambda: value), tuple(value.shape), value.dtype, CPU)


class Later:
    """A value that somebody sets later."""

    def __init__(self) -> None:
        self.there = threading.Event()
        self.asked = 0

    def __call__(self) -> Tensor:
        self.asked += 1
        assert self.there.wait(100)
        return torch.tensor([1.0, 2.0])


def test_shape_dtype_and_device_are_known_without_waiting():
    later = Later()
    r = LazyTensor.of(TensorFuture(later), (2,), torch.float32, CPU)
    assert (r.shape, r.dtype, r.device, r.ndim, r.numel(), len(r), r.size(0)) == ((2,), torch.float32, CPU, 1, 2, 2, 2)
    assert r.is_floating_point()
    assert not r.requires_grad
    assert isinstance(r, Tensor)
    assert later.asked == 0


def test_a_use_waits_for_the_value_which_is_fetched_once():
    later = Later()
    r = LazyTensor.of(TensorFuture(later), (2,), torch.float32, CPU)
    threading.Timer(0.05, later.there.set).start()
    assert r.sum().item() == 3
    assert r.tolist() == [1, 2]
    assert later.asked == 1


USES: dict[str, Callable[[Tensor], object]] = {
    "float": lambda r: float(r) == 2.5,
    "int": lambda r: int(r) == 2,
    "bool": bool,
    "item": lambda r: r.item() == 2.5,
    "format": lambda r: f"{r:.1f}" == "2.5",
    "str": lambda r: "2.5" in str(r),
    "repr": lambda r: "2.5" in repr(r),
    "greater": lambda r: r > 2,
    "less": lambda r: r < 3,
    "equal": lambda r: r == 2.5,
    "divide, from the right": lambda r: 1 / r == 0.4,
    "isclose": lambda r: math.isclose(r, 2.5),
    "numpy": lambda r: r.numpy() == 2.5,
    "asarray": lambda r: np.asarray(r) == 2.5,
    "float32": lambda r: np.float32(r) == 2.5,
    "sum": lambda r: sum([r, r]) == 5,
    "stack": lambda r: torch.stack([r, r]).shape == (2,),
    "max": lambda r: max(r, 3) == 3,
    "pickle": lambda r: pickle.loads(pickle.dumps(r)) == 2.5,
    "deepcopy": lambda r: copy.deepcopy(r) == 2.5,
    "detach": lambda r: r.detach() == 2.5,
}


@pytest.mark.parametrize("use", USES.values(), ids=list(USES))
def test_a_number_behaves_as_a_tensor_does(use: Callable[[Tensor], object]):
    assert use(result(torch.tensor(2.5)))


def test_what_comes_out_of_an_operation_is_a_plain_tensor():
    r = result(torch.arange(6.0).reshape(2, 3))
    outs = [
        r + 1,
        1 - r,
        r[0],
        r.detach(),
        r.clone(),
        torch.cat([r, r]),
        r @ r.T,
        *r,
        copy.copy(r),
        r.to(torch.float64),
    ]
    assert all(type(out) is Tensor for out in outs)


def test_a_result_can_be_saved():
    file = io.BytesIO()
    torch.save({"loss": result(torch.tensor(3.0))}, file)
    file.seek(0)
    assert torch.load(file)["loss"] == 3


def test_what_ended_the_run_is_raised_at_the_reader():
    def fail() -> Tensor:
        raise RuntimeError("rank 1 is gone")

    r = LazyTensor.of(TensorFuture(fail), (), torch.float32, CPU)
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        float(r)
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        print(r)


def test_a_dropped_handle_is_reported_at_once_and_leaves_nothing_behind():
    dropped: list[int] = []
    value = torch.ones(3)
    promise = TensorFuture(lambda: value)
    seen = weakref.ref(promise)
    r = LazyTensor.of(promise, (3,), torch.float32, CPU, lambda: dropped.append(1))
    r.sum()
    gc.disable()
    try:
        del r, promise
        assert dropped == [1]
        assert seen() is None  # without the garbage collector: there is no cycle
    finally:
        gc.enable()


def test_a_fetched_value_lets_its_source_go():
    class Source:
        def __call__(self) -> Tensor:
            return torch.ones(1)

    source = Source()
    gone = weakref.ref(source)
    promise = TensorFuture(source)
    del source
    promise.settle()
    assert gone() is None
    assert promise.value() == 1
