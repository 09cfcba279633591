"""The functions that users register under a name: one makes the model, the other its config and processor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from omegaconf import OmegaConf
from torch import nn
from transformers import PreTrainedConfig, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor

from shardtune.config import ActorConfig, ModelConfig
from shardtune.config.model_names import POLICIES, TASKS, known_names, registered_function, registered_processor
from shardtune.errors import ConfigError, ModelError
from shardtune.models.action.check_length import check_made_length, check_stored_length
from shardtune.models.check_sizes import check_sizes

MODEL_TYPES = {
    "causal_lm": "any causal language model of transformers, by its config.json",
    "vision_language": "any model of transformers that takes images and text, by its config.json and processor",
    "vision_language_action": "any of these with a robot's actions as tokens, and directories in OpenVLA's format",
    **TASKS,
    **POLICIES,
}
"""The system's own values of `actor.model.model_type`."""

ATTENTION_REFUSED = ("FlashAttention", "Flash Attention", "attn_implementation")
"""Parts of transformers' messages for an attention implementation that it, the model or the machine does not have."""


def require_known(name: str) -> None:
    """Refuse a `model_type` that is neither built in nor registered."""
    if name in MODEL_TYPES or name in known_names():
        return
    raise ConfigError(
        f"actor.model.model_type = {name} is not known",
        where="actor.model.model_type",
        remedy=(
            f"write adapter: {name} for a class in a file; a model_type is a name under which one is registered"
            if ".py:" in name
            else f"use one of {', '.join([*MODEL_TYPES, *known_names()])} (shardtune models lists them), or name the "
            "file that registers it in plugins"
        ),
    )


def registered_model(
    config: ModelConfig, overrides: Mapping[str, object] | None = None
) -> Callable[[], nn.Module] | None:
    """The function that makes the model of a registered `model_type`; None where none is registered.

    Raises:
        ConfigError: the name is unknown.
    """
    if config.model_type in MODEL_TYPES:
        return None
    require_known(config.model_type)
    function = registered_function(config.model_type)
    if function is None:
        return None
    values = with_overrides(config, overrides).model_dump()
    if config.attn_implementation == "auto":
        values["attn_implementation"] = None  # transformers' own word for its choice

    def make() -> nn.Module:
        check_stored_length(config)
        with _explaining_attention(config):
            made = function(OmegaConf.create(values))
        check_made_length(config, made)
        return made

    return make


@contextmanager
def _explaining_attention(config: ModelConfig) -> Iterator[None]:
    """Run a user's function that makes a model; an attention that transformers refuses is reported with its key."""
    try:
        yield
    except (ImportError, ValueError) as error:
        if not any(sign in str(error) for sign in ATTENTION_REFUSED):
            raise
        raise ModelError(
            f"{config.attn_implementation} cannot be used: {error}",
            where="actor.model.attn_implementation",
            remedy="set it to sdpa or eager; flash_attention_2 needs the package flash-attn and a GPU",
        ) from error


def with_overrides(config: ModelConfig, overrides: Mapping[str, object] | None) -> ModelConfig:
    return config.model_copy(update={"config_overrides": {**config.config_overrides, **(overrides or {})}})


def registered_parts(actor: ActorConfig) -> tuple[PreTrainedConfig, ProcessorMixin]:
    """The config and the processor from the function of a registered name."""
    name = actor.model.model_type
    require_known(name)
    function = registered_processor(name)
    if function is None:
        raise ConfigError(
            f"no function is registered that gives config and processor of {name}",
            where="actor.model.model_type",
            remedy=f'decorate one with register_model({name!r}, gives="config_and_processor")',
        )
    found = function(OmegaConf.create(actor.model_dump()))
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], PreTrainedConfig):
        raise ConfigError(
            f"the function of {name} returned {type(found).__name__}, not a config and a processor",
            where=f'register_model({name!r}, gives="config_and_processor")',
            remedy="return model_config, input_processor",
        )
    config, processor = found
    check_sizes(actor.model, config, images=_image_processor(processor))
    return found


def _image_processor(processor: object) -> BaseImageProcessor | None:
    """The image processor of what a user's function returned; None without one."""
    found = vars(processor).get("image_processor") if isinstance(processor, ProcessorMixin) else processor
    return found if isinstance(found, BaseImageProcessor) else None
