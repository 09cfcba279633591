"""HALOs' trainer: the loss of padded batches from the log-probabilities of their targets, in a method to override."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from omegaconf import DictConfig
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardtune.batch import Batch, LossSum, Metric
from shardtune.config import Recipe, load_recipe
from shardtune.data.loader.padding import ATTENTION_MASK, INPUT_IDS, LABELS, WEIGHTS, AnswerRows, Padding
from shardtune.data.loader.step_loader import BatchMaker, Limits, Rows, Step
from shardtune.data.prepare import PreparedData, WeighedRows
from shardtune.data.user_loader.batch import UserBatch, with_names
from shardtune.data.user_loader.loader import BatchLoader
from shardtune.errors import ConfigError, ModelError
from shardtune.evaluate.loss import BLOCK_MICRO_BATCHES, evaluation_blocks, sum_evaluation, summarize
from shardtune.models.adapter import LanguageRoot
from shardtune.models.causal_lm import TOKENS, CausalLM
from shardtune.parallel.meta_init import init_empty_weights
from shardtune.training.run_summary import RunSummary
from shardtune.training.worker.adapter_worker import EvaluationSet, SFTWorker
from shardtune.training.worker.base import FSDPSftWorker
from shardtune.training.worker.logps import get_batch_logps, target_weight
from shardtune.training.worker.user_errors import explaining
from shardtune.training.worker.user_evaluation import sum_user_batches
from shardtune.training.worker.user_loss import TERM, losses_of, metric_of

MODES = ("train", "eval", "sample")
METRICS = "get_batch_metrics"

BatchMetrics = tuple[Any, Mapping[str, Any]]


class SFTTrainer(SFTWorker):
    """Fine-tunes a causal language model as HALOs' trainer of this name does; `actor.worker: sft_trainer`.

    Rows, their order and their targets are those of `SFTWorker`, and so are the numbers. What differs is the form:
    the rows of a micro-batch are padded side by side, the model gives all their logits, and one method,
    `get_batch_metrics`, makes a loss of them. A subclass that overrides it trains another loss:
    `actor.worker: my_trainer.py:MyTrainer`. (`SFTWorker` holds neither padding nor all logits, and is faster.)

    A batch is a dict of tensors [rows, tokens]: `target_combined_input_ids`, `target_combined_attention_mask`,
    `target_labels` (-100 for what is no target) and `target_weights` (how much each target counts: 1, unless rows give
    their turns a `loss_weight`).

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
        report: receives what is found while the data is prepared.
    """

    use_reference_model: ClassVar[bool] = False
    get_batch_logps = staticmethod(get_batch_logps)

    def __init__(
        self,
        config: DictConfig | Recipe,
        model: PreTrainedModel | None = None,
        train_dataset: Iterable[Mapping[str, Any]] | None = None,
        eval_dataset: Iterable[Mapping[str, Any]] | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        train_data: Any = None,
        eval_data: Any = None,
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
        self._step_metrics: dict[int, Mapping[str, Metric]] = {}
        self._evaluated: dict[str, float] = {}
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
        _require_causal_lm(self)

    # The loss.

    def get_batch_metrics(self, batch: Mapping[str, Any], mode: str = "train") -> BatchMetrics:
        """The mean loss of a batch over its targets, and what is logged of it; what a subclass overrides.

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

    def loss_weights(self, batch: Mapping[str, Any]) -> Mapping[str, float]:
        return {TERM: target_weight(batch[LABELS], batch.get(WEIGHTS))}

    def get_train_model_output(self, batch: Any) -> Any:
        fields = self._on_device(batch)
        if not isinstance(batch, Batch):
            return self.get_batch_metrics(fields, "train")
        called = UserBatch(fields, {TERM: batch.weights[TOKENS]}, counts=not batch.is_filler)
        with explaining(METRICS, fields, self.device):
            loss = losses_of(self.get_batch_metrics(with_names(fields), "train"), called)[TERM]
        self._step_metrics[id(batch)] = called.metrics  # again, where fp16 computes a step a second time
        return {TOKENS: LossSum(loss.total, loss.weight)}

    _train_losses = FSDPSftWorker._train_losses  # of rows from the cache and of the caller's batches

    def _user_metrics(self, step: Step) -> dict[str, float]:
        kept, self._step_metrics = self._step_metrics, {}
        sums: dict[str, Metric] = {}
        for batch in step.micro_batches:
            found = batch.metrics if isinstance(self.loader, BatchLoader) else kept.get(id(batch), {})
            for name, metric in found.items():
                sums[name] = sums.get(name, Metric(0.0, 0.0)) + metric
        means = self.ranks.reduce_metrics(sums)
        return {name if _is_of(name, "train") else f"train/{name}": metric.mean for name, metric in means.items()}

    def _on_device(self, batch: Any) -> dict[str, Any]:
        """A batch as a dict whose tensors are where the model is."""
        fields = batch.fields if isinstance(batch, Batch) else batch
        return {
            name: value.to(self.device, non_blocking=True) if isinstance(value, torch.Tensor) else value
            for name, value in fields.items()
        }

    # Evaluation.

    def get_eval_model_output(self, batch: Any) -> Mapping[str, Metric]:
        return self._measured(batch, "eval")

    def _measured(self, batch: Any, mode: str) -> dict[str, Metric]:
        """The loss of a batch as the term `loss/ce`, and its metrics; of a filler, nothing."""
        fields = self._on_device(batch)
        with explaining(METRICS, fields, self.device):
            returned = self.get_batch_metrics(with_names(fields), mode)
        weight = batch.weights[TOKENS] if isinstance(batch, Batch) else self.loss_weights(fields)[TERM]
        if not weight:
            return {}
        loss, metrics = returned
        mean = loss.total / (loss.weight or 1.0) if isinstance(loss, LossSum) else loss
        term = {f"loss/{TOKENS}": Metric(float(mean) * weight, weight)}
        return term | {name: metric_of(name, value, weight) for name, value in metrics.items()}

    def run_eval(self) -> dict[str, float]:
        """As every worker's, and `loss/eval`, `logps/eval`, with several sets `loss/eval/<set>` and so on."""
        self._evaluated = {}
        return super().run_eval() | self._evaluated

    def evaluate_set(self, name: str, loader: Iterable[Any], info: Mapping[str, Any]) -> dict[str, float]:
        if isinstance(loader, EvaluationSet):
            sums = sum_evaluation(self.get_eval_model_output, iter(loader), self.ranks, poll=self.poll)
        else:
            sums = sum_user_batches(
                self.get_eval_model_output,
                loader,
                self.ranks,
                sharded=bool(info.get("sharded")),
                num_samples=info.get("num_samples"),
                name=name or "eval",
                poll=self.poll,
                draws=self.eval_rng(loader),
                report=self.report_once,
            )
        metrics = summarize(self._taken(name, sums, "eval"))
        if self.recipe.eval.generate and isinstance(loader, EvaluationSet):
            metrics |= self._generated(name, loader.rows)
        return metrics

    def answered(self, name: str, prompts: Sequence[np.ndarray], answers: Sequence[Sequence[int]]) -> None:
        """Measure the model's own answers: `loss/sample` and `logps/sample`, the mean over the tokens it wrote."""
        rows = AnswerRows(TOKENS, prompts, answers)
        maker, block = self._evaluation_maker(rows)
        batches = (batch for taken in evaluation_blocks(len(answers), maker, block) for batch in taken)
        sums = sum_evaluation(partial(self._measured, mode="sample"), batches, self.ranks, poll=self.poll)
        self._taken(name, sums, "sample")

    def _taken(self, name: str, sums: Mapping[str, Metric], mode: str) -> dict[str, Metric]:
        """The sums without those that are logged under their own names, which are kept until the evaluation ends."""
        own = {key: metric.mean for key, metric in sums.items() if _is_of(key, mode)}
        self._evaluated |= {f"{key}/{name}" if name else key: value for key, value in own.items()}
        return {key: metric for key, metric in sums.items() if key not in own}

    def evaluation_metrics(self) -> list[str] | None:
        if type(self).get_batch_metrics is not SFTTrainer.get_batch_metrics:
            return None  # a subclass may measure what it likes
        own, names = ["loss/eval", "logps/eval"], ["loss", "perplexity"]
        if self.recipe.eval.generate:
            own, names = [*own, "loss/sample", "logps/sample"], [*names, "eval_accuracy", "unparsed"]
        known = []
        for name in self.evaluation_sets():
            known += [f"eval/{name}/{key}" if name else f"eval/{key}" for key in names]
            known += [f"{key}/{name}" if name else key for key in own]
        return known

    # The model: its own forward, over padded rows.

    def model_provider_func(self) -> nn.Module:
        with init_empty_weights():
            model = self.adapter.build()
        assert isinstance(self.adapter, CausalLM)
        self.adapter.one_row_per_forward(model)  # the model's own attention, which reads the mask
        return PaddedRoot(self.adapter, model)

    def probe_assumptions(self) -> None:
        """Nothing: rows side by side do not rely on anything."""

    # The data: rows from the cache, padded, or batches that the caller gave.

    def build_dataloader(self, data_paths: list[str], eval_dataset: bool = False) -> tuple[Any, dict[str, Any]]:
        if self._train_dataset is not None:
            return self._train_dataset, {}
        return super().build_dataloader(data_paths, eval_dataset)

    def evaluation_sets(self) -> dict[str, list[str]]:
        return {"": []} if self._eval_dataset is not None else super().evaluation_sets()

    def build_evaluation(self, name: str, paths: list[str]) -> tuple[Any, dict[str, Any]]:
        if self._eval_dataset is not None:
            return self._eval_dataset, {}
        rows = self.prepared.evals[name]
        maker, block = self._evaluation_maker(WeighedRows(rows, {}))
        return EvaluationSet(rows, maker, block), {"num_samples": len(rows), "sharded": True}

    def _evaluation_maker(self, rows: Rows) -> tuple[BatchMaker, int]:
        """What makes micro-batches of evaluation rows, and of how many rows at a time."""
        actor = self.recipe.actor
        max_rows = actor.eval_micro_batch_size or actor.micro_batch_size
        return self._maker(rows, max_rows), (max_rows or 16) * BLOCK_MICRO_BATCHES * self.ranks.num_data_ranks

    def _maker(self, rows: Rows, max_rows: int | None) -> BatchMaker:
        max_tokens = self.recipe.actor.max_tokens_per_micro_batch
        if max_tokens is not None:  # padding counts: each row takes as much as the longest
            fitting = max(1, max_tokens // int(rows.lengths.max()))
            max_rows = fitting if max_rows is None else min(max_rows, fitting)
        limits = Limits(max_rows, max_tokens)
        return BatchMaker(rows, limits, Padding(), rank=self.ranks.data_rank, num_ranks=self.ranks.num_data_ranks)

    def reopened(self, directory: Path) -> Self:
        fresh = super().reopened(directory)
        fresh._eval_dataset = self._eval_dataset
        return fresh

    def summary(self) -> RunSummary:
        own = super().summary() if self._train_dataset is None else FSDPSftWorker.summary(self)
        return replace(own, attention="rows padded side by side, under the model's own attention")


class PaddedRoot(LanguageRoot):
    """A root whose forward is the model's own: token ids and mask to logits."""

    def forward(self, *args: Any, **arguments: Any) -> Any:
        return self.model(*args, **{"use_cache": False, **arguments})


def _is_of(name: str, mode: str) -> bool:
    """Whether a metric's name says itself in which mode it was measured."""
    return name.endswith(f"/{mode}")


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


def _require_causal_lm(trainer: SFTTrainer) -> None:
    """Refuse a model whose loss is not that of its targets alone."""
    adapter, kind = trainer.adapter, type(trainer).__name__
    if not isinstance(adapter, CausalLM):
        raise ConfigError(
            f"{kind} takes causal language models, not one of {type(adapter).__name__}",
            where="actor.worker",
            remedy="leave actor.worker out",
        )
    if adapter.row_terms():
        raise ConfigError(
            f"the model's config asks for a router's balance loss, which is no part of {kind}'s",
            where="actor.model.model_path: config.json, output_router_logits",
            remedy="set actor.model.config_overrides: {output_router_logits: false}, or leave actor.worker out",
        )
