"""The worker that drives an adapter over the rows that a recipe names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, final

from omegaconf import DictConfig
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardtune.batch import Batch, Metric
from shardtune.config import Recipe, load_recipe
from shardtune.config.rank_layout import Layout
from shardtune.config.user_code import names_in
from shardtune.data.audit.limits import check_limits
from shardtune.data.cache.by_file import RowsByFile, TrainingRows
from shardtune.data.cache.dataset import TokenDataset
from shardtune.data.chat.encoder import ChatEncoder
from shardtune.data.encoder import Encoder
from shardtune.data.prepare import PreparedData, prepare_data
from shardtune.errors import ConfigError
from shardtune.evaluate.generate import Generator
from shardtune.evaluate.loss import as_metrics
from shardtune.models.adapter import Adapter, AdapterRoot
from shardtune.models.fast_parts.start import check_available
from shardtune.models.find_adapter import find_adapter
from shardtune.models.language_model import LanguageModel
from shardtune.models.lora.attach import detach_adapter
from shardtune.models.new_tokens import add_new_tokens, notes_on_unseen
from shardtune.models.recipe_hooks import Hooks
from shardtune.models.tasks.seq2seq import Seq2Seq
from shardtune.models.whole_step_adapter import WholeStepAdapter
from shardtune.optim.build import check_optimizer
from shardtune.parallel.ranks import num_ranks
from shardtune.training.build.lora import is_adapter
from shardtune.training.build.model import set_values, without_values
from shardtune.training.train_output import TrainOutput
from shardtune.training.worker.adapter_task import AdapterTask, episodes, root_of
from shardtune.training.worker.base import FSDPSftWorker
from shardtune.training.worker.cached_rows import CachedRowsTask, set_name
from shardtune.training.worker.even_fields import check_shapes
from shardtune.training.worker.exported_recipe import over_directory
from shardtune.training.worker.policy_files import policy_files
from shardtune.training.worker.run_context import silent
from shardtune.training.worker.task import Task
from shardtune.training.worker.user_evaluation import EvalOutput

OWN = "shardtune."
"""Prefix of the package's own modules."""


