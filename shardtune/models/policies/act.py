"""ACT, the action chunking transformer (Zhao et al., 2023, arXiv:2304.13705), with LeRobot's parameter names.

A transformer reads a latent, the robot's state and the features of the cameras' images, and predicts a chunk of actions
at once. In training the latent is drawn from what a second encoder makes of the true actions (a variational
auto-encoder, Kingma and Welling, 2013, arXiv:1312.6114); when acting it is 0.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import nn
from torch.nn import functional

from shardtune.batch import Batch, LossSum, Sample
from shardtune.models.adapter import Measured
from shardtune.models.policies.attention import Attention, Draws, RowDropout, name_dropouts
from shardtune.models.policies.features import ACTION, STATE, Features, PolicyOptions
from shardtune.models.policies.policy import IS_PAD, Inputs, Policy
from shardtune.models.policies.resnet import Backbone, FrozenBatchNorm, ResNet, read_backbone

BASE = 10_000.0


class ActOptions(PolicyOptions):
    """The keys of LeRobot's ACTConfig, with its defaults; but the backbone's weights are none unless a file is given.

    Attributes:
        pretrained_backbone_weights: a file of weights with torchvision's names.
    """

    n_obs_steps: int = Field(1, ge=1, le=1)
    chunk_size: int = Field(100, ge=1)
    n_action_steps: int = Field(100, ge=1)
    vision_backbone: Backbone = "resnet18"
    pretrained_backbone_weights: str | None = None
    replace_final_stride_with_dilation: bool = False
    pre_norm: bool = False
    dim_model: int = Field(512, ge=4)
    n_heads: int = Field(8, ge=1)
    dim_feedforward: int = Field(3200, ge=1)
    feedforward_activation: Literal["relu", "gelu"] = "relu"
    n_encoder_layers: int = Field(4, ge=0)
    n_decoder_layers: int = Field(1, ge=1)
    use_vae: bool = True
    latent_dim: int = Field(32, ge=1)
    n_vae_encoder_layers: int = Field(4, ge=1)
    temporal_ensemble_coeff: float | None = None
    dropout: float = Field(0.1, ge=0, lt=1)
    kl_weight: float = 10.0

    @model_validator(mode="after")
    def _consistent(self) -> ActOptions:
        if self.n_action_steps > self.chunk_size:
            raise ValueError(f"n_action_steps ({self.n_action_steps}) is more than chunk_size ({self.chunk_size})")
        if self.dim_model % self.n_heads or self.dim_model % 4:
            raise ValueError(f"dim_model ({self.dim_model}) is no multiple of 4 and of n_heads ({self.n_heads})")
        if self.temporal_ensemble_coeff is not None and self.n_action_steps > 1:
            raise ValueError("temporal_ensemble_coeff goes with n_action_steps: 1")
        return self


class Predicted(NamedTuple):
    """What the network makes of its inputs.

    Attributes:
        actions: [rows, C, A], normalised.
        mean, log_variance: [rows, latents] of the latent that was drawn; None where it was 0.
    """

    actions: torch.Tensor
    mean: torch.Tensor | None
    log_variance: torch.Tensor | None


class Layer(nn.Module):
    """A layer of an encoder; with `cross` one of the decoder, which also attends to what the encoder made."""

    def __init__(self, options: ActOptions, *, cross: bool = False) -> None:
        super().__init__()
        width, heads, share = options.dim_model, options.n_heads, options.dropout
        self.self_attn = Attention(width, heads, share)
        if cross:
            self.multihead_attn = Attention(width, heads, share)
        self.linear1 = nn.Linear(width, options.dim_feedforward)
        self.dropout = RowDropout(share)
        self.linear2 = nn.Linear(options.dim_feedforward, width)
        for number in range(1, 4 if cross else 3):
            self.add_module(f"norm{number}", nn.LayerNorm(width))
            self.add_module(f"dropout{number}", RowDropout(share))
        self.activation = {"relu": functional.relu, "gelu": functional.gelu}[options.feedforward_activation]
        self.pre_norm = options.pre_norm

    def forward(
        self,
        x: torch.Tensor,
        places: torch.Tensor,
        *,
        real: torch.Tensor | None = None,
        seen: tuple[torch.Tensor, torch.Tensor] | None = None,
        draws: Draws | None = None,
    ) -> torch.Tensor:
        """[rows, tokens, width].

        Args:
            x: [rows, tokens, width]. places: of its tokens, added to queries and keys.
            real: bool [rows, tokens], false for padding.
            seen: of a decoder: keys, with their places, and values of what it attends to besides itself.
            draws: for dropout.
        """

        def attend(x: torch.Tensor) -> torch.Tensor:
            at = x + places
            return self.self_attn(at, at, x, real=real, draws=draws)

        def look(x: torch.Tensor) -> torch.Tensor:
            assert seen is not None
            return self.multihead_attn(x + places, *seen, draws=draws)

        def think(x: torch.Tensor) -> torch.Tensor:
            return self.linear2(self.dropout(self.activation(self.linear1(x)), draws))

        parts = (attend, think) if seen is None else (attend, look, think)
        for number, part in enumerate(parts, 1):
            norm, dropout = self.get_submodule(f"norm{number}"), self.get_submodule(f"dropout{number}")
            if self.pre_norm:
                x = x + dropout(part(norm(x)), draws)
            else:
                x = norm(x + dropout(part(x), draws))
        return x


class Layers(nn.Module):
    """Layers of one kind, and a norm after them: always in a decoder, in an encoder only with `pre_norm`."""

    def __init__(self, options: ActOptions, depth: int, *, cross: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(options, cross=cross) for _ in range(depth))
        self.norm = nn.LayerNorm(options.dim_model) if cross or options.pre_norm else nn.Identity()

    def forward(self, x: torch.Tensor, places: torch.Tensor, **others: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, places, **others)
        return self.norm(x)


class Act(nn.Module):
    """The network: see `forward`."""

    def __init__(self, options: ActOptions, features: Features) -> None:
        super().__init__()
        width, actions, state = options.dim_model, features.actions, features.state
        self.options, self.cameras = options, list(features.cameras)
        if options.use_vae:
            self.vae_encoder = Layers(options, options.n_vae_encoder_layers)
            self.vae_encoder_cls_embed = nn.Embedding(1, width)
            if state:
                self.vae_encoder_robot_state_input_proj = nn.Linear(state, width)
            self.vae_encoder_action_input_proj = nn.Linear(actions, width)
            self.vae_encoder_latent_output_proj = nn.Linear(width, 2 * options.latent_dim)
            tokens = options.chunk_size + (2 if state else 1)
            self.register_buffer("vae_encoder_pos_enc", places_in_a_row(tokens, width)[None])
        if self.cameras:
            dilated = options.replace_final_stride_with_dilation
            self.backbone = ResNet(options.vision_backbone, FrozenBatchNorm, dilate_last=dilated)
        self.encoder = Layers(options, options.n_encoder_layers)
        self.decoder = Layers(options, options.n_decoder_layers, cross=True)
        if state:
            self.encoder_robot_state_input_proj = nn.Linear(state, width)
        self.encoder_latent_input_proj = nn.Linear(options.latent_dim, width)
        if self.cameras:
            self.encoder_img_feat_input_proj = nn.Conv2d(self.backbone.channels, width, 1)
        self.encoder_1d_feature_pos_embed = nn.Embedding(2 if state else 1, width)
        self.decoder_pos_embed = nn.Embedding(options.chunk_size, width)
        self.action_head = nn.Linear(width, actions)
        for parameter in chain(self.encoder.parameters(), self.decoder.parameters()):
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(
        self,
        inputs: Inputs,
        actions: torch.Tensor | None = None,
        real: torch.Tensor | None = None,
        noise: torch.Tensor | None = None,
        draws: Draws | None = None,
    ) -> Predicted:
        """A chunk of actions.

        Args:
            inputs: state [rows, 1, S] and images [rows, 1, 3, H, W] by feature, normalised.
            actions: the true ones [rows, C, A], from which a latent is drawn; None: it is 0.
            real: bool [rows, C]; false for actions after the episode's end.
            noise: standard normal, [rows, latents].
            draws: for dropout.
        """
        mean = log_variance = None
        first = next(iter(inputs.values()))
        dtype = self.action_head.weight.dtype
        latent = torch.zeros(len(first), self.options.latent_dim, dtype=dtype, device=first.device)
        if actions is not None and self.options.use_vae:
            assert real is not None
            assert noise is not None
            mean, log_variance = self._latent(inputs, actions, real, draws).chunk(2, -1)
            latent = mean + (log_variance / 2).exp() * noise
        tokens = [self.encoder_latent_input_proj(latent)[:, None]]
        if STATE in inputs:
            tokens.append(self.encoder_robot_state_input_proj(inputs[STATE]))
        places = [self.encoder_1d_feature_pos_embed.weight]
        for camera in self.cameras:
            found = self.backbone(inputs[camera].flatten(0, 1))
            tokens.append(self.encoder_img_feat_input_proj(found).flatten(2).transpose(1, 2))
            height, wide = found.shape[-2:]
            places.append(places_in_an_image(height, wide, self.options.dim_model, found.device).to(dtype))
        at = torch.cat(places)
        memory = self.encoder(torch.cat(tokens, 1), at, draws=draws)
        queries = self.decoder_pos_embed.weight
        start = torch.zeros(len(first), *queries.shape, dtype=dtype, device=first.device)
        decoded = self.decoder(start, queries, seen=(memory + at, memory), draws=draws)
        return Predicted(self.action_head(decoded), mean, log_variance)

    def _latent(self, inputs: Inputs, actions: torch.Tensor, real: torch.Tensor, draws: Draws | None) -> torch.Tensor:
        """Mean and log variance of the latent, side by side."""
        rows = len(actions)
        tokens = [self.vae_encoder_cls_embed.weight.expand(rows, 1, -1)]
        if STATE in inputs:
            tokens.append(self.vae_encoder_robot_state_input_proj(inputs[STATE]))
        known = real.new_ones(rows, len(tokens))
        tokens.append(self.vae_encoder_action_input_proj(actions))
        places = self.get_buffer("vae_encoder_pos_enc").to(tokens[0].dtype)
        found = self.vae_encoder(torch.cat(tokens, 1), places, real=torch.cat([known, real], 1), draws=draws)
        return self.vae_encoder_latent_output_proj(found[:, 0])


class ActModule(nn.Module):
    """The network under the name that it has in LeRobot's files."""

    def __init__(self, options: ActOptions, features: Features) -> None:
        super().__init__()
        self.model = Act(options, features)
        name_dropouts(self)

    def forward(self, *inputs: Any) -> Predicted:
        return self.model(*inputs)


