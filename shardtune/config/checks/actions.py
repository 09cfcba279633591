"""Contradictions among the keys of action models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardtune.config.checks.context import Context
from shardtune.config.model_names import BUILT_IN, POLICIES
from shardtune.config.schema import DataConfig, DataEntry, Recipe
from shardtune.errors import ConfigError

OF_ACTION_TOKENS = ("action_token_len", "num_action_bins", "action_tokens", "action_prompt", "action_state")
"""Keys that only models of action tokens read."""


OF_STATISTICS = ("unnorm_key", "action_statistics", "action_normalization_mask")
"""Keys of how actions are normalised."""


OF_POLICIES = (*OF_STATISTICS, "action_representation", "action_representation_mask")
"""Keys of actions that ready policies read, too."""


OF_ACTIONS = ("action_chunks_len", *OF_ACTION_TOKENS, *OF_POLICIES)
"""Keys that only action models read; a registered model may read any."""


def actions(context: Context) -> Iterator[ConfigError]:
    model = context.recipe.actor.model
    own = model.adapter is None and context.recipe.actor.worker is None
    built = context.recipe.actor.worker is None and (model.adapter is not None or model.model_type in BUILT_IN)
    if built and not model.low_cpu_mem_usage:
        key = "actor.model.low_cpu_mem_usage"
        kind = f"model_type: {model.model_type}" if model.adapter is None else "an adapter"
        yield context.problem(
            key,
            f"{key}: false has no effect with {kind}, which is always built on the meta device",
            "leave it out; a registered function may pass it on",
        )
    if model.action_representation_mask is not None and model.action_representation == "absolute":
        key = "actor.model.action_representation_mask"
        yield context.problem(
            key,
            f"{key} has no effect with action_representation: absolute, which converts nothing",
            "leave it out, or set action_representation: relative or delta",
        )
    policy = own and model.model_type in POLICIES
    acts = model.model_type == "vision_language_action" or model.model_type not in BUILT_IN
    given = model.model_dump(exclude_defaults=True)
    if (
        model.normalization_mapping is not None
        and model.adapter is None
        and model.model_type in BUILT_IN
        and model.model_type not in POLICIES
    ):
        key = "actor.model.normalization_mapping"
        yield context.problem(
            key,
            f"{key} has no effect with model_type: {model.model_type}: it is for adapters with a self.normalizer",
            "leave it out; action tokens are made of values between the quantiles 0.01 and 0.99",
        )
    for name in (name for name in OF_ACTIONS if name in given and own and not acts):
        if policy and name in OF_POLICIES:
            continue
        if policy:
            yield context.problem(
                f"actor.model.{name}",
                f"actor.model.{name} has no effect with model_type: {model.model_type}, whose actions are numbers",
                "leave it out; the chunk is set by actor.model.options (chunk_size or horizon, n_action_steps)",
            )
            continue
        yield context.problem(
            f"actor.model.{name}",
            f"actor.model.{name} has no effect with model_type: {model.model_type}, which has no actions",
            "set model_type: vision_language_action, or leave it out",
        )


def values(context: Context) -> Iterator[ConfigError]:
    """Keys of the value head, and columns that only it reads."""
    model = context.recipe.actor.model
    own = model.adapter is None and context.recipe.actor.worker is None
    if not model.add_value_head:
        yield from context.idle(
            "actor.model.value_head",
            model.value_head.model_dump(exclude_defaults=True),
            "with actor.model.add_value_head: false",
            "set it to true, or leave the section out",
        )
    elif own and model.model_type in BUILT_IN and model.model_type != "vision_language_action":
        key = "actor.model.add_value_head"
        why = "whose directories are LeRobot's" if model.model_type in POLICIES else "which does not act"
        yield context.problem(
            key,
            f"{key}: true does not work with model_type: {model.model_type}, {why}",
            "use vision_language_action, or an adapter of your own with shardtune.ValueHead (docs/actions.md)",
        )
        return
    if own and model.model_type in ("vision_language_action", *POLICIES):
        yield from idle_columns(context.recipe)


def idle_columns(recipe: Recipe) -> Iterator[ConfigError]:
    """Columns of robot data that no value head reads: of returns where they are computed, of rewards otherwise."""
    model = recipe.actor.model
    role = None if not model.add_value_head else "return" if model.value_head.discount is None else "reward"
    for name in ("return", "reward"):
        if name == role or not any(name in columns for columns in _column_names(recipe.data)):
            continue
        what = "without actor.model.add_value_head"
        if role is not None:
            what = f"{'with' if role == 'reward' else 'without'} actor.model.value_head.discount"
        yield ConfigError(
            f"data.columns.{name} has no effect {what}",
            where=recipe.where("data.columns"),
            remedy="leave it out" if role is None else f"name the column of {role}s, or change the discount",
        )


def _column_names(data: DataConfig) -> Iterator[Mapping[str, str]]:
    """`data.columns`, and those of each entry of a source."""
    yield data.columns
    waiting: list[object] = [data.train_data_paths, data.eval_data_paths]
    while waiting:
        item = waiting.pop()
        if isinstance(item, DataEntry):
            yield item.columns
        elif isinstance(item, list | dict):
            waiting += item if isinstance(item, list) else item.values()
