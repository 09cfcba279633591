"""The task that drives an adapter: packed rows, its loss, evaluation by loss, answers and episodes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from shardtune.batch import Batch, Metric, Sample
from shardtune.batch.seeds import derive_seed
from shardtune.config import ActorConfig, Recipe
from shardtune.data.cache.by_file import TrainingRows, rows_to_show
from shardtune.data.cache.dataset import TokenDataset
from shardtune.data.loader.packing import pack
from shardtune.data.loader.step_loader import BatchMaker, Changes, Limits
from shardtune.data.prepare import PreparedData, WeighedRows
from shardtune.errors import ConfigError, ModelError, ShardtuneError
from shardtune.evaluate.closed_loop import METRICS, ClosedLoop, play
from shardtune.evaluate.loss import BLOCK_MICRO_BATCHES, sum_evaluation, summarize
from shardtune.models.action.absolute import absolute_policy
from shardtune.models.action.acting import ActingAdapter
from shardtune.models.action.chunks import ObservationHistory, too_many_steps
from shardtune.models.adapter import Adapter, AdapterRoot
from shardtune.models.adapter_contract import check_value_head
from shardtune.models.causal_lm import CausalLM
from shardtune.models.distillation import Distillation
from shardtune.models.fast_parts.start import TOKENS, FastParts, fast_parts
from shardtune.models.language_model import LanguageModel, LanguageRoot
from shardtune.models.packing_probe import LONGEST
from shardtune.models.policies.policy import Policy
from shardtune.models.recipe_hooks import Hooks
from shardtune.models.source_losses import SourceLosses
from shardtune.models.tasks.task import Record, TaskRoot, TextTask
from shardtune.models.teacher import unknown_tokens
from shardtune.models.value_loss import ValueLoss, explained, metrics_of
from shardtune.models.whole_step_adapter import WholeStepAdapter
from shardtune.parallel.precision import COMPUTE_DTYPE
from shardtune.parallel.ranks import Ranks
from shardtune.training.build.model import build_empty
from shardtune.training.build.teacher import ShardedTeacher
from shardtune.training.build.teacher_targets import stored_teacher
from shardtune.training.ranks_in_turn import in_turn
from shardtune.training.run_summary import RunSummary
from shardtune.training.step import ROW_DRAWS, Accumulate, Totals, accumulate
from shardtune.training.whole_step_loss import WholeStep
from shardtune.training.worker.cached_rows import CachedRowsTask, EvaluationSet, token_counts
from shardtune.training.worker.loss_probe import probe_loss
from shardtune.training.worker.run_context import silent
from shardtune.training.worker.task import Evaluated, Evaluation, UserMethods
from shardtune.training.worker.user_task import UserSets

LONG_WORK = 1e11
"""Tokens times parameters: on a CPU some twenty seconds of comparing rows before training begins."""


class AdapterTask(CachedRowsTask):
    """An adapter's model, trained on packed rows; arguments as `CachedRowsTask` has them.

    Args:
        hooks: the recipe's own loss and metrics.
        ranks: of the run.
        training: whether the model is trained, with the fast parts that the recipe names.
    """

    def __init__(
        self,
        recipe: Recipe,
        adapter: Adapter,
        prepared: PreparedData,
        methods: UserMethods,
        *,
        hooks: Hooks,
        ranks: Ranks,
        training: bool = True,
    ) -> None:
        super().__init__(recipe, adapter, prepared, methods)
        self._hooks = hooks
        self._training = training
        self._fast_parts: FastParts | None = None
        self._ranks = ranks
        self._whole_step = WholeStep(adapter, ranks) if isinstance(adapter, WholeStepAdapter) else None
        self._episodes = episodes(recipe, adapter)
        self._user_sets = UserSets(methods, recipe)
        sources = () if prepared.train is None else prepared.train.sources
        self._source_losses: SourceLosses | None = None
        if len(sources) > 1 and isinstance(adapter, CausalLM):
            self._source_losses = SourceLosses([span.name for span in sources], [span.start for span in sources])
            adapter.source_losses = self._source_losses

    # The model.

    def build_model(self) -> tuple[nn.Module, list[str]]:
        """The adapter's root over a model without memory, and notes."""
        model, notes = build_empty(self.adapter.build, self.recipe.runner.seed)
        check_value_head(self.adapter, model)
        return self._hooks.attach(self.adapter.root(model)), notes

    def inner_model(self, model: nn.Module) -> nn.Module:
        return root_of(model).model

    def set_execution(self, model: nn.Module) -> None:
        self.adapter.set_execution(model)

    def probe_assumptions(
        self, model: nn.Module, device: torch.device, report: Callable[[str], None] = silent
    ) -> list[str]:
        """Verify the adapter's assumptions about the model on two real rows; if they fail, do without them."""
        samples, dtype = self._longest_rows(), COMPUTE_DTYPE[self.recipe.actor.model.precision]
        root = root_of(model)
        if not samples:
            return []
        work = len(samples) * min(samples[0].length, LONGEST) * sum(each.numel() for each in root.model.parameters())
        if device.type == "cpu" and isinstance(self.adapter, CausalLM | TextTask) and work > LONG_WORK:
            report("comparing rows that share a forward with rows alone, on two of them: on a CPU for minutes")
        if self._training and isinstance(root, LanguageRoot) and isinstance(self.adapter, CausalLM):
            self._fast_parts = fast_parts(root.model, self.recipe.actor.model)
        if self._fast_parts is None:
            return self.adapter.probe_assumptions(root, samples, device, dtype)
        notes = self._start(self._fast_parts, root, samples[0], device, dtype)
        with self._fast_parts.without_fp8():
            return [*notes, *self.adapter.probe_assumptions(root, samples, device, dtype)]

    def probe_loss(self, model: nn.Module, device: torch.device) -> list[str]:
        samples, evaluates = self._longest_rows(), bool(self.prepared.evals)
        if not self._may_try(samples):
            return []
        return probe_loss(model, root_of(model), self.adapter, samples, device, evaluates=evaluates)

    def _may_try(self, samples: Sequence[Sample]) -> bool:
        """Whether these two rows may share a forward, and the loss of the user's adapter is a sum over rows."""
        adapter, actor = self.adapter, self.recipe.actor
        own = self.has_users_loss and not isinstance(adapter, CausalLM)
        most = actor.max_tokens_per_micro_batch
        fits = actor.micro_batch_size != 1 and (most is None or sum(sample.length for sample in samples) <= most)
        # Compiled, each form takes minutes; in units of FSDP1 a loss that fails leaves a state in which none computes.
        fits &= not actor.model.compile and (actor.training_backend != "fsdp1" or self._ranks.world_size == 1)
        rows = len(samples) == 2 and adapter.rows_share_forwards and not isinstance(adapter, WholeStepAdapter)
        return own and fits and rows

    @torch.no_grad()
    def _start(
        self, parts: FastParts, root: AdapterRoot, sample: Sample, device: torch.device, dtype: torch.dtype
    ) -> list[str]:
        """Compare fast parts with plain ones on the first tokens of a row."""
        assert isinstance(root, LanguageRoot)
        assert isinstance(self.adapter, CausalLM)
        row = self.adapter.shortened(sample, TOKENS)
        batch, positions = self.adapter.collate([row], [0], {}).to(device), torch.arange(1, device=device)
        was_training = root.training
        root.eval()
        try:
            return parts.start(lambda: root.reference_logits(batch, positions), self._ranks, dtype)
        finally:
            root.train(was_training)

    def _longest_rows(self) -> list[Sample]:
        """Two of them; none without rows."""
        rows = next(iter(self.all_rows()), None)
        if rows is None:
            return []
        rows = rows_to_show(rows)
        longest = np.argpartition(rows.trained_lengths, -min(2, len(rows)))[-2:]
        return [rows.row(int(index)) for index in longest]

    def build_teacher(self, model: nn.Module, ranks: Ranks, report: Callable[[str], None]) -> list[str]:
        loss, found = self._hooks.token_loss, self._hooks.teacher
        if not isinstance(loss, Distillation) or found is None:
            return []
        teacher = self.recipe.actor.teacher
        notes = [f"loss: {teacher.divergence} to the teacher {teacher.model_path}; eval/loss is cross-entropy"]
        notes += unknown_tokens(self.adapter.tokenizer, found.tokenizer)
        if self.recipe.actor.teacher.top_k is None:
            loss.teacher = self._teacher(model, ranks, notes)
            return notes
        rows, most = self.training_rows(), self.recipe.actor.micro_batch_size
        assert isinstance(rows, TokenDataset)  # `data.cache: by_file` is refused with `top_k`

        def computing() -> tuple[ShardedTeacher, Iterator[Batch]]:
            teacher = self._teacher(model, ranks, notes)
            maker = self.maker(self.weighed(rows), most, ranks)
            return teacher, iter(EvaluationSet(rows, maker, self.rows_per_block(rows, most, ranks)))

        assert isinstance(self.adapter, CausalLM)
        with self.adapter.sharing.kept(root_of(model).model):  # the same where its tokens are in the cache
            loss.teacher = stored_teacher(self.recipe, rows, ranks, self._columns(), computing, report)
        return notes

    def _columns(self) -> int:
        """The logits that model and teacher both have."""
        assert self._hooks.teacher is not None
        assert isinstance(self.adapter, CausalLM)
        return min(self.adapter.vocabulary, self._hooks.teacher.vocabulary)

    def _teacher(self, model: nn.Module, ranks: Ranks, notes: list[str]) -> ShardedTeacher:
        """The teacher with its weights; what it cannot do with a micro-batch, the model stops doing."""
        found, adapter, actor = self._hooks.teacher, self.adapter, self.recipe.actor
        assert found is not None
        assert isinstance(adapter, CausalLM)
        teacher = ShardedTeacher(self.recipe, found, ranks)
        dtype = COMPUTE_DTYPE[actor.teacher.precision or actor.model.precision]
        notes += teacher.notes
        notes += [
            f"teacher: {note}"
            for note in found.probe_assumptions(teacher.root, self._longest_rows(), ranks.device, dtype)
        ]
        if adapter.sharing.packs and not found.sharing.packs:
            adapter.sharing.one_row_per_forward(root_of(model).model, "its teacher's rows cannot be packed")
        if not found.sharing.packs:
            adapter.sharing.share_by_length(False)
        return teacher

    def restore_model(self, model: nn.Module) -> None:
        if self._fast_parts is not None:
            self._fast_parts.restore()
            self._fast_parts = None  # it holds the model
        super().restore_model(model)
        if isinstance(self._hooks.token_loss, Distillation):
            self._hooks.token_loss.teacher = None

    # Rows.

    def weighed(self, rows: TrainingRows) -> WeighedRows:
        return WeighedRows(rows, self.adapter.row_terms())

    def maker(
        self, rows: WeighedRows, max_rows: int | None, ranks: Ranks, changes: Changes | None = None
    ) -> BatchMaker:
        limits = Limits(
            max_rows if self._rows_share_forwards else 1,
            self.recipe.actor.max_tokens_per_micro_batch,
            of_one_length=not self.adapter.rows_share_forwards and self.adapter.rows_of_one_length,
            filled=self.fills,
        )
        rank, number = ranks.data_rank, ranks.num_data_ranks
        seed = self.recipe.runner.seed if self._users_code_makes_batches else None
        return BatchMaker(rows, limits, self.adapter, rank=rank, num_ranks=number, changes=changes, seed=seed)

    @property
    def _users_code_makes_batches(self) -> bool:
        kind = type(self.adapter)
        methods = (kind.collate, kind.filler, kind.augmented)
        return not all(method.__module__.startswith("shardtune.") for method in methods)

    @property
    def _rows_share_forwards(self) -> bool:
        return self.adapter.rows_share_forwards or self.adapter.rows_of_one_length

    @property
    def fills(self) -> bool:
        """Not where the model, a loss over whole steps or a worker of a user's could count documents."""
        wanted, dtype = self.recipe.actor.fill_micro_batches, COMPUTE_DTYPE[self.recipe.actor.model.precision]
        if wanted is None:
            wanted = self._ranks.device.type == "cpu" and dtype.itemsize == 2
        outputs = (self.methods.get_train_model_output, self.methods.get_eval_model_output)
        own = all(output.__module__.startswith("shardtune.") for output in outputs)
        return self.adapter.may_be_filled and wanted and self._whole_step is None and own

    @property
    def num_processes(self) -> int:
        data = self.recipe.data
        return data.num_workers if self.adapter.prepares_in_processes or data.augmentation.is_on else 0

    def rows_per_block(self, rows: TokenDataset, max_rows: int | None, ranks: Ranks) -> int:
        if self._whole_step is not None:
            return self._whole_step.rows_per_evaluation
        per_forward = (max_rows or 16) if self._rows_share_forwards else 1
        return per_forward * BLOCK_MICRO_BATCHES * ranks.num_data_ranks

    # Training.

    @property
    def accumulate(self) -> Accumulate:
        if self._whole_step is not None:
            return self._whole_step.accumulate
        by_source = accumulate if self._source_losses is None else partial(_by_source, self._source_losses)
        found = in_turn(by_source, self.stands_for)
        values = self.adapter.value_loss if isinstance(self.adapter, CausalLM) else None
        return found if values is None else partial(_with_values, values, self._ranks, found)

    @property
    def losses_add_up(self) -> bool:
        return self._whole_step is None

    # Evaluation.

    def evaluate_set(
        self, name: str, loader: Iterable[object], info: Mapping[str, object], evaluation: Evaluation
    ) -> Evaluated:
        if not isinstance(loader, EvaluationSet):
            return self._user_sets.evaluate(name, loader, info, evaluation)
        key = derive_seed(self.recipe.runner.seed, ROW_DRAWS)  # no step: each row is evaluated with the same draws
        blocks = ([replace(batch, key=key) for batch in block] for block in loader.blocks())
        sums, of_set = self._summed(blocks, evaluation)
        token_term = self.adapter.token_term if isinstance(self.adapter, LanguageModel) else None
        metrics = summarize(explained(sums), token_term) | of_set
        if isinstance(self.adapter, TextTask):
            return Evaluated(metrics)
        if not self.recipe.eval.generate:
            return Evaluated(metrics)
        judged = self.answers.generate(name, loader.rows, evaluation).judged
        return Evaluated(metrics | judged.metrics(), samples=judged.samples)

    def _summed(
        self, blocks: Iterator[Sequence[Batch]], evaluation: Evaluation
    ) -> tuple[dict[str, Metric], dict[str, float]]:
        """The sums of losses and metrics over a set, and of a task by name the metrics of the whole set."""
        root = evaluation.model
        with root.keeping() if isinstance(root, TaskRoot) else nullcontext({}) as kept:
            if self._whole_step is not None:
                forward = self.methods.get_train_model_output
                sums = self._whole_step.evaluate(forward, blocks, poll=evaluation.poll)
            else:
                batches = itertools.chain.from_iterable(blocks)
                sums = sum_evaluation(self.measured, batches, evaluation.ranks, poll=evaluation.poll)
        if not isinstance(self.adapter, TextTask):
            return sums, {}
        everyone: dict[int, Record] = {}
        for part in evaluation.ranks.gather(kept):
            everyone |= part
        return sums, self.adapter.set_metrics([everyone[row] for row in sorted(everyone)]) if everyone else {}

    def logits_of(self, root: LanguageRoot, tokens: torch.Tensor) -> torch.Tensor:
        if self._rows_share_forwards:
            return _logits(root, tokens)
        return torch.cat([_logits(root, row) for row in tokens.split(1)])

    @property
    def plays_episodes(self) -> bool:
        return self._episodes is not None

    def evaluate_episodes(self, evaluation: Evaluation) -> Mapping[str, float]:
        if self._episodes is None or not isinstance(self.adapter, ActingAdapter):
            return {}
        policy = absolute_policy(self.adapter, root_of(evaluation.model), evaluation.device)
        score = play(self._episodes, policy, evaluation.ranks, folder=evaluation.episodes_dir, poll=evaluation.poll)
        return score.metrics()

    def metric_names(self) -> list[str] | None:
        if not isinstance(self.adapter, LanguageModel | TextTask):
            return None
        terms = self.loss_terms()
        if isinstance(self.adapter, TextTask):
            names = ["loss", *(f"loss/{term}" for term in terms if len(terms) > 1), *self.adapter.set_metric_names]
            names = self._hooks.all_names(names)
            return [f"eval/{name}/{key}" if name else f"eval/{key}" for name in self.prepared.evals for key in names]
        perplexity = ["perplexity"] if self.adapter.token_term in terms else []
        names = ["loss", *perplexity, "token_accuracy", *(f"loss/{term}" for term in terms if len(terms) > 1)]
        names += self.adapter.metric_names
        if self.recipe.eval.generate:
            names += ["eval_accuracy", "unparsed"]
        names = self._hooks.all_names(names)
        of_sets = [f"eval/{name}/{key}" if name else f"eval/{key}" for name in self.prepared.evals for key in names]
        return self.and_scores([*of_sets, *(f"eval/{name}" for name in (METRICS if self.plays_episodes else ()))])

    def describe(self, summary: RunSummary) -> RunSummary:
        summary = super().describe(summary)
        if not isinstance(self.adapter, LanguageModel):
            return summary
        alone = "rows of one length" if self.adapter.rows_of_one_length else "one row"
        packed = "rows end to end, each attends to itself alone (compared on two rows)"
        packed += ", filled up to a few sizes" if self.fills else ""
        summary = replace(summary, attention=packed if self.adapter.rows_share_forwards else f"{alone} per forward")
        summary = token_counts(summary, self.training_rows(), self.adapter.token_term)
        if self.adapter.rows_share_forwards and (note := _half_empty(summary, self.recipe.actor, self._ranks)):
            summary = replace(summary, notes=[*summary.notes, note])
        return summary