def places_in_a_row(length: int, width: int) -> torch.Tensor:
    """[length, width]: sines and cosines in turn, of falling frequencies (Vaswani et al., 2017, arXiv:1706.03762)."""
    pairs = np.arange(width) // 2
    angles = np.arange(length)[:, None] / BASE ** (2 * pairs / width)
    return torch.from_numpy(np.where(np.arange(width) % 2, np.cos(angles), np.sin(angles))).float()


def places_in_an_image(height: int, width: int, size: int, device: torch.device) -> torch.Tensor:
    """[height * width, size]: of the rows, then of the columns, each counted from 1 and scaled to 2 pi at the end."""
    half = size // 2
    frequency = BASE ** (2 * (torch.arange(half, dtype=torch.float32, device=device) // 2) / half)
    odd = torch.arange(half, device=device) % 2 == 1

    def along(length: int) -> torch.Tensor:
        counted = torch.arange(1, length + 1, dtype=torch.float32, device=device)
        angles = (counted / (length + 1e-6) * (2 * math.pi))[:, None] / frequency
        return torch.where(odd, angles.cos(), angles.sin())

    rows, columns = along(height)[:, None].expand(-1, width, -1), along(width)[None].expand(height, -1, -1)
    return torch.cat([rows, columns], -1).flatten(0, 1)


class ActPolicy(Policy):
    """ACT as an adapter."""

    name = "act"
    Options = ActOptions
    unit_classes = ("Layer", "BasicBlock", "Bottleneck")

    @property
    def chunk_size(self) -> int:
        return self.options.chunk_size

    @property
    def temporal_ensembling(self) -> float | None:
        return self.options.temporal_ensemble_coeff

    def build(self) -> nn.Module:
        return ActModule(self.options, self.features)

    def may_be_idle(self, name: str) -> bool:
        """The decoder begins with zeros, so the first layer's attention to itself has no input but its biases."""
        return name.startswith("model.decoder.layers.0.self_attn.")

    def backbone_weights(self) -> dict[str, Any]:
        return read_backbone(self.options.pretrained_backbone_weights, "model.backbone.{}".format)

    def weights(self, sample: Sample) -> dict[str, float]:
        """LeRobot's means: over all numbers of a chunk, those after an episode's end among them, which count 0."""
        latent = {"kld": 1.0} if self.options.use_vae else {}
        return {"l1": float(sample.fields[ACTION].size), **latent}

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, LossSum]:
        actions, real, options = batch[ACTION], ~batch[IS_PAD], self.options
        noise = batch.randn_like("latent", actions.new_empty(len(actions), options.latent_dim))
        found = model(self.inputs(batch), actions, real, noise, batch.rand_like)
        l1 = ((found.actions - actions).abs() * real[..., None]).sum()
        losses = {"l1": LossSum(l1, actions.numel())}
        if found.mean is not None:
            divergence = -0.5 * (1 + found.log_variance - found.mean**2 - found.log_variance.exp())
            losses["kld"] = LossSum(options.kl_weight * divergence.sum(), len(actions))
        return losses

    def metrics(self, model: nn.Module, batch: Batch) -> Measured:
        return self.action_error(self.predict(model, self.inputs(batch)), batch)

    def predict(self, model: Any, inputs: Inputs) -> torch.Tensor:
        return model(inputs).actions
