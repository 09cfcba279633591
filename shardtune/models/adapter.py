"""The contract between a model and the rest of the system: how it is built, how rows are encoded, what its loss is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from shardtune.batch import IGNORED, Batch, LossSum, Metric, Sample
from shardtune.config import Recipe
from shardtune.config.rank_layout import Layout
from shardtune.data.encoder import Encoder, FrameOptions, Row
from shardtune.data.images.augmentation import RowAugmentation
from shardtune.data.loader.packing import stack
from shardtune.data.loader.step_loader import Companion
from shardtune.errors import ConfigError, ModelError, ParallelError
from shardtune.models.activation_checkpointing import set_execution
from shardtune.models.adapter_encoder import FieldEncoder, FrameFieldEncoder
from shardtune.models.cut_units import CutUnits
from shardtune.models.loss import TokenLoss
from shardtune.models.mixed_precision import compute_in
from shardtune.models.options import NoOptions, read_options
from shardtune.models.pretrained import recipe_tokenizer
from shardtune.models.user_metrics import Measure, Prediction, checked, predicted_loss
from shardtune.parallel.model_parallel import ModelParallel, apply_model_parallel, check_experts
from shardtune.parallel.precision import COMPUTE_DTYPE
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.shard_units import choose_units
from shardtune.parallel.tensor_parallel import check_names, check_planned, expanded

LABELS = "labels"
TERM = "loss"
"""The name of a loss that is the only one."""

Losses = LossSum | Mapping[str, LossSum]
Measured = Mapping[str, Metric | tuple[float, float]]
WeightSource = Mapping[str, torch.Tensor | Callable[[], torch.Tensor] | str | Path | None] | str | Path | None
"""The source of weights: tensors, or functions that make them, by name; files; None: the module's constructor. In a
mapping a submodule's name may represent all of its tensors, with a path or None."""


class Evaluation(NamedTuple):
    """The losses and metrics of a micro-batch.

    Attributes:
        losses: as `Adapter.loss` returns them, by term.
        metrics: (sum, weight) by name.
    """

    losses: dict[str, LossSum]
    metrics: Measured


