"""HALOs' trainers: the loss of padded batches from the log-probabilities of their targets, in an overridable method."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, ClassVar

import torch
from omegaconf import DictConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardtune.batch.seeds import seeded
from shardtune.config import Recipe, load_recipe
from shardtune.data.loader.padding import ATTENTION_MASK, INPUT_IDS, LABELS, WEIGHTS
from shardtune.data.prepare import PreparedData
from shardtune.data.sources.memory_rows import is_table
from shardtune.data.user_loader.batch import rows_of, with_names
from shardtune.errors import ConfigError, DataError, ModelError
from shardtune.models.adapter import Adapter
from shardtune.models.causal_lm import CausalLM
from shardtune.training.train_output import TERM, TrainOutput
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.training.worker.logps import get_batch_logps, target_weight
from shardtune.training.worker.padded_task import METRICS, BatchMetrics, PaddedMethods, PaddedTask, on_device
from shardtune.training.worker.task import Task
from shardtune.training.worker.user_errors import explaining
from shardtune.training.worker.user_evaluation import EvalOutput
from shardtune.training.worker.worker_class import check_worker_names

MODES = ("train", "eval", "sample")
MICRO_BATCH = "actor.micro_batch_size"


INSTEAD = {
    "save": "save_checkpoint(self, path, step) is called for each checkpoint, and final/ is written at the end",
    "eval": "run_eval(self) is called for each evaluation, and get_batch_metrics for its batches",
    "get_batch_samples": "eval.generate: true lets the model answer the prompts of the evaluation rows",
    "sample": "eval.generate: true lets the model answer the prompts of the evaluation rows",
}
"""Methods that HALOs' trainer calls by itself, and what there is here."""


