"""The overrides of an evaluation that have no effect on it, and those by which it is on rows of the training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from shardtune.config import Recipe
from shardtune.config.checks.context import enumerated
from shardtune.config.checks.evaluation import ANSWERS, EPISODES
from shardtune.config.overrides import set_keys
from shardtune.config.schema import short_key

ALLOWED = "runner.allow_changes"
"""It may allow another base, or frozen weights that have changed."""
OF_TRAINING = (
    *("actor.optim", "actor.global_batch_size", "actor.global_batch_tokens", "actor.neftune_alpha"),
    *("actor.model.gradient_checkpointing", "data.audit", "data.shuffle", "runner.max_epochs", "runner.max_steps"),
    *("runner.eval_interval", "runner.save_interval", "runner.eval_before_training", "runner.resume_dir"),
    *(ALLOWED, "runner.overwrite", "runner.keep_last", "runner.keep_every", "runner.async_save"),
    *("runner.final_dtype", "runner.profile_steps", "runner.early_stop", "runner.best", "runner.callbacks"),
    *("runner.push_to_hub", "runner.on_nonfinite", "runner.on_spike", "runner.spike", "runner.max_anomalies"),
    *("runner.anomaly_window", "runner.max_restarts", "runner.min_ranks"),
)
"""Keys and sections that only a training uses."""
OF_AVERAGE = ("actor.optim.ema_decay", "actor.optim.ema_use")
"""Those of `OF_TRAINING` that choose the weights which are evaluated."""
TRAIN, SPLIT = "data.train_data_paths", "data.eval_split"


def notes_on_overrides(
    recipe: Recipe, overrides: Sequence[str], run: Recipe | None = None, directory: Path | None = None
) -> Iterator[str]:
    """What overrides do not do, or not as it seems.

    Args:
        recipe: what is evaluated, with the overrides.
        overrides: `key=value`.
        run: the recipe of the run that is evaluated, without them; None: there is no run.
        directory: of the run.
    """
    yield from idle_overrides(recipe, overrides)
    if run is not None and directory is not None:
        yield from trained_rows(run, recipe, directory)


def idle_overrides(recipe: Recipe, overrides: Sequence[str]) -> Iterator[str]:
    """A sentence for each kind of overrides that an evaluation does not use.

    There is none where a worker of the user's may read any key.

    Args:
        recipe: what is evaluated, with the overrides.
        overrides: `key=value`.
    """
    if recipe.actor.worker is not None:
        return
    given = set_keys(overrides)
    config, model = recipe.eval, recipe.actor.model
    used = (*OF_AVERAGE, *((ALLOWED,) if recipe.runner.allows("actor.model.model_path") else ()))
    of_training = [key for key in given if _is_below(key, OF_TRAINING) and key not in used]
    if model.adapter is None and model.model_type in ("causal_lm", "vision_language") and not recipe.data.eval_split:
        of_training += [key for key in given if _is_below(key, (TRAIN,))]
    written = model.adapter is not None or config.generate
    idle = {
        "in an evaluation, which trains nothing": of_training,
        "without eval.generate": [] if written else [key for key in given if _is_below(key, _of_eval(ANSWERS))],
        "without eval.environment": []
        if config.environment is not None
        else [key for key in given if _is_below(key, _of_eval(EPISODES))],
    }
    for why, keys in idle.items():
        if keys:
            names = enumerated([short_key(key) for key in keys])
            yield f"{names} {'has' if len(keys) == 1 else 'have'} no effect {why}"


def trained_rows(run: Recipe, recipe: Recipe, directory: Path) -> Iterator[str]:
    """A sentence if the rows that are held out now were not, or not all of them, when the run was trained.

    Args:
        run: its recipe.
        recipe: the same with overrides.
        directory: of the run.
    """
    before, now = run.data.eval_split, recipe.data.eval_split
    if now <= before or run.data.train_data_paths != recipe.data.train_data_paths:
        return
    kept = f"only {before:g} of its rows" if before else "none of its rows"
    yield (
        f"data.eval_split={now:g}: {directory} held out {kept} when it was trained, so that it is evaluated on rows "
        "that it was trained on; for others give data.eval_data_paths"
    )


def _of_eval(names: Sequence[str]) -> list[str]:
    return [f"eval.{name}" for name in names]


def _is_below(key: str, names: Sequence[str]) -> bool:
    """Whether a key is one of these, or in one of these sections."""
    return any(key == name or key.startswith(f"{name}.") for name in names)
