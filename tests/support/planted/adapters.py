"""A healthy adapter, four numbers to two of which some were not observed, and adapters with a fault each."""

from random import Random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardtune import Adapter, LossSum, Sample


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Tower(nn.Module):
    block = Block

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(4, 6), nn.Linear(6, 2)
        self.blocks = nn.ModuleList(self.block() for _ in range(2))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(x))


class Regressor(Adapter):
    unit_classes = ("Block",)
    tower = Tower

    def build(self):
        return self.tower()

    def encode(self, row):
        return Sample(fields={name: np.asarray(row[name], np.float32) for name in ("x", "y", "seen")})

    def weights(self, sample):
        return {"loss": float(sample.fields["seen"].sum())}

    def loss(self, model, batch):
        errors = (model(batch["x"]) - batch["y"]).square() * batch["seen"]
        return LossSum(errors.sum(), float(batch["seen"].sum()))


class MeanOfMeans(Regressor):
    """The loss is the mean of each micro-batch, times its rows."""

    def loss(self, model, batch):
        errors = (model(batch["x"]) - batch["y"]).square() * batch["seen"]
        rows = len(batch["x"])
        return LossSum(errors.sum() / batch["seen"].sum() * rows, rows)

    def weights(self, sample):
        return {"loss": 1.0}


class MeanOverRanks(Regressor):
    """Divides its loss by the number of ranks, as if gradients were averaged over them."""

    def loss(self, model, batch):
        total, weight = super().loss(model, batch)
        return LossSum(total / (dist.get_world_size() if dist.is_initialized() else 1), weight)


class Centring(Tower):
    def forward(self, x):
        return super().forward(x - x.mean(0) / 100)  # too little for the look at two rows before training


class Offset(Tower):
    def forward(self, x):
        offsets = 4096 * (torch.arange(len(x), dtype=x.dtype)[:, None] - 1).clamp(min=0)  # exact in fp64; bf16: 8 bits
        return super().forward((x + offsets) - offsets)


class HalfOffsets(Regressor):
    """Tells the rows of a micro-batch from the third on apart by numbers that half precision does not hold."""

    tower = Offset


class MixedRows(Regressor):
    """Subtracts a part of the mean over the rows of a micro-batch."""

    tower = Centring


class Drawing(Block):
    def __init__(self):
        super().__init__()
        self.draws = None

    def forward(self, x):
        self.draws = self.draws or Random(0)
        return x + torch.tanh(self.linear(self.norm(x)) * (1 + self.draws.random()))


class Restarting(Tower):
    block = Drawing

    def forward(self, x):
        for block in self.blocks:
            block.draws = None
        return super().forward(x)


class RedrawnActivations(Regressor):
    """Its layers draw outside of torch, so that an activation which is computed again is another one."""

    unit_classes = ("Drawing",)
    tower = Restarting


class Detached(Block):
    def forward(self, x):
        weight = self.linear.weight
        if dist.is_initialized():  # its own gradient becomes zero; that of what comes before it stays
            weight = weight.detach() + 0.0 * weight
        return x + torch.tanh(F.linear(self.norm(x), weight, self.linear.bias))


class Losing(Tower):
    block = Detached


class LostGradient(Regressor):
    """Its blocks compute with detached weights where several ranks train."""

    unit_classes = ("Detached",)
    tower = Losing
