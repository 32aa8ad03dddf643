"""What careless steps are told: the user's line and what to do about it, and nothing of torch's insides."""

from __future__ import annotations

import concurrent.futures
import copy
import io
import logging
import pickle
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import actorflow as flow
import warm
from actorflow_compiler.core.errors import CallError, CaptureError
from cluster.runs import Run

Loss = Callable[[nn.Module, Tensor, Tensor], Any]

INSIDES = re.compile(
    r"Could not guard|data-dependent|tlparse|TORCH_LOGS|TORCHDYNAMO|INTERNAL ASSERT|fake_tensor|Fake[A-Z]\w+|"
    r"[EW]\d{4} |SymNode|\bzuf\d|\bu\d\b|unhinted|C\+\+ CapturedTraceback|While executing|"
    r"aten\.[a-z_]+\.default|issues/|file an issue"
)
LOOKS = "looks at the value of a tensor here.*Use torch.where"
SIZE = r"how large a tensor is depends on values here.*torch\.where\(mask, x, 0\)"
ORDER = r"sort goes along the rows that x.* selects.*torch\.where\(\(y > 1\)\[.*\], x, float\('inf'\)\)\.sort\(0\)"
COUNT = LOOKS + r".*count\.clamp\(min=1\)"
SHOWS = "shows a tensor here.*return the tensor"
SAVES = "pickles a tensor here.*after the call"
ARGUMENT = r"changes its argument x in place.*x\.clone\(\) before"


@dataclass(frozen=True)
class Careless:
    """A loss that a job cannot have, and what is to be said of it."""

    loss: Loss
    told: str


CARELESS: dict[str, Careless] = {}


def told(expected: str) -> Callable[[Loss], Loss]:
    """Put a loss on the list."""

    def add(loss: Loss) -> Loss:
        CARELESS[loss.__name__] = Careless(loss, expected)
        return loss

    return add


def entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


