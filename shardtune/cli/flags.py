"""Flags in the words of other trainers, where one key of ours means the same; what a flag may name otherwise."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple, get_args

from shardtune.config.keys import ALIASES, IN_ROWS, KEYS, section_type
from shardtune.errors import ConfigError

MODEL, TRAIN, EVAL = "actor.model.model_path", "data.train_data_paths", "data.eval_data_paths"
NAME, FOLDER = "runner.logger.experiment_name", "runner.logger.log_path"
SAME: Mapping[str, str] = {
    **dict.fromkeys(("model", "model_name", "model_name_or_path", "base_model"), MODEL),
    **dict.fromkeys(("data", "dataset", "dataset_name", "train_data", "train_file", "train_dataset"), TRAIN),
    **dict.fromkeys(("eval_data", "eval_file", "eval_dataset", "validation_file", "val_data"), EVAL),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), "runner.max_epochs"),
    **dict.fromkeys(("max_seq_length", "max_seq_len", "sequence_len", "cutoff_len"), "data.max_length"),
    **dict.fromkeys(("name", "run_name"), NAME),
    **dict.fromkeys(("nproc", "num_gpus", "num_processes"), "runner.nproc_per_node"),
    **dict.fromkeys(("lora_r", "lora_rank"), "actor.model.lora.r"),
    "lora_alpha": "actor.model.lora.alpha",
    "lora_dropout": "actor.model.lora.dropout",
    "learning_rate": "actor.optim.lr",
    "max_grad_norm": "actor.optim.clip_grad",
    "warmup_steps": "actor.optim.lr_warmup_steps",
    "warmup_ratio": "actor.optim.lr_warmup_steps_ratio",
    "lr_scheduler_type": "actor.optim.lr_scheduler",
    "eval_steps": "runner.eval_interval",
    "save_steps": "runner.save_interval",
    "logging_steps": "runner.logger.log_interval",
}
"""Flags, and the key that means the same; hyphens are underscores here."""
FIXED: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("lora", "use_lora", "use_peft"), ("actor.model.is_lora", "true")),
    **{dtype: ("actor.model.precision", dtype) for dtype in ("bf16", "pure_bf16", "fp16", "fp32", "fp64")},
}
"""Flags without a value: key and value."""
RUN_DIRECTORY = ("output_dir", "out_dir", "run_dir")
"""Flags of the run directory itself, which is two keys of ours."""
TRUTHS = ("true", "false", "True", "False")
SEVERAL = (TRAIN, EVAL)
"""Keys whose flags may be repeated."""
UNCLEAR: Mapping[str, str] = {
    "cache_dir": "data.cache_dir=DIR for the tokenised rows, runner.logger.log_path=DIR for the run directories, or "
    "the environment variable HF_HOME for downloads",
}
"""Flags that mean different things in different trainers, and what to type."""
SHORT_SECTIONS = ("runner", "runner.logger", "actor", "actor.model", "actor.tokenizer", "actor.optim", "data", "eval")
"""Sections whose keys may be named by their last part alone, as a flag."""


class Flag(NamedTuple):
    """What a flag stands for.

    Attributes:
        key: dotted; the name itself, with underscores, if no key is known for it.
        switch: the value if none is given; None: one is required.
        values: what else a switch may be set to.
    """

    key: str
    switch: str | None = None
    values: Collection[str] = ()


def find_flag(name: str) -> Flag:
    """What a flag stands for; `--learning-rate` and `--learning_rate` are one, `--no_NAME` switches off.

    Args:
        name: without the dashes before it.

    Raises:
        ConfigError: the flag means different things in different trainers.
    """
    plain = name.replace("-", "_")
    if plain in UNCLEAR:
        raise ConfigError(f"--{name} could mean several things", where=f"--{name}", remedy=UNCLEAR[plain])
    if plain in FIXED:
        key, value = FIXED[plain]
        return Flag(key, value, TRUTHS if value == "true" else ())
    if plain.startswith("no_") and (meant := find_flag(plain.removeprefix("no_"))).switch == "true":
        return Flag(meant.key, "false")
    key = SAME.get(plain) or _by_last_part(plain) or (name if "." in name and plain not in KEYS else plain)
    if key not in KEYS or bool not in (kinds := _kinds(key)):
        return Flag(key)
    return Flag(key, "true", (*TRUTHS, *(("selective",) if str in kinds else ())))


def is_foreign(key: str) -> bool:
    """Whether a flag stands for no key, but is a key of another trainer that `shardtune convert` knows."""
    if key in KEYS or key in ALIASES or key in IN_ROWS or "." in key:
        return False
    from shardtune.config.foreign.hints import hint

    return hint(key) is not None


def known_flags() -> list[str]:
    """The flags of this module, for a misspelt one; a misspelt key is answered by the recipe."""
    return [f"--{name}" for name in (*SAME, *FIXED, *RUN_DIRECTORY)]


def _by_last_part(name: str) -> str | None:
    """The key of this last part, if there is a single one."""
    found = [f"{section}.{name}" for section in SHORT_SECTIONS if f"{section}.{name}" in KEYS]
    found = [key for key in found if section_type(KEYS[key].field) is None]
    if f"actor.{name}" in found:  # other systems have some of these in the model's section
        found = [key for key in found if key != f"actor.model.{name}"]
    return found[0] if len(found) == 1 else None


def _kinds(key: str) -> Collection[object]:
    annotation = KEYS[key].field.annotation
    return get_args(annotation) or (annotation,)
