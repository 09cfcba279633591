"""HALOs' trainer: the loss of padded batches from the log-probabilities of their targets, in an overridable method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from omegaconf import DictConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardtune.batch import Metric
from shardtune.config import Recipe, load_recipe
from shardtune.data.loader.padding import ATTENTION_MASK, INPUT_IDS, LABELS, WEIGHTS
from shardtune.data.prepare import PreparedData
from shardtune.data.user_loader.batch import with_names
from shardtune.errors import ConfigError, ModelError
from shardtune.models.adapter import Adapter
from shardtune.models.causal_lm import CausalLM
from shardtune.training.train_output import TERM, TrainOutput
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.training.worker.logps import get_batch_logps, target_weight
from shardtune.training.worker.padded_task import METRICS, BatchMetrics, PaddedMethods, PaddedTask, on_device
from shardtune.training.worker.task import Task
from shardtune.training.worker.user_errors import explaining
from shardtune.training.worker.user_evaluation import EvalOutput

MODES = ("train", "eval", "sample")


class SFTTrainer(SFTWorker):
    """Fine-tunes a causal language model as HALOs' trainer of this name does; `actor.worker: sft_trainer`.

    Rows, their order, their targets and the resulting numbers are those of `SFTWorker`. The difference is the form:
    the rows of a micro-batch are padded, the model returns all their logits, and one method, `get_batch_metrics`,
    computes the loss from them. A subclass that overrides it trains another loss:
    `actor.worker: my_trainer.py:MyTrainer`. (`SFTWorker` needs neither padding nor all logits, and is faster.)

    A batch is a dict of tensors [rows, tokens]: `target_combined_input_ids`, `target_combined_attention_mask`,
    `target_labels` (-100 for positions without a target) and `target_weights` (the weight of each target: 1, unless
    rows set a `loss_weight` for their turns).

    Args:
        config: the recipe.
        model: a model in memory instead of `actor.model.model_path`.
        train_dataset: an iterable with a length that yields batches, the same on every rank, in place of
            `data.train_data_paths`; batch i of a step goes to rank i mod ranks.
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
        train_dataset: Iterable[Mapping[str, torch.Tensor]] | None = None,
        eval_dataset: Iterable[Mapping[str, torch.Tensor]] | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        train_data: object = None,
        eval_data: object = None,
        prepared: PreparedData | None = None,
        training: bool = True,
        report: Callable[[str], None] = print,
    ) -> None:
        held = {
            "actor.model.model_path": model,
            "data.train_data_paths": train_dataset if train_dataset is not None else train_data,
            "data.eval_data_paths": eval_dataset if eval_dataset is not None else eval_data,
        }
        in_memory = [key for key, value in held.items() if value is not None]
        recipe = config if isinstance(config, Recipe) else load_recipe(config, in_memory=in_memory)
        _refuse_ignored(recipe, type(self).__name__, own_rows=eval_dataset is None)
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

    def _make_task(self) -> Task:
        self._refuse_unused_overrides()
        padded = PaddedMethods(
            get_batch_metrics=self.get_batch_metrics,
            target_weight=lambda batch: target_weight(batch[LABELS], batch.get(WEIGHTS)),
            overridden=type(self).get_batch_metrics is not SFTTrainer.get_batch_metrics,
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

    # Methods that a subclass may override.

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
        if mode not in MODES:
            raise ModelError(f"{METRICS} has no mode {mode!r}", where=METRICS, remedy=f"use one of {', '.join(MODES)}")
        labels, weights = batch[LABELS], batch.get(WEIGHTS)
        with torch.set_grad_enabled(torch.is_grad_enabled() and mode == "train"):
            logits = self.model(input_ids=batch[INPUT_IDS], attention_mask=batch[ATTENTION_MASK]).logits
            logps = self.get_batch_logps(logits, labels, weights).sum()
        targets = target_weight(labels, weights)
        total = float(logps.detach())
        metrics = {f"loss/{mode}": Metric(-total, targets), f"logps/{mode}": Metric(total, targets)}
        return -logps / (targets or 1.0), metrics

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

    def reopened(self, directory: Path) -> Self:
        fresh = super().reopened(directory)
        fresh._eval_dataset = self._eval_dataset
        return fresh


def _refuse_ignored(recipe: Recipe, kind: str, *, own_rows: bool) -> None:
    """Refuse keys that `get_batch_metrics` does not act on."""
    actor, model = recipe.actor, recipe.actor.model
    ignored = {
        "actor.model.adapter": model.adapter is not None,
        "actor.loss": actor.loss is not None,
        "actor.label_smoothing": actor.label_smoothing > 0,
        "actor.z_loss": actor.z_loss > 0,
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
