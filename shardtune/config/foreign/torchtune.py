"""torchtune: the keys of its fine-tuning recipes, whose parts are named by `_component_`."""

from __future__ import annotations

from shardtune.config.foreign import rules, torchtune_data
from shardtune.config.foreign.conversion import Conversion, Kind
from shardtune.config.foreign.table import By, Missing, NotNeeded, Table, To, each
from shardtune.config.foreign.values import PRECISIONS, as_number, clip, is_on, listed, number, optimizer, whole
from shardtune.errors import ConfigError

NAME = "torchtune"
LINEAR = {
    **{name: name for name in ("q_proj", "k_proj", "v_proj")},
    "output_proj": "o_proj",
    "mlp": "gate_proj up_proj down_proj",
    "output": "lm_head",
}
"""torchtune's names of linear layers, and those of the models of transformers."""
_CHANGED = "actor.model.config_overrides: {NAME: VALUE} changes it"
_MODEL = (
    *("model._component_", "model.lora_rank", "model.lora_alpha", "model.lora_dropout", "model.lora_attn_modules"),
    *("model.apply_lora_to_mlp", "model.apply_lora_to_output", "model.use_dora", "model.quantize_base"),
)
TABLE: Table = {
    "model": By("actor.model.model_path: OWNER/NAME"),
    "checkpointer": By("actor.model.model_path: FOLDER"),
    "tokenizer": By("actor.tokenizer.tokenizer_model: FOLDER"),
    "dataset": By("data.train_data_paths: FILE or OWNER/NAME"),
    "dataset_val": By("data.eval_data_paths: FILE or OWNER/NAME"),
    "datasets": Missing("data.train_data_paths: [FILE, {path: OWNER/NAME, split: SPLIT, weight: SHARE}]"),
    "run_val_every_n_steps": To("runner.eval_interval", whole),
    "batch_size_val": To("actor.eval_micro_batch_size", whole),
    "batch_size": By("actor.micro_batch_size: N"),
    "gradient_accumulation_steps": By("actor.global_batch_size: N (rows of a step over all ranks)"),
    "epochs": By("runner.max_epochs: N"),
    "max_steps_per_epoch": By("runner.max_steps: N"),
    "optimizer": By("actor.optim.name: AdamW", optimizer),
    "lr_scheduler": By("actor.optim.lr_scheduler: cosine"),
    "loss": By("nothing: the loss of language models, or actor.loss: FILE.py:FUNCTION"),
    "clip_grad_norm": To("actor.optim.clip_grad", clip),
    "seed": To("runner.seed"),
    "shuffle": To("data.shuffle", is_on),
    "dtype": By("actor.model.precision: bf16"),
    "device": By("runner.device: auto"),
    "output_dir": By("runner.logger.log_path: FOLDER and runner.logger.experiment_name: NAME"),
    "metric_logger": By("runner.logger.logger_backends: [jsonl, wandb]"),
    "log_every_n_steps": To("runner.logger.log_interval", lambda value: whole(value) or 1),
    "enable_activation_checkpointing": To("actor.model.gradient_checkpointing", is_on),
    "ac_mode": To("actor.model.gradient_checkpointing", lambda value: value == "full" or "selective"),
    "ac_option": NotNeeded("actor.model.gradient_checkpointing: selective keeps the results of matrix products"),
    "enable_activation_offloading": Missing("actor.model.gradient_checkpointing: true needs less memory, too"),
    "compile": To("actor.model.compile", is_on),
    "fsdp_cpu_offload": To("actor.fsdp_config.cpu_offload", is_on),
    "fsdp.cpu_offload": To("actor.fsdp_config.cpu_offload", is_on),
    "fsdp_reshard_after_forward": To("actor.fsdp_config.reshard_after_forward", is_on),
    "tensor_parallel_dim": To("actor.parallel.tensor", whole),
    "data_parallel_shard_dim": To("actor.parallel.data_shard", whole),
    "data_parallel_replicate_dim": To("actor.parallel.data_replicate", whole),
    "context_parallel_dim": To("actor.parallel.sequence", whole),
    "tensor_parallel_plan": NotNeeded("the plan is that of the model"),
    "enable_async_checkpointing": To("runner.async_save", is_on),
    "cudnn_deterministic_mode": To("runner.deterministic", is_on),
    "save_every_n_steps": To("runner.save_interval", whole),
    "keep_last_n_checkpoints": To("runner.keep_last", whole),
    "optimizer_in_bwd": Missing("the step follows the backward pass; actor.optim.state_dtype: int8 saves memory"),
    "quantizer": Missing("no training for quantisation; QLoRA is actor.model.lora.base_dtype: nf4"),
    "fake_quant_after_n_steps": Missing("no training for quantisation"),
    "resume_from_checkpoint": Missing("the same command continues a run; checkpoints of others are not read"),
    "profiler": NotNeeded("runner.profile_steps: [FIRST, LAST] profiles steps"),
    "enable_fp8_training": By("actor.model.fp8.scaling: tensorwise"),
    "fp8_recipe_name": By("actor.model.fp8.scaling: tensorwise (or rowwise, rowwise_with_gw_hp)"),
    "kd_loss": By("actor.teacher.divergence: forward_kl (or reverse_kl, jensen_shannon)"),
    "kd_ratio": By("actor.teacher.ce_share: SHARE"),
    "teacher_model": By("actor.teacher.model_path: FOLDER"),
    "teacher_checkpointer": By("actor.teacher.model_path: FOLDER"),
    **each(
        "log_peak_memory_stats log_level save_adapter_weights_only custom_sharded_layers memory_efficient_fsdp_wrap "
        "low_cpu_ram collate_fn dataloader profile_memory use_distributed_state_dict "
        "epochs_run resume_from_step loss_parallel dataset_streaming",
        NotNeeded("it does not arise here, or changes no number"),
    ),
}


