"""An image classifier: the smallest complete adapter around a model that is nothing but `nn.Module`s.

An adapter says three things: `build` makes the model, `encode` turns a row of the data into named arrays, and `loss`
sums the loss over a micro-batch. Everything else here is optional. The sum is divided once, by the weight of the whole
step, so the size of a micro-batch and the number of ranks do not move the gradient. That holds as long as the model
treats each row by itself: hence GroupNorm here, where BatchNorm would let the rows of a micro-batch see each other.
"""

import numpy as np
import torch.nn.functional as F
from pydantic import BaseModel
from torch import nn

from shardtune import Adapter, LossSum, Sample


class Block(nn.Module):
    """A residual convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return x + self.conv(F.gelu(self.norm(x)))


class Net(nn.Module):
    """Pictures [rows, size, size] to logits [rows, classes]."""

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, pictures):
        x = self.stem(pictures[:, None])
        for block in self.blocks:
            x = block(x)
        return self.head(x.amax((2, 3)))


class Options(BaseModel):
    """The keys of `model.options`: typed, with defaults; an unknown key in the recipe is an error."""

    width: int = 16
    depth: int = 2
    classes: int = 4


class ImageClassifier(Adapter):
    Options = Options
    unit_classes = ("Block",)  # what is sharded, gathered and freed together: the repeated part of the model

    def build(self):
        return Net(self.options.width, self.options.depth, self.options.classes)

    def encode(self, row):
        """Done once per row and kept on disk, so pictures stay uint8; a path would be opened here with PIL."""
        return Sample(fields={"picture": np.array(row["picture"], np.uint8), "label": np.array(row["label"])})

    def _logits(self, model, batch):
        return model(batch["picture"] / 255)  # a tensor [rows, size, size]; fp32 is cast to the run's precision

    def loss(self, model, batch):
        total = F.cross_entropy(self._logits(model, batch), batch["label"], reduction="sum")
        return LossSum(total, len(batch["label"]))

    def metrics(self, model, batch):
        """For evaluation, which adds up (sum, weight) over all batches and ranks and divides once."""
        right = self._logits(model, batch).argmax(-1) == batch["label"]
        return {"accuracy": (int(right.sum()), len(right))}

    def examples(self):
        """A few rows for `shardtune verify adapter`."""
        pictures = np.random.default_rng(0).integers(0, 256, (8, 8, 8)).tolist()
        return [{"picture": picture, "label": number % 4} for number, picture in enumerate(pictures)]
