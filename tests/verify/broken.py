"""Adapters with one fault each, named by the check that has to find it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from shardtune import Batch, LossSum, Sample
from shardtune.batch import PackedBatch
from tests.verify.healthy import Block, Packed, Pictures, Regressor, Tagger, Tokens, Tower


class EncodeDraws(Pictures):
    """Augments in encode, whose result is kept."""

    def encode(self, row: Mapping[str, Any]) -> Sample:
        sample = super().encode(row)
        picture = sample.fields["picture"] + np.random.randint(0, 2, sample.fields["picture"].shape).astype(np.uint8)
        return Sample(fields={**sample.fields, "picture": picture})


class EncodeChangesRows(Pictures):
    def encode(self, row: Mapping[str, Any]) -> Sample:
        row["picture"][0][0] = 255 - row["picture"][0][0]
        return super().encode(row)


class EncodeCannotTravel(Pictures):
    """Has an encoder that holds a function without a name."""

    def encoder(self, *, with_prompts: bool) -> Any:
        made = super().encoder(with_prompts=with_prompts)
        return Travelling(made, lambda text: text)


class Travelling:
    def __init__(self, inner: Any, function: Any) -> None:
        self.inner, self.function = inner, function

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


class BuildComputesBuffer(Tokens):
    def build(self) -> nn.Module:
        model = super().build()
        model.register_buffer("norm", model.embed.weight.detach().norm(), persistent=False)
        return model


class BuildDrawsBuffer(Tokens):
    """After weights were drawn, which on the meta device are not."""

    def build(self) -> nn.Module:
        model = super().build()
        model.register_buffer("noise", torch.randn(8), persistent=False)
        return model


class BuildTiesData(Tokens):
    def build(self) -> nn.Module:
        model = Tagger()
        model.head.weight = nn.Parameter(model.embed.weight.data)
        return model


class GradientMissesLayer(Regressor):
    def build(self) -> nn.Module:
        model = super().build()
        model.pooler = nn.Linear(4, 4)
        return model


class GradientDetached(Regressor):
    def loss(self, model: nn.Module, batch: Batch) -> dict[str, LossSum]:
        losses = super().loss(model, batch)
        return {**losses, "sign": LossSum(losses["sign"].total.detach(), losses["sign"].weight)}


class SumsMean(Pictures):
    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        found = super().loss(model, batch)
        return LossSum(found.total / len(batch["label"]), found.weight)


class ParityMean(Regressor):
    def loss(self, model: nn.Module, batch: Batch) -> dict[str, LossSum]:
        losses = super().loss(model, batch)
        return {name: LossSum(loss.total / len(batch["x"]), loss.weight) for name, loss in losses.items()}


class SumsOtherWeight(Tokens):
    """Counts padding."""

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        return LossSum(super().loss(model, batch).total, batch["labels"].numel())


class SumsCentres(Pictures):
    """Centres pictures by the mean of the micro-batch."""

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        pictures = batch["picture"][:, None] / 255
        logits = model(pictures - pictures.mean())
        return LossSum(F.cross_entropy(logits, batch["label"], reduction="sum"), len(batch["label"]))


class MaskedCounts(Regressor):
    """Sums over values that were never seen."""

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, LossSum]:
        losses = super().loss(model, batch)
        errors = (model(batch["x"]) - batch["y"]).square()
        return {**losses, "value": LossSum(errors.sum(), losses["value"].weight)}


class PaddingPooled(Tokens):
    """A classifier by the mean over all positions, padding and all."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"embed": nn.Embedding(11, 8), "head": nn.Linear(8, 3)})

    def weights(self, sample: Sample) -> dict[str, float]:
        return {"loss": 1.0}

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        logits = model["head"](model["embed"](batch["tokens"]).mean(1))
        return LossSum(F.cross_entropy(logits, batch["tokens"][:, 0] % 3, reduction="sum"), len(logits))


class PackedLeaks(Packed):
    """Takes all rows of a micro-batch for one document."""

    def logits(self, model: nn.Module, batch: PackedBatch, positions: torch.Tensor) -> torch.Tensor:
        return model(batch.input_ids, torch.tensor([0, len(batch.input_ids)]))[positions]


class EmptyDivides(Regressor):
    """A mean made into a sum again: 0 / 0 where nothing was seen."""

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, LossSum]:
        losses = super().loss(model, batch)
        value, weight = losses["value"]
        return {**losses, "value": LossSum(value / batch["seen"].sum() * weight, weight)}


class TiesUnsaved(Regressor):
    """Counts in a buffer that no checkpoint has."""

    def build(self) -> nn.Module:
        model = super().build()
        model.register_buffer("count", torch.zeros(()), persistent=False)
        model.register_forward_hook(lambda module, args, output: module.count.add_(1).sum() and None)
        return model


class RepeatDrawsElsewhere(Pictures):
    """Draws with numpy, which no seed of the run reaches."""

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        noise = torch.from_numpy(np.random.normal(scale=0.01, size=tuple(batch["picture"].shape)))
        logits = model((batch["picture"] / 255 + noise)[:, None])
        return LossSum(F.cross_entropy(logits, batch["label"], reduction="sum"), len(batch["label"]))


class RepeatCounts(Pictures):
    """A loss that grows with the number of calls."""

    calls = 0

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        self.calls += 1
        found = super().loss(model, batch)
        return LossSum(found.total * (1 + 0.01 * self.calls), found.weight)


class Warming(Tower):
    """Turns its last layer up, forward by forward, in training."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return super().forward(x) * min(1.0, 0.1 * self.calls)


class ResumeForgets(Regressor):
    def build(self) -> nn.Module:
        return Warming()


class HalfSums(Pictures):
    """Sums in the dtype of the weights."""

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        found = super().loss(model, batch)
        return LossSum(found.total.to(next(model.parameters()).dtype), found.weight)


class Functional(Tower):
    """Uses a layer's weight, and not the layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(x, self.stem.weight, self.stem.bias)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LoraPassedBy(Regressor):
    def build(self) -> nn.Module:
        return Functional()


class Scaling(Tower):
    """Keeps the scale of what it has seen where no checkpoint looks."""

    scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.scale = float(x.detach().abs().mean())
        return super().forward(x / self.scale)


class ReloadForgets(Regressor):
    def build(self) -> nn.Module:
        return Scaling()


class Reaching(Tower):
    """Reaches into its blocks instead of calling them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + torch.tanh(block.linear(x))
        return self.head(x)


class ShardsReach(Regressor):
    def build(self) -> nn.Module:
        model = Reaching()
        for block in model.blocks:
            block.norm = nn.Identity()
        return model


class Once(Block):
    """Gives something else when it is called a second time for the same forward, as a cache does."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + torch.tanh(self.linear(self.norm(x)) * self.calls)


class Recomputed(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Once(6) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            block.calls = 0
        return super().forward(x)


class ParityRecomputed(Regressor):
    unit_classes = ("Once",)

    def build(self) -> nn.Module:
        return Recomputed()


class Cancelling(Tower):
    """Adds a large number and takes it away again, which bf16 does not survive."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 3000.0 - 3000.0) * 5


class ParityCancels(Regressor):
    def build(self) -> nn.Module:
        return Cancelling()
