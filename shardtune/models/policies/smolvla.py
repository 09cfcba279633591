"""SmolVLA: flow matching by a small action expert beside the first layers of SmolVLM.

Shukor et al., 2025, arXiv:2506.01844. A layer of the expert attends to the keys and values of the language model's
layer beside it (cross-attention), and every second one to these and to the actions before it (self-attention).
Parameters have LeRobot's names.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional
from transformers import LlamaModel, PreTrainedConfig, SmolVLMConfig, SmolVLMForConditionalGeneration
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

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
from shardtune.models.policies.vlm_files import read_config

ROTARY = {"rope_type": "default", "rope_theta": 10_000.0}
"""The rotary embedding, whatever the language model's own was."""
VLM = "model.vlm_with_expert.vlm"
SPECIAL = ["<fake_token_around_image>", "<global-img>", "<fake_token_around_image>"]
"""Tokens before an image, the last one behind it."""
MULTIPLE = 256
"""The width of the expert's feed-forward layers is a multiple of it."""


class SmolVLAOptions(FlowOptions):
    """The keys of LeRobot's SmolVLAConfig, with its defaults.

    Attributes:
        vlm_model_name: a directory or Hub name of SmolVLM.
        num_vlm_layers: of its language model, the first ones; 0 or less: all.
        num_expert_layers: 0 or less: as many; otherwise each serves several of the language model's.
        self_attn_every_n_layers: 0 or less: all layers of the expert cross.
        adapt_to_pi_aloha, use_delta_joint_actions_aloha: conversions for one robot, which data.transform can make.
        prefix_length: images, instruction and state are padded to as many tokens; 0 or less: not.
    """

    resize_imgs_with_padding: Size | None = (512, 512)
    num_steps: int = Field(10, ge=1)
    use_cache: bool = True
    freeze_vision_encoder: bool = True
    train_expert_only: bool = True
    train_state_proj: bool = True
    vlm_model_name: str = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
    add_image_special_tokens: bool = False
    attention_mode: Literal["cross_attn", "self_attn"] = "cross_attn"
    prefix_length: int = -1
    pad_language_to: Literal["longest", "max_length"] = "longest"
    num_expert_layers: int = -1
    num_vlm_layers: int = 16
    self_attn_every_n_layers: int = 2
    expert_width_multiplier: float = Field(0.75, gt=0)
    adapt_to_pi_aloha: Literal[False] = False
    use_delta_joint_actions_aloha: Literal[False] = False


