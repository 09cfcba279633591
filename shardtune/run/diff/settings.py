"""How the recipes of two runs differ, and what of training each key can change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardtune.config import Recipe
from shardtune.config.schema import short_key
from shardtune.config.shown import as_written
from shardtune.config.tree import get_value
from shardtune.run.directory import FROM_ENVIRONMENT
from shardtune.run.resume_check import is_free
from shardtune.run.stored_run import StoredRun

Effect = Literal["rows", "tokens", "loss", "update", "length", "rounding", "evaluation", "result"]
"""What a difference can change.

rows: which rows a step holds. tokens: what a row is to the model. loss: the loss of given rows from the first step on.
update: what a step changes, so the losses after it. length: how many steps there are. rounding: the last digits.
evaluation: evaluations alone. result: `final/` alone.
"""
ANY: tuple[Effect, ...] = ("rows", "tokens", "loss", "update")
PLACE = ("runner.logger.experiment_name", "runner.logger.log_path")
"""Keys that differ between any two runs."""
EFFECTS: Mapping[str, tuple[Effect, ...]] = {
    "plugins": ANY,
    "runner.seed": ("rows", "loss"),
    "runner.max_epochs": ("update", "length"),
    "runner.max_steps": ("update", "length"),
    "runner.early_stop": ("length",),
    "runner.best": (),
    "runner.eval_interval": ("evaluation",),
    "runner.eval_before_training": ("evaluation",),
    "runner.final_dtype": ("result",),
    "runner.resume_dir": ("loss", "update"),
    "runner.on_nonfinite": ("rows", "update"),
    "runner.on_spike": ("rows", "update"),
    "runner.max_anomalies": ("length",),
    "runner.anomaly_window": ("length",),
    "runner.spike": ("rows", "update"),
    "runner.deterministic": ("rounding",),
    "runner.device": ("rounding",),
    "runner.nproc_per_node": ("rounding",),
    "runner.num_ranks": ("rounding",),
    "runner.task_type": (),
    "actor.training_backend": ("rounding",),
    "actor.micro_batch_size": ("rounding",),
    "actor.max_tokens_per_micro_batch": ("rounding",),
    "actor.fill_micro_batches": ("rounding",),
    "actor.eval_micro_batch_size": ("evaluation",),
    "actor.global_batch_size": ("rows", "length"),
    "actor.global_batch_tokens": ("rows", "length"),
    "actor.loss": ("loss",),
    "actor.label_smoothing": ("loss",),
    "actor.z_loss": ("loss",),
    "actor.neftune_alpha": ("loss",),
    "actor.teacher": ("loss",),
    "actor.worker": ANY,
    "actor.model": ("loss",),
    "actor.model.options": ANY,
    "actor.model.gradient_checkpointing": ("rounding",),
    "actor.model.attn_implementation": ("rounding",),
    "actor.model.compile": ("rounding",),
    "actor.model.kernels": ("rounding",),
    "actor.model.fp8": ("rounding",),
    "actor.model.low_cpu_mem_usage": (),
    "actor.tokenizer": ("tokens", "loss"),
    "actor.optim": ("update",),
    "actor.parallel": ("rounding",),
    "actor.fsdp_config": ("rounding",),
    "data": ("tokens",),
    "data.train_data_paths": ("rows",),
    "data.eval_data_paths": ("evaluation",),
    "data.eval_split": ("rows", "evaluation"),
    "data.shuffle": ("rows",),
    "data.quarantine": ("rows",),
    "data.columns": ("rows", "tokens"),
    "data.transform": ("rows", "tokens"),
    "data.max_length": ("rows", "tokens"),
    "data.on_too_long": ("rows", "tokens"),
    "data.on_bad_row": ("rows",),
    "data.max_bad_rows": (),
    "data.audit": (),
    "data.num_workers": (),
    "data.cache_dir": (),
    "data.image_hosts": (),
    "data.keep_pixels": (),
    "data.augmentation": ("loss",),
    "eval": ("evaluation",),
}
"""By key or section; the longest name that fits counts."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that differs between two runs.

    Attributes:
        section: recipe, versions, code, data, model, numbers, layout or history.
        name: a key in the short form, a file, a package.
        first: the value of the first run, as text.
        second: of the second.
        effects: what it can change; empty: no number.
    """

    section: str
    name: str
    first: str
    second: str
    effects: tuple[Effect, ...] = ()

    def can(self, *effects: Effect) -> bool:
        """Whether it can change any of these."""
        return any(effect in self.effects for effect in effects)


def effects_of(key: str) -> tuple[Effect, ...]:
    """What a key of the recipe, in its long form, can change."""
    named = [name for name in EFFECTS if f"{key}.".startswith(f"{name}.")]
    if not named:
        return () if is_free(key) else ANY
    return EFFECTS[max(named, key=len)]


def changed_settings(first: StoredRun, second: StoredRun, same_content: set[str]) -> list[Difference]:
    """The keys that differ, in the short form; values from the environment as the stored recipe has them.

    Args:
        first: a run.
        second: another.
        same_content: keys that name files of the same content: another place of them changes nothing.
    """
    defaults, found = Recipe().to_dict(), []  # of keys that the version of a run did not have
    for key in dict.fromkeys([*first.settings, *second.settings]):
        was, now = (run.settings.get(key, get_value(defaults, key)) for run in (first, second))
        if was == now or key in PLACE:
            continue
        moved = any(f"{key}.".startswith(f"{name}.") for name in same_content) and _names_alike(was, now)
        effects = () if moved else effects_of(key)
        found.append(Difference("recipe", short_key(key), as_written(was), as_written(now), effects))
    return [*found, *_from_environment(first, second)]


def _names_alike(was: object, now: object) -> bool:
    """Whether two values differ at most in the paths that they hold."""
    if isinstance(was, list) and isinstance(now, list):
        return len(was) == len(now) and all(_names_alike(old, new) for old, new in zip(was, now, strict=True))
    if isinstance(was, dict) and isinstance(now, dict):
        return was.keys() == now.keys() and all(_names_alike(was[key], now[key]) for key in was)
    return was == now or (isinstance(was, str) and isinstance(now, str))


def _from_environment(first: StoredRun, second: StoredRun) -> list[Difference]:
    """Keys that both take from the same variable, whose values differed or cannot be compared any more."""
    one, other = (run.manifest.get(FROM_ENVIRONMENT, {}) for run in (first, second))
    found = []
    for key in one.keys() & other.keys():
        if get_value(first.tree, key) != get_value(second.tree, key):
            continue  # the references differ, which is said already
        known = [run.is_unchanged(key) for run in (first, second)]
        if known == [True, True]:
            continue
        states = ["today's value" if is_todays else "another value" for is_todays in known]
        if known == [False, False]:
            states = ["a value that is not recorded"] * 2
        name = f"{short_key(key)} = {as_written(get_value(first.tree, key))}"
        found.append(Difference("recipe", name, *states, effects=effects_of(key)))
    return found
