"""The contract of models over rows of tokens, which can also generate."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from shardtune.batch import PackedBatch, Prompt
from shardtune.models.adapter import Adapter, AdapterRoot


class LanguageModel(Adapter):
    """A model over rows of tokens, packed end to end, that can also generate.

    Attributes:
        token_term: the term of its loss that is the mean cross-entropy of tokens, neither scaled nor smoothed, of which
            evaluation computes `eval/perplexity`; None: no term is.
    """

    token_term: ClassVar[str | None] = None

    @property
    def metric_names(self) -> Sequence[str]:
        """The metrics of `evaluate` besides losses and `token_accuracy`."""
        return ()

    @abstractmethod
    def logits(self, model: nn.Module, batch: PackedBatch, positions: torch.Tensor) -> torch.Tensor:
        """[positions, vocabulary]: the logits at these tokens, computed as in `loss`."""

    @abstractmethod
    def reference_logits(self, model: nn.Module, batch: PackedBatch, positions: torch.Tensor) -> torch.Tensor:
        """[positions, vocabulary]: the logits of one row alone, by the model's own forward and its own attention."""

    @abstractmethod
    def generate(
        self, model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, arguments: Mapping[str, object]
    ) -> torch.Tensor:
        """Continue left-padded prompts [rows, tokens]; returns prompts and answers, int64 [rows, longer]."""

    def companion_prompt(self, prompts: Sequence[Prompt]) -> Prompt | None:
        """A prompt that is added to batches without images if another of these prompts has some; None if none has.

        All ranks have to call the same parts of a sharded model.
        """
        return None

    @property
    def max_positions(self) -> int | None:
        """Tokens that the model has positions for, of a prompt and its answer together; None: any number."""
        return None

    def prompts_apart(self, prompt: Prompt) -> bool | None:
        """Whether prompts cannot be continued in a batch, as the model computes each in a way of its own; None if they
        can. Two prompts for which it is True and False call other parts of the model."""
        return None

    def prompt_inputs(self, prompts: Sequence[Prompt], longest: int) -> Mapping[str, torch.Tensor]:
        """Further inputs of `generate` for prompts whose tokens are padded on the left to `longest`."""
        return {}

    def padding_changes(self, model: nn.Module, alone: Mapping[str, Any], padded: Mapping[str, Any]) -> bool:
        """Whether the model computes a prompt otherwise where it is padded, so that prompts of different lengths cannot
        be continued in a batch; by default it does not.

        Args:
            model: as in `generate`.
            alone: its inputs for one prompt.
            padded: those for the same prompt and a longer one.
        """
        return False

    def root(self, model: nn.Module) -> LanguageRoot:
        return LanguageRoot(self, model)


class LanguageRoot(AdapterRoot):
    """A root that also computes logits and generates."""

    entry_points = (*AdapterRoot.entry_points, "logits", "reference_logits", "generate", "padding_changes")

    def __init__(self, adapter: LanguageModel, model: nn.Module) -> None:
        super().__init__(adapter, model)
        self._language = adapter

    def logits(self, batch: PackedBatch, positions: torch.Tensor) -> torch.Tensor:
        return self._language.logits(self.model, batch, positions)

    def reference_logits(self, batch: PackedBatch, positions: torch.Tensor) -> torch.Tensor:
        return self._language.reference_logits(self.model, batch, positions)

    def companion_prompt(self, prompts: Sequence[Prompt]) -> Prompt | None:
        return self._language.companion_prompt(prompts)

    @property
    def max_positions(self) -> int | None:
        return self._language.max_positions

    def prompts_apart(self, prompt: Prompt) -> bool | None:
        return self._language.prompts_apart(prompt)

    def prompt_inputs(self, prompts: Sequence[Prompt], longest: int) -> Mapping[str, torch.Tensor]:
        return self._language.prompt_inputs(prompts, longest)

    def padding_changes(self, alone: Mapping[str, Any], padded: Mapping[str, Any]) -> bool:
        return self._language.padding_changes(self.model, alone, padded)

    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, arguments: Mapping[str, object]
    ) -> torch.Tensor:
        return self._language.generate(self.model, input_ids, attention_mask, arguments)
