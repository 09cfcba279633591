"""What the ready policies share: options, rows, normalisation, acting, and directories as LeRobot has them."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from shardtune.batch import Batch, Sample
from shardtune.config import Recipe
from shardtune.data.encoder import Encoder, FrameOptions, Row
from shardtune.data.images.augmentation import RowAugmentation
from shardtune.data.robot.columns import IMAGES
from shardtune.data.robot.images import decode_frame
from shardtune.data.robot.representation import ENTRY, check_statistics
from shardtune.errors import ConfigError, ModelError
from shardtune.models.action.acting import ActingAdapter, ActingRoot
from shardtune.models.action.action_mask import chosen_mask
from shardtune.models.action.environment import Observation
from shardtune.models.action.environment import Policy as ActFunction
from shardtune.models.action.normalizer import Normalizer
from shardtune.models.action.recipe_normalizer import NORMALIZER_FILE, recipe_normalizers
from shardtune.models.action.tokens import UNNORM_KEY, choose_key
from shardtune.models.adapter import AdapterRoot, WeightSource
from shardtune.models.adapter_encoder import FrameFieldEncoder
from shardtune.models.options import KEY
from shardtune.models.policies import lerobot_files
from shardtune.models.policies.features import (
    ACTION,
    STATE,
    Features,
    PolicyOptions,
    Unfit,
    camera_of,
    features_of_rows,
    unseen,
)
from shardtune.models.pretrained import model_directory

IS_PAD = "action_is_pad"
Inputs = Mapping[str, torch.Tensor]
"""What a policy sees, by feature: states [rows, frames, S], normalised; images uint8 [rows, frames, 3, H, W]."""


class PolicyEncoder(FrameFieldEncoder):
    """The encoder of a policy's rows, with the cameras of a row that the policy does not see."""

    _adapter: Policy

    def unread(self, row: Row) -> Sequence[str]:
        """Cameras that only some rows have; those of all rows are in the policy's notes."""
        wanted = {camera_of(feature) for feature in self._adapter.features.cameras}
        return [f"{IMAGES}{camera}" for camera in sorted(row["images"]) if camera not in wanted]


