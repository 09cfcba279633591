"""The settings of actions from a recipe, a model's config and the data; disagreement is an error."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from shardtune.config import ModelConfig, Recipe
from shardtune.config.checks.actions import OF_ACTIONS
from shardtune.config.schema import action_tokens
from shardtune.data.action_statistics import source_statistics, to_json
from shardtune.data.encoder import FrameOptions
from shardtune.data.robot.representation import ENTRY as REPRESENTATION
from shardtune.data.robot.representation import check_statistics
from shardtune.data.sources.resolve import resolve_sources
from shardtune.data.sources.source import Source, usable_rows
from shardtune.errors import ConfigError, DataError
from shardtune.models.action.action_mask import check_range, chosen_mask
from shardtune.models.action.check_length import stored_statistics
from shardtune.models.action.openvla import OpenVLAConfig, openvla_settings
from shardtune.models.action.policy import SETTINGS, ActionSettings, DatasetStatistics
from shardtune.models.action.tokens import action_statistics, choose_key, state_statistics

VALUE_SIZES = (512, 128)
STATISTICS = "actor.model.action_statistics"
_REQUIRED = {"norm_stats", "action_token_len", "token_top"}
"""Keys that the settings of a run have, and a `dataset_statistics.json` has not."""


def settings_for(recipe: Recipe, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> ActionSettings:
    """The settings of actions for a run.

    Args:
        recipe: of the run.
        config: the model's.
        tokenizer: with the tokens that the recipe adds.

    Raises:
        ConfigError: keys that disagree with the model or the statistics.
        DataError: statistics that are missing or cannot be used.
    """
    model = recipe.actor.model
    kept = _kept_settings(model)
    stored = stored_settings(config) if kept is None else kept
    _check_bins(model, config)
    statistics, used = _statistics(recipe, stored) if kept is None else _kept_statistics(recipe, kept)
    unnorm_key = used[0] if len(used) == 1 and not _is_first_of_several(recipe, config, used[0]) else None
    found = action_statistics(statistics, used[0], model.action_token_len)
    for key in used:
        action_statistics(statistics, key, found.dimensions)
    state = model.action_state or (stored.state if stored is not None else "none")
    if state == "text":
        for key in used:
            state_statistics(statistics, key)
    return ActionSettings(
        action_token_len=found.dimensions,
        token_top=_top(model, stored, tokenizer),
        norm_stats=statistics,
        action_chunks_len=model.action_chunks_len,
        num_action_bins=model.num_action_bins,
        unnorm_key=unnorm_key,
        prompt=model.action_prompt or (stored.prompt if stored is not None else None),
        state=state,
        value_sizes=_value_sizes(model, stored),
        cameras=_cameras(recipe, stored) if kept is None else kept.cameras,
    )


def _kept_settings(model: ModelConfig) -> ActionSettings | None:
    """The settings that a run has kept, where `actor.model.action_statistics` names them and not statistics alone."""
    path = None if model.action_statistics is None else Path(model.action_statistics)
    if path is None or not (content := _read(path)).keys() >= _REQUIRED:  # a data set may have the name norm_stats
        return None
    if not isinstance(content["norm_stats"], Mapping):
        raise _no_statistics(path)
    return ActionSettings.from_json(content, where=f"{STATISTICS}: {path}")


def _kept_statistics(recipe: Recipe, kept: ActionSettings) -> tuple[dict[str, DatasetStatistics], list[str]]:
    """As `_statistics`, of settings that a run has kept; the training rows are not read."""
    known, key = dict(kept.norm_stats), recipe.actor.model.unnorm_key or kept.unnorm_key
    used = _trained(known, kept) if key is None else [choose_key(known, key)]
    return _masked(recipe, known, used), used


def _value_sizes(model: ModelConfig, stored: ActionSettings | None) -> tuple[int, ...] | None:
    """The widths of the value head's layers: of the recipe, otherwise as saved with the model; None: it has none."""
    saved = stored.value_sizes if stored is not None else None
    if not model.add_value_head:
        return saved
    given = None if model.value_head.sizes is None else tuple(model.value_head.sizes)
    if given is not None and saved is not None and given != saved:
        raise ConfigError(
            f"actor.model.value_head.sizes is {list(given)}, the model has a value head of {list(saved)}",
            where="actor.model.value_head.sizes",
            remedy="leave it out",
        )
    return next(sizes for sizes in (given, saved, VALUE_SIZES) if sizes is not None)


def acts_on(recipe: Recipe) -> bool:
    """Whether a registered model is trained on robot data: keys of actions are given, and no conversations are named.

    Raises:
        DataError: rows that are neither.
    """
    given = recipe.actor.model.model_dump(exclude_defaults=True)
    if not any(name in given for name in OF_ACTIONS):
        return False
    spec = recipe.data.train_data_paths
    try:
        if spec is not None:
            _sources(recipe, spec)
    except DataError:
        try:
            resolve_sources(spec, recipe.data, report=lambda _: None)
        except DataError:
            pass
        else:
            return False
        raise
    return True


