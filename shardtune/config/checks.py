"""Contradictions in a recipe whose values each have the right type."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from shardtune.config.layers import Merged
from shardtune.config.model_names import BUILT_IN, POLICIES, TASKS
from shardtune.config.rank_layout import Layout
from shardtune.config.schema import DataConfig, DataEntry, OptimConfig, Recipe
from shardtune.config.shown import as_written
from shardtune.config.values import LARGEST, LOSSES, OUT_OF_RANGE, WORKERS
from shardtune.errors import ConfigError, ParallelError


@dataclass(frozen=True, slots=True)
class Context:
    """A recipe, the keys that were given, and the keys whose values are passed as objects."""

    recipe: Recipe
    given: Merged
    in_memory: Collection[str]

    def problem(self, key: str, what: str, remedy: str) -> ConfigError:
        return ConfigError(what, where=self.recipe.where(key), remedy=remedy)

    def idle(self, section: str, given: Mapping[str, object], why: str, remedy: str) -> Iterator[ConfigError]:
        """One message for all keys of a section that have no effect; none where none is given."""
        keys = [f"{section}.{name}" for name in given]
        if keys:
            have = "has" if len(keys) == 1 else "have"
            yield self.problem(keys[0], f"{enumerated(keys)} {have} no effect {why}", remedy)

    @property
    def has_eval_data(self) -> bool:
        data = self.recipe.data
        return data.eval_data_paths is not None or data.eval_split > 0 or "data.eval_data_paths" in self.in_memory

    @property
    def evaluates(self) -> bool:
        """Whether there are rows, episodes or tasks to evaluate on."""
        evaluation = self.recipe.eval
        return self.has_eval_data or evaluation.environment is not None or bool(evaluation.harness)


def enumerated(names: Collection[str]) -> str:
    """Names in a sentence: a, b and c."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def check(recipe: Recipe, given: Merged, in_memory: Collection[str]) -> list[ConfigError]:
    """All contradictions within the recipe."""
    context = Context(recipe, given, in_memory)
    rules = (
        *(_launcher, _logger, _required, _batches, _length, _by_file, _schedule),
        *(_duration, _evaluation, _harness, _episodes, _watching, _anomalies, _losses, _lora),
        *(_execution, _fast_parts, _optimizer_states, _actions, _values, _pixels, _augmentation),
    )
    return [problem for rule in rules for problem in rule(context)]


def _launcher(context: Context) -> Iterator[ConfigError]:
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


def _logger(context: Context) -> Iterator[ConfigError]:
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


def _required(context: Context) -> Iterator[ConfigError]:
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


def check_ranks(recipe: Recipe) -> list[ConfigError]:
    """What does not fit the number of ranks."""
    ranks = int(os.environ.get("WORLD_SIZE", recipe.runner.workers))
    try:
        Layout.of(recipe.actor, ranks)
    except ParallelError as error:
        key = error.where or ""
        return [ConfigError(error.what, where=recipe.where(key) or key, remedy=error.remedy)]
    return []


def _batches(context: Context) -> Iterator[ConfigError]:
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


def _length(context: Context) -> Iterator[ConfigError]:
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


def _by_file(context: Context) -> Iterator[ConfigError]:
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


