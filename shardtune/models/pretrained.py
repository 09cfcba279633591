"""Config, tokenizer and files of a model directory or Hub name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, StrictDataclassError
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from shardtune.config import ModelConfig, Recipe
from shardtune.config.hub_name import split_revision
from shardtune.errors import ConfigError, ModelError
from shardtune.models.new_tokens import add_new_tokens

MODEL_PATH = "actor.model.model_path"
OVERRIDES = "actor.model.config_overrides"
GIVE_A_MODEL = (
    "give the directory (or Hub name) of a model: config.json, weights and tokenizer, as save_pretrained writes them"
)
NO_COPY = "no copy of a model of this name from the Hub, which cannot be reached (or HF_HUB_OFFLINE is set)"
TRUST_KEY = "trust_remote_code"
"""Its name in the message of transformers where a model's own code would run and nobody has consented."""
TRUST = f"read that code; if you trust it, set actor.model.{TRUST_KEY}=true"
SETTINGS = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")
"""Files that are downloaded besides weights."""
TERMS = ("LICENSE*", "LICENCE*", "License*", "license*", "NOTICE*", "Notice*", "COPYING*", "USE_POLICY*")
"""Files with the terms on which a model may be used and passed on; downloaded, too."""
GENERATION = "generation_config.json"
"""The settings of generation."""


def load_config(
    config: ModelConfig,
    overrides: Mapping[str, object] | None = None,
    classes: Mapping[str, type[PreTrainedConfig]] = MappingProxyType({}),
) -> PreTrainedConfig:
    """The model's own config with `actor.model.config_overrides`.

    Args:
        config: the recipe's `actor.model`.
        overrides: further settings, which win over those of the recipe.
        classes: config classes by `model_type` that take precedence over those of transformers.
    """
    path = config.model_path
    if path is None:
        raise no_model_path()
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise ModelError(f"{path} holds no config.json, so it is no model", where=MODEL_PATH, remedy=GIVE_A_MODEL)
    name, revision = split_revision(path)
    of_hub: dict[str, Any] = {} if revision is None else {"revision": revision}
    try:
        kind = classes.get(PreTrainedConfig.get_config_dict(name, **of_hub)[0].get("model_type", ""))
        if kind is not None:
            loaded = kind.from_pretrained(name, **of_hub)
        else:
            loaded = AutoConfig.from_pretrained(name, trust_remote_code=config.trust_remote_code, **of_hub)
    except (OSError, ValueError, KeyError, ImportError, StrictDataclassError) as error:
        raise _unread(path, error) from error
    forget_quantization(loaded)
    _override(loaded, {**config.config_overrides, **(overrides or {})})
    return loaded


def _unread(path: str, error: Exception) -> ModelError:
    """Why a model's config is not read."""
    if TRUST_KEY in str(error):
        what = f"the config of {path} is custom code, which runs only with consent"
        return ModelError(what, where=MODEL_PATH, remedy=TRUST)
    if isinstance(error, ImportError):  # of the custom code
        what = f"the code of {path} cannot be imported: {_first_line(error)}"
        return ModelError(what, where=MODEL_PATH, remedy="install what it needs in this environment")
    what = f"{path} holds no config.json of a model that transformers supports: {_first_line(error)}"
    if is_unreached(error):
        what = f"there is no directory {path} here, and {NO_COPY}"
    near = "" if Path(path).is_dir() else nearest_directory(Path(path))
    return ModelError(what, where=MODEL_PATH, remedy=near + GIVE_A_MODEL)


def is_unreached(error: BaseException | None) -> bool:
    """Whether what transformers raised for a Hub name means that the Hub is not reached and its cache has no copy."""
    return error is not None and isinstance(error.__cause__, LocalEntryNotFoundError)


def nearest_directory(path: Path) -> str:
    """The beginning of a remedy: the directory beside a path that is not there with the nearest name."""
    beside = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=1)
    return f"did you mean {path.parent / near[0]}? " if near else ""


def forget_quantization(config: PreTrainedConfig) -> None:
    """Leaves out of a config how its directory's weights are quantised: those in memory, and those saved, are not.

    What reads weights finds it in the directory.
    """
    vars(config).pop("quantization_config", None)
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name), PreTrainedConfig):
            forget_quantization(part)


def _override(config: PreTrainedConfig, overrides: Mapping[str, object], place: str = OVERRIDES) -> None:
    """Set `actor.model.config_overrides`, and check that the settings are consistent.

    A setting is one of the language model's, one of the whole model's, or one that both have. Those of another part are
    a mapping under its name.

    Args:
        place: of the overrides in the recipe.
    """
    text = config.get_text_config()
    holders = [text] if text is config else [text, config]
    known = {key for holder in holders for key in holder.to_dict()}
    for key in overrides:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise ConfigError(
                f"{place}.{key} is not a setting of {type(config).__name__}",
                where=OVERRIDES,
                remedy=f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(known))}",
            )
    parts = {key: getattr(config, key) for key in overrides if key in config.sub_configs}
    for key in parts:
        _override_part(parts[key], overrides[key], f"{place}.{key}")
    plain = {key: value for key, value in overrides.items() if key not in parts}
    try:
        for holder in holders:
            own = {key: value for key, value in plain.items() if key in holder.to_dict()}
            for key, value in own.items():
                setattr(holder, key, value)
            if own or holder is text:
                holder.validate()
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{place} = {dict(overrides)}: {_last_line(error)}"
            if overrides
            else f"the model's config.json contradicts itself: {_last_line(error)}",
            where=OVERRIDES if overrides else MODEL_PATH,
            remedy=f"choose values of actor.model.config_overrides that {type(config).__name__} takes",
        ) from error


