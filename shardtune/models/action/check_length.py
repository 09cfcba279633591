"""Compares `actor.model.action_token_len` with the statistics of a user's own model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from shardtune.config import ModelConfig
from shardtune.errors import ConfigError
from shardtune.models.action.policy import ActionPolicy, DatasetStatistics
from shardtune.models.action.tokens import STATISTICS_FILE, action_statistics

NORM_STATS = "norm_stats"
"""The key of config.json that holds the statistics of actions in OpenVLA's format."""


@runtime_checkable
class HasActionStats(Protocol):
    """A model with the statistics of its data sets, as OpenVLA's."""

    def get_action_stats(self, unnorm_key: str) -> Mapping[str, object]:
        """Of the actions of one data set: q01, q99, …, each [dimensions]."""
        ...


def check_stored_length(config: ModelConfig) -> None:
    """Compare with the statistics in a model's directory, if it has any for `unnorm_key`; nothing is built.

    Raises:
        ConfigError: the actions have another number of dimensions.
    """
    if config.action_token_len is None or config.model_path is None:
        return
    _compare(config, stored_statistics(config.model_path))


def check_made_length(config: ModelConfig, model: nn.Module) -> None:
    """Compare with the statistics of a model that a user's function made, if it has any for `unnorm_key`.

    Raises:
        ConfigError: the actions have another number of dimensions.
    """
    if config.action_token_len is None:
        return
    if isinstance(model, ActionPolicy):
        settings = model.settings_for(config.unnorm_key)
        action_statistics(settings.norm_stats, config.unnorm_key or settings.unnorm_key, config.action_token_len)
    elif isinstance(model, HasActionStats) and config.unnorm_key is not None:
        _compare(config, {config.unnorm_key: {"action": model.get_action_stats(config.unnorm_key)}})
    elif isinstance(model, PreTrainedModel):
        _compare(config, model.config.to_dict().get(NORM_STATS))


def stored_statistics(model_path: str) -> dict[str, DatasetStatistics]:
    """The statistics in a model's directory: those of config.json, and those of `dataset_statistics.json` over them."""
    found: dict[str, DatasetStatistics] = {}
    for name, key in (("config.json", NORM_STATS), (STATISTICS_FILE, None)):
        file = Path(model_path) / name
        if not file.is_file():
            continue
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # reported where the file is read for what it is
            continue
        section = content.get(key) if key is not None and isinstance(content, Mapping) else content
        if isinstance(section, Mapping):
            found |= {str(name): entry for name, entry in section.items() if isinstance(entry, Mapping)}
    return found


def _compare(config: ModelConfig, statistics: object) -> None:
    given, key = config.action_token_len, config.unnorm_key
    if not isinstance(statistics, Mapping):
        return
    if key is None and len(statistics) == 1:
        key = next(iter(statistics))
    entry = statistics.get(key)
    action = entry.get("action") if isinstance(entry, Mapping) else None
    if not isinstance(action, Mapping):
        return
    sizes = {len(values) for values in action.values() if isinstance(values, list | tuple | np.ndarray)}
    if len(sizes) == 1 and given not in sizes:
        own = sizes.pop()
        raise ConfigError(
            f"action_token_len is {given}, the actions of {key} have {own} dimensions",
            where="actor.model.action_token_len",
            remedy=f"set it to {own}, or choose another unnorm_key",
        )
