"""From a recipe's `actor.model` to the adapter of its model."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeGuard

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from shardtune.config import DataConfig, ModelConfig, Recipe, ValueHeadConfig
from shardtune.config.checks.actions import OF_ACTION_TOKENS
from shardtune.config.model_names import registered, registered_function, registered_processor
from shardtune.config.schema import long_key
from shardtune.config.user_code import load_function
from shardtune.data.encoder import FrameOptions
from shardtune.data.images.augmentation import KEY as AUGMENTATION
from shardtune.data.images.placeholders import ImageText, MarksImages
from shardtune.errors import ConfigError, ModelError
from shardtune.models.action.openvla import OpenVLAConfig
from shardtune.models.action.openvla_processor import load_openvla_processor, openvla_images
from shardtune.models.action.policy import ActionPolicy
from shardtune.models.action.settings import acts_on, kept_statistics, settings_for, used_by_rows
from shardtune.models.action.vision_language_action import VisionLanguageAction
from shardtune.models.adapter import Adapter
from shardtune.models.adapter_contract import check_adapter_class, check_keys_of_actions, check_made
from shardtune.models.causal_lm import CausalLM, CausalLMSettings
from shardtune.models.check_sizes import check_sizes
from shardtune.models.language_model import LanguageModel
from shardtune.models.new_tokens import add_new_tokens
from shardtune.models.policies.names import policy_class
from shardtune.models.pretrained import (
    MODEL_PATH,
    check_vocabulary,
    load_config,
    model_directory,
    no_model_path,
    recipe_tokenizer,
)
from shardtune.models.registered_functions import MODEL_TYPES, registered_model, registered_parts, require_known
from shardtune.models.tasks.names import task_class
from shardtune.models.tasks.task import TextTask
from shardtune.models.vision.processors import load_processor
from shardtune.models.vision.vision_language import VisionLanguage
from shardtune.parallel import peft_names as peft

GIVE_VISION_MODEL = "give the directory of a vision-language model (its config.json names such an architecture)"

SIZES = ("vocab_size", "hidden_size", "image_size")
"""Keys that require a size of the model's."""
OWN_CONFIGS = {OpenVLAConfig.model_type: OpenVLAConfig}
"""Config classes of models that transformers lacks, by the `model_type` of their config.json."""


