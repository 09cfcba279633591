"""ms-swift: `swift sft` and `swift pt`, by their flags or a file of them."""

from __future__ import annotations

from collections.abc import Mapping

from shardtune.config.foreign import rules, swift_data
from shardtune.config.foreign.conversion import DATA_SUFFIXES, Conversion, Kind
from shardtune.config.foreign.swift_keys import FROZEN, NAME, NO_TUNER, PREFIXES, TABLE
from shardtune.config.foreign.training_arguments import early_stop_metric, training_arguments
from shardtune.config.foreign.values import PRECISIONS, as_number, is_on, listed, names, number, whole
from shardtune.errors import ConfigError

__all__ = ["FROZEN", "NAME", "TABLE", "convert", "is_configuration"]
COMMAND, MEGATRON = "swift", "megatron"
"""The words that its commands begin with: `swift sft`, `megatron sft`."""
FINE_TUNING = ("sft", "pt")
_MARKS = (
    *("tuner_type", "train_type", "sft_type", "split_dataset_ratio", "model_author", "attn_impl", "val_dataset"),
    *("custom_dataset_info", "freeze_vit", "freeze_llm", "freeze_aligner", "cached_dataset", "loss_scale"),
    "target_modules",
)
_OF_MEGATRON = ("mcore_model", "micro_batch_size", "global_batch_size", "tensor_model_parallel_size", "finetune")
"""Keys of `megatron sft`, whose names and defaults are others."""
_TUNERS = ("tuner_type", "train_type", "sft_type")
LORA, PRECISION = "actor.model.lora", "actor.model.precision"
ROWS = 16
"""The rows of a step unless `gradient_accumulation_steps` is given."""


def is_configuration(tree: Mapping[str, object]) -> bool:
    """Whether keys are those of ms-swift: `model` is a name there, and `dataset` is beside it."""
    marks = sum(name in tree for name in _MARKS)
    is_named = isinstance(tree.get("model"), str) or "model_type" in tree
    return (
        is_named
        and not {"model_name_or_path", "base_model"} & set(tree)
        and ("dataset" in tree or marks > 1 or "tuner_type" in tree)
    )


def no_megatron(where: str) -> ConfigError:
    """That the arguments of its other trainer are not converted."""
    return ConfigError(
        f"this is a configuration of {NAME} for Megatron, whose arguments are others; it is not converted",
        where=where,
        remedy="write a recipe by the table of docs/coming-from.md (ms-swift); those of swift sft are converted",
    )


def convert(c: Conversion) -> None:
    """Read a configuration of ms-swift.

    Raises:
        ConfigError: it is of another method, or for Megatron.
    """
    other = next((name for name in ("rlhf_type", "teacher_model", "reward_funcs") if c.has(name)), None)
    if other is not None:
        raise ConfigError(
            f"{other}: {c.get(other)} is no supervised fine-tuning",
            where=other,
            remedy=f"shardtune trains what swift sft does; keep {NAME}, or write the method on the engine "
            "(docs/your-method.md)",
        )
    if sum(name in c.tree for name in _OF_MEGATRON) > 1:
        raise no_megatron(", ".join(name for name in _OF_MEGATRON if name in c.tree))
    tuner = next((name for name in _TUNERS if c.has(name)), _TUNERS[0])
    is_full = str(c.get(tuner, "lora")) == "full"
    rate = 1e-5 if is_full else 1e-4
    has_rows = swift_data.evaluates(c)
    comment = "learning_rate" if c.has("learning_rate") else f"{NAME}'s default (learning_rate)"
    c.put("actor.optim.lr", as_number(c.get("learning_rate", rate)), "learning_rate", comment=comment)
    training_arguments(
        c,
        logging=5,
        rate=rate,
        precision="bf16",
        schedule="cosine",
        evaluation=str(c.get("save_strategy", "steps")) if has_rows else "no",
        evaluation_steps=whole(c.get("save_steps", 500)),
    )
    if not has_rows:
        c.lines.pop("runner.eval_interval", None)
        c.not_needed("there are no rows for evaluation", "eval_strategy", "evaluation_strategy", "eval_steps")
    _dtype(c, is_full=is_full)
    _adapter(c, tuner)
    _batch(c)
    swift_data.convert(c)
    _model(c)
    _run(c)
    for name in c.given:
        if name not in TABLE and name not in c.outcomes and name.startswith(PREFIXES):
            c.not_needed("it belongs to something that is not part of a recipe", name)


