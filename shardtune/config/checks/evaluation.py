"""Contradictions among the keys of evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardtune.config.checks.context import Context
from shardtune.config.model_names import POLICIES, TASKS
from shardtune.config.shown import as_written
from shardtune.errors import ConfigError


def evaluation(context: Context) -> Iterator[ConfigError]:
    recipe = context.recipe
    both = recipe.data.eval_data_paths is not None or "data.eval_data_paths" in context.in_memory
    if both and recipe.data.eval_split:
        yield context.problem(
            "data.eval_split",
            f"data.eval_split ({recipe.data.eval_split:g}) and data.eval_data_paths both choose the evaluation rows",
            "keep one of them",
        )
    if context.has_eval_data:
        return
    runner = recipe.runner
    on_rows = {"eval.generate": recipe.eval.generate, "eval.metrics": bool(recipe.eval.metrics)}
    on_anything = {
        "runner.eval_interval": runner.eval_interval != -1,
        "runner.eval_before_training": runner.eval_before_training,
        "runner.early_stop.enabled": runner.early_stop.enabled,
        "runner.best.monitor": (runner.best.monitor or "").startswith("eval/"),
    }
    needing = on_rows | ({} if context.evaluates else on_anything)
    for key in (key for key, is_set in needing.items() if is_set):
        value = context.given.given(key)
        yield context.problem(
            key,
            f"{key}: {as_written(value)} needs evaluation data, and there is none",
            "give data.eval_data_paths or data.eval_split",
        )


ANSWERS = ("max_new_tokens", "temperature", "answer_pattern", "match", "num_samples")
EPISODES = ("environment_options", "episodes", "episode_seed", "episodes_at_once", "videos", "video_format")
CHUNKS = ("action_steps", "temporal_ensembling")


def idle(context: Context) -> Iterator[ConfigError]:
    """Settings of answers and of episodes without any; with `generate: false` or `environment: null` they are kept for
    another time. A worker of the user's may read them for evaluations of its own."""
    config, model = context.recipe.eval, context.recipe.actor.model
    if context.recipe.actor.worker is not None:
        return
    writes = model.model_type == "seq2seq" or model.adapter is not None  # `predict` takes its answers' length from here
    answers = [key for key in ANSWERS if not (writes and key in ("max_new_tokens", "temperature"))]
    chosen = context.given.tree.get("eval")
    settings = config.model_dump(exclude_defaults=True)
    for switch, keys, remedy in (
        ("generate", answers, "set it to true, or to false to keep them for another time"),
        ("environment", EPISODES, "name one there, or set it to null to keep them for another time"),
    ):
        if not (isinstance(chosen, Mapping) and switch in chosen):
            given = {key: settings[key] for key in keys if key in settings}
            yield from context.idle("eval", given, f"without eval.{switch}", remedy)


def harness(context: Context) -> Iterator[ConfigError]:
    config, model = context.recipe.eval, context.recipe.actor.model
    if config.harness_options and not config.harness:
        yield context.problem(
            "eval.harness_options",
            f"eval.harness_options ({', '.join(config.harness_options)}) has no effect without eval.harness",
            "name tasks there, or leave it out",
        )
    if config.harness and model.adapter is None and model.model_type in ("vision_language", "vision_language_action"):
        yield context.problem(
            "eval.harness",
            f"eval.harness evaluates language models; {model.model_type} takes images",
            "leave it out; lm_eval --model hf-multimodal evaluates the model in final/",
        )
    both = {"limit", "samples"} <= config.harness_options.keys()
    if both:
        yield context.problem(
            "eval.harness_options",
            "eval.harness_options: limit and samples both choose the rows of the tasks",
            "keep one of them",
        )


def episodes(context: Context) -> Iterator[ConfigError]:
    config, model = context.recipe.eval, context.recipe.actor.model
    acts = model.adapter is not None or model.model_type not in ("causal_lm", "vision_language", *TASKS)
    if not acts and context.recipe.actor.worker is None:
        chosen = {name: getattr(config, name) for name in CHUNKS if getattr(config, name) is not None}
        yield from context.idle("eval", chosen, f"with {model.model_type}, which predicts no actions", "leave it out")
    if config.environment is None:
        return
    if not acts:
        yield context.problem(
            "eval.environment",
            f"eval.environment: {config.environment} needs a model that acts; {model.model_type} does not",
            "leave it out, or set actor.model.model_type: vision_language_action",
        )
    elif (
        model.adapter is None
        and model.model_type not in POLICIES
        and (config.action_steps or 0) > model.action_chunks_len
    ):
        yield context.problem(
            "eval.action_steps",
            f"eval.action_steps ({config.action_steps}) is more than the number of actions predicted at once "
            f"(actor.model.action_chunks_len: {model.action_chunks_len})",
            "lower it",
        )
