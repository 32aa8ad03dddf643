"""Checkpoints of first-generation jobs: what is loaded goes on as what was saved did, here and in a fresh process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import actorflow as flow
from actorflow.classic.registry import REGISTRY
from actorflow.classic.variables import RehearsalRecord
from actorflow_compiler.core.errors import StateError
from classic.rehearsed import play, rehearse

pytestmark = pytest.mark.usefixtures("forget")
X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


def body(x: Tensor) -> Tensor:
    initializer = flow.truncated_normal(0.5)
    x = flow.layers.batch_normalization(x, name="norm")
    loss = flow.math.square(flow.layers.dense(x, 3, kernel_initializer=initializer, name="fc") - 1)
    schedule = flow.optimizer.CosineScheduler(0.1, 8, warmup=flow.optimizer.warmup.linear(2, 0.1))
    flow.optimizer.AdamW(schedule, weight_decay=0.01).minimize(loss)
    return loss.mean()


def train(recording: RehearsalRecord, steps: int) -> list[float]:
    return [play(recording, body, X).item() for _ in range(steps)]


def test_training_goes_on_from_a_checkpoint_as_it_went_on(tmp_path: Path):
    recording = rehearse(body, X, job="train")
    train(recording, 3)
    flow.checkpoint.save(tmp_path / "a" / "b")
    expected = train(recording, 3)
    assert train(recording, 1) != expected[:1]
    flow.checkpoint.load(tmp_path / "a" / "b")
    assert train(recording, 3) == expected
    names = {".actorflow-lock", "manifest.json", "rank-00000.safetensors"}
    assert {path.name for path in (tmp_path / "a" / "b").iterdir()} == names


def test_a_fresh_process_loads_before_its_first_call(tmp_path: Path, forget: Callable[[], None]):
    recording = rehearse(body, X, job="train")
    train(recording, 3)
    flow.checkpoint.save(str(tmp_path))
    expected = train(recording, 3)
    forget()
    flow.checkpoint.load(str(tmp_path))
    flow.checkpoint.save(tmp_path / "again")  # nothing is made yet, and nothing is lost
    again = rehearse(body, X, job="train")
    assert again.optimizers[0].steps == 3
    assert train(again, 3) == expected
    forget()
    flow.checkpoint.load(tmp_path / "again")
    assert train(rehearse(body, X, job="train"), 3) == expected


def test_the_older_class_does_the_same(tmp_path: Path):
    recording = rehearse(body, X, job="train")
    check_point = flow.train.CheckPoint()
    check_point.init()
    check_point.save(str(tmp_path))
    expected = train(recording, 2)
    check_point.load(str(tmp_path))
    assert train(recording, 2) == expected


def test_jobs_of_one_name_keep_apart(tmp_path: Path, forget: Callable[[], None]):
    one, two = rehearse(body, X, job="train"), rehearse(body, X, job="train")
    train(one, 1)
    train(two, 3)
    flow.checkpoint.save(tmp_path)
    expected = train(two, 2)
    forget()
    flow.checkpoint.load(tmp_path)
    one, two = rehearse(body, X, job="train"), rehearse(body, X, job="train")
    assert (one.optimizers[0].steps, two.optimizers[0].steps) == (1, 3)
    assert train(two, 2) == expected


def test_variables_are_got_and_given_by_name(tmp_path: Path, forget: Callable[[], None]):
    recording = rehearse(body, X, job="train")
    train(recording, 1)
    flow.checkpoint.save(tmp_path)
    values = flow.checkpoint.get(tmp_path)
    assert list(values) == [
        "norm-beta",
        "norm-gamma",
        "norm-moving_mean",
        "norm-moving_variance",
        "fc-weight",
        "fc-bias",
    ]
    now = flow.get_all_variables()
    assert all(values[name].equal(now[name]) for name in values)
    train(recording, 1)
    assert not values["fc-weight"].equal(flow.get_all_variables()["fc-weight"])  # it is a copy
    flow.load_variables({"fc-bias": np.full(3, 7.0), "fc-weight": torch.zeros(2, 2), "later": torch.ones(1)})
    assert REGISTRY["fc-bias"].tolist() == [7.0] * 3
    assert REGISTRY["fc-weight"].any()  # of another shape: left out
    with pytest.raises(StateError, match=r"shape \[2, 2\] was found for variable 'fc-weight'; \[3, 4\] was expected"):
        flow.load_variables({"fc-bias": np.zeros(3), "fc-weight": torch.zeros(2, 2)}, ignore_mismatch=False)
    assert REGISTRY["fc-bias"].tolist() == [7.0] * 3  # nothing was written


def test_a_variable_that_the_checkpoint_has_not_keeps_its_value(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    flow.checkpoint.save(tmp_path)
    recording = rehearse(body, X)
    before = flow.get_all_variables()["fc-weight"]
    flow.checkpoint.load(tmp_path)
    assert flow.get_all_variables()["fc-weight"].equal(before)
    assert "has no norm-beta, norm-gamma" in capfd.readouterr().err
    assert recording.variables


def test_a_checkpoint_of_another_network_changes_nothing(tmp_path: Path, forget: Callable[[], None]):
    rehearse(body, X)
    flow.checkpoint.save(tmp_path)
    forget()

    def wider(x: Tensor) -> Tensor:
        flow.layers.batch_normalization(x, name="norm")
        return flow.layers.dense(x, 5, name="fc")

    rehearse(wider, X)
    flow.load_variables({"norm-beta": torch.full((4,), 3.0)})
    with pytest.raises(StateError, match=rf"shape \[3, 4\] was found for variable 'fc-weight'[^@]*{__file__}:"):
        flow.checkpoint.load(tmp_path)
    assert flow.get_all_variables()["norm-beta"].tolist() == [3.0] * 4
    forget()
    flow.checkpoint.load(tmp_path)
    with pytest.raises(StateError, match=r"variable 'fc-weight' has shape \[5, 4\][^@]*shape \[3, 4\]"):
        rehearse(wider, X)


def test_a_folder_without_a_checkpoint_is_told(tmp_path: Path):
    with pytest.raises(StateError, match="holds no checkpoint: there is no such folder"):
        flow.checkpoint.load(tmp_path / "missing")
    (tmp_path / "other.txt").write_text("")
    with pytest.raises(StateError, match=r"holds no checkpoint: there are other\.txt"):
        flow.checkpoint.get(tmp_path)
    (tmp_path / "manifest.json").write_bytes(b"nonsense")
    with pytest.raises(StateError, match=r"manifest\.json is damaged"):
        flow.checkpoint.load(tmp_path)


def test_a_checkpoint_of_named_objects_is_no_first_generation_one(tmp_path: Path):
    flow.checkpoint.save(tmp_path, weights=torch.ones(3), wait=True)
    with pytest.raises(StateError, match=r"has weights; one of first-generation jobs was expected"):
        flow.checkpoint.load(tmp_path)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StateError, match=r"cannot be written: .*File exists"):
        flow.checkpoint.save(tmp_path / "file")
