"""Directories of policies as LeRobot writes and reads them: settings, statistics and names of weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

from shardtune.errors import ModelError
from shardtune.models.action.normalizer import NEEDS, Normalizer, Scale
from shardtune.models.adapter import WeightSource
from shardtune.models.policies.features import ACTION, STATE, Features, camera_of
from shardtune.models.pretrained import MODEL_PATH

CONFIG, WEIGHTS = "config.json", "model.safetensors"
PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor", "policy_postprocessor"
NORMALIZER_STEP = "normalizer_processor"
WITHOUT_EFFECT = {"mean": 0.0, "std": 1.0, "min": -1.0, "max": 1.0, "q01": -1.0, "q99": 1.0}
"""The statistics with which a value stays as it is."""
OLD_BUFFERS = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")
"""Prefixes of the statistics among the weights, where LeRobot before 0.4 kept them."""
OF_TRAINING = frozenset(
    (
        *("type", "device", "use_amp", "use_peft", "push_to_hub", "repo_id", "private", "tags", "license"),
        *("pretrained_path", "pretrained_revision", "compile_model", "compile_mode"),
    )
)
"""Keys of config.json for LeRobot's own training, which a recipe has keys of its own for."""
NOT_LOADED = {"pretrained_backbone_weights": None}
"""Of what is written: LeRobot would download these before it reads the trained ones."""
PREFIXES_OF_TRAINING = ("optimizer_", "scheduler_")


def read_config(directory: Path, name: str) -> dict[str, Any]:
    """The options in a policy's config.json.

    Args:
        directory: of the policy.
        name: of the policy, its `model_type`.

    Raises:
        ModelError: there is none, or it is of another policy.
    """
    try:
        content = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{directory} holds no {CONFIG} of a policy: {error}",
            where=MODEL_PATH,
            remedy="give a directory as LeRobot's save_pretrained, or a run's final/, has it",
        ) from error
    found = content.get("type") if isinstance(content, Mapping) else None
    if found != name:
        raise ModelError(
            f"{directory} holds a policy of type {found!r}, not {name!r}",
            where=f"{MODEL_PATH}: {CONFIG}",
            remedy=f"set actor.model.model_type: {found}" if found else "give a directory that LeRobot has written",
        )
    kept = {key: value for key, value in content.items() if key not in OF_TRAINING}
    return {key: value for key, value in kept.items() if not key.startswith(PREFIXES_OF_TRAINING)}


def own_weights(directory: Path) -> WeightSource:
    """The source of a policy's weights: its directory, without the statistics that LeRobot before 0.4 kept there."""
    file = directory / WEIGHTS
    if not file.is_file():
        return directory
    names = _names(file)
    if not any(name.startswith(OLD_BUFFERS) for name in names):
        return directory
    return {name: partial(_tensor, file, name) for name in names if not name.startswith(OLD_BUFFERS)}


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, "pt") as opened:
            return list(opened.keys())
    except Exception as error:  # safetensors raises its own for a torn file
        raise ModelError(f"{file} cannot be read: {error}", where=MODEL_PATH, remedy="copy the file again") from error


def _tensor(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, "pt") as opened:
        return opened.get_tensor(name)


def read_statistics(directory: Path, features: Features) -> dict[str, Any] | None:
    """The statistics of a directory by `action`, `proprio` and `images.<camera>`; None where it has none.

    They are in the state of the step `normalizer_processor`, or among the weights (LeRobot before 0.4).

    Raises:
        ModelError: a file is missing or torn.
    """
    stored = _of_processor(directory)
    stored = _of_buffers(directory, features) if stored is None else stored
    if not stored:
        return None
    found: dict[str, Any] = {}
    for name, tensor in stored.items():
        feature, _, statistic = name.rpartition(".")
        found.setdefault(_entry(feature), {})[statistic] = tensor.double().numpy()
    return found


