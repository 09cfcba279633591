"""Policies by flow matching on a vision-language model: rows, draws, loss and acting of SmolVLA and pi0.

Noise at time 1 becomes a chunk of actions at time 0 by following a velocity (Lipman et al., 2023, arXiv:2210.02747;
for robots Black et al., 2024, arXiv:2410.24164). States and actions are padded with zeros to `max_state_dim` and
`max_action_dim`; padded dimensions and actions after an episode's end weigh nothing.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from shardtune.batch import Batch, LossSum, Sample
from shardtune.data.encoder import Row
from shardtune.data.robot.images import decode_frame
from shardtune.errors import ConfigError
from shardtune.models.action.acting import ActingRoot
from shardtune.models.action.environment import Observation
from shardtune.models.action.environment import Policy as ActFunction
from shardtune.models.adapter import AdapterRoot, Measured, WeightSource
from shardtune.models.options import KEY
from shardtune.models.policies.action_expert import Prefix, Seen, resized, time_features
from shardtune.models.policies.features import (
    ACTION,
    STATE,
    Feature,
    Features,
    PolicyOptions,
    Unfit,
    camera_of,
)
from shardtune.models.policies.lerobot_files import CONFIG, PREPROCESSOR
from shardtune.models.policies.policy import IS_PAD, Policy
from shardtune.models.policies.vlm_files import tokenizer_files
from shardtune.models.pretrained import load_tokenizer

PRESENT, TOKENS, WORDS = "present", "tokens", "words"
LENGTH = "tokenizer_max_length"
BACKBONE = "vlm_config.json"
"""The config of the vision-language model, beside the policy's own."""
EMPTY = "observation.images.empty_camera_"
"""Prefix of the cameras that `empty_cameras` adds; no row has them."""
ALPHA, TIMES, EARLIEST = 1.5, 0.999, 0.001
"""Times are 0.001 + 0.999 t, where t has the distribution Beta(1.5, 1)."""