def _dtype(c: Conversion, *, is_full: bool) -> None:
    """The precision: without bf16 and fp16 it follows the weights' dtype, of which fp32 means fp16 there."""
    name = "torch_dtype"
    stored = PRECISIONS.get(str(c.get(name, "")))
    if c.has("bf16") or c.has("fp16"):
        c.not_needed("bf16 and fp16 decide about the computation; trained weights are fp32 here", name)
    elif stored in ("fp16", "fp32"):
        c.put(PRECISION, "fp16", name, comment=f"{name}: {c.get(name)}, with which {NAME} computes in fp16")
    else:
        c.put(PRECISION, "bf16", name)
    if stored is None and not c.has("bf16") and not c.has("fp16"):
        c.notes.append(f"without {name} {NAME} computes in the model's own dtype, mostly bf16: bf16 here")
    if is_full and stored in (None, "bf16"):
        c.notes.append(
            f"{NAME} trains weights that are stored in bf16 in bf16; here they and the optimizer's states are fp32, "
            f"computed with in bf16; {PRECISION}: pure_bf16 and actor.optim.state_dtype: bf16 take as little memory"
        )


def _adapter(c: Conversion, tuner: str) -> None:
    """The kind of training, and a new or loaded LoRA."""
    kind = str(c.get(tuner, "lora"))
    own = ("lora_rank", "lora_alpha", "lora_dropout", "target_modules", "target_regex", "init_weights", "use_dora")
    own = (*own, "use_rslora", "target_parameters", "modules_to_save", "adapters", "quant_bits")
    c.not_needed(f"{tuner} replaces it", *(name for name in _TUNERS if name != tuner))
    if kind == "full":
        c.record(tuner, Kind.DEFAULT, "actor.model.is_lora: false")
        c.not_needed(f"{tuner} is full", *own)
        return
    comment = "" if c.has(tuner) else f"{NAME}'s default (tuner_type: lora)"
    c.put("actor.model.is_lora", True, tuner, comment=comment)
    if kind == "lora_llm":
        c.missing("LoRA, or full training; actor.model.lora.modules_to_save trains modules whole beside it", tuner)
    elif kind != "lora":
        c.missing(f"there is no {kind} by a name: {NO_TUNER}", tuner)
    adapters = listed(c.get("adapters"))
    if adapters:
        c.put(f"{LORA}.load_from", c.path(adapters[-1]), "adapters")
        c.not_needed("they are those of the adapter", *own)
    else:
        _new_adapter(c)
    bits = whole(c.get("quant_bits"))
    if bits == 4:
        c.put(f"{LORA}.base_dtype", "nf4", "quant_bits")
    else:
        rules.frozen_base(c, "quant_bits" if bits else "")


def _new_adapter(c: Conversion) -> None:
    def origin(name: str) -> str:
        return rules.origin(c, name)

    for name, key, default in (("lora_rank", "r", 8), ("lora_alpha", "alpha", 32), ("lora_dropout", "dropout", 0.05)):
        c.put(f"{LORA}.{key}", as_number(c.get(name, default)), name, comment=origin(name), always=True)
    if c.has("target_regex"):
        c.put(f"{LORA}.target_modules", str(c.get("target_regex")), "target_regex")
        c.not_needed("target_regex replaces it", "target_modules")
    else:
        c.put(f"{LORA}.target_modules", names(c.get("target_modules", "all-linear")), "target_modules")
    for name in ("use_rslora", "use_dora"):
        c.put(f"{LORA}.{name}", is_on(c.get(name)), name)
    for name in ("target_parameters", "modules_to_save"):
        c.put(f"{LORA}.{name}", [str(one) for one in listed(c.get(name))], name)
    init = str(c.get("init_weights", "true")).lower()
    if init in ("true", "false"):
        c.put(f"{LORA}.init", init == "true", "init_weights")
    elif init in ("gaussian", "pissa", "olora", "orthogonal") or init.startswith("pissa_niter_"):
        c.put(f"{LORA}.init", init, "init_weights")
    else:
        c.missing(f"{LORA}.init is true, gaussian, orthogonal, pissa, olora or mica", "init_weights")