def convert(c: Conversion) -> None:
    """Read a configuration of torchtune."""
    for other in ("dpo", "ppo", "grpo", "distillation"):
        if other in str(c.get("loss._component_", "")).lower() or (other == "ppo" and c.has("policy_model")):
            raise ConfigError(
                f"loss: {c.get('loss._component_')} is no supervised fine-tuning",
                where="loss",
                remedy="shardtune trains one model by the tokens of its rows; keep torchtune for others",
            )
    if not any(c.has(name) for name in ("optimizer", "dataset")):
        raise ConfigError(
            "a configuration without optimizer and dataset does not train",
            where=", ".join([*c.tree][:5]),
            remedy="shardtune generate, eval and export do what torchtune's recipes generate, eleuther_eval and "
            "quantize are for",
        )
    length = whole(c.get("tokenizer.max_seq_len"))
    packed = torchtune_data.is_packed(c)
    if length is None:
        c.put("data.max_length", 131072, comment="tokenizer.max_seq_len: null, no limit")
    else:
        c.put("data.max_length", length, "tokenizer.max_seq_len")
    rules.batch(
        c,
        "batch_size",
        "gradient_accumulation_steps",
        rows=2,
        packed=(length or 2048) if packed else None,
        shared=("tensor_parallel_dim", "context_parallel_dim"),
    )
    total = _length_of_run(c)
    is_lora = "lora" in str(c.get("model._component_"))
    rules.component_optimizer(c, "_component_", decays_all=not is_lora)
    if not c.has("clip_grad_norm"):
        c.put("actor.optim.clip_grad", None, "clip_grad_norm", comment="clip_grad_norm: null, torchtune's default")
    _schedule(c, total)
    _model(c)
    _teacher(c)
    torchtune_data.convert(c)
    _rest(c)


def _length_of_run(c: Conversion) -> int | None:
    epochs, limit = whole(c.get("epochs")) or 1, whole(c.get("max_steps_per_epoch"))
    c.put("runner.max_epochs", epochs, "epochs")
    if limit is None:
        c.record("max_steps_per_epoch", Kind.DEFAULT, "runner.max_steps: -1")
        c.notes.append(
            "torchtune leaves out the rows after the last whole step of an epoch; here they are a smaller step"
        )
        return None
    total = epochs * limit
    c.put(
        "runner.max_steps",
        total,
        "epochs",
        "max_steps_per_epoch",
        comment=f"epochs {epochs} × max_steps_per_epoch {limit}",
    )
    if epochs > 1:
        c.put("runner.max_epochs", -1, comment="as many as the steps take")
        c.notes.append("with max_steps_per_epoch torchtune begins an epoch anew after so many steps; here it goes on")
    return total


def _schedule(c: Conversion, total: int | None) -> None:
    name = str(c.get("lr_scheduler._component_", ""))
    if not name:
        c.put("actor.optim.lr_scheduler", "constant", comment="torchtune's default: no lr_scheduler")
        return
    steps = whole(c.get("lr_scheduler.num_warmup_steps")) or 0
    if name.endswith("get_cosine_schedule_with_warmup") and c.get("lr_scheduler.num_cycles", 0.5) == 0.5:
        c.record("lr_scheduler", Kind.DEFAULT, "actor.optim.lr_scheduler: cosine")
    else:
        c.missing(
            "constant, linear, cosine and wsd are the schedules here; cosine is what the recipe has", "lr_scheduler"
        )
    c.put(rules.WARMUP, steps, "lr_scheduler.num_warmup_steps")
    if steps:
        c.put(rules.FROM_ZERO, True, comment=rules.FIRST_STEP)
    if total is not None and steps > total:
        c.notes.append(f"the warm-up ({steps} steps) is longer than the run ({total})")


