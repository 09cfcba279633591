"""What can be wrong with a recipe whose values are each of the right type: contradictions, and features to come."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from shardtune.config.layers import Merged
from shardtune.config.model_names import BUILT_IN
from shardtune.config.rank_layout import Layout
from shardtune.config.schema import OptimConfig, Recipe
from shardtune.config.values import WORKERS
from shardtune.errors import ConfigError, ParallelError


@dataclass(frozen=True, slots=True)
class Facts:
    """A recipe, what was written in it, and which keys' values are objects in memory."""

    recipe: Recipe
    written: Merged
    in_memory: Collection[str]

    def problem(self, key: str, what: str, remedy: str) -> ConfigError:
        return ConfigError(what, where=self.recipe.where(key), remedy=remedy)

    @property
    def has_eval_data(self) -> bool:
        data = self.recipe.data
        return data.eval_data_paths is not None or data.eval_split > 0 or "data.eval_data_paths" in self.in_memory

    @property
    def evaluates(self) -> bool:
        """Whether there is anything to evaluate on: rows, or episodes."""
        return self.has_eval_data or self.recipe.eval.environment is not None


def check(recipe: Recipe, written: Merged, in_memory: Collection[str]) -> list[ConfigError]:
    """Everything that the recipe alone shows to be wrong."""
    facts = Facts(recipe, written, in_memory)
    rules = (
        *(_launcher, _required, _batches, _length, _schedule),
        *(_duration, _evaluation, _episodes, _watching, _losses, _lora),
        *(_execution, _optimizer_states, _actions, _pixels),
    )
    return [problem for rule in rules for problem in rule(facts)]


def _launcher(facts: Facts) -> Iterator[ConfigError]:
    runner = facts.recipe.runner
    by_ray = runner.launcher == "ray"
    if by_ray and runner.num_workers is None:
        yield facts.problem(
            "runner.launcher", "runner.launcher: ray needs to know how many ranks to start", "set runner.num_workers"
        )
    if by_ray and runner.nproc_per_node != 1:
        yield facts.problem(
            "runner.nproc_per_node",
            f"runner.nproc_per_node ({runner.nproc_per_node}) has no effect with runner.launcher: ray",
            "leave it out; runner.num_workers counts the ranks, runner.ray.placement says where they go",
        )
    for_ray = ["num_workers"] if runner.num_workers is not None else []
    for_ray += [f"ray.{name}" for name in runner.ray.model_dump(exclude_defaults=True)]
    for name in [] if by_ray else for_ray:
        yield facts.problem(
            f"runner.{name}",
            f"runner.{name} has no effect with runner.launcher: local",
            "set runner.launcher: ray, or leave it out; runner.nproc_per_node starts ranks on this machine",
        )
    if runner.max_restarts and not by_ray and runner.nproc_per_node == 1:
        yield facts.problem(
            "runner.max_restarts",
            f"runner.max_restarts ({runner.max_restarts}) has no effect on a single process, which nobody watches",
            "set runner.nproc_per_node or runner.launcher: ray; under torchrun use its own --max-restarts",
        )
    fewest = runner.min_workers
    if fewest is not None and not runner.max_restarts:
        yield facts.problem(
            "runner.min_workers",
            f"runner.min_workers ({fewest}) has no effect with runner.max_restarts: 0",
            "set runner.max_restarts, or leave it out",
        )
    elif fewest is not None and fewest > runner.workers:
        yield facts.problem(
            "runner.min_workers",
            f"runner.min_workers ({fewest}) is more than the {runner.workers} ranks that are started",
            "lower it",
        )


def _required(facts: Facts) -> Iterator[ConfigError]:
    actor, model = facts.recipe.actor, facts.recipe.actor.model
    # A worker of the user's own knows itself where weights and rows come from, an adapter where weights do.
    worker = (actor.worker is not None and actor.worker not in WORKERS) or model.model_type not in BUILT_IN
    given: dict[str, object] = {}
    if not worker and model.adapter is None and model.model_type == "causal_lm":
        given["actor.model.model_path"] = model.model_path
    if not worker:
        given["data.train_data_paths"] = facts.recipe.data.train_data_paths
    for key, value in given.items():
        if value is None and key not in facts.in_memory:
            what = "the base model" if key.startswith("actor") else "the training rows"
            yield facts.problem(
                key, f"{key} is required: {what}", f"add it to the recipe, or {key}=… on the command line"
            )