def _batch(c: Conversion) -> None:
    """The rows of a step: 16 over all processes, rounded up, unless the accumulation is given."""
    each, times, packed = "per_device_train_batch_size", "gradient_accumulation_steps", "packing"
    length = whole(c.get("packing_length")) or whole(c.get("max_length"))
    is_packed = is_on(c.get(packed))
    shared = ("sequence_parallel_size", "deepspeed_autotp_size")
    if is_packed and length is None:
        c.missing("actor.global_batch_tokens: packed sequences of a step × the model's maximum length", packed)
    elif not is_packed:
        c.not_needed(rules.PACKED_ANYWAY, packed, "packing_length")
    c.not_needed(rules.PACKED_ANYWAY, "padding_free")

    def write(target: Conversion) -> None:
        tokens = length if is_packed else None
        rules.batch(target, each, times, rows=1, packed=tokens, packing=(packed, "packing_length"), shared=shared)

    if c.has(times):
        write(c)
        return
    rows, size = whole(c.get(each)) or 1, max(1, c.world_size or 1)
    accumulated = max(1, -(-ROWS // (rows * size)))
    filled = Conversion(c.trainer, {**c.tree, times: accumulated}, c.base, c.target, c.world_size, sharing=c.sharing)
    write(filled)
    for key, line in filled.lines.items():
        note = f"{line.comment}; {NAME}'s default ({times}): about {ROWS} rows" if "global" in key else line.comment
        c.put(key, line.value, *(one for one in (each, packed) if one in filled.outcomes), comment=note, always=True)
    c.notes += filled.notes


def _model(c: Conversion) -> None:
    if c.has("model"):
        c.put("actor.model.model_path", c.path(c.get("model")), "model")
    named = [str(one).partition("#")[0] for one in (c.get("model", ""), *listed(c.get("dataset")))]
    is_local = all(c.path(one).startswith((".", "/")) or c.path(one).endswith(DATA_SUFFIXES) for one in named if one)
    if not is_local and not is_on(c.get("use_hf")):
        c.notes.append(
            f"names are those of ModelScope in {NAME} unless use_hf is set; here they are those of the Hugging Face "
            "Hub, where some differ"
        )
    c.not_needed("names are those of the Hugging Face Hub", "use_hf")
    task = str(c.get("task_type", "causal_lm"))
    if task == "seq_cls":
        c.put("actor.model.model_type", "sequence_classifier", "task_type")
        c.notes.append("rows of a classifier are {text, label} here: data.columns, or data.transform (docs/tasks.md)")
    elif task != "causal_lm":
        c.missing("embedding models and rerankers are adapters with rows of their own: docs/tasks.md", "task_type")
    c.record("task_type", Kind.DEFAULT, "actor.model.model_type: causal_lm")
    tokens = [str(one) for one in listed(c.get("new_special_tokens"))]
    if any(one.endswith(".txt") for one in tokens):
        c.missing("actor.tokenizer.new_tokens: [TOKEN], those that the file has", "new_special_tokens")
    else:
        c.put("actor.tokenizer.new_tokens", tokens, "new_special_tokens")
    if is_on(c.get("enable_dft_loss")):
        c.put("actor.loss", "dft", "enable_dft_loss")
    c.record("enable_dft_loss", Kind.DEFAULT, "cross-entropy")


def _run(c: Conversion) -> None:
    """What ends a run early, its optimizer of a plugin, and what DeepSpeed's own settings move to the host."""
    if c.has("max_epochs"):
        c.put("runner.max_epochs", whole(c.get("max_epochs")), "max_epochs")
    patience = whole(c.get("early_stop_interval"))
    if patience:
        c.put("runner.early_stop.enabled", True, "early_stop_interval")
        c.put("runner.early_stop.patience", patience, "early_stop_interval")
        early_stop_metric(c)
    if c.has("optimizer"):
        rules.choose_optimizer(c, "optimizer", "")
    preset = str(c.get("deepspeed", ""))
    if preset in ("zero2_offload", "zero3_offload"):
        c.put("actor.fsdp_config.cpu_offload", True, "deepspeed", comment=f"deepspeed: {preset}")
    elif preset in ("zero0", "zero1", "zero2", "zero3"):
        c.not_needed("models are sharded with FSDP2, like ZeRO 3", "deepspeed")
    if is_on(c.get("resume_only_model")) and c.has("resume_from_checkpoint"):
        c.missing(
            "actor.model.model_path: FOLDER, the saved model; an adapter is actor.model.lora.load_from",
            "resume_only_model",
        )
    c.record("resume_only_model", Kind.DEFAULT, "the same command continues a run")
    if number(c.get("lorap_lr_ratio")):
        c.missing("actor.optim.groups: [{pattern: lora_B, lr: RATE}], ratio × rate", "lorap_lr_ratio")
