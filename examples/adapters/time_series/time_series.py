"""A time-series model with two loss terms that are means over different things.

It predicts the next value at every point of a series, and whether the series goes up after its end: the squared error
per observed point plus 0.1 times the cross-entropy per row. Series have holes (`null` in the data) and differ in
length. Each term is a sum with a weight of its own, and is divided by its own weight over the whole step.
"""

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import BaseModel
from torch import nn

from shardtune import Adapter, LossSum, Sample


class Block(nn.Module):
    """A residual convolution that looks back only: what follows a series, padding too, cannot change it."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.reach = 2 * dilation
        self.conv = nn.Conv1d(width, width, 3, dilation=dilation)

    def forward(self, x):
        return x + F.gelu(self.conv(F.pad(x, (self.reach, 0))))


class Forecaster(nn.Module):
    """Values and observed [rows, time] to the next value and the direction at each point, both [rows, time]."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv1d(2, width, 1)
        self.blocks = nn.ModuleList(Block(width, 2**level) for level in range(depth))
        self.head = nn.Conv1d(width, 2, 1)

    def forward(self, values, observed):
        x = self.stem(torch.stack([values, observed.to(values.dtype)], dim=1))
        for block in self.blocks:
            x = block(x)
        return self.head(x).unbind(1)


class Options(BaseModel):
    width: int = 16
    depth: int = 3
    direction: float = 0.1  # how much the direction counts beside the squared error


class TimeSeries(Adapter):
    Options = Options
    unit_classes = ("Block",)
    padding = {"values": 0, "observed": 0}  # fields that differ in length, and what they are filled with

    def build(self):
        return Forecaster(self.options.width, self.options.depth)

    def encode(self, row):
        values = np.array(row["values"], np.float32)  # None becomes nan
        observed = ~np.isnan(values)
        fields = {"values": np.where(observed, values, 0), "observed": observed, "up": np.array(row["up"], np.float32)}
        return Sample(fields=fields)

    def weights(self, sample):
        """What each term of the loss weighs in a row; the denominators of a step are known from this beforehand."""
        return {"error": np.count_nonzero(sample.fields["observed"][1:]), "direction": 1}

    def loss(self, model, batch):
        values, observed, last = batch["values"], batch["observed"], batch.lengths["values"] - 1
        following, direction = model(values, observed)
        error = ((following[:, :-1] - values[:, 1:]) ** 2)[observed[:, 1:]].sum()
        at_the_end = direction.gather(1, last[:, None])[:, 0]
        bce = F.binary_cross_entropy_with_logits(at_the_end, batch["up"].to(at_the_end.dtype), reduction="sum")
        points, share = int(observed[:, 1:].sum()), self.options.direction  # a term is scaled by scaling its total
        return {"error": LossSum(error, points), "direction": LossSum(share * bce, len(last))}

    def examples(self):
        return [{"values": [n % 3, None, *range(n % 5), 1.5], "up": n % 2 == 0} for n in range(8)]
