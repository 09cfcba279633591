"""verl: its two trainers for supervised fine-tuning, `fsdp_sft_trainer` and `sft_trainer`, with Hydra's keys."""

from __future__ import annotations

from collections.abc import Mapping

from shardtune.config.foreign import rules, verl_data
from shardtune.config.foreign.conversion import Conversion, Kind
from shardtune.config.foreign.values import PRECISIONS, as_number, is_on, listed, names, number, whole
from shardtune.config.foreign.verl_keys import NAME, NO_MTP, OFFLOAD, TABLE
from shardtune.config.foreign.verl_source import Source
from shardtune.config.tree import get_value
from shardtune.errors import ConfigError

__all__ = ["NAME", "TABLE", "convert", "is_configuration"]
OF_PPO = ("actor_rollout_ref", "critic", "algorithm", "reward_model")
"""Sections of its trainers for reinforcement learning."""
PARTS = ("hf_model", "fsdp", "fsdp2", "profiler", "_self_")
"""The files of `defaults` whose keys are here."""
LORA, PRECISION, PARALLEL = "actor.model.lora", "actor.model.precision", "actor.parallel"


def is_configuration(tree: Mapping[str, object]) -> bool:
    """Whether keys are those of verl, which has a section `trainer` beside `data`."""
    marks = ("model.partial_pretrain", "model.path", "engine", "optim", "data.train_files", *OF_PPO)
    return isinstance(tree.get("trainer"), Mapping) and any(get_value(tree, mark) is not None for mark in marks)


def convert(c: Conversion) -> None:
    """Read a configuration of verl.

    Raises:
        ConfigError: it is of reinforcement learning.
    """
    other = next((name for name in OF_PPO if c.has(name)), None)
    if other is not None:
        raise ConfigError(
            f"a configuration of {NAME} with {other} is no supervised fine-tuning",
            where=", ".join([*c.tree][:5]),
            remedy=f"keep {NAME} for it, or write the method on the engine (docs/your-method.md)",
        )
    source = Source.of(c)
    _composed(source)
    verl_data.convert(source)
    _length_of_run(source)
    _optimizer(source)
    _schedule(source)
    _model(source)
    _lora(source)
    _layout(source)
    _output(source)


def _composed(s: Source) -> None:
    """The files that Hydra composes: those of FSDP are what the defaults here are read from."""
    for name, value in s.c.given.items():
        if not name.startswith(("defaults", "overrides")) or value is None:
            continue
        if value in PARTS:
            s.c.not_needed("its keys have their defaults", name)
        else:
            s.c.missing("the keys of the files that it names have to be in the recipe", name)
    for section in ("engine", "optim", "model"):
        chosen = s.c.get(section)
        if isinstance(chosen, str):
            s.c.missing(f"{section}: {chosen} names a file, whose keys have to be in the recipe", section)


def _length_of_run(s: Source) -> None:
    c, epochs, steps = s.c, "trainer.total_epochs", "trainer.total_training_steps"
    c.put("runner.max_epochs", whole(s.get(epochs)), epochs, comment=s.origin(epochs))
    if c.has(steps):
        c.put("runner.max_steps", whole(c.get(steps)), steps)
    if c.has(steps) and s.is_older:
        c.notes.append(
            f"{steps} ends {NAME}'s run, and its schedule is that of all epochs; here the schedule ends with the run"
        )
    for ours, theirs in (
        ("runner.save_interval", "trainer.save_freq"),
        ("runner.eval_interval", "trainer.test_freq"),
    ):
        given = s.get(theirs)
        every = "epoch" if given == "after_each_epoch" else whole(given)
        if every is None:
            c.missing(f'{ours} is a number of steps, or "epoch"', theirs)
        elif theirs not in c.outcomes:
            c.put(ours, every if every == "epoch" or every > 0 else -1, theirs)


def _optimizer(s: Source) -> None:
    c, name, package = s.c, "optim.optimizer", "optim.optimizer_impl"
    origin = str(c.get(package, "torch.optim"))
    kind = str(c.get(name, "AdamW"))
    if origin.partition(".")[0] in rules.PACKAGES:
        rules.choose_optimizer(c, name, "optim.override_optimizer_config")
        c.not_needed("the class is named by optimizer", package)
    else:
        c.put("actor.optim.name", f"{origin}:{kind}", name, package)
        c.put("actor.optim.args", c.get("optim.override_optimizer_config", {}), "optim.override_optimizer_config")
    c.put("actor.optim.lr", as_number(s.get("optim.lr")), "optim.lr", comment=s.origin("optim.lr"))
    if "adam" in kind.lower():
        pair = [as_number(one) for one in listed(s.get("optim.betas"))]
        for place, ours in enumerate(("actor.optim.adam_beta1", "actor.optim.adam_beta2")):
            c.put(ours, [*pair, None, None][place], "optim.betas", comment=s.origin("optim.betas"))
    else:
        c.not_needed(f"{kind} has none", "optim.betas")
    decay = as_number(s.get("optim.weight_decay"))
    comment = s.origin("optim.weight_decay")
    c.put("actor.optim.weight_decay", decay, "optim.weight_decay", comment=comment)
    if decay and not s.adapts:
        groups = [{"pattern": ".", "weight_decay": decay}]
        c.put("actor.optim.groups", groups, comment=f"{NAME} decays norms and biases too; shardtune does not")


