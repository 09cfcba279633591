"""Tasks on the recipe's rows, which are encoded once, cached, and distributed over ranks and micro-batches."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import nn

from shardtune.batch import Batch, Metric
from shardtune.config import Recipe
from shardtune.data.cache.ahead import FileStepLoader
from shardtune.data.cache.by_file import RowsByFile, TrainingRows, mixed_files
from shardtune.data.cache.dataset import TokenDataset
from shardtune.data.chat.encoder import ChatEncoder
from shardtune.data.encoder import frames_of
from shardtune.data.images.image_changes import image_changes
from shardtune.data.loader.file_order import FileOrder
from shardtune.data.loader.order import DataOrder, OrderSource, require_rows_of_each
from shardtune.data.loader.protocol import DataState, MicroBatch, Step, supervised
from shardtune.data.loader.step_loader import BatchMaker, Changes, StepLoader
from shardtune.data.prepare import PreparedData, WeighedRows
from shardtune.errors import ConfigError
from shardtune.evaluate.loss import check_monitors, evaluation_blocks
from shardtune.models.action.acting import ActingAdapter
from shardtune.models.adapter import Adapter, WeightSource
from shardtune.models.causal_lm import TOKENS
from shardtune.models.language_model import LanguageModel, LanguageRoot
from shardtune.models.pretrained import has_tokenizer
from shardtune.models.value_loss import described as trained_on
from shardtune.parallel.model_parallel import ModelParallel
from shardtune.parallel.ranks import Ranks
from shardtune.training.bad_rows import BadPart
from shardtune.training.ranks_in_turn import MakersInTurn, in_turn, ranks_of
from shardtune.training.run_summary import RunSummary
from shardtune.training.step import Accumulate, accumulate
from shardtune.training.worker.data_position import horizon
from shardtune.training.worker.model_check import check_model, weights_of
from shardtune.training.worker.model_export import TextParts
from shardtune.training.worker.row_changes import row_changes
from shardtune.training.worker.task import DataPaths, Evaluation, Task, UserMethods
from shardtune.training.worker.task_answers import TaskAnswers
from shardtune.training.worker.task_harness import TaskHarness
from shardtune.training.worker.user_evaluation import metrics_of

NAMED_ROWS = 8
"""How many rows of a skipped step are named one by one."""


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """One evaluation set on this rank: its rows and their split into micro-batches."""

    rows: TokenDataset
    maker: BatchMaker
    rows_per_block: int
    num_processes: int = 0

    def blocks(self) -> Iterator[tuple[Batch, ...]]:
        """This rank's micro-batches, as many as every other rank's; each row comes exactly once."""
        return evaluation_blocks(len(self.rows), self.maker, self.rows_per_block, self.num_processes)

    def __iter__(self) -> Iterator[Batch]:
        return chain.from_iterable(self.blocks())


class CachedRowsTask(Task):
    """A task over an adapter's model and the encoded rows of a recipe.

    Args:
        recipe: of the run.
        adapter: describes the model.
        prepared: the encoded rows.
        methods: the worker's.
    """

    def __init__(self, recipe: Recipe, adapter: Adapter, prepared: PreparedData, methods: UserMethods) -> None:
        self.recipe = recipe
        self.adapter = adapter
        self.prepared = prepared
        self.methods = methods
        self.stands_for = 1  # data-parallel ranks in whose place this one computes, one after the other
        self.answers = TaskAnswers(recipe, adapter, prepared)
        self._harness = TaskHarness.of(recipe, adapter)

    @property
    def text(self) -> TextParts:
        """What belongs to a model that reads and writes text, beside its weights."""
        encoder, processor, files = self.prepared.encoder, self.adapter.processor, self.adapter.saved_files()
        if isinstance(encoder, ChatEncoder):
            template = None if encoder.template is None else encoder.template.with_arguments
            return TextParts(encoder.tokenizer, processor, template, tuple(encoder.stop_token_ids), files)
        return TextParts(self.adapter.tokenizer if has_tokenizer(self.recipe) else None, processor, files=files)

    # The model.

    @abstractmethod
    def build_model(self) -> tuple[nn.Module, list[str]]:
        """The root over a model without memory, and notes."""

    def initial_weights(self) -> WeightSource:
        return weights_of(self.adapter, self.recipe)

    def new_weights(self, model: nn.Module, missing: Sequence[str]) -> Collection[str]:
        return self.adapter.new_weights(model, missing)

    def may_be_idle(self, name: str) -> bool:
        return self.adapter.may_be_idle(name)

    @property
    def builds_by_class(self) -> bool:
        return self.adapter.builds_by_class

    @property
    def has_users_loss(self) -> bool:
        return not type(self.adapter).__module__.startswith("shardtune.")

    @property
    def new_parts(self) -> Sequence[str]:
        return self.adapter.new_parts

    def build_again(self) -> nn.Module:
        return self.adapter.build()

    def shard_units(self, model: nn.Module) -> tuple[list[nn.Module], str]:
        return self.adapter.shard_units(model)

    def apply_model_parallel(self, model: nn.Module, ranks: Ranks) -> ModelParallel:
        return self.adapter.apply_model_parallel(model, ranks)

    def restore_model(self, model: nn.Module) -> None:
        self.adapter.restore_model(model)

    # Rows.

    @property
    def rows(self) -> TrainingRows | None:
        return self.prepared.train

    @abstractmethod
    def maker(
        self, rows: WeighedRows, max_rows: int | None, ranks: Ranks, changes: Changes | None = None
    ) -> BatchMaker:
        """The maker of micro-batches of at most `max_rows` rows, changed in training by `changes`."""

    @abstractmethod
    def weighed(self, rows: TrainingRows) -> WeighedRows:
        """Rows with the weights of all loss terms."""

    @abstractmethod
    def rows_per_block(self, rows: TokenDataset, max_rows: int | None, ranks: Ranks) -> int:
        """Rows of an evaluation set that are distributed over ranks together."""

    @property
    @abstractmethod
    def num_processes(self) -> int:
        """Processes that make micro-batches."""

    def training_loader(self, ranks: Ranks) -> StepLoader:
        """The training rows in steps."""
        rows, actor = self.training_rows(), self.recipe.actor
        weighed = self.weighed(rows)
        changes = row_changes(self.recipe, self.adapter, self.rows)
        makers = [self.maker(weighed, actor.micro_batch_size, one, changes) for one in ranks_of(ranks, self.stands_for)]
        maker = makers[0] if len(makers) == 1 else MakersInTurn(makers)
        token_term = (self.adapter.token_term if isinstance(self.adapter, LanguageModel) else None) or TOKENS
        seed, data, processes = self.recipe.runner.seed, self.recipe.data, self.num_processes
        size = actor.global_batch_size if actor.global_batch_tokens is None else None
        if isinstance(rows, RowsByFile):
            order = FileOrder(
                rows,
                rows.spans,
                seed=seed,
                shuffle=data.shuffle,
                mixed_files=mixed_files(data),
                global_batch_size=size,
                global_batch_tokens=actor.global_batch_tokens,
                sizes=[one.size * one.source.weight for one in rows.data_files],
            )
            return FileStepLoader(
                weighed,
                order,
                maker,
                rows,
                ranks,
                limit_gib=data.cache_limit,
                token_term=token_term,
                num_processes=processes,
            )
        spans = [OrderSource(span.name, span.start, span.stop, span.weight) for span in rows.sources]
        require_rows_of_each(spans)
        order = DataOrder(
            spans,
            seed=seed,
            shuffle=data.shuffle,
            global_batch_size=size,
            global_batch_tokens=actor.global_batch_tokens,
            lengths=rows.lengths,
            left_out=rows.left_out,
        )
        return StepLoader(weighed, order, maker, token_term=token_term, num_processes=processes)

    @property
    def accumulate(self) -> Accumulate:
        return in_turn(accumulate, self.stands_for)

    def training_rows(self) -> TrainingRows:
        """The training rows.

        Raises:
            ConfigError: the worker was created for evaluation only.
        """
        if self.prepared.train is None:
            raise ConfigError("this worker was made to evaluate: it has no training rows", where="training=False")
        return self.prepared.train

    def evaluation_set(self, name: str, ranks: Ranks) -> EvaluationSet:
        """One evaluation set."""
        actor, rows = self.recipe.actor, self.prepared.evals[name]
        max_rows = actor.eval_micro_batch_size or actor.micro_batch_size
        block = self.rows_per_block(rows, max_rows, ranks)
        return EvaluationSet(rows, self.maker(self.weighed(rows), max_rows, ranks), block, self.num_processes)

    def evaluation_sets(self) -> list[DataPaths]:
        return [DataPaths([], name) for name in self.prepared.evals]

    def all_rows(self) -> list[TrainingRows]:
        """The training rows and those of all evaluation sets."""
        return [rows for rows in (self.prepared.train, *self.prepared.evals.values()) if rows is not None]

    def data_files(self) -> list[dict[str, object]]:
        return self.prepared.files()

    def recall_files(self, records: Sequence[Mapping[str, object]]) -> None:
        if isinstance(self.rows, RowsByFile):
            self.rows.data_files.recall(records)

    def drawn_numbers(self, rows: Sequence[int]) -> Sequence[int]:
        return self.rows.data_files.running_numbers(rows) if isinstance(self.rows, RowsByFile) else rows

    def dropped_rows(self) -> Iterator[Mapping[str, object]]:
        return self.prepared.dropped()

    def row_fingerprints(self, *, row_by_row: bool = False) -> dict[str, str]:
        train = {} if self.prepared.train is None else {"the training rows": self.prepared.train}
        evals = {f"the evaluation rows {name}".rstrip(): rows for name, rows in self.prepared.evals.items()}
        sets: dict[str, TrainingRows] = {**train, **evals}
        encoding = {"the settings of their encoding": self.prepared.encoder.cache_key()[:16]}
        return encoding | {
            name: f"{_extent(rows)} with fingerprint {rows.content() if row_by_row else rows.fingerprint}"
            for name, rows in sets.items()
        }

    def describe_data(self) -> dict[str, object]:
        template = self.text.chat_template
        digest = hashlib.sha256(template.encode()).hexdigest() if template else None
        return {**self.prepared.describe(), "template_hash": digest}

    def name_rows(self, step: Step[MicroBatch], bad: Sequence[BadPart] = ()) -> str:
        numbers = [part.row for part in bad] if bad else step.rows.tolist()
        if not numbers or min(numbers) < 0:  # of a loader of the user's
            return super().name_rows(step, bad)
        rows = self.training_rows()
        named = [rows.locate(row) for row in numbers[:NAMED_ROWS]]
        return ", ".join(named) + (f" and {len(numbers) - NAMED_ROWS} more" if len(numbers) > NAMED_ROWS else "")

    def loss_terms(self) -> set[str]:
        """The names of the loss terms that rows weigh in."""
        return {term for rows in self.all_rows() for term in rows.term_weights} | set(self.adapter.row_terms())

    def measured(self, batch: Batch) -> Mapping[str, Metric]:
        """The worker's metrics of a micro-batch; empty for a filler, which only keeps ranks in step."""
        found = self.methods.get_eval_model_output(batch)
        return metrics_of(found, batch.num_rows) if batch.counts else {}

    # Answers.

    @property
    def can_generate(self) -> bool:
        return isinstance(self.adapter, LanguageModel) and not isinstance(self.adapter, ActingAdapter)

    @property
    def can_predict(self) -> bool:
        return self.adapter.predicts_rows

    # Tasks of lm-evaluation-harness.

    @property
    def runs_harness(self) -> bool:
        return self._harness is not None

    def prepare_harness(self, ranks: Ranks) -> None:
        if self._harness is not None:
            self._harness.prepare(self.text, ranks)

    def evaluate_harness(self, evaluation: Evaluation) -> Mapping[str, float]:
        return {} if self._harness is None else self._harness.evaluate(evaluation, self.text, self.logits_of)

    def and_scores(self, names: Sequence[str]) -> list[str] | None:
        """Names of metrics and those of the harness's scores; None where these are not known (yet)."""
        if self._harness is None:
            return [*names]
        scores = self._harness.score_names
        return None if scores is None else [*names, *(f"eval/{name}" for name in scores)]

    @abstractmethod
    def logits_of(self, root: LanguageRoot, tokens: torch.Tensor) -> torch.Tensor:
        """The logits [rows, tokens, vocabulary] of tokens int64 [rows, tokens], each of which sees those before it."""

    # Descriptions.

    def check(self) -> None:
        """Check model, weights, optimizer and monitors without building large objects.

        For the launcher, so that errors appear before any rank is started.
        """
        check_model(self.adapter, self.recipe, self.text.tokenizer)
        rows = self.rows
        changes = row_changes(self.recipe, self.adapter, rows)
        if changes is not None and rows is not None:
            changes(rows.row(rows.first_trained), DataState(), rows.first_trained)
        if isinstance(rows, RowsByFile):  # the ranks find the files counted that they need for it
            horizon(self.recipe.runner, self.training_loader(Ranks(0, 1, torch.device("cpu"))))
        if self._harness is not None:
            self._harness.check_names()
        check_monitors(self.recipe.runner, self.metric_names())

    @property
    def fills(self) -> bool:
        """Whether micro-batches are filled up to one of a few sizes."""
        return False

    def describe(self, summary: RunSummary) -> RunSummary:
        evaluation = {name: len(rows) for name, rows in self.prepared.evals.items()}
        config, frames = self.recipe.actor.model, frames_of(self.prepared.encoder) is not None
        train = self.prepared.train
        gone = 0 if train is None else len(train.left_out)
        notes = [f"{gone:,} row{' is' if gone == 1 else 's are'} left out by data.quarantine"] if gone else []
        if isinstance(train, RowsByFile):
            notes.append(
                "data.cache: by_file: "
                + ("1 file is" if len(train.data_files) == 1 else f"{len(train.data_files):,} files are")
                + " tokenised and counted one by one, when read"
            )
        if train is not None and self.recipe.data.augmentation.is_on:
            notes.append(f"images of training are augmented, by {image_changes().name}")
        if isinstance(self.adapter, ActingAdapter):
            notes += self.adapter.history_notes()
        if self.recipe.actor.fill_micro_batches and not self.fills:
            notes.append(
                "actor.fill_micro_batches: nothing is filled, as documents that do not count could change the numbers "
                "of this model or loss"
            )
        return replace(
            summary,
            evaluation={**summary.evaluation, **evaluation},
            notes=[*summary.notes, *notes, *self.adapter.notes(), *trained_on(config, frames)],
            files=train.describe() if isinstance(train, RowsByFile) else "",
        )


def _extent(rows: TrainingRows) -> str:
    return rows.describe() if isinstance(rows, RowsByFile) else f"{len(rows):,}"


def token_counts(summary: RunSummary, rows: TrainingRows, token_term: str | None = None) -> RunSummary:
    """The summary with the tokens and targets of an epoch of `summary.rows` rows.

    Args:
        summary: without them.
        rows: of training.
        token_term: the loss term whose weight counts targets; without it the largest of all, as of a step.
    """
    if isinstance(rows, RowsByFile):  # not known yet
        return summary
    assert summary.rows is not None
    share = summary.rows / (len(rows) - len(rows.left_out))
    weights = {name: float(each.sum() - each[rows.left_out].sum()) for name, each in rows.term_weights.items()}
    return replace(
        summary,
        tokens=round(float(rows.trained_lengths.sum(dtype="int64")) * share),
        targets=supervised(weights, token_term or TOKENS) * share,
    )


def set_name(paths: Sequence[str]) -> str:
    """The evaluation set that a worker's `build_dataloader` is called for; "" for one without a name."""
    return paths.name if isinstance(paths, DataPaths) else ""
