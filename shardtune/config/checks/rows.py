"""Contradictions among the keys of the rows: which, how many in a step, how long, how kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardtune.config.checks.context import Context
from shardtune.config.model_names import BUILT_IN, TASKS
from shardtune.config.schema.data import DataConfig, DataEntry
from shardtune.config.values import WORKERS
from shardtune.errors import ConfigError

READ_KEYS = {
    **dict.fromkeys(("role", "from", "content", "value"), "leave it out of the list: a message has a role and content"),
    **dict.fromkeys(("loss_weight", "weight"), "a function for data.transform leaves weights out"),
    **dict.fromkeys(("thinking", "reasoning"), "data.thinking: strip leaves all reasoning out"),
    "function_call": "name tool_calls, under which all calls are read; or leave calls out in data.transform",
}
"""Keys of messages that cannot be ignored, and what to do instead."""


def required(context: Context) -> Iterator[ConfigError]:
    actor, model = context.recipe.actor, context.recipe.actor.model
    # A user's worker may take weights and rows from anywhere, an adapter its weights.
    worker = (actor.worker is not None and actor.worker not in WORKERS) or model.model_type not in BUILT_IN
    given: dict[str, object] = {}
    if not worker and model.adapter is None and model.model_type == "causal_lm":
        given["actor.model.model_path"] = model.model_path
    if not worker:
        given["data.train_data_paths"] = context.recipe.data.train_data_paths
    for key, value in given.items():
        if value is None and key not in context.in_memory:
            what = "the base model" if key.startswith("actor") else "the training rows"
            yield context.problem(
                key, f"{key} is required: {what}", f"add it to the recipe, or {key}=… on the command line"
            )


def batches(context: Context) -> Iterator[ConfigError]:
    actor = context.recipe.actor
    rows, tokens = actor.global_batch_size, actor.global_batch_tokens
    if rows is not None and tokens is not None:
        yield context.problem(
            "actor.global_batch_tokens",
            f"actor.global_batch_size ({rows} rows) and actor.global_batch_tokens ({tokens} tokens) exclude each other",
            "keep one of them; the other is null",
        )
    if rows is None and tokens is None:
        yield context.problem(
            "actor.global_batch_size",
            "neither actor.global_batch_size nor actor.global_batch_tokens sets the size of an optimizer step",
            "give one of them",
        )
    if actor.micro_batch_size is None and actor.max_tokens_per_micro_batch is None:
        yield context.problem(
            "actor.micro_batch_size",
            "actor.micro_batch_size: null leaves the forward pass without a limit",
            "give actor.max_tokens_per_micro_batch, or a number of rows",
        )


def length(context: Context) -> Iterator[ConfigError]:
    limit, length = context.recipe.actor.max_tokens_per_micro_batch, context.recipe.data.max_length
    if limit is not None and length > limit:
        key = "actor.max_tokens_per_micro_batch"
        yield context.problem(
            key,
            f"data.max_length ({length} tokens) is more than one forward pass may hold ({key}: {limit})",
            f"raise {key} to {length} or lower data.max_length",
        )
    data = context.recipe.data
    if data.split_stride is not None and data.on_too_long != "split":
        yield context.problem(
            "data.split_stride",
            f"data.split_stride ({data.split_stride}) has no effect with data.on_too_long: {data.on_too_long}",
            "set data.on_too_long: split, or leave it out",
        )
    elif data.split_stride is not None and data.split_stride >= length:
        yield context.problem(
            "data.split_stride",
            f"data.split_stride ({data.split_stride}) is not below data.max_length ({length}), so the first token of a "
            "window would never be a target",
            f"set at most {length - 1}, which is what null stands for",
        )


def by_file(context: Context) -> Iterator[ConfigError]:
    data, whole = context.recipe.data, "or set data.cache: whole"
    if data.cache == "whole":
        for key, value in (("data.mixed_files", data.mixed_files), ("data.cache_limit", data.cache_limit)):
            if value is not None:
                what = f"{key} ({value:g}) has no effect with data.cache: whole"
                yield context.problem(key, what, "set data.cache: by_file, or leave it out")
        return
    if context.recipe.runner.max_steps == -1:
        yield context.problem(
            "data.cache",
            "data.cache: by_file needs runner.max_steps, by which the learning rate is scheduled: rows that are "
            "dropped, and so the steps of an epoch, are known only when all files have been read",
            f"set runner.max_steps, {whole}",
        )
    top_k = context.recipe.actor.teacher.top_k
    audits = bool(data.audit.model_dump(exclude_none=True))
    of_all_files = (
        ("data.eval_split", data.eval_split > 0, "holds out rows of all files", "name data.eval_data_paths"),
        ("data.quarantine", data.quarantine is not None, "looks for its rows in all files", "leave it out"),
        ("data.on_too_long", data.on_too_long == "split", "split makes several rows of one", "choose another"),
        ("data.audit", audits, "counts rows of all files", "leave its limits out"),
        ("actor.teacher.top_k", top_k is not None, "stores the teacher's tokens of all rows", "leave it out"),
    )
    for key, is_set, why, remedy in of_all_files:
        if is_set:
            what = f"{key} {why}, and data.cache: by_file reads one after the other"
            yield context.problem(key, what, f"{remedy}, {whole}")


def bad_rows(context: Context) -> Iterator[ConfigError]:
    data = context.recipe.data
    if data.on_bad_row == "fail" and data.max_bad_rows != DataConfig().max_bad_rows:
        yield context.problem(
            "data.max_bad_rows",
            f"data.max_bad_rows ({data.max_bad_rows}) has no effect with data.on_bad_row: fail: the first ends the run",
            "set data.on_bad_row: skip, or leave it out",
        )


def ignored_keys(context: Context) -> Iterator[ConfigError]:
    """Keys that a message is read by, before any is left out."""
    for name in context.recipe.data.ignored_keys:
        if name in READ_KEYS:
            yield context.problem(
                "data.ignored_keys",
                f"data.ignored_keys: {name} is a key that messages are read by, and not one without a meaning",
                READ_KEYS[name],
            )


def evaluation_weights(context: Context) -> Iterator[ConfigError]:
    given, actor = context.recipe.data.eval_data_paths, context.recipe.actor
    if (actor.worker is not None and actor.worker not in WORKERS) or actor.model.model_type not in BUILT_IN:
        return  # a worker of a user's refuses any key beside a path, and `resolve_sources` refuses this one
    sets = given if isinstance(given, Mapping) else {"": given}
    for name, sources in sets.items():
        for entry in sources if isinstance(sources, Sequence) and not isinstance(sources, str) else [sources]:
            if isinstance(entry, DataEntry) and entry.weight != 1.0:
                of_set = f" of the set {name}" if name else ""
                yield context.problem(
                    "data.eval_data_paths",
                    f"the weight {entry.weight:g} of {entry.path}{of_set} has no effect: every row is evaluated once",
                    "leave it out; max_samples takes fewer rows of a source",
                )


def pixels(context: Context) -> Iterator[ConfigError]:
    actor, data = context.recipe.actor, context.recipe.data
    own = actor.model.adapter is None and actor.worker is None
    given = {"data.keep_pixels": data.keep_pixels, "data.image_hosts": bool(data.image_hosts)}
    if not own or actor.model.model_type not in ("causal_lm", *TASKS):
        return
    for key in (key for key, is_set in given.items() if is_set):
        yield context.problem(
            key,
            f"{key} has no effect with model_type: {actor.model.model_type}, which takes no images",
            "leave it out, or set actor.model.model_type: vision_language",
        )


def augmentation(context: Context) -> Iterator[ConfigError]:
    recipe, key = context.recipe, "data.augmentation"
    own = recipe.actor.model.adapter is None and recipe.actor.worker is None
    found = recipe.data.augmentation
    if found.same_for_cameras and not found.is_on:
        yield context.problem(
            f"{key}.same_for_cameras",
            f"{key}.same_for_cameras: true has no effect: no change of images has a range",
            f"give one, such as {key}.random_resized_crop.scale: [0.9, 1.0], or leave it out",
        )
    if found.is_on and own and recipe.actor.model.model_type == "causal_lm":
        yield context.problem(
            key,
            f"{key} has no effect with model_type: causal_lm, which takes no images",
            "leave it out, or set actor.model.model_type: vision_language",
        )
    if found.is_on and recipe.data.keep_pixels:
        yield context.problem(
            "data.keep_pixels",
            f"data.keep_pixels stores processed images, which {key} could not change any more",
            "leave one of them out",
        )
