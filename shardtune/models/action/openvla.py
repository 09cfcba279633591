"""Directories in the format of OpenVLA (openvla-7b and derivatives): config and model, without the directory's code.

Kim et al., 2024, arXiv:2406.09246; Karamcheti et al., 2024, arXiv:2402.07865.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.configuration_utils import SubConfigSpec
from transformers.modeling_outputs import CausalLMOutputWithPast

from shardtune.batch import IGNORED
from shardtune.errors import ModelError
from shardtune.models.action.policy import SETTINGS, ActionPolicy, ActionSettings
from shardtune.models.action.timm_vit import LayerScale, TimmVit, VitShape, shape_of
from shardtune.models.action.tokens import action_statistics

PROMPT = "In: What action should the robot take to {instruction}?\nOut:"
"""OpenVLA's training prompt; the instruction is in lower case."""
EMPTY_TOKEN = 29871
"""Llama 2's token of an empty piece of text, which ended every prompt in OpenVLA's training."""
LLAMA2 = 32000
"""The size of Llama 2's vocabulary."""


@strict
class OpenVLAConfig(PreTrainedConfig):
    """The config.json of an OpenVLA directory.

    Attributes:
        timm_model_ids: of the vision backbones, one or (fused) two.
        image_sizes: of the images that each of them takes.
        timm_model_args: an extension: the sizes of backbones that differ from those of these names (`VitShape`).
        pad_to_multiple_of: this many rows at the end of the embedding are padding.
        norm_stats: of actions, by data set.
        n_action_bins: number of action tokens: the last ones of the vocabulary.
    """

    model_type = "openvla"
    sub_configs_defaults = {"text_config": SubConfigSpec(config_class=AutoConfig, model_type="llama")}  # noqa: RUF012

    text_config: dict | PreTrainedConfig | None = None
    vision_backbone_id: str = "dinosiglip-vit-so-224px"
    llm_backbone_id: str = "llama2-7b-pure"
    hf_llm_id: str = "meta-llama/Llama-2-7b-hf"
    arch_specifier: str = "no-align+fused-gelu-mlp"
    use_fused_vision_backbone: bool | None = None
    timm_model_ids: list | tuple = ("vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224")
    timm_override_act_layers: list | tuple = (None, None)
    timm_model_args: list | tuple | None = None
    image_sizes: list | tuple = (224, 224)
    image_resize_strategy: str = "resize-naive"
    llm_max_length: int = 2048
    pad_token_id: int | None = 32000
    pad_to_multiple_of: int = 64
    output_projector_states: bool = False
    norm_stats: dict | None = None
    n_action_bins: int = 256
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.use_fused_vision_backbone is None:
            self.use_fused_vision_backbone = len(self.timm_model_ids) > 1

    @property
    def vision_shapes(self) -> list[VitShape]:
        """The sizes of the backbones.

        Raises:
            ModelError: a backbone or its activation is not supported.
        """
        if any(act is not None for act in self.timm_override_act_layers):
            raise ModelError(
                f"timm_override_act_layers {list(self.timm_override_act_layers)} are not supported",
                where="config.json",
                remedy="DINOv2 and SigLIP have none",
            )
        given: list[Mapping[str, int] | None] = [None] * len(self.timm_model_ids)
        return [shape_of(*pair) for pair in zip(self.timm_model_ids, self.timm_model_args or given, strict=True)]

    @property
    def num_patches(self) -> int:
        """Tokens of an image."""
        return self.vision_shapes[0].patches(self.image_sizes[0])

    @property
    def text_vocabulary(self) -> int:
        """The number of text tokens, without the padding of the embedding; the last of them are action tokens."""
        return self.get_text_config().vocab_size - self.pad_to_multiple_of

    @property
    def image_token_id(self) -> int:
        """The second row of the padding (the first is `<PAD>`): the token of a patch in prompts."""
        return self.text_vocabulary + 1