def _model(c: Conversion) -> None:
    builder = str(c.get("model._component_", "")).rpartition(".")[2]
    folder = c.get("checkpointer.checkpoint_dir")
    if folder is not None:
        c.put("actor.model.model_path", c.path(folder), "checkpointer.checkpoint_dir")
    c.not_needed("a directory for from_pretrained has its files, type and configuration", "checkpointer")
    if "Meta" in str(c.get("checkpointer._component_")) or "TuneCheckpointer" in str(c.get("checkpointer._component_")):
        c.missing("name a directory in the format of transformers: actor.model.model_path", "checkpointer._component_")
    if folder is not None:
        c.record("checkpointer.checkpoint_dir", Kind.TRANSLATED, f"actor.model.model_path: {c.path(folder)}")
    if c.has("checkpointer.adapter_checkpoint"):
        c.missing("actor.model.lora.load_from: a directory in PEFT's format", "checkpointer.adapter_checkpoint")
    c.not_needed(
        "the tokenizer is that of actor.model.model_path",
        *(n for n in c.given if n.startswith("tokenizer.") and n not in c.outcomes),
    )
    if c.has("tokenizer.prompt_template"):
        c.missing(
            "the tokenizer's own chat template is used; another is data.chat_template: FILE.jinja",
            "tokenizer.prompt_template",
        )
    if "vision" in builder:
        c.put("actor.model.model_type", "vision_language", "model._component_")
    c.not_needed("the model is built from its own configuration", "model._component_")
    parts = [name for name in c.given if name.startswith("model.") and name not in _MODEL]
    c.missing(f"the model is built from its own configuration; {_CHANGED}", *parts)
    trained = [f"model.{part}_trainable" for part in ("decoder", "encoder", "fusion")]
    c.missing("actor.model.freeze, or actor.model.lora.exclude_modules, names what is not trained", *trained)
    if "vision" in builder:
        c.notes.append(
            f"torchtune's {builder} trains the parts that decoder_trainable, encoder_trainable and fusion_trainable "
            "say, by default not the decoder; here everything is trained that actor.model.freeze does not name"
        )
    if builder.startswith(("lora_", "qlora_", "dora_")):
        _lora(c, builder)
    kind = _dtype(c)
    c.put("actor.model.precision", kind, "dtype")
    if str(c.get("dtype", "bf16")) not in PRECISIONS:
        c.missing("actor.model.precision is bf16, pure_bf16, fp16, fp32 or fp64; bf16 is written", "dtype")
    if kind == "bf16" and "actor.model.is_lora" not in c.lines:
        c.notes.append(
            "torchtune trains weights in bf16; here they and the optimizer's states are fp32, computed with in bf16; "
            "actor.model.precision: pure_bf16 and actor.optim.state_dtype: bf16 take as little memory as there"
        )


def _dtype(c: Conversion) -> str:
    return PRECISIONS.get(str(c.get("dtype", "bf16")), "bf16")


def _lora(c: Conversion, builder: str) -> None:
    c.put("actor.model.is_lora", True, "model._component_", comment=f"model: {builder}")
    c.record("model._component_", Kind.TRANSLATED, "actor.model.is_lora: true")
    for name, key, default in (("lora_rank", "r", 8), ("lora_alpha", "alpha", 16), ("lora_dropout", "dropout", 0.0)):
        comment = f"model.{name}" if c.has(f"model.{name}") else f"torchtune's default ({name})"
        c.put(f"actor.model.lora.{key}", c.get(f"model.{name}", default), f"model.{name}", comment=comment)
    c.put("actor.model.lora.use_dora", builder.startswith("dora_") or is_on(c.get("model.use_dora")), "model.use_dora")
    parts = [str(one) for one in listed(c.get("model.lora_attn_modules", ["q_proj", "v_proj"]))]
    parts += ["mlp"] if is_on(c.get("model.apply_lora_to_mlp")) else []
    parts += ["output"] if is_on(c.get("model.apply_lora_to_output")) else []
    modules = " ".join(LINEAR.get(part, part) for part in parts).split()
    sources = ("model.lora_attn_modules", "model.apply_lora_to_mlp", "model.apply_lora_to_output")
    c.put(
        "actor.model.lora.target_modules", modules, *sources, comment="lora_attn_modules, apply_lora_to_mlp, …_output"
    )
    if "phi" in builder:
        c.notes.append("transformers' Phi has qkv_proj and gate_up_proj in place of q_proj, …: see target_modules")
    is_nf4 = builder.startswith("qlora_") or is_on(c.get("model.quantize_base"))
    base = "nf4" if is_nf4 else "bf16" if _dtype(c) == "bf16" else "auto"
    c.put("actor.model.lora.base_dtype", base, "model.quantize_base", comment="the frozen weights")


