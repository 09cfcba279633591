"""Axolotl: the keys of its schema."""

from __future__ import annotations

import math
from collections.abc import Mapping

from shardtune.config.foreign import axolotl_data, rules
from shardtune.config.foreign.axolotl_keys import TABLE
from shardtune.config.foreign.conversion import Conversion, Kind
from shardtune.config.foreign.rows import EVAL
from shardtune.config.foreign.sharding import sharding
from shardtune.config.foreign.training_arguments import best_model, early_stop_metric
from shardtune.config.foreign.values import REPORTS, is_on, listed, names, number, whole
from shardtune.errors import ConfigError

NAME = "Axolotl"
LENGTH = 512
MARKS = (
    *("base_model", "sequence_len", "sample_packing", "num_epochs", "val_set_size", "dataset_prepared_path"),
    *("adapter", "lora_target_linear", "train_on_inputs", "micro_batch_size", "lora_model_dir", "saves_per_epoch"),
)


def convert(c: Conversion) -> None:
    """Read a configuration of Axolotl."""
    if c.has("diffusion") or "DiffusionPlugin" in str(c.get("plugins")):
        raise ConfigError(
            "diffusion: its plugin trains a model of masked tokens, which is no fine-tuning on the next token",
            where="diffusion" if c.has("diffusion") else "plugins",
            remedy="keep Axolotl for it, or write the method on the engine (docs/your-method.md)",
        )
    if c.has("rl") or is_on(c.get("reward_model")):
        raise ConfigError(
            f"rl: {c.get('rl', 'a reward model')} is no supervised fine-tuning",
            where="rl",
            remedy="shardtune trains without rl; keep Axolotl for preferences",
        )
    total = rules.total_steps(c, "max_steps")
    rules.length_of_run(c, "num_epochs", "max_steps", default=1)
    length = whole(c.get("sequence_len")) or LENGTH
    c.put("data.max_length", length, "sequence_len", comment=_origin(c, "sequence_len"))
    _long_rows(c)
    is_packed = is_on(c.get("sample_packing"))
    sequence = "context_parallel_size" if c.has("context_parallel_size") else "sequence_parallel_degree"
    rules.batch(
        c,
        "micro_batch_size",
        "gradient_accumulation_steps",
        rows=1,
        packed=length if is_packed else None,
        packing=("sample_packing",),
        whole_batch="batch_size",
        shared=("tensor_parallel_size", sequence),
    )
    if not is_packed:
        c.record("sample_packing", Kind.DEFAULT, rules.PACKED_ANYWAY)
    if c.world_size is None or c.world_size > 1:
        c.notes.append(
            "on several processes Axolotl averages the token mean of each one; here a step's loss is the mean over all "
            "of its trained tokens"
        )
    _schedule(c, total)
    rules.choose_optimizer(c, "optimizer", "optim_args")
    _precision(c)
    if c.has("processor_type"):
        c.put("actor.model.model_type", "vision_language", "processor_type")
    sharding(c)
    axolotl_data.convert(c)
    _intervals(c, total)
    _adapter(c)
    _tokens(c)


def _long_rows(c: Conversion) -> None:
    """What becomes of rows that are too long: texts of `type: completion` are cut into pieces."""
    name, kinds = "excess_length_strategy", axolotl_data.kinds(c)
    if kinds == {"completion"}:
        c.put("data.on_too_long", "split", comment="type: completion, whose texts are cut into pieces of sequence_len")
        c.not_needed("texts of type: completion are cut into pieces of sequence_len", name)
        return
    given = c.get(name, "drop")
    ours = {"raise": "fail"}.get(str(given), given)
    c.put("data.on_too_long", ours, name, comment=_origin(c, name))
    if "completion" in kinds:
        c.notes.append(
            "Axolotl cuts the texts of type: completion into pieces of sequence_len, and only those; data.on_too_long "
            f"is one for all rows: {ours}, or split, which cuts conversations too"
        )