def check_ranks(recipe: Recipe) -> list[ConfigError]:
    """What does not fit the number of ranks that are, or will be, started."""
    ranks = int(os.environ.get("WORLD_SIZE", recipe.runner.workers))
    try:
        Layout.of(recipe.actor, ranks)
    except ParallelError as error:
        key = error.where or ""
        return [ConfigError(error.what, where=recipe.where(key) or key, remedy=error.remedy)]
    return []


def _batches(facts: Facts) -> Iterator[ConfigError]:
    actor = facts.recipe.actor
    rows, tokens = actor.global_batch_size, actor.global_batch_tokens
    if rows is not None and tokens is not None:
        yield facts.problem(
            "actor.global_batch_tokens",
            f"actor.global_batch_size ({rows} rows) and actor.global_batch_tokens ({tokens} tokens) exclude each other",
            "keep one of them; the other is null",
        )
    if rows is None and tokens is None:
        yield facts.problem(
            "actor.global_batch_size",
            "neither actor.global_batch_size nor actor.global_batch_tokens says how large an optimizer step is",
            "give one of them",
        )
    if actor.micro_batch_size is None and actor.max_tokens_per_micro_batch is None:
        yield facts.problem(
            "actor.micro_batch_size",
            "actor.micro_batch_size: null leaves a forward without a limit",
            "give actor.max_tokens_per_micro_batch, or a number of rows",
        )


def _length(facts: Facts) -> Iterator[ConfigError]:
    limit, length = facts.recipe.actor.max_tokens_per_micro_batch, facts.recipe.data.max_length
    if limit is not None and length > limit:
        key = "actor.max_tokens_per_micro_batch"
        yield facts.problem(
            key,
            f"data.max_length ({length} tokens) is more than one forward may hold ({key}: {limit})",
            f"raise {key} to {length} or lower data.max_length",
        )


def _schedule(facts: Facts) -> Iterator[ConfigError]:
    optim = facts.recipe.actor.optim
    if optim.min_lr > optim.lr:
        yield facts.problem(
            "actor.optim.min_lr",
            f"actor.optim.min_lr ({optim.min_lr:g}) is above actor.optim.lr ({optim.lr:g})",
            "lower it; it is the rate at the end",
        )
    if optim.lr_warmup_steps and optim.lr_warmup_steps_ratio:
        yield facts.problem(
            "actor.optim.lr_warmup_steps_ratio",
            f"actor.optim.lr_warmup_steps ({optim.lr_warmup_steps}) and actor.optim.lr_warmup_steps_ratio "
            f"({optim.lr_warmup_steps_ratio:g}) both say how long the warm-up is",
            "keep one of them; the other is 0",
        )
    if optim.min_lr and optim.lr_scheduler == "constant":
        yield facts.problem(
            "actor.optim.min_lr",
            f"actor.optim.min_lr ({optim.min_lr:g}) has no effect with actor.optim.lr_scheduler: constant",
            "leave it out or choose linear, cosine or wsd",
        )
    if optim.decay_ratio != OptimConfig().decay_ratio and optim.lr_scheduler != "wsd":
        yield facts.problem(
            "actor.optim.decay_ratio",
            f"actor.optim.decay_ratio has no effect with actor.optim.lr_scheduler: {optim.lr_scheduler}",
            "leave it out or choose wsd",
        )


def _duration(facts: Facts) -> Iterator[ConfigError]:
    runner = facts.recipe.runner
    if runner.max_epochs == -1 and runner.max_steps == -1:
        yield facts.problem(
            "runner.max_epochs",
            "runner.max_epochs and runner.max_steps are both -1: training would not end",
            "limit one",
        )


def _evaluation(facts: Facts) -> Iterator[ConfigError]:
    recipe = facts.recipe
    both = recipe.data.eval_data_paths is not None or "data.eval_data_paths" in facts.in_memory
    if both and recipe.data.eval_split:
        yield facts.problem(
            "data.eval_split",
            f"data.eval_split ({recipe.data.eval_split:g}) and data.eval_data_paths both say what to evaluate on",
            "keep one of them",
        )
    if facts.has_eval_data:
        return
    runner = recipe.runner
    on_rows = {"eval.generate": recipe.eval.generate, "eval.metrics": bool(recipe.eval.metrics)}
    on_anything = {
        "runner.val_check_interval": runner.val_check_interval != -1,
        "runner.eval_before_training": runner.eval_before_training,
        "runner.early_stop.enabled": runner.early_stop.enabled,
        "runner.best.monitor": (runner.best.monitor or "").startswith("eval/"),
    }
    needing = on_rows | ({} if facts.evaluates else on_anything)
    for key in (key for key, asked in needing.items() if asked):
        value = facts.written.given(key)
        yield facts.problem(
            key,
            f"{key}: {value!r} needs evaluation data, and there is none",
            "give data.eval_data_paths or data.eval_split",
        )


