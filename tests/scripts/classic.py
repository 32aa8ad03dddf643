"""Train the same network by four first-generation jobs on the same batches, and print the results as JSON."""

import json
from queue import SimpleQueue

import numpy as np

import actorflow as flow
import actorflow.typing as tp

HALF, SIZE, STEPS = 8, 16, 20


def config(view, scope=None):
    settings = flow.function_config()
    settings.default_logical_view(view)
    settings.default_data_type(flow.float)
    if scope is not None:
        settings.default_placement_scope(scope)
    return settings


MIRRORED, CONSISTENT = config(flow.scope.mirrored_view()), config(flow.scope.consistent_view())


def net(x, name, split=None):
    x = flow.reshape(x, [x.shape[0], -1])
    x = flow.layers.dense(x, 16, activation=flow.nn.relu, name=f"{name}-hidden", model_distribute=split)
    return flow.layers.dense(x, 10, name=f"{name}-out")


def minimized(loss):
    flow.optimizer.SGD(flow.optimizer.PiecewiseConstantScheduler([9], [0.2, 0.1]), momentum=0.9).minimize(loss)
    return loss


def loss_of(x, y, name, split=None):
    return minimized(flow.nn.sparse_softmax_cross_entropy_with_logits(y, net(x, name, split)))


@flow.global_function("train", MIRRORED)
def mirrored(
    x: tp.ListNumpy.Placeholder((HALF, 1, 8, 8), dtype=flow.float),
    y: tp.ListNumpy.Placeholder((HALF,), dtype=flow.int32),
) -> tp.ListNumpy:
    return loss_of(x, y, "mirrored")


@flow.global_function(type="train", function_config=CONSISTENT)
def consistent(
    x: tp.Numpy.Placeholder((SIZE, 1, 8, 8), dtype=flow.float),
    y: tp.Numpy.Placeholder((SIZE,), dtype=flow.int32),
) -> tp.Numpy:
    return loss_of(x, y, "consistent")


@flow.global_function(type="train")
def hybrid(
    x: tp.Numpy.Placeholder((SIZE, 1, 8, 8), dtype=flow.float),
    y: tp.Numpy.Placeholder((SIZE,), dtype=flow.int32),
) -> tp.Numpy:
    return loss_of(x, y, "hybrid", flow.distribute.split(axis=0))


@flow.global_function(type="train")
def pipeline(
    x: tp.Numpy.Placeholder((SIZE, 1, 8, 8), dtype=flow.float),
    y: tp.Numpy.Placeholder((SIZE,), dtype=flow.int32),
) -> tp.Numpy:
    with flow.scope.placement("gpu", "0:0"):
        x = flow.reshape(flow.unpack(x, 4), [SIZE, -1])
        hidden = flow.layers.dense(x, 16, activation=flow.nn.relu, name="pipeline-hidden")
    with flow.scope.placement("gpu", "0:1"):
        logits = flow.layers.dense(hidden, 10, name="pipeline-out")
        loss = flow.nn.sparse_softmax_cross_entropy_with_logits(flow.unpack(y, 4), logits)
    return minimized(flow.pack(loss, 4))


@flow.global_function(type="predict")
def predict(x: tp.Numpy.Placeholder((SIZE, 1, 8, 8))) -> tp.Callback[tp.Numpy]:
    return net(x, "mirrored") - net(x, "consistent")


@flow.global_function("predict", MIRRORED)
def split_and_mirrored(x: tp.ListNumpy.Placeholder((HALF, 1, 8, 8))) -> tp.ListNumpy:
    return net(x, "hybrid", flow.distribute.split(axis=0))


@flow.global_function("predict", config(flow.scope.consistent_view(), flow.scope.placement("gpu", ["0:1"])))
def on_the_second(x: tp.Numpy.Placeholder((SIZE,))) -> tp.Numpy:
    return x * 2


@flow.global_function("predict", config(flow.scope.consistent_view(), flow.scope.placement("gpu", "1:0")))
def on_another_node(x: tp.Numpy.Placeholder((SIZE,))) -> tp.Numpy:
    return x * 2


def batch(number):
    random = np.random.default_rng(number)
    return random.random((SIZE, 1, 8, 8)), random.integers(0, 10, SIZE)


def start():
    """What all networks begin with."""
    random = np.random.default_rng(1)
    shapes = {"hidden-weight": (16, 64), "hidden-bias": (16,), "out-weight": (10, 16), "out-bias": (10,)}
    return {name: random.normal(scale=0.1, size=shape).astype(np.float32) for name, shape in shapes.items()}


def refused(call, *arguments):
    try:
        call(*arguments)
    except flow.ActorflowError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def main():
    names = ("mirrored", "consistent", "hybrid", "pipeline")
    flow.load_variables({f"{n}-{k}": v for n in names for k, v in start().items()})
    losses = {name: [] for name in names}
    differences = SimpleQueue()
    for number in range(STEPS):
        x, y = batch(number)
        losses["mirrored"].append([loss.tolist() for loss in mirrored(np.split(x, 2), np.split(y, 2))])
        for job in (consistent, hybrid, pipeline):
            losses[job.name].append(job(x, y).tolist())
        predict(x)(lambda found: differences.put(float(np.abs(found).max())))
    halves = np.split(x, 2)
    found = {
        "losses": losses,
        "differences": [differences.get(timeout=100) for _ in range(STEPS)],
        "hybrid": [str(v.sbp[0]) for v in hybrid.plan.variables if v.name == "variables.hybrid-hidden-weight"],
        "pipeline": pipeline.plan.summary.stages,
        "second": on_the_second(np.ones(SIZE)).tolist(),
        "errors": [
            refused(split_and_mirrored, halves),
            refused(mirrored, halves[:1], np.split(y, 2)),
            refused(on_another_node, np.ones(SIZE)),
        ],
    }
    if flow.env.rank() == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
