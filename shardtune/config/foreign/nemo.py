"""NeMo Automodel: the keys of its fine-tuning recipes, whose parts are named by `_target_`."""

from __future__ import annotations

import re

from shardtune.config.foreign import nemo_data, rules
from shardtune.config.foreign.conversion import Conversion, Kind
from shardtune.config.foreign.rows import EVAL
from shardtune.config.foreign.table import By, Missing, NotNeeded, Table, To, each
from shardtune.config.foreign.values import PRECISIONS, as_number, clip, is_on, listed, number, whole, whole_number
from shardtune.config.parameter_patterns import PARTS
from shardtune.errors import ConfigError

NAME = "NeMo Automodel"
KNOWN = re.compile(
    r"(Finetune|KnowledgeDistillation|Pretrain)Recipe(For(NextTokenPrediction|VLM|SequenceClassification))"
)
"""Its recipes that are converted: one model, or one with a teacher, trained by the targets of rows."""
RANKS = whole_number("a number of ranks")
ROWS, EACH = "step_scheduler.global_batch_size", "step_scheduler.local_batch_size"
TABLE: Table = {
    "recipe": By("nothing: the training is supervised fine-tuning"),
    ROWS: By("actor.global_batch_size: N (rows of a step over all ranks)"),
    EACH: By("actor.micro_batch_size: N"),
    "step_scheduler.num_epochs": By("runner.max_epochs: N"),
    "step_scheduler.max_steps": To("runner.max_steps", lambda value: whole(value) or -1),
    "step_scheduler.ckpt_every_steps": By("runner.save_interval: N"),
    "step_scheduler.save_checkpoint_every_epoch": By('runner.save_interval: N, or "epoch"'),
    "step_scheduler.val_every_steps": By("runner.eval_interval: N"),
    "step_scheduler.log_remote_every_steps": To("runner.logger.log_interval", whole_number("a number of steps")),
    "step_scheduler.start_step": Missing("the same command continues a run of shardtune", (None, 0)),
    "step_scheduler.start_epoch": Missing("the same command continues a run of shardtune", (None, 0)),
    "step_scheduler": NotNeeded("it does not arise here, or changes no number"),
    "dist_env.timeout_minutes": NotNeeded("how long ranks wait for one another is runner.collective_timeout"),
    "dist_env": NotNeeded("the backend is NCCL on GPUs, gloo on CPUs"),
    "seed": To("runner.seed"),
    "rng.seed": By("runner.seed: N"),
    "rng": NotNeeded("runner.seed decides every draw, of each rank too"),
    "model.attn_implementation": By("actor.model.attn_implementation: sdpa"),
    "model.trust_remote_code": To("actor.model.trust_remote_code", is_on),
    "model.use_liger_kernel": NotNeeded("the numbers do not depend on it; actor.model.kernels.source: liger has them"),
    "model.backend": NotNeeded("which kernels compute changes no number"),
    **each(
        "model.text_config.use_cache model.use_cache model.use_sdpa_patching model.force_hf model.output_hidden_states "
        "model.load_base_model model.cache_dir model.local_files_only model.low_cpu_mem_usage",
        NotNeeded("it does not arise here, or changes no number"),
    ),
    "model": Missing("actor.model.config_overrides: {NAME: VALUE} changes the model's configuration"),
    "freeze_config.freeze_vision_tower": By("actor.model.freeze: [vision_tower]"),
    "freeze_config.freeze_language_model": By("actor.model.freeze: [language_model]"),
    "freeze_config.freeze_audio_tower": Missing("actor.model.freeze: [audio_tower] where the model has one"),
    "freeze_config.freeze_embeddings": Missing("actor.model.freeze: [embed_tokens]; its newer versions do not read it"),
    "freeze_config": Missing("actor.model.freeze: names or patterns of the parameters that are not trained"),
    "processor": Missing("the processor is that of actor.model.model_path; it is set in the model's own files"),
    **each(
        "processor._target_ processor.pretrained_model_name_or_path processor.trust_remote_code processor.padding_side",
        NotNeeded("the processor is that of actor.model.model_path"),
    ),
    "tokenizer": By("actor.tokenizer.tokenizer_model: FOLDER or OWNER/NAME"),
    "peft": By("actor.model.is_lora: true"),
    "quantization": By("actor.model.lora.base_dtype: nf4"),
    **each(
        "separate_meshes teacher_distributed offload_teacher_model",
        NotNeeded("the teacher has the ranks of the model, and is sharded as it is"),
    ),
    "autopipeline": Missing("there is no pipeline: actor.parallel has tensor, sequence and expert"),
    "embedding_row_repair": Missing("weights are trained as the model's directory has them"),
    "longalign": Missing("every target counts once: data.on_too_long decides about long rows"),
    "qat": Missing("no training for quantisation; QLoRA is actor.model.lora.base_dtype: nf4", (None, False)),
    "distributed.strategy": By("nothing: models are sharded with FSDP2; actor.training_backend: ddp for whole copies"),
    "distributed._target_": By("nothing: models are sharded with FSDP2; actor.training_backend: ddp for whole copies"),
    "distributed.dp_size": NotNeeded("the ranks that are left divide the rows"),
    "distributed.dp_replicate_size": By("actor.parallel.data_replicate: N"),
    "distributed.tp_size": To("actor.parallel.tensor", RANKS),
    "distributed.cp_size": To("actor.parallel.sequence", RANKS),
    "distributed.ep_size": To("actor.parallel.expert", RANKS),
    "distributed.pp_size": Missing("there is no pipeline: actor.parallel has tensor, sequence and expert", (None, 1)),
    "distributed.activation_checkpointing": By("actor.model.gradient_checkpointing: true (or selective)"),
    "distributed.reshard_after_forward": To("actor.fsdp_config.reshard_after_forward", is_on),
    "distributed.offload_policy": By("actor.fsdp_config.cpu_offload: true"),
    "distributed.mp_policy": NotNeeded("weights are fp32, the computation is in actor.model.precision"),
    "distributed": NotNeeded("the numbers do not depend on it"),
    "parallelizer": NotNeeded("models are sharded as they declare"),
    "compile.enabled": To("actor.model.compile", is_on),
    "compile": NotNeeded("the same numbers either way"),
    "fp8": By("actor.model.fp8.scaling: tensorwise (or rowwise, rowwise_with_gw_hp)"),
    "neftune": By("actor.neftune_alpha: N"),
    "loss_fn": By("nothing: the loss of language models, or actor.loss: FILE.py:FUNCTION"),
    "teacher_model": By("actor.teacher.model_path: FOLDER or OWNER/NAME"),
    "kd_ratio": By("actor.teacher.ce_share: SHARE"),
    "kd_loss_fn": By("actor.teacher.temperature: T"),
    "optimizer": By("actor.optim.name: AdamW"),
    "lr_scheduler": By("actor.optim.lr_scheduler: cosine (or constant, linear, wsd)"),
    "clip_grad_norm.max_norm": To("actor.optim.clip_grad", clip),
    "checkpoint.enabled": By("runner.save_interval: -1"),
    "checkpoint.checkpoint_dir": By("runner.logger.log_path: FOLDER and runner.logger.experiment_name: NAME"),
    "checkpoint.is_async": To("runner.async_save", is_on),
    "checkpoint.max_recent_checkpoints": To("runner.keep_last", whole_number("a number of checkpoints")),
    "checkpoint.restore_from": Missing("the same command continues a run; checkpoints of others are not read"),
    "checkpoint.best_metric_key": Missing("runner.best.monitor: eval/loss", (None, "default")),
    "checkpoint": NotNeeded("checkpoints continue a run on any ranks; final/ has the model as safetensors"),
    "dataset": By("data.train_data_paths: FILE or OWNER/NAME"),
    "validation_dataset": By("data.eval_data_paths: FILE or OWNER/NAME"),
    "packed_sequence": By("nothing: rows are always packed, without attention between them"),
    "dataloader.shuffle": By("data.shuffle: true (or false)"),
    "dataloader.collate_fn.max_length": By("data.max_length: N"),
    "dataloader.group_by_length": NotNeeded("rows are packed, so their lengths need not be alike"),
    "dataloader.drop_last": NotNeeded("the rows after the last whole step of an epoch are a smaller step"),
    "dataloader": NotNeeded("rows are encoded once, into a cache; data.num_workers builds it"),
    "validation_dataloader.batch_size": To("actor.eval_micro_batch_size", whole_number("a number of rows")),
    "validation_dataloader": NotNeeded("every row of an evaluation set is counted once"),
    "wandb": By("runner.logger.logger_backends: [jsonl, wandb]"),
    "mlflow": By("runner.logger.logger_backends: [jsonl, mlflow]"),
    "comet": Missing("runner.logger.logger_backends has what there is, or a class of yours: package.module:Class"),
    "tool_call_eval": Missing("eval.metrics: FILE.py:FUNCTION, or eval.generate: true with eval.match"),
    "mtp": Missing("further heads are trained by an adapter of yours: docs/add-a-model.md"),
    **each(
        "ci benchmark nvtx mfu moe_metrics prewarm autotune sdpa_method loss_average_window distributed_config",
        NotNeeded("it does not arise here, or changes no number"),
    ),
}


