"""From a recipe's `actor.model` to a model: its config, its tokenizer, its adapter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from shardtune.config import ModelConfig
from shardtune.errors import ConfigError, ModelError
from shardtune.models.causal_lm import CausalLM

MODEL_TYPES = {"causal_lm": "any causal language model of transformers, by its config.json"}


def load_config(config: ModelConfig, overrides: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """The model's own config with `actor.model.config_overrides`."""
    path = config.model_path
    if path is None:
        raise ConfigError("actor.model.model_path is not set", remedy="give the directory (or Hub name) of the model")
    try:
        loaded = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{path} holds no model that transformers knows: {_first_line(error)}",
            where="actor.model.model_path",
            remedy="give a directory with a config.json and weights",
        ) from error
    text = loaded.get_text_config()
    for key, value in {**config.config_overrides, **(overrides or {})}.items():
        if key not in text.to_dict():
            raise ConfigError(
                f"actor.model.config_overrides.{key} is not a setting of {type(loaded).__name__}",
                remedy=f"it has {', '.join(sorted(text.to_dict()))}",
            )
        setattr(text, key, value)
    return loaded


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory or Hub name."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{path} holds no tokenizer: {_first_line(error)}",
            where="actor.tokenizer.tokenizer_model" if Path(path).is_dir() else "actor.model.model_path",
            remedy="give the directory of one as actor.tokenizer.tokenizer_model",
        ) from error


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Refuse a tokenizer with tokens that the model has no embedding for."""
    rows = int(config.get_text_config().vocab_size)
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= rows:
        raise ModelError(
            f"the tokenizer has token ids up to {largest}, the model's embedding has {rows} rows",
            where=f"{tokenizer.name_or_path or 'tokenizer'}",
            remedy=(
                "use the model's own tokenizer, or make the embedding larger first: "
                "model.resize_token_embeddings(len(tokenizer)) and save_pretrained; with actor.model.from_scratch, "
                f"config_overrides: {{vocab_size: {largest + 1}}}"
            ),
        )


def causal_lm(
    config: ModelConfig, *, wrap: list[str] | None = None, overrides: Mapping[str, Any] | None = None
) -> CausalLM:
    """The adapter of a recipe's causal language model."""
    if config.model_type not in MODEL_TYPES:
        raise ConfigError(
            f"actor.model.model_type = {config.model_type} is not known",
            remedy=f"use one of {', '.join(MODEL_TYPES)} (shardtune models lists them)",
        )
    return CausalLM(
        load_config(config, overrides),
        attn_implementation=config.attn_implementation,
        wrap=wrap,
        trust_remote_code=config.trust_remote_code,
        compile=config.compile,
        gradient_checkpointing=config.gradient_checkpointing,
        precision=config.precision,
    )


def get_model(
    cfg: ModelConfig | Mapping[str, Any], override_config_kwargs: Mapping[str, Any] | None = None
) -> nn.Module:
    """The model of `actor.model`, its parameters on the meta device; its own forward takes `labels` and returns a loss.

    Args:
        cfg: the section `actor.model`.
        override_config_kwargs: further settings of the model's config.
    """
    config = cfg if isinstance(cfg, ModelConfig) else ModelConfig.model_validate(dict(cfg))
    adapter = causal_lm(config, overrides=override_config_kwargs)
    model = adapter.build()
    adapter.one_row_per_forward(model)  # a user's batch is padded, so the model's own attention reads its mask
    return model


def known_architectures() -> list[str]:
    """The `model_type`s of config.json files that `causal_lm` covers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