def _origin(c: Conversion, name: str) -> str:
    return name if c.has(name) else f"Axolotl's default ({name})"


def _schedule(c: Conversion, total: int | None) -> None:
    rate = number(c.get("learning_rate")) or 0.0
    name = "lr_scheduler"
    has_warmup = rules.schedule(c, name, "lr_scheduler_kwargs", default="cosine", total=total, rate=rate)
    floor = number(c.get("cosine_min_lr_ratio"))
    if floor and str(c.get(name, "cosine")) == "cosine":
        c.put("actor.optim.min_lr", floor * rate, "cosine_min_lr_ratio")
    if not has_warmup:
        c.not_needed("transformers' constant has no warm-up; constant_with_warmup has", "warmup_steps", "warmup_ratio")
    elif c.get("warmup_steps") == 1:
        c.put(rules.WARMUP, 2, "warmup_steps", comment="warmup_steps: 1, which Axolotl makes 2")
        c.put(rules.FROM_ZERO, True, comment=rules.FIRST_STEP)
    elif c.has("warmup_steps") or c.has("warmup_ratio"):
        _warm_up(c, total)
    else:
        steps = None if total is None else min(int(0.03 * total), 100)
        if steps is None:
            comment = "Axolotl's default: 3% of the steps, but at most 100 (write lr_warmup_steps: 100 for more)"
            c.put(rules.RATIO, 0.03, comment=comment)
        else:
            c.put(
                rules.WARMUP, 2 if steps == 1 else steps, comment=f"Axolotl's default: 3% of {total} steps, at most 100"
            )
        if steps != 0:
            c.put(rules.FROM_ZERO, True, comment=rules.FIRST_STEP)
    if is_on(c.get("lr_groups")):
        groups = [one for one in listed(c.get("lr_groups")) if isinstance(one, dict)]
        ours = [{"pattern": "|".join(map(str, listed(one.get("modules")))), "lr": one.get("lr")} for one in groups]
        c.put("actor.optim.groups", ours, "lr_groups")


def _warm_up(c: Conversion, total: int | None) -> None:
    """A share of a known number of steps is rounded down here, unlike in transformers, and one step made two."""
    share = number(c.get("warmup_ratio"))
    if c.has("warmup_steps") or total is None or share is None:
        rules.warmup(c, "warmup_steps", "warmup_ratio", total, rounded="down")
        return
    steps = math.floor(share * total)
    steps = 2 if steps == 1 else steps
    c.put(rules.WARMUP, steps, "warmup_ratio", comment=f"warmup_ratio: {share:g} of {total} steps, rounded down")
    if steps:
        c.put(rules.FROM_ZERO, True, comment=rules.FIRST_STEP)


def _precision(c: Conversion) -> None:
    names_given = ("bf16", "bfloat16", "fp16", "float16", "float32")
    half = is_on(c.get("fp16")) or is_on(c.get("float16"))
    off = str(c.get("bf16", "auto")).lower() in ("false", "no")
    kind = "bf16" if is_on(c.get("bfloat16")) or (not off and not half) else "fp16" if half else "fp32"
    given = [name for name in names_given if c.has(name)]
    comment = ", ".join(given) or "Axolotl's default (bf16: auto)"
    c.put("actor.model.precision", kind, *names_given, comment=comment)
    if not c.has("adapter") and kind == "bf16":
        c.notes.append(
            "Axolotl trains weights in bf16; here they and the optimizer's states are fp32, computed with in bf16; "
            "actor.model.precision: pure_bf16 and actor.optim.state_dtype: bf16 take as little memory as there"
        )
    checkpointing = c.get("gradient_checkpointing")
    if is_on(c.get("selective_checkpointing")) or c.has("selective_checkpointing.save"):
        c.put("actor.model.gradient_checkpointing", "selective", "selective_checkpointing", "gradient_checkpointing")
    else:
        c.put("actor.model.gradient_checkpointing", bool(checkpointing), "gradient_checkpointing")
        if isinstance(checkpointing, str):
            c.notes.append("activations are recomputed, not moved to the host (gradient_checkpointing: offload)")
    if is_on(c.get("eager_attention")):
        c.put("actor.model.attn_implementation", "eager", "eager_attention")