def _schedule(context: Context) -> Iterator[ConfigError]:
    optim = context.recipe.actor.optim
    for rate, decay in [(optim.lr, optim.weight_decay), *((group.lr, group.weight_decay) for group in optim.groups)]:
        product = (optim.lr if rate is None else rate) * (optim.weight_decay if decay is None else decay)
        if product > LARGEST:
            yield context.problem(
                "actor.optim.weight_decay",
                f"the learning rate times the weight decay is {product:g}: {OUT_OF_RANGE}",
                "lower one of them",
            )
    if optim.min_lr > optim.lr:
        yield context.problem(
            "actor.optim.min_lr",
            f"actor.optim.min_lr ({optim.min_lr:g}) is above actor.optim.lr ({optim.lr:g})",
            "lower it; it is the rate at the end",
        )
    if optim.lr_warmup_steps and optim.lr_warmup_steps_ratio:
        yield context.problem(
            "actor.optim.lr_warmup_steps_ratio",
            f"actor.optim.lr_warmup_steps ({optim.lr_warmup_steps}) and actor.optim.lr_warmup_steps_ratio "
            f"({optim.lr_warmup_steps_ratio:g}) both set the length of the warm-up",
            "keep one of them; the other is 0",
        )
    if optim.min_lr and optim.lr_scheduler == "constant":
        yield context.problem(
            "actor.optim.min_lr",
            f"actor.optim.min_lr ({optim.min_lr:g}) has no effect with actor.optim.lr_scheduler: constant",
            "leave it out or choose linear, cosine or wsd",
        )
    if optim.decay_ratio != OptimConfig().decay_ratio and optim.lr_scheduler != "wsd":
        yield context.problem(
            "actor.optim.decay_ratio",
            f"actor.optim.decay_ratio has no effect with actor.optim.lr_scheduler: {optim.lr_scheduler}",
            "leave it out or choose wsd",
        )


def _duration(context: Context) -> Iterator[ConfigError]:
    runner = context.recipe.runner
    if runner.max_epochs == -1 and runner.max_steps == -1:
        yield context.problem(
            "runner.max_epochs",
            "runner.max_epochs and runner.max_steps are both -1: training would not end",
            "limit one of them",
        )


def _evaluation(context: Context) -> Iterator[ConfigError]:
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


def _harness(context: Context) -> Iterator[ConfigError]:
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


def _episodes(context: Context) -> Iterator[ConfigError]:
    config, model = context.recipe.eval, context.recipe.actor.model
    if config.environment is None:
        return
    if model.adapter is None and model.model_type in ("causal_lm", "vision_language", *TASKS):
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


def _watching(context: Context) -> Iterator[ConfigError]:
    runner = context.recipe.runner
    if runner.early_stop.enabled and runner.eval_interval == -1 and context.evaluates:
        yield context.problem(
            "runner.early_stop.enabled",
            "runner.early_stop.enabled needs evaluations during training, and runner.eval_interval is -1",
            'give runner.eval_interval a number of steps or "epoch"',
        )


def _anomalies(context: Context) -> Iterator[ConfigError]:
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


def _losses(context: Context) -> Iterator[ConfigError]:
    actor = context.recipe.actor
    for key, value in (("actor.label_smoothing", actor.label_smoothing), ("actor.z_loss", actor.z_loss)):
        if value and actor.loss is not None:
            yield context.problem(
                key,
                f"{key} ({value:g}) is part of the built-in cross-entropy, which actor.loss ({actor.loss}) replaces",
                "leave it out, or leave actor.loss out"
                if actor.loss in LOSSES
                else f"leave it out and implement it in {actor.loss.rpartition(':')[2]}, or leave actor.loss out",
            )
    if actor.loss == "distill":
        if actor.teacher.model_path is None:
            yield context.problem(
                "actor.loss",
                "actor.loss: distill needs a teacher, and none is named",
                "give actor.teacher.model_path: the directory or Hub name of a language model with the same vocabulary",
            )
        if actor.teacher.top_k is not None and actor.teacher.divergence != "forward_kl":
            yield context.problem(
                "actor.teacher.top_k",
                f"actor.teacher.top_k: {actor.teacher.top_k} keeps no probabilities for "
                f"actor.teacher.divergence: {actor.teacher.divergence}",
                "use forward_kl, or leave top_k out",
            )
        if actor.teacher.top_k is not None and actor.parallel.sequence > 1:
            yield context.problem(
                "actor.teacher.top_k",
                "actor.teacher.top_k does not work with actor.parallel.sequence",
                "compute the tokens in a run of one step without it, which keeps them in data.cache_dir, or leave "
                "top_k out",
            )
        return
    for name in actor.teacher.model_dump(exclude_defaults=True):
        yield context.problem(
            f"actor.teacher.{name}",
            f"actor.teacher.{name} has no effect without actor.loss: distill",
            "set that, or leave the key out",
        )


