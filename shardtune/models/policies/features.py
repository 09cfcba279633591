"""What a policy sees and predicts, in LeRobot's words: names, kinds and shapes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from shardtune.config import Recipe
from shardtune.data.encoder import FrameOptions, RowError
from shardtune.data.robot.images import decode_frame
from shardtune.data.robot.lerobot import camera_columns
from shardtune.data.sources.resolve import resolve_sources
from shardtune.data.sources.source import LEROBOT, usable_rows
from shardtune.errors import ConfigError
from shardtune.models.options import KEY

STATE, ACTION = "observation.state", "action"
Side = Annotated[int, Field(ge=1)]
Size = tuple[Side, Side]
"""Height and width of images, in an option."""
CAMERA_PREFIXES = ("observation.images.", "observation.")


class Feature(BaseModel):
    """One input or output.

    Attributes:
        type: STATE, VISUAL (images) or ACTION.
        shape: [dimensions], of images [3, height, width].
    """

    model_config = ConfigDict(extra="forbid")

    type: Literal["STATE", "VISUAL", "ACTION"]
    shape: tuple[int, ...]


class Features(BaseModel):
    """All inputs and outputs by name."""

    model_config = ConfigDict(extra="forbid")

    input_features: dict[str, Feature]
    output_features: dict[str, Feature]

    @property
    def cameras(self) -> dict[str, tuple[int, int]]:
        """Height and width of the images of each camera, by the name of its feature."""
        shapes = ((name, one.shape) for name, one in self.input_features.items() if one.type == "VISUAL")
        return {name: (shape[1], shape[2]) for name, shape in shapes}

    @property
    def state(self) -> int:
        """Dimensions of the state; 0 where there is none."""
        return self.input_features[STATE].shape[0] if STATE in self.input_features else 0

    @property
    def actions(self) -> int:
        """Dimensions of an action."""
        return self.output_features[ACTION].shape[0]


class PolicyOptions(BaseModel):
    """The options that all policies have; others are added by each.

    Attributes:
        n_obs_steps: frames that the policy sees: the present one and those before it.
        input_features, output_features: null: as the first training row has them.
        normalization_mapping: VISUAL, STATE and ACTION to MEAN_STD, MIN_MAX, QUANTILES or IDENTITY.
    """

    model_config = ConfigDict(extra="forbid")

    n_obs_steps: int = Field(1, ge=1)
    input_features: dict[str, Feature] | None = None
    output_features: dict[str, Feature] | None = None
    normalization_mapping: dict[str, str] = {"VISUAL": "MEAN_STD", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}

    def features(self) -> Features | None:
        """The given ones; None where none are given.

        Raises:
            ConfigError: inputs without outputs, shapes that are none, or no action.
        """
        if not self.input_features and not self.output_features:
            return None
        for name, one in {**(self.input_features or {}), **(self.output_features or {})}.items():
            if len(one.shape) != (3 if one.type == "VISUAL" else 1):
                raise _wrong(f"{name} is {one.type} and has the shape {list(one.shape)}")
        if ACTION not in (self.output_features or {}) or not self.input_features:
            raise _wrong("inputs and outputs belong together, and one output is named action")
        return Features(input_features=self.input_features, output_features=self.output_features or {})


def _wrong(what: str) -> ConfigError:
    return ConfigError(
        what,
        where=f"{KEY}.input_features, output_features",
        remedy="leave both out, then they are those of the training rows; or write them as LeRobot's config.json does",
    )


class Unfit(RowError):
    """What a row or an observation shows is not what the policy takes.

    Args:
        part: `images`, `state` or `instruction`.
        reason: what is wrong with it.
    """

    def __init__(self, part: str, reason: str) -> None:
        super().__init__(reason)
        self.part = part


def camera_of(feature: str) -> str:
    """The camera of a feature: observation.images.top is top, observation.image is image."""
    return next((feature.removeprefix(one) for one in CAMERA_PREFIXES if feature.startswith(one)), feature)


def feature_of(camera: str) -> str:
    """The reverse."""
    return "observation.image" if camera == "image" else f"observation.images.{camera}"


def features_of(row: Mapping[str, Any], columns: Mapping[str, str]) -> Features:
    """The features that a row has.

    Args:
        row: of the training data.
        columns: camera -> the column of its images, of a LeRobot data set: LeRobot's name of the feature.
    """
    inputs = {} if row["state"] is None else {STATE: Feature(type="STATE", shape=(len(row["state"]),))}
    for camera in sorted(row["images"]):
        height, width, _ = decode_frame(row["images"][camera]).shape
        column = columns.get(camera, "")
        same = column.startswith(CAMERA_PREFIXES) and camera_of(column) == camera
        inputs[column if same else feature_of(camera)] = Feature(type="VISUAL", shape=(3, height, width))
    outputs = {ACTION: Feature(type="ACTION", shape=(np.shape(row["actions"])[1],))}
    return Features(input_features=inputs, output_features=outputs)


def features_of_rows(recipe: Recipe, train_data: object, frames: FrameOptions) -> Features:
    """The features of the first training row that can be used.

    Args:
        recipe: its `data` section is read.
        frames: how the rows are read.
        train_data: training rows in memory instead of the recipe's.

    Raises:
        ConfigError: there is none.
    """
    spec = recipe.data.train_data_paths if train_data is None else train_data
    for source in [] if spec is None else resolve_sources(spec, recipe.data, frames=frames, report=lambda _: None):
        for row in usable_rows(source):
            is_lerobots = source.files[0].kind == LEROBOT
            return features_of(row, camera_columns(source.files[0].path, source.columns) if is_lerobots else {})
    raise ConfigError(
        "the shapes of images, state and action are not known: there is no training row to read them from",
        where=f"{KEY}.input_features, output_features",
        remedy="name data.train_data_paths, or a model_path whose config.json has them",
    )


def unseen(
    recipe: Recipe, train_data: object, frames: FrameOptions, features: Features, cameras: Collection[str]
) -> list[str]:
    """What a policy does not see of the training rows, by the first row of each data set, a sentence each.

    Args:
        recipe, train_data, frames: as for `features_of_rows`.
        features: of the policy.
        cameras: that it sees where rows have them.
    """
    spec = recipe.data.train_data_paths if train_data is None else train_data
    wanted, found = {camera_of(feature) for feature in features.cameras}, []
    for source in [] if spec is None else resolve_sources(spec, recipe.data, frames=frames, report=lambda _: None):
        row = next(usable_rows(source), None)
        if row is None:
            continue
        parts = [f"the camera {camera}" for camera in sorted(row["images"]) if camera not in wanted]
        parts += ["the state"] if row["state"] is not None and not features.state else []
        if parts:
            found.append(f"of {source.name} the policy does not see {', '.join(parts)}: not in {KEY}.input_features")
        lacking = [camera for camera in cameras if camera not in row["images"]]
        if lacking and len(lacking) < len(cameras):
            found.append(
                f"{source.name} has no camera {', '.join(lacking)}, as {KEY}.empty_cameras permits: its first row has "
                f"{', '.join(sorted(row['images']))}"
            )
    return found
