"""Load one large batch in a loader's worker: it goes through /dev/shm."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import actorflow as flow

flow.env.world_size()  # in the run
(images,) = next(iter(DataLoader(TensorDataset(torch.randn(64, 4096)), batch_size=64, num_workers=1)))
print("loaded", images.shape)