class FlowOptions(PolicyOptions):
    """The keys that LeRobot's SmolVLAConfig and PI0Config share, with their defaults.

    Attributes:
        chunk_size: actions that are predicted; n_action_steps of them are executed.
        empty_cameras: cameras that a row may lack; as many are added to the inputs, and never seen.
        tokenizer_max_length: tokens of an instruction; those beyond are cut off where it is given, and an error where
            it is not.
        load_vlm_weights: whether to start from the weights beside the vision-language model's config.
    """

    n_obs_steps: int = Field(1, ge=1, le=1)
    normalization_mapping: dict[str, str] = Field(
        default={"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
    )
    chunk_size: int = Field(50, ge=1)
    n_action_steps: int = Field(50, ge=1)
    max_state_dim: int = Field(32, ge=1)
    max_action_dim: int = Field(32, ge=1)
    empty_cameras: int = Field(0, ge=0)
    tokenizer_max_length: int = Field(48, ge=1)
    load_vlm_weights: bool = False
    min_period: float = Field(4e-3, gt=0)
    max_period: float = Field(4.0, gt=0)

    @model_validator(mode="after")
    def _executed(self) -> Self:
        if self.n_action_steps > self.chunk_size:
            if "n_action_steps" in self.model_fields_set:
                raise ValueError(f"n_action_steps is more than chunk_size = {self.chunk_size}")
            self.n_action_steps = self.chunk_size
        return self


class Frame(NamedTuple):
    """How images are fitted into the model's: their height and width, and whether padding is on all sides."""

    height: int
    width: int
    centred: bool


class FlowModule(nn.Module):
    """The network under the name that it has in LeRobot's files."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, seen: Seen, chunk: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """The velocity [rows, C, A] of a chunk [rows, C, A] at times [rows, width], which `FlowPolicy.clock` gives."""
        return self.model(seen, chunk, time)


class FlowPolicy(Policy):
    """A policy by flow matching as an adapter.

    A subclass has `network`, whose `prefix(seen)` is computed once for a chunk, and whose
    `velocity(prefix, state, chunk, time)` once per step.

    Attributes:
        config_class: of the vision-language model's config.
        newline_step: LeRobot's name of the step that ends an instruction with a newline.
        token_padding: LeRobot's name for how instructions are padded.
        not_lerobots: options that LeRobot does not have.
        keeps_prefix: whether the prefix is computed once per chunk, not once per step.
    """

    Options = FlowOptions
    padding: ClassVar[Mapping[str, float]] = {TOKENS: 0}
    config_class: ClassVar[type[PreTrainedConfig]]
    newline_step: ClassVar[str]
    token_padding = "max_length"
    not_lerobots: ClassVar[Sequence[str]] = ()
    keeps_prefix = True
    _idle: tuple[str, ...] = ()

    # The model.

    @abstractmethod
    def network(self) -> nn.Module:
        """The network."""

    @abstractmethod
    def frozen(self, network: Any) -> list[nn.Module]:
        """Its parts that the options leave as they are."""

    @abstractmethod
    def unread(self, network: Any) -> list[nn.Module]:
        """Its parts that are in the files, and without effect."""

    @property
    @abstractmethod
    def frame(self) -> Frame | None:
        """The size of images at the model's input; None: as they are."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Steps from noise to actions."""

    @property
    @abstractmethod
    def backbone(self) -> str | None:
        """The directory or Hub name of the vision-language model; None where there is none."""

    @property
    @abstractmethod
    def tokenizer_name(self) -> str:
        """The name of the tokenizer in LeRobot's files."""

    @abstractmethod
    def read_backbone(self) -> PreTrainedConfig:
        """The config of the vision-language model."""

    @abstractmethod
    def backbone_source(self) -> WeightSource:
        """The pretrained weights of the vision-language model, the others as the constructor makes them."""

    @property
    def chunk_size(self) -> int:
        return self.options.chunk_size

    def build(self) -> nn.Module:
        for what, size, most in (
            ("state", self.features.state, self.options.max_state_dim),
            ("action", self.features.actions, self.options.max_action_dim),
        ):
            if size > most:
                raise ConfigError(
                    f"the data have {size} dimensions of {what}, {KEY}.max_{what}_dim is {most}",
                    where=f"{KEY}.max_{what}_dim",
                    remedy=f"set it to {size} or more",
                )
        if all(name.startswith(EMPTY) for name in self.features.cameras):
            raise _blind()
        model = FlowModule(self.network())
        idle = self.unread(model.model)
        for part in (*idle, *self.frozen(model.model)):
            part.requires_grad_(False)
        self._idle = tuple(name for name, part in model.named_modules() if part in idle)
        return model

    def may_be_idle(self, name: str) -> bool:
        return name.startswith(self._idle)

    @property
    def features(self) -> Features:
        if self._found is None:
            found = super().features
            if not found.cameras:
                raise _blind()
            self._found = _with_empty(found, self.options.empty_cameras)
        return self._found

    @property
    def cameras(self) -> tuple[str, ...]:
        return tuple(camera_of(name) for name in self.features.cameras if not name.startswith(EMPTY))

    @property
    def spare_cameras(self) -> int:
        return self.options.empty_cameras

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:  # pyright: ignore[reportIncompatibleMethodOverride]
        """That of `actor.tokenizer.tokenizer_model`, of the policy's own directory, or of its vision-language model."""
        if self._tokenizer is not None:
            return self._tokenizer
        own = self._directory
        has_own = own is not None and (own / "tokenizer_config.json").is_file()
        source = self.recipe.actor.tokenizer.tokenizer_model or (str(own) if has_own else self.backbone)
        if source is None:
            raise ConfigError(
                "the policy has no tokenizer",
                where="actor.tokenizer.tokenizer_model",
                remedy="name the directory of one, such as that of the vision-language model",
            )
        return load_tokenizer(source, trust_remote_code=self.recipe.actor.model.trust_remote_code)

    # Its rows.

    def encode(self, row: Row) -> Sample:
        wanted = {camera_of(feature) for feature in self.features.cameras}
        images = {camera: decode_frame(image) for camera, image in row["images"].items() if camera in wanted}
        actions = self.normalizer.actions.normalise(np.asarray(row["actions"], np.float32))
        real = np.asarray(row[IS_PAD], bool)
        seen = self._fields(images, row["state"], row["instruction"])
        return Sample(fields=seen | {ACTION: actions, IS_PAD: real})

    def _fields(self, images: Mapping[str, np.ndarray], state: Any, instruction: str) -> dict[str, np.ndarray]:
        """What one row or observation shows, as arrays. Raises `Unfit` for what the policy does not take."""
        features = self.features
        if features.state and (state is None or len(state) != features.state):
            raise Unfit("state", f"the state is {state}, the policy takes {features.state} numbers")
        state = (
            np.zeros(0, np.float32)
            if not features.state
            else self.normalizer.state.normalise(np.asarray(state, np.float32))
        )
        fields = {STATE: state, PRESENT: np.array([camera_of(name) in images for name in features.cameras])}
        lacking = [camera for camera in self.cameras if camera not in images]
        if not fields[PRESENT].any():
            raise Unfit("images", f"there is no camera {', '.join(lacking)}, and the policy needs one at least")
        if len(lacking) > self.options.empty_cameras:
            raise Unfit(
                "images",
                f"there is no camera {', '.join(lacking)}, only {', '.join(images)} "
                f"({KEY}.empty_cameras: {len(lacking)} lets the policy do without)",
            )
        for name, (height, width) in features.cameras.items():
            image = images.get(camera_of(name), np.zeros((height, width, 3), np.uint8))
            if image.shape != (height, width, 3):
                raise Unfit(
                    "images",
                    f"the image of {camera_of(name)!r} is {image.shape[0]} x {image.shape[1]}, the policy takes "
                    f"{height} x {width} (height x width)",
                )
            fields[name] = np.ascontiguousarray(image.transpose(2, 0, 1))
        if not instruction.strip():
            raise Unfit("instruction", "the instruction is empty")
        words = self._words(instruction)
        return fields | {TOKENS: words, WORDS: np.int64(np.count_nonzero(words >= 0))}

    def _words(self, instruction: str) -> np.ndarray:
        """int32 [tokens] of an instruction, which ends with a newline.

        Raises `Unfit` for one that would be cut where the recipe gives no length.
        """
        text = instruction if instruction.endswith("\n") else f"{instruction}\n"
        words, most = self.tokenizer(text)["input_ids"], self.options.tokenizer_max_length
        if len(words) > most and LENGTH not in self.options.model_fields_set:
            raise Unfit(
                "instruction",
                f"the instruction has {len(words)} tokens, and {most} are read: give {KEY}.tokenizer_max_length: "
                f"{len(words)}, or {most} to cut it",
            )
        return np.array(words[:most], np.int32)

    def seen(self, fields: Mapping[str, torch.Tensor]) -> Seen:
        """The network's inputs from fields of rows, stacked."""
        present = fields[PRESENT]
        images = [self._image(name, fields[name]) for name in self.features.cameras]
        tokens = fields[TOKENS].long()
        words = torch.arange(tokens.shape[1], device=tokens.device) < fields[WORDS][:, None]
        return Seen(torch.stack(images, 1), present, tokens, words, _padded(fields[STATE], self.options.max_state_dim))

    def _image(self, name: str, image: torch.Tensor) -> torch.Tensor:
        """A camera's images [rows, 3, H, W], fitted in and from -1 to 1."""
        scaled = self.normalizer.camera(camera_of(name)).normalise(image)
        if self.frame is not None:
            scaled = resized(scaled, self.frame.height, self.frame.width, centred=self.frame.centred)
        return scaled * 2 - 1

    # Training.

    def weights(self, sample: Sample) -> dict[str, float]:
        return {"loss": float(np.count_nonzero(~sample.fields[IS_PAD])) * self.features.actions}

    def times(self, uniform: torch.Tensor) -> torch.Tensor:
        """Times of training [rows] from uniform numbers: the inverse of the distribution function of Beta(1.5, 1)."""
        return EARLIEST + TIMES * uniform ** (1 / ALPHA)

    def clock(self, model: nn.Module, time: torch.Tensor) -> torch.Tensor:
        """Times [rows] as the network's inputs [rows, width]: made here, as bf16 is too coarse for times themselves."""
        network: Any = model.get_submodule("model")
        return time_features(time, network.width, self.options.min_period, self.options.max_period)

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        actions = _padded(batch[ACTION], self.options.max_action_dim)
        noise, time = batch.randn_like("noise", actions), self.times(batch.rand_like("time", actions[:, 0, 0]))
        on_its_way = torch.lerp(actions, noise, time[:, None, None])
        velocity = model(self.seen(batch.fields), on_its_way, self.clock(model, time))
        real, dimensions = ~batch[IS_PAD][..., None], self.features.actions
        errors = ((velocity - (noise - actions))[..., :dimensions] ** 2) * real
        return LossSum(errors.sum(), int(real.sum()) * dimensions)

    def metrics(self, model: nn.Module, batch: Batch) -> Measured:
        """How far the chunk is off that the policy would follow."""
        actions = _padded(batch[ACTION], self.options.max_action_dim)
        chunk = self.predict(model, self.seen(batch.fields), batch.randn_like("acting", actions))
        return self.action_error(chunk.to(batch[ACTION].dtype), batch)

    # Acting.

    def predict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, model: nn.Module, seen: Seen, noise: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A normalised chunk [rows, C, dimensions].

        Args:
            seen: what it acts on.
            noise: [rows, C, max_action_dim]; None: one that is the same for all, so that the policy is a function of
                what it sees.
        """
        network: Any = model.get_submodule("model")
        rows, options = len(seen.state), self.options
        if noise is None:
            shape = (1, options.chunk_size, options.max_action_dim)
            noise = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(seen.state).expand(rows, -1, -1)
        chunk, steps = noise, self.steps
        prefix: Prefix = network.prefix(seen)
        for step in range(steps):
            if step and not self.keeps_prefix:
                prefix = network.prefix(seen)
            time = self.clock(model, seen.state.new_full((rows,), 1 - step / steps))
            chunk = chunk - network.velocity(prefix, seen.state, chunk, time).to(chunk.dtype) / steps
        return chunk[..., : self.features.actions]

    def policy(self, root: AdapterRoot, device: torch.device) -> ActFunction:
        assert isinstance(root, ActingRoot)

        def act(observations: Sequence[Observation]) -> np.ndarray:
            rows = [self._observed(one) for one in observations]
            longest = max(len(one[TOKENS]) for one in rows)
            for one in rows:
                one[TOKENS] = np.pad(one[TOKENS], (0, longest - len(one[TOKENS])))
            fields = {name: torch.from_numpy(np.stack([one[name] for one in rows])).to(device) for name in rows[0]}
            with torch.no_grad():
                chunk = root.act(self.seen(fields))
            return self.normalizer.actions.unnormalise(chunk.float().cpu().numpy())

        return act

    def _observed(self, observation: Observation) -> dict[str, np.ndarray]:
        try:
            return self._fields(observation["images"], observation["state"], observation["instruction"])
        except Unfit as error:
            raise self._cannot_act(error) from error

    # Its directory.

    def saved_files(self) -> Mapping[str, object]:
        """Files as LeRobot's, with the steps that make tokens of an instruction; the tokenizer, and the config of the
        vision-language model."""
        files: dict[str, Any] = dict(super().saved_files())
        steps = files[f"{PREPROCESSOR}.json"]["steps"]
        tokens = {
            "max_length": self.options.tokenizer_max_length,
            "padding": self.token_padding,
            "padding_side": "right",
            "tokenizer_name": self.tokenizer_name,
        }
        steps[2:2] = [
            {"registry_name": self.newline_step, "config": {}},
            {"registry_name": "tokenizer_processor", "config": tokens},
        ]
        known = type(self.options).model_fields.keys() - self.not_lerobots
        config = {key: value for key, value in files[CONFIG].items() if key == "type" or key in known}
        config |= {key: False for key in ("load_vlm_weights",) if key in known}  # the trained ones are here
        if LENGTH not in self.options.model_fields_set:
            del config[LENGTH]  # given, it cuts longer instructions
        return {**files, CONFIG: config, BACKBONE: self.vlm_config.to_dict(), **tokenizer_files(self.tokenizer)}

    @cached_property
    def vlm_config(self) -> Any:
        """The config of the vision-language model: in the directory of the policy (a run's final/), or in that of an
        adapter over weights that are drawn; else of `backbone`."""
        directory, adapter = self._directory, self.recipe.actor.model.lora.load_from
        if directory is None and adapter is not None and not self.options.load_vlm_weights:
            directory = Path(adapter)
        file = None if directory is None else directory / BACKBONE
        if file is not None and file.is_file():
            return self.config_class.from_dict(json.loads(file.read_text(encoding="utf-8")))
        return self.read_backbone()

    def initial_weights(self) -> WeightSource:
        if self._directory is None and self.options.load_vlm_weights:
            return self.backbone_source()
        return super().initial_weights()


def _blind() -> ConfigError:
    return ConfigError(
        "the data have no images, and the policy sees by them",
        where=f"{KEY}.input_features",
        remedy="name their columns in data.columns, or choose a policy without images: act, diffusion",
    )


def _with_empty(features: Features, number: int) -> Features:
    """Features with as many cameras that no row has."""
    size = next(iter(features.cameras.values()), (0, 0))
    empty = {f"{EMPTY}{at}": Feature(type="VISUAL", shape=(3, *size)) for at in range(number)}
    return features.model_copy(update={"input_features": {**features.input_features, **empty}})


def _padded(values: torch.Tensor, size: int) -> torch.Tensor:
    """Zeros behind the last dimension, up to `size`."""
    return functional.pad(values, (0, size - values.shape[-1]))
