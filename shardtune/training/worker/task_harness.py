"""Tasks of lm-evaluation-harness as a part of a run's evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardtune.checkpoint.hf_save import stop_tokens
from shardtune.config import Recipe
from shardtune.errors import ConfigError, ModelError
from shardtune.evaluate.harness import Harness, HarnessModel
from shardtune.evaluate.run_harness import ReadTasks, check_task_names, read_tasks, run_harness
from shardtune.models.adapter import Adapter
from shardtune.models.language_model import LanguageModel, LanguageRoot
from shardtune.parallel.ranks import Ranks
from shardtune.training.worker.model_export import TextParts
from shardtune.training.worker.task import Evaluation

ROWS = 16
"""Requests of a forward pass, without a micro-batch size."""

LogitsOf = Callable[[LanguageRoot, torch.Tensor], torch.Tensor]
"""Maps tokens int64 [rows, tokens] to logits [rows, tokens, vocabulary]."""


class TaskHarness:
    """The harness's tasks that a recipe names.

    Args:
        harness: the settings.
        recipe: of the run.
    """

    def __init__(self, harness: Harness, recipe: Recipe) -> None:
        self._harness = harness
        self._actor = recipe.actor
        self._tasks: ReadTasks | None = None

    @classmethod
    def of(cls, recipe: Recipe, adapter: Adapter) -> TaskHarness | None:
        """Those of a recipe; None without any.

        Raises:
            ConfigError: the model is no language model, or the package is not installed.
        """
        found = Harness.of(recipe)
        if found is not None and not isinstance(adapter, LanguageModel):
            raise found.problem(
                f"{type(adapter).__name__} describes no language model",
                "leave it out, or derive the adapter from shardtune's LanguageModel",
            )
        return None if found is None else cls(found, recipe)

    @property
    def score_names(self) -> Sequence[str] | None:
        """The names of the scores; None before `prepare`."""
        return None if self._tasks is None else self._tasks.score_names

    def check_names(self) -> None:
        """Refuse tasks that the harness does not have."""
        check_task_names(self._harness)

    def prepare(self, text: TextParts, ranks: Ranks) -> None:
        """Read the data of the tasks; every rank calls it.

        Raises:
            ConfigError: the tokenizer has no chat template, which the options name; or a task cannot be read.
        """
        if self._harness.settings.get("apply_chat_template") and _tokenizer(text).chat_template is None:
            raise self._harness.problem(
                "harness_options has apply_chat_template, and the tokenizer has no chat template",
                "give data.chat_template, or leave it out",
            )
        self._tasks = read_tasks(self._harness, ranks)

    def evaluate(self, evaluation: Evaluation, text: TextParts, logits_of: LogitsOf) -> Mapping[str, float]:
        """The scores; none before `prepare`."""
        if self._tasks is None:
            return {}
        model = self._model(evaluation, text, logits_of)
        return run_harness(self._harness, model, self._tasks, poll=evaluation.poll, folder=evaluation.episodes_dir)

    def _model(self, evaluation: Evaluation, text: TextParts, logits_of: LogitsOf) -> HarnessModel:
        root, tokenizer = evaluation.model, _tokenizer(text)
        if not isinstance(root, LanguageRoot) or not isinstance(root.model, PreTrainedModel):
            raise ModelError(
                f"model_provider_func returned a {type(root).__name__}, which lm-evaluation-harness cannot evaluate",
                where="model_provider_func",
                remedy="return what super().model_provider_func() returns, changed in place, or leave eval.harness out",
            )
        own = root.model.generation_config
        stops = stop_tokens(None if own is None else own.eos_token_id, tokenizer, text.end_of_turn_ids)

        def continued(tokens: torch.Tensor, mask: torch.Tensor, arguments: Mapping[str, object]) -> torch.Tensor:
            together = {"synced_gpus": evaluation.ranks.mesh is not None}
            ending = {"eos_token_id": stops} if stops else {}
            return root.generate(tokens, mask, {**ending, **arguments, **together})

        return HarnessModel(
            logits=partial(logits_of, root),
            continued=continued,
            config=root.model.config,
            tokenizer=tokenizer,
            ranks=evaluation.ranks,
            rows=self._actor.eval_micro_batch_size or self._actor.micro_batch_size or ROWS,
        )


def _tokenizer(text: TextParts) -> PreTrainedTokenizerBase:
    """The tokenizer as it is in `final/`."""
    if text.tokenizer is None:
        raise ConfigError("eval.harness needs a tokenizer", where="eval.harness", remedy="leave it out")
    tokenizer = copy(text.tokenizer)
    if text.chat_template is not None:
        tokenizer.chat_template = text.chat_template
    return tokenizer
