"""The public functions that give a model, and its config and processor, from a section of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ValidationError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from shardtune.config import ActorConfig, ModelConfig, Recipe, load_recipe
from shardtune.config.model_names import TASKS
from shardtune.config.tree import get_value
from shardtune.errors import ConfigError
from shardtune.models.activation_checkpointing import set_execution
from shardtune.models.check_sizes import check_sizes
from shardtune.models.find_adapter import (
    OWN_CONFIGS,
    causal_lm,
    config_and_processor,
    images_of,
    tokenizer_of,
    vision_language,
    vision_language_action,
)
from shardtune.models.policies.names import policy_class
from shardtune.models.pretrained import load_config, load_tokenizer, no_model_path
from shardtune.models.registered_functions import MODEL_TYPES, registered_model, registered_parts, with_overrides
from shardtune.models.tasks.names import task_class
from shardtune.parallel.meta_init import init_empty_weights
from shardtune.parallel.shard_units import choose_units

Section = TypeVar("Section", bound=BaseModel)

IN_OTHER_SECTIONS = ("data.train_data_paths", "data.eval_data_paths", "actor.model.model_path")
"""Keys that a recipe may lack from which a model alone is read."""


def get_model(
    cfg: ModelConfig | Mapping[str, object], override_config_kwargs: Mapping[str, object] | None = None
) -> nn.Module:
    """The model of `actor.model`, its parameters on the meta device; its own forward takes `labels` and returns a loss.

    Args:
        cfg: the section `actor.model`.
        override_config_kwargs: further settings of the model's config.

    Raises:
        ConfigError: a key is unknown, or sizes are not the model's.
    """
    config = _section(ModelConfig, cfg, "actor.model")
    make = registered_model(config, override_config_kwargs)
    if make is not None:
        made = make()
        if isinstance(made, PreTrainedModel):
            check_sizes(config.model_copy(update={"image_size": None}), made.config)
        set_execution(made, choose_units(made)[0], config)
        return made
    model_type = config.model_type
    if model_type == "vision_language_action":
        recipe = Recipe(actor=ActorConfig(model=with_overrides(config, override_config_kwargs)))
        adapter = vision_language_action(recipe, recipe.actor.model)
    elif (ready := policy_class(model_type) or task_class(model_type)) is not None:
        adapter = ready.from_recipe(Recipe(actor=ActorConfig(model=config)))
        with init_empty_weights():
            model = adapter.build()
        adapter.set_execution(model)
        return model
    else:
        kinds = {"causal_lm": causal_lm, "vision_language": vision_language}
        adapter = kinds.get(model_type, causal_lm)(config, overrides=override_config_kwargs)
    with init_empty_weights():
        model = adapter.build()
    adapter.set_execution(model)
    adapter.sharing.one_row_per_forward(model)  # a user's batch is padded, so the model's own attention reads its mask
    return model


def get_model_config_and_processor(
    cfg: ActorConfig | Mapping[str, object],
) -> tuple[PreTrainedConfig, ProcessorMixin | PreTrainedTokenizerBase]:
    """The config and the processor of a model: from a registered function, or from its directories.

    The tokenizer of a built-in model type pads at the left, as generation needs it.

    Args:
        cfg: the section `actor`, or a whole recipe; `model` and `tokenizer.tokenizer_model` are read (without the
            latter, `model.model_path`).

    Raises:
        ConfigError: a key is unknown, sizes in `model` are not the model's, or the function returns something else.
        ModelError: there is no such directory, or it lacks something.
    """
    actor = _section(ActorConfig, cfg, "actor")
    model, source = actor.model, actor.tokenizer.tokenizer_model or actor.model.model_path
    if model.model_type not in MODEL_TYPES:
        return registered_parts(actor)
    if source is None:
        raise no_model_path()
    at = model if model.model_path is not None else model.model_copy(update={"model_path": source})
    if model.model_type == "causal_lm" or model.model_type in TASKS:
        config, processor = (
            load_config(at, classes=OWN_CONFIGS),
            load_tokenizer(source, trust_remote_code=model.trust_remote_code),
        )
        tokenizer, images = processor, None
    else:
        config, processor = config_and_processor(at, None, None, source)
        tokenizer, images = tokenizer_of(processor), images_of(processor, config)
    tokenizer.padding_side = "left"
    check_sizes(model, config, tokenizer, images)
    return config, processor


def _section(kind: type[Section], cfg: object, at: str) -> Section:
    """A section of a recipe that a caller passes: as it is, or as a mapping, also within a whole recipe."""
    given = OmegaConf.to_container(cfg, resolve=True) if isinstance(cfg, DictConfig) else cfg
    if isinstance(given, kind):
        return given
    outside = {*Recipe.model_fields, *ActorConfig.model_fields} - kind.model_fields.keys()
    if isinstance(given, Mapping) and not outside.isdisjoint(given):
        recipe = load_recipe(given, in_memory=IN_OTHER_SECTIONS, files_must_exist=False)
        return kind.model_validate(get_value(recipe.to_dict(), at))
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([at, *(str(part) for part in first["loc"])])
        raise ConfigError(
            f"{key}: {first['msg']}", where=key, remedy=f"pass {at} of a recipe; docs/configuration.md has its keys"
        ) from error
