"""Contradictions among the keys of the run: its launcher, length, loggers, what is watched and what is answered to."""

from __future__ import annotations

import os
from collections.abc import Iterator

from shardtune.config.checks.context import Context
from shardtune.config.rank_layout import Layout
from shardtune.config.schema import Recipe
from shardtune.errors import ConfigError, ParallelError


def launcher(context: Context) -> Iterator[ConfigError]:
    runner = context.recipe.runner
    by_ray = runner.launcher == "ray"
    if by_ray and runner.num_ranks is None:
        yield context.problem(
            "runner.launcher", "runner.launcher: ray needs the number of ranks", "set runner.num_ranks"
        )
    if by_ray and runner.nproc_per_node != 1:
        yield context.problem(
            "runner.nproc_per_node",
            f"runner.nproc_per_node ({runner.nproc_per_node}) has no effect with runner.launcher: ray",
            "leave it out; runner.num_ranks is the number of ranks, runner.ray.placement their placement",
        )
    for_ray = {"num_ranks": runner.num_ranks} if runner.num_ranks is not None else {}
    for_ray |= {f"ray.{name}": value for name, value in runner.ray.model_dump(exclude_defaults=True).items()}
    yield from context.idle(
        "runner",
        {} if by_ray else for_ray,
        "with runner.launcher: local",
        "set runner.launcher: ray, or leave it out; runner.nproc_per_node is the number of ranks on this machine",
    )
    if runner.max_restarts and not by_ray and runner.nproc_per_node == 1:
        yield context.problem(
            "runner.max_restarts",
            f"runner.max_restarts ({runner.max_restarts}) has no effect on a single process",
            "set runner.nproc_per_node or runner.launcher: ray; under torchrun use its own --max-restarts",
        )
    fewest = runner.min_ranks
    if fewest is not None and not runner.max_restarts:
        yield context.problem(
            "runner.min_ranks",
            f"runner.min_ranks ({fewest}) has no effect with runner.max_restarts: 0",
            "set runner.max_restarts, or leave it out",
        )
    elif fewest is not None and fewest > runner.workers:
        yield context.problem(
            "runner.min_ranks",
            f"runner.min_ranks ({fewest}) is more than the {runner.workers} ranks that are started",
            "lower it",
        )


def logger(context: Context) -> Iterator[ConfigError]:
    runner, logger = context.recipe.runner, context.recipe.runner.logger
    serves = "prometheus" in logger.logger_backends
    yield from context.idle(
        "runner.logger.prometheus",
        {} if serves else logger.prometheus.model_dump(exclude_defaults=True),
        "without prometheus in runner.logger.logger_backends",
        "add it there, or leave the key out",
    )
    if logger.rank_logs and (runner.launcher == "ray" or runner.nproc_per_node == 1):
        one = "with runner.launcher: ray" if runner.launcher == "ray" else "on a single process"
        yield context.problem(
            "runner.logger.rank_logs",
            f"runner.logger.rank_logs has no effect {one}",
            "leave it out: Ray keeps its workers' logs itself, torchrun with --log-dir and --tee, and the output of a "
            "single process can be redirected",
        )


def check_ranks(recipe: Recipe) -> list[ConfigError]:
    """What does not fit the number of ranks."""
    ranks = int(os.environ.get("WORLD_SIZE", recipe.runner.workers))
    try:
        Layout.of(recipe.actor, ranks)
    except ParallelError as error:
        key = error.where or ""
        return [ConfigError(error.what, where=recipe.where(key) or key, remedy=error.remedy)]
    return []


def duration(context: Context) -> Iterator[ConfigError]:
    runner = context.recipe.runner
    if runner.max_epochs == -1 and runner.max_steps == -1:
        yield context.problem(
            "runner.max_epochs",
            "runner.max_epochs and runner.max_steps are both -1: training would not end",
            "limit one of them",
        )


def saving(context: Context) -> Iterator[ConfigError]:
    runner = context.recipe.runner
    every, interval = runner.keep_every, runner.save_interval
    if every is None or not isinstance(interval, int) or runner.callbacks:  # a callback may request a checkpoint
        return
    if interval < 1:
        yield context.problem(
            "runner.keep_every",
            f"runner.keep_every ({every}) has no effect with runner.save_interval: {interval}: only the end is saved",
            "give runner.save_interval, or leave it out",
        )
    elif every % interval:
        yield context.problem(
            "runner.keep_every",
            f"runner.keep_every ({every}) is no multiple of runner.save_interval ({interval}), so most of these steps "
            "have no checkpoint",
            f"make it a multiple of {interval}",
        )


def beginning(context: Context) -> Iterator[ConfigError]:
    runner = context.recipe.runner
    if runner.overwrite and runner.resume_dir not in (None, "auto"):
        yield context.problem(
            "runner.resume_dir",
            f"runner.resume_dir ({runner.resume_dir}) continues from a checkpoint, and runner.overwrite: true begins "
            "anew",
            "leave one of them out; from a checkpoint of another run: another runner.logger.experiment_name",
        )


def watching(context: Context) -> Iterator[ConfigError]:
    runner = context.recipe.runner
    early_stop = runner.early_stop
    # With `enabled: false` written, its settings are kept for another time.
    is_chosen = early_stop.enabled or context.given.given("runner.early_stop.enabled") is not None
    yield from context.idle(
        "runner.early_stop",
        {} if is_chosen else early_stop.model_dump(exclude_defaults=True),
        "without runner.early_stop.enabled",
        "set runner.early_stop.enabled: true, or false to keep them for another time",
    )
    if runner.early_stop.enabled and runner.eval_interval == -1 and context.evaluates:
        yield context.problem(
            "runner.early_stop.enabled",
            "runner.early_stop.enabled needs evaluations during training, and runner.eval_interval is -1",
            'give runner.eval_interval a number of steps or "epoch"',
        )


def anomalies(context: Context) -> Iterator[ConfigError]:
    runner = context.recipe.runner
    yield from context.idle(
        "runner.spike",
        {} if runner.on_spike is not None else runner.spike.model_dump(exclude_defaults=True),
        "without runner.on_spike",
        "set runner.on_spike: stop, skip or rollback, or leave the section out",
    )
    if runner.spike.warmup_steps > runner.spike.window:
        yield context.problem(
            "runner.spike.window",
            f"runner.spike.window ({runner.spike.window}) is less than runner.spike.warmup_steps "
            f"({runner.spike.warmup_steps}), so there would never be enough steps",
            "raise it, or lower runner.spike.warmup_steps",
        )
    only_stops = runner.on_nonfinite == "stop" and runner.on_spike in (None, "stop")
    if runner.max_anomalies is not None and only_stops:
        yield context.problem(
            "runner.max_anomalies",
            f"runner.max_anomalies ({runner.max_anomalies}) has no effect where the first one ends the run",
            "leave it out, or set runner.on_nonfinite or runner.on_spike to skip or rollback",
        )
    changed = runner.anomaly_window != type(runner).model_fields["anomaly_window"].default
    if changed and (runner.anomaly_budget is None or only_stops):
        yield context.problem(
            "runner.anomaly_window",
            f"runner.anomaly_window ({runner.anomaly_window}) has no effect without runner.max_anomalies",
            "give it, or leave the key out",
        )