def convert(c: Conversion) -> None:
    """Read a recipe of NeMo Automodel.

    Raises:
        ConfigError: it trains something else than one model by the targets of rows.
    """
    _refuse_others(c)
    packed = nemo_data.packed_size(c)
    nemo_data.convert(c, packed)
    _batch(c, packed)
    total = _steps(c)
    rules.component_optimizer(c, "_target_", decays_all=not c.has("peft"))
    if not c.has("clip_grad_norm.max_norm"):
        c.put("actor.optim.clip_grad", 1.0, comment=f"{NAME}'s default (clip_grad_norm.max_norm)")
    _schedule(c, total)
    _model(c)
    _peft(c)
    _frozen(c)
    _layout(c)
    _teacher(c)
    _rest(c)


def _refuse_others(c: Conversion) -> None:
    recipe = c.get("recipe._target_", c.get("recipe"))
    if recipe is None or KNOWN.search(str(recipe)):
        c.not_needed("the targets of rows train one model, as here", *(n for n in c.given if n.startswith("recipe")))
        return
    is_retrieval = "Encoder" in str(recipe)
    raise ConfigError(
        f"recipe: {recipe} is no supervised fine-tuning of one model on the targets of its rows",
        where="recipe",
        remedy="write the recipe by docs/tasks.md: model.model_type: embedding or reranker"
        if is_retrieval
        else f"keep {NAME} for it",
    )


