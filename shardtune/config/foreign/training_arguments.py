"""The keys of transformers' TrainingArguments, which TRL and LLaMA-Factory have too."""

from __future__ import annotations

from shardtune.config.foreign import rules
from shardtune.config.foreign.conversion import Conversion, Kind
from shardtune.config.foreign.sharding import FSDP_CONFIG, sharding
from shardtune.config.foreign.table import By, Missing, NotNeeded, Table, To, each
from shardtune.config.foreign.values import as_number, clip, is_on, listed, number, optimizer, whole, whole_number

HUB = "shardtune push RUN OWNER/NAME publishes final/; --public and --revision are its options"
LAST_ROWS = "the rows after the last whole step of an epoch are a smaller step; data.transform may drop rows"
SPLIT_BATCHES = "actor.global_batch_size: the processes share a batch, so it is not times their number"
TRAINING_ARGUMENTS: Table = {
    "output_dir": By("runner.logger.log_path: FOLDER and runner.logger.experiment_name: NAME"),
    "run_name": By("runner.logger.experiment_name: NAME"),
    "per_device_train_batch_size": By("actor.micro_batch_size: N"),
    "gradient_accumulation_steps": By("actor.global_batch_size: N (rows of a step over all ranks)"),
    "per_device_eval_batch_size": To("actor.eval_micro_batch_size", whole_number("a number of rows")),
    "num_train_epochs": By("runner.max_epochs: N"),
    "max_steps": By("runner.max_steps: N"),
    "learning_rate": To("actor.optim.lr", as_number, default=5e-5),
    "lr_scheduler_type": By("actor.optim.lr_scheduler: cosine (or constant, linear, wsd)"),
    "lr_scheduler_kwargs": By("actor.optim.min_lr: RATE, or actor.optim.decay_ratio: SHARE"),
    "warmup_steps": By("actor.optim.lr_warmup_steps: N"),
    "warmup_ratio": By("actor.optim.lr_warmup_steps_ratio: SHARE"),
    "optim": By("actor.optim.name: AdamW", optimizer),
    "optim_args": By("actor.optim.args: {NAME: VALUE}"),
    "weight_decay": To("actor.optim.weight_decay", as_number, default=0.0),
    "adam_beta1": To("actor.optim.adam_beta1", as_number),
    "adam_beta2": To("actor.optim.adam_beta2", as_number),
    "adam_epsilon": To("actor.optim.adam_eps", as_number),
    "max_grad_norm": To("actor.optim.clip_grad", clip),
    "label_smoothing_factor": To("actor.label_smoothing", as_number),
    "average_tokens_across_devices": Missing("the loss is the mean over the trained tokens of a whole step", (True,)),
    "bf16": By("actor.model.precision: bf16"),
    "fp16": By("actor.model.precision: fp16"),
    "gradient_checkpointing": To("actor.model.gradient_checkpointing", is_on, note="changes no number"),
    "activation_checkpointing": To("actor.model.gradient_checkpointing", is_on, note="changes no number"),
    "torch_compile": To("actor.model.compile", is_on),
    "eval_strategy": By("runner.eval_interval: N (steps), or epoch"),
    "evaluation_strategy": By("runner.eval_interval: N (steps), or epoch"),
    "eval_steps": By("runner.eval_interval: N"),
    "eval_on_start": To("runner.eval_before_training", is_on),
    "save_strategy": By("runner.save_interval: N (steps), or epoch"),
    "save_steps": By("runner.save_interval: N"),
    "save_total_limit": By("runner.keep_last: N"),
    "logging_steps": By("runner.logger.log_interval: N"),
    "report_to": By("runner.logger.logger_backends: [jsonl, wandb]"),
    "project": To("runner.logger.project_name"),
    "metric_for_best_model": By("runner.best.monitor: eval/loss, and runner.early_stop.monitor"),
    "greater_is_better": By("runner.best.mode: max (or min), and runner.early_stop.mode"),
    "load_best_model_at_end": By("runner.best.monitor: eval/loss, which keeps checkpoints/best"),
    "resume_from_checkpoint": Missing(
        "the same command continues a run of shardtune; checkpoints of other trainers are not read: name the saved "
        "model as actor.model.model_path",
        (None, False, True),
    ),
    "seed": To("runner.seed"),
    "data_seed": Missing("one seed is for everything: runner.seed"),
    "full_determinism": To("runner.deterministic", is_on),
    "use_cpu": To("runner.device", lambda value: "cpu" if is_on(value) else "auto"),
    "dataloader_num_workers": NotNeeded("rows are encoded once, into a cache; data.num_workers builds it"),
    "dataloader_drop_last": Missing(LAST_ROWS),
    "accelerator_config.split_batches": Missing(SPLIT_BATCHES),
    "train_sampling_strategy": By("data.shuffle: false for the order of the files"),
    "group_by_length": NotNeeded("rows are packed, so their lengths need not be alike"),
    "ddp_timeout": To("runner.collective_timeout", whole_number("a number of seconds")),
    "neftune_noise_alpha": To("actor.neftune_alpha", as_number, note="a row's length is its own, without padding"),
    "optim_target_modules": Missing(
        "actor.optim.name: package.module:Class is any optimizer; actor.optim.groups sets rates by name"
    ),
    "auto_find_batch_size": Missing("a run that does not fit names what would: lower actor.micro_batch_size"),
    "eval_delay": Missing("evaluations begin at once; leave it out", (None, False, 0)),
    "save_only_model": Missing("a checkpoint always holds all that continues the run; final/ is the model alone"),
    **each("push_to_hub hub_model_id push_to_hub_model_id", By("runner.push_to_hub: OWNER/NAME")),
    **each("hub_revision hub_private_repo hub_token", Missing(HUB)),
    "tf32": Missing("products in fp32 are exact; actor.model.precision: bf16 is the fast way"),
    "torch_empty_cache_steps": Missing("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"),
    "prediction_loss_only": NotNeeded("an evaluation reports the loss; eval.metrics adds yours"),
    "include_for_metrics": Missing("eval.metrics names functions of outputs and targets", (None, False, ())),
    "length_column_name": NotNeeded("lengths are in the cache"),
    "debug": Missing("runner.profile_steps, and the watchdog, runner.watchdog_seconds"),
    **FSDP_CONFIG,
    "parallelism_config": Missing("actor.parallel has tensor, sequence and expert"),
    **each(
        "use_liger_kernel liger_kernel_config use_cache",
        NotNeeded("the loss is computed in parts, without all logits at once; the numbers do not depend on it"),
    ),
    **each(
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs torch_compile_backend torch_compile_mode",
        NotNeeded("the same numbers either way"),
    ),
    **each(
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend local_rank "
        "accelerator_config dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_multiprocessing_context dataloader_in_order save_on_each_node save_safetensors",
        NotNeeded("shardtune does this itself"),
    ),
    "overwrite_output_dir": NotNeeded("the same command continues a run; runner.overwrite=true begins anew"),
    **each(
        "eval_accumulation_steps eval_do_concat_batches eval_use_gather_object batch_eval_metrics bf16_full_eval "
        "fp16_full_eval",
        NotNeeded("an evaluation is summed batch by batch, in the precision of training"),
    ),
    **each(
        "logging_strategy logging_first_step logging_nan_inf_filter logging_dir log_level log_level_replica "
        "log_on_each_node disable_tqdm include_num_input_tokens_seen include_tokens_per_second skip_memory_metrics",
        NotNeeded("rank 0 logs every runner.logger.log_interval steps, with tokens and memory"),
    ),
    **each(
        "do_train do_eval do_predict predict_with_generate remove_unused_columns label_names ignore_data_skip "
        "restore_callback_states_from_checkpoint enable_jit_checkpoint hub_strategy "
        "hub_always_push trackio_space_id trackio_bucket_id trackio_static_space_id",
        NotNeeded("it does not arise here"),
    ),
}


