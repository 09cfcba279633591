"""The task of HALOs' trainer: padded rows, and a method that computes the loss from all their logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from shardtune.batch import Batch, LossSum, Metric, moved
from shardtune.config import Recipe
from shardtune.data.cache.by_file import TrainingRows
from shardtune.data.cache.dataset import TokenDataset
from shardtune.data.loader.padding import AnswerRows, Padding
from shardtune.data.loader.step_loader import BatchMaker, Changes, Limits, Rows
from shardtune.data.prepare import PreparedData, WeighedRows
from shardtune.data.user_loader.batch import with_names
from shardtune.evaluate.loss import BLOCK_MICRO_BATCHES, evaluation_blocks, sum_evaluation, summarize
from shardtune.models.activation_checkpointing import set_execution
from shardtune.models.causal_lm import TOKENS, CausalLM
from shardtune.models.language_model import LanguageRoot
from shardtune.parallel.meta_init import init_empty_weights
from shardtune.parallel.ranks import Ranks
from shardtune.training.run_summary import RunSummary
from shardtune.training.train_output import MetricValue, metric_of
from shardtune.training.worker.cached_rows import CachedRowsTask, EvaluationSet, token_counts
from shardtune.training.worker.task import DataPaths, Evaluated, Evaluation, UserMethods
from shardtune.training.worker.task_answers import Generated
from shardtune.training.worker.user_errors import explaining
from shardtune.training.worker.user_task import UserSets

METRICS = "get_batch_metrics"
BatchMetrics = tuple[torch.Tensor | LossSum, Mapping[str, MetricValue]]


class PaddedRoot(LanguageRoot):
    """A root whose forward is the model's own: token ids and mask to logits."""

    def forward(self, *args: object, **arguments: object) -> object:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.model(*args, **{"use_cache": False, **arguments})


@dataclass(frozen=True, slots=True)
class PaddedMethods:
    """The methods of HALOs' trainer that a user may override, bound to the trainer.

    Attributes:
        get_batch_metrics: maps a batch on the model's device and a mode to its mean loss and metrics.
        target_weight: maps a batch to the weight of its targets.
        overridden: whether a subclass overrides `get_batch_metrics`.
    """

    get_batch_metrics: Callable[[Mapping[str, torch.Tensor], str], BatchMetrics]
    target_weight: Callable[[Mapping[str, torch.Tensor]], float]
    overridden: bool


