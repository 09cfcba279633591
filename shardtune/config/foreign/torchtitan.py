"""torchtitan: the keys of its TOML files, sections whose names and values are those of its JobConfig."""

from __future__ import annotations

from collections.abc import Mapping

from shardtune.config.foreign import rules
from shardtune.config.foreign.conversion import Conversion, Kind
from shardtune.config.foreign.rows import EVAL, TRAIN, entry
from shardtune.config.foreign.torchtitan_keys import NAME, TABLE
from shardtune.config.foreign.values import PRECISIONS, as_number, is_on, listed, number, whole
from shardtune.errors import ConfigError

__all__ = ["NAME", "TABLE", "convert"]
SETS: Mapping[str, Mapping[str, object]] = {
    "c4": {"path": "allenai/c4", "name": "en"},
    "c4_validation": {"path": "allenai/c4", "name": "en", "split": "validation"},
    "c4_test": {"path": "tests/assets/c4_test"},
}
"""Its data sets, of rows with a column `text`."""
SHARED = ("tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree")
"""The degrees of processes that have the same rows."""
STEPS, PEAK = 10000, 8e-4
"""The defaults of `training.steps` and `optimizer.lr`."""


def convert(c: Conversion) -> None:
    """Read a configuration of torchtitan.

    Raises:
        ConfigError: it is for a model that draws images.
    """
    if "flux" in str(c.get("model.name", "")):
        raise ConfigError(
            f"model.name: {c.get('model.name')} draws images, which is no training on the tokens of rows",
            where="model.name",
            remedy="keep torchtitan for it, or write the method on the engine (docs/your-method.md)",
        )
    steps = whole(c.get("training.steps")) or STEPS
    c.put("runner.max_steps", steps, "training.steps", comment=rules.origin(c, "training.steps"))
    c.put("runner.max_epochs", -1, comment="training.steps alone ends the run, as there")
    _batch(c)
    _schedule(c, steps)
    _optimizer(c)
    _model(c)
    _layout(c)
    _fp8(c)
    _data(c)
    _checkpoints(c)
    _output(c)


def _degree(c: Conversion, name: str) -> int:
    return max(1, whole(c.get(f"parallelism.{name}")) or 1)