def _half_empty(summary: RunSummary, actor: ActorConfig, ranks: Ranks) -> str:
    """A sentence where the limit of rows leaves most of the tokens unused that the other limit allows; otherwise "".

    Rows of 500 tokens and limits of 2 rows and 8,192 tokens make forwards of 1,000 tokens.
    """
    rows, most = actor.micro_batch_size, actor.max_tokens_per_micro_batch
    if rows is None or most is None or not summary.rows or not summary.tokens:
        return ""
    length = summary.tokens / summary.rows
    in_step = actor.global_batch_size or (actor.global_batch_tokens or 0) / length
    if 2 * rows * length >= most or in_step <= rows * ranks.num_data_ranks:
        return ""
    return (
        f"a forward pass has at most {rows} rows (actor.micro_batch_size), some {rows * length:,.0f} of the {most:,} "
        "tokens that actor.max_tokens_per_micro_batch allows; actor.micro_batch_size: null leaves that limit alone"
    )


def _by_source(losses: SourceLosses, *arguments: Any, **settings: Any) -> Totals:
    """As `accumulate`, with the loss of each source among the metrics."""
    losses.clear()
    totals = accumulate(*arguments, **settings)
    return replace(totals, metrics={**totals.metrics, **losses.metrics()})


def _with_values(values: ValueLoss, ranks: Ranks, inner: Accumulate, *arguments: Any, **settings: Any) -> Totals:
    """As `inner`, with the metrics of the value head, which are the same on every rank."""
    values.clear()
    totals = inner(*arguments, **settings)
    own = {
        name: Metric(each.mean, 1.0) for name, each in metrics_of(ranks.sum(values.moments())).items() if each.weight
    }
    return replace(totals, metrics={**totals.metrics, **own})