def _episodes(facts: Facts) -> Iterator[ConfigError]:
    config, model = facts.recipe.eval, facts.recipe.actor.model
    if config.environment is None:
        return
    if model.adapter is None and model.model_type in ("causal_lm", "vision_language"):
        yield facts.problem(
            "eval.environment",
            f"eval.environment: {config.environment!r} needs a model that acts; {model.model_type} does not",
            "leave it out, or set actor.model.model_type: vision_language_action",
        )
    elif model.adapter is None and (config.action_steps or 0) > model.action_chunks_len:
        yield facts.problem(
            "eval.action_steps",
            f"eval.action_steps ({config.action_steps}) is more than the actions that are predicted at once "
            f"(actor.model.action_chunks_len: {model.action_chunks_len})",
            "lower it",
        )


def _watching(facts: Facts) -> Iterator[ConfigError]:
    runner = facts.recipe.runner
    if runner.early_stop.enabled and runner.val_check_interval == -1 and facts.evaluates:
        yield facts.problem(
            "runner.early_stop.enabled",
            "runner.early_stop.enabled needs evaluations during training, and runner.val_check_interval is -1",
            'give runner.val_check_interval a number of steps or "epoch"',
        )


def _losses(facts: Facts) -> Iterator[ConfigError]:
    actor = facts.recipe.actor
    for key, value in (("actor.label_smoothing", actor.label_smoothing), ("actor.z_loss", actor.z_loss)):
        if value and actor.loss is not None:
            yield facts.problem(
                key,
                f"{key} ({value:g}) is part of the built-in cross-entropy, which actor.loss ({actor.loss}) replaces",
                f"leave it out and write it into {actor.loss.rpartition(':')[2]}, or leave actor.loss out",
            )


def _lora(facts: Facts) -> Iterator[ConfigError]:
    model = facts.recipe.actor.model
    lora, section = model.lora, "actor.model.lora"
    for axis in ("tensor", "expert"):
        size = getattr(facts.recipe.actor.parallel, axis)
        if size > 1 and model.is_lora:
            yield facts.problem(
                f"actor.parallel.{axis}",
                f"actor.parallel.{axis}: {size} cannot share the layers of a low-rank adapter (actor.model.is_lora)",
                "set it to 1: a frozen base is sharded by actor.parallel.data_shard",
            )
    if not model.is_lora:
        for name in lora.model_dump(exclude_defaults=True):
            yield facts.problem(
                f"{section}.{name}", f"{section}.{name} has no effect with actor.model.is_lora: false", "set it to true"
            )
        return
    subtracts = str(lora.init).startswith(("pissa", "olora"))
    contradictions = {
        "init": [
            ("no effect with an adapter_path, whose weights are taken", lora.init is not True and lora.adapter_path),
            ("an even r", lora.init == "orthogonal" and lora.r % 2),
            ("adapters without DoRA", lora.init == "mica" and lora.use_dora),
            ("layers of their own, not target_parameters", lora.init not in (True, False) and lora.target_parameters),
            ("base_dtype auto or bf16: NF4 would round what is left once more", subtracts and lora.base_dtype == "nf4"),
        ],
        "target_parameters": [
            ("dropout: 0.0, as PEFT has none for them", lora.target_parameters and lora.dropout),
            ("use_dora: false, as PEFT has none for them", lora.target_parameters and lora.use_dora),
        ],
        "target_modules": [
            ("target_parameters, if it is empty", not lora.target_modules and not lora.target_parameters)
        ],
        "base_dtype": [("precision: bf16", lora.base_dtype == "bf16" and model.precision != "bf16")],
    }
    for name, rules in contradictions.items():
        for what, broken in rules:
            if broken:
                value = getattr(lora, name)
                verb = "has" if what.startswith("no effect") else "needs"
                yield facts.problem(
                    f"{section}.{name}", f"{section}.{name}: {value!r} {verb} {what}", "change one of them"
                )