class PaddedTrainer(SFTWorker):
    """Fine-tunes a causal language model by the loss that `get_batch_metrics` computes from padded rows.

    Rows, their order and their targets are those of `SFTWorker`. The difference is the form: the rows of a
    micro-batch are padded, the model returns all their logits, and one method computes the loss from them. (`SFTWorker`
    needs neither padding nor all logits, and is faster.)

    A batch is a dict of tensors [rows, tokens]: `target_combined_input_ids`, `target_combined_attention_mask`,
    `target_labels` (-100 for positions without a target) and `target_weights` (the weight of each target: 1, unless
    rows set a `loss_weight` for their turns).

    Args:
        config: the recipe, under our names or those of HALOs.
        model: a model in memory instead of `actor.model.model_path`.
        train_dataset: in place of `data.train_data_paths`: an iterable that yields batches, the same on every rank, of
            which batch i of a step goes to rank i mod ranks; or rows, as in `train_data`. Without
            `actor.micro_batch_size`, a micro-batch has as many rows as the first batch.
        eval_dataset: likewise, in place of the evaluation sets.
        tokenizer: a tokenizer in memory.
        train_data: rows in memory.
        eval_data: rows in memory, or named sets of them.
        prepared: data that is tokenised already.
        training: False for a worker that only evaluates and answers.
        report: receives messages while the data is prepared.
    """

    use_reference_model: ClassVar[bool] = False
    _called_by: ClassVar[Mapping[str, Sequence[str]]] = {
        "get_batch_metrics": ("get_train_model_output", "get_eval_model_output"),
        "get_train_model_output": ("run_training",),
        "get_eval_model_output": ("run_eval",),
    }
    get_batch_logps = staticmethod(get_batch_logps)

    def __init__(
        self,
        config: DictConfig | Recipe,
        model: PreTrainedModel | None = None,
        train_dataset: Iterable[Mapping[str, Any]] | None = None,
        eval_dataset: Iterable[Mapping[str, Any]] | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        train_data: object = None,
        eval_data: object = None,
        prepared: PreparedData | None = None,
        training: bool = True,
        report: Callable[[str], None] = print,
    ) -> None:
        check_worker_names(type(self), PaddedTrainer, INSTEAD)
        train_dataset, train_data = _batches_or_rows("train", train_dataset, train_data)
        eval_dataset, eval_data = _batches_or_rows("eval", eval_dataset, eval_data)
        held = {
            "actor.model.model_path": model,
            "data.train_data_paths": train_dataset if train_dataset is not None else train_data,
            "data.eval_data_paths": eval_dataset if eval_dataset is not None else eval_data,
        }
        self._held = held
        in_memory = [key for key, value in held.items() if value is not None]
        recipe = config if isinstance(config, Recipe) else load_recipe(config, in_memory=in_memory)
        if not isinstance(config, Recipe):
            missing = self._missing_keys(recipe, train_dataset)
            recipe = load_recipe(config, missing, in_memory=in_memory) if missing else recipe
        _refuse_ignored(recipe, type(self).__name__, own_rows=eval_dataset is None)
        if self.use_reference_model:
            raise ConfigError(
                f"{type(self).__name__}.use_reference_model is True, and no reference model is loaded here",
                where=f"class {type(self).__name__}",
                remedy="set use_reference_model = False; a frozen model that the class loads itself, as an attribute, "
                "can be called in get_batch_metrics",
            )
        self._train_dataset = train_dataset
        self._eval_dataset = eval_dataset
        super().__init__(
            recipe,
            model=model,
            tokenizer=tokenizer,
            train_data=train_data,
            eval_data=eval_data if eval_dataset is None else {},
            prepared=prepared,
            training=training and train_dataset is None,
            report=report,
        )

    def _missing_keys(self, recipe: Recipe, train_dataset: Iterable[object] | None) -> list[str]:
        """What follows from the class and the batches, for keys that the configuration does not set."""
        keys = []
        if recipe.actor.worker is None and not self._overrides_metrics():
            keys.append("actor.worker=sft_trainer")
        if train_dataset is not None and recipe.where(MICRO_BATCH) is None:
            keys.append(f"{MICRO_BATCH}={_rows_of_first(train_dataset)}")
        return keys

    def _overrides_metrics(self) -> bool:
        return type(self).get_batch_metrics is not SFTTrainer.get_batch_metrics

    def _make_task(self) -> Task:
        self._refuse_unused_overrides()
        padded = PaddedMethods(
            get_batch_metrics=self.get_batch_metrics,
            target_weight=lambda batch: target_weight(batch[LABELS], batch.get(WEIGHTS)),
            overridden=self._overrides_metrics(),
        )
        self._rows_task = self._padded_task = PaddedTask(
            self.recipe,
            _causal_lm(self.adapter, type(self).__name__),
            self.prepared,
            self._methods(),
            padded,
            own_training_batches=self._train_dataset is not None,
            own_evaluation_batches=self._eval_dataset is not None,
        )
        return self._padded_task

    # The method that a subclass writes.

    @abstractmethod
    def get_batch_metrics(self, batch: Mapping[str, torch.Tensor], mode: str = "train") -> BatchMetrics:
        """The mean loss of a batch over its targets, and its metrics; for subclasses to override.

        Args:
            batch: its tensors are on the model's device.
            mode: `train`; `eval`, for the rows of an evaluation set; or `sample`, for answers that the model itself
                has written (with `eval.generate`), whose prompts are no targets. Without a gradient but in `train`.

        Returns:
            The loss, a scalar: the mean over this batch's targets (0 where it has none; what is trained is the mean
            over the targets of all batches of a step), or a `LossSum`. And metrics by name, of which those that end in
            `/{mode}` are logged under that name: a number (a mean over the targets) or a pair (sum, weight).
        """

    # Methods that a subclass may override.

    def loss_weights(self, batch: Mapping[str, torch.Tensor]) -> Mapping[str, float]:
        return {TERM: target_weight(batch[LABELS], batch.get(WEIGHTS))}

    def get_train_model_output(self, batch: Any) -> TrainOutput:
        """The loss and the metrics of `get_batch_metrics`."""
        fields = on_device(batch, self.device)
        with explaining(METRICS, fields, self.device):
            return self.get_batch_metrics(with_names(fields), "train")

    def get_eval_model_output(self, batch: Any) -> EvalOutput:
        """The loss of a batch as `loss/ce`, and the metrics of `get_batch_metrics`."""
        return self._padded_task.measure(batch, "eval", self.device)

    def build_dataloader(self, data_paths: list[str], eval_dataset: bool = False) -> tuple[Any, dict[str, Any]]:
        """The caller's batches, or the rows of the recipe, padded."""
        own = self._eval_dataset if eval_dataset else self._train_dataset
        return (own, {}) if own is not None else super().build_dataloader(data_paths, eval_dataset)

    def _reopened_with(self) -> dict[str, Any]:
        return {"eval_dataset": self._eval_dataset}