OF_LORA = (
    "r",
    "alpha",
    "dropout",
    "init",
    "use_dora",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_parameters",
)
"""Keys of the section that only LoRA has."""


def _lora(context: Context) -> Iterator[ConfigError]:
    model = context.recipe.actor.model
    lora, section = model.lora, "actor.model.lora"
    tensor = context.recipe.actor.parallel.tensor
    if not model.is_lora:
        given = lora.model_dump(exclude_defaults=True)
        yield from context.idle(section, given, "with actor.model.is_lora: false", "set it to true")
        return
    subtracts = str(lora.init).startswith(("pissa", "olora"))
    contradictions = {
        "init": [
            ("no effect with load_from, whose weights are loaded", lora.init is not True and lora.load_from),
            ("an even r", lora.init == "orthogonal" and lora.r % 2),
            (
                "even ranks in rank_pattern",
                lora.init == "orthogonal" and any(r % 2 for r in lora.rank_pattern.values()),
            ),
            ("adapters without DoRA", lora.init == "mica" and lora.use_dora),
            ("linear layers, not target_parameters", lora.init not in (True, False) and lora.target_parameters),
            (
                "base_dtype auto or bf16: NF4 would round the remaining base weights again",
                subtracts and lora.base_dtype == "nf4",
            ),
        ],
        "target_parameters": [
            ("dropout: 0.0, as PEFT has none for them", lora.target_parameters and lora.dropout),
            ("use_dora: false, as PEFT has none for them", lora.target_parameters and lora.use_dora),
        ],
        "use_dora": [
            ("parallel.tensor: 1, as it takes norms of whole matrices in each forward", lora.use_dora and tensor > 1)
        ],
        "target_modules": [
            ("target_parameters, if it is empty", not lora.target_modules and not lora.target_parameters)
        ],
        "layers_pattern": [("layers_to_transform", lora.layers_pattern and lora.layers_to_transform is None)],
        "layers_to_transform": [
            (
                "no target_parameters, for which PEFT does not use it; name these with their layers",
                lora.layers_to_transform is not None and lora.target_parameters and not lora.load_from,
            )
        ],
        "peft": [
            ("a peft_type, as text, e.g. IA3", bool(lora.peft) and not isinstance(lora.peft.get("peft_type"), str)),
            ("base_dtype: auto or bf16", bool(lora.peft) and lora.base_dtype == "nf4"),
            ("parallel.tensor: 1", bool(lora.peft) and tensor > 1),
        ],
        "exclude_modules": [("target_modules", lora.exclude_modules and not lora.target_modules)],
        "base_dtype": [
            ("precision: bf16", lora.base_dtype == "bf16" and model.precision != "bf16"),
            ("parallel.tensor: 1, as blocks of its codes lie along rows", lora.base_dtype == "nf4" and tensor > 1),
        ],
    }
    for name in OF_LORA if lora.peft else ():
        if name in lora.model_dump(exclude_defaults=True):
            yield context.problem(
                f"{section}.{name}",
                f"{section}.{name} is LoRA's, and {section}.peft is of another method",
                f"leave it out; keys of that method are given in {section}.peft",
            )
    for name, rules in contradictions.items():
        for what, broken in rules:
            if broken:
                value = getattr(lora, name)
                verb = "has" if what.startswith("no effect") else "needs"
                yield context.problem(
                    f"{section}.{name}", f"{section}.{name}: {as_written(value)} {verb} {what}", "change one of them"
                )