def training_arguments(
    c: Conversion,
    *,
    logging: int,
    rate: float,
    precision: str,
    schedule: str = "linear",
    evaluation: str = "no",
    evaluation_steps: int | None = None,
) -> None:
    """Read the keys that mean something together.

    Args:
        c: the conversion.
        logging: the default of `logging_steps`.
        rate: the default of `learning_rate`.
        precision: the dtype of the computation where neither `bf16` nor `fp16` is set.
        schedule, evaluation, evaluation_steps: the defaults of `lr_scheduler_type`, `eval_strategy` and `eval_steps`;
            steps are those of `logging_steps` unless they are given.
    """
    total = rules.total_steps(c, "max_steps")
    rules.length_of_run(c, "num_train_epochs", "max_steps", default=3)
    peak = number(c.get("learning_rate")) or rate
    has_warmup = rules.schedule(c, "lr_scheduler_type", "lr_scheduler_kwargs", default=schedule, total=total, rate=peak)
    if has_warmup:
        rules.warmup(c, "warmup_steps", "warmup_ratio", total)
    else:
        c.not_needed("transformers' constant has no warm-up; constant_with_warmup has", "warmup_steps", "warmup_ratio")
    rules.choose_optimizer(c, "optim", "optim_args")
    _precision(c, precision)
    sharding(c)
    every = number(c.get("logging_steps", logging))
    every_steps = int(every) if every and every >= 1 else None
    _intervals(c, total, evaluation, every_steps if evaluation_steps is None else evaluation_steps)
    rules.run_directory(c, "output_dir", "run_name")
    _logging(c, logging, total)
    if c.has("report_to"):
        rules.loggers(c, "report_to", listed(c.get("report_to")))
    if is_on(c.get("push_to_hub")):
        rules.hub(c, "hub_model_id", "push_to_hub")
    else:
        c.not_needed("push_to_hub is off", "push_to_hub", "hub_model_id")
    best_model(c)
    kind = str(c.get("train_sampling_strategy", "random"))
    c.put("data.shuffle", kind != "sequential", "train_sampling_strategy")