class PaddedTask(CachedRowsTask):
    """A causal language model trained on padded rows; arguments as `CachedRowsTask` has them.

    Args:
        padded: the trainer's methods.
        own_training_batches: whether the caller passed training batches.
        own_evaluation_batches: whether the caller passed evaluation batches.
    """

    def __init__(
        self,
        recipe: Recipe,
        adapter: CausalLM,
        prepared: PreparedData,
        methods: UserMethods,
        padded: PaddedMethods,
        *,
        own_training_batches: bool,
        own_evaluation_batches: bool,
    ) -> None:
        super().__init__(recipe, adapter, prepared, methods)
        self._causal_lm = adapter
        self._padded = padded
        self._own_training_batches = own_training_batches
        self._own_evaluation_batches = own_evaluation_batches
        self._user_sets = UserSets(methods, recipe)

    # The model: its own forward, over padded rows.

    def build_model(self) -> tuple[nn.Module, list[str]]:
        """The root over a model without memory, and notes."""
        with init_empty_weights():
            model = self._causal_lm.build()
        self._causal_lm.sharing.one_row_per_forward(model)  # the model's own attention, which reads the mask
        return PaddedRoot(self._causal_lm, model), []

    def inner_model(self, model: nn.Module) -> nn.Module:
        return model.model if isinstance(model, PaddedRoot) else model

    def set_execution(self, model: nn.Module) -> None:
        """Also of a model that the trainer's own method makes; a second time changes nothing."""
        set_execution(model, self.shard_units(model)[0], self.recipe.actor.model)

    # Rows.

    def weighed(self, rows: TrainingRows) -> WeighedRows:
        return WeighedRows(rows, {})

    def maker(self, rows: Rows, max_rows: int | None, ranks: Ranks, changes: Changes | None = None) -> BatchMaker:
        max_tokens = self.recipe.actor.max_tokens_per_micro_batch
        if max_tokens is not None:  # padding counts: each row takes as much memory as the longest
            lengths = rows.lengths
            longest = int(lengths.max()) if isinstance(lengths, np.ndarray) else self.recipe.data.max_length
            fitting = max(1, max_tokens // longest)
            max_rows = fitting if max_rows is None else min(max_rows, fitting)
        limits = Limits(max_rows, max_tokens)
        rank, number = ranks.data_rank, ranks.num_data_ranks
        return BatchMaker(rows, limits, Padding(), rank=rank, num_ranks=number, changes=changes)

    @property
    def num_processes(self) -> int:
        return 0

    def rows_per_block(self, rows: Sequence[object] | TokenDataset, max_rows: int | None, ranks: Ranks) -> int:
        return (max_rows or 16) * BLOCK_MICRO_BATCHES * ranks.num_data_ranks

    def evaluation_sets(self) -> list[DataPaths]:
        return [DataPaths([])] if self._own_evaluation_batches else super().evaluation_sets()

    # Training.

    def metric_name(self, name: str) -> str:
        return name if is_of(name, "train") else f"train/{name}"

    # Evaluation.

    def measure(self, batch: Batch | Mapping[str, torch.Tensor], mode: str, device: torch.device) -> dict[str, Metric]:
        """The loss of a batch as the term `loss/ce`, and its metrics; empty for a filler."""
        fields = on_device(batch, device)
        with explaining(METRICS, fields, device):
            loss, metrics = self._padded.get_batch_metrics(with_names(fields), mode)
        weight = batch.weights[TOKENS] if isinstance(batch, Batch) else self._padded.target_weight(fields)
        if not weight:
            return {}
        mean = loss.total / (loss.weight or 1.0) if isinstance(loss, LossSum) else loss
        term = {f"loss/{TOKENS}": Metric(float(mean) * weight, weight)}
        return term | {name: metric_of(name, value, weight) for name, value in metrics.items()}

    def logits_of(self, root: LanguageRoot, tokens: torch.Tensor) -> torch.Tensor:
        outputs: Any = root(tokens)
        return outputs.logits

    def evaluate_set(
        self, name: str, loader: Iterable[object], info: Mapping[str, object], evaluation: Evaluation
    ) -> Evaluated:
        if not isinstance(loader, EvaluationSet):
            sums = self._user_sets.sums(name, loader, info, evaluation)
            return self._evaluated(name, sums, "eval")
        sums = sum_evaluation(self.measured, iter(loader), evaluation.ranks, poll=evaluation.poll)
        evaluated = self._evaluated(name, sums, "eval")
        if not self.recipe.eval.generate:
            return evaluated
        generated = self.answers.generate(name, loader.rows, evaluation)
        answered = self._evaluated(name, self._measure_answers(generated, evaluation), "sample")
        judged = generated.judged
        metrics = {**evaluated.metrics, **judged.metrics()}
        return Evaluated(metrics, {**evaluated.named, **answered.named}, judged.samples)

    def _measure_answers(self, generated: Generated, evaluation: Evaluation) -> Mapping[str, Metric]:
        """The metrics of the model's generated answers: the mean over the generated tokens."""
        actor, ranks = self.recipe.actor, evaluation.ranks
        rows = AnswerRows(TOKENS, generated.prompts, generated.answers)
        max_rows = actor.eval_micro_batch_size or actor.micro_batch_size
        maker, block = self.maker(rows, max_rows, ranks), self.rows_per_block(generated.answers, max_rows, ranks)
        batches = (batch for taken in evaluation_blocks(len(generated.answers), maker, block) for batch in taken)
        measure = partial(self.measure, mode="sample", device=evaluation.device)
        return sum_evaluation(measure, batches, ranks, poll=evaluation.poll)

    def _evaluated(self, name: str, sums: Mapping[str, Metric], mode: str) -> Evaluated:
        """The metrics of a set, apart from those that are logged under their own names."""
        own = {key: metric.mean for key, metric in sums.items() if is_of(key, mode)}
        named = {f"{key}/{name}" if name else key: value for key, value in own.items()}
        losses = {key: metric for key, metric in sums.items() if key not in own}
        # An overridden loss may be no cross-entropy of tokens, and then has no perplexity.
        return Evaluated(summarize(losses, None if self._padded.overridden else TOKENS), named)

    def metric_names(self) -> list[str] | None:
        if self._padded.overridden:
            return None  # a subclass may return any metrics
        own, names = ["loss/eval", "logps/eval"], ["loss", "perplexity"]
        if self.recipe.eval.generate:
            own, names = [*own, "loss/sample", "logps/sample"], [*names, "eval_accuracy", "unparsed"]
        known = []
        for paths in self.evaluation_sets():
            known += [f"eval/{paths.name}/{key}" if paths.name else f"eval/{key}" for key in names]
            known += [f"{key}/{paths.name}" if paths.name else key for key in own]
        return self.and_scores(known)

    def describe(self, summary: RunSummary) -> RunSummary:
        if not self._own_training_batches:
            summary = token_counts(super().describe(summary), self.training_rows())
        return replace(summary, attention="rows padded side by side, under the model's own attention")


def is_of(name: str, mode: str) -> bool:
    """Whether a metric's name ends in the mode that it was measured in."""
    return name.endswith(f"/{mode}")


def on_device(batch: Batch | Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """A batch as a dict whose tensors are on a device."""
    fields = batch.fields if isinstance(batch, Batch) else batch
    return {name: moved(value, device) if isinstance(value, torch.Tensor) else value for name, value in fields.items()}
