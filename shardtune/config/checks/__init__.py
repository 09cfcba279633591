"""Contradictions in a recipe whose values each have the right type, by section."""

from __future__ import annotations

from collections.abc import Collection

from shardtune.config.checks import actions, evaluation, model, optimization, rows, run
from shardtune.config.checks.context import Context
from shardtune.config.layers import Merged
from shardtune.config.schema import Recipe
from shardtune.errors import ConfigError


def check(recipe: Recipe, given: Merged, in_memory: Collection[str]) -> list[ConfigError]:
    """All contradictions within the recipe."""
    context = Context(recipe, given, in_memory)
    rules = (
        run.launcher,
        run.logger,
        rows.required,
        rows.batches,
        rows.length,
        rows.by_file,
        rows.bad_rows,
        rows.ignored_keys,
        rows.evaluation_weights,
        optimization.schedule,
        run.duration,
        evaluation.evaluation,
        evaluation.idle,
        evaluation.harness,
        evaluation.episodes,
        run.saving,
        run.beginning,
        run.watching,
        run.anomalies,
        optimization.losses,
        model.lora,
        model.execution,
        model.fast_parts,
        optimization.optimizer_states,
        optimization.weights_in_bf16,
        actions.actions,
        actions.values,
        rows.pixels,
        rows.augmentation,
    )
    return [problem for rule in rules for problem in rule(context)]
