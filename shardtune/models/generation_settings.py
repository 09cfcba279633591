"""Settings of generation that a model's `generation_config.json` has, where answers are one text for each prompt."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from transformers import GenerationConfig, PreTrainedModel

ONE_TEXT: Mapping[str, object] = {
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
    "prompt_lookup_num_tokens": None,  # it finds the same tokens, for a single prompt
}
"""What is returned for each prompt; other settings change which tokens are chosen, and stay."""
FROM_PROMPT: Mapping[str, object] = {
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
}
"""Settings that read a prompt's tokens or count them, padding too, and the values without effect. (A repetition
penalty leaves padding out.)"""


def own_settings(model: nn.Module) -> GenerationConfig | None:
    """The settings of a model of transformers that has some; None of others."""
    found = model.generation_config if isinstance(model, PreTrainedModel) and model.can_generate() else None
    return found if isinstance(found, GenerationConfig) else None


def one_text_each(model: nn.Module) -> dict[str, object]:
    """Arguments of `generate` for a single text per prompt, in the place of a model's own settings."""
    return _other(own_settings(model), ONE_TEXT)


def reads_padding(model: nn.Module) -> bool:
    """Whether a model's settings let padding of a prompt change the tokens that are chosen."""
    return bool(_other(own_settings(model), FROM_PROMPT))


def num_beams(model: nn.Module) -> int:
    """The beams of a model's own settings, 1 without."""
    settings = own_settings(model)
    return (settings.num_beams or 1) if settings is not None else 1


def stop_strings(model: nn.Module) -> bool:
    """Whether a model's settings name texts that end an answer, for which `generate` needs the tokenizer."""
    settings = own_settings(model)
    return settings is not None and bool(settings.stop_strings)


def _other(settings: GenerationConfig | None, values: Mapping[str, object]) -> dict[str, object]:
    """The values of those names that have another one in the settings."""
    if settings is None:
        return {}
    return {name: value for name, value in values.items() if getattr(settings, name) not in (None, value)}