class SmolVLMPrefixLayer(PrefixLayer, LlamaDecoderLayer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A layer of SmolVLM's language model."""


class SmolVLMExpertLayer(ExpertLayer, LlamaDecoderLayer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A layer of the action expert."""


class SmolVLMWithExpert(nn.Module):
    """SmolVLM with the first layers of its language model, and the action expert."""

    vlm: Any
    lm_expert: Any

    def __init__(self, config: SmolVLMConfig, options: SmolVLAOptions) -> None:
        super().__init__()
        config = copy.deepcopy(config)
        text: Any = config.text_config
        if options.num_vlm_layers > 0:
            text.update({"num_hidden_layers": min(options.num_vlm_layers, text.num_hidden_layers)})
        self.vlm = SmolVLMForConditionalGeneration(config)
        layers = take_layers(self.vlm.model.text_model, SmolVLMPrefixLayer)
        width = int(text.hidden_size * options.expert_width_multiplier)
        hidden = int(4 * int(2 * width / 3))
        expert = copy.deepcopy(text)
        expert.update({"hidden_size": width, "intermediate_size": MULTIPLE * -(-hidden // MULTIPLE)})
        if options.num_expert_layers > 0:
            expert.update({"num_hidden_layers": options.num_expert_layers})
        self.lm_expert = LlamaModel(expert)
        self.lm_expert.embed_tokens = None
        if len(layers) % expert.num_hidden_layers:
            raise ConfigError(
                f"the expert has {expert.num_hidden_layers} layers, the language model {len(layers)}, not a multiple",
                where=f"{KEY}.num_expert_layers",
                remedy="choose a divisor, or -1 for as many layers",
            )
        keys = text.num_key_value_heads * text.head_dim
        every = options.self_attn_every_n_layers
        for number, layer in enumerate(take_layers(self.lm_expert, SmolVLMExpertLayer)):
            layer.crosses = options.attention_mode == "cross_attn" and not (every > 0 and number % every == 0)
            if layer.crosses:
                layer.self_attn.k_proj = nn.Linear(keys, keys, bias=text.attention_bias)
                layer.self_attn.v_proj = nn.Linear(keys, keys, bias=text.attention_bias)
        self.stride = len(layers) // expert.num_hidden_layers
        self.last = self.stride * (expert.num_hidden_layers - 1)
        layers[self.last].is_last = True


class VLAFlowMatching(nn.Module):
    """From what the robot sees and a chunk of actions on its way from noise to the velocity of that chunk.

    Args:
        config: of SmolVLM.
        options: of the policy.
        special: ids of the tokens before each image, and of the one behind it; empty without them.
    """

    vlm_with_expert: Any

    def __init__(self, config: Any, options: SmolVLAOptions, special: Sequence[int] = ()) -> None:
        super().__init__()
        self.vlm_with_expert = SmolVLMWithExpert(config, options)
        width, expert = config.text_config.hidden_size, self.vlm_with_expert.lm_expert.config.hidden_size
        self.state_proj = nn.Linear(options.max_state_dim, width)
        self.action_in_proj = nn.Linear(options.max_action_dim, expert)
        self.action_out_proj = nn.Linear(expert, options.max_action_dim)
        self.action_time_mlp_in = nn.Linear(2 * expert, expert)
        self.action_time_mlp_out = nn.Linear(expert, expert)
        rotary = copy.deepcopy(config.text_config)
        rotary.update({"rope_parameters": ROTARY})
        self.rotary = LlamaRotaryEmbedding(rotary)
        self.options, self.special, self.width = options, list(special), expert
        self.scale = width**0.5

    def forward(self, seen: Seen, chunk: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """The velocity [rows, C, A] of a chunk [rows, C, A] at times, [rows, `self.width`] of sines and cosines."""
        return self.velocity(self.prefix(seen), seen.state, chunk, time)

    def prefix(self, seen: Seen) -> Prefix:
        """Keys and values of images, instruction and state."""
        model = self.vlm_with_expert.vlm.model
        language = model.text_model
        rows, cameras = seen.present.shape
        if self.special:  # those of cameras that are missing stand behind the others
            order = seen.present.logical_not().int().argsort(dim=1, stable=True)
            images = seen.images[torch.arange(rows, device=order.device)[:, None], order]
            seen = Seen(images, seen.present.gather(1, order), seen.tokens, seen.words, seen.state)
        pixels = seen.images.to(self.state_proj.weight.dtype).flatten(0, 1)
        features = model.connector(model.vision_model(pixel_values=pixels).last_hidden_state) * self.scale
        pieces = [features.unflatten(0, (rows, cameras))]
        real = [seen.present[..., None].expand(-1, -1, features.shape[1])]
        if self.special:
            special = torch.tensor(self.special, device=pixels.device)
            marks = language.embed_tokens(special).expand(rows, cameras, -1, -1)
            places = torch.arange(cameras, device=pixels.device)
            shown = places < seen.present.sum(1, keepdim=True) + self.options.empty_cameras
            marked = shown[..., None].expand(-1, -1, len(self.special))
            pieces = [marks[:, :, :-1], *pieces, marks[:, :, -1:]]
            real = [marked[:, :, :-1], *real, marked[:, :, -1:]]
        state = self.state_proj(seen.state.to(self.state_proj.weight.dtype))[:, None]
        words = language.embed_tokens(seen.tokens) * self.scale
        hidden = torch.cat([torch.cat(pieces, 2).flatten(1, 2), words, state], 1)
        mask = torch.cat([torch.cat(real, 2).flatten(1, 2), seen.words, seen.words.new_ones(rows, 1)], 1)
        blocks = functional.pad(mask.new_zeros(hidden.shape[1] - 1, dtype=torch.int64), (0, 1), value=1)
        missing = max(0, self.options.prefix_length - hidden.shape[1])
        hidden, mask = functional.pad(hidden, (0, 0, 0, missing)), functional.pad(mask, (0, missing))
        blocks = functional.pad(blocks, (0, missing), value=1)
        rotary = self.rotary(hidden, mask.cumsum(1) - 1)
        allowed, keys, values = block_mask(mask, blocks), [], []
        for layer in language.layers[: self.vlm_with_expert.last + 1]:
            hidden, own_keys, own_values = layer(hidden, rotary, allowed)
            keys.append(own_keys)
            values.append(own_values)
        return Prefix(keys, values, mask)

    def velocity(self, prefix: Prefix, _state: torch.Tensor, chunk: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """The velocity of a chunk, as `forward`; the state is in the prefix."""
        parts = self.vlm_with_expert
        dtype = self.action_in_proj.weight.dtype
        actions = self.action_in_proj(chunk.to(dtype))
        both = torch.cat([actions, time.to(dtype)[:, None].expand_as(actions)], 2)
        hidden = self.action_time_mlp_out(functional.silu(self.action_time_mlp_in(both)))
        rows, steps = chunk.shape[:2]
        places = torch.arange(steps, device=chunk.device)[None]
        to_prefix = prefix.real[:, None, None].expand(-1, -1, steps, -1)
        before = (places <= places.T).expand(rows, 1, -1, -1)
        alone = self.rotary(hidden, places), to_prefix
        behind = self.rotary(hidden, prefix.counts + places), torch.cat([to_prefix, before], 3)
        for number, layer in enumerate(parts.lm_expert.layers):
            beside = number * parts.stride
            rotary, allowed = alone if layer.crosses else behind
            hidden = layer(hidden, rotary, allowed, prefix.keys[beside], prefix.values[beside])
        return self.action_out_proj(parts.lm_expert.norm(hidden))


class SmolVLAPolicy(FlowPolicy):
    """SmolVLA as an adapter."""

    name = "smolvla"
    Options = SmolVLAOptions
    unused = ("rtc_config",)
    unit_classes = ("SmolVLMEncoderLayer", "SmolVLMPrefixLayer", "SmolVLMExpertLayer")
    config_class = SmolVLMConfig
    newline_step = "smolvla_new_line_processor"

    @property
    def frame(self) -> Frame | None:
        size = self.options.resize_imgs_with_padding
        return None if size is None else Frame(height=size[1], width=size[0], centred=False)

    @property
    def steps(self) -> int:
        return self.options.num_steps

    @property
    def keeps_prefix(self) -> bool:
        return self.options.use_cache

    @property
    def backbone(self) -> str:
        return self.options.vlm_model_name

    @property
    def tokenizer_name(self) -> str:
        return self.options.vlm_model_name

    @property
    def token_padding(self) -> str:
        return self.options.pad_language_to

    def read_backbone(self) -> PreTrainedConfig:
        return read_config(self.backbone, f"{KEY}.vlm_model_name", SmolVLMConfig)

    def backbone_source(self) -> WeightSource:
        return {"": None, VLM: self.backbone}

    def network(self) -> VLAFlowMatching:
        options = self.options
        special: Any = self.tokenizer.convert_tokens_to_ids(SPECIAL) if options.add_image_special_tokens else []
        return VLAFlowMatching(self.vlm_config, options, special)

    def frozen(self, network: VLAFlowMatching) -> list[nn.Module]:  # pyright: ignore[reportIncompatibleMethodOverride]
        vlm, options = network.vlm_with_expert.vlm, self.options
        parts: dict[nn.Module, bool] = {
            vlm: options.train_expert_only,
            vlm.model.vision_model: options.freeze_vision_encoder,
            network.state_proj: not options.train_state_proj,
        }
        return [part for part, freezes in parts.items() if freezes]

    def unread(self, network: VLAFlowMatching) -> list[nn.Module]:  # pyright: ignore[reportIncompatibleMethodOverride]
        parts = network.vlm_with_expert
        language = parts.vlm.model.text_model
        head = [] if parts.vlm.lm_head.weight is language.embed_tokens.weight else [parts.vlm.lm_head]
        return [*head, language.norm, *unread(language.layers, parts.last)]
