"""Adapters with one fault each, named by the check that has to find it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from shardtune import Batch, LossSum, Prediction, Sample
from shardtune.batch import PackedBatch
from tests.support.healthy_adapters import (
    Block,
    Denoiser,
    Packed,
    Pictures,
    Regressor,
    Tagger,
    Tokens,
    TorchDenoiser,
    Tower,
)


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


class EncodeNumbersWords(Tokens):
    """Gives tokens numbers in the order in which they come up."""

    def encode(self, row: Mapping[str, Any]) -> Sample:
        known = vars(self).setdefault("known", {})
        return super().encode({"tokens": [known.setdefault(token, len(known)) for token in row["tokens"]]})


class EncodeHashes(Tokens):
    """Uses Python's hash of text, another one in every process."""

    def encode(self, row: Mapping[str, Any]) -> Sample:
        return super().encode({"tokens": [hash(str(token)) % 11 for token in row["tokens"]]})


class BuildKeepsTensor(Regressor):
    """Keeps a tensor as a mere attribute, which stays on the CPU."""

    def build(self) -> nn.Module:
        model = super().build()
        model.head.scale = torch.ones(2)  # of torch's own class, and so not looked at
        model.blocks[0].scale = torch.ones(6)
        return model


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


class GradientChangesBatch(Pictures):
    """Writes to its batch, after which it is no longer what it was."""

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        batch["picture"].clamp_(max=200)
        return super().loss(model, batch)


class SumsMean(Pictures):
    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        found = super().loss(model, batch)
        return LossSum(found.total / len(batch["label"]), found.weight)


class DrawsMean(Denoiser):
    def loss(self, model: nn.Module, batch: Batch) -> dict[str, LossSum]:
        found = super().loss(model, batch)
        return {name: LossSum(term.total / len(batch.rows), term.weight) for name, term in found.items()}


class DrawsCentre(Denoiser):
    """The noise of a row depends on the others."""

    def draws(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        noise, time = super().draws(batch)
        return noise + batch["x"].mean(0), time


class DrawsCount(Denoiser):
    """What is not seen counts."""

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, LossSum]:
        found = super().loss(model, batch)
        unseen = (1 - batch["seen"]).sum() * model(batch["x"]).square().sum()
        return {**found, "value": LossSum(found["value"].total + unseen, found["value"].weight)}


class TorchDrawsMean(DrawsMean, TorchDenoiser):
    pass


class TorchDrawsCentre(DrawsCentre, TorchDenoiser):
    pass


class TorchDrawsCount(DrawsCount, TorchDenoiser):
    pass


class BuildCounts(Regressor):
    """Makes other values each time."""

    built = 0

    def build(self) -> nn.Module:
        type(self).built += 1
        model = super().build()
        model.get_parameter("head.bias").data.fill_(type(self).built)
        return model


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


class SumsCentresInTraining(Regressor):
    """Depends on the other rows of a micro-batch in training alone."""

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, LossSum]:
        x = batch["x"] - batch["x"].mean(0) if model.training else batch["x"]
        return super().loss(model, Batch(rows=batch.rows, fields={**batch.fields, "x": x}))


class MaskedWeighsAlike(Packed):
    """Counts every target once, whatever its weight."""

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        assert isinstance(batch, PackedBatch)
        logits = self.logits(model, batch, batch.target_positions)
        total = F.cross_entropy(logits, batch.targets, reduction="sum")
        return LossSum(total + 0.0 * logits.sum(), batch.target_weight)


class MaskedLooksAhead(Packed):
    """Lets each token see the next one, which is its target."""

    def logits(self, model: nn.Module, batch: PackedBatch, positions: torch.Tensor) -> torch.Tensor:
        return (super().logits(model, batch, positions.new_tensor(range(len(batch.input_ids)))) + self._next(batch))[
            positions
        ]

    def _next(self, batch: PackedBatch) -> torch.Tensor:
        return 0.1 * F.one_hot(batch.input_ids.roll(-1), 11)


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


class MetricsMean(Pictures):
    """A metric that is a mean of a micro-batch."""

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, tuple[float, float]]:
        right = model(batch["picture"][:, None] / 255).argmax(-1) == batch["label"]
        return {"accuracy": (float(right.float().mean()), 1.0)}