def _execution(context: Context) -> Iterator[ConfigError]:
    actor = context.recipe.actor
    ahead = actor.fsdp_config.prefetch
    if ahead > 1 and actor.training_backend != "fsdp":
        why = "gathers in its own way" if actor.training_backend == "fsdp1" else "has nothing to gather"
        yield context.problem(
            "actor.fsdp_config.prefetch",
            f"actor.fsdp_config.prefetch ({ahead}) has no effect with actor.training_backend: "
            f"{actor.training_backend}, which {why}",
            "leave it out, or use actor.training_backend: fsdp",
        )
    method = actor.parallel.sequence_method
    if method != "auto" and actor.parallel.sequence == 1:
        yield context.problem(
            "actor.parallel.sequence_method",
            f"actor.parallel.sequence_method ({method}) has no effect with actor.parallel.sequence: 1",
            "leave it out, or set actor.parallel.sequence to the ranks that share each sequence",
        )
    attention, precision = actor.model.attn_implementation, actor.model.precision
    ours = actor.worker is None and actor.model.adapter is None and actor.model.model_type in OF_LANGUAGE
    if ours and "flash" in attention and precision in ("fp32", "fp64"):
        yield context.problem(
            "actor.model.attn_implementation",
            f"actor.model.attn_implementation: {attention} computes in half precision alone, and "
            f"actor.model.precision is {precision}",
            "set actor.model.precision: bf16, or attn_implementation: auto",
        )
    if actor.model.compile and actor.model.gradient_checkpointing == "selective":
        yield context.problem(
            "actor.model.gradient_checkpointing",
            "actor.model.gradient_checkpointing: selective selects among a layer's operations, which "
            "actor.model.compile: true fuses into one",
            "set it to true or false; the compiler chooses by itself what to store",
        )
    if actor.model.compile and actor.parallel.tensor > 1:
        yield context.problem(
            "actor.model.compile",
            f"actor.model.compile: true does not work with actor.parallel.tensor: {actor.parallel.tensor}: torch's "
            "compiler does not support layers with tensor parallelism",
            "leave one of them out; actor.parallel.sequence works with it",
        )


OF_LANGUAGE = ("causal_lm", "vision_language", "vision_language_action")
"""Model types whose modules may be replaced by fast parts."""


def _fast_parts(context: Context) -> Iterator[ConfigError]:
    actor, model = context.recipe.actor, context.recipe.actor.model
    for section, on, values in (
        ("kernels", "source", model.kernels.model_dump(exclude_defaults=True)),
        ("fp8", "scaling", model.fp8.model_dump(exclude_defaults=True)),
    ):
        if values and on not in values:
            why = f"without actor.model.{section}.{on}"
            yield from context.idle(f"actor.model.{section}", values, why, "set it, or leave the section out")
        if on not in values:
            continue
        key = f"actor.model.{section}.{on}"
        refused = {
            f"actor.worker: {actor.worker}": (actor.worker is not None, "its own code computes the model"),
            f"actor.model.adapter: {model.adapter}": (model.adapter is not None, "it may compute the model in any way"),
            f"actor.model.model_type: {model.model_type}": (
                model.model_type not in OF_LANGUAGE,
                f"it is for {enumerated(OF_LANGUAGE)}",
            ),
            f"actor.parallel.tensor: {actor.parallel.tensor}": (
                actor.parallel.tensor > 1,
                "layers then hold parts of their matrices",
            ),
        }
        for other, (is_set, why) in refused.items():
            if is_set:
                yield context.problem(
                    key, f"{key}: {values[on]} does not work with {other}: {why}", "leave one of them out"
                )
    if model.fp8.scaling is None:
        return
    if model.is_lora and model.lora.base_dtype == "nf4":
        key = "actor.model.fp8.scaling"
        nf4 = "actor.model.lora.base_dtype: nf4"
        what = f"{key}: {model.fp8.scaling} does not work with {nf4}, whose layers hold four bits"
        yield context.problem(key, what, "leave one of them out")
    if model.precision != "bf16" and not model.fp8.emulate:
        key = "actor.model.fp8.scaling"
        what = f"{key}: {model.fp8.scaling} needs actor.model.precision: bf16, not {model.precision}"
        yield context.problem(key, what, "set precision: bf16, or leave it out")