class VisionBackbone(nn.Module):
    """One vision transformer, or two whose patches are joined channel by channel."""

    def __init__(self, config: OpenVLAConfig) -> None:
        super().__init__()
        shapes, sizes = config.vision_shapes, list(config.image_sizes)
        self.featurizer = TimmVit(shapes[0], sizes[0])
        self.fused_featurizer = TimmVit(shapes[1], sizes[1]) if config.use_fused_vision_backbone else None
        self.width = sum(shape.width for shape in shapes)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Images [rows, 3 per backbone, side, side] to patches [rows, patches, width]."""
        if self.fused_featurizer is None:
            return self.featurizer(pixel_values)
        first, second = pixel_values.split(3, dim=1)
        return torch.cat([self.featurizer(first), self.fused_featurizer(second)], dim=2)


class Projector(nn.Module):
    """An MLP from patches to the language model's embeddings; of three layers where two backbones are fused."""

    def __init__(self, width: int, hidden_size: int, fused: bool) -> None:
        super().__init__()
        inner = 4 * width if fused else hidden_size
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, hidden_size)
        self.fc3 = nn.Linear(hidden_size, hidden_size) if fused else None

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        hidden = self.fc2(nn.functional.gelu(self.fc1(patches)))
        return hidden if self.fc3 is None else self.fc3(nn.functional.gelu(hidden))


class _Body(nn.Module):
    """A view of a model without its head; the modules stay the model's."""

    def __init__(self, model: OpenVLA) -> None:
        super().__init__()
        object.__setattr__(self, "_model", model)
        self.config = model.config

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        model: OpenVLA = self._model  # pyright: ignore[reportAssignmentType] (no module of this view)
        embeddings, mask, _ = model.embed(input_ids, pixel_values, attention_mask)
        mask = None if attention_mask is None else mask
        return model.language_model.model(
            inputs_embeds=embeddings, attention_mask=mask, position_ids=position_ids, **kwargs
        )


class OpenVLA(PreTrainedModel, GenerationMixin):
    """The model: patches are inserted after a row's first token, and a language model continues from there."""

    config_class = OpenVLAConfig
    config: OpenVLAConfig
    base_model_prefix = "body"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _no_split_modules = ["LlamaDecoderLayer", "VitBlock"]  # noqa: RUF012

    def __init__(self, config: OpenVLAConfig) -> None:
        super().__init__(config)
        self.vision_backbone = VisionBackbone(config)
        text = config.get_text_config()
        self.projector = Projector(self.vision_backbone.width, text.hidden_size, bool(config.use_fused_vision_backbone))
        self.language_model = AutoModelForCausalLM.from_config(text)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LayerScale):
            init.constant_(module.scale_factor, 1e-5)
        elif isinstance(module, TimmVit):
            for token in (module.cls_token, module.reg_token, module.pos_embed):
                if token is not None:
                    init.trunc_normal_(token, std=0.02)

    @property
    def body(self) -> _Body:
        """The model without the head: hidden states instead of logits."""
        return _Body(self)

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.language_model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return self.language_model.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.language_model.set_output_embeddings(new_embeddings)

    def get_image_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Images [rows, 3 per backbone, side, side] to embeddings [rows, patches, hidden_size]."""
        return self.projector(self.vision_backbone(pixel_values.to(self.projector.fc1.weight.dtype)))

    def embed(
        self, input_ids: torch.Tensor, pixel_values: torch.Tensor | None, attention_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The input embeddings of the language model.

        Prompts with places for patches (`image_token_id`) get them there, others after a row's first real token.

        Args:
            input_ids: int64 [rows, tokens], padded on either side.
            pixel_values: [rows, 3 per backbone, side, side]; None: text alone.
            attention_mask: [rows, tokens]; None: nothing is padded.

        Returns:
            Embeddings [rows, length, hidden_size]; their mask [rows, length]; for each place int64 [rows, length] the
            token it was made from, -1 for a patch.
        """
        embeddings = self.get_input_embeddings()(input_ids)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        rows, tokens = input_ids.shape
        places = torch.arange(tokens, device=input_ids.device).expand(rows, -1)
        if pixel_values is None:
            return embeddings, mask, places
        patches = self.get_image_features(pixel_values).to(embeddings.dtype)
        marked = input_ids == self.config.image_token_id
        if bool(marked.any()):
            if int(marked.sum()) != patches.shape[0] * patches.shape[1]:
                raise ModelError(
                    f"the prompts have places for {int(marked.sum())} patches, the images have "
                    f"{patches.shape[0]} x {patches.shape[1]}",
                    where="input_ids",
                )
            return embeddings.masked_scatter(marked[..., None], patches), mask, places.masked_fill(marked, -1)
        order = _with_patches(mask, patches.shape[1])
        together = torch.cat([embeddings, patches], dim=1)
        found = together.gather(1, order[..., None].expand(-1, -1, together.shape[2]))
        longer = torch.cat([mask, mask.new_ones(rows, patches.shape[1])], dim=1).gather(1, order)
        return found, longer, order.masked_fill(order >= tokens, -1)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [rows, length, vocabulary] over tokens and patches; a loss where there are labels [rows, tokens]."""
        if inputs_embeds is None:
            if input_ids is None:
                raise ModelError("neither input_ids nor inputs_embeds are given", where="OpenVLA.forward")
            inputs_embeds, attention_mask, places = self.embed(input_ids, pixel_values, attention_mask)
            if labels is not None:
                labels = labels.gather(1, places.clamp_min(0)).masked_fill(places < 0, IGNORED)
        return self.language_model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )

    @torch.no_grad()
    def generate(  # pyright: ignore[reportIncompatibleMethodOverride] (patches need only what is given here)
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As `generate` of transformers; `sequences` hold prompts without patches, then what was generated."""
        embeddings, mask, _ = self.embed(input_ids, pixel_values, attention_mask)
        found = self.language_model.generate(inputs_embeds=embeddings, attention_mask=mask, **kwargs)
        if isinstance(found, torch.Tensor):
            return torch.cat([input_ids, found], dim=1)
        found.sequences = torch.cat([input_ids, found.sequences], dim=1)
        return found