@told(ARGUMENT)
def multiplies_an_argument(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    return entropy(model, x, y)


@told(ARGUMENT)
def assigns_to_an_argument(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x[:, 0] = 0
    return entropy(model, x, y)


@told(ARGUMENT)
def clears_a_view_of_an_argument(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x[0].zero_()
    return entropy(model, x, y)


@told(LOOKS)
def item(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = entropy(model, x, y)
    print(loss.item())
    return loss


@told(LOOKS)
def caught_item(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = entropy(model, x, y)
    try:
        return loss * round(loss.item(), 2)
    except Exception:
        return loss


@told(LOOKS)
def numpy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return entropy(model, torch.from_numpy(np.clip(x.numpy(), -1, 1)), y)


@told(LOOKS)
def an_array(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return entropy(model, torch.tensor(np.asarray(x)), y)


@told(LOOKS)
def an_int(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return entropy(model, x, y) + torch.zeros(int(y.max()) + 1).sum()


@told(LOOKS)
def an_if(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = entropy(model, x, y)
    if loss > 0:
        loss = loss * 2
    return loss


@told(LOOKS)
def all_close(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return entropy(model, x, y) if torch.allclose(x, x) else x.sum()


@told(LOOKS)
def a_range(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return sum((model(x).sum() for _ in range(y.max())), torch.zeros(()))


@told(LOOKS)
def a_list(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    print(y.tolist())
    return entropy(model, x, y)


@told(LOOKS)
def a_slice_by_item(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    n = y.max().item()
    return entropy(model, x[:n], y[:n])


@told(LOOKS)
def a_slice_by_tensor(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    n = y.max()
    return entropy(model, x[:n], y[:n])


@told(LOOKS)
def a_range_of_an_item(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return entropy(model, x, y) + torch.arange(y.max().item()).sum()


@told(LOOKS)
def an_index_of_a_list(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return entropy(model, x, y) * [1, 2, 3, 4][y[0]]


@told(LOOKS)
def membership(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return entropy(model, x, y) if 1 in y else x.sum()


@told(LOOKS)
def the_larger(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return sorted([entropy(model, x, y), torch.tensor(0.1)])[1]


@told(SIZE)
def one_hot_without_classes(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), F.one_hot(y).float())


@told(SHOWS)
def an_f_string(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = entropy(model, x, y)
    print(f"{loss}")
    return loss


@told(SHOWS)
def an_f_string_with_a_format(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = entropy(model, x, y)
    print(f"{loss:.3f}")
    return loss


@told(SHOWS)
def a_print(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = entropy(model, x, y)
    print("loss", [loss])
    return loss


@told(SHOWS)
def a_log(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = entropy(model, x, y)
    logging.getLogger("careless").warning("loss %s", loss)
    return loss


@told(SAVES)
def a_pickle(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return entropy(model, pickle.loads(pickle.dumps(x)), y)


@told(SAVES)
def a_checkpoint(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    torch.save(model.state_dict(), io.BytesIO())
    return entropy(model, x, y)


@told(r"\[:2\] takes some of the rows that torch\.nonzero\(y == 1\) selects .*: which ones depends on.*a mask that")
def rows_of_nonzero(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    rows = torch.nonzero(y == 1).squeeze(1)
    return entropy(model, x[rows[:2]], y[rows[:2]])


@told(COUNT)
def rows_of_where(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    rows = torch.where(y == 1)[0]
    return entropy(model, x[rows], y[rows]) if rows.numel() else x.sum()


@told(SIZE)
def unique(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return entropy(model, x, y) * torch.unique(y).shape[0]


@told(SIZE)
def a_loop_over_unique(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return sum((model(x).sum() * u for u in torch.unique(y)), torch.zeros(()))


@told(r"median sorts.*return torch\.where\(\(y > 1\)\[:, None\], model\(x\), float\('nan'\)\)\.nanmedian\(\)")
def masked_select(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.masked_select(model(x), (y > 1)[:, None]).median()


@told(r"topk goes along the rows that out\[mask\] selects.*return torch\.where\(mask, out, float\('-inf'\)\)\.topk")
def a_mask(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out, mask = model(x).amax(1), y > 1
    return out[mask].topk(3).values.sum()


@told(COUNT)
def an_if_something_is_left(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    left = model(x)[y > 1]
    return left.mean() if left.shape[0] > 0 else x.sum()


@told(SIZE)
def repeated_rows(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(torch.repeat_interleave(x, y, dim=0)).sum()


@told(SIZE)
def bins(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, weight=1 / (1 + torch.bincount(y)))


class Marked(Tensor):
    """A tensor of a user's own class."""


@told("makes a tensor of another class here.*plain tensors")
def a_class_of_ones_own(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return entropy(model, x.as_subclass(Marked), y)


@told("asks for the memory of a tensor here.*custom_op")
def an_address(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return entropy(model, x, y) + x.data_ptr()


@told("has another thread work.*on one thread")
def a_thread(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(entropy(model, x, y)))
    thread.start()
    thread.join()
    return found[0]


@told("has another thread work.*on one thread")
def a_pool_of_threads(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return F.cross_entropy(torch.cat([*pool.map(model, x.chunk(2))]), y)


@torch.jit.script
def doubled_if_positive(x: Tensor) -> Tensor:
    if bool(x.sum() > 0):
        x = x * 2
    return x


@told("calls code of torch.jit.script here.*a plain function")
def a_scripted_function(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return entropy(model, doubled_if_positive(x), y)


@told(LOOKS)
def a_trace_in_the_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return entropy(torch.jit.trace(model, x), x, y)


@told("at least two devices, meta and cpu")
def another_device(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return entropy(model, x.to("meta"), y)


@told("whose sizes are values.*lengths that are constants.*a padded tensor and a mask")
def a_nested_tensor(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return entropy(model, x, y) + torch.nested.nested_tensor_from_jagged(x, y.cumsum(0)).values().sum()


@told("RuntimeError: .*same reduction dim.*with these arguments")
def a_wrong_shape(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return entropy(model, x[:, :4], y)


@told("RuntimeError: grad can be implicitly created only for scalar outputs")
def no_reduction(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


@told("ValueError: my own")
def an_error_of_ones_own(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    raise ValueError("my own")


def stepping(loss: Loss, kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD) -> Callable[..., Any]:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = kind(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        found: Tensor = loss(model, x, y)
        found.backward()
        optimizer.step()
        return found

    return step


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 8), torch.randint(0, 4, (8,))


def messages(error: BaseException | None) -> list[str]:
    """What Python shows of an error: its text, and those of the errors behind it."""
    found = []
    while error is not None:
        found.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return found


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("name", CARELESS)
def test_a_careless_step_is_told_its_line_and_what_to_do(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    case = CARELESS[name]
    with pytest.raises((CaptureError, CallError)) as raised:
        flow.global_function(stepping(case.loss))(*batch())
    text = str(raised.value)
    assert re.search(case.told, text, re.DOTALL), text
    line = re.match(r"(\S+test_messages\.py):(\d+)", text)
    assert line is not None, text
    lines = {number for code in (case.loss.__code__, entropy.__code__) for _, _, number in code.co_lines()}
    assert int(line[2]) in lines or name == "no_reduction", text  # whose backward raises
    shown = "\n".join((*messages(raised.value), *capfd.readouterr()))
    assert INSIDES.search(shown) is None, shown


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda model, loss: (part for part in [loss]), "type generator, of which nothing has run"),
        (lambda model, loss: model, "type Sequential"),
        (lambda model, loss: {loss}, "type set"),
        (lambda model, loss: (loss, loss.dtype), "type dtype"),
        (lambda model, loss: lambda: loss, "type function"),
        (lambda model, loss: {loss: 1}, "a dictionary with the key a tensor"),
    ],
)
def test_what_a_step_may_not_return_is_named_with_the_step(value: Callable[..., Any], said: str) -> None:
    model = nn.Sequential(nn.Linear(8, 4))

    @flow.global_function
    def step(x: Tensor, y: Tensor) -> Any:
        return value(model, entropy(model, x, y))

    expected = rf"test_messages\.py:\d+: .*\n  a job returned .*{said}"
    with pytest.raises(CallError, match=expected) as raised:
        step(*batch())
    assert INSIDES.search(str(raised.value)) is None


def test_an_optimizer_that_computes_the_loss_itself_is_refused_where_it_is_called() -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.LBFGS(model.parameters())

    def step(x: Tensor, y: Tensor) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = entropy(model, x, y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    with pytest.raises(CaptureError, match=r"test_messages\.py:\d+: return optimizer\.step\(closure\)\n  LBFGS.*AdamW"):
        flow.global_function(step)(*batch())


def test_an_optimizer_of_sparse_gradients_is_refused_with_its_name() -> None:
    table = nn.Embedding(4, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())

    def step(y: Tensor) -> Tensor:
        loss = table(y).sum()
        loss.backward()
        optimizer.step()
        return loss

    with pytest.raises(CallError, match=r"_messages\.py:\d+: .*\n  optimizer \w+ \(SparseAdam\) cannot step in a job"):
        flow.global_function(step)(batch()[1])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda x: x.to_sparse(), r"a sparse tensor .*pass x\.to_dense\(\)"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), r"a quantized tensor .*pass x\.dequantize\(\)"),
        (lambda x: np.array(["a", "b"]), "an array of <U1; a plan computes with numbers"),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_an_argument_that_is_not_numbers_in_memory_is_refused_by_name(make: Callable[[Tensor], Any], said: str) -> None:
    with pytest.raises(CallError, match=f"step was called with x, {said}"):
        flow.global_function(stepping(entropy))(make(batch()[0]), batch()[1])


def test_copies_in_a_step_are_no_reason_to_warn_of_how_it_is_captured(
    capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return entropy(copy.deepcopy(model), copy.deepcopy(x), y) + entropy(model, x, y)

    assert float(flow.global_function(stepping(loss))(*batch())) > 0
    assert not [str(w.message) for w in recwarn if INSIDES.search(str(w.message))]
    assert INSIDES.search("".join(capfd.readouterr())) is None


def test_an_op_that_torch_refuses_and_the_step_does_without_is_no_part_of_the_plan() -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        try:
            return entropy(model, x[:, :4], y)
        except RuntimeError:
            return entropy(model, x, y)

    torch.manual_seed(1)
    step = stepping(loss)
    torch.manual_seed(1)
    eager = stepping(entropy)
    x, y = batch()
    torch.testing.assert_close(float(flow.global_function(step)(x, y)), eager(x, y).item(), rtol=1e-5, atol=1e-6)


def test_lengths_that_torch_takes_as_numbers_are_values_that_the_step_looks_at() -> None:
    lstm = nn.LSTM(8, 4, batch_first=True)

    def predict(x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return lstm(packed)[0].data

    with pytest.raises(CaptureError, match=rf"packed = nn\.utils.*\n.*{LOOKS}.*lengths decide sizes here"):
        flow.global_function(type="predict")(predict)(torch.randn(4, 5, 8), torch.tensor([5, 3, 2, 1]))


SEVERAL = """
import sys
import torch
from torch import nn
from torch.nn import functional as F
import actorflow as flow

torch.manual_seed(0)
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def job(change):
    @flow.global_function
    def step(x, y, z):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss = change(loss, x, y, z)
        loss.backward()
        optimizer.step()
        return loss
    return step

def wrong_shape(loss, x, y, z):
    return loss + model(x[:, :4]).sum()

CHANGES = {
    "ARGUMENT": lambda loss, x, y, z: loss + z.mul_(2).sum(),
    "ITEM": lambda loss, x, y, z: loss * int(loss.item()),
    "SHOWN": lambda loss, x, y, z: loss * len(f"{loss}"),
    "MASK": lambda loss, x, y, z: loss + x[y > 1].sort(0).values.sum(),
    "IF": lambda loss, x, y, z: loss if loss > 0 else -loss,
    "SHAPE": wrong_shape,
    "GOOD": lambda loss, x, y, z: loss,
}
for name, change in CHANGES.items():
    try:
        print(name, float(job(change)(torch.ones(4, 8), torch.tensor([0, 1, 2, 3]), torch.ones(4))), flush=True)
    except Exception as error:
        print(name, type(error).__name__, error, flush=True)
"""


def test_on_two_ranks_each_is_told_the_line_and_what_to_do(start: Callable[..., Run]) -> None:
    run = start(SEVERAL, "--devices", "2", python=warm.python())
    assert run.process.wait(250) == 0, run.output
    log = (run.script.parent / "logs0" / "rank1.stdout.log").read_text()
    errors = (run.script.parent / "logs0" / "rank1.stderr.log").read_text()
    for text in (run.output, log):
        assert re.search(r"ARGUMENT CaptureError .*script\.py:\d+: .*z\.mul_\(2\).*\n.*argument z in place", text), text
        for name, expected in (("ITEM", LOOKS), ("SHOWN", SHOWS), ("MASK", ORDER), ("IF", LOOKS)):
            assert re.search(rf"{name} CaptureError .*script\.py:\d+: .*\n.*{expected}", text), text
        assert re.search(r"SHAPE CallError .*py:\d+: .*x\[:, :4\].*\n  RuntimeError: .*reduction dim", text), text
        assert re.search(r"GOOD \d", text), text
    assert INSIDES.search(run.output + log + errors) is None