def _batch(c: Conversion, packed: int | None) -> None:
    """The rows of a step over all ranks, which its key has, and those of a forward pass."""
    rows, each_rank = whole(c.get(ROWS)) or 32, whole(c.get(EACH)) or 1
    if packed is None:
        c.put("actor.micro_batch_size", each_rank, EACH, comment=rules.origin(c, EACH), always=True)
        c.put("actor.global_batch_size", rows, ROWS, comment=rules.origin(c, ROWS), always=True)
    else:
        rules.packed_batch(c, each_rank, rows, packed, EACH, (ROWS, *nemo_data.PACKING), f"{rows} of a step")


def _steps(c: Conversion) -> int | None:
    """The length of the run and its intervals; returns the number of steps where it is known."""
    epochs, limit = whole(c.get("step_scheduler.num_epochs")) or 10, whole(c.get("step_scheduler.max_steps"))
    name = "step_scheduler.num_epochs"
    c.put("runner.max_epochs", epochs, name, comment=rules.origin(c, name))
    saves, every = is_on(c.get("checkpoint.enabled", True)), "step_scheduler.ckpt_every_steps"
    if saves:
        c.put("runner.save_interval", whole(c.get(every)) or 100, every, comment=rules.origin(c, every))
        at_ends = "step_scheduler.save_checkpoint_every_epoch"
        if is_on(c.get(at_ends, True)):
            c.notes.append(f"{NAME} saves at the end of every epoch, too; runner.save_interval: epoch does that alone")
        c.not_needed("runner.save_interval is in steps", at_ends)
        c.record("checkpoint.enabled", Kind.DEFAULT, "checkpoints are saved")
    else:
        c.put("runner.save_interval", -1, "checkpoint.enabled", comment="checkpoint.enabled: false")
        c.not_needed("nothing is saved on the way", every, "step_scheduler.save_checkpoint_every_epoch")
    name = "step_scheduler.val_every_steps"
    if EVAL in c.lines:
        c.put("runner.eval_interval", whole(c.get(name)) or -1, name, comment=rules.origin(c, name))
    elif nemo_data.validation_sets(c):
        c.missing("runner.eval_interval: N, once data.eval_data_paths is there", name)
    else:
        c.not_needed("there is no validation_dataset", name)
    return limit


