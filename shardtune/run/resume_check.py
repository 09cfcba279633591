"""What may differ between a run and its continuation: speed and location may, numerics and data may not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardtune.checkpoint.training_state import read_training_state
from shardtune.config import Recipe, flatten
from shardtune.config.environment import is_value
from shardtune.config.schema import RunnerConfig, present_key
from shardtune.config.shown import as_written
from shardtune.config.tree import get_value
from shardtune.data.cache.entry import ENCODED
from shardtune.errors import CheckpointError
from shardtune.models.find_adapter import adapter_class
from shardtune.models.options import KEY, read_options
from shardtune.training.worker.task import Task

FREE = (
    "runner.resume_dir",
    "runner.allow_changes",
    "runner.overwrite",
    "runner.eval_interval",
    "runner.save_interval",
    "runner.eval_before_training",
    "runner.keep_last",
    "runner.keep_every",
    "runner.async_save",
    "runner.profile_steps",
    "runner.callbacks",
    "runner.push_to_hub",
    "runner.device",
    "runner.nproc_per_node",
    "runner.num_ranks",
    "runner.launcher",
    "runner.master_port",
    "runner.max_restarts",
    "runner.min_ranks",
    "runner.lost_after",
    "runner.watchdog_seconds",
    "runner.collective_timeout",
    "runner.ray",
    "runner.logger",
    "actor.training_backend",
    "actor.micro_batch_size",
    "actor.max_tokens_per_micro_batch",
    "actor.fill_micro_batches",
    "actor.eval_micro_batch_size",
    "actor.model.gradient_checkpointing",
    "actor.parallel",
    "actor.fsdp_config",
    "data.audit",
    "data.num_workers",
    "data.cache_dir",
    "data.cache_limit",
    "eval.episodes_at_once",
    "eval.videos",
    "eval.video_format",
)
"""Keys that affect location, speed or logging of a run, but not its numerics."""
HELD_BITS = {"pure_bf16": 16, "bf16": 32, "fp16": 32, "fp32": 32, "fp64": 64}
"""Of a weight in checkpoints, by precision."""
LEFT_OUT = "left_out"
LARGER = ("runner.max_epochs", "runner.max_steps")
"""Keys that may grow: the run is extended."""
FIRST_WEIGHTS = (
    "actor.model.model_path",
    "actor.model.from_scratch",
    "actor.model.lora.init",
    "actor.model.lora.load_from",
)
"""Keys that choose the first values of trained weights, which a continued run has from its checkpoint."""
ALLOWED = "allowed by runner.allow_changes"
TRAINED = (
    "actor.model.is_lora",
    "actor.model.lora.r",
    "actor.model.lora.rank_pattern",
    "actor.model.lora.target_modules",
    "actor.model.lora.target_parameters",
    "actor.model.lora.exclude_modules",
    "actor.model.lora.layers_to_transform",
    "actor.model.lora.layers_pattern",
    "actor.model.lora.use_dora",
    "actor.model.lora.modules_to_save",
    "actor.model.freeze",
    "actor.optim.state_dtype",
)
"""Keys that choose which weights and states a checkpoint holds, and in which shapes."""
ORDERING = ("runner.seed", "data.shuffle", "data.train_data_paths")
"""Keys that choose the order of an epoch's rows, in which the position is a number of rows."""
REORDERED = "in an epoch that has begun some rows come twice and others not at all"


def is_free(key: str) -> bool:
    """Whether a key, or the section it is in, affects no numerics."""
    return any(key == free or key.startswith(free + ".") for free in FREE)


def has_grown(key: str, old: Recipe, new: Recipe) -> bool:
    """Whether a limit of the run's length was raised."""
    before, now = flatten(old.to_dict())[key], flatten(new.to_dict())[key]
    return before > 0 and (now > before or now == -1)


def goes_on(old: Recipe, new: Recipe) -> bool:
    """Whether a finished run has steps to come: a limit of its length was raised, or early stopping changed."""
    return any(has_grown(key, old, new) for key in LARGER) or old.runner.early_stop != new.runner.early_stop


def _check_precision(old: Recipe, recipe: Recipe, run_dir: Path) -> None:
    """Refuse a precision that does not hold the weights of the checkpoints, whatever changes are allowed."""
    was, is_now = old.actor.model.precision, recipe.actor.model.precision
    if HELD_BITS[is_now] < HELD_BITS[was]:
        raise CheckpointError(
            f"actor.model.precision: {was} -> {is_now}: the run's checkpoints hold weights of {HELD_BITS[was]} bits, "
            f"and {is_now} keeps {HELD_BITS[is_now]}",
            where=str(run_dir),
            remedy="choose another runner.logger.experiment_name and begin with the weights of this run "
            "(actor.model.model_path: its final/, or an export of a checkpoint), or start over with "
            "runner.overwrite=true",
        )


