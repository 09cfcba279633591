"""The normalizers of a run: from a file that its recipe names, or from the statistics of its training rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardtune.config import Recipe
from shardtune.data.action_statistics import source_statistics
from shardtune.data.encoder import FrameOptions
from shardtune.data.robot.dimensions import GivenMask
from shardtune.data.robot.representation import ENTRY, Representation, check_statistics
from shardtune.data.sources.resolve import resolve_sources
from shardtune.errors import ConfigError, DataError
from shardtune.models.action.action_mask import chosen_mask
from shardtune.models.action.normalizer import MAPPING_KEY, Normalizer, checked_mapping
from shardtune.models.action.tokens import choose_key

NORMALIZER_FILE = "normalizer.json"
"""Beside the weights of an adapter's model: {data set: what `Normalizer.to_json` gives}."""
STATISTICS_KEY = "actor.model.action_statistics"


def recipe_normalizers(
    recipe: Recipe, mapping: Mapping[str, str], chunk: int | None, train_data: object = None
) -> dict[str, Normalizer]:
    """The normalizers of a run by data set.

    Args:
        recipe: `actor.model.action_statistics` names a `normalizer.json`, with modes and masks, or a
            `dataset_statistics.json`, with masks; without one they are computed from the training rows.
            `actor.model.action_normalization_mask` names dimensions that are not normalised.
        mapping: the modes that the adapter declares; those of `actor.model.normalization_mapping` take precedence.
        chunk: the adapter's `action_chunk`.
        train_data: training rows in memory.

    Raises:
        ConfigError: there are no statistics, or the modes differ from those of the file.
        DataError: statistics that cannot be read or used.
    """
    modes = checked_mapping({**mapping, **(recipe.actor.model.normalization_mapping or {})})
    file, given = recipe.actor.model.action_statistics, recipe.actor.model.action_normalization_mask
    if file is not None:
        form = FrameOptions.of(recipe.actor.model, chunk or 1).representation
        return _from_file(Path(file), modes, given, form)
    spec = recipe.data.train_data_paths if train_data is None else train_data
    if spec is None or chunk is None:
        raise ConfigError(
            "there are no statistics to normalise by: no training rows are named"
            if spec is None
            else "there are no statistics to normalise by: the adapter's rows are no frames of robot data",
            where=MAPPING_KEY,
            remedy=f"name a {NORMALIZER_FILE} or dataset_statistics.json in model.action_statistics"
            + ("" if chunk is not None else ", or let action_chunk be the number of actions of a row"),
        )
    frames = FrameOptions.of(recipe.actor.model, chunk)
    sources = resolve_sources(spec, recipe.data, frames=frames, report=lambda _: None)
    found = source_statistics(sources, cache_dir=recipe.data.cache_dir, on_bad_row=recipe.data.on_bad_row)
    return {
        name: Normalizer.of(
            one.to_json(),
            modes,
            action_mask=_action_mask(given, one.to_json()["action"], None, name),
            where=f"statistics of {name}",
        )
        for name, one in found.items()
    }


def _action_mask(
    given: GivenMask | None, section: Mapping[str, Any], own: Sequence[bool] | None, name: str
) -> Sequence[bool] | None:
    """The recipe's mask over a file's own."""
    if given is None:
        return own
    size = next((len(values) for values in section.values() if isinstance(values, Sequence)), 0)
    return chosen_mask(given, section, own or [True] * size, name)


def _from_file(
    path: Path, modes: Mapping[str, str], given: GivenMask | None, form: Representation | None
) -> dict[str, Normalizer]:
    content = _read(path)
    found: dict[str, Normalizer] = {}
    for name, entry in content.items():
        where = f"{path}: {name}"
        if not isinstance(entry, Mapping):
            raise DataError("the file holds no statistics", where=where, remedy="write {name: {action: {…}}}")
        check_statistics(entry.get(ENTRY), form, where)
        if "actions" not in entry:
            action, state_mask = entry.get("action") or {}, (entry.get("proprio") or {}).get("mask")
            action_mask = _action_mask(given, action, action.get("mask"), name)
            found[name] = Normalizer.of(entry, modes, action_mask=action_mask, state_mask=state_mask, where=where)
            continue
        found[name] = Normalizer.from_json(entry, where)
        differing = {kind: mode for kind, mode in found[name].mapping.items() if mode != modes[kind]}
        for kind, mode in differing.items():
            raise ConfigError(
                f"{kind} is normalised by {mode} in the file, and by {modes[kind]} in this recipe or its adapter",
                where=where,
                remedy=f"set model.normalization_mapping: {{{kind}: {mode}}}, as the model was trained",
            )
    if not found:
        raise DataError("the file holds no statistics", where=str(path), remedy="write {name: {action: {…}}}")
    return found


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"the statistics cannot be read: {error}", where=f"{STATISTICS_KEY}: {path}") from error
    if not isinstance(content, Mapping):
        raise DataError("the file holds no statistics", where=f"{STATISTICS_KEY}: {path}")
    return content


def normalizer_of(normalizers: Mapping[str, Normalizer], dataset: str | None) -> Normalizer:
    """The normalizer of a data set; None: the only one.

    Raises:
        ConfigError: none has this name, or there are several and none is named.
    """
    return normalizers[choose_key(normalizers, dataset)]
