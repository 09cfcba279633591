"""Diffusion policy (Chi et al., 2023, arXiv:2303.04137), with LeRobot's parameter names.

A convolutional U-Net over time removes the noise from a chunk of actions, step by step (Ho et al., 2020,
arXiv:2006.11239; fewer steps: Song et al., 2021, arXiv:2010.02502). Each of its blocks is scaled and shifted (Perez et
al., 2018, arXiv:1709.07871) by the step, the robot's state, and keypoints in the images: the mean places of feature
maps (Finn et al., 2016, arXiv:1509.06113).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import nn
from torch.nn import functional

from shardtune.batch import Batch, LossSum, Sample
from shardtune.data.encoder import Row
from shardtune.errors import ConfigError
from shardtune.models.adapter import Measured
from shardtune.models.options import KEY
from shardtune.models.policies.features import ACTION, STATE, Features, PolicyOptions, Size
from shardtune.models.policies.policy import IS_PAD, Inputs, Policy
from shardtune.models.policies.resnet import Backbone, ResNet, feature_size, read_backbone

CHANNELS_OF_A_GROUP = 16
LAST_GROUPS = 8
"""Groups of the norm before the last convolution."""
LIKE_CHILDREN = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4")
"""The parts of the vision backbone, which LeRobot's files number."""


class DiffusionOptions(PolicyOptions):
    """The keys of LeRobot's DiffusionConfig, with its defaults.

    Attributes:
        pretrained_backbone_weights: a file of weights with torchvision's names.
        drop_n_last_frames: frames at an episode's end that are no rows; None: those whose executed actions reach
            behind it, `horizon - n_action_steps - n_obs_steps + 1`.
    """

    n_obs_steps: int = Field(2, ge=1)
    horizon: int = Field(16, ge=1)
    n_action_steps: int = Field(8, ge=1)
    normalization_mapping: dict[str, str] = Field({"VISUAL": "MEAN_STD", "STATE": "MIN_MAX", "ACTION": "MIN_MAX"})
    drop_n_last_frames: int | None = Field(None, ge=0)
    vision_backbone: Backbone = "resnet18"
    resize_shape: Size | None = None
    crop_ratio: float = Field(1.0, gt=0, le=1)
    crop_shape: Size | None = None
    crop_is_random: bool = True
    pretrained_backbone_weights: str | None = None
    use_group_norm: bool = True
    spatial_softmax_num_keypoints: int = Field(32, ge=1)
    use_separate_rgb_encoder_per_camera: bool = False
    down_dims: tuple[int, ...] = Field((512, 1024, 2048), min_length=1)
    kernel_size: int = Field(5, ge=1)
    n_groups: int = Field(8, ge=1)
    diffusion_step_embed_dim: int = Field(128, ge=4, multiple_of=2)
    use_film_scale_modulation: bool = True
    noise_scheduler_type: Literal["DDPM", "DDIM"] = "DDPM"
    num_train_timesteps: int = Field(100, ge=1)
    beta_schedule: str = "squaredcos_cap_v2"
    beta_start: float = Field(0.0001, gt=0, lt=1)
    beta_end: float = Field(0.02, gt=0, lt=1)
    prediction_type: Literal["epsilon", "sample"] = "epsilon"
    clip_sample: bool = True
    clip_sample_range: float = Field(1.0, gt=0)
    num_inference_steps: int | None = Field(None, ge=1)
    do_mask_loss_for_padding: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> DiffusionOptions:
        if self.drop_n_last_frames is None:
            self.drop_n_last_frames = max(0, self.horizon - self.n_action_steps - self.n_obs_steps + 1)
        if self.n_action_steps > self.chunk:
            raise ValueError(f"n_action_steps is more than horizon - n_obs_steps + 1 = {self.chunk}")
        if self.horizon % 2 ** len(self.down_dims):
            raise ValueError(f"horizon is no multiple of 2 ** len(down_dims) = {2 ** len(self.down_dims)}")
        if any(width % self.n_groups for width in self.down_dims) or self.down_dims[0] % LAST_GROUPS:
            raise ValueError(
                f"down_dims {list(self.down_dims)} are no multiples of n_groups = {self.n_groups}, the first of "
                f"{LAST_GROUPS}"
            )
        if self.crop_ratio < 1 and self.resize_shape is None:
            raise ValueError("crop_ratio has no effect without resize_shape; crop_shape has")
        if self.use_group_norm and self.pretrained_backbone_weights is not None:
            raise ValueError("pretrained_backbone_weights are those of a backbone with use_group_norm: false")
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size ({self.kernel_size}) is even, which would make chunks longer")
        steps = self.num_inference_steps or 1
        if steps > self.num_train_timesteps:
            raise ValueError(
                f"num_inference_steps ({steps}) is more than num_train_timesteps ({self.num_train_timesteps})"
            )
        if self.resize_shape is not None:
            height, width = (max(1, int(size * self.crop_ratio)) for size in self.resize_shape)
            cut = (height, width) if self.crop_ratio < 1 else None
            if self.crop_shape not in (None, cut):
                raise ValueError(
                    f"crop_shape ({list(self.crop_shape or ())}) has no effect with resize_shape; crop_ratio has"
                )
            self.crop_shape = cut
        return self

    @property
    def chunk(self) -> int:
        """Actions from the present frame on."""
        return self.horizon - self.n_obs_steps + 1