DIVERGENCES = {"ForwardKL": "forward_kl", "ReverseKL": "reverse_kl"}


def _teacher(c: Conversion) -> None:
    """The teacher of its recipe for distillation, whose loss is (1 - kd_ratio) × cross-entropy + kd_ratio × kd_loss."""
    if is_on(c.get("enable_fp8_training")):
        recipe = c.get("fp8_recipe_name", "tensorwise")
        c.put("actor.model.fp8.scaling", recipe, "enable_fp8_training", "fp8_recipe_name")
    folder = c.get("teacher_checkpointer.checkpoint_dir")
    if folder is None:
        return
    apart = ("teacher_checkpointer.checkpoint_dir", "kd_loss._component_")
    inner = [name for name in c.given if name.startswith(("teacher_model.", "teacher_checkpointer.", "kd_loss."))]
    c.not_needed("the teacher is read from its directory, the loss computed in parts", *(set(inner) - {*apart}))
    c.put("actor.loss", "distill", comment="teacher_checkpointer")
    c.put("actor.teacher.model_path", c.path(folder), "teacher_checkpointer.checkpoint_dir")
    share = number(c.get("kd_ratio", 0.5))
    comment = "1 - kd_ratio" if c.has("kd_ratio") else "torchtune's default (kd_ratio: 0.5)"
    c.put("actor.teacher.ce_share", None if share is None else 1 - share, "kd_ratio", comment=comment)
    loss = str(c.get("kd_loss._component_", "ForwardKLLoss")).rpartition(".")[2]
    divergence = next((ours for theirs, ours in DIVERGENCES.items() if loss.startswith(theirs)), None)
    if divergence is None:
        c.missing("actor.teacher.divergence is forward_kl, reverse_kl or jensen_shannon", "kd_loss._component_")
    else:
        c.put("actor.teacher.divergence", divergence, "kd_loss._component_")


def _rest(c: Conversion) -> None:
    loss = str(c.get("loss._component_", "CEWithChunkedOutputLoss")).rpartition(".")[2]
    package = str(c.get("loss._component_", "torchtune.")).partition(".")[0]
    if package in ("torchtune", "torch") and ("CE" in loss or "CrossEntropy" in loss):
        c.not_needed("the loss of language models, computed in parts", "loss")
        c.put("actor.label_smoothing", as_number(c.get("loss.label_smoothing", 0.0)), "loss.label_smoothing")
        changed = [f"loss.{key}" for key in ("weight", "reduction") if c.get(f"loss.{key}", "mean") != "mean"]
        c.missing("actor.loss: FILE.py:FUNCTION", *changed)
    else:
        c.missing("actor.loss: FILE.py:FUNCTION", "loss")
    if not str(c.get("collate_fn", "torchtune.")).startswith("torchtune."):
        c.missing("it is not read: data.transform: FILE.py:FUNCTION makes rows, with targets too", "collate_fn")
    logger = str(c.get("metric_logger._component_", "")).rpartition(".")[2]
    backend = {"WandBLogger": "wandb", "TensorBoardLogger": "tensorboard"}.get(logger)
    if backend:
        c.put("runner.logger.logger_backends", ["jsonl", backend], "metric_logger._component_")
    if c.has("metric_logger.project"):
        c.put("runner.logger.project_name", c.get("metric_logger.project"), "metric_logger.project")
    c.not_needed(
        "metrics.jsonl is in the run directory",
        *(n for n in c.given if n.startswith("metric_logger.") and n not in c.outcomes),
    )
    rules.run_directory(c, "output_dir", "")
    device = str(c.get("device", "auto"))
    if device.startswith("cuda"):
        c.record("device", Kind.DEFAULT, "runner.device: auto is CUDA where there is a GPU")
    else:
        c.put("runner.device", device if device == "cpu" else "auto", "device")
    if c.get("seed") is None:
        c.record("seed", Kind.DEFAULT, "runner.seed: 42; torchtune draws one")
    if not c.has("save_every_n_steps"):
        c.put("runner.save_interval", "epoch", comment="torchtune saves after every epoch")
    c.put("data.shuffle", is_on(c.get("shuffle", True)), "shuffle")
