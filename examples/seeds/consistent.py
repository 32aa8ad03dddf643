"""Consistent view on two devices: the program of one device, but for the number of devices."""

import numpy as np
from data import load_data

import actorflow as flow
import actorflow.typing as tp

BATCH_SIZE = 100


def mlp(data):
    initializer = flow.truncated_normal(0.1)
    reshape = flow.reshape(data, [data.shape[0], -1])
    hidden = flow.layers.dense(reshape, 512, activation=flow.nn.relu, kernel_initializer=initializer, name="dense1")
    return flow.layers.dense(hidden, 10, kernel_initializer=initializer, name="dense2")


config = flow.function_config()
config.default_data_type(flow.float)
config.default_logical_view(flow.scope.consistent_view())


@flow.global_function(type="train", function_config=config)
def train_job(
    images: tp.Numpy.Placeholder((BATCH_SIZE, 1, 28, 28), dtype=flow.float),
    labels: tp.Numpy.Placeholder((BATCH_SIZE,), dtype=flow.int32),
) -> tp.Numpy:
    logits = mlp(images)
    loss = flow.nn.sparse_softmax_cross_entropy_with_logits(labels, logits, name="softmax_loss")
    lr_scheduler = flow.optimizer.PiecewiseConstantScheduler([], [0.1])
    flow.optimizer.SGD(lr_scheduler, momentum=0).minimize(loss)
    return loss


if __name__ == "__main__":
    flow.config.gpu_device_num(2)
    train_images, train_labels = load_data(BATCH_SIZE)
    for i, (images, labels) in enumerate(zip(train_images, train_labels, strict=True)):
        loss = train_job(images, labels)
        print(f"{i} loss: {np.mean(loss):.6f}")