def _schedule(c: Conversion, total: int | None) -> None:
    """The schedule, whose warm-up begins at a tenth of the rate and which falls to a hundredth by default."""
    if not c.has("lr_scheduler"):
        c.put("actor.optim.lr_scheduler", "constant", comment=f"{NAME}'s default: no lr_scheduler")
        return
    name = "lr_scheduler.lr_decay_style"
    style = str(c.get(name, "cosine"))
    kinds = {"cosine": "cosine", "linear": "linear", "constant": "constant", "WSD": "wsd"}
    if style in kinds:
        c.put("actor.optim.lr_scheduler", kinds[style], name, comment=rules.origin(c, name))
    else:
        c.missing("constant, linear, cosine and wsd are the schedules here; cosine is what the recipe has", name)
    peak = number(c.get("lr_scheduler.max_lr", c.get("optimizer.lr", 1e-3))) or 0.0
    if c.has("lr_scheduler.max_lr"):
        c.put("actor.optim.lr", peak, "lr_scheduler.max_lr", comment="lr_scheduler.max_lr")
    if style != "constant":
        name = "lr_scheduler.min_lr"
        least = as_number(c.get(name, peak / 100))
        c.put(
            "actor.optim.min_lr", least, name, comment=name if c.has(name) else "its default: a hundredth of the rate"
        )
    c.not_needed("the rate is constant", "lr_scheduler.min_lr") if style == "constant" else None
    _warm_up(c, total, peak)
    _decay_steps(c, style, total)
    steady = [f"lr_scheduler.{key}" for key in ("start_wd", "end_wd", "wd_incr_steps", "wd_incr_style")]
    c.missing("the weight decay is constant: actor.optim.weight_decay", *steady[:3])
    if str(c.get(steady[3], "constant")) == "constant":
        c.not_needed("the weight decay is constant", steady[3])
    c.not_needed("a run continues with its own schedule", *(n for n in c.given if n.endswith("_opt_param_scheduler")))


