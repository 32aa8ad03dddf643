"""The images, their datasets, the models and the batches: the same on every side."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "pipelines"))

CLASSES = 10
QUALITY = 90  # of the JPEG files


@dataclass(frozen=True, slots=True)
class Setting:
    """What every side of one run has in common."""

    folder: str  # of the images, and of what was read of them
    images: int
    size: int = 160  # of an image, pixels
    crop: int = 128
    batch: int = 64  # of all ranks
    ranks: int = 2
    workers: int = 2  # of each rank
    lr: float = 0.05
    small: int = 32  # size of an image of the pair with tensors in memory
    batches: int = 8  # of that pair, in an epoch
    width: int = 64  # of that pair's model

    def to_json(self) -> str:
        """For the command line of a side's processes."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Setting:
        """What ``to_json`` wrote."""
        return cls(**json.loads(text))

    def path(self, index: int) -> Path:
        """The file of an image."""
        return Path(self.folder) / f"{index:06}.jpg"

    def reads(self, side: str, rank: int) -> Path:
        """The file that gets an int32 for each image that this rank or its workers read: the image's index."""
        return Path(self.folder) / f"reads-{side}-{rank}"

    def write_images(self) -> None:
        """Write all images: waves whose direction and colour are those of their class, with noise."""
        random = np.random.default_rng(0)
        y, x = np.mgrid[: self.size, : self.size] / self.size
        for index in range(self.images):
            angle, phase = np.pi * (index % CLASSES) / CLASSES, random.uniform(0, 2 * np.pi)
            wave = np.sin(20 * (x * np.cos(angle) + y * np.sin(angle)) + phase)
            pixels = 128 + 60 * wave[..., None] * random.uniform(0.5, 1.0, 3) + random.normal(0, 12, (*wave.shape, 3))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(self.path(index), quality=QUALITY)

    def model(self) -> nn.Module:
        """A small network for images of this size, with the weights that every side starts from."""
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 16, 5, stride=4, padding=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, CLASSES),
        )

    def large_model(self) -> nn.Module:
        """A network whose step takes longer than reading its images."""
        torch.manual_seed(0)
        w = self.width
        return nn.Sequential(
            nn.Conv2d(3, w, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(w, w, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(w, 2 * w, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(2 * w, 2 * w, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * w, CLASSES),
        )


class JpegFiles(Dataset[tuple[Tensor, int]]):
    """The images, each decoded, cropped and mirrored at random: float32[3, crop, crop], and its class."""

    def __init__(self, setting: Setting, side: str, rank: int) -> None:
        self._setting = setting
        self._file = os.open(setting.reads(side, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __len__(self) -> int:
        return self._setting.images

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        os.write(self._file, index.to_bytes(4, "little"))
        crop, beyond = self._setting.crop, self._setting.size - self._setting.crop
        with Image.open(self._setting.path(index)) as image:
            pixels = torch.from_numpy(np.array(image))
        top, left = torch.randint(0, beyond + 1, (2,)).tolist()
        part = pixels[top : top + crop, left : left + crop]
        if torch.rand(()) < 0.5:
            part = part.flip(1)
        return part.permute(2, 0, 1).float().div_(255).sub_(0.5).contiguous(), index % CLASSES


class SmallImages(Dataset[tuple[Tensor, int]]):
    """Images in memory, uint8[3, small, small] each, of which a sample is float32 from 0 to 1, and its class."""

    def __init__(self, setting: Setting) -> None:
        count = setting.batches * setting.batch
        generator = torch.Generator().manual_seed(0)
        self.pixels = torch.randint(0, 256, (count, 3, setting.small, setting.small), generator=generator).byte()

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.pixels[index].float() / 255, index % CLASSES

    def whole(self) -> tuple[Tensor, Tensor]:
        """All samples: float32[count, 3, small, small] and int64[count]."""
        return self.pixels.float() / 255, torch.arange(len(self)) % CLASSES


def indices_read(path: Path, first: int) -> Any:
    """The indices that a file of ``Setting.reads`` has from byte ``first`` on."""
    return np.fromfile(path, "<i4", offset=first)


__all__ = ["CLASSES", "JpegFiles", "Setting", "SmallImages", "indices_read"]
