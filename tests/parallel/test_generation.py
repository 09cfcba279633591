"""`generate` of a model whose answers end before those of other ranks, without a cache and with one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from shardtune.parallel.generation import keep_step

LATER = 3
"""Forwards of other ranks after the answers here have ended."""


def made() -> Any:
    config: Any = PreTrainedConfig
    return Counts(config(num_hidden_layers=1))


class Counts(PreTrainedModel, GenerationMixin):
    """The next token is the number of tokens that are not masked."""

    config_class = PreTrainedConfig
    main_input_name = "input_ids"

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.weight = nn.Parameter(torch.ones(1))
        self.widths: list[tuple[int, int]] = []

    def prepare_inputs_for_generation(self, input_ids: Any, *_: Any, **kwargs: Any) -> dict[str, Any]:
        return {"input_ids": input_ids, "attention_mask": kwargs["attention_mask"]}

    def forward(self, input_ids: Any, attention_mask: Any, **_: Any) -> CausalLMOutput:
        self.widths.append((input_ids.shape[1], attention_mask.shape[1]))
        counts = ((input_ids > 0) * attention_mask).cumsum(1)  # of equal widths, as for any attention over all tokens
        return CausalLMOutput(logits=nn.functional.one_hot(counts, 16).float() * self.weight)


def goes_on(model: Any) -> None:
    """Let it run the forwards of other ranks."""
    left = iter(range(LATER))
    keep_step(model)
    model.__dict__["_has_unfinished_sequences"] = lambda ended, *_, **__: not ended or next(left, None) is not None


def test_tokens_and_mask_stay_equally_long_after_the_end() -> None:
    ids, mask = torch.tensor([[0, 5, 5], [5, 5, 5]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    given: dict[str, Any] = {"attention_mask": mask, "eos_token_id": 5, "pad_token_id": 0, "max_new_tokens": 8}
    alone = made().generate(ids, **given)
    assert alone.tolist() == [[0, 5, 5, 2, 3, 4, 5], [5, 5, 5, 3, 4, 5, 0]]

    model = made()
    goes_on(model)
    assert torch.equal(model.generate(ids, **given, synced_gpus=True), alone)
    assert model.widths == [(width, width) for width in (3, 4, 5, 6, *[7] * LATER)]


def test_a_mask_stays_as_long_as_what_a_cache_holds() -> None:
    ids, mask = torch.tensor([[0, 5, 5], [5, 5, 5]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))
    given: dict[str, Any] = {"attention_mask": mask, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 3}
    alone = model.generate(ids, **given)

    widths: list[int] = []
    goes_on(model)
    model.register_forward_pre_hook(
        lambda _, __, named: widths.append(named["attention_mask"].shape[1]), with_kwargs=True
    )
    assert torch.equal(model.generate(ids, **given, synced_gpus=True), alone)
    assert widths == list(range(3, 3 + 3 + LATER))