def _with_patches(mask: torch.Tensor, patches: int) -> torch.Tensor:
    """The source of each place, [rows, tokens + patches]: index of its token, or tokens + number of the patch."""
    tokens = mask.shape[1]
    first = mask.long().argmax(dim=1, keepdim=True)
    place = torch.arange(tokens + patches, device=mask.device).expand(len(mask), -1)
    after = place - first - 1
    return torch.where(after < 0, place, torch.where(after < patches, tokens + after, place - patches))


class OpenVLAForActionPrediction(ActionPolicy, OpenVLA):
    """The class that OpenVLA's directories name: predicts actions, by the statistics in its config."""

    @property
    def action_settings(self) -> ActionSettings:
        return self.settings_for(None)

    def settings_for(self, unnorm_key: str | None) -> ActionSettings:
        """The settings of actions in the config; data sets may differ in their dimensions."""
        if self.config.to_dict().get(SETTINGS) is not None:
            return ActionSettings.of(self.config)
        return openvla_settings(self.config, unnorm_key)

    def complete_prompts(self, input_ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends the token of an empty text to prompts of Llama 2 that do not end with it."""
        return ending_empty(input_ids, mask) if self.config.text_vocabulary == LLAMA2 else (input_ids, mask)

    def predict_action(self, input_ids: torch.Tensor, unnorm_key: str | None = None, **kwargs: Any) -> np.ndarray:
        """The action float32 [dimensions] (of several steps [steps, dimensions]) for a single prompt."""
        actions = self.predict_action_batch(input_ids, unnorm_key=unnorm_key, **kwargs).actions[0].numpy()
        return actions[0] if len(actions) == 1 else actions


def openvla_settings(config: OpenVLAConfig, unnorm_key: str | None = None) -> ActionSettings:
    """The settings of actions from OpenVLA's own keys of a config.

    Args:
        config: the directory's.
        unnorm_key: the data set whose dimensions are used; None: the first.
    """
    statistics = config.norm_stats or {}
    key = unnorm_key or next(iter(statistics), None)
    dimensions = action_statistics(statistics, key).dimensions if key in statistics else 1
    return ActionSettings(
        dimensions, config.text_vocabulary, statistics, num_action_bins=config.n_action_bins, prompt=PROMPT
    )


def ending_empty(input_ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts [rows, tokens], padded at the left, each ending with `EMPTY_TOKEN`; one longer if any lacked it."""
    has = input_ids[:, -1:] == EMPTY_TOKEN
    if bool(has.all()):
        return input_ids, mask
    ids = torch.cat([torch.where(has, EMPTY_TOKEN, input_ids[:, :1]), input_ids], dim=1)
    rolled = torch.cat([input_ids, torch.full_like(has, EMPTY_TOKEN, dtype=input_ids.dtype)], dim=1)
    longer = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    shifted = torch.cat([torch.zeros_like(mask[:, :1]), mask], dim=1)
    return torch.where(has, ids, rolled), torch.where(has, shifted, longer)