def check_changes(
    old: Recipe, recipe: Recipe, run_dir: Path, from_environment: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Refuse changes that would make it a different run; returns notes on the permitted ones.

    Args:
        old: the recipe of the run that is continued.
        recipe: the current one.
        run_dir: of the run, for the message.
        from_environment: key -> hash of the value that the run took from an environment variable.

    Raises:
        CheckpointError: there are such changes.
        ConfigError: one of them is an option that the adapter does not have.
    """
    before, now = flatten(old.to_dict()), flatten(recipe.to_dict())
    for name, digest in (from_environment or {}).items():  # the old recipe has a reference, and today's value
        key = present_key(name)
        same = is_value(digest, get_value(recipe.to_dict(), key))
        inside = [name for name in before.keys() | now.keys() if f"{name}.".startswith(f"{key}.")]
        for one in inside:
            before.pop(one, None)
            now.pop(one, None)
        if not same:
            before[key], now[key] = f"what {old.references.get(key)} was", str(recipe.references.get(key, "a value"))
    _drop_emptied(before, now)
    refused, notes = [], []
    _check_precision(old, recipe, run_dir)
    for key in sorted(before.keys() | now.keys()):
        was, is_now = before.get(key), now.get(key)
        if was == is_now or is_free(key):
            continue
        if has_moved(was, is_now):
            notes.append(f"{key}: moved to {as_written(is_now)}")
        elif key in LARGER and has_grown(key, old, recipe):
            notes.append(f"{key}: {as_written(was)} -> {as_written(is_now)}; the schedule's horizon moves with it")
        elif recipe.runner.allows(key):
            kept = "; trained weights are those of the checkpoint" if key in FIRST_WEIGHTS else ""
            kept = f"; {REORDERED}" if key in ORDERING else kept
            notes.append(f"{key}: {as_written(was)} -> {as_written(is_now)} ({ALLOWED}{kept})")
        else:
            refused.append(f"{key}: {as_written(was)} -> {as_written(is_now)}")
    if refused:
        if any(key.startswith(KEY) for key in refused) and (kind := adapter_class(recipe.actor.model)) is not None:
            read_options(kind.Options, recipe)  # a misspelt one is no change
        raise CheckpointError(
            "the recipe is not the one this run was made with:\n    " + "\n    ".join(refused),
            where=str(run_dir),
            remedy=_remedy([line.split(":")[0] for line in refused], recipe.runner),
        )
    return tuple(notes)


def _remedy(keys: Sequence[str], runner: RunnerConfig) -> str:
    """What to do about changes that are not allowed yet."""
    others = [key for key in keys if key not in TRAINED]
    if trained := [key for key in keys if key in TRAINED]:
        return (
            f"put {', '.join(trained)} back, as the checkpoints hold what was trained with it"
            + (f", and allow the rest with {runner.allowing(*others)}" if others else "")
            + "; or choose another runner.logger.experiment_name, which may begin with the weights of this run "
            "(actor.model.model_path: its final/, or an export of a checkpoint), or start over with "
            "runner.overwrite=true"
        )
    return (
        f"choose another runner.logger.experiment_name, or continue all the same with {runner.allowing(*others)}, or "
        "start over with runner.overwrite=true"
    )


def _drop_emptied(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Take an empty mapping out of the keys of one recipe where the other has keys in it, which are compared."""
    for one, other in ((before, now), (now, before)):
        emptied = [
            key for key, value in one.items() if value == {} and any(name.startswith(f"{key}.") for name in other)
        ]
        for key in emptied:
            del one[key]


def has_moved(was: object, now: object) -> bool:
    """Whether a value differs only in paths that no longer exist, because the project was moved.

    The files are compared by content: data, template and tokenizer in `check_same_data`; the weights come from the
    checkpoint.
    """
    if isinstance(was, list) and isinstance(now, list):
        pairs = zip(was, now, strict=False)
        return len(was) == len(now) and all(old == new or has_moved(old, new) for old, new in pairs)
    if isinstance(was, dict) and isinstance(now, dict):
        return was.keys() == now.keys() and all(was[key] == now[key] or has_moved(was[key], now[key]) for key in was)
    if not isinstance(was, str) or not isinstance(now, str):
        return False
    old, new = Path(was.partition(":")[0]), Path(now.partition(":")[0])
    same_name = old.name == new.name and was.partition(":")[2] == now.partition(":")[2]
    return old.is_absolute() and new.is_absolute() and same_name and not old.exists() and new.exists()


def check_same_data(checkpoint: Path, task: Task, runner: RunnerConfig) -> list[str]:
    """Refuse to continue on data that differs from what a checkpoint was trained on; returns notes where it may.

    Args:
        checkpoint: its state holds the hashes of its data files.
        task: has the current hashes, and takes over what the checkpoint holds of files that are the same.
        runner: the changes that are allowed.
    """
    before = read_training_state(checkpoint)["data_files"]
    task.recall_files(before)
    files = task.data_files()
    changed = data_changes(before, files)
    if not changed:
        return []
    key = "data.train_data_paths" if data_changes(_without(before), _without(files)) else "data.quarantine"
    if runner.allows("data.train_data_paths") or runner.allows(key):
        reordered = "" if key == "data.quarantine" else f"; {REORDERED}"
        shown = [*changed[:4], *([f"and {len(changed) - 4} more files"] if len(changed) > 4 else [])]
        return [f"{each} ({ALLOWED}{reordered})" for each in shown]
    raise CheckpointError(
        "the training data is not what this run was trained on so far:\n    " + "\n    ".join(changed),
        where=str(checkpoint),
        remedy=(
            "put the data back, choose another runner.logger.experiment_name, or go on all the same with "
            f"{runner.allowing(key)}"
        ),
    )


def _without(files: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """The files, whatever is left out of them."""
    return [{name: value for name, value in file.items() if name != LEFT_OUT} for file in files]


def data_changes(before: Sequence[Mapping[str, object]], files: Sequence[Mapping[str, object]]) -> list[str]:
    """How the files of the training rows differ from what they were, a line each; empty where they do not.

    Args:
        before: recorded; empty in older checkpoints, which cannot be compared.
        files: the current ones.
    """
    if not before:
        return []
    if len(before) == len(files) and all(_same(was, now) for was, now in zip(before, files, strict=True)):
        return []
    old = {entry["file"]: entry for entry in before}
    new = {entry["file"]: entry for entry in files}
    both = {file: (entry, new[file]) for file, entry in old.items() if file in new}
    changed = [f"{file}: {_how(was, now)}" for file, (was, now) in both.items() if not _same(was, now)]
    changed += [f"{file}: gone" for file in old if file not in new]
    changed += [f"{file}: new" for file in new if file not in old]
    return changed or ["reordered"]


def _same(was: Mapping[str, object], now: Mapping[str, object]) -> bool:
    """Whether a file is what it was; one with a size has rows and a key only if it has been read."""
    if _encoded_otherwise(was, now):
        return False
    pairs = [(was.get(name), now.get(name)) for name in ("size", "rows", "key")]
    if "size" in was or "size" in now:
        pairs = [pair for pair in pairs if None not in pair]
    return all(one == other for one, other in pairs) and was.get(LEFT_OUT) == now.get(LEFT_OUT)


def _encoded_otherwise(was: Mapping[str, object], now: Mapping[str, object]) -> bool:
    """Whether the same file has other encoded rows than then, by checksums that both records have."""
    before, after = was.get(ENCODED), now.get(ENCODED)
    return was.get("key") == now.get("key") and None not in (before, after) and before != after


def _how(was: Mapping[str, object], now: Mapping[str, object]) -> str:
    """How a file differs; its key hashes the content and, for encoded rows, everything the encoding depends on."""
    if _encoded_otherwise(was, now):
        return (
            "the same rows, of which encode of the adapter makes other numbers than then: it draws, or reads something "
            "that has changed; with the cache of that time (data.cache_dir) they are the same"
        )
    sizes = was.get("size"), now.get("size")
    if None not in sizes and sizes[0] != sizes[1]:
        return f"{sizes[0]:,} bytes -> {sizes[1]:,} bytes"
    if was["key"] == now["key"] and was.get(LEFT_OUT) != now.get(LEFT_OUT):
        return f"data.quarantine: {_left_out(was)} -> {_left_out(now)}"
    encoded = "encoded otherwise (tokenizer, template, max_length, the adapter's code and options)"
    contents = was.get("content"), now.get("content")
    if None not in contents:
        return encoded if contents[0] == contents[1] else "other content"
    if was["rows"] is None or now["rows"] is None:
        return "other content"
    return f"{was['rows']:,} rows -> {now['rows']:,} rows, other content, or {encoded}"


def _left_out(file: Mapping[str, object]) -> str:
    """How many rows of a file are left out."""
    found = file.get(LEFT_OUT)
    rows = found["rows"] if isinstance(found, Mapping) else 0
    return f"{rows:,} row{'' if rows == 1 else 's'} left out"