OF_ACTION_TOKENS = ("action_token_len", "num_action_bins", "action_tokens", "action_prompt", "action_state")
"""Keys that only models of action tokens read."""
OF_STATISTICS = ("unnorm_key", "action_statistics", "action_normalization_mask")
"""Keys of how actions are normalised."""
OF_POLICIES = (*OF_STATISTICS, "action_representation", "action_representation_mask")
"""Keys of actions that ready policies read, too."""
OF_ACTIONS = ("action_chunks_len", *OF_ACTION_TOKENS, *OF_POLICIES)
"""Keys that only action models read; a registered model may read any."""


def _actions(context: Context) -> Iterator[ConfigError]:
    model = context.recipe.actor.model
    own = model.adapter is None and context.recipe.actor.worker is None
    if own and model.model_type in BUILT_IN and not model.low_cpu_mem_usage:
        key = "actor.model.low_cpu_mem_usage"
        yield context.problem(
            key,
            f"{key}: false has no effect with model_type: {model.model_type}, which is always built on the meta device",
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


def _values(context: Context) -> Iterator[ConfigError]:
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


def _pixels(context: Context) -> Iterator[ConfigError]:
    actor = context.recipe.actor
    own = actor.model.adapter is None and actor.worker is None
    if context.recipe.data.keep_pixels and own and actor.model.model_type in ("causal_lm", *TASKS):
        yield context.problem(
            "data.keep_pixels",
            f"data.keep_pixels: true has no effect with model_type: {actor.model.model_type}, which takes no images",
            "leave it out, or set actor.model.model_type: vision_language",
        )


def _augmentation(context: Context) -> Iterator[ConfigError]:
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


# The optimizers whose states can be kept in bf16 or int8, and their arguments that are allowed then.
LOW_BIT = {
    "AdamW": ("maximize",),
    "Adam": ("maximize",),
    "SGD": ("momentum", "dampening", "nesterov", "maximize"),
}


def _optimizer_states(context: Context) -> Iterator[ConfigError]:
    actor, key = context.recipe.actor, "actor.optim.state_dtype"
    optim, dtype = actor.optim, actor.optim.state_dtype
    if optim.name == "Muon" and actor.training_backend == "fsdp1":
        yield context.problem(
            "actor.optim.name",
            "actor.optim.name: Muon does not work with actor.training_backend: fsdp1, whose shards are no matrices",
            "use actor.training_backend: fsdp, or AdamW",
        )
    if dtype == "fp32":
        return
    if optim.name not in LOW_BIT:
        yield context.problem(
            key,
            f"{key}: {dtype} works with {', '.join(LOW_BIT)}, not with actor.optim.name: {optim.name}",
            "use one of them, or fp32",
        )
        return
    for name in (name for name in optim.args if name not in LOW_BIT[optim.name]):
        yield context.problem(
            "actor.optim.args",
            f"actor.optim.args.{name} does not work with {key}: {dtype}",
            f"leave it out (allowed: {', '.join(LOW_BIT[optim.name])}), or use {key}: fp32",
        )
    if optim.name == "SGD" and not optim.args.get("momentum"):
        yield context.problem(
            key,
            f"{key}: {dtype} has no effect on SGD without momentum, which keeps no state",
            "give actor.optim.args: {momentum: 0.9}, or use fp32",
        )
    if dtype == "int8" and actor.training_backend == "fsdp1":
        yield context.problem(
            key,
            f"{key}: int8 does not work with actor.training_backend: fsdp1: its shards cut through rows, and each "
            "block of a row has one scale",
            "use bf16, or actor.training_backend: fsdp",
        )
