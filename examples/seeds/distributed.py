"""The same program on several machines: one function more, which says where they are.

Started by hand on each node with ``python distributed.py``; the result is shown on node 0, the master.  Without
addresses there is one node, this one.

    python distributed.py 192.168.1.12 192.168.1.11
"""

import sys

import numpy as np
from data import load_data

import actorflow as flow
import actorflow.typing as tp

BATCH_SIZE = 100
DEVICE_NUM = 2  # of each node


def mlp(data):
    initializer = flow.truncated_normal(0.1)
    reshape = flow.reshape(data, [data.shape[0], -1])
    hidden = flow.layers.dense(reshape, 512, activation=flow.nn.relu, kernel_initializer=initializer, name="dense1")
    return flow.layers.dense(hidden, 10, kernel_initializer=initializer, name="dense2")


def config_distributed(addresses):
    # number of devices used in each node
    flow.config.gpu_device_num(DEVICE_NUM)
    # communication channel
    flow.env.ctrl_port(9988)
    # node configuration
    if addresses:
        nodes = [{"addr": address} for address in addresses]
        flow.env.machine(nodes)


@flow.global_function(type="train")
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
    config_distributed(sys.argv[1:])
    train_images, train_labels = load_data(BATCH_SIZE)
    for i, (images, labels) in enumerate(zip(train_images, train_labels, strict=True)):
        loss = train_job(images, labels)
        print(f"{i} loss: {np.mean(loss):.6f}")