class SFTWorker(FSDPSftWorker):
    """Fine-tunes the model of an adapter, by default a causal language model, on the rows that the recipe names.

    The constructor tokenises the data, before this process joins the others. A subclass may override the same methods
    as one of `FSDPSftWorker`; the others keep their behaviour. Batches are then `Batch`es of packed rows, and
    `loss_weights` is only for batches of the subclass's own loader.

    Args:
        cfg: the recipe.
        model: a model in memory instead of `actor.model.model_path`.
        tokenizer: a tokenizer in memory.
        train_data: rows in memory.
        eval_data: rows in memory, or named sets of them.
        prepared: data that is tokenised already.
        training: False for a worker that only evaluates and answers.
        report: receives messages while the data is prepared.

    Attributes:
        adapter: describes the model.
        prepared: the encoded rows.
    """

    Options = None  # the recipe's options are the adapter's
    _called_by: ClassVar[Mapping[str, Sequence[str]]] = {
        "get_train_model_output": ("run_training",),
        "get_eval_model_output": ("run_eval",),
    }

    def __init__(
        self,
        cfg: DictConfig | Recipe,
        *,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        train_data: object = None,
        eval_data: object = None,
        prepared: PreparedData | None = None,
        training: bool = True,
        report: Callable[[str], None] = print,
    ) -> None:
        recipe = cfg if isinstance(cfg, Recipe) else load_recipe(cfg)
        if tokenizer is not None:
            add_new_tokens(tokenizer, recipe.actor.added_tokens)
        self.adapter: Adapter = find_adapter(recipe, model=model, tokenizer=tokenizer)
        self.adapter.train_data = train_data
        self._in_memory = model
        self._trains = training
        if training:
            check_available(recipe)
        sharded = model is not None and recipe.actor.model.is_lora and num_ranks(recipe.runner) > 1
        self._empty_base = without_values(model) if model is not None and sharded else None
        self._hooks = Hooks.of(recipe, self.adapter, training=training)
        _check_generation(recipe, self.adapter)
        episodes(recipe, self.adapter)  # created before the rows are encoded, which may take long
        layout = Layout.of(recipe.actor, num_ranks(recipe.runner))
        check_optimizer(recipe.actor.optim, layout)
        self.prepared: PreparedData = prepared or prepare_data(
            recipe, self._encoder, train_data=train_data, eval_data=eval_data, training=training, report=report
        )
        actor, most = recipe.actor, recipe.actor.micro_batch_size
        if most and actor.global_batch_size:
            most = min(most, math.ceil(actor.global_batch_size / layout.num_data_ranks))
        self._check_rows(self.prepared.train, most)
        for rows in self.prepared.evals.values():
            self._check_rows(rows, actor.eval_micro_batch_size or actor.micro_batch_size)
        if training and prepared is None:
            check_limits(recipe, self.prepared, report)
        super().__init__(recipe)
        self._hooks.check_terms(self._rows_task.loss_terms(), self.adapter)
        text = self._rows_task.text
        self.tokenizer, self.processor, self.chat_template = text.tokenizer, text.processor, text.chat_template
        self.end_of_turn_ids = text.end_of_turn_ids
        self.saved_files = {**text.files, **policy_files(recipe, self.adapter)}
        self.report = report
        if training and text.tokenizer is not None and self.prepared.whole is not None:
            tokens = recipe.actor.tokenizer.new_tokens
            self.notes += notes_on_unseen(text.tokenizer, tokens, self.prepared.whole)

    def _check_rows(self, rows: TrainingRows | None, most: int | None) -> None:
        """Refuse rows that the model cannot take, or that cannot be stacked; `most` of them are in a micro-batch."""
        is_stacked = most != 1 and type(self).build_dataloader is SFTWorker.build_dataloader

        def check(file: TokenDataset) -> None:
            self.adapter.check_rows(file.lengths, file.locate)
            if is_stacked:
                check_shapes(self.adapter, file)

        if isinstance(rows, RowsByFile):
            rows.follow(lambda file: check(file) if len(file) else None)
        elif rows is not None:
            check(rows)

    def _encoder(self, with_prompts: bool) -> Encoder:
        return self.adapter.encoder(with_prompts=with_prompts)

    def _make_task(self) -> Task:
        self._refuse_unused_overrides()
        self._rows_task: CachedRowsTask = AdapterTask(
            self.recipe,
            self.adapter,
            self.prepared,
            self._methods(),
            hooks=self._hooks,
            ranks=self.ranks,
            training=self._trains,
        )
        return self._rows_task

    def _refuse_unused_overrides(self) -> None:
        """Refuse methods that nothing would call."""
        whole_step = isinstance(self.adapter, WholeStepAdapter)
        if whole_step and type(self).get_eval_model_output is not SFTWorker.get_eval_model_output:
            raise ConfigError(
                f"{type(self).__name__}.get_eval_model_output would never be called: the loss of "
                f"{type(self.adapter).__name__} is one of whole steps, in evaluation too",
                where="actor.worker",
                remedy="leave the method out; what is measured belongs into step_loss of the adapter",
            )

        for name, outer in self._called_by.items():
            _check_called(type(self), name, outer)

    # The methods that a subclass may write.

    def model_provider_func(self) -> nn.Module:
        """The adapter's root, its parameters on the meta device."""
        model, notes = self._rows_task.build_model()
        self.notes += notes
        return model

    def build_dataloader(self, data_paths: list[str], eval_dataset: bool = False) -> tuple[Any, dict[str, Any]]:
        """The training rows in steps, or the rows of the evaluation set that `data_paths.name` names."""
        if eval_dataset:
            found = self._rows_task.evaluation_set(set_name(data_paths), self.ranks)
            return found, {"num_samples": len(found.rows), "sharded": True}
        loader = self._rows_task.training_loader(self.ranks)
        return loader, {**({"num_samples": loader.num_samples} if loader.is_counted else {}), "sharded": True}

    def get_train_model_output(self, batch: Batch) -> TrainOutput:
        """The adapter's loss of a micro-batch, as `LossSum`s by term."""
        return self.model(batch if self.device.type == "cpu" else batch.to(self.device))

    def get_eval_model_output(self, batch: Batch) -> EvalOutput:
        """The losses of a micro-batch as `loss/<term>`, and the adapter's metrics."""
        found = self.root.evaluate(batch.to(self.device))
        losses = {f"loss/{name}": Metric(float(term.total), term.weight) for name, term in found.losses.items()}
        return losses | as_metrics(found.metrics, f"{type(self.adapter).__name__}.metrics")

    def release(self) -> None:
        if self._empty_base is not None and "state" in vars(self) and self.evaluates:
            set_values(self._empty_base, self.state.base_values())
        super().release()

    def reopened(self, directory: Path) -> Self:
        recipe = over_directory(self.recipe, directory)
        base = self._in_memory if is_adapter(directory) else None
        if base is not None and self._empty_base is not None:
            base = self._empty_base  # the model itself is sharded
        elif base is not None:
            detach_adapter(base)
        fresh = type(self)(
            recipe, model=base, prepared=self.prepared, training=False, report=silent, **self._reopened_with()
        )
        fresh._empty_base = None
        return fresh

    def _reopened_with(self) -> dict[str, Any]:
        """Further arguments of the constructor that a reopened worker shares with this one."""
        return {}

    # What a run reads.

    @property
    @final
    def root(self) -> AdapterRoot:
        """The sharded module, with its type."""
        return root_of(self.model)

    @final
    def chat_encoder(self) -> ChatEncoder:
        """The encoder of conversations as prompts; see `TaskAnswers.encoder`."""
        return self._rows_task.answers.encoder()

    @final
    def generator(self) -> Generator:
        """A generator of answers with the current weights; see `TaskAnswers.generator`."""
        return self._rows_task.answers.generator(self.model, self.ranks)