def _warm_up(c: Conversion, total: int | None, peak: float) -> None:
    name, first = "lr_scheduler.lr_warmup_steps", number(c.get("lr_scheduler.init_lr", peak / 10)) or 0.0
    steps = whole(c.get(name))
    if steps is None and total is not None:
        steps = min(1000, total // 10)
    if steps is None:
        c.put(rules.RATIO, 0.1, comment="its default: a tenth of the steps, at most 1,000")
    else:
        origin = name if c.has(name) else "its default: a tenth of max_steps, at most 1,000"
        c.put(rules.WARMUP, steps, name, comment=origin)
    if steps == 0:
        c.not_needed("there is no warm-up", "lr_scheduler.init_lr")
    elif first == 0:
        c.put(rules.FROM_ZERO, True, "lr_scheduler.init_lr", comment=rules.FIRST_STEP)
    else:
        c.missing("the warm-up begins at 0 here", "lr_scheduler.init_lr")
        c.notes.append(f"the warm-up of {NAME} begins at a rate of {first:g}, here at that of its first step")


def _decay_steps(c: Conversion, style: str, total: int | None) -> None:
    name, fall = "lr_scheduler.lr_decay_steps", "lr_scheduler.wsd_decay_steps"
    if whole(c.get(name)) == total and total is not None:
        c.not_needed("it is the number of steps", name)
    else:
        c.missing("the rate falls until the last step: runner.max_steps", name)
    falls = whole(c.get(fall))
    if style != "WSD":
        c.not_needed("it is for WSD", fall, "lr_scheduler.lr_wsd_decay_style")
    elif falls is not None and total is not None:
        c.put("actor.optim.decay_ratio", falls / total, fall, comment=f"{fall}: {falls} of {total} steps")
    else:
        c.missing("actor.optim.decay_ratio: the share of all steps in which the rate falls", fall)
    if style == "WSD" and str(c.get("lr_scheduler.lr_wsd_decay_style")) != "linear":
        c.missing("wsd falls linearly", "lr_scheduler.lr_wsd_decay_style")
    elif style == "WSD":
        c.not_needed("wsd falls linearly", "lr_scheduler.lr_wsd_decay_style")


def _dtype(c: Conversion, section: str = "model") -> str:
    given = str(c.get(f"{section}.torch_dtype", c.get(f"{section}.dtype", "bf16")))
    return PRECISIONS.get(given.removeprefix("torch."), "bf16")


def _model(c: Conversion) -> None:
    kind, _, how = str(c.get("model._target_", "")).rpartition(".")
    _named(c, "model", "actor.model.model_path")
    c.not_needed("the model is built from its own configuration", "model._target_")
    if how == "from_config":
        c.put("actor.model.from_scratch", True, "model._target_", comment="model._target_: from_config")
    if "ImageTextToText" in kind:
        c.put("actor.model.model_type", "vision_language", "model._target_", comment="model._target_")
    elif "SequenceClassification" in kind:
        c.put("actor.model.model_type", "sequence_classifier", "model._target_", comment="model._target_")
        c.not_needed("labels are those of the rows", "model.num_labels")
    name = "model.torch_dtype" if c.has("model.torch_dtype") else "model.dtype"
    c.put("actor.model.precision", _dtype(c), name)
    if str(c.get(name, "bf16")).removeprefix("torch.") not in (*PRECISIONS, "auto"):
        c.missing("actor.model.precision is bf16, fp16, fp32 or fp64; bf16 is written", name)
    if _dtype(c) == "bf16" and not c.has("peft"):
        c.notes.append(
            f"{NAME} trains weights in bf16; here they and the optimizer's states are fp32, computed with in bf16"
        )
    attention = "model.attn_implementation"
    if str(c.get(attention)) in ("eager", "sdpa", "flash_attention_2", "flash_attention_3"):
        c.put("actor.model.attn_implementation", c.get(attention), attention)
    else:
        c.not_needed("attention is computed by the fastest exact way there is here", attention)
    for section in ("tokenizer", "dataset.tokenizer"):
        _tokenizer(c, section)


def _named(c: Conversion, section: str, ours: str) -> None:
    """The model that a section names, by itself or in its configuration."""
    names = ("pretrained_model_name_or_path", "config.pretrained_model_name_or_path", "config.name_or_path", "config")
    name = next((f"{section}.{one}" for one in names if isinstance(c.get(f"{section}.{one}"), str)), None)
    if name is not None:
        c.put(ours, c.path(c.get(name)), name)
    others = [f"{section}.{one}" for one in (*names, "config._target_", "config.trust_remote_code")]
    why = "the model is built from its own configuration"
    c.not_needed(why, *(one for one in others[:-3] + others[-2:] if one != name))


def _tokenizer(c: Conversion, section: str) -> None:
    name = f"{section}.pretrained_model_name_or_path"
    model = c.lines.get("actor.model.model_path")
    if c.has(name) and (model is None or c.path(c.get(name)) != model.value):
        c.put("actor.tokenizer.tokenizer_model", c.path(c.get(name)), name)
    c.not_needed("the tokenizer is that of actor.model.model_path", *(n for n in c.given if _left(c, n, section)))


def _left(c: Conversion, name: str, section: str) -> bool:
    return name.startswith(f"{section}.") and name not in c.outcomes


def _peft(c: Conversion) -> None:
    """LoRA by its `PeftConfig`."""
    if not c.has("peft"):
        c.not_needed(
            "four bits are for the frozen base of an adapter", *(n for n in c.given if _left(c, n, "quantization"))
        )
        return
    c.put("actor.model.is_lora", True, "peft._target_", comment="peft")
    for name, ours, default in (("dim", "r", 8), ("alpha", "alpha", 32), ("dropout", "dropout", 0.0)):
        key = f"peft.{name}"
        c.put(f"actor.model.lora.{ours}", as_number(c.get(key, default)), key, comment=rules.origin(c, key))
    c.put("actor.model.lora.use_dora", is_on(c.get("peft.use_dora")), "peft.use_dora")
    if number(c.get("peft.dropout", 0)) and c.get("peft.dropout_position", "post") == "post":
        c.notes.append(f"{NAME} drops out what the adapter gives, here its inputs are dropped out, as in PEFT")
    c.notes.append(
        "A of an adapter begins otherwise (peft.lora_A_init: xavier there, PEFT's own draws here); B is 0 in both"
    )
    _targets(c)
    four = is_on(c.get("quantization.load_in_4bit"))
    base = "nf4" if four else "bf16" if _dtype(c) == "bf16" else "auto"
    c.put("actor.model.lora.base_dtype", base, "quantization.load_in_4bit", comment="the frozen weights")
    if is_on(c.get("quantization.load_in_8bit")):
        c.missing("there are no eight bits: actor.model.lora.base_dtype: nf4", "quantization.load_in_8bit")
    c.not_needed(
        "the scales of NF4 blocks are stored as docs/lora.md has it",
        *(n for n in c.given if _left(c, n, "quantization")),
    )
    c.missing("actor.model.lora.rank_pattern gives experts a rank of their own", "peft.moe_rank_scaling")
    c.not_needed("it changes no number, or is in the notes below", *(n for n in c.given if _left(c, n, "peft")))


def _targets(c: Conversion) -> None:
    """Which modules get LoRA: `*` of its patterns is any text of a module's full name."""
    every, names, without = "peft.match_all_linear", "peft.target_modules", "peft.exclude_modules"
    targets, excluded = [[str(one) for one in listed(c.get(key))] for key in (names, without)]
    if is_on(c.get(every)) or targets == ["*"] or (excluded and not targets):
        name = every if is_on(c.get(every)) else names if targets else without
        c.put("actor.model.lora.target_modules", "all-linear", name, comment=name)
        if not excluded:
            c.notes.append("all-linear leaves the head out, which match_all_linear does not: write lm_head into a list")
    else:
        c.put("actor.model.lora.target_modules", _modules(targets or ["*_proj"]), names, comment=rules.origin(c, names))
    if excluded:
        c.put("actor.model.lora.exclude_modules", _modules(excluded), without)
    c.not_needed("the modules are named", every)


def _modules(patterns: list[str]) -> object:
    """Names where patterns end in plain ones (`*q_proj`); otherwise one regular expression of full names."""
    plain = [pattern.removeprefix("*").removeprefix(".") for pattern in patterns]
    if all(re.fullmatch(r"[A-Za-z0-9]\w*", name) for name in plain):
        return plain
    return "|".join(".*".join(re.escape(part) for part in pattern.split("*")) for pattern in patterns)


def _frozen(c: Conversion) -> None:
    """Which parts of a model with images are not trained; the vision tower, unless it is told otherwise."""
    if not c.has("freeze_config"):
        return
    frozen = {"freeze_vision_tower": "vision_tower", "freeze_language_model": "language_model"}
    parts = [part for key, part in frozen.items() if is_on(c.get(f"freeze_config.{key}", part == "vision_tower"))]
    names = [f"freeze_config.{key}" for key, part in frozen.items() if part in parts]
    c.not_needed(
        "the part is trained, as it is here",
        *(f"freeze_config.{key}" for key, part in frozen.items() if part not in parts),
    )
    excluded = "actor.model.lora.exclude_modules"
    if not parts:
        return
    if not c.has("peft"):
        c.put("actor.model.freeze", parts, *names, comment="freeze_config")
    elif excluded in c.lines:
        c.not_needed("peft.exclude_modules names where there are no adapters", *names)
    else:
        c.put(excluded, f".*?({'|'.join(PARTS[part] for part in parts)}).*", *names, comment="freeze_config")


def _layout(c: Conversion) -> None:
    strategy = "distributed.strategy" if c.has("distributed.strategy") else "distributed._target_"
    if "ddp" in str(c.get(strategy, "fsdp2")).lower():
        c.put("actor.training_backend", "ddp", strategy)
    else:
        c.not_needed("models are sharded with FSDP2 anyway", strategy)
    copies = "distributed.dp_replicate_size"
    c.put("actor.parallel.data_replicate", whole(c.get(copies)) or 1, copies)
    recompute = "distributed.activation_checkpointing"
    value = "selective" if c.get(recompute) == "selective" else is_on(c.get(recompute))
    c.put("actor.model.gradient_checkpointing", value, recompute)
    offloads = c.has("distributed.offload_policy")
    c.put(
        "actor.fsdp_config.cpu_offload", offloads, *(n for n in c.given if n.startswith("distributed.offload_policy"))
    )
    if (whole(c.get("distributed.pp_size")) or 1) == 1:
        c.not_needed("there is no pipeline", *(n for n in c.given if n.startswith("distributed.pipeline.")))


def _teacher(c: Conversion) -> None:
    """The teacher of its recipe for distillation: (1 - kd_ratio) × cross-entropy + kd_ratio × KL(teacher || model)."""
    if not c.has("teacher_model"):
        return
    c.put("actor.loss", "distill", comment="teacher_model")
    _named(c, "teacher_model", "actor.teacher.model_path")
    name = "teacher_model.torch_dtype"
    if _dtype(c, "teacher_model") != _dtype(c):
        c.put("actor.teacher.precision", _dtype(c, "teacher_model"), name)
    c.not_needed(
        "the teacher is built from its own configuration", *(n for n in c.given if _left(c, n, "teacher_model"))
    )
    share = number(c.get("kd_ratio", 0.5))
    comment = "1 - kd_ratio" if c.has("kd_ratio") else f"{NAME}'s default (kd_ratio: 0.5)"
    c.put("actor.teacher.ce_share", None if share is None else 1 - share, "kd_ratio", comment=comment)
    temperature = "kd_loss_fn.temperature"
    c.put("actor.teacher.temperature", as_number(c.get(temperature, 1.0)), temperature)
    c.not_needed("KL(teacher || model) is the default here", *(n for n in c.given if _left(c, n, "kd_loss_fn")))


def _rest(c: Conversion) -> None:
    loss = str(c.get("loss_fn._target_", "MaskedCrossEntropy")).rpartition(".")[2]
    if "CrossEntropy" in loss:
        c.not_needed(
            "the mean over the targets of a step, computed in parts", *(n for n in c.given if n.startswith("loss_fn"))
        )
    else:
        c.missing("actor.loss: FILE.py:FUNCTION", "loss_fn")
    if not c.has("seed") and c.has("rng.seed"):
        c.put("runner.seed", whole(c.get("rng.seed")), "rng.seed")
    else:
        c.not_needed("seed replaces it", "rng.seed")
    if is_on(c.get("fp8.enabled")):
        c.put("actor.model.fp8.scaling", c.get("fp8.recipe_name", "tensorwise"), "fp8.enabled", "fp8.recipe_name")
        c.put("actor.model.fp8.emulate", is_on(c.get("fp8.emulate")), "fp8.emulate")
        others = [str(one) for one in listed(c.get("fp8.filter_fqns")) if one != "lm_head"]
        c.put(
            "actor.model.fp8.exclude", others, "fp8.filter_fqns", comment="fp8.filter_fqns; the head is left out anyway"
        )
    c.not_needed("the numbers do not depend on it", *(n for n in c.given if _left(c, n, "fp8")))
    if c.has("neftune"):
        name = "neftune.noise_alpha" if c.has("neftune.noise_alpha") else "neftune"
        c.put("actor.neftune_alpha", number(c.get(name)) or 5.0, name, comment="neftune")
    rules.run_directory(c, "checkpoint.checkpoint_dir", "")
    backends = [name for name in ("wandb", "mlflow") if c.has(name) and is_on(c.get(f"{name}.enable", True))]
    if backends:
        c.put("runner.logger.logger_backends", ["jsonl", *backends], *(f"{name}.enable" for name in backends))
        c.put(
            "runner.logger.project_name",
            c.get("wandb.project", c.get("mlflow.experiment_name", "shardtune")),
            "wandb.project",
        )
        c.missing("WANDB_ENTITY in the environment", "wandb.entity")
        c.not_needed(
            "the run has the name of its directory; variables of the logger's own set the others",
            *(n for name in backends for n in c.given if _left(c, n, name)),
        )
    for name in ("wandb", "mlflow"):
        c.not_needed("it is off", *(n for n in c.given if name not in backends and _left(c, n, name)))