def _override_part(part: object, overrides: object, place: str) -> None:
    """Set the settings of a part of a model."""
    if not isinstance(part, PreTrainedConfig):
        raise ConfigError(f"{place}: this model has no such part", where=OVERRIDES, remedy="leave it out")
    if not isinstance(overrides, Mapping):
        raise ConfigError(
            f"{place} = {overrides!r}: it is a part of the model with settings of its own",
            where=OVERRIDES,
            remedy="give those that change, {name: value}",
        )
    _override(part, overrides, place)


def no_model_path() -> ConfigError:
    return ConfigError(
        "actor.model.model_path is not set", where=MODEL_PATH, remedy="give the directory (or Hub name) of the model"
    )


def model_directory(path: str) -> Path:
    """The directory with a model's files: the given one, or the local copy of a Hub model, `owner/name@revision`."""
    if Path(path).is_dir() or Path(path).is_absolute():
        return Path(path)
    name, revision = split_revision(path)
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*SETTINGS, *TERMS, "*.safetensors"]))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*SETTINGS, *TERMS, "*.bin"]))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelError(
            f"the weights of {path} cannot be fetched from the Hub: {_first_line(error)}",
            where=MODEL_PATH,
            remedy="check the name and its revision (owner/name@revision), your access (hf auth login) and the "
            "network, or give a directory",
        ) from error
    return folder


def settings_directory(path: str | None) -> Path | None:
    """The directory with a model's files of settings: the given one, or the local copy of a Hub model; None if there is
    none."""
    if path is None or Path(path).is_file():
        return None
    if Path(path).exists() or Path(path).is_absolute():
        return Path(path) if Path(path).is_dir() else None
    try:
        name, revision = split_revision(path)
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*SETTINGS, *TERMS]))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError):
        return None


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory or Hub name."""
    remedy = "give the directory of one as actor.tokenizer.tokenizer_model"
    name, revision = split_revision(path)
    of_hub: dict[str, Any] = {} if revision is None else {"revision": revision}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, **of_hub)
    except Exception as error:  # tokenizers raises plain Exceptions for a truncated file
        asked = TRUST_KEY in str(error)
        raise ModelError(
            f"the tokenizer of {path} is custom code, which runs only with consent"
            if asked
            else f"{path} holds no tokenizer that can be read: {_first_line(error)}",
            where="actor.tokenizer.tokenizer_model",
            remedy=TRUST if asked else remedy,
        ) from error
    # Without any files transformers makes some of its tokenizers with special tokens alone.
    if not tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys():
        raise ModelError(
            f"{path} holds no tokenizer: none of its files has a vocabulary",
            where="actor.tokenizer.tokenizer_model",
            remedy=remedy,
        )
    return tokenizer


def recipe_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """The tokenizer of a recipe: its `tokenizer_model`, or else that of its model."""
    source = recipe.actor.tokenizer.tokenizer_model or recipe.actor.model.model_path
    if source is None:
        raise no_model_path()
    tokenizer = load_tokenizer(source, trust_remote_code=recipe.actor.model.trust_remote_code)
    add_new_tokens(tokenizer, recipe.actor.added_tokens)
    return tokenizer


def has_tokenizer(recipe: Recipe) -> bool:
    """Whether a recipe names a tokenizer, or its model's directory holds one."""
    path = recipe.actor.model.model_path
    files = ("tokenizer.json", "tokenizer_config.json")
    return recipe.actor.tokenizer.tokenizer_model is not None or (
        path is not None and any((Path(path) / name).is_file() for name in files)
    )


def check_vocabulary(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, new_tokens: Sequence[str] = ()
) -> None:
    """Refuse a tokenizer with tokens, beyond the new ones, that the model has no embedding for."""
    rows = config.get_text_config().to_dict().get("vocab_size")
    if rows is None:  # CANINE hashes code points
        return
    largest = max((number for token, number in tokenizer.get_vocab().items() if token not in new_tokens), default=-1)
    if largest >= rows:
        raise ModelError(
            f"the tokenizer has token ids up to {largest}, the model's embedding has {rows} rows",
            where=f"{tokenizer.name_or_path or 'tokenizer'}",
            remedy=(
                "use the model's own tokenizer and name what is added in actor.tokenizer.new_tokens, or make the "
                "embedding larger first: model.resize_token_embeddings(len(tokenizer)) and save_pretrained; with "
                f"actor.model.from_scratch, config_overrides: {{vocab_size: {largest + 1}}}"
            ),
        )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _last_line(error: BaseException) -> str:
    return next(reversed(str(error).strip().splitlines()), type(error).__name__).strip()
