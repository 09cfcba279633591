"""The worker that drives an adapter: packed rows from the cache, its loss, evaluation by loss and by answers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
from omegaconf import DictConfig
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardtune.batch import Batch, Metric, Prompt
from shardtune.checkpoint.hf_load import check_weights
from shardtune.config import Recipe, load_recipe
from shardtune.config.rank_layout import Layout
from shardtune.data.cache.dataset import TokenDataset
from shardtune.data.chat.encoder import ChatEncoder
from shardtune.data.encoder import Encoder
from shardtune.data.loader.order import DataOrder, OrderSource
from shardtune.data.loader.step_loader import BatchMaker, Limits, Step, StepLoader
from shardtune.data.prepare import PreparedData, WeighedRows, prepare_data
from shardtune.errors import ConfigError, ModelError
from shardtune.evaluate.answers import Answers, answered_rows, make_matcher
from shardtune.evaluate.closed_loop import METRICS, ClosedLoop, play
from shardtune.evaluate.generate import Generator, Sampling
from shardtune.evaluate.loss import (
    BLOCK_MICRO_BATCHES,
    as_metrics,
    check_monitors,
    evaluation_blocks,
    sum_evaluation,
    summarize,
)
from shardtune.models.action.acting import ActingAdapter
from shardtune.models.adapter import Adapter, AdapterRoot, LanguageModel, LanguageRoot, WeightSource, WholeStepAdapter
from shardtune.models.causal_lm import TOKENS
from shardtune.models.find_adapter import find_adapter
from shardtune.models.lora.attach import detach_adapter
from shardtune.models.new_tokens import add_new_tokens
from shardtune.models.pretrained import has_tokenizer, model_directory
from shardtune.models.recipe_hooks import Hooks
from shardtune.optim.build import build_optimizer, check_optimizer
from shardtune.parallel.fsdp2 import COMPUTE_DTYPE
from shardtune.parallel.model_parallel import ModelParallel
from shardtune.parallel.ranks import num_ranks
from shardtune.training.build.lora import adapt, check_stored, is_adapter
from shardtune.training.build.model import build_empty, freeze
from shardtune.training.run_summary import RunSummary
from shardtune.training.step import Accumulate, accumulate
from shardtune.training.whole_step_loss import WholeStep
from shardtune.training.worker.base import FSDPSftWorker
from shardtune.training.worker.model_state import over_directory, silent

GENERATION_ROWS = 64
NAMED_ROWS = 8
"""Rows of a step that was passed over that are named one by one."""


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """One evaluation set as this rank sees it: its rows, and what cuts them into micro-batches."""

    rows: TokenDataset
    maker: BatchMaker
    rows_per_block: int
    num_processes: int = 0

    def blocks(self) -> Iterator[tuple[Batch, ...]]:
        """This rank's micro-batches, as many as every other rank's; each row comes exactly once."""
        return evaluation_blocks(len(self.rows), self.maker, self.rows_per_block, self.num_processes)

    def __iter__(self) -> Iterator[Batch]:
        return chain.from_iterable(self.blocks())


class SFTWorker(FSDPSftWorker):
    """Fine-tunes a causal language model on the rows that the recipe names.

    Making it tokenises the data, before this process joins the others.

    Args:
        cfg: the recipe.
        model: a model in memory instead of `actor.model.model_path`.
        tokenizer: a tokenizer in memory.
        train_data: rows in memory.
        eval_data: rows in memory, or named sets of them.
        prepared: data that is tokenised already.
        training: False for a worker that only evaluates and answers.
        report: receives what is found while the data is prepared.

    Attributes:
        episodes_dir: where the table and the videos of episodes are kept; None: in `samples_dir`, by their step.
    """

    Options = None  # those of the recipe are the adapter's

    def __init__(
        self,
        cfg: DictConfig | Recipe,
        *,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        train_data: Any = None,
        eval_data: Any = None,
        prepared: PreparedData | None = None,
        training: bool = True,
        report: Callable[[str], None] = print,
    ) -> None:
        recipe = cfg if isinstance(cfg, Recipe) else load_recipe(cfg)
        if tokenizer is not None:
            add_new_tokens(tokenizer, recipe.actor.added_tokens)
        self.adapter: Adapter = find_adapter(recipe, model=model, tokenizer=tokenizer)
        self._in_memory = model
        self._hooks = Hooks.of(recipe, self.adapter, training=training)
        if recipe.eval.generate and not isinstance(self.adapter, LanguageModel):
            raise ConfigError(
                f"eval.generate: {type(self.adapter).__name__} describes no language model, so it gives no answers",
                where=recipe.where("eval.generate"),
                remedy="leave it out; metrics(model, batch) of the adapter, or eval.metrics, measure what is right",
            )
        self._closed_loop = _closed_loop(recipe, self.adapter)
        check_optimizer(recipe.actor.optim, num_ranks(recipe.runner))
        self._matcher = make_matcher(recipe.eval)
        self.prepared: PreparedData = prepared or prepare_data(
            recipe, self._encoder, train_data=train_data, eval_data=eval_data, training=training, report=report
        )
        for rows in (self.prepared.train, *self.prepared.evals.values()):
            if rows is not None:
                self.adapter.check_rows(rows.lengths, rows.locate)
        self._hooks.check_terms(self._loss_terms(), self.adapter)
        super().__init__(recipe)
        self.episodes_dir: Path | None = None
        encoder, self.processor = self.prepared.encoder, self.adapter.processor
        if isinstance(encoder, ChatEncoder):
            self.tokenizer, self.end_of_turn_ids = encoder.tokenizer, encoder.stop_token_ids
            self.chat_template = None if encoder.template is None else encoder.template.text
        elif has_tokenizer(recipe):
            self.tokenizer = self.adapter.tokenizer
        self.report = report

    def _encoder(self, with_prompts: bool) -> Encoder:
        return self.adapter.encoder(with_prompts=with_prompts)

    def check(self) -> None:
        """Find what is wrong with model, weights, optimizer and monitors; builds nothing that takes memory.

        For a process that starts ranks: what they would find one after the other is known before.
        """
        config = self.recipe.actor.model
        self.adapter.check_layout(Layout.of(self.recipe.actor, num_ranks(self.recipe.runner)))
        model, _ = build_empty(self.adapter.build, self.recipe.runner.seed)
        adapt(model, self.recipe, self.tokenizer, self.initial_weights)
        freeze(model, config.freeze)
        self.adapter.shard_units(model)
        source = None if config.from_scratch else self.adapter.initial_weights()
        if isinstance(model, PreTrainedModel) and isinstance(source, (str, Path)):
            check_weights(model, model_directory(str(source)), grow=bool(self.recipe.actor.added_tokens))
        check_stored(model, config)
        trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        build_optimizer(trainable, self.recipe.actor.optim)
        check_monitors(self.recipe.runner, self.evaluation_metrics())

    def data_files(self) -> list[dict[str, Any]]:
        return self.prepared.files()

    def describe_data(self) -> dict[str, Any]:
        template = self.chat_template
        digest = hashlib.sha256(template.encode()).hexdigest() if template else None
        return {**self.prepared.describe(), "template_hash": digest}

    def summary(self) -> RunSummary:
        rows, loader = self.prepared.train, self.loader
        assert rows is not None
        share = loader.rows_per_epoch / len(rows)
        told = replace(
            super().summary(), evaluation={name: len(evaluated) for name, evaluated in self.prepared.evals.items()}
        )
        if not isinstance(self.adapter, LanguageModel):
            return told
        alone = "rows of one length" if self.adapter.rows_of_one_length else "one row"
        packed = "rows end to end, each attends to itself alone (proved on two rows)"
        return replace(
            told,
            attention=packed if self.adapter.rows_share_forwards else f"{alone} per forward",
            tokens=round(float(rows.lengths.sum(dtype="int64")) * share),
            targets=float(rows.term_weights[TOKENS].sum()) * share,
        )

    def reopened(self, directory: Path) -> Self:
        recipe = over_directory(self.recipe, directory)
        base = self._in_memory if is_adapter(directory) else None
        if base is not None:
            detach_adapter(base)
        fresh = type(self)(recipe, model=base, prepared=self.prepared, training=False, report=silent)
        fresh.weights_directory = directory
        return fresh

    @property
    def can_generate(self) -> bool:
        return isinstance(self.adapter, LanguageModel) and not isinstance(self.adapter, ActingAdapter)

    def chat_encoder(self) -> ChatEncoder:
        """What turns a conversation into a prompt.

        Raises:
            ModelError: the model is none that answers.
        """
        encoder = self.prepared.encoder
        if not isinstance(encoder, ChatEncoder) or not isinstance(self.adapter, LanguageModel):
            raise ModelError(
                f"{type(self.adapter).__name__} describes no language model, so it gives no answers",
                where="actor.model.adapter",
                remedy="use shardtune eval; answers need an adapter that derives from shardtune's LanguageModel",
            )
        return encoder

    def evaluation_metrics(self) -> list[str] | None:
        terms = self._loss_terms()
        if not isinstance(self.adapter, LanguageModel):
            return None
        names = ["loss", "perplexity", "token_accuracy", *(f"loss/{term}" for term in terms if len(terms) > 1)]
        names += self.adapter.metric_names
        if self.recipe.eval.generate:
            names += ["eval_accuracy", "unparsed"]
        names = self._hooks.all_names(names)
        episodes = () if self._closed_loop is None else METRICS
        of_sets = [f"eval/{name}/{key}" if name else f"eval/{key}" for name in self.prepared.evals for key in names]
        return [*of_sets, *(f"eval/{name}" for name in episodes)]

    def _loss_terms(self) -> set[str]:
        sets = [rows for rows in (self.prepared.train, *self.prepared.evals.values()) if rows is not None]
        return {term for rows in sets for term in rows.term_weights} | set(self.adapter.row_terms())

    def model_provider_func(self) -> nn.Module:
        model, notes = build_empty(self.adapter.build, self.recipe.runner.seed)
        self.notes += notes
        self.adapter.set_execution(model)
        return self._hooks.attach(self.adapter.root(model))

    def build_again(self) -> nn.Module:
        return self.adapter.build()

    @property
    def root(self) -> AdapterRoot:
        """The sharded module, as the type that it is."""
        assert isinstance(self.model, AdapterRoot)
        return self.model

    def inner_model(self) -> nn.Module:
        return self.root.model

    def initial_weights(self) -> WeightSource:
        return None if self.recipe.actor.model.from_scratch else self.adapter.initial_weights()

    def shard_units(self, model: nn.Module) -> list[nn.Module]:
        units, note = self.adapter.shard_units(model)
        if note and self.ranks.world_size > 1:
            self.notes.append(note)
        return units

    def apply_model_parallel(self, model: nn.Module) -> ModelParallel:
        return self.adapter.apply_model_parallel(model, self.ranks)

    def evaluation_sets(self) -> dict[str, list[str]]:
        return {name: [] for name in self.prepared.evals}

    def name_rows(self, step: Step) -> str:
        assert self.prepared.train is not None
        named = [self.prepared.train.locate(int(row)) for row in step.rows[:NAMED_ROWS]]
        return ", ".join(named) + (f" and {len(step.rows) - NAMED_ROWS} more" if len(step.rows) > NAMED_ROWS else "")

    def restore_model(self) -> None:
        self.adapter.restore_model(self.inner_model())

    def probe_assumptions(self) -> None:
        """Prove, on two real rows, what the adapter relies on; otherwise do without."""
        rows = next((rows for rows in (self.prepared.train, *self.prepared.evals.values()) if rows is not None), None)
        if rows is None:
            return
        longest = np.argpartition(rows.lengths, -min(2, len(rows)))[-2:]
        samples = [rows.row(int(index)) for index in longest]
        dtype = COMPUTE_DTYPE[self.recipe.actor.model.precision]
        self.notes += self.adapter.probe_assumptions(self.root, samples, self.device, dtype)

    def build_dataloader(self, data_paths: list[str], eval_dataset: bool = False) -> tuple[Any, dict[str, Any]]:
        """The training rows in steps. (Evaluation sets are built by name.)"""
        rows = self.prepared.train
        actor, data = self.recipe.actor, self.recipe.data
        if rows is None:
            raise ConfigError("this worker was made to evaluate: it has no training rows", where="training=False")
        order = DataOrder(
            [OrderSource(span.name, span.start, span.stop, span.weight) for span in rows.sources],
            seed=self.recipe.runner.seed,
            shuffle=data.shuffle,
            global_batch_size=actor.global_batch_size if actor.global_batch_tokens is None else None,
            global_batch_tokens=actor.global_batch_tokens,
            lengths=rows.lengths,
        )
        weighed = WeighedRows(rows, self.adapter.row_terms())
        maker = self._maker(weighed, actor.micro_batch_size)
        loader = StepLoader(weighed, order, maker, token_term=TOKENS, num_processes=self._processes)
        return loader, {"num_samples": len(rows), "sharded": True}

    def build_evaluation(self, name: str, paths: list[str]) -> tuple[Any, dict[str, Any]]:
        actor = self.recipe.actor
        rows = self.prepared.evals[name]
        max_rows = actor.eval_micro_batch_size or actor.micro_batch_size
        maker = self._maker(WeighedRows(rows, self.adapter.row_terms()), max_rows)
        if isinstance(self.adapter, WholeStepAdapter):
            block = actor.global_batch_size or len(rows)  # a loss of whole steps is evaluated in steps
        else:
            per_forward = (max_rows or 16) if self._rows_share else 1
            block = per_forward * BLOCK_MICRO_BATCHES * self.ranks.num_data_ranks
        return EvaluationSet(rows, maker, block, self._processes), {"num_samples": len(rows), "sharded": True}

    @property
    def _processes(self) -> int:
        return self.recipe.data.num_workers if self.adapter.prepares_in_processes else 0

    @property
    def _rows_share(self) -> bool:
        return self.adapter.rows_share_forwards or self.adapter.rows_of_one_length

    def _maker(self, rows: WeighedRows, max_rows: int | None) -> BatchMaker:
        limits = Limits(
            max_rows if self._rows_share else 1,
            self.recipe.actor.max_tokens_per_micro_batch,
            of_one_length=not self.adapter.rows_share_forwards and self.adapter.rows_of_one_length,
        )
        return BatchMaker(rows, limits, self.adapter, rank=self.ranks.data_rank, num_ranks=self.ranks.num_data_ranks)

    def _accumulate(self) -> Accumulate:
        if isinstance(self.adapter, WholeStepAdapter):
            return WholeStep(self.adapter, self.ranks).accumulate
        return accumulate

    def get_train_model_output(self, batch: Batch) -> Mapping[str, Any]:
        return self.model(batch if self.device.type == "cpu" else batch.to(self.device))

    _train_losses = get_train_model_output  # what the root gives are named sums already

    def get_eval_model_output(self, batch: Batch) -> Mapping[str, Metric]:
        found = self.root.evaluate(batch.to(self.device))
        losses = {f"loss/{name}": Metric(float(term.total), term.weight) for name, term in found.losses.items()}
        return losses | as_metrics(found.metrics, f"{type(self.adapter).__name__}.metrics")

    def evaluate_set(self, name: str, loader: Iterable[Any], info: Mapping[str, Any]) -> dict[str, float]:
        assert isinstance(loader, EvaluationSet)
        if isinstance(self.adapter, WholeStepAdapter):
            step = WholeStep(self.adapter, self.ranks)
            sums = step.evaluate(self.get_train_model_output, loader.blocks(), poll=self.poll)
        else:
            sums = sum_evaluation(self.get_eval_model_output, iter(loader), self.ranks, poll=self.poll)
        metrics = summarize(sums)
        if self.recipe.eval.generate:
            metrics |= self._generated(name, loader.rows)
        return metrics

    # Episodes.

    @property
    def evaluates(self) -> bool:
        return super().evaluates or self._closed_loop is not None

    def run_eval(self) -> dict[str, float]:
        return super().run_eval() | self._episodes()

    def _episodes(self) -> dict[str, float]:
        """Play the episodes that the recipe asks for."""
        if self._closed_loop is None:
            return {}
        assert isinstance(self.adapter, ActingAdapter)
        folder = self.episodes_dir
        if folder is None and self.samples_dir is not None:
            folder = self.samples_dir / f"step_{self.step}"
        self.model.eval()
        try:
            policy = self.adapter.policy(self.root, self.device)
            score = play(self._closed_loop, policy, self.ranks, folder=folder, poll=self.poll)
        finally:
            self.model.train()
        return {f"eval/{name}": value for name, value in score.metrics().items()}

    # Answers.

    def generator(self) -> Generator:
        """Answers prompts with the model as it stands."""
        encoder = self.chat_encoder()
        assert isinstance(self.model, LanguageRoot)
        assert self.tokenizer is not None
        return Generator(self.model, self.tokenizer, encoder.stop_token_ids, self.ranks, GENERATION_ROWS)

    def _generated(self, name: str, rows: TokenDataset) -> dict[str, float]:
        """Answer the set's rows and compare."""
        config = self.recipe.eval
        assert self.tokenizer is not None
        wanted = answered_rows(rows, name, config.num_samples)
        samples = [rows.row(index) for index in wanted]
        prompts = [Prompt(one.prompt_ids, one.fields) for one in samples if one.prompt_ids is not None]
        sampling = Sampling(config.max_new_tokens, config.temperature, seed=self.recipe.runner.seed)
        generator = self.generator()
        written = generator.continuations(prompts, sampling, poll=self.poll)
        texts = [generator.text(tokens) for tokens in written]
        answers = Answers.judge(rows, wanted, texts, self._matcher, self.tokenizer)
        self.samples = answers.samples
        warning = answers.warning(config.answer_pattern)
        if warning and self.ranks.is_main:
            self.report(warning)
        if self.samples_dir is not None and self.ranks.is_main:
            answers.keep(self.samples_dir, self.step, name)
        self.answered(name, [prompt.tokens for prompt in prompts], written)
        return answers.metrics()

    def answered(self, name: str, prompts: Sequence[np.ndarray], answers: Sequence[Sequence[int]]) -> None:
        """Told of an evaluation set's answers, on every rank; by default nothing comes of it.

        Args:
            name: of the set.
            prompts: int32 [length] each.
            answers: the tokens that the model wrote, the stop token included where it came to one.
        """


def _closed_loop(recipe: Recipe, adapter: Adapter) -> ClosedLoop | None:
    """The episodes that a recipe asks for, its environment tried out; None where it asks for none.

    Raises:
        ConfigError: the model is none that acts, or the environment cannot be used.
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
    found.check()
    return found
