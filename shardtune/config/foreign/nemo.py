"""NeMo Automodel: the keys of its fine-tuning recipes, whose parts are named by `_target_`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from shardtune.config.foreign import nemo_adapters, nemo_data, rules
from shardtune.config.foreign.conversion import Conversion, Kind, Outcome, defaults
from shardtune.config.foreign.nemo_keys import EACH, ROWS, TABLE
from shardtune.config.foreign.nemo_schedule import schedule
from shardtune.config.foreign.nemo_sections import NAME, OF_NEMO, count, is_null, left, read_sections
from shardtune.config.foreign.rows import EVAL
from shardtune.config.foreign.values import PRECISIONS, as_number, is_on, listed, number, whole
from shardtune.config.tree import get_value
from shardtune.errors import ConfigError

__all__ = ["NAME", "TABLE", "convert"]
LR, DECAY = "actor.optim.lr", "actor.optim.weight_decay"
KNOWN = re.compile(
    r"(Finetune|KnowledgeDistillation|Pretrain)Recipe(For(NextTokenPrediction|VLM|SequenceClassification))"
)
"""Its recipes that are converted: one model, or one with a teacher, trained by the targets of rows."""


def convert(c: Conversion) -> None:
    """Read a recipe of NeMo Automodel.

    Raises:
        ConfigError: it trains something else than one model by the targets of rows, a section is none, or a number
            is one that its classes refuse.
    """
    read_sections(c)
    _refuse_others(c)
    packed = nemo_data.packed_size(c)
    nemo_data.convert(c, packed)
    _batch(c, packed)
    total = _steps(c)
    rules.component_optimizer(c, "_target_", decays_all=not c.has("peft") or is_on(c.get("peft.use_dora")))
    _optimizer(c)
    if not c.has("clip_grad_norm.max_norm"):
        c.put("actor.optim.clip_grad", 1.0, comment=f"{NAME}'s default (clip_grad_norm.max_norm)")
    schedule(c, total)
    _model(c)
    nemo_adapters.adapters(c, base_dtype=_dtype(c))
    nemo_adapters.frozen(c, has_images=_has_images(c))
    _layout(c)
    _teacher(c)
    _rest(c)
    for name, value in c.given.items():
        if value is None:
            c.outcomes[name] = Outcome(name, value, Kind.DEFAULT, "nothing is set")


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
    rows, each_rank = count(c, ROWS) or 32, count(c, EACH) or 1
    if packed is None:
        c.put("actor.micro_batch_size", each_rank, EACH, comment=rules.origin(c, EACH), always=True)
        c.put("actor.global_batch_size", rows, ROWS, comment=rules.origin(c, ROWS), always=True)
    else:
        rules.packed_batch(c, each_rank, rows, packed, EACH, (ROWS, *nemo_data.PACKING), f"{rows} of a step")


def _steps(c: Conversion) -> int | None:
    """The length of the run and its intervals; returns the number of steps where it is known."""
    name, steps = "step_scheduler.num_epochs", "step_scheduler.max_steps"
    epochs, limit = count(c, name), count(c, steps)
    if epochs is None and limit is not None and is_null(c, name):
        c.put("runner.max_epochs", -1, comment=f"{name} is null: {steps} alone ends the run")
    else:
        c.put("runner.max_epochs", epochs or 10, name, comment=rules.origin(c, name))
    c.put("runner.max_steps", -1 if limit is None else limit, steps)
    _intervals(c)
    return limit


def _intervals(c: Conversion) -> None:
    """When checkpoints are saved and evaluations run: at each checkpoint, too."""
    name, at_ends = "step_scheduler.ckpt_every_steps", "step_scheduler.save_checkpoint_every_epoch"
    every = "epoch" if is_null(c, name) else count(c, name) or 100
    if is_on(c.get("checkpoint.enabled", True)):
        c.put("runner.save_interval", every, name, comment=rules.origin(c, name))
        if every != "epoch" and is_on(c.get(at_ends, True)):
            c.notes.append(f"{NAME} saves at the end of every epoch, too; runner.save_interval: epoch does that alone")
        c.not_needed("runner.save_interval is one interval", at_ends)
        c.record("checkpoint.enabled", Kind.DEFAULT, "checkpoints are saved")
    else:
        c.put("runner.save_interval", -1, "checkpoint.enabled", comment="checkpoint.enabled: false")
        c.not_needed("nothing is saved on the way", name, at_ends)
    of_evaluation = "step_scheduler.val_every_steps"
    between = count(c, of_evaluation)
    if EVAL in c.lines:
        comment = of_evaluation if between else f"{NAME} evaluates where it saves ({name})"
        c.put("runner.eval_interval", between or every, of_evaluation, comment=comment)
    elif nemo_data.validation_sets(c):
        c.missing("runner.eval_interval: N, once data.eval_data_paths is there", of_evaluation)
    else:
        c.not_needed("there is no validation_dataset", of_evaluation)


def _optimizer(c: Conversion) -> None:
    """What its own classes add: rates of groups by name, and Muon of the package dion."""
    overrides = "optimizer.param_group_overrides"
    groups = [one for one in listed(c.get(overrides)) if isinstance(one, Mapping)]
    if groups and not c.has("lr_scheduler"):
        c.not_needed("without lr_scheduler it has no effect there", overrides)
    elif groups:
        rate, decay = (c.lines[key].value if key in c.lines else get_value(defaults(), key) for key in (LR, DECAY))
        before = c.lines.get("actor.optim.groups")
        ours = [*(before.value if before is not None and isinstance(before.value, list) else [])]
        for one in reversed(groups):  # the first one that matches counts there, the last one here
            scaled = {"lr": number(one.get("lr_mult", 1.0)), "weight_decay": number(one.get("wd_mult", 1.0))}
            bases = {"lr": number(rate) or 0.0, "weight_decay": number(decay) or 0.0}
            ours.append(
                {"pattern": str(one.get("pattern")), **{key: bases[key] * (scaled[key] or 0.0) for key in scaled}}
            )
        c.put("actor.optim.groups", ours, overrides, comment=f"{overrides}, the last one that matches counts here")
    if str(c.get("optimizer._target_", "")).startswith("dion."):
        c.notes.append(
            "Muon is that of torch here: its scale of an update (adjust_lr) differs from dion's, compare rates"
        )


def _dtype(c: Conversion, section: str = "model") -> str:
    given = str(c.get(f"{section}.torch_dtype", c.get(f"{section}.dtype", "bf16")))
    return PRECISIONS.get(given.removeprefix("torch."), "bf16")


COMPUTED = "distributed.mp_policy.param_dtype"


def _computed(c: Conversion, section: str = "model") -> str:
    """What is computed in: FSDP2 computes in bf16 by default whatever the weights are, on several ranks."""
    if not _is_cast(c):
        return _dtype(c, section)
    return PRECISIONS.get(str(c.get(COMPUTED, "bf16")).removeprefix("torch."), "bf16")


def _is_cast(c: Conversion) -> bool:
    """Whether FSDP2 shards, which casts weights; it does not on one process."""
    strategy = str(c.get("distributed.strategy", c.get("distributed._target_", "fsdp2"))).lower()
    return "fsdp2" in strategy and c.world_size != 1


def _precision(c: Conversion, name: str) -> None:
    found = _computed(c)
    if found == _dtype(c):
        c.put("actor.model.precision", found, name, *([COMPUTED] if _is_cast(c) else []))
        c.not_needed("without FSDP2 on several ranks it has no effect there", *([] if _is_cast(c) else [COMPUTED]))
        return
    comment = COMPUTED if c.has(COMPUTED) else f"{NAME}'s default ({COMPUTED}), on several ranks"
    c.put("actor.model.precision", found, COMPUTED, comment=comment, always=True)
    c.not_needed("weights are fp32 here anyway; FSDP2 computes in bf16 there by default", name)


def _has_images(c: Conversion) -> bool:
    kind = str(c.get("model._target_", ""))
    recipe = str(c.get("recipe._target_", c.get("recipe", "")))
    return "ImageTextToText" in kind or "MultimodalLM" in kind or recipe.endswith("ForVLM")


def _model(c: Conversion) -> None:
    kind, _, how = str(c.get("model._target_", "")).rpartition(".")
    _named(c, "model", "actor.model.model_path")
    c.not_needed("the model is built from its own configuration", "model._target_")
    if how == "from_config":
        c.put("actor.model.from_scratch", True, "model._target_", comment="model._target_: from_config")
    if _has_images(c):
        c.put("actor.model.model_type", "vision_language", "model._target_", comment="model._target_")
    elif "SequenceClassification" in kind:
        c.put("actor.model.model_type", "sequence_classifier", "model._target_", comment="model._target_")
        c.not_needed("labels are those of the rows", "model.num_labels")
    name = "model.torch_dtype" if c.has("model.torch_dtype") else "model.dtype"
    _precision(c, name)
    if str(c.get(name, "bf16")).removeprefix("torch.") not in (*PRECISIONS, "auto"):
        c.missing("actor.model.precision is bf16, pure_bf16, fp16, fp32 or fp64; bf16 is written", name)
    if _dtype(c) == "bf16" and not c.has("peft"):
        c.notes.append(
            f"{NAME} trains weights in bf16; here they and the optimizer's states are fp32, computed with in bf16; "
            "actor.model.precision: pure_bf16 and actor.optim.state_dtype: bf16 take as little memory as there"
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


OF_TOKENIZER = ("_target_", "trust_remote_code", "padding_side", "use_fast", "cache_dir", "local_files_only")


def _tokenizer(c: Conversion, section: str) -> None:
    name = section if isinstance(c.get(section), str) else f"{section}.pretrained_model_name_or_path"
    model = c.lines.get("actor.model.model_path")
    if c.has(name) and (model is None or c.path(c.get(name)) != model.value):
        c.put("actor.tokenizer.tokenizer_model", c.path(c.get(name)), name)
    why = "the tokenizer is that of actor.model.model_path"
    c.not_needed(why, *([name] if name not in c.outcomes else []), *(f"{section}.{one}" for one in OF_TOKENIZER))
    others = [one for one in c.given if left(c, one, section)]
    c.missing("save the tokenizer with it, and name its folder: actor.tokenizer.tokenizer_model", *others)


def _layout(c: Conversion) -> None:
    strategy = "distributed.strategy" if c.has("distributed.strategy") else "distributed._target_"
    if "ddp" in str(c.get(strategy, "fsdp2")).lower():
        c.put("actor.training_backend", "ddp", strategy)
    else:
        c.not_needed("models are sharded with FSDP2 anyway", strategy)
    copies = "distributed.dp_replicate_size"
    c.put("actor.parallel.data_replicate", whole(c.get(copies)) or 1, copies)
    recompute = "distributed.activation_checkpointing"
    value = "selective" if c.get(recompute) == "selective" else c.get(recompute) == "full" or is_on(c.get(recompute))
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
    if _computed(c, "teacher_model") != _computed(c):
        c.put("actor.teacher.precision", _computed(c, "teacher_model"), "teacher_model.torch_dtype")
    c.not_needed(
        "the teacher is built from its own configuration", *(n for n in c.given if left(c, n, "teacher_model"))
    )
    share = number(c.get("kd_ratio", 0.5))
    comment = "1 - kd_ratio" if c.has("kd_ratio") else f"{NAME}'s default (kd_ratio: 0.5)"
    c.put("actor.teacher.ce_share", None if share is None else 1 - share, "kd_ratio", comment=comment)
    temperature = "kd_loss_fn.temperature"
    c.put("actor.teacher.temperature", as_number(c.get(temperature, 1.0)), temperature)
    if not str(c.get("kd_loss_fn._target_", f"{OF_NEMO}KDLoss")).startswith(OF_NEMO):
        c.missing("actor.teacher.divergence is what there is, or actor.loss: FILE.py:FUNCTION", "kd_loss_fn._target_")
        c.missing("it is of that loss", *(n for n in c.given if left(c, n, "kd_loss_fn")))
    c.not_needed("KL(teacher || model) is the default here", *(n for n in c.given if left(c, n, "kd_loss_fn")))


def _rest(c: Conversion) -> None:
    loss = str(c.get("loss_fn._target_", f"{OF_NEMO}MaskedCrossEntropy"))
    caps = "loss_fn.logit_softcapping"
    if loss.startswith(OF_NEMO) and "CrossEntropy" in loss:
        c.not_needed(
            "the mean over the targets of a step, computed in parts", *(n for n in c.given if n.startswith("loss_fn"))
        )
        if number(c.get(caps, 0)):
            c.missing("logits are those of the model, which caps them where its configuration says so", caps)
    else:
        c.missing("actor.loss: FILE.py:FUNCTION", "loss_fn")
    if not c.has("seed") and c.has("rng.seed"):
        c.put("runner.seed", whole(c.get("rng.seed")), "rng.seed")
    else:
        c.not_needed("seed replaces it", "rng.seed")
    if is_on(c.get("fp8.enabled")):
        kind = str(c.get("fp8.recipe_name", "tensorwise"))
        if kind in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
            c.put("actor.model.fp8.scaling", kind, "fp8.enabled", "fp8.recipe_name")
        else:
            c.put("actor.model.fp8.scaling", "tensorwise", "fp8.enabled")
            c.missing(
                "tensorwise, rowwise and rowwise_with_gw_hp are the scales; tensorwise is written", "fp8.recipe_name"
            )
        c.put("actor.model.fp8.emulate", is_on(c.get("fp8.emulate")), "fp8.emulate")
        layers = [str(one) for one in listed(c.get("fp8.filter_fqns"))]
        others = [re.escape(one) for one in layers if one != "lm_head"]
        if not any(one in "lm_head" for one in layers):
            c.notes.append(
                f"{NAME} computes the head in FP8, too (fp8.filter_fqns does not name it); here it is left out"
            )
        c.put(
            "actor.model.fp8.exclude", others, "fp8.filter_fqns", comment="fp8.filter_fqns; the head is left out anyway"
        )
    c.not_needed("the numbers do not depend on it", *(n for n in c.given if left(c, n, "fp8")))
    if c.has("neftune"):
        name = "neftune.noise_alpha" if c.has("neftune.noise_alpha") else "neftune"
        alpha = 5.0 if isinstance(c.get(name), Mapping) else number(c.get(name))
        c.put("actor.neftune_alpha", alpha or None, name, comment="neftune")
    rules.run_directory(c, "checkpoint.checkpoint_dir", "")
    backends = [name for name in ("wandb", "mlflow") if c.has(name) and is_on(c.get(f"{name}.enable", True))]
    if c.get("wandb.mode") == "disabled":
        backends = [name for name in backends if name != "wandb"]
    if backends:
        c.put("runner.logger.logger_backends", ["jsonl", *backends], *(f"{name}.enable" for name in backends))
        name = "wandb.project" if "wandb" in backends else "mlflow.experiment_name"
        c.put("runner.logger.project_name", c.get(name, "shardtune"), name)
        c.missing("WANDB_ENTITY in the environment", "wandb.entity")
        c.not_needed(
            "the run has the name of its directory; variables of the logger's own set the others",
            *(n for name in backends for n in c.given if left(c, n, name)),
        )
    for name in ("wandb", "mlflow"):
        c.not_needed("it is off", *(n for n in c.given if name not in backends and left(c, n, name)))