def _check_called(kind: type[SFTWorker], name: str, callers: Sequence[str]) -> None:
    """Refuse a method that is never called, because a subclass overrides all of its callers without calling it."""
    users = [base for base in kind.__mro__ if issubclass(base, SFTWorker) and not base.__module__.startswith(OWN)]
    written = {key: value for base in reversed(users) for key, value in vars(base).items()}
    if name not in written or not all(caller in written for caller in callers):
        return
    calling = [caller for caller in callers if names_in(written[caller]) & {caller, "super"}]
    named = [key for base in users for key, value in vars(base).items() if key != name and name in names_in(value)]
    if not calling and not named:
        raise ConfigError(
            f"{kind.__name__}.{name} would never be called: {' and '.join(callers)} of the same class do not call it",
            where="actor.worker",
            remedy=f"call self.{name}(batch) there, or leave it out",
        )


def _check_generation(recipe: Recipe, adapter: Adapter) -> None:
    for key in ("num_samples", "answer_pattern", "match"):
        if isinstance(adapter, Seq2Seq) and key in recipe.eval.model_dump(exclude_defaults=True):
            raise ConfigError(
                f"eval.{key} has no effect with model_type: seq2seq, whose answers to all rows are compared by ROUGE",
                where=recipe.where(f"eval.{key}"),
                remedy="leave it out",
            )
    if recipe.eval.generate and not isinstance(adapter, LanguageModel | Seq2Seq):
        raise ConfigError(
            f"eval.generate: {type(adapter).__name__} describes no language model, so it gives no answers",
            where=recipe.where("eval.generate"),
            remedy="leave it out; metrics(model, batch) of the adapter, or eval.metrics, measure what is right",
        )
