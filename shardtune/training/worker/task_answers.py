"""Answers of a task's language model: to the prompts of an evaluation set, and to a user's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from shardtune.batch import Prompt
from shardtune.config import Recipe
from shardtune.data.cache.dataset import TokenDataset
from shardtune.data.chat.encoder import ChatEncoder
from shardtune.data.prepare import PreparedData
from shardtune.errors import ModelError
from shardtune.evaluate.answers import Answers, answered_rows, make_matcher
from shardtune.evaluate.generate import Generator, Sampling
from shardtune.models.adapter import Adapter
from shardtune.models.language_model import LanguageModel, LanguageRoot
from shardtune.parallel.ranks import Ranks
from shardtune.training.worker.task import Evaluation

GENERATION_ROWS = 64


@dataclass(frozen=True, slots=True)
class Generated:
    """The answers to the prompts of an evaluation set.

    Attributes:
        prompts: int32 [length] each.
        answers: the tokens that the model wrote, including the stop token if it was reached.
        judged: compared with the expected answers.
    """

    prompts: Sequence[np.ndarray]
    answers: Sequence[Sequence[int]]
    judged: Answers


class TaskAnswers:
    """The answers of a task's model.

    Args:
        recipe: of the run.
        adapter: describes the model.
        prepared: the encoded rows and their encoder.
    """

    def __init__(self, recipe: Recipe, adapter: Adapter, prepared: PreparedData) -> None:
        self._recipe = recipe
        self._adapter = adapter
        self._prepared = prepared
        self._matcher = make_matcher(recipe.eval)
        self._explained: set[str] = set()  # evaluation sets whose unmatched answers have been reported

    def encoder(self) -> ChatEncoder:
        """The encoder of conversations as prompts.

        Raises:
            ModelError: the model cannot generate.
        """
        encoder = self._prepared.encoder
        if not isinstance(encoder, ChatEncoder) or not isinstance(self._adapter, LanguageModel):
            raise ModelError(
                f"{type(self._adapter).__name__} describes no language model, so it gives no answers",
                where="actor.model.adapter",
                remedy="use shardtune predict RUN"
                if self._adapter.predicts_rows
                else "use shardtune eval; answers need an adapter that derives from shardtune's LanguageModel",
            )
        return encoder

    def generator(self, model: nn.Module, ranks: Ranks) -> Generator:
        """A generator of answers with the current weights.

        Raises:
            ModelError: the model cannot generate.
        """
        encoder = self.encoder()
        if not isinstance(model, LanguageRoot):
            raise ModelError(
                f"model_provider_func returned a {type(model).__name__}, which generates no answers",
                where="model_provider_func",
                remedy="return what super().model_provider_func() returns, changed in place",
            )
        stops, opening = encoder.stop_token_ids, encoder.answer_opening
        return Generator(model, encoder.tokenizer, stops, ranks, GENERATION_ROWS, opening)

    def generate(self, name: str, rows: TokenDataset, evaluation: Evaluation) -> Generated:
        """Generate answers for the rows of a set and compare them with the references."""
        config = self._recipe.eval
        indices = answered_rows(rows, name, config.num_samples)
        samples = [rows.row(index) for index in indices]
        prompts = [Prompt(one.prompt_ids, one.fields) for one in samples if one.prompt_ids is not None]
        sampling = Sampling(config.max_new_tokens, config.temperature, seed=self._recipe.runner.seed)
        generator = self.generator(evaluation.model, evaluation.ranks)
        written = generator.continuations(prompts, sampling, poll=evaluation.poll)
        texts = [generator.text(tokens) for tokens in written]
        answers = Answers.judge(rows, indices, texts, self._matcher, self.encoder().tokenizer)
        warning = "" if evaluation.before_training else answers.warning(config.answer_pattern)
        if warning and evaluation.ranks.is_main and name not in self._explained:
            self._explained.add(name)  # further evaluations of a run have the number alone
            evaluation.report(warning)
        if evaluation.samples_dir is not None and evaluation.ranks.is_main:
            answers.keep(evaluation.samples_dir, evaluation.step, name)
        return Generated([prompt.tokens for prompt in prompts], written, answers)
