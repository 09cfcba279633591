"""pi0: flow matching by an action expert beside PaliGemma.

Black et al., 2024, arXiv:2410.24164. The expert has as many layers as the language model, narrower ones with the same
heads, and each attends to the keys and values of the layer beside it and to its own, of the state and all actions.
Parameters have LeRobot's names.
"""

from __future__ import annotations

import re
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import nn
from torch.nn import functional
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PreTrainedConfig,
)
from transformers.models.gemma.modeling_gemma import GemmaDecoderLayer

from shardtune.errors import ConfigError
from shardtune.models.adapter import WeightSource
from shardtune.models.options import KEY
from shardtune.models.policies.action_expert import (
    ExpertLayer,
    Prefix,
    PrefixLayer,
    Seen,
    block_mask,
    take_layers,
    unread,
)
from shardtune.models.policies.features import Size
from shardtune.models.policies.flow_matching import FlowOptions, FlowPolicy, Frame
from shardtune.models.policies.vlm_files import read_config, tensors_in
from shardtune.models.pretrained import model_directory


class GemmaSizes(BaseModel):
    """The sizes of a Gemma."""

    model_config = ConfigDict(extra="forbid")

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


VARIANTS = {
    "gemma_2b": GemmaSizes(width=2048, depth=18, mlp_dim=16_384, num_heads=8, num_kv_heads=1, head_dim=256),
    "gemma_300m": GemmaSizes(width=1024, depth=18, mlp_dim=4096, num_heads=8, num_kv_heads=1, head_dim=256),
}
VOCABULARY, IMAGE_TOKEN = 257_152, 257_152
VISION = {"hidden_size": 1152, "patch_size": 14, "num_hidden_layers": 27, "num_attention_heads": 16}
TOKENIZER = "google/paligemma-3b-pt-224"
PALIGEMMA = "model.paligemma_with_expert.paligemma"
SHARED = (f"{PALIGEMMA}.lm_head.weight", f"{PALIGEMMA}.model.language_model.embed_tokens.weight")
"""The names of the one tensor that is both embedding and head."""
RENAMED = (
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^(vision_tower|multi_modal_projector)\.", r"model.\1."),
    (r"^model\.vision_tower\.(?!vision_model\.)", "model.vision_tower.vision_model."),
)
"""From the names in PaliGemma's files, old and new ones, to those of the module here."""


class PI0Options(FlowOptions):
    """The keys of LeRobot's PI0Config, with its defaults.

    Attributes:
        paligemma_variant: gemma_2b or gemma_300m, or (not in LeRobot) a directory or Hub name of PaliGemma.
        action_expert_variant: gemma_300m or gemma_2b, or (not in LeRobot) its sizes.
        load_vlm_weights: (not in LeRobot) start from PaliGemma's weights in the directory `paligemma_variant`.
        time_sampling_beta_alpha: of the times' distribution; `time_sampling_beta_beta` is 1.
        use_relative_actions: (of LeRobot after 0.4) only false; `model.action_representation` is the key here.
    """

    paligemma_variant: str = "gemma_2b"
    action_expert_variant: str | GemmaSizes = "gemma_300m"
    num_inference_steps: int = Field(10, ge=1)
    time_sampling_beta_alpha: float = Field(1.5, gt=0)
    time_sampling_beta_beta: float = Field(1.0, ge=1, le=1)
    time_sampling_scale: float = 0.999
    time_sampling_offset: float = 0.001
    image_resolution: Size = (224, 224)
    freeze_vision_encoder: bool = False
    train_expert_only: bool = False
    use_relative_actions: bool = False

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.use_relative_actions:
            raise ValueError(
                "LeRobot's use_relative_actions is not read; model.action_representation: relative trains with such "
                "actions, from other weights"
            )
        if isinstance(self.action_expert_variant, str) and self.action_expert_variant not in VARIANTS:
            raise ValueError(f"action_expert_variant is none of {', '.join(VARIANTS)}, and no sizes")
        if self.load_vlm_weights and self.paligemma_variant in VARIANTS:
            raise ValueError("load_vlm_weights needs the directory of a PaliGemma as paligemma_variant")
        if self.image_resolution[0] != self.image_resolution[1]:
            raise ValueError(f"image_resolution is {list(self.image_resolution)}, not square")
        return self

    @property
    def expert(self) -> GemmaSizes:
        """The sizes of the action expert."""
        named = self.action_expert_variant
        return VARIANTS[named] if isinstance(named, str) else named