def _precision(c: Conversion, neither: str) -> None:
    if is_on(c.get("bf16")) or is_on(c.get("fp16")):
        name = "bf16" if is_on(c.get("bf16")) else "fp16"
        c.put("actor.model.precision", name, name)
        c.not_needed(f"{name} is set", "fp16" if name == "bf16" else "bf16")
        return
    is_off = "bf16" in c.tree and c.get("bf16") is not None
    kind = "fp32" if is_off and c.trainer == "TRL" else neither
    comment = "bf16: false" if is_off else f"{c.trainer}'s default"
    if c.mixed_precision and (is_off or c.trainer != "TRL"):
        kind, comment = c.mixed_precision, "mixed_precision of the launcher"
    c.put("actor.model.precision", kind, "bf16", "fp16", comment=comment)


def _intervals(c: Conversion, total: int | None, evaluation: str, every: int | None) -> None:
    strategy = "evaluation_strategy" if c.has("evaluation_strategy") else "eval_strategy"
    rules.interval(
        c,
        "runner.eval_interval",
        strategy,
        "eval_steps",
        default=evaluation,
        every=every,
        total=total,
    )
    rules.interval(c, "runner.save_interval", "save_strategy", "save_steps", default="steps", every=500, total=total)
    _kept(c)


def _kept(c: Conversion) -> None:
    limit = whole(c.get("save_total_limit"))
    if limit is not None and limit > 0:
        c.put("runner.keep_last", limit, "save_total_limit")
        return
    if "runner.save_interval" in c.lines:
        c.notes.append(f"{c.trainer} keeps every checkpoint unless save_total_limit is given; here runner.keep_last, 3")
    c.record("save_total_limit", Kind.DEFAULT, "runner.keep_last: 3")


def _logging(c: Conversion, default: int, total: int | None) -> None:
    every = number(c.get("logging_steps", default)) or 1
    if every < 1:
        every = max(1, round(every * total)) if total else 1
    comment = "logging_steps" if c.has("logging_steps") else f"{c.trainer}'s default (logging_steps)"
    c.put("runner.logger.log_interval", int(every), "logging_steps", comment=comment)


def best_model(c: Conversion) -> None:
    """Write the metric by which the best checkpoint is kept."""
    if not is_on(c.get("load_best_model_at_end")):
        c.record("load_best_model_at_end", Kind.DEFAULT, "final/ is the last model")
        c.not_needed("load_best_model_at_end is off", "metric_for_best_model", "greater_is_better")
        return
    metric = _metric(c)
    comment = "checkpoints/best; final/ is the last model"
    c.put("runner.best.monitor", f"eval/{metric}", "load_best_model_at_end", "metric_for_best_model", comment=comment)
    c.notes.append(
        "load_best_model_at_end: final/ is the last model; shardtune export RUN DIR --checkpoint best writes the best, "
        "and generate, eval and predict take --checkpoint best"
    )
    if c.get("greater_is_better") is not None:
        c.put("runner.best.mode", "max" if is_on(c.get("greater_is_better")) else "min", "greater_is_better")
    _note_metric(c, metric)


OURS = ("loss", "token_accuracy")
"""Metrics that every evaluation has."""


def _metric(c: Conversion) -> str:
    """The metric by which models are compared, by our name after `eval/`."""
    given = str(c.get("metric_for_best_model", "loss")).removeprefix("eval_").removeprefix("eval/")
    return "token_accuracy" if given == "mean_token_accuracy" else given


def _note_metric(c: Conversion, metric: str) -> None:
    note = f"the metric eval/{metric} has to exist: eval.metrics names the function that computes it"
    if metric not in OURS and note not in c.notes:
        c.notes.append(note)


def early_stop_metric(c: Conversion) -> None:
    """Write the metric that ends a run early, which transformers' callback reads of `metric_for_best_model`."""
    metric = _metric(c)
    c.put("runner.early_stop.monitor", f"eval/{metric}", "metric_for_best_model")
    if c.get("greater_is_better") is not None:
        c.put("runner.early_stop.mode", "max" if is_on(c.get("greater_is_better")) else "min", "greater_is_better")
    _note_metric(c, metric)