class Adapter(ABC):
    """The contract between a model and the training loop.

    An adapter has no weights: `build` returns them, and every other method receives them. Three methods have to be
    written, `build`, `encode` and `loss`; all others have defaults that suit most models.

    Args:
        recipe: of the run.
        tokenizer: one in memory instead of the recipe's.

    Attributes:
        Options: the types of `actor.model.options`, a pydantic model; an unknown key is an error.
        padding: fields whose rows differ in size, and the value with which each of their dimensions is padded at the
            end.
        unit_classes: class names of the modules that shard as a unit, usually the layers; by default as transformers
            declares them, else chosen by size.
        image_fields: fields of samples that are images, uint8 [3, height, width] or [height, width, 3] or several of
            one size: those that `data.augmentation` changes in training, each by draws of its own.
        reads: keys of the recipe that the adapter reads, of those that are otherwise refused: such as
            `actor.model.config_overrides`, where `build` passes them to a config.
        tensor_plan: the tensor-parallel plan (`actor.parallel.tensor`): names of modules and parameters, with `*` for
            numbers in them, to styles of transformers ("colwise", "rowwise", "embedding_rowwise", …); by default as a
            model of transformers declares it.
        options: the recipe's `actor.model.options`, an instance of `Options`.
        train_data: training rows in memory instead of those of the recipe.
    """

    Options: ClassVar[type[BaseModel]] = NoOptions
    padding: ClassVar[Mapping[str, float]] = {}
    unit_classes: ClassVar[Sequence[str]] = ()
    image_fields: ClassVar[Sequence[str]] = ()
    reads: ClassVar[Sequence[str]] = ()
    tensor_plan: ClassVar[Mapping[str, str]] = {}
    train_data: object = None

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        self.recipe = recipe
        self.options: Any = read_options(type(self).Options, recipe)
        self._tokenizer = self._in_memory = tokenizer
        self._cut_units: CutUnits | None = None

    @classmethod
    def from_recipe(cls, recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None = None) -> Adapter:
        """The adapter that a recipe describes."""
        return cls(recipe, tokenizer)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of `actor.tokenizer.tokenizer_model`, or else of `actor.model.model_path`."""
        if self._tokenizer is None:
            self._tokenizer = recipe_tokenizer(self.recipe)
        return self._tokenizer

    # The model and its rows.

    @abstractmethod
    def build(self) -> nn.Module:
        """The model.

        It is called with new parameters on the meta device, so that a constructor takes no memory, and once more for
        real where training starts from the weights of the constructor.
        """

    @abstractmethod
    def encode(self, row: Row) -> Sample:
        """One row of the data as named arrays. For a faulty row it may raise KeyError or ValueError."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Losses:
        """The loss of one micro-batch as a sum, `LossSum(total, weight)`, or several by name.

        The sums of all micro-batches and ranks of a step are divided once, by the sum of the weights, which have to
        equal those that `weights` returns for these rows. A term is scaled by scaling its total.
        """

    def weights(self, sample: Sample) -> Mapping[str, float]:
        """The weight of a row in each term of the loss, known before training.

        By default: the weights of its tokens; else the number of labels that are not -100, where there is a field
        `labels`; else 1.
        """
        if len(sample.input_ids):
            return {TERM: sample.target_weight}
        labels = sample.fields.get(LABELS)
        return {TERM: 1.0 if labels is None else float(np.count_nonzero(labels != IGNORED))}

    def metrics(self, model: nn.Module, batch: Batch) -> Measured:
        """Metrics of evaluation besides the losses: (sum, weight) by name. By default none."""
        return {}

    def predictions(self, model: nn.Module, batch: Batch) -> Iterator[Prediction]:
        """The model's predictions, in pieces of any number of targets: the input of `eval.metrics` and `actor.loss`."""
        raise ConfigError(
            f"{type(self).__name__} has no predictions",
            where="eval.metrics, actor.loss",
            remedy="write its method predictions(model, batch), which yields Prediction(outputs, targets, weights)",
        )

    def encode_input(self, row: Row) -> Sample:
        """A row without its target, for `predict_rows`; by default as `encode`, which may need the target."""
        return self.encode(row)

    def predict_rows(self, model: nn.Module, batch: Batch) -> Sequence[object] | torch.Tensor:
        """What the model predicts for the rows of a batch, for `shardtune predict`. By default there is no such thing.

        Returns:
            A tensor [rows, ...], or a value for each row: a number, a text, a tensor, a list or a dict of such.
        """
        raise ConfigError(
            f"{type(self).__name__} predicts nothing for single rows",
            where=f"{type(self).__name__}.predict_rows",
            remedy="write it: predict_rows(self, model, batch) returns a tensor [rows, …], or a value for each row",
        )

    def initial_weights(self) -> WeightSource:
        """The weights to start from: a state dict, a dict of functions that make its tensors, a file or directory, or
        None for those of the module's constructor. By default `actor.model.model_path`, if it is given."""
        config = self.recipe.actor.model
        return None if config.from_scratch else config.model_path

    def shard_units(self, model: nn.Module) -> tuple[list[nn.Module], str]:
        """The modules that shard as a unit, and a sentence on how they were chosen."""
        return choose_units(model, self.unit_classes, self.recipe.actor.fsdp_config.wrap)

    def check_layout(self, layout: Layout) -> None:
        """Refuse a layout that the model does not support, as far as that is known without building it."""
        if layout.sequence > 1:
            raise cannot_share_sequences(type(self).__name__, "it takes whole rows")

    def check_parallel(self, model: nn.Module, layout: Layout) -> None:
        """Refuse what ranks that share rows cannot compute of this model."""
        self.check_tensor_plan(model, layout)
        if layout.expert > 1:
            check_experts(model, model.ep_plan if isinstance(model, PreTrainedModel) else {}, layout.expert)

    def check_tensor_plan(self, model: nn.Module, layout: Layout) -> None:
        """Refuse a `tensor_plan` that names what the model does not have, and a model without a plan."""
        if layout.tensor > 1:
            check_names(model, self.tensor_plan, f"{type(self).__name__}.tensor_plan")
            check_planned(model, self._plan_of(model))

    def _plan_of(self, model: nn.Module) -> Mapping[str, str]:
        """How tensor ranks share the model: the adapter's plan, otherwise that of transformers."""
        return self.tensor_plan or (model.tp_plan if isinstance(model, PreTrainedModel) else {})

    def apply_model_parallel(self, model: nn.Module, ranks: Ranks) -> ModelParallel:
        """Split the model among the ranks that share rows, before it is sharded."""
        self.check_layout(ranks.layout)
        self.check_parallel(model, ranks.layout)
        declared = model if isinstance(model, PreTrainedModel) else None
        tensor_plan = self._plan_of(model)
        if self.tensor_plan and ranks.layout.tensor > 1:
            cut = [name for name, _ in expanded(model, tensor_plan)]
            self._cut_units, self._ranks = CutUnits(model, self.shard_units(model)[0], cut), ranks
        return apply_model_parallel(model, tensor_plan, declared.ep_plan if declared is not None else {}, ranks, None)

    def set_execution(self, model: nn.Module) -> None:
        """Apply `actor.model.gradient_checkpointing` and `actor.model.compile`, by default to each sharding unit."""
        config = self.recipe.actor.model
        if config.gradient_checkpointing or config.compile:
            set_execution(model, self.shard_units(model)[0], config)

    def examples(self) -> Sequence[Row]:
        """A few rows for the conformance kit; by default none, and the kit needs a recipe."""
        return ()

    # Methods that few models override.

    def new_weights(self, model: nn.Module, missing: Sequence[str]) -> Collection[str]:
        """Which tensors of a model of transformers may begin as its class initialises them, of those that the directory
        of its weights lacks: a new head. By default none."""
        return ()

    def row_terms(self) -> Mapping[str, float]:
        """Loss terms with the same weight for every row, besides those of `weights`."""
        return {}

    def encoder(self, *, with_prompts: bool) -> Encoder:
        """The encoder that makes samples of rows, in the processes that build the cache."""
        chunk = self.action_chunk
        if chunk is None:
            if self.recipe.actor.model.action_representation != "absolute":
                raise ConfigError(
                    f"the rows of {type(self).__name__} are no frames of robot data: there are no actions to convert",
                    where="actor.model.action_representation",
                    remedy="leave it out, or let the adapter's action_chunk be the number of actions of a row",
                )
            return FieldEncoder(self, self.recipe, self._in_memory)
        frames = FrameOptions.of(self.recipe.actor.model, chunk, self.observation_steps)
        return FrameFieldEncoder(self, self.recipe, frames, self._in_memory)

    def encoding_settings(self) -> Mapping[str, Any]:
        """What `encode` depends on besides its code, the options, the keys in `reads`, and the settings of model and
        tokenizer, as JSON: a part of the key of the cache of encoded rows, such as the content of a file that `encode`
        reads. By default nothing.
        """
        return {}

    def take_encoding_settings(self, settings: Mapping[str, Any]) -> None:  # noqa: B027 (may stay empty)
        """Take over the `encoding_settings` of the process that has started this one to encode rows."""

    def saved_files(self) -> Mapping[str, object]:
        """Further files beside the saved weights, by name: JSON, or bytes. By default none."""
        return {}

    def notes(self) -> Sequence[str]:
        """Sentences for the first lines of a run. By default none."""
        return ()

    def collate(self, samples: Sequence[Sample], rows: Sequence[int], weights: Mapping[str, float]) -> Batch:
        """One micro-batch of samples; by default each field is stacked, and padded where `padding` names it."""
        batch = stack(samples, rows, weights, self.padding)
        return batch.widened() if self.recipe.actor.model.precision == "fp64" else batch

    def augmented(self, sample: Sample, augment: RowAugmentation) -> Sample:
        """A row of training with its images changed (`data.augmentation`); by default those of `image_fields`.

        Called where micro-batches are made, after the cache: `augment(images, name)` changes uint8 images, all alike,
        by the draws that the row has for this name.
        """
        return augment.fields(sample, self.image_fields)

    @property
    def augments(self) -> bool:
        """Whether rows have images that `augmented` changes."""
        return bool(self.image_fields) or type(self).augmented is not Adapter.augmented

    def filler(self, sample: Sample) -> Sample:
        """The sample that a rank without rows computes with weight 0, for the collectives; by default this one."""
        return sample

    @property
    def action_chunk(self) -> int | None:
        """Number of actions per row, where rows are frames of robot data (docs/robot-data.md); None: rows are those of
        the data files."""
        return None

    @property
    def observation_steps(self) -> int:
        """Number of frames that a row of robot data shows, and an observation when acting: the present one and those
        before it, which a row has as `earlier`; by default 1."""
        return 1

    @property
    def new_parts(self) -> Sequence[str]:
        """Names of submodules that the directory of `initial_weights` may lack; they begin as the model's class
        initialises them, and are trained in full beside a low-rank adapter. By default none."""
        return ()

    def may_be_idle(self, name: str) -> bool:
        """Whether a trained parameter may have no gradient; by default none may."""
        return False

    def companion(self) -> Companion | None:
        """A sample that is added to micro-batches whose rows call fewer parts of the model than others of the step; by
        default None, as every row calls all parts."""
        return None

    @property
    def builds_by_class(self) -> bool:
        """Whether `build` makes a model of transformers from its config and does nothing else, so that the initialiser
        of its class gives the same model module by module; by default the values of `build` count."""
        return False

    @property
    def processor(self) -> ProcessorMixin | None:
        """A processor of images and text, which is saved beside the weights instead of a tokenizer."""
        return None

    @property
    def prepares_in_processes(self) -> bool:
        """Whether `collate` is slow (it decodes images) and runs in `data.num_workers` processes, ahead of training."""
        return False

    def root(self, model: nn.Module) -> AdapterRoot:
        """The module that is sharded."""
        compute_in(model, COMPUTE_DTYPE[self.recipe.actor.model.precision])
        return AdapterRoot(self, model)

    @property
    def predicts_rows(self) -> bool:
        """Whether it has a `predict_rows`."""
        return type(self).predict_rows is not Adapter.predict_rows

    @property
    def predicts(self) -> bool:
        """Whether a loss and metrics can be computed from its `predictions`."""
        return type(self).predictions is not Adapter.predictions

    def train_loss(self, model: nn.Module, batch: Batch, token_loss: TokenLoss | None) -> dict[str, LossSum]:
        """The training loss of one micro-batch by term, with `token_loss` as the loss of a target if it is given."""
        if token_loss is None:
            return named(self.loss(model, batch))
        term = next(iter(batch.weights), TERM)
        return {term: predicted_loss(checked(self.predictions(model, batch)), token_loss)}

    def evaluate(self, model: nn.Module, batch: Batch, measure: Measure | None = None) -> Evaluation:
        """The losses and metrics of one micro-batch, with those that `measure` computes from its predictions."""
        own = self.metrics(model, batch)
        if not isinstance(own, Mapping):
            raise ModelError(
                f"metrics returned a {type(own).__name__}, not a dict",
                where=f"{type(self).__name__}.metrics",
                remedy='return {"name": (sum over this batch, what it is divided by in the end)}',
            )
        further = measure(checked(self.predictions(model, batch))) if measure is not None else {}
        for name in own.keys() & further.keys():
            raise ConfigError(
                f"eval.metrics: {type(self).__name__}.metrics gives a metric {name!r} too",
                where="eval.metrics",
                remedy="give the function another name",
            )
        return Evaluation(named(self.loss(model, batch)), {**own, **further})

    @property
    def rows_share_forwards(self) -> bool:
        """Whether a micro-batch may hold several rows."""
        return True

    @property
    def may_be_filled(self) -> bool:
        """Whether documents without a target may join the rows of a micro-batch and change nothing but rounding."""
        return False

    @property
    def rows_of_one_length(self) -> bool:
        """Whether a micro-batch may hold several rows where they have the same number of tokens."""
        return False

    def probe_assumptions(
        self, root: AdapterRoot, samples: Sequence[Sample], device: torch.device, dtype: torch.dtype
    ) -> list[str]:
        """Check on real rows what the adapter relies on; returns a sentence for each way that is switched off.

        By default: what ranks compute with the parts of units that `tensor_plan` gives them.
        """
        if self._cut_units is None:
            return []
        found, self._cut_units = self._cut_units, None
        weights = [self.weights(sample) for sample in samples]
        sums = {term: sum(of[term] for of in weights) for term in weights[0]}
        sums |= {term: weight * len(samples) for term, weight in self.row_terms().items()}
        batch = self.collate(samples, range(len(samples)), sums).to(device)
        return found.compare(root.model, root, batch, self._ranks, dtype, f"{type(self).__name__}.tensor_plan")

    def check_rows(self, lengths: np.ndarray, locate: Callable[[int], str]) -> None:  # noqa: B027 (may stay empty)
        """Refuse rows that the model cannot take; `lengths` is int32 [rows], `locate` names the place of a row."""

    def restore_model(self, model: nn.Module) -> None:  # noqa: B027 (may stay empty)
        """Undo the changes of `build` to a model that the caller continues to use."""