class Keypoints(nn.Module):
    """Features [images, channels, H, W] to the mean places of maps, [images, number, 2] from -1 to 1."""

    def __init__(self, channels: int, size: Size, number: int) -> None:
        super().__init__()
        self.nets = nn.Conv2d(channels, number, 1)
        down, across = np.meshgrid(*(np.linspace(-1.0, 1.0, length) for length in size), indexing="ij")
        places = np.stack([across.ravel(), down.ravel()], 1)
        self.register_buffer("pos_grid", torch.from_numpy(places).float())

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        shares = self.nets(features).flatten(2).softmax(-1)
        return shares @ self.get_buffer("pos_grid").to(shares.dtype)


class RgbEncoder(nn.Module):
    """Images [images, 3, H, W] to features [images, 2 * keypoints]."""

    def __init__(self, options: DiffusionOptions, size: Size) -> None:
        super().__init__()
        norm = _group_norm if options.use_group_norm else nn.BatchNorm2d
        network = ResNet(options.vision_backbone, norm)
        self.backbone = nn.Sequential(*(network.get_submodule(name) for name in LIKE_CHILDREN))
        number = options.spatial_softmax_num_keypoints
        self.pool = Keypoints(network.channels, feature_size(*size), number)
        self.out = nn.Linear(2 * number, 2 * number)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.out(self.pool(self.backbone(images)).flatten(1)))