def _check_bins(model: ModelConfig, config: PreTrainedConfig) -> None:
    """Compare `num_action_bins` with the number in the config of a user's own model."""
    own = config.to_dict().get("n_action_bins")
    if isinstance(own, int) and own != model.num_action_bins:
        raise ConfigError(
            f"actor.model.num_action_bins is {model.num_action_bins}, the model's config has n_action_bins = {own}",
            where="actor.model.num_action_bins",
            remedy=f"set it to {own}",
        )


def _is_first_of_several(recipe: Recipe, config: PreTrainedConfig, name: str) -> bool:
    """Whether a data set of an OpenVLA is used for being its first alone: neither a key nor training rows name it."""
    model, raw = recipe.actor.model, config.to_dict()
    if not isinstance(config, OpenVLAConfig) or raw.get(SETTINGS) is not None or len(config.norm_stats or {}) < 2:
        return False
    if model.unnorm_key is not None or model.action_statistics is not None:
        return False
    return name not in _named_by_rows(recipe)


def stored_settings(config: PreTrainedConfig) -> ActionSettings | None:
    """The settings of actions in a model's config; None if it has none."""
    if config.to_dict().get(SETTINGS) is not None:
        return ActionSettings.of(config)
    return openvla_settings(config) if isinstance(config, OpenVLAConfig) else None


def _statistics(recipe: Recipe, stored: ActionSettings | None) -> tuple[dict[str, DatasetStatistics], list[str]]:
    """The statistics of all known data sets, and the names of those that rows use: one for all rows, or each its own.

    Precedence: the file of `actor.model.action_statistics`, statistics beside the weights, computed ones.
    """
    model = recipe.actor.model
    known = dict(stored.norm_stats) if stored is not None else stored_statistics(model.model_path or "")
    if model.action_statistics is not None:
        known |= read_statistics(Path(model.action_statistics))
    unnorm_key = model.unnorm_key
    if unnorm_key is not None and unnorm_key in known:
        return _masked(recipe, known, [unnorm_key]), [unnorm_key]
    if unnorm_key is None and model.action_statistics is not None:
        own = read_statistics(Path(model.action_statistics))
        return _masked(recipe, known, own), list(own)
    computed = _computed(recipe, stored)
    if computed is None:
        assert stored is not None
        chosen = choose_key(known, unnorm_key) if unnorm_key is not None else stored.unnorm_key
        used = [] if chosen is None else [chosen]
        return _masked(recipe, known, used), used or _trained(known, stored)
    together = _masked(recipe, {**computed, **known}, computed)
    return together, list(computed) if unnorm_key is None else [choose_key(together, unnorm_key)]


def _trained(known: Mapping[str, DatasetStatistics], stored: ActionSettings) -> list[str]:
    """The data sets that the model may be trained on: with states if it reads them, and actions as long as its own."""
    able = [key for key in known if stored.state != "text" or "proprio" in known[key]]
    return [key for key in able if action_statistics(known, key).dimensions == stored.action_token_len] or list(known)


def used_by_rows(recipe: Recipe, settings: ActionSettings) -> list[str]:
    """The data sets whose statistics the rows use, of all that the model has: the chosen one, or those of the training
    rows; where there are none to read, all that the model may be trained on."""
    if settings.unnorm_key is not None:
        return [settings.unnorm_key]
    known = settings.norm_stats
    return [name for name in _named_by_rows(recipe) if name in known] or _trained(known, settings)


def _named_by_rows(recipe: Recipe) -> list[str]:
    """The names of the data sets of the training rows; none where there are none to read."""
    spec = recipe.data.train_data_paths
    try:
        return [] if spec is None else [source.name for source in _sources(recipe, spec)]
    except DataError:
        return []


def kept_statistics(recipe: Recipe, settings: ActionSettings) -> list[str]:
    """The data sets whose statistics are those saved with the model, while those of their training rows differ; none
    where the recipe chooses statistics."""
    model, spec = recipe.actor.model, recipe.data.train_data_paths
    if spec is None or model.action_statistics is not None or model.unnorm_key is not None:
        return []
    try:
        computed = source_statistics(
            _sources(recipe, spec), cache_dir=recipe.data.cache_dir, on_bad_row=recipe.data.on_bad_row
        )
    except DataError:
        return []
    pairs = ((name, one.to_json()["action"], settings.norm_stats[name]["action"]) for name, one in computed.items())
    return [name for name, found, used in pairs if any(found[end] != list(used[end]) for end in ("q01", "q99"))]


def _masked(
    recipe: Recipe, statistics: Mapping[str, DatasetStatistics], names: Collection[str]
) -> dict[str, DatasetStatistics]:
    """The statistics with the recipe's mask of actions, if it has one, for some data sets, whose actions have to be
    represented as the recipe's."""
    given, found = recipe.actor.model.action_normalization_mask, dict(statistics)
    form = FrameOptions.of(recipe.actor.model, recipe.actor.model.action_chunks_len).representation
    for name in names:
        check_statistics(found[name].get(REPRESENTATION), form, f"statistics of {name}")
    if given is None:
        return found
    for name in names:
        section = found[name].get("action", {})
        own = action_statistics(found, name).mask.tolist()
        mask = chosen_mask(given, section, own, name)
        check_range(section, mask, name)
        found[name] = {**found[name], "action": {**section, "mask": mask}}
    return found