def cannot_share_sequences(what: str, why: str) -> ParallelError:
    """The error for a model without sequence parallelism."""
    where = "actor.parallel.sequence"
    return ParallelError(f"{what} cannot share sequences among ranks: {why}", where=where, remedy=f"set {where}: 1")


def named(losses: Losses) -> dict[str, LossSum]:
    """The terms of a loss by name, checked: each a scalar with a graph (in training) and a weight.

    Raises:
        ModelError: a term is no `LossSum` of a scalar and a number, or has no graph.
    """
    terms = {TERM: losses} if isinstance(losses, LossSum) else losses
    if not isinstance(terms, Mapping) or not all(isinstance(term, LossSum) for term in terms.values()):
        raise ModelError(
            f"loss returned a {type(losses).__name__}, not a LossSum or a dict of them",
            where="Adapter.loss",
            remedy="return LossSum(total, weight): the sum of the loss over its targets, and how many they are",
        )
    found = {name: _summable(name, term) for name, term in terms.items()}
    if torch.is_grad_enabled() and found and not any(term.total.requires_grad for term in found.values()):
        raise ModelError(
            "the loss has no graph: no parameter that is trained has a part in it",
            where="Adapter.loss",
            remedy="compute it from what model(…) returns; .detach(), .item(), .data and torch.no_grad() cut the graph",
        )
    return found