def _group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(channels // CHANNELS_OF_A_GROUP, channels)


class StepEmbedding(nn.Module):
    """Steps [rows] to sines, then cosines, of falling frequencies, [rows, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, steps: torch.Tensor) -> torch.Tensor:
        half = self.width // 2
        powers = torch.arange(half, device=steps.device) * -(math.log(10_000) / (half - 1))
        angles = steps[:, None] * powers.exp()
        return torch.cat([angles.sin(), angles.cos()], -1)


class ConvBlock(nn.Module):
    """Convolution over time, group norm, Mish: [rows, channels, T]."""

    def __init__(self, inner: int, outer: int, kernel: int, groups: int) -> None:
        super().__init__()
        convolution = nn.Conv1d(inner, outer, kernel, padding=kernel // 2)
        self.block = nn.Sequential(convolution, nn.GroupNorm(groups, outer), nn.Mish())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


class ResidualBlock(nn.Module):
    """Two convolutions beside the identity; the first one's output is shifted, and scaled, by the condition."""

    def __init__(self, inner: int, outer: int, condition: int, options: DiffusionOptions) -> None:
        super().__init__()
        self.scales = options.use_film_scale_modulation
        self.conv1 = ConvBlock(inner, outer, options.kernel_size, options.n_groups)
        self.cond_encoder = nn.Sequential(nn.Mish(), nn.Linear(condition, outer * (2 if self.scales else 1)))
        self.conv2 = ConvBlock(outer, outer, options.kernel_size, options.n_groups)
        self.residual_conv = nn.Identity() if inner == outer else nn.Conv1d(inner, outer, 1)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """[rows, outer, T] from x [rows, inner, T] and a condition [rows, width]."""
        y, film = self.conv1(x), self.cond_encoder(condition)[..., None]
        if self.scales:
            scale, film = film.chunk(2, 1)
            y = scale * y
        return self.conv2(y + film) + self.residual_conv(x)


class UNet(nn.Module):
    """Noisy actions [rows, T, A], steps [rows] and a condition [rows, width] to noise, or actions, [rows, T, A]."""

    def __init__(self, options: DiffusionOptions, actions: int, condition: int) -> None:
        super().__init__()
        width, widths = options.diffusion_step_embed_dim, options.down_dims
        self.diffusion_step_encoder = nn.Sequential(
            StepEmbedding(width), nn.Linear(width, 4 * width), nn.Mish(), nn.Linear(4 * width, width)
        )

        def block(inner: int, outer: int) -> ResidualBlock:
            return ResidualBlock(inner, outer, width + condition, options)

        self.down_modules = nn.ModuleList()
        for depth, (inner, outer) in enumerate(pairwise((actions, *widths)), 1):
            shorten = nn.Identity() if depth == len(widths) else nn.Conv1d(outer, outer, 3, 2, 1)
            self.down_modules.append(nn.ModuleList([block(inner, outer), block(outer, outer), shorten]))
        self.mid_modules = nn.ModuleList(block(widths[-1], widths[-1]) for _ in range(2))
        self.up_modules = nn.ModuleList()
        for outer, inner in reversed(list(pairwise(widths))):
            lengthen = nn.ConvTranspose1d(outer, outer, 4, 2, 1)
            self.up_modules.append(nn.ModuleList([block(2 * inner, outer), block(outer, outer), lengthen]))
        last = ConvBlock(widths[0], widths[0], options.kernel_size, LAST_GROUPS)
        self.final_conv = nn.Sequential(last, nn.Conv1d(widths[0], actions, 1))

    def forward(self, noisy: torch.Tensor, steps: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        x, passed = noisy.transpose(1, 2), []
        condition = torch.cat([self.diffusion_step_encoder(steps.to(condition.dtype)), condition], -1)
        for parts in self.down_modules:
            first, second, shorten = parts.children()
            x = second(first(x, condition), condition)
            passed.append(x)
            x = shorten(x)
        for part in self.mid_modules:
            x = part(x, condition)
        for parts in self.up_modules:
            first, second, lengthen = parts.children()
            x = lengthen(second(first(torch.cat([x, passed.pop()], 1), condition), condition))
        return self.final_conv(x).transpose(1, 2)


class Diffusion(nn.Module):
    """The network: what it sees becomes a condition, under which noise is removed from actions."""

    def __init__(self, options: DiffusionOptions, features: Features) -> None:
        super().__init__()
        self.cameras = list(features.cameras)
        self.separate = options.use_separate_rgb_encoder_per_camera
        width = features.state
        if self.cameras:
            size = options.crop_shape or options.resize_shape or next(iter(features.cameras.values()))
            encoders = [RgbEncoder(options, size) for _ in range(len(self.cameras) if self.separate else 1)]
            self.rgb_encoder = nn.ModuleList(encoders) if self.separate else encoders[0]
            width += 2 * options.spatial_softmax_num_keypoints * len(self.cameras)
        self.unet = UNet(options, features.actions, width * options.n_obs_steps)

    def condition(self, inputs: Inputs) -> torch.Tensor:
        """[rows, width] from states [rows, frames, S] and images [rows, frames, 3, H, W], cut to size."""
        parts = [inputs[STATE]] if STATE in inputs else []
        if self.cameras:
            images = torch.stack([inputs[camera] for camera in self.cameras], 2)  # rows, frames, cameras
            encoders: Any = self.rgb_encoder
            if self.separate:
                found = [one(images[:, :, at].flatten(0, 1)) for at, one in enumerate(encoders)]
                parts.append(torch.stack(found, 1).unflatten(0, images.shape[:2]).flatten(2))
            else:
                parts.append(encoders(images.flatten(0, 2)).unflatten(0, images.shape[:3]).flatten(2))
        dtype = parts[-1].dtype
        return torch.cat([part.to(dtype) for part in parts], -1).flatten(1)


class DiffusionModule(nn.Module):
    """The network under the name that it has in LeRobot's files."""

    def __init__(self, options: DiffusionOptions, features: Features) -> None:
        super().__init__()
        self.diffusion = Diffusion(options, features)

    def forward(self, inputs: Inputs, noisy: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """The noise, or the actions, [rows, T, A]."""
        return self.diffusion.unet(noisy, steps, self.diffusion.condition(inputs))


class DiffusionPolicy(Policy):
    """Diffusion policy as an adapter."""

    name = "diffusion"
    unused = ("gradient_checkpointing",)
    Options = DiffusionOptions
    unit_classes = ("ResidualBlock", "RgbEncoder")

    @property
    def chunk_size(self) -> int:
        return self.options.chunk

    def build(self) -> nn.Module:
        self._check_sizes()
        self.scheduler()
        return DiffusionModule(self.options, self.features)

    def _check_sizes(self) -> None:
        """Refuse cameras of different sizes, and a cut that is larger than the images."""
        sizes, options = set(self.features.cameras.values()), self.options
        if len(sizes) > 1:
            raise ConfigError(
                f"the images of the cameras differ in size: {sorted(sizes)} (height, width)",
                where=f"{KEY}.input_features",
                remedy="give all cameras images of one size, as by data.transform",
            )
        size, cut = options.resize_shape or next(iter(sizes), None), options.crop_shape
        if size is not None and cut is not None and (cut[0] > size[0] or cut[1] > size[1]):
            raise ConfigError(
                f"{KEY}.crop_shape is {list(cut)}, the images are {list(size)} (height, width)",
                where=f"{KEY}.crop_shape",
                remedy="choose a smaller one, or leave it out",
            )

    def backbone_weights(self) -> dict[str, Any]:
        cameras = len(self.features.cameras) if self.options.use_separate_rgb_encoder_per_camera else 0
        found: dict[str, Any] = {}
        for prefix in [f"{at}." for at in range(cameras)] or [""]:
            found |= read_backbone(self.options.pretrained_backbone_weights, partial(_numbered, prefix))
        return found

    @property
    def action_chunk(self) -> int:
        return max(self.chunk_size, self.options.drop_n_last_frames + 1)  # the flags of all frames that may be dropped

    def encode(self, row: Row) -> Sample:
        sample = super().encode(row)
        return replace(sample, fields={**sample.fields, ACTION: sample.fields[ACTION][: self.options.horizon]})

    def weights(self, sample: Sample) -> dict[str, float]:
        """LeRobot's mean: over all numbers of a chunk, also those after an episode's end; 0 for its last frames."""
        left = np.count_nonzero(~sample.fields[IS_PAD][self.options.n_obs_steps - 1 :])
        return {"loss": float(sample.fields[ACTION].size) if left > self.options.drop_n_last_frames else 0.0}

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        actions, options = batch[ACTION], self.options
        noise, times = batch.randn_like("noise", actions), batch.rand_like("step", actions[:, 0, 0])
        steps = (times * options.num_train_timesteps).long()
        noisy = self.scheduler().add_noise(actions, noise, steps)
        draws = batch if model.training and options.crop_is_random else None
        found = model(self.cut(self.inputs(batch), draws), noisy, steps)
        off = (found - (noise if options.prediction_type == "epsilon" else actions)) ** 2
        if options.do_mask_loss_for_padding:
            off = off * ~batch[IS_PAD][:, : options.horizon, None]
        return LossSum(off.sum(), actions.numel())

    def metrics(self, model: nn.Module, batch: Batch) -> Measured:
        return self.action_error(self.predict(model, self.inputs(batch)), batch)

    def cut(self, inputs: Inputs, draws: Batch | None = None) -> dict[str, torch.Tensor]:
        """Inputs with images scaled and cut: at a place drawn for each row and camera, or in the middle."""
        return {name: value if name == STATE else self._cut(name, value, draws) for name, value in inputs.items()}

    def _cut(self, name: str, images: torch.Tensor, draws: Batch | None) -> torch.Tensor:
        if self.options.resize_shape is not None:
            flat = functional.interpolate(
                images.flatten(0, 1), self.options.resize_shape, mode="bilinear", antialias=True
            )
            images = flat.unflatten(0, images.shape[:2])
        if self.options.crop_shape is None:
            return images
        height, width = self.options.crop_shape
        spare = [images.shape[-2] - height, images.shape[-1] - width]
        if draws is None:
            top, left = (round(size / 2) for size in spare)
            return images[..., top : top + height, left : left + width]
        places = draws.rand_like(f"crop {name}", images[:, 0, 0, 0, :2].float())
        begins = (places * (torch.tensor(spare, device=places.device) + 1)).long()
        rows = torch.arange(len(images), device=images.device)[:, None, None]
        down = (begins[:, :1] + torch.arange(height, device=images.device))[:, :, None]
        across = (begins[:, 1:] + torch.arange(width, device=images.device))[:, None]
        return images.permute(0, 3, 4, 1, 2)[rows, down, across].permute(0, 3, 4, 1, 2)

    def scheduler(self) -> Any:
        """The noise by steps: a scheduler of diffusers."""
        options = self.options
        try:
            kind = getattr(import_module("diffusers"), f"{options.noise_scheduler_type}Scheduler")
        except ImportError as error:
            raise ConfigError(
                "model_type: diffusion needs the package diffusers",
                where="actor.model.model_type",
                remedy="pip install 'shardtune[policies]'",
            ) from error
        names = ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule")
        names += ("clip_sample", "clip_sample_range", "prediction_type")
        try:
            return kind(**{name: getattr(options, name) for name in names})
        except RuntimeError as error:
            raise ConfigError(
                f"the {kind.__name__} of diffusers has no beta_schedule {options.beta_schedule!r}",
                where=f"{KEY}.beta_schedule",
                remedy="choose squaredcos_cap_v2, LeRobot's default, linear or scaled_linear",
            ) from error

    def predict(self, model: Any, inputs: Inputs, noise: torch.Tensor | None = None) -> torch.Tensor:
        """A chunk [rows, C, A], normalised.

        Args:
            model: the module.
            inputs: normalised.
            noise: [rows, T, A] to begin with; None: the same for all rows, as are the draws of later steps, so that
                the policy is a function of what it sees.
        """
        options, scheduler = self.options, self.scheduler()
        condition = model.diffusion.condition(self.cut(inputs))
        rows, first = len(condition), options.n_obs_steps - 1
        draws = [torch.Generator().manual_seed(0) for _ in range(rows)]
        shape = (1, options.horizon, self.features.actions)
        own = torch.cat([torch.randn(shape, generator=one) for one in draws])
        chunk = (own if noise is None else noise).to(condition)
        scheduler.set_timesteps(options.num_inference_steps or options.num_train_timesteps)
        for step in scheduler.timesteps.tolist():
            steps = torch.full((rows,), step, device=condition.device)
            found = model.diffusion.unet(chunk, steps, condition)
            chunk = scheduler.step(found, step, chunk, generator=draws).prev_sample
        return chunk[:, first : first + options.chunk]


def _numbered(prefix: str, name: str) -> str:
    """The policy's name of a tensor of the vision backbone."""
    part, _, rest = name.partition(".")
    return f"diffusion.rgb_encoder.{prefix}backbone.{LIKE_CHILDREN.index(part)}.{rest}"
