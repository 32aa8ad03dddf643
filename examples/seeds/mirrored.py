"""Mirrored view: data in lists with one item for each device, as in frameworks that know data parallelism only."""

import numpy as np
from data import load_data

import actorflow as flow
import actorflow.typing as tp

BATCH_SIZE = 100
GPU_NUM = 2
BATCH_SIZE_PER_GPU = BATCH_SIZE // GPU_NUM


def mlp(data):
    initializer = flow.truncated_normal(0.1)
    reshape = flow.reshape(data, [data.shape[0], -1])
    hidden = flow.layers.dense(reshape, 512, activation=flow.nn.relu, kernel_initializer=initializer, name="dense1")
    return flow.layers.dense(hidden, 10, kernel_initializer=initializer, name="dense2")


func_config = flow.function_config()
func_config.default_data_type(flow.float)
func_config.default_logical_view(flow.scope.mirrored_view())


@flow.global_function(type="train", function_config=func_config)
def train_job(
    images: tp.ListNumpy.Placeholder((BATCH_SIZE_PER_GPU, 1, 28, 28), dtype=flow.float),
    labels: tp.ListNumpy.Placeholder((BATCH_SIZE_PER_GPU,), dtype=flow.int32),
) -> tp.ListNumpy:
    logits = mlp(images)
    loss = flow.nn.sparse_softmax_cross_entropy_with_logits(labels, logits, name="softmax_loss")
    lr_scheduler = flow.optimizer.PiecewiseConstantScheduler([], [0.1])
    flow.optimizer.SGD(lr_scheduler, momentum=0).minimize(loss)
    return loss


if __name__ == "__main__":
    flow.config.gpu_device_num(GPU_NUM)
    train_images, train_labels = load_data(BATCH_SIZE)
    for i, (images, labels) in enumerate(zip(train_images, train_labels, strict=True)):
        images1 = images[:BATCH_SIZE_PER_GPU]
        images2 = images[BATCH_SIZE_PER_GPU:]
        labels1 = labels[:BATCH_SIZE_PER_GPU]
        labels2 = labels[BATCH_SIZE_PER_GPU:]
        imgs_list = [images1, images2]
        labels_list = [labels1, labels2]
        loss = train_job(imgs_list, labels_list)
        total_loss = np.array([*loss[0], *loss[1]])
        print(f"{i} loss: {np.mean(total_loss):.6f}")