class SFTTrainer(PaddedTrainer):
    """HALOs' trainer of this name: the negative log-likelihood of the targets; `actor.worker: sft_trainer`.

    Its numbers are those of `SFTWorker`. A subclass that overrides `get_batch_metrics` trains another loss:
    `actor.worker: my_trainer.py:MyTrainer`. Arguments as `PaddedTrainer` has them.
    """

    def get_batch_metrics(self, batch: Mapping[str, torch.Tensor], mode: str = "train") -> BatchMetrics:
        """The mean loss of a batch over its targets, and `loss/{mode}` and `logps/{mode}`: means over them, tensors."""
        if mode not in MODES:
            raise ModelError(f"{METRICS} has no mode {mode!r}", where=METRICS, remedy=f"use one of {', '.join(MODES)}")
        labels, weights = batch[LABELS], batch.get(WEIGHTS)
        with torch.set_grad_enabled(torch.is_grad_enabled() and mode == "train"):
            logits = self.model(input_ids=batch[INPUT_IDS], attention_mask=batch[ATTENTION_MASK]).logits
            logps = self.get_batch_logps(logits, labels)
            total = (logps if weights is None else logps * weights[:, 1:]).sum()
        loss = -total / (target_weight(labels, weights) or 1.0)
        return loss, {f"loss/{mode}": loss.detach(), f"logps/{mode}": -loss.detach()}


def _batches_or_rows(name: str, dataset: Any, rows: object) -> tuple[Any, object]:
    """A data set as batches with a length, or as rows; the other is None."""
    if dataset is None:
        return None, rows
    if rows is not None:
        raise DataError(
            f"{name}_dataset and {name}_data are both given", where=f"{name}_dataset", remedy="keep one of them"
        )
    if not isinstance(dataset, Iterable):
        kind = type(dataset).__name__
        raise DataError(
            f"a {kind} yields no batches", where=f"{name}_dataset", remedy=f"give an iterable of dicts with {INPUT_IDS}"
        )
    if isinstance(dataset, Mapping) or is_table(dataset):  # named sets, or rows
        return None, dataset
    if not isinstance(dataset, Sized) or isinstance(dataset, Iterator):
        dataset = list(dataset)
    first = dataset[0] if isinstance(dataset, Sequence) and dataset else None
    is_row = isinstance(first, Mapping) and INPUT_IDS not in first
    return (None, dataset) if is_row else (dataset, None)


def _rows_of_first(batches: Iterable[object]) -> int:
    """The rows of the first batch of a loader."""
    with seeded(0):  # the loader's own draws are those of a run that does not look at a batch first
        first = next(iter(batches), None)
    return rows_of(first) or 1


def _refuse_ignored(recipe: Recipe, kind: str, *, own_rows: bool) -> None:
    """Refuse keys that `get_batch_metrics` does not act on."""
    actor, model = recipe.actor, recipe.actor.model
    ignored = {
        "actor.model.adapter": model.adapter is not None,
        "actor.loss": actor.loss is not None,
        "actor.label_smoothing": actor.label_smoothing > 0,
        "actor.z_loss": actor.z_loss > 0,
        "actor.neftune_alpha": actor.neftune_alpha is not None,
        "eval.metrics": bool(recipe.eval.metrics),
        "eval.generate": recipe.eval.generate and not own_rows,
    }
    for key in (key for key, given in ignored.items() if given):
        raise ConfigError(
            f"{key} is not for {kind}, whose loss and metrics are those of its {METRICS}",
            where=recipe.where(key) or key,
            remedy=f"leave it out, or write it into {METRICS} of a class derived from shardtune.SFTTrainer; without "
            "actor.worker it works as it is",
        )


def _causal_lm(adapter: Adapter, kind: str) -> CausalLM:
    """The adapter of a model with a plain target loss; any other is refused."""
    if not isinstance(adapter, CausalLM):
        raise ConfigError(
            f"{kind} takes causal language models, not one of {type(adapter).__name__}",
            where="actor.worker",
            remedy="leave actor.worker out",
        )
    if adapter.row_terms():
        raise ConfigError(
            f"the model's config enables a router's balance loss, which {kind} does not include",
            where="actor.model.model_path: config.json, output_router_logits",
            remedy="set actor.model.config_overrides: {output_router_logits: false}, or leave actor.worker out",
        )
    return adapter