def _execution(facts: Facts) -> Iterator[ConfigError]:
    actor = facts.recipe.actor
    ahead = actor.fsdp_config.prefetch
    if ahead > 1 and actor.training_backend != "fsdp":
        why = "has its own way to gather" if actor.training_backend == "fsdp1" else "has nothing to gather"
        yield facts.problem(
            "actor.fsdp_config.prefetch",
            f"actor.fsdp_config.prefetch ({ahead}) has no effect with actor.training_backend: "
            f"{actor.training_backend}, which {why}",
            "leave it out, or use actor.training_backend: fsdp",
        )
    if actor.model.compile and actor.model.gradient_checkpointing == "selective":
        yield facts.problem(
            "actor.model.gradient_checkpointing",
            "actor.model.gradient_checkpointing: selective chooses among a layer's operations, which "
            "actor.model.compile: true has made one of",
            "set it to true or false; a compiler chooses itself what it keeps",
        )
    if actor.model.compile and actor.parallel.tensor > 1:
        yield facts.problem(
            "actor.model.compile",
            f"actor.model.compile: true does not go with actor.parallel.tensor: {actor.parallel.tensor}: torch's "
            "compiler cannot follow layers whose matrices ranks share",
            "leave one of them out; actor.parallel.sequence goes with it",
        )


# Keys that only models with actions read, and their defaults; a registered name reads what it likes.
OF_ACTIONS = (
    "action_token_len",
    "action_chunks_len",
    "unnorm_key",
    "num_action_bins",
    "action_tokens",
    "action_prompt",
    "action_state",
    "action_statistics",
)


def _actions(facts: Facts) -> Iterator[ConfigError]:
    model = facts.recipe.actor.model
    own = model.adapter is None and facts.recipe.actor.worker is None
    if own and model.model_type in BUILT_IN and not model.low_cpu_mem_usage:
        key = "actor.model.low_cpu_mem_usage"
        yield facts.problem(
            key,
            f"{key}: false has no effect with model_type: {model.model_type}, which is always built without memory",
            "leave it out; a registered function may pass it on",
        )
    acts = model.model_type == "vision_language_action" or model.model_type not in BUILT_IN
    given = model.model_dump(exclude_defaults=True)
    for name in (name for name in OF_ACTIONS if name in given and own and not acts):
        yield facts.problem(
            f"actor.model.{name}",
            f"actor.model.{name} has no effect with model_type: {model.model_type}, which has no actions",
            "set model_type: vision_language_action, or leave it out",
        )


def _pixels(facts: Facts) -> Iterator[ConfigError]:
    actor = facts.recipe.actor
    own = actor.model.adapter is None and actor.worker is None
    if facts.recipe.data.keep_pixels and own and actor.model.model_type == "causal_lm":
        yield facts.problem(
            "data.keep_pixels",
            "data.keep_pixels: true has no effect with model_type: causal_lm, which takes no images",
            "leave it out, or set actor.model.model_type: vision_language",
        )


# Of the optimizers whose states can be kept in bf16 or int8: which of their further arguments may be given then.
LOW_BIT = {
    "AdamW": ("maximize",),
    "Adam": ("maximize",),
    "SGD": ("momentum", "dampening", "nesterov", "maximize"),
}


def _optimizer_states(facts: Facts) -> Iterator[ConfigError]:
    actor, key = facts.recipe.actor, "actor.optim.state_dtype"
    optim, kept = actor.optim, actor.optim.state_dtype
    if kept == "fp32":
        return
    if optim.name not in LOW_BIT:
        yield facts.problem(
            key,
            f"{key}: {kept} is there for {', '.join(LOW_BIT)}, not for actor.optim.name: {optim.name}",
            "use one of them, or fp32",
        )
        return
    for name in (name for name in optim.args if name not in LOW_BIT[optim.name]):
        yield facts.problem(
            "actor.optim.args",
            f"actor.optim.args.{name} does not go with {key}: {kept}",
            f"leave it out ({', '.join(LOW_BIT[optim.name])} may be given), or use {key}: fp32",
        )
    if optim.name == "SGD" and not optim.args.get("momentum"):
        yield facts.problem(
            key,
            f"{key}: {kept} has no effect on SGD without momentum, which keeps no state",
            "give actor.optim.args: {momentum: 0.9}, or use fp32",
        )
    if kept == "int8" and actor.training_backend == "fsdp1":
        yield facts.problem(
            key,
            f"{key}: int8 does not go with actor.training_backend: fsdp1: its pieces cut through rows, and "
            "blocks of a row have a scale each",
            "use bf16, or actor.training_backend: fsdp",
        )