def _logits(root: LanguageRoot, tokens: torch.Tensor) -> torch.Tensor:
    """The logits [rows, tokens, vocabulary] of rows of one length, in one forward."""
    number, length = tokens.shape
    rows = [Sample(row, np.zeros(length, np.float32)) for row in tokens.cpu().numpy()]
    positions = torch.arange(tokens.numel(), device=tokens.device)
    return root.logits(pack(rows, range(number), {}).to(tokens.device), positions).view(number, length, -1)


def root_of(model: nn.Module) -> AdapterRoot:
    """The sharded module, with its type.

    Raises:
        ModelError: an overridden `model_provider_func` returned another type.
    """
    if isinstance(model, AdapterRoot):
        return model
    raise ModelError(
        f"model_provider_func returned a {type(model).__name__}, not an adapter's root",
        where="model_provider_func",
        remedy="return what super().model_provider_func() returns, changed in place; a worker over a module of your "
        "own derives from shardtune.FSDPSftWorker",
    )


OBSERVATION = "observation"
"""Where errors of an observation lie."""


def episodes(recipe: Recipe, adapter: Adapter) -> ClosedLoop | None:
    """The episodes that a recipe configures, with a tested environment; None without any.

    Raises:
        ConfigError: the model cannot act, the environment cannot be used or shows what the model cannot act on, or more
            actions of a chunk are to be executed than a ready policy predicts.
    """
    found = ClosedLoop.of(recipe)
    if found is None:
        return None
    if not isinstance(adapter, ActingAdapter):
        raise ConfigError(
            f"eval.environment: {type(adapter).__name__} describes no model that acts in an environment",
            where=recipe.where("eval.environment") or "eval.environment",
            remedy="leave it out, or use actor.model.model_type: vision_language_action; an adapter of your own "
            "derives from shardtune.models.action.acting.ActingAdapter",
        )
    observation = found.check()
    if found.action_steps is None and found.temporal_ensembling is None:
        found = replace(found, action_steps=adapter.action_steps, temporal_ensembling=adapter.temporal_ensembling)
    found = replace(found, observation_steps=adapter.observation_steps)
    try:
        adapter.check_observation(ObservationHistory(found.observation_steps).see(observation))
    except ShardtuneError as error:
        other = "" if (error.where or OBSERVATION).startswith(OBSERVATION) else f", {error.where}"
        raise ConfigError(
            f"the first observation of {found.source.name}: {error.what}",
            where=f"eval.environment: {recipe.eval.environment}{other}",
            remedy=error.remedy,
        ) from error
    steps = found.action_steps or 0
    if isinstance(adapter, Policy) and steps > adapter.chunk_size:
        raise too_many_steps(steps, adapter.chunk_size)
    return found