def _cameras(recipe: Recipe, stored: ActionSettings | None) -> tuple[str, ...] | None:
    """The cameras of the training rows, by the first row of each data set; if none can be read, those of the model."""
    known = stored.cameras if stored is not None else None
    spec = recipe.data.train_data_paths
    if spec is None:
        return known
    try:
        found = {_first_cameras(source) for source in _sources(recipe, spec)}
    except DataError:
        return known
    return found.pop() if len(found) == 1 else None


def _first_cameras(source: Source) -> tuple[str, ...] | None:
    row = next(usable_rows(source), None)
    return None if row is None else tuple(sorted(row["images"]))


def _sources(recipe: Recipe, spec: object) -> list[Source]:
    """The training rows as frames."""
    frames = FrameOptions.of(recipe.actor.model, recipe.actor.model.action_chunks_len)
    return resolve_sources(spec, recipe.data, frames=frames, report=lambda _: None)


def _computed(recipe: Recipe, stored: ActionSettings | None) -> dict[str, DatasetStatistics] | None:
    """The statistics of the training rows; None if there are none to read and the model has statistics.

    Raises:
        DataError: there are none to read, and the model has none.
    """
    data, spec = recipe.data, recipe.data.train_data_paths
    has_own = stored is not None and bool(stored.norm_stats)
    if spec is None:
        if has_own:
            return None
        raise ConfigError(
            "there are no action statistics: no training rows are named, and the model has none",
            where=STATISTICS,
            remedy="name a dataset_statistics.json, or data.train_data_paths",
        )
    try:
        return to_json(source_statistics(_sources(recipe, spec), cache_dir=data.cache_dir, on_bad_row=data.on_bad_row))
    except DataError:
        if has_own:  # faults of the rows are reported where they are read; evaluation does not need them
            return None
        raise


def read_statistics(path: Path) -> dict[str, DatasetStatistics]:
    """A `dataset_statistics.json`.

    Raises:
        DataError: it cannot be read, or has another format.
    """
    content = _read(path)
    if not all(isinstance(entry, Mapping) for entry in content.values()):
        raise _no_statistics(path)
    return dict(content)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"the statistics cannot be read: {error}", where=f"{STATISTICS}: {path}") from error
    if not isinstance(content, Mapping):
        raise _no_statistics(path)
    return content


def _no_statistics(path: Path) -> DataError:
    return DataError(
        "the file holds no action statistics",
        where=f"{STATISTICS}: {path}",
        remedy='write {"name": {"action": {"q01": […], "q99": […], "mask": […]}}}',
    )


def _top(model: ModelConfig, stored: ActionSettings | None, tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the highest id of an action token."""
    count, how = model.num_action_bins, model.action_tokens
    if stored is not None:
        if count != stored.num_action_bins:
            raise ConfigError(
                f"actor.model.num_action_bins is {count}, the model has {stored.num_action_bins} action tokens",
                where="actor.model.num_action_bins",
                remedy=f"set it to {stored.num_action_bins}",
            )
        if how != "auto" and stored.token_top != (own := _own_top(how, count, tokenizer)):
            raise ConfigError(
                f"actor.model.action_tokens: {how} means ids below {own}, the model's end below {stored.token_top}",
                where="actor.model.action_tokens",
                remedy="leave it out",
            )
        return stored.token_top
    return _own_top("last" if how == "auto" else how, count, tokenizer)


def _own_top(how: str, count: int, tokenizer: PreTrainedTokenizerBase) -> int:
    if how == "last":
        return last_ordinary(tokenizer, count)
    vocabulary = tokenizer.get_vocab()
    ids = [vocabulary[token] for token in action_tokens(count)]
    if ids != list(range(ids[0], ids[0] + count)):
        raise ConfigError(
            f"the ids of the tokens <act_0> to <act_{count - 1}> are not consecutive",
            where="actor.tokenizer.tokenizer_model",
            remedy="use a tokenizer that has none of them yet, or all in order",
        )
    return ids[-1] + 1


def last_ordinary(tokenizer: PreTrainedTokenizerBase, count: int) -> int:
    """One more than the highest of the last `count` consecutive ids without an added or special token among them.

    Raises:
        ConfigError: there are not so many.
    """
    taken = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    ordinary = set(tokenizer.get_vocab().values()) - taken
    length = 0
    for number in range(max(ordinary, default=-1), -1, -1):
        length = length + 1 if number in ordinary else 0
        if length == count:
            return number + count
    raise ConfigError(
        f"the vocabulary has no {count} ordinary tokens in a row for the values of actions",
        where="actor.model.action_tokens",
        remedy="set it to appended, or use fewer actor.model.num_action_bins",
    )