def _batch(c: Conversion) -> None:
    """The tokens of a step and of a forward pass: a row there is a sequence that is cut out of a stream of texts."""
    local, total, length = "training.local_batch_size", "training.global_batch_size", "training.seq_len"
    local = local if c.has(local) or not c.has("training.batch_size") else "training.batch_size"
    each, rows, tokens = whole(c.get(local)) or 8, whole(c.get(total)) or -1, whole(c.get(length)) or 2048
    c.put("data.max_length", tokens, length, comment=rules.origin(c, length))
    c.put("data.on_too_long", "split", comment=f"texts are cut at {length}")
    same, shard = 1, whole(c.get("parallelism.data_parallel_shard_degree")) or -1
    for name in SHARED:
        same *= _degree(c, name)
    known = c.world_size is not None or shard > 0
    replicas = _degree(c, "data_parallel_replicate_degree") * max(1, shard)
    ranks = max(1, c.world_size // same) if c.world_size is not None else replicas
    product = f"{each} × {ranks} {'process' if ranks == 1 else 'processes'} with rows of their own"
    product = f"{total}: {rows}" if rows > 0 else product + ("" if known else "; with more, give --world-size")
    rules.packed_batch(c, each, rows if rows > 0 else each * ranks, tokens, local, (local, total, length), product)
    c.notes.append(
        "torchtitan joins texts and cuts the stream, so a sequence may begin in one text and attend to others; here a "
        "text is cut alone, and attends to itself"
    )


def _schedule(c: Conversion, steps: int) -> None:
    """Warm-up from the first step on, and a fall that ends after the last one, as here."""
    rate = number(c.get("optimizer.lr", PEAK)) or 0.0
    name, share, kind = "lr_scheduler.warmup_steps", "lr_scheduler.decay_ratio", "lr_scheduler.decay_type"
    shape, decay = str(c.get(kind, "linear")), number(c.get(share))
    factor = "lr_scheduler.min_lr_factor" if c.has("lr_scheduler.min_lr_factor") else "lr_scheduler.lr_min"
    warmup = min(whole(c.get(name, 200)) or 0, steps)
    if decay is not None and warmup + round(decay * steps) >= steps:
        c.record(share, Kind.DEFAULT, "the rate falls from the end of the warm-up on")
        decay = None
    c.put(rules.WARMUP, warmup, name, comment=rules.origin(c, name))
    is_known = shape == "linear" or (shape == "cosine" and decay is None)
    ours = "wsd" if decay is not None else "cosine" if shape == "cosine" else "linear"
    c.put("actor.optim.lr_scheduler", ours, kind, comment=rules.origin(c, kind))
    if decay is not None:
        c.put("actor.optim.decay_ratio", decay, share)
    if not is_known:
        c.missing(f"constant, linear, cosine and wsd, which falls linearly, are the schedules here; {ours} is it", kind)
    c.put("actor.optim.min_lr", rate * (number(c.get(factor)) or 0.0), factor)
    horizon = "lr_scheduler.total_steps"
    if whole(c.get(horizon)) in (None, steps):
        c.record(horizon, Kind.DEFAULT, "the schedule ends with the run")
    else:
        c.missing("the schedule ends with the run: runner.max_steps", horizon)


def _optimizer(c: Conversion) -> None:
    rules.choose_optimizer(c, "optimizer.name", "")
    name = "optimizer.weight_decay"
    decay = as_number(c.get(name, 0.1))
    c.put("actor.optim.weight_decay", decay, name, comment=rules.origin(c, name))
    if decay:
        groups = [{"pattern": ".", "weight_decay": decay}]
        c.put("actor.optim.groups", groups, comment=f"{NAME} decays norms, too; shardtune does not")


def _model(c: Conversion) -> None:
    """The model by its directory, whose config.json has the sizes that a flavor stands for."""
    folder, path, in_hf = "model.hf_assets_path", "checkpoint.initial_load_path", "checkpoint.initial_load_in_hf"
    enabled = is_on(c.get("checkpoint.enable", c.get("checkpoint.enable_checkpoint")))
    loads = enabled and is_on(c.get(in_hf))
    source = path if loads and c.has(path) else folder
    if c.has(source):
        c.put("actor.model.model_path", c.path(c.get(source)), source)
    if source == path and c.has(folder):
        c.put("actor.tokenizer.tokenizer_model", c.path(c.get(folder)), folder)
    if enabled and c.has(path) and not loads:
        c.missing("actor.model.model_path: a directory in the format of transformers, as last_save_in_hf writes", path)
    else:
        comment = f"{in_hf} is off: weights are drawn"
        c.put("actor.model.from_scratch", not loads, in_hf, comment=in_hf if loads else comment)
    c.not_needed("nothing is loaded", *([path] if path not in c.outcomes else []))
    shown = f"{c.get('model.name', 'llama3')} {c.get('model.flavor', 'debugmodel')}"
    remedy = f"actor.model.model_path: a directory or OWNER/NAME, whose config.json has the sizes of {shown}"
    c.missing(remedy, "model.name", "model.flavor")
    stored, computed = "training.dtype", "training.mixed_precision_param"
    is_half = PRECISIONS.get(str(c.get(stored, "float32"))) == "bf16"
    kind = "bf16" if is_half else PRECISIONS.get(str(c.get(computed, "bfloat16")), "bf16")
    c.put("actor.model.precision", kind, computed)
    if is_half:
        c.missing(
            "trained weights and their optimizer states are fp32 here: more exact, more memory; "
            "actor.model.precision: pure_bf16 and actor.optim.state_dtype: bf16 take as little as there",
            stored,
        )
    recompute = "activation_checkpoint.mode"
    mode = str(c.get(recompute, "selective"))
    is_compiled = is_on(c.get("compile.enable", c.get("training.compile")))  # which selects what is kept by itself
    value = False if mode == "none" else True if mode == "full" or is_compiled else "selective"
    c.put(
        "actor.model.gradient_checkpointing",
        value,
        recompute,
        comment=f"{rules.origin(c, recompute)}; changes no number",
    )
    if "moe" in str(c.get("model.flavor")).lower() or str(c.get("model.name")) in ("deepseek_v3", "llama4", "gpt_oss"):
        c.notes.append(
            "torchtitan balances experts by a bias that it moves after each step; here the model's own loss does"
        )


def _layout(c: Conversion) -> None:
    copies, shard = "parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree"
    if _degree(c, "data_parallel_replicate_degree") > 1 and whole(c.get(shard)) == 1:
        c.put("actor.training_backend", "ddp", copies, shard, comment="copies that are not sharded")
    else:
        c.put("actor.parallel.data_replicate", _degree(c, "data_parallel_replicate_degree"), copies)
        c.put("actor.parallel.data_shard", whole(c.get(shard)) or -1, shard)
    policy = "parallelism.fsdp_reshard_after_forward"
    if c.get(policy, "default") in ("always", "never"):
        c.put("actor.fsdp_config.reshard_after_forward", c.get(policy) == "always", policy, always=True)
    else:
        c.record(policy, Kind.DEFAULT, "what is gathered again is chosen here, too")


def _fp8(c: Conversion) -> None:
    """FP8, which a converter switches on."""
    converters = " ".join(str(one) for one in listed(c.get("model.converters")))
    section = "quantize.linear.float8" if c.has("quantize.linear.float8") else "float8"
    keys = [name for name in c.given if name.startswith((f"{section}.", "quantize."))]
    if not converters:
        c.not_needed("model.converters is empty", *keys)
        return
    kind = str(c.get(f"{section}.recipe_name", "tensorwise"))
    others = [one for one in listed(c.get("model.converters")) if "float8" not in str(one) or "grouped" in str(one)]
    if "float8" in converters and len(others) < len(listed(c.get("model.converters"))):
        c.put("actor.model.fp8.scaling", kind, "model.converters", f"{section}.recipe_name")
        c.put("actor.model.fp8.emulate", is_on(c.get(f"{section}.emulate")), f"{section}.emulate")
        fqns = f"{section}.filter_fqns"
        if any(one != "output" for one in listed(c.get(fqns))):
            c.missing("actor.model.fp8.exclude: patterns of the names of transformers; the head is left out", fqns)
        else:
            c.not_needed("the head is left out", fqns)
    if others:
        c.missing(
            "actor.model.fp8.scaling: tensorwise is for linear layers, what else there is none of", "model.converters"
        )
    c.not_needed("the numbers do not depend on it", *(name for name in keys if name not in c.outcomes))


def _rows(c: Conversion, section: str, default: str) -> list[dict[str, object]]:
    """The entry of a section's data set; none where only its own name is known."""
    kind, path = f"{section}.dataset", f"{section}.dataset_path"
    known = SETS.get(str(c.get(kind, default)).lower())
    ours = TRAIN if section == "training" else EVAL
    if known is None and not c.has(path):
        c.missing(f"{ours}: FILE or OWNER/NAME, rows with a column text", kind)
        return []
    given = dict(known or {})
    options = {} if c.has(path) else {"name": given.get("name")}
    split = given.get("split") or ("train" if ours == EVAL and not c.has(path) else None)
    found = entry(c.path(c.get(path, given.get("path"))), **options, split=split)
    for name in (kind, path):
        c.record(name, Kind.TRANSLATED, f"{ours}: {found['path']}")
    if known is None:
        c.missing(f"{c.get(kind)} reads its rows by code of its own: data.transform: FILE.py:FUNCTION", kind)
    return [found]


def _data(c: Conversion) -> None:
    for found in _rows(c, "training", "c4_test"):
        c.put(TRAIN, found["path"] if len(found) == 1 else found, comment="training.dataset")
    c.put("data.train_on", "all", comment="texts are trained whole")
    every, limit = "validation.freq", "validation.steps"
    keys = [name for name in c.given if name.startswith("validation.")]
    if not is_on(c.get("validation.enable")):
        c.not_needed("validation.enable is off", *keys)
        return
    for found in _rows(c, "validation", "c4_validation"):
        c.put(EVAL, found["path"] if len(found) == 1 else found, comment="validation.dataset")
    c.put("runner.eval_interval", whole(c.get(every)) or 10, every, "validation.enable", comment=rules.origin(c, every))
    if (whole(c.get(limit)) or -1) > 0:
        c.missing(f"{EVAL}: {{path: FILE, max_samples: N}} takes the first N rows", limit)
    if (whole(c.get("validation.seq_len")) or 2048) != (whole(c.get("training.seq_len")) or 2048):
        c.missing("data.max_length is for evaluation too", "validation.seq_len")
    c.not_needed("the loss of a row does not depend on it", *(name for name in keys if name not in c.outcomes))


def _checkpoints(c: Conversion) -> None:
    every, keep, dtype = "checkpoint.interval", "checkpoint.keep_latest_k", "checkpoint.export_dtype"
    enabled = "checkpoint.enable" if c.has("checkpoint.enable") else "checkpoint.enable_checkpoint"
    if not is_on(c.get(enabled)):
        c.put("runner.save_interval", -1, enabled, comment="checkpoint.enable is off")
        c.not_needed("checkpoint.enable is off", every, keep, dtype, "checkpoint.async_mode")
        return
    c.put("runner.save_interval", whole(c.get(every)) or 500, every, enabled, comment=rules.origin(c, every))
    count = 10 if whole(c.get(keep)) is None else whole(c.get(keep))
    if count:
        c.put("runner.keep_last", count, keep, comment=rules.origin(c, keep))
    else:
        c.missing("runner.keep_last: N; each checkpoint holds weights and optimizer states", keep)
    c.put("runner.async_save", str(c.get("checkpoint.async_mode", "disabled")) != "disabled", "checkpoint.async_mode")
    c.put("runner.final_dtype", PRECISIONS.get(str(c.get(dtype, "float32")), "auto"), dtype)


def _output(c: Conversion) -> None:
    rules.run_directory(c, "job.dump_folder", "")
    switched = [name for name in ("tensorboard", "wandb") if is_on(c.get(f"metrics.enable_{name}"))]
    names = [f"metrics.enable_{name}" for name in ("tensorboard", "wandb")]
    if switched:
        c.put("runner.logger.logger_backends", ["jsonl", *switched], *names)
    else:
        c.not_needed("they are off", *names)