def _intervals(c: Conversion, total: int | None) -> None:
    evaluation = "evaluation_strategy" if c.has("evaluation_strategy") else "eval_strategy"
    is_evaluated = bool(number(c.get("val_set_size"))) or c.has("test_datasets")
    has_rows = EVAL in c.lines or "data.eval_split" in c.lines
    for key, strategy, steps, times, default in (
        ("runner.eval_interval", evaluation, "eval_steps", "evals_per_epoch", "epoch" if has_rows else "no"),
        ("runner.save_interval", "save_strategy", "save_steps", "saves_per_epoch", "epoch"),
    ):
        if key == "runner.eval_interval" and not is_evaluated:
            c.not_needed("there is no evaluation data", strategy, steps, times)
        elif c.has(times):
            _per_epoch(c, key, times, total)
            c.not_needed(f"{times} replaces it", strategy, steps)
        else:
            shown = "steps" if c.has(steps) else default
            rules.interval(c, key, strategy, steps, default=shown, every=None, total=total)
    if is_evaluated and any(c.has(name) for name in ("eval_steps", "evals_per_epoch", evaluation)):
        c.put("runner.eval_before_training", True, comment="Axolotl evaluates before the first step too")
    patience = whole(c.get("early_stopping_patience"))
    if patience:
        c.put("runner.early_stop.enabled", True, "early_stopping_patience")
        c.put("runner.early_stop.patience", patience, "early_stopping_patience")
        early_stop_metric(c)
    if is_evaluated:
        best_model(c)
    else:
        names = ("load_best_model_at_end", "metric_for_best_model", "greater_is_better")
        c.not_needed("there is no evaluation data", *names)
    rules.run_directory(c, "output_dir", "wandb_name")
    _loggers(c)


def _per_epoch(c: Conversion, key: str, name: str, total: int | None) -> None:
    times, epochs = number(c.get(name)) or 0.0, number(c.get("num_epochs", 1)) or 1.0
    if times == 1:
        c.put(key, "epoch", name)
    elif times == 0:
        c.put(key, -1, name)
    elif total is not None:
        c.put(key, max(1, math.ceil(total / (times * epochs))), name, comment=f"{name}: {times:g} of {total} steps")
    else:
        c.put(key, "epoch", comment=f"{name}: {times:g}; epoch is once, see the end", always=True)
        c.missing(
            f"the recipe has {key}: epoch, which is once in an epoch; for {times:g} times write the steps of an epoch "
            f"/ {times:g} (shardtune train RECIPE --dry-run prints the steps)",
            name,
        )


def _loggers(c: Conversion) -> None:
    wandb = is_on(c.get("use_wandb")) or (c.has("wandb_project") and c.get("use_wandb") is None)
    others = [name for name in REPORTS if name != "wandb" and is_on(c.get(f"use_{name}"))]
    backends = ["jsonl", *(["wandb"] if wandb else []), *others]
    if len(backends) > 1:
        c.put("runner.logger.logger_backends", backends, *(f"use_{name}" for name in REPORTS), "wandb_project")
    if c.has("hub_model_id"):
        rules.hub(c, "hub_model_id")
    names = {"wandb": "wandb_project", "mlflow": "mlflow_experiment_name", "trackio": "trackio_project_name"}
    for name in (name for backend, name in names.items() if backend in backends and c.has(name)):
        line = c.lines.get("runner.logger.project_name")
        if line is None or line.value == c.get(name):
            c.put("runner.logger.project_name", c.get(name), name)
        else:
            c.missing("runner.logger.project_name is one name for all loggers", name)


