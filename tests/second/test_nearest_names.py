"""A name that a public module does not have is answered with the nearest one and its page; Python's ways go on."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

import actorflow as flow
from actorflow.support import nearest_names
from second.launching import environment

ROOT = Path(__file__).parents[2]
MODULES = (
    "", "amp", "autograd", "checkpoint", "comm", "config", "cuda", "data", "distributed", "env", "layers", "linalg",
    "math", "nn", "nn.functional", "nn.graph", "nn.init", "nn.parallel", "nn.utils", "nn.utils.rnn", "optim",
    "optim.lr_scheduler", "optimizer", "optimizer.grad_clipping", "optimizer.warmup", "regularizers", "sbp", "scope",
    "train", "typing", "utils", "utils.data", "utils.data.distributed",
)  # fmt: skip
ANSWERS = {
    "nn.Liner": "the nearest is flow.nn.Linear",
    "nn.linear": "it is flow.nn.functional.linear",
    "nn.Grph": "the nearest is flow.nn.Graph",
    "nn.graph.GraphModul": "the nearest is flow.nn.graph.GraphModule",
    "nn.functional.Relu": "the nearest is flow.nn.functional.relu",
    "sbp.spilt": "the nearest is flow.sbp.split",
    "env.get_ranks": "the nearest is flow.env.get_rank",
    "env.all_reduce": "it is flow.comm.all_reduce",
    "ones_likes": "the nearest is flow.ones_like",
    "Placement": "the nearest is flow.placement",
    "Linear": "it is flow.nn.Linear",
    "get_rank": "it is flow.distributed.get_rank",
    "optim.Adamw": "the nearest is flow.optim.AdamW",
    "utils.data.DataLoder": "the nearest is flow.utils.data.DataLoader",
    "quantize_per_tensor": "it is among the names of torch that are not here: torch.quantize_per_tensor",
    "optim.lr_scheduler.WarmUpLR": "use LinearLR or ConstantLR, then the other schedule, in SequentialLR (docs/",
    "optim.LAMB": "torch has none; AdamW is nearest (docs/oneflow.md says",
    "config.data_port": "transfers use ports that the system chooses",
    "data.packd": "the nearest is flow.data.packed (docs/data.md says",
}


def answer(name: str) -> str:
    *rooms, last = name.split(".")
    module = importlib.import_module(".".join(["actorflow", *rooms]))
    with pytest.raises(AttributeError) as error:
        getattr(module, last)
    assert "Did you mean" not in "".join(traceback.format_exception(error.value))  # one guess, and not Python's
    return str(error.value)


@pytest.mark.parametrize("name", ANSWERS)
def test_a_name_that_is_not_there_is_answered_with_what_is(name: str) -> None:
    assert ANSWERS[name] in answer(name)


def test_what_makes_placements_answers_too() -> None:
    with pytest.raises(AttributeError, match=r"'al': the nearest is flow\.placement\.all \(docs/oneflow"):
        flow.placement.al("cpu")
    assert not hasattr(flow.placement, "al")
    assert isinstance(flow.placement("cpu", [0]), flow.placement)  # type: ignore[arg-type]


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("name", MODULES)
def test_every_public_module_answers_and_python_goes_on_as_ever(name: str) -> None:
    module = importlib.import_module(f"actorflow.{name}" if name else "actorflow")
    with pytest.raises(nearest_names.UnknownName, match=r"no attribute 'zzzzzz'.* says what there is") as error:
        _ = module.zzzzzz
    page = str(error.value).partition("(")[2].partition(" ")[0]
    assert (ROOT / page).is_file()
    assert not hasattr(module, "zzzzzz")
    assert getattr(module, "zzzzzz", 3) == 3
    assert not hasattr(module, "__wrapped__")
    with pytest.raises(ImportError, match="cannot import name 'zzzzzz'"):
        exec(f"from {module.__name__} import zzzzzz")
    known = getattr(module, "__all__", None) or [each for each in vars(module) if not each.startswith("_")]
    assert all(getattr(module, each) is not None or each for each in known)


def test_names_are_looked_for_only_when_the_message_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(nearest_names, "_instead", unwanted)
    assert not hasattr(flow, "ones_likes")


def test_an_error_of_a_name_goes_to_another_process_as_its_message() -> None:
    with pytest.raises(AttributeError) as error:
        _ = flow.ones_likes
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


@pytest.mark.slow
def test_a_name_is_found_where_nothing_has_been_imported() -> None:
    script = "import actorflow as flow\ntry:\n    flow.Linear\nexcept AttributeError as error:\n    print(error)\n"
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=True)
    assert "it is flow.nn.Linear" in done.stdout


@pytest.mark.parametrize("options", [{"placment": 1, "sbp": 1}, {"placement": 1, "spb": 1}, {"placment": 1}])
def test_an_argument_of_a_tensor_that_is_misspelled_is_named(options: dict[str, object]) -> None:
    with pytest.raises(flow.LayoutError, match=r"flow.ones: (placment= was found, and placement|spb= .* and sbp)= was"):
        flow.ones(4, **options)
