"""What a step was compiled with is let go when its plan is installed, and each rank has the parts of the plan alone."""

from __future__ import annotations

import importlib
import json
import subprocess
from typing import Any

import pytest

import warm

OF_COMPILING = (  # what passes make and hand on, and torch's own
    "actorflow.session.compile_request.CapturedStep",
    "actorflow_compiler.boxing.routes.BoxCopy",
    "actorflow_compiler.boxing.routes.Hop",
    "actorflow_compiler.capture.from_fx.Capture",
    "actorflow_compiler.capture.request.StepRequest",
    "actorflow_compiler.cutting.lowered_step.LoweredStep",
    "actorflow_compiler.infer.problem.Problem",
    "actorflow_compiler.plan.variant.Variant",
    "actorflow_scheduler.iteration_graph.IterationGraph",
    "torch.fx.graph.Graph",
    "torch.fx.graph_module.GraphModule",
    "torch.fx.node.Node",
)
WEIGHTS = (192 * 64 * 4, 192 * 64 * 2)  # bytes of a block's first weight, whole or half of it
LAYOUTS = {  # name → (ranks, options of the job, lines before it, weights of that size on each rank)
    "columns": (2, 'parallel="tensor"', "", 2),
    "blocks": (4, 'parallel={"data": 2, "tensor": 2}', "", 2),
    "stages": (2, "micro_batches=2", "flow.place(model, stages=2)", 1),
}

SCRIPT = """
import gc, json, os, sys
from collections import Counter
import torch
import torch.nn.functional as F
import actorflow as flow
from actorflow.session.process import current

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mixed = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.mixed(x).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

torch.manual_seed(0)
WIDTH = 64
model = torch.nn.Sequential(Block(), Block())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)

PLACED

@flow.global_function(type="train", OPTIONS)
def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

losses = [float(step(torch.ones(4, 6, WIDTH))) for _ in range(2)]
current().worker.wait_all()  # the loss is there before the optimizer is done
gc.collect()
objects = [one for one in gc.get_objects() if isinstance(type(one).__module__, str)]
kinds = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in objects)
storages = {}  # that hold something, by where they are
for one in objects:
    if isinstance(one, torch.Tensor) and one.device.type == "cpu" and not hasattr(one, "name_in_plan"):
        kept = one.untyped_storage()
        storages[kept.data_ptr()] = kept.nbytes()
rank = int(os.environ["RANK"])
found = {"kinds": kinds, "storages": list(storages.values()), "losses": losses}
with open(os.path.join(FOLDER, f"{rank}.json"), "w") as file:
    json.dump(found, file)
"""


OTHERS = [pytest.param(layout, marks=pytest.mark.slow) for layout in ("columns", "blocks")]


@pytest.fixture(scope="module", params=["stages", *OTHERS])
def left(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    """The name of a layout, and what each of its ranks holds after two calls of a step."""
    ranks, options, placed, _ = LAYOUTS[request.param]
    folder = tmp_path_factory.mktemp("left")
    script = folder / "train.py"
    text = SCRIPT.replace("FOLDER", repr(str(folder))).replace("OPTIONS", options).replace("PLACED", placed)
    script.write_text(text)
    command = [warm.python(), "-m", "actorflow", "run", str(script), "--devices", str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert all(one["losses"][1] < one["losses"][0] for one in found)
    return request.param, found


Left = tuple[str, list[dict[str, Any]]]


@pytest.mark.slow
def test_no_graph_and_nothing_else_of_what_passes_hand_on_is_alive(left: Left) -> None:
    for kinds in (one["kinds"] for one in left[1]):
        assert kinds["actorflow_compiler.plan.plan.Plan"]
        assert not {name: kinds[name] for name in OF_COMPILING if name in kinds}


def test_what_passes_hand_on_has_these_names() -> None:
    for name in OF_COMPILING:
        module, _, kind = name.rpartition(".")
        made = getattr(importlib.import_module(module), kind)
        assert f"{made.__module__}.{made.__qualname__}" == name


def test_each_rank_holds_its_weights_and_what_adam_keeps_of_them_once(left: Left) -> None:
    name, found = left
    for storages in (one["storages"] for one in found):
        assert sum(size in WEIGHTS for size in storages) == 3 * LAYOUTS[name][3]
