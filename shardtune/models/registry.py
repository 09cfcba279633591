"""From a recipe's `actor.model` to a model: its config, its tokenizer, its adapter."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shardtune.config import ModelConfig
from shardtune.errors import ConfigError, ModelError
from shardtune.models.causal_lm import CausalLM

MODEL_TYPES = {"causal_lm": "any causal language model of transformers, by its config.json"}
MODEL_PATH = "actor.model.model_path"
OVERRIDES = "actor.model.config_overrides"
GIVE_A_MODEL = (
    "give the directory (or Hub name) of a model: config.json, weights and tokenizer, as save_pretrained writes them"
)
TRUST = "read that code; if you trust it, set actor.model.trust_remote_code=true"
SETTINGS = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")
"""What of a Hub model is fetched besides weights."""


def load_config(config: ModelConfig, overrides: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """The model's own config with `actor.model.config_overrides`."""
    path = config.model_path
    if path is None:
        raise no_model_path()
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise ModelError(f"{path} holds no config.json, so it is no model", where=MODEL_PATH, remedy=GIVE_A_MODEL)
    try:
        loaded = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise ModelError(
            f"{path} holds no config.json that transformers knows: {_first_line(error)}",
            where=MODEL_PATH,
            remedy=TRUST if "trust_remote_code" in str(error) else GIVE_A_MODEL,
        ) from error
    _override(loaded, {**config.config_overrides, **(overrides or {})})
    return loaded


def _override(config: PreTrainedConfig, overrides: Mapping[str, Any]) -> None:
    """Set `actor.model.config_overrides`, and check that the settings agree with each other."""
    text = config.get_text_config()
    known = text.to_dict()
    for key in overrides:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise ConfigError(
                f"actor.model.config_overrides.{key} is not a setting of {type(config).__name__}",
                where=OVERRIDES,
                remedy=f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(known))}",
            )
    try:
        for key, value in overrides.items():
            setattr(text, key, value)
        text.validate()
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{OVERRIDES} = {dict(overrides)}: {_last_line(error)}"
            if overrides
            else f"the model's config.json contradicts itself: {_last_line(error)}",
            where=OVERRIDES if overrides else MODEL_PATH,
            remedy=f"choose values of actor.model.config_overrides that {type(config).__name__} takes",
        ) from error


def no_model_path() -> ConfigError:
    return ConfigError(
        "actor.model.model_path is not set", where=MODEL_PATH, remedy="give the directory (or Hub name) of the model"
    )


def model_directory(path: str) -> Path:
    """The directory with a model's files: the one that is named, or the copy of what a Hub name names."""
    if Path(path).is_dir() or Path(path).is_absolute():
        return Path(path)
    try:
        folder = Path(snapshot_download(path, allow_patterns=[*SETTINGS, "*.safetensors"]))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(path, allow_patterns=[*SETTINGS, "*.bin"]))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelError(
            f"the weights of {path} cannot be fetched from the Hub: {_first_line(error)}",
            where=MODEL_PATH,
            remedy="check the name, your access (huggingface-cli login) and the network, or give a directory",
        ) from error
    return folder


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory or Hub name."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raises plain Exceptions for a torn file
        raise ModelError(
            f"{path} holds no tokenizer that can be read: {_first_line(error)}",
            where="actor.tokenizer.tokenizer_model",
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
            where="actor.model.model_type",
            remedy=(
                f"use one of {', '.join(MODEL_TYPES)} (shardtune models lists them), or name the file that registers "
                "it in plugins"
            ),
        )
    if config.adapter is not None:
        raise ConfigError(
            f"actor.model.adapter = {config.adapter} is not supported in this version of shardtune",
            where="actor.model.adapter",
            remedy="leave it out and use actor.model.model_type: causal_lm, or a worker of your own",
        )
    loaded = load_config(config, overrides)
    covered = type(loaded) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in (
        loaded.to_dict().get("auto_map") or {}
    )
    if not covered:
        raise ModelError(
            f"{config.model_path} holds a model of type {loaded.model_type!r}, which is no causal language model",
            where=f"{MODEL_PATH}: config.json",
            remedy="give one of the architectures that shardtune models lists",
        )
    return CausalLM(
        loaded,
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
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _last_line(error: BaseException) -> str:
    return next(reversed(str(error).strip().splitlines()), type(error).__name__).strip()