class MetricsPredictMasked(Tokens):
    """Predictions of every position, targets or not."""

    def predictions(self, model: nn.Module, batch: Batch) -> Iterator[Prediction]:
        labels = batch["labels"].flatten()
        own = batch.mask("labels").flatten()
        logits = model(batch["tokens"]).flatten(0, 1)
        yield Prediction(logits[own], labels[own].clamp(min=0), torch.ones(int(own.sum())))


class MetricsPredictPadding(Tokens):
    """The mean over a row and its padding."""

    def predict_rows(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(batch["tokens"]).mean((1, 2))


class MetricsPredictOnce(Tokens):
    """One value for all rows."""

    def predict_rows(self, model: nn.Module, batch: Batch) -> list[float]:
        return [float(model(batch["tokens"]).sum())]


class MetricsPredictWithoutGraph(Tokens):
    def predictions(self, model: nn.Module, batch: Batch) -> Iterator[Prediction]:
        labels = batch["labels"].flatten()
        logits = model(batch["tokens"]).flatten(0, 1).detach()
        yield Prediction(logits[labels >= 0], labels[labels >= 0], torch.ones(int((labels >= 0).sum())))


class TiesRebinds(Regressor):
    """Puts another tensor in the place of a buffer, in half precision."""

    def build(self) -> nn.Module:
        model = super().build()
        model.register_buffer("mean", torch.zeros(2))
        model.register_forward_hook(lambda module, args, out: setattr(module, "mean", out.detach().mean(0).bfloat16()))
        return model


class TiesUnsaved(Regressor):
    """Counts in a buffer that no checkpoint has."""

    def build(self) -> nn.Module:
        model = super().build()
        model.register_buffer("count", torch.zeros(()), persistent=False)
        model.register_forward_hook(lambda module, args, output: module.count.add_(1).sum() and None)
        return model


class RepeatDrawsElsewhere(Pictures):
    """Draws from a generator of its own, which no seed of the run reaches."""

    draws = np.random.default_rng(0)

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        noise = torch.from_numpy(self.draws.normal(scale=0.01, size=tuple(batch["picture"].shape)))
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


class Scaled(Tower):
    """Divides by a running mean that forwards in training change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.size.mul_(0.9).add_(x.detach().abs().mean(), alpha=0.1)
        return super().forward(x / self.size)


class SumsMoves(Regressor):
    def build(self) -> nn.Module:
        return Scaled()


class Seen(Tower):
    """Counts rows, which evaluation reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += len(x)
            return super().forward(x)
        return super().forward(x) * (1 + 0.1 * self.seen)


class SumsCountsRows(Regressor):
    def build(self) -> nn.Module:
        return Seen()


class HalfSums(Pictures):
    """Sums in the dtype of the weights."""

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        found = super().loss(model, batch)
        return LossSum(found.total.to(next(model.parameters()).dtype), found.weight)


class Functional(Tower):
    """Uses a layer's weight, and not the layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stem = self.stem
        x = F.linear(x, stem.weight, stem.bias)
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


class Sometimes(Tower):
    """Passes its second block over where no row is large."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = x.abs().amax(-1, keepdim=True) > 2
        x = self.blocks[0](self.stem(x))
        if bool(large.any()):
            x = torch.where(large, self.blocks[1](x), x)
        return self.head(x)


class ShardsSometimes(Regressor):
    def build(self) -> nn.Module:
        return Sometimes()


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


class ParityExecution(Regressor):
    """Turns checkpointing on in a way of its own that does not work."""

    def set_execution(self, model: nn.Module) -> None:
        if self.recipe.actor.model.gradient_checkpointing:
            model.gradient_checkpointing_enable()  # pyright: ignore[reportCallIssue]


class Cancelling(Tower):
    """Adds a large number and takes it away again, which bf16 does not survive."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 3000.0 - 3000.0) * 5


class ParityCancels(Regressor):
    def build(self) -> nn.Module:
        return Cancelling()


class LayerInForward(Tower):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.Linear(x.shape[-1], x.shape[-1])(super().forward(x))


class GradientMakesLayer(Regressor):
    """A layer that is made in forward is another one in each call, which nothing trains."""

    def build(self) -> nn.Module:
        return LayerInForward()