def _schedule(s: Source) -> None:
    c = s.c
    keys = ("optim.lr_scheduler",) if s.is_older else ("optim.warmup_style", "optim.lr_scheduler_type")
    name = next((key for key in keys if c.has(key)), keys[-1])
    kind = str(s.get(name))
    others = {"optim.lr_scheduler", "optim.lr_scheduler_type", "optim.warmup_style"} - {name}
    c.not_needed(f"{name} replaces it", *others)
    if kind not in ("constant", "cosine", "wsd"):
        c.missing("constant, linear, cosine and wsd are the schedules here; cosine is written: compare", name)
        kind = "cosine"
    c.put("actor.optim.lr_scheduler", kind, name, comment=s.origin(name))
    if kind == "wsd":
        c.notes.append(f"{NAME}'s wsd falls in a cosine over the last tenth after the warm-up; here it falls linearly")
    floor = number(c.get("optim.min_lr_ratio")) or 0.0
    if kind == "cosine" and floor:
        rate = number(s.get("optim.lr")) or 0.0
        c.put(
            "actor.optim.min_lr",
            float(f"{floor * rate:.12g}"),
            "optim.min_lr_ratio",
            comment=f"min_lr_ratio: {floor:g} × lr",
        )
    else:
        c.not_needed("only a cosine falls to it" if floor else "it is 0", "optim.min_lr_ratio")
    _warmup(s)


def _warmup(s: Source) -> None:
    """Steps, or a share of those of the run that is rounded down; it begins at 0."""
    c, steps, ratio = s.c, "optim.lr_warmup_steps", "optim.lr_warmup_steps_ratio"
    count, share = whole(c.get(steps)) or -1, number(s.get(ratio)) or 0.0
    total = None if s.is_older else whole(c.get("trainer.total_training_steps"))
    if count > 0 and not s.is_older:
        c.put(rules.WARMUP, count, steps)
        c.not_needed(f"{steps} replaces it", ratio)
    elif share and total:
        count = int(share * total)
        c.put(rules.WARMUP, count, ratio, comment=f"{share:g} of {total} steps, rounded down")
    elif share:
        count = 1
        where = f"{s.origin(ratio)}; of the number of steps, rounded to the nearest (there: down)"
        c.put(rules.RATIO, share, ratio, comment=where)
    if count > 0:
        c.put(rules.FROM_ZERO, True, comment=rules.FIRST_STEP)
    c.not_needed("fsdp_sft_trainer reads the ratio alone" if s.is_older else "there is none by a number", steps)
    c.record(ratio, Kind.DEFAULT, "there is no warm-up")


def _model(s: Source) -> None:
    c = s.c
    for name in ("model.partial_pretrain", "model.path"):
        if c.has(name):
            c.put("actor.model.model_path", c.path(c.get(name)), name)
    if c.has("model.external_lib"):
        c.put("plugins", [str(c.get("model.external_lib"))], "model.external_lib")
    stored = "model.fsdp_config.model_dtype" if s.is_older else "engine.model_dtype"
    computed = PRECISIONS.get(str(c.get("engine.dtype", "bf16")), "bf16")
    c.put(PRECISION, computed, "engine.dtype")
    if PRECISIONS.get(str(c.get(stored, "fp32"))) == "bf16":
        c.missing(
            f"trained weights and the optimizer's states are fp32 here: more exact, more memory; {PRECISION}: "
            "pure_bf16 and actor.optim.state_dtype: bf16 take as little as there",
            stored,
        )
    c.record(stored, Kind.DEFAULT, "trained weights are fp32")
    if is_on(c.get("model.mtp.enable")) or is_on(c.get("model.mtp.enable_train")):
        c.missing(NO_MTP, "model.mtp")
    else:
        c.not_needed("it is off", "model.mtp")