def _entry(feature: str) -> str:
    return {ACTION: "action", STATE: "proprio"}.get(feature, f"images.{camera_of(feature)}")


def _of_processor(directory: Path) -> dict[str, torch.Tensor] | None:
    file = directory / f"{PREPROCESSOR}.json"
    if not file.is_file():
        return None
    try:
        steps = json.loads(file.read_text(encoding="utf-8"))["steps"]
        state = next((one.get("state_file") for one in steps if one.get("registry_name") == NORMALIZER_STEP), None)
        return None if state is None else load_file(directory / state)
    except Exception as error:  # safetensors raises its own for a torn file
        raise ModelError(
            f"the statistics of {directory} cannot be read: {error}",
            where=f"{MODEL_PATH}: {file.name}",
            remedy="copy all files of the directory again, *.safetensors among them",
        ) from error


def _of_buffers(directory: Path, features: Features) -> dict[str, torch.Tensor]:
    file = directory / WEIGHTS
    names = set(_names(file)) if file.is_file() else set[str]()
    buffers = {f"normalize_inputs.buffer_{name.replace('.', '_')}": name for name in features.input_features}
    buffers |= {f"normalize_targets.buffer_{name.replace('.', '_')}": name for name in features.output_features}
    found = {(buffer, statistic): f"{buffer}.{statistic}" for buffer in buffers for statistic in _STATISTICS}
    return {
        f"{buffers[buffer]}.{statistic}": _tensor(file, name)
        for (buffer, statistic), name in found.items()
        if name in names
    }


_STATISTICS = tuple(name for names in NEEDS.values() for name in names)


def written_files(
    name: str, options: Mapping[str, Any], features: Features, normalizer: Normalizer
) -> dict[str, object]:
    """The files of a directory besides the weights, by name: JSON, or bytes.

    Args:
        name: of the policy.
        options: its options as JSON.
        features: its inputs and outputs.
        normalizer: of its training data.
    """
    shapes = features.model_dump(mode="json")
    inputs, outputs = shapes["input_features"], shapes["output_features"]
    scales = {ACTION: normalizer.actions} | ({STATE: normalizer.state} if features.state else {})
    scales |= {feature: normalizer.camera(camera_of(feature)) for feature in features.cameras}
    statistics = {
        f"{feature}.{key}": torch.from_numpy(_unmasked(scale, key)).float().contiguous()
        for feature, scale in scales.items()
        for key in scale.statistics
    }
    # The names of the state files hold the place of their step, as LeRobot writes them.
    before = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}},
        _step(NORMALIZER_STEP, {**inputs, **outputs}, normalizer, f"{PREPROCESSOR}_step_3_normalizer_processor"),
    ]
    after = [
        _step("unnormalizer_processor", outputs, normalizer, f"{POSTPROCESSOR}_step_0_unnormalizer_processor"),
        {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}},
    ]
    state = save(statistics)
    return {
        CONFIG: {"type": name, **options, **shapes, "normalization_mapping": normalizer.mapping, **NOT_LOADED},
        f"{PREPROCESSOR}.json": {"name": PREPROCESSOR, "steps": before},
        f"{POSTPROCESSOR}.json": {"name": POSTPROCESSOR, "steps": after},
        before[3]["state_file"]: state,
        after[0]["state_file"]: state,
    }


def _unmasked(scale: Scale, key: str) -> np.ndarray:
    """A statistic with the value that changes nothing where a mask excludes a dimension, as LeRobot has no masks."""
    values = scale.statistics[key]
    return values if scale.mask is None else np.where(scale.mask, values, WITHOUT_EFFECT[key])


def _step(kind: str, features: Mapping[str, Any], normalizer: Normalizer, state: str) -> dict[str, Any]:
    config = {"eps": 1e-8, "features": dict(features), "norm_map": normalizer.mapping}
    return {"registry_name": kind, "config": config, "state_file": f"{state}.safetensors"}