def _adapter(c: Conversion) -> None:
    kind = c.get("adapter")
    own = [name for name in TABLE if name.startswith(("lora_", "peft_"))]
    if kind not in ("lora", "qlora"):
        c.not_needed("there is no adapter", *own)
        if kind is not None:
            c.missing("adapters are LoRA and QLoRA: actor.model.is_lora", "adapter")
        switched = [name for name in ("load_in_4bit", "load_in_8bit") if is_on(c.get(name))]
        c.missing("four bits are for the frozen base of an adapter: actor.model.is_lora", *switched)
        return
    c.put("actor.model.is_lora", True, "adapter")
    if c.has("lora_model_dir"):
        c.put("actor.model.lora.load_from", c.path(c.get("lora_model_dir")), "lora_model_dir")
        c.not_needed("they are those of the adapter", *own)
    else:
        _new_adapter(c)
    if is_on(c.get("load_in_4bit")) or kind == "qlora":
        c.put("actor.model.lora.base_dtype", "nf4", "adapter", "load_in_4bit", comment="adapter: qlora, load_in_4bit")
    else:
        rules.frozen_base(c, "load_in_8bit" if is_on(c.get("load_in_8bit")) else "")


def _new_adapter(c: Conversion) -> None:
    c.put("actor.model.lora.r", c.get("lora_r", 8), "lora_r", comment=_origin(c, "lora_r"))
    c.put("actor.model.lora.alpha", c.get("lora_alpha", 8), "lora_alpha", comment=_origin(c, "lora_alpha"))
    c.put("actor.model.lora.dropout", c.get("lora_dropout", 0.0), "lora_dropout")
    for name in ("use_dora", "use_rslora"):
        c.put(f"actor.model.lora.{name}", is_on(c.get(f"peft_{name}")), f"peft_{name}")
    if c.has("peft_init_lora_weights"):
        c.put("actor.model.lora.init", c.get("peft_init_lora_weights"), "peft_init_lora_weights")
    for name in ("lora_rank_pattern", "lora_alpha_pattern", "peft_layers_to_transform", "peft_layers_pattern"):
        if c.has(name):
            c.put(f"actor.model.lora.{name.partition('_')[2]}", c.get(name), name)
    _targets(c, c.get("lora_target_modules"))
    for name in ("lora_target_parameters", "lora_modules_to_save"):
        if c.has(name):
            c.put(f"actor.model.lora.{name.removeprefix('lora_')}", [str(one) for one in listed(c.get(name))], name)


def _targets(c: Conversion, modules: object) -> None:
    key = "actor.model.lora.target_modules"
    if is_on(c.get("lora_target_linear")):
        c.put(key, "all-linear", "lora_target_linear")
        c.not_needed("lora_target_linear has all linear layers", "lora_target_modules")
    elif modules is not None:
        c.put(key, names(modules), "lora_target_modules")
    elif not c.has("lora_target_parameters"):
        c.put(key, ["q_proj", "v_proj"], comment="PEFT's default for most models; check yours")


def _tokens(c: Conversion) -> None:
    given = ["tokens", "special_tokens.additional_special_tokens"]
    if isinstance(c.get("tokens"), Mapping):
        remedy = "change the names of tokens in the tokenizer's files: actor.tokenizer.tokenizer_model"
        c.missing(remedy, given.pop(0))
    tokens = [token for name in given for token in listed(c.get(name))]
    if tokens:
        c.put("actor.tokenizer.new_tokens", tokens, *given)
    for name in ("bos_token", "eos_token", "unk_token"):
        if c.has(f"special_tokens.{name}"):
            remedy = "if it is not the tokenizer's own, change it in the tokenizer's files; the template ends a turn"
            c.missing(remedy, f"special_tokens.{name}")
    c.not_needed("rows are packed, not padded", "special_tokens.pad_token")