def _lora(s: Source) -> None:
    c = s.c
    keys = ("model.lora_rank", "model.lora_alpha", "model.target_modules", "model.exclude_modules")
    if not s.adapts:
        c.not_needed("lora_rank is 0", *keys)
        return
    c.put("actor.model.is_lora", True, "model.lora_rank", "model.lora_adapter_path")
    if c.has("model.lora_adapter_path"):
        c.put(f"{LORA}.load_from", c.path(c.get("model.lora_adapter_path")), "model.lora_adapter_path")
        c.not_needed("an adapter has its own rank, alpha and modules", *keys)
        return
    c.put(f"{LORA}.r", whole(c.get("model.lora_rank")), "model.lora_rank", always=True)
    c.put(f"{LORA}.alpha", as_number(c.get("model.lora_alpha", 16)), "model.lora_alpha", always=True)
    modules = names(c.get("model.target_modules", "all-linear"))
    c.put(f"{LORA}.target_modules", modules, "model.target_modules")


def _layout(s: Source) -> None:
    c, size = s.c, "engine.fsdp_size"
    c.put(f"{PARALLEL}.sequence", s.sequence, s.sequence_key)
    shard = whole(c.get(size)) or -1
    groups = (c.world_size or 1) // s.sequence
    if shard > 0 and groups > shard:
        c.put(f"{PARALLEL}.data_replicate", groups // shard, size, comment=f"{groups} ranks in groups of {size}")
        c.put(f"{PARALLEL}.data_shard", shard, size)
    elif shard > 1 and c.world_size is None:
        c.missing(f"{PARALLEL}.data_shard: N, with {PARALLEL}.data_replicate: ranks / N", size)
    c.record(size, Kind.DEFAULT, f"{PARALLEL}.data_shard: -1, all ranks")
    switches = ["engine.param_offload", "engine.optimizer_offload", "engine.offload_policy"]
    if s.is_older:
        switches = ["model.fsdp_config.cpu_offload", "model.fsdp_config.offload_params"]
    if any(is_on(c.get(name)) for name in switches if name != "model.fsdp_config.offload_params"):
        c.put(OFFLOAD.partition(":")[0], True, *switches)
    else:
        c.not_needed("nothing is offloaded", *switches)
    backend = str(c.get("model.strategy" if s.is_older else "engine.strategy", "fsdp"))
    if not backend.startswith("fsdp"):
        c.missing("models are sharded with FSDP2, and by actor.parallel", "engine.strategy", "model.strategy")
    _ranks(s)


def _ranks(s: Source) -> None:
    """The ranks, which torchrun counts where it starts them, and Ray by these keys."""
    c, hosts, each = s.c, "trainer.nnodes", "trainer.n_gpus_per_node"
    if c.world_size is not None:
        c.not_needed("the processes are counted by what started them", hosts, each)
        return
    if c.has(each):
        c.put("runner.nproc_per_node", whole(c.get(each)), each)
    if (whole(c.get(hosts)) or 1) > 1:
        c.missing("torchrun on each host, or runner.launcher: ray with runner.num_ranks: N", hosts)
    c.record(hosts, Kind.DEFAULT, "one host")


def _output(s: Source) -> None:
    c, folder, name = s.c, "trainer.default_local_dir", "trainer.experiment_name"
    c.put("runner.logger.project_name", s.get("trainer.project_name"), "trainer.project_name")
    if c.has(folder):
        rules.run_directory(c, folder, name)
    else:
        c.put("runner.logger.experiment_name", s.get(name), name, comment=s.origin(name))
    backends = [one for one in listed(s.get("trainer.logger")) if one not in ("console", "file")]
    rules.loggers(c, "trainer.logger", backends)
    seed = "engine.seed" if c.has("engine.seed") and not c.has("trainer.seed") else "trainer.seed"
    c.put("runner.seed", whole(s.get(seed)), seed, comment=s.origin(seed))
    c.not_needed(
        "runner.seed is for everything", *(n for n in ("engine.seed", "trainer.seed") if n != seed and c.has(n))
    )
    if c.get("trainer.max_ckpt_to_keep") is None:
        c.notes.append(f"{NAME} keeps every checkpoint unless max_ckpt_to_keep is given; here runner.keep_last, 3")
    mode = str(c.get("trainer.resume_mode", "auto"))
    if mode == "disable":
        c.put("runner.resume_dir", None, "trainer.resume_mode")
    elif mode == "resume_path":
        c.missing(
            "checkpoints of others are not read: a model of theirs is actor.model.model_path", "trainer.resume_mode"
        )
    c.record("trainer.resume_mode", Kind.DEFAULT, "the same command continues a run")
    window = [whole(one) or 0 for one in listed(c.get("trainer.profile_interval"))]
    if len(window) == 2 and window[0] > 0:
        c.put("runner.profile_steps", window, "trainer.profile_interval")
    c.record("trainer.profile_interval", Kind.DEFAULT, "no step is profiled")