class PaliGemmaPrefixLayer(PrefixLayer, GemmaDecoderLayer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A layer of PaliGemma's language model."""


class GemmaExpertLayer(ExpertLayer, GemmaDecoderLayer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A layer of the action expert."""


class VisionTower(nn.Module):
    """PaliGemma's vision tower under the name that it has in LeRobot's files."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.vision_model = tower

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.vision_model(pixels).last_hidden_state


class PaliGemmaWithExpert(nn.Module):
    """PaliGemma and the action expert; the heads over words are part of the files, and not used."""

    paligemma: Any
    gemma_expert: Any

    def __init__(self, config: Any, sizes: GemmaSizes) -> None:
        super().__init__()
        self.paligemma = PaliGemmaForConditionalGeneration(config)
        self.paligemma.model.vision_tower = VisionTower(self.paligemma.model.vision_tower)
        take_layers(self.paligemma.model.language_model, PaliGemmaPrefixLayer)[-1].is_last = True
        text = config.text_config
        if (text.num_hidden_layers, text.num_attention_heads, text.num_key_value_heads, text.head_dim) != (
            sizes.depth,
            sizes.num_heads,
            sizes.num_kv_heads,
            sizes.head_dim,
        ):
            raise ConfigError(
                "PaliGemma and the action expert differ in layers, heads or their size, and share their attention",
                where=f"{KEY}.action_expert_variant",
                remedy=f"give depth: {text.num_hidden_layers}, num_heads: {text.num_attention_heads}, num_kv_heads: "
                f"{text.num_key_value_heads}, head_dim: {text.head_dim}",
            )
        self.gemma_expert = GemmaForCausalLM(gemma_config(sizes, text.vocab_size))
        self.gemma_expert.model.embed_tokens = None
        take_layers(self.gemma_expert.model, GemmaExpertLayer)


class PI0Pytorch(nn.Module):
    """From what the robot sees and a chunk of actions on its way from noise to the velocity of that chunk.

    Args:
        config: of PaliGemma.
        options: of the policy.
    """

    paligemma_with_expert: Any

    def __init__(self, config: Any, options: PI0Options) -> None:
        super().__init__()
        sizes = options.expert
        self.paligemma_with_expert = PaliGemmaWithExpert(config, sizes)
        self.action_in_proj = nn.Linear(options.max_action_dim, sizes.width)
        self.action_out_proj = nn.Linear(sizes.width, options.max_action_dim)
        self.state_proj = nn.Linear(options.max_state_dim, sizes.width)
        self.action_time_mlp_in = nn.Linear(2 * sizes.width, sizes.width)
        self.action_time_mlp_out = nn.Linear(sizes.width, sizes.width)
        self.width = sizes.width

    def forward(self, seen: Seen, chunk: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """The velocity [rows, C, A] of a chunk [rows, C, A] at times, [rows, `self.width`] of sines and cosines."""
        return self.velocity(self.prefix(seen), seen.state, chunk, time)

    def prefix(self, seen: Seen) -> Prefix:
        """Keys and values of images and instruction."""
        model = self.paligemma_with_expert.paligemma.model
        language = model.language_model
        rows, cameras = seen.present.shape
        pixels = seen.images.to(self.state_proj.weight.dtype).flatten(0, 1)
        features = model.multi_modal_projector(model.vision_tower(pixels))
        words = functional.embedding(seen.tokens, language.embed_tokens.weight) * features.shape[-1] ** 0.5
        hidden = torch.cat([features.unflatten(0, (rows, cameras)).flatten(1, 2), words], 1)
        real = torch.cat([seen.present.repeat_interleave(features.shape[1], 1), seen.words], 1)
        rotary = language.rotary_emb(hidden, real.cumsum(1) - 1)
        allowed, keys, values = block_mask(real, real.new_zeros(hidden.shape[1], dtype=torch.int64)), [], []
        for layer in language.layers:
            hidden, own_keys, own_values = layer(hidden, rotary, allowed)
            keys.append(own_keys)
            values.append(own_values)
        return Prefix(keys, values, real)

    def velocity(self, prefix: Prefix, state: torch.Tensor, chunk: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """The velocity of a chunk, as `forward`."""
        expert = self.paligemma_with_expert.gemma_expert.model
        dtype = self.action_in_proj.weight.dtype
        actions = self.action_in_proj(chunk.to(dtype))
        both = torch.cat([actions, time.to(dtype)[:, None].expand_as(actions)], 2)
        actions = self.action_time_mlp_out(functional.silu(self.action_time_mlp_in(both)))
        hidden = torch.cat([self.state_proj(state.to(dtype))[:, None], actions], 1)
        rows, length = hidden.shape[:2]
        own = prefix.real.new_ones(rows, length)
        blocks = functional.pad(own.new_ones(length - 1, dtype=torch.int64), (1, 0))  # the state sees no actions
        to_prefix = prefix.real[:, None, None].expand(-1, -1, length, -1)
        allowed = torch.cat([to_prefix, block_mask(own, blocks)], 3)
        rotary = expert.rotary_emb(hidden, prefix.counts + torch.arange(length, device=chunk.device))
        for layer, keys, values in zip(expert.layers, prefix.keys, prefix.values, strict=True):
            hidden = layer(hidden, rotary, allowed, keys, values)
        return self.action_out_proj(expert.norm(hidden)[:, 1:])


class PI0Policy(FlowPolicy):
    """pi0 as an adapter."""

    name = "pi0"
    Options = PI0Options
    unused = ("rtc_config", "dtype", "gradient_checkpointing", "relative_exclude_joints", "action_feature_names")
    unit_classes = ("SiglipEncoderLayer", "PaliGemmaPrefixLayer", "GemmaExpertLayer")
    config_class = PaliGemmaConfig
    not_lerobots = ("load_vlm_weights", "use_relative_actions")
    newline_step = "pi0_new_line_processor"

    @property
    def frame(self) -> Frame:
        height, width = self.options.image_resolution
        return Frame(height, width, centred=True)

    @property
    def steps(self) -> int:
        return self.options.num_inference_steps

    @property
    def backbone(self) -> str | None:
        variant = self.options.paligemma_variant
        return None if variant in VARIANTS else variant

    @property
    def tokenizer_name(self) -> str:
        return self.recipe.actor.tokenizer.tokenizer_model or self.backbone or TOKENIZER

    def times(self, uniform: torch.Tensor) -> torch.Tensor:
        options = self.options
        drawn = uniform ** (1 / options.time_sampling_beta_alpha)
        return options.time_sampling_offset + options.time_sampling_scale * drawn

    def read_backbone(self) -> PreTrainedConfig:
        if self.backbone is not None:
            return read_config(self.backbone, f"{KEY}.paligemma_variant", PaliGemmaConfig)
        sizes = VARIANTS[self.options.paligemma_variant]
        vision = {"intermediate_size": 4304, "image_size": self.options.image_resolution[0], "vision_use_head": False}
        return PaliGemmaConfig(
            text_config=gemma_config(sizes, VOCABULARY).to_dict(),
            vision_config={**VISION, **vision},
            projection_dim=sizes.width,
            hidden_size=sizes.width,
            image_token_index=IMAGE_TOKEN,
        )

    def backbone_source(self) -> WeightSource:
        """The tensors of PaliGemma's files by the names here, the others as the constructor makes them."""
        assert self.backbone is not None
        found: dict[str, Any] = {"": None}
        for name, read in tensors_in(model_directory(self.backbone)).items():
            found[f"{PALIGEMMA}.{_renamed(name)}"] = read
        for name, other in (SHARED, SHARED[::-1]):  # the files have it under one of its names
            if name in found:
                found.setdefault(other, found[name])
        return found

    def network(self) -> PI0Pytorch:
        return PI0Pytorch(self.vlm_config, self.options)

    def frozen(self, network: PI0Pytorch) -> list[nn.Module]:  # pyright: ignore[reportIncompatibleMethodOverride]
        paligemma, options = network.paligemma_with_expert.paligemma, self.options
        parts: dict[nn.Module, bool] = {
            paligemma: options.train_expert_only,
            paligemma.model.vision_tower: options.freeze_vision_encoder,
        }
        return [part for part, freezes in parts.items() if freezes]

    def unread(self, network: PI0Pytorch) -> list[nn.Module]:  # pyright: ignore[reportIncompatibleMethodOverride]
        parts = network.paligemma_with_expert
        language = parts.paligemma.model.language_model
        return [parts.gemma_expert.lm_head, language.norm, *unread(language.layers, len(language.layers) - 1)]


def gemma_config(sizes: GemmaSizes, vocabulary: int) -> GemmaConfig:
    """The config of a Gemma with a head of its own."""
    return GemmaConfig(
        hidden_size=sizes.width,
        num_hidden_layers=sizes.depth,
        intermediate_size=sizes.mlp_dim,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=vocabulary,
        hidden_activation="gelu_pytorch_tanh",  # pyright: ignore[reportCallIssue]
        tie_word_embeddings=False,
    )


def _renamed(name: str) -> str:
    for pattern, new in RENAMED:
        name = re.sub(pattern, new, name)
    return name