def find_adapter(
    recipe: Recipe, *, model: PreTrainedModel | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> Adapter:
    """The adapter of a recipe: the class that `actor.model.adapter` names, or the one of `actor.model.model_type`.

    Args:
        recipe: of the run.
        model: a causal language model in memory instead of the recipe's.
        tokenizer: one in memory instead of the recipe's.
    """
    check_in_memory(model, tokenizer)
    config = recipe.actor.model
    if model is not None:
        _check_of_memory(recipe)
    kind = adapter_class(config)
    if kind is not None and model is not None:
        raise ConfigError(
            f"a model in memory cannot be taken: {kind.__name__} builds its own",
            where="model=",
            remedy="leave it out, and let build() of the adapter return the model",
        )
    if kind is not None:
        _check_read(recipe, kind)
        made = kind.from_recipe(recipe, tokenizer)
        if isinstance(made, TextTask) and _sizes(config):
            check_sizes(config, made.config, made.tokenizer)
        check_made(made, _named(config))
        check_keys_of_actions(made)
        return made
    require_known(config.model_type)
    if config.options and registered_function(config.model_type) is None:
        raise ConfigError(
            f"actor.model.options = {config.options}: no part of {config.model_type} reads them",
            where="actor.model.options",
            remedy="leave them out; they are for an adapter or a worker of your own",
        )
    if registered_processor(config.model_type) is not None:
        return _registered_adapter(recipe, tokenizer)
    wrap = recipe.actor.fsdp_config.wrap
    if config.model_type in ("vision_language", "vision_language_action"):
        return _vision_language_adapter(recipe, model, tokenizer)
    _check_read(recipe, CausalLM)
    adapter = causal_lm(config, wrap=wrap, model=model, data=recipe.data)
    adapter.take_tokenizer(tokenizer or recipe_tokenizer(recipe))
    check_vocabulary(adapter.tokenizer, adapter.config, recipe.actor.added_tokens)
    check_sizes(config, adapter.config, adapter.tokenizer)
    return adapter


def _check_of_memory(recipe: Recipe) -> None:
    """Refuse keys that build a model, or change how it is built, beside one in memory, which is trained as it is."""
    model = recipe.actor.model
    given = {
        "from_scratch": model.from_scratch,
        "config_overrides": bool(model.config_overrides),
        "attn_implementation": model.attn_implementation != "auto",
    }
    for name in (name for name, is_given in given.items() if is_given):
        raise ConfigError(
            f"actor.model.{name} has no effect on a model in memory, which is trained as it is",
            where=recipe.where(f"actor.model.{name}") or f"actor.model.{name}",
            remedy="leave it out, and build the model so; or name its directory: actor.model.model_path",
        )


def check_in_memory(model: object, tokenizer: object) -> None:
    """Refuse, as a model or a tokenizer in memory, a name, a path or something else.

    Raises:
        ConfigError: with the key for a path.
    """
    for name, value, kind, key in (
        ("model", model, PreTrainedModel, MODEL_PATH),
        ("tokenizer", tokenizer, PreTrainedTokenizerBase, "actor.tokenizer.tokenizer_model"),
    ):
        if isinstance(value, PreTrainedModel) and any(weight.is_meta for weight in value.parameters()):
            raise ConfigError(
                "the model in memory has weights without values, on the meta device",
                where="model=",
                remedy=f"load its weights first, or name its directory: {MODEL_PATH}",
            )
        if value is None or isinstance(value, kind):
            continue
        is_path = isinstance(value, str | Path)
        is_module = name == "model" and isinstance(value, nn.Module)
        is_adapted = peft.is_imported() and isinstance(value, peft.PeftModel)
        raise ConfigError(
            f"{name}= takes an object in memory, a {kind.__name__} of transformers; this is "
            + (f"the text {value}" if is_path else f"a {type(value).__name__}"),
            where=f"{name}=",
            remedy=f"write it into the recipe: {key}={value}"
            if is_path
            else "give its base model, as it was before get_peft_model, and actor.model.is_lora: true with "
            "actor.model.lora (in HALOs: model.use_peft and model.peft), which adapt it when it is sharded"
            if is_adapted
            else "describe it by an adapter, actor.model.adapter: file.py:Class"
            if is_module
            else f"give one, or name a directory: {key}",
        )


def _registered_adapter(recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None) -> CausalLM:
    """The adapter of a model whose config and processor come from a registered function.

    Its rows are text, or with a processor text and images, or with keys of actions robot data.
    """
    config, data = recipe.actor.model, recipe.data
    loaded, processor = registered_parts(recipe.actor)
    settings = _settings(config, recipe.actor.fsdp_config.wrap, None, data)
    make = registered_model(config)
    if isinstance(processor, PreTrainedTokenizerBase):
        _check_read(recipe, CausalLM)
        adapter = CausalLM(loaded, **settings, make=make)
        adapter.take_tokenizer(tokenizer or processor)
    elif not isinstance(processor, ProcessorMixin):
        raise ConfigError(
            f"the function of {config.model_type} returned a {type(processor).__name__}, which encodes no text",
            where=f'register_model({config.model_type!r}, gives="config_and_processor")',
            remedy="return a tokenizer or a processor of images and text; for other rows write an adapter "
            "(docs/add-a-model.md) or a worker of your own",
        )
    elif not isinstance(processor, MarksImages):
        kind = type(processor).__name__
        raise ConfigError(
            f"{kind} has no image_token, so the places of images in the text of a row are not known",
            where=f'register_model({config.model_type!r}, gives="config_and_processor")',
            remedy="write a worker (actor.worker: file.py:Class), which has the processor as self.processor, or an "
            f"adapter (docs/add-a-model.md); or give {kind} the token that the model replaces by an image",
        )
    elif tokenizer is not None:
        raise _comes_with_processor()
    elif acts_on(recipe):
        acting = tokenizer_of(processor)
        add_new_tokens(acting, recipe.actor.added_tokens)
        actions = settings_for(recipe, loaded, acting)
        form = FrameOptions.of(config, actions.action_chunks_len).representation
        used = partial(used_by_rows, recipe, actions)
        adapter = VisionLanguageAction(
            loaded, processor, actions, used=used, representation=form, values=_values(config), **settings, make=make
        )
        _check_of_frames(recipe, adapter)
    else:
        adapter = VisionLanguage(loaded, processor, **settings, make=make)
    if config.add_value_head and not isinstance(adapter, VisionLanguageAction):
        raise ConfigError(
            f"actor.model.add_value_head: the rows of {config.model_type} are no robot data",
            where=recipe.where("actor.model.add_value_head") or "actor.model.add_value_head",
            remedy="leave it out, or set actor.model.action_chunks_len, which makes it a model of actions",
        )
    add_new_tokens(adapter.tokenizer, recipe.actor.added_tokens)
    check_vocabulary(adapter.tokenizer, loaded, recipe.actor.added_tokens)
    check_sizes(config, loaded, adapter.tokenizer, adapter.images if isinstance(adapter, VisionLanguage) else None)
    return adapter


def _comes_with_processor() -> ConfigError:
    return ConfigError(
        "a tokenizer in memory cannot be taken: a vision-language model's comes with its processor",
        where="tokenizer=",
        remedy="save the processor beside the model, and give that directory as actor.model.model_path",
    )


def _vision_language_adapter(
    recipe: Recipe, model: PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase | None
) -> VisionLanguage:
    """The adapter of a recipe's vision-language model."""
    if tokenizer is not None:
        raise _comes_with_processor()
    config = recipe.actor.model
    acts = config.model_type == "vision_language_action"
    make = vision_language if not acts else partial(vision_language_action, recipe)
    adapter = make(
        config,
        wrap=recipe.actor.fsdp_config.wrap,
        model=model,
        data=recipe.data,
        processor_path=recipe.actor.tokenizer.tokenizer_model,
    )
    if isinstance(adapter, VisionLanguageAction):
        _check_of_frames(recipe, adapter)
    else:
        add_new_tokens(adapter.tokenizer, recipe.actor.added_tokens)
    check_vocabulary(adapter.tokenizer, adapter.config, recipe.actor.added_tokens)
    check_sizes(config, adapter.config, adapter.tokenizer, adapter.images)
    return adapter


def vision_language_action(
    recipe: Recipe,
    config: ModelConfig,
    *,
    wrap: list[str] | None = None,
    model: PreTrainedModel | None = None,
    data: DataConfig | None = None,
    processor_path: str | None = None,
) -> VisionLanguageAction:
    """The adapter of a recipe's action model.

    Args:
        recipe: of the run; its data define the actions where the model does not.
        config, wrap, model, data, processor_path: as for `vision_language`.
    """
    if model is not None and not isinstance(model, ActionPolicy):
        raise ModelError(
            f"the {type(model).__name__} in memory has no actions",
            where="model=",
            remedy="save it and give its directory as actor.model.model_path, or make it with "
            "shardtune.models.action.policy.action_class",
        )
    loaded, processor = config_and_processor(config, None, model, processor_path)
    tokenizer = tokenizer_of(processor)
    add_new_tokens(tokenizer, recipe.actor.added_tokens)
    settings = settings_for(recipe, loaded, tokenizer)
    form = FrameOptions.of(config, settings.action_chunks_len).representation
    others = _settings(config, wrap, model, data)
    values = _values(config)
    used, kept = partial(used_by_rows, recipe, settings), partial(kept_statistics, recipe, settings)
    return VisionLanguageAction(
        loaded, processor, settings, used=used, representation=form, values=values, kept=kept, **others
    )


def _values(config: ModelConfig) -> ValueHeadConfig | None:
    """The value head that a recipe trains, if any."""
    return config.value_head if config.add_value_head else None


def adapter_class(config: ModelConfig) -> type[Adapter] | None:
    """The adapter class that a recipe names, a user's or that of a ready policy or task; None where it names none.

    Raises:
        ConfigError: it is no adapter, or breaks the contract of one.
    """
    if config.adapter is not None:
        found = load_function(config.adapter, "actor.model.adapter")
        if not _is_adapter(found):
            raise ConfigError(
                f"actor.model.adapter: {config.adapter} is no adapter",
                where=_named(config),
                remedy="name a class that derives from shardtune.Adapter",
            )
    elif config.model_type in MODEL_TYPES:
        return policy_class(config.model_type) or task_class(config.model_type)
    else:
        found = next((entry for entry in registered(config.model_type) if _is_adapter(entry)), None)
    if found is not None:
        check_adapter_class(found, _named(config))
    return found


def _named(config: ModelConfig) -> str:
    """The key of a recipe that names its adapter, with its value."""
    if config.adapter is not None:
        return f"actor.model.adapter = {config.adapter}"
    return f"actor.model.model_type = {config.model_type}"


def _check_read(recipe: Recipe, kind: type[Adapter]) -> None:
    """Refuse keys that an adapter does not read; a language model is assumed to read all keys about text."""
    model, data = recipe.actor.model, recipe.data
    given = {
        "data.keep_pixels": data.keep_pixels and not issubclass(kind, VisionLanguage),
        "data.image_hosts": bool(data.image_hosts) and not issubclass(kind, VisionLanguage),
        # that of `causal_lm` is refused with the recipe; where a worker is the user's, it may read the key
        "actor.model.add_value_head": model.add_value_head and kind not in (CausalLM, VisionLanguageAction),
    }
    has_images = bool(kind.image_fields) or kind.augmented is not Adapter.augmented
    if data.augmentation.is_on and not has_images and AUGMENTATION not in map(long_key, kind.reads):
        raise ConfigError(
            f"{AUGMENTATION}: the adapter {kind.__name__} names no images that could be changed after the cache",
            where=recipe.where(AUGMENTATION) or AUGMENTATION,
            remedy='name the fields of its samples that are uint8 images: image_fields = ("image",), and normalise '
            "them in loss; or leave the key out",
        )
    if not issubclass(kind, (LanguageModel, TextTask)):
        given |= dict.fromkeys(_sizes(model), True)
    if not issubclass(kind, LanguageModel):
        given |= {
            "actor.model.config_overrides": bool(model.config_overrides),
            "actor.model.attn_implementation": model.attn_implementation != "auto",
            "data.chat_template": data.chat_template is not None,
            "data.system_prompt": data.system_prompt is not None,
            "data.train_on": data.train_on != "assistant",
            "data.thinking": data.thinking is not None,
            "data.ignored_keys": bool(data.ignored_keys),
            "data.template_kwargs": bool(data.template_kwargs),
            "data.on_prompt_mismatch": data.on_prompt_mismatch != "fail",
            **{f"actor.model.{name}": name in model.model_dump(exclude_defaults=True) for name in OF_ACTION_TOKENS},
        }
    reads = {long_key(name) for name in kind.reads}
    for key in (key for key, is_given in given.items() if is_given and key not in reads):
        raise ConfigError(
            f"{key}: the adapter {kind.__name__} does not read it",
            where=recipe.where(key),
            remedy=f"leave it out; or act on it in {kind.__name__} (self.recipe has it) and add reads = ({key!r},)",
        )


def _check_of_frames(recipe: Recipe, adapter: VisionLanguageAction) -> None:
    """Refuse keys about conversations, which frames of robot data are not."""
    data, prompt = recipe.data, adapter.actions.form.text
    given = {
        "data.system_prompt": data.system_prompt is not None,
        "data.train_on": data.train_on != "assistant",
        "data.thinking": data.thinking is not None,
        "data.ignored_keys": bool(data.ignored_keys),
        "data.on_prompt_mismatch": data.on_prompt_mismatch != "fail",
        "data.chat_template": data.chat_template is not None and prompt is not None,
        "data.template_kwargs": bool(data.template_kwargs) and prompt is not None,
    }
    for key in (key for key, is_given in given.items() if is_given):
        why = "rows are frames of robot data, whose actions alone are trained"
        if key in ("data.chat_template", "data.template_kwargs"):
            why = f"prompts are written without a chat template, as {prompt!r:.80} (actor.model.action_prompt)"
        raise ConfigError(
            f"{key} has no effect: {why}",
            where=recipe.where(key) or key,
            remedy="leave it out; action_prompt sets the text before the actions",
        )


def _sizes(model: ModelConfig) -> list[str]:
    """The keys of sizes that are given."""
    given = model.model_dump(exclude_defaults=True)
    return [f"actor.model.{name}" for name in SIZES if name in given]


def _is_adapter(found: object) -> TypeGuard[type[Adapter]]:
    return inspect.isclass(found) and issubclass(found, Adapter)


def causal_lm(
    config: ModelConfig,
    *,
    wrap: list[str] | None = None,
    overrides: Mapping[str, object] | None = None,
    model: PreTrainedModel | None = None,
    data: DataConfig | None = None,
) -> CausalLM:
    """The adapter of a recipe's causal language model.

    Args:
        config: the section `actor.model`.
        wrap: `actor.fsdp_config.wrap`.
        overrides: further settings of the model's config.
        model: a model in memory.
        data: the section `data`; not needed to build the model.
    """
    make = None if model is not None else registered_model(config)
    loaded = load_config(config, overrides, OWN_CONFIGS) if model is None else model.config
    covered = type(loaded) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in (
        loaded.to_dict().get("auto_map") or {}
    )
    if not covered and model is None and make is None:
        takes_images = loaded.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        raise ModelError(
            f"{config.model_path} holds a model of type {loaded.model_type!r}, which is no causal language model",
            where=f"{MODEL_PATH}: config.json",
            remedy="set actor.model.model_type: vision_language, it takes images and text"
            if takes_images
            else "give one of the architectures that shardtune models lists, or an adapter of your own "
            "(actor.model.adapter: file.py:Class)",
        )
    return CausalLM(loaded, **_settings(config, wrap, model, data), make=make)


def _settings(
    config: ModelConfig, wrap: list[str] | None, model: PreTrainedModel | None, data: DataConfig | None
) -> CausalLMSettings:
    """The settings of a language model's adapter from a recipe."""
    return {
        "attn_implementation": config.attn_implementation,
        "wrap": wrap,
        "trust_remote_code": config.trust_remote_code,
        "compile": config.compile,
        "gradient_checkpointing": config.gradient_checkpointing,
        "precision": config.precision,
        "model": model,
        "model_path": None if config.from_scratch else config.model_path,
        "data": data,
    }


def vision_language(
    config: ModelConfig,
    *,
    wrap: list[str] | None = None,
    overrides: Mapping[str, object] | None = None,
    model: PreTrainedModel | None = None,
    data: DataConfig | None = None,
    processor_path: str | None = None,
) -> VisionLanguage:
    """The adapter of a recipe's vision-language model.

    Args:
        config, wrap, overrides, model, data: as for `causal_lm`.
        processor_path: where the processor is; None: with the model.
    """
    loaded, processor = config_and_processor(config, overrides, model, processor_path)
    return VisionLanguage(loaded, processor, **_settings(config, wrap, model, data))


def config_and_processor(
    config: ModelConfig,
    overrides: Mapping[str, object] | None,
    model: PreTrainedModel | None,
    processor_path: str | None,
) -> tuple[PreTrainedConfig, ProcessorMixin]:
    """The config and the processor of a vision-language model."""
    loaded = load_config(config, overrides, OWN_CONFIGS) if model is None else model.config
    path = processor_path or config.model_path
    if path is None:
        raise no_model_path()
    if isinstance(loaded, OpenVLAConfig) and config.model_type == "vision_language_action":
        return loaded, load_openvla_processor(model_directory(path), loaded)
    if model is None and loaded.model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        remedy = (
            "set actor.model.model_type: causal_lm"
            if type(loaded) in MODEL_FOR_CAUSAL_LM_MAPPING
            else GIVE_VISION_MODEL
        )
        raise ModelError(
            f"{config.model_path} holds a model of type {loaded.model_type!r}, which takes no images and text",
            where=f"{MODEL_PATH}: config.json",
            remedy=remedy,
        )
    if loaded.is_encoder_decoder:
        raise ModelError(
            f"{config.model_path} holds a {loaded.model_type}, whose decoder has a text of its own",
            where=f"{MODEL_PATH}: config.json",
            remedy="give a model that goes on from images and text as one sequence, or an adapter of your own",
        )
    return loaded, load_processor(path, loaded, trust_remote_code=config.trust_remote_code)


def tokenizer_of(processor: ProcessorMixin) -> PreTrainedTokenizerBase:
    return vars(processor)["tokenizer"]


def images_of(processor: ProcessorMixin, config: PreTrainedConfig) -> ImageText:
    return openvla_images(processor, config) if isinstance(config, OpenVLAConfig) else ImageText(processor)


def known_architectures() -> Mapping[str, Mapping[str, Sequence[str]]]:
    """The architectures (`model_type` of config.json) that have been seen to train exactly, by model type and by how:
    packed, rows of one length, one row per forward; and by how those that need torchvision, where it is installed.
    `bench/zoo.py` writes the file."""
    found = json.loads(Path(__file__).with_name("architectures.json").read_text(encoding="utf-8"))
    return {name: found[name] for name in MODEL_TYPES if name in found}