class Policy(ActingAdapter):
    """An adapter that is a policy of LeRobot's: its options are the keys of its config.json.

    A subclass has `build`, `loss`, `chunk_size`, and `predict(model, inputs)`, which returns a normalised chunk. The
    options of a directory (`actor.model.model_path`) apply where the recipe gives none.

    Attributes:
        name: its `model_type`, and the `type` in config.json.
        unused: keys of config.json that have no effect here.
    """

    name: ClassVar[str]
    unused: ClassVar[Sequence[str]] = ()
    Options = PolicyOptions

    def __init__(self, recipe: Recipe, tokenizer: Any = None) -> None:
        super().__init__(self._with_config(recipe), tokenizer)
        self._found: Features | None = self.options.features()

    # What it sees.

    @property
    @abstractmethod
    def chunk_size(self) -> int:
        """Actions from the present frame on that are predicted."""

    @property
    def action_chunk(self) -> int:
        return self.chunk_size

    @property
    def observation_steps(self) -> int:
        return self.options.n_obs_steps

    @property
    def features(self) -> Features:
        """Inputs and outputs: those of the options or of the directory, otherwise of the first training row."""
        if self._found is None:
            frames = FrameOptions.of(self.recipe.actor.model, self.action_chunk, self.observation_steps)
            self._found = features_of_rows(self.recipe, self.train_data, frames)
        return self._found

    @property
    def cameras(self) -> tuple[str, ...]:
        """Those of the data that the policy sees."""
        return tuple(map(camera_of, self.features.cameras))

    @property
    def spare_cameras(self) -> int:
        """How many of them an observation may lack."""
        return 0

    def encoder(self, *, with_prompts: bool) -> Encoder:
        frames = FrameOptions.of(self.recipe.actor.model, self.action_chunk, self.observation_steps)
        return PolicyEncoder(self, self.recipe, frames, self._in_memory)

    def notes(self) -> Sequence[str]:
        frames = FrameOptions(self.action_chunk, self.observation_steps)
        (used,) = self.used_normalizers
        others = [name for name in self.normalizers if name != used]
        shared = [f"rows of {', '.join(others)} are normalised by the statistics of {used}, as model.unnorm_key says"]
        seen = unseen(self.recipe, self.train_data, frames, self.features, self.cameras)
        return [*super().notes(), *(shared if others else ()), *seen]

    @property
    def action_steps(self) -> int:
        return self.options.n_action_steps

    @property
    def augments(self) -> bool:
        return bool(self.features.cameras)

    def augmented(self, sample: Sample, augment: RowAugmentation) -> Sample:
        """The images of each camera changed, those of all frames alike."""
        return augment.fields(sample, [name for name in self.features.cameras if name in sample.fields])

    def encode(self, row: Row) -> Sample:
        earlier = row["earlier"] if self.observation_steps > 1 else ()
        wanted = {camera_of(feature) for feature in self.features.cameras}
        images = [
            {camera: decode_frame(image) for camera, image in frame["images"].items() if camera in wanted}
            for frame in (*earlier, row)
        ]
        fields = self._seen(images, [frame["state"] for frame in (*earlier, row)])
        actions = np.concatenate([*([frame["action"]] for frame in earlier), row["actions"]]).astype(np.float32)
        padded = np.concatenate([[frame["is_pad"] for frame in earlier], row[IS_PAD]]).astype(bool)
        return Sample(fields=fields | {ACTION: self.normalizer.actions.normalise(actions), IS_PAD: padded})

    def _seen(self, images: Sequence[Mapping[str, np.ndarray]], states: Sequence[Any]) -> dict[str, np.ndarray]:
        """The inputs of one row from the images and states of its frames, the present one last."""
        fields: dict[str, np.ndarray] = {}
        if self.features.state:
            if any(state is None or len(state) != self.features.state for state in states):
                raise Unfit("state", f"the state is {states[-1]}, the policy takes {self.features.state} numbers")
            fields[STATE] = self.normalizer.state.normalise(np.asarray(states, np.float32))
        for feature, size in self.features.cameras.items():
            camera = camera_of(feature)
            taken = [frame.get(camera) for frame in images]
            for image in taken:
                if image is None:
                    raise Unfit("images", f"there is no camera {camera!r}, only {', '.join(images[-1]) or 'none'}")
                if image.shape != (*size, 3):
                    raise Unfit(
                        "images",
                        f"the image of {camera!r} is {image.shape[0]} x {image.shape[1]}, the policy takes "
                        f"{size[0]} x {size[1]} (height x width)",
                    )
            fields[feature] = np.stack([image.transpose(2, 0, 1) for image in taken if image is not None])
        return fields

    def inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The inputs of a batch, images normalised."""
        return self.prepared({name: batch[name] for name in self.features.input_features})

    def prepared(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """Inputs with images normalised."""
        return {
            name: self.normalizer.camera(camera_of(name)).normalise(value) if name != STATE else value
            for name, value in inputs.items()
        }

    # Normalisation.

    @property
    def normalizers(self) -> Mapping[str, Normalizer]:
        if self._normalizers is None:
            stored = self._stored_normalizer()
            mapping = self.options.normalization_mapping
            self._normalizers = (
                recipe_normalizers(self.recipe, mapping, self.action_chunk, self.train_data)
                if stored is None
                else {self._stored_name: stored}
            )
        return self._normalizers

    @property
    def used_normalizers(self) -> Mapping[str, Normalizer]:
        """The one by which all rows are normalised, as there is one in LeRobot's files."""
        given = self.recipe.actor.model.unnorm_key
        if given is not None and given not in self.normalizers and self._stored_normalizer() is not None:
            raise ConfigError(
                f"the statistics are those in {self._directory}, of {', '.join(self.normalizers)}, not of {given!r}",
                where=UNNORM_KEY,
                remedy="leave it out; model.action_statistics names a file of others",
            )
        name = choose_key(self.normalizers, given)
        return {name: self.normalizers[name]}

    @property
    def normalizer(self) -> Normalizer:
        """That by which all rows are normalised.

        Raises:
            ConfigError: there are several, and `actor.model.unnorm_key` names none of them.
        """
        (used,) = self.used_normalizers.values()
        return used

    @property
    def normalizes(self) -> bool:
        return True

    def _stored_normalizer(self) -> Normalizer | None:
        """That of the directory with the weights; None where the recipe names a file, or the directory has none."""
        if self._directory is None or self.recipe.actor.model.action_statistics is not None:
            return None
        found = lerobot_files.read_statistics(self._directory, self.features)
        if found is None:
            return None
        given, where = self.recipe.actor.model.action_normalization_mask, f"statistics in {self._directory}"
        mask = None if given is None else chosen_mask(given, {}, [True] * self.features.actions, self.name)
        form = next(iter(self._written.values()), {}).get(ENTRY)  # LeRobot's own actions are absolute
        check_statistics(form, FrameOptions.of(self.recipe.actor.model, self.action_chunk).representation, where)
        statistics = found if form is None else {**found, ENTRY: form}
        return Normalizer.of(statistics, self.options.normalization_mapping, action_mask=mask, where=where)

    @cached_property
    def _written(self) -> Mapping[str, Mapping[str, Any]]:
        """The statistics by data set of a directory written here, which has one; LeRobot's have no such file."""
        file = None if self._directory is None else self._directory / NORMALIZER_FILE
        return json.loads(file.read_text(encoding="utf-8")) if file is not None and file.is_file() else {}

    @property
    def _stored_name(self) -> str:
        """The data set of the directory's statistics, or the policy's name where it is not known."""
        return next(iter(self._written)) if len(self._written) == 1 else self.name

    # Its directory.

    @cached_property
    def _directory(self) -> Path | None:
        config = self.recipe.actor.model
        return None if config.from_scratch else _directory_of(config.model_path)

    def _with_config(self, recipe: Recipe) -> Recipe:
        """The recipe with the options of its directory, where it gives none itself."""
        model = recipe.actor.model
        if model.normalization_mapping is not None and "normalization_mapping" in model.options:
            raise ConfigError(
                "the modes of normalisation are given twice",
                where=f"actor.model.normalization_mapping, {KEY}.normalization_mapping",
                remedy="keep one of them",
            )
        given = dict(model.options)
        if model.normalization_mapping is not None:
            given["normalization_mapping"] = dict(model.normalization_mapping)
        directory = _directory_of(model.model_path)
        if directory is not None:
            stored = lerobot_files.read_config(directory, self.name)
            given = {key: value for key, value in stored.items() if key not in self.unused} | given
        changed = model.model_copy(update={"options": given, "normalization_mapping": None})
        return recipe.model_copy(update={"actor": recipe.actor.model_copy(update={"model": changed})})

    def initial_weights(self) -> WeightSource:
        source = super().initial_weights()
        if self._directory is None:
            return self.backbone_weights() or source
        return lerobot_files.own_weights(self._directory)

    def backbone_weights(self) -> dict[str, Any]:
        """Weights of a part that are read from a file of their own; the others are the constructor's."""
        return {}

    def encoding_settings(self) -> Mapping[str, Any]:
        return {**super().encoding_settings(), "features": self.features.model_dump(mode="json")}

    def take_encoding_settings(self, settings: Mapping[str, Any]) -> None:
        super().take_encoding_settings(settings)
        self._found = Features.model_validate(settings["features"])

    def saved_files(self) -> Mapping[str, object]:
        options = self.options.model_dump(mode="json")
        return {
            **super().saved_files(),
            NORMALIZER_FILE: {name: one.to_json() for name, one in self.used_normalizers.items()},
            **lerobot_files.written_files(self.name, options, self.features, self.normalizer),
        }

    # Acting.

    @abstractmethod
    def predict(self, model: Any, inputs: Inputs) -> torch.Tensor:
        """A chunk of actions [rows, C, A], normalised, from inputs whose images are normalised."""

    def act(self, model: Any, *inputs: Any) -> torch.Tensor:
        return self.predict(model, *inputs)

    def check_observation(self, observation: Observation) -> None:
        self._observed(observation)

    def policy(self, root: AdapterRoot, device: torch.device) -> ActFunction:
        assert isinstance(root, ActingRoot)

        def act(observations: Sequence[Observation]) -> np.ndarray:
            fields = [self._observed(one) for one in observations]
            inputs = {name: torch.from_numpy(np.stack([one[name] for one in fields])).to(device) for name in fields[0]}
            with torch.no_grad():
                chunk = root.act(self.prepared(inputs))
            return self.normalizer.actions.unnormalise(chunk.float().cpu().numpy())

        return act

    def _observed(self, observation: Observation) -> dict[str, np.ndarray]:
        """The inputs of an observation, with those before it where the policy sees several frames."""
        frames = [observation]
        if self.observation_steps > 1:
            frames = [*observation.get("earlier", ()), observation]
            if len(frames) != self.observation_steps:
                raise ModelError(
                    f"the observation has {len(frames) - 1} earlier ones, the policy sees {self.observation_steps} "
                    "frames",
                    where="observation['earlier']",
                    remedy="give the observations of the steps before, the oldest first (ObservationHistory does)",
                )
        try:
            return self._seen([frame["images"] for frame in frames], [frame["state"] for frame in frames])
        except Unfit as error:
            raise self._cannot_act(error) from error

    def _cannot_act(self, error: Unfit) -> ModelError:
        parts = {"images": f"images of {', '.join(self.cameras)}", "state": f"a state of {self.features.state} numbers"}
        said = parts.get(error.part, "an instruction")
        return ModelError(
            f"the policy cannot act on the observation: {error}",
            where=f"observation['{error.part}']",
            remedy=f"give {said}, like those of the training data",
        )

    def action_error(self, chunk: torch.Tensor, batch: Batch) -> dict[str, tuple[float, float]]:
        """How far a normalised chunk is off on average, in the units of the data, as a metric."""
        first = self.observation_steps - 1
        scale = self.normalizer.actions
        off = (scale.unnormalise(chunk) - scale.unnormalise(batch[ACTION][:, first:])).abs()
        real = ~batch[IS_PAD][:, first : first + off.shape[1], None]
        return {"action_l1": (float((off * real).sum()), float(real.sum()) * off.shape[-1])}


def _directory_of(source: str | None) -> Path | None:
    """A policy's directory, or the local copy of one on the Hub; None for a weight file, which has no options."""
    return None if source is None or Path(source).is_file() else model_directory(source)