def _summable(name: str, term: LossSum) -> LossSum:
    """A loss term, checked to have a scalar as its total and a number as its weight."""
    total, weight = term
    if not isinstance(total, torch.Tensor) or total.ndim:
        kind = f"of shape {list(total.shape)}" if isinstance(total, torch.Tensor) else f"a {type(total).__name__}"
        raise ModelError(
            f"the total of the loss {name!r} is {kind}, not a tensor with one number",
            where="Adapter.loss",
            remedy='sum over the targets: reduction="sum", or losses.sum()',
        )
    try:
        return LossSum(total, float(weight))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"the weight of the loss {name!r} is {weight!r}, not a number",
            where="Adapter.loss",
            remedy="give how many targets the total is a sum of: LossSum(total, len(targets))",
        ) from error


class AdapterRoot(nn.Module):
    """The module that is sharded: its forward is the adapter's loss, in every parallel layout.

    Attributes:
        entry_points: names of further methods that use the weights, which sharding gathers for them.
        token_loss: the training loss of a target, if the recipe names one instead of the adapter's.
        measure: the recipe's metrics of evaluation, which are computed from predictions.
    """

    entry_points: ClassVar[Sequence[str]] = ("evaluate", "predict")

    def __init__(self, adapter: Adapter, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.token_loss: TokenLoss | None = None
        self.measure: Measure | None = None
        self._adapter = adapter

    def forward(self, batch: Batch) -> dict[str, LossSum]:
        losses = self._adapter.train_loss(self.model, batch, self.token_loss)
        return losses if max(batch.rows) >= 0 else _weightless(losses)

    def evaluate(self, batch: Batch) -> Evaluation:
        found = self._adapter.evaluate(self.model, batch, self.measure)
        return found if max(batch.rows) >= 0 else Evaluation(_weightless(found.losses), {})

    def predict(self, batch: Batch) -> Sequence[object] | torch.Tensor:
        return self._adapter.predict_rows(self.model, batch)


def _weightless(losses: Mapping[str, LossSum]) -> dict[str, LossSum]:
    """The losses of a batch of fillers with weight 0; they keep their graph, for the collectives of the backward."""
    return {name: LossSum(losses[name].total * 0.0, 0.0) for name in losses}
