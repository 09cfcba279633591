"""The recipe's dotted keys: their allowed values, their names in other systems, and the nearest to a misspelt key."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shardtune.config.schema import Recipe, short_key
from shardtune.config.values import Allowed

# HALOs' names, as its configuration spells them; `config/halos.py` has those that are no mere names of ours.
ALIASES = {
    "seed": "runner.seed",
    "lr": "actor.optim.lr",
    "optimizer": "actor.optim.name",
    "weight_decay": "actor.optim.weight_decay",
    "beta1": "actor.optim.adam_beta1",
    "beta2": "actor.optim.adam_beta2",
    "eps": "actor.optim.adam_eps",
    "warmup": "actor.optim.lr_warmup_steps_ratio",
    "warmup_steps": "actor.optim.lr_warmup_steps",
    "n_epochs": "runner.max_epochs",
    "exp_name": "runner.logger.experiment_name",
    "cache_dir": "runner.logger.log_path",
    "datasets": "data.train_data_paths",
    "train_datasets": "data.train_data_paths",
    "test_datasets": "data.eval_data_paths",
    "template_tokens": "actor.tokenizer.new_tokens",
    "do_first_eval": "runner.eval_before_training",
    "fsdp_port": "runner.master_port",
    "model.name_or_path": "actor.model.model_path",
    "model.tokenizer_name_or_path": "actor.tokenizer.tokenizer_model",
    "model.batch_size": "actor.global_batch_size",
    "model.microbatch_size": "actor.micro_batch_size",
    "model.eval_microbatch_size": "actor.eval_micro_batch_size",
    "model.max_length": "data.max_length",
    "model.max_grad_norm": "actor.optim.clip_grad",
    "model.policy_dtype": "actor.model.precision",
    "model.attn_implementation": "actor.model.attn_implementation",
    "model.activation_checkpointing": "actor.model.gradient_checkpointing",
    "model.block_name": "actor.fsdp_config.wrap",
    "model.use_peft": "actor.model.is_lora",
    "model.peft.lora_r": "actor.model.lora.r",
    "model.peft.lora_alpha": "actor.model.lora.alpha",
    "model.peft.lora_dropout": "actor.model.lora.dropout",
    "model.peft.target_modules": "actor.model.lora.target_modules",
    "model.load_lora_from": "actor.model.lora.load_from",
    "wandb.enabled": "runner.logger.logger_backends",
    "wandb.project": "runner.logger.project_name",
}

# HALOs' names for numbers of rows where ours are numbers of steps, or of its two intervals in one.
IN_ROWS = {
    "eval_every": "runner.eval_interval",
    "intermediate_checkpoints": "runner.save_interval",
    "n_examples": "runner.max_steps",
}

# HALOs' defaults that differ from ours, for `loss=sft` without a recipe.
HALOS_DEFAULTS = {"actor": {"optim": {"lr": 5.0e-6}}}

# Other trainers' names of our keys, used for "did you mean" only.
OTHER_NAMES = {
    "batch_size": "actor.global_batch_size",
    "train_batch_size": "actor.global_batch_size",
    "per_device_train_batch_size": "actor.micro_batch_size",
    "per_device_eval_batch_size": "actor.eval_micro_batch_size",
    "gradient_accumulation_steps": "actor.global_batch_size",
    "learning_rate": "actor.optim.lr",
    "optimizer": "actor.optim.name",
    "adam_epsilon": "actor.optim.adam_eps",
    "betas": "actor.optim.adam_beta1",
    "label_smoothing_factor": "actor.label_smoothing",
    "max_grad_norm": "actor.optim.clip_grad",
    "gradient_clipping": "actor.optim.clip_grad",
    "scheduler": "actor.optim.lr_scheduler",
    "lr_scheduler_type": "actor.optim.lr_scheduler",
    "warmup_style": "actor.optim.lr_scheduler",
    "warmup_steps": "actor.optim.lr_warmup_steps",
    "warmup_ratio": "actor.optim.lr_warmup_steps_ratio",
    "num_train_epochs": "runner.max_epochs",
    "num_epochs": "runner.max_epochs",
    "epochs": "runner.max_epochs",
    "total_steps": "runner.max_steps",
    "eval_steps": "runner.eval_interval",
    "eval_every": "runner.eval_interval",
    "compute_metrics": "eval.metrics",
    "early_stopping_patience": "runner.early_stop.patience",
    "early_stopping_threshold": "runner.early_stop.min_delta",
    "save_steps": "runner.save_interval",
    "save_total_limit": "runner.keep_last",
    "resume_from_checkpoint": "runner.resume_dir",
    "logging_steps": "runner.logger.log_interval",
    "report_to": "runner.logger.logger_backends",
    "output_dir": "runner.logger.log_path",
    "run_name": "runner.logger.experiment_name",
    "name_or_path": "actor.model.model_path",
    "revision": "actor.model.model_path",
    "model_revision": "actor.model.model_path",
    "model_name_or_path": "actor.model.model_path",
    "base_model": "actor.model.model_path",
    "dtype": "actor.model.precision",
    "bf16": "actor.model.precision",
    "fp16": "actor.model.precision",
    "use_peft": "actor.model.is_lora",
    "lora_r": "actor.model.lora.r",
    "lora_alpha": "actor.model.lora.alpha",
    "lora_dropout": "actor.model.lora.dropout",
    "tokenizer_name": "actor.tokenizer.tokenizer_model",
    "train_files": "data.train_data_paths",
    "train_data": "data.train_data_paths",
    "val_files": "data.eval_data_paths",
    "eval_data": "data.eval_data_paths",
    "max_seq_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "sequence_len": "data.max_length",
    "cutoff_len": "data.max_length",
    "world_size": "runner.nproc_per_node",
    "num_gpus": "runner.nproc_per_node",
}


@dataclass(frozen=True, slots=True)
class Key:
    """One entry of the schema: its dotted name, its field, and for a section the section's type."""

    name: str
    field: FieldInfo
    section: type[BaseModel] | None


def section_type(field: FieldInfo) -> type[BaseModel] | None:
    """The type of a section's field; None for an ordinary key."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def is_free_mapping(field: FieldInfo) -> bool:
    """Whether a key holds a mapping with names of the user's choice."""
    return get_origin(field.annotation) is dict


def walk(section: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[Key]:
    """All sections and keys, in the order of the schema, a section before what it holds."""
    for name, field in section.model_fields.items():
        inner = section_type(field)
        yield Key(prefix + name, field, inner)
        if inner is not None:
            yield from walk(inner, f"{prefix}{name}.")


KEYS: dict[str, Key] = {entry.name: entry for entry in walk()}


def allowed(field: FieldInfo) -> str:
    """The allowed values of a key, for messages: `a number > 0`, `cosine, linear`, `true or false`."""
    return _in_words(field.annotation, field.metadata)


def _in_words(annotation: object, metadata: Sequence[object]) -> str:
    texts = [item.text for item in metadata if isinstance(item, Allowed)]
    if texts:
        return texts[-1] + (" (or null)" if NoneType in get_args(annotation) else "")
    if get_origin(annotation) is Annotated:
        inner, *extra = get_args(annotation)
        return _in_words(inner, [*extra, *metadata])
    if get_origin(annotation) in (Union, UnionType):
        words = [_in_words(part, metadata) for part in get_args(annotation) if part is not NoneType]
        return ", or ".join([*words, "null"] if NoneType in get_args(annotation) else words)
    if get_origin(annotation) is Literal:
        return ", ".join(str(value) for value in get_args(annotation))
    return _plain_in_words(annotation, metadata)


def _plain_in_words(annotation: object, metadata: Sequence[object]) -> str:
    if get_origin(annotation) is list:
        entry = get_args(annotation)[0]
        if isinstance(entry, type) and issubclass(entry, BaseModel):
            return f"a list of {{{', '.join(entry.model_fields)}}}"
        return f"a list of: {_in_words(entry, [])}"
    if get_origin(annotation) is dict:
        return "a mapping of text to text" if get_args(annotation)[1] is str else "a mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a mapping of {', '.join(annotation.model_fields)}"
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    bounds = " and ".join(_bounds(metadata))
    return f"{kinds[annotation]} {bounds}" if bounds else kinds[annotation]


def _bounds(metadata: Sequence[object]) -> Iterator[str]:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    for item in metadata:
        constraints = item.metadata if isinstance(item, FieldInfo) else [item]
        for constraint in constraints:
            sign = type(constraint).__name__.lower()
            if sign in signs:
                limit = getattr(constraint, sign)
                yield f"{signs[sign]} {'2^63' if limit == 2**63 else limit}"


def nearest(wrong: str) -> str | None:
    """The valid key that a wrong dotted key most probably means; None if none is similar.

    In this order: HALOs' or another trainer's name, the same last part elsewhere (`actor.lr` -> `actor.optim.lr`),
    the most similar spelling.
    """
    last = wrong.rpartition(".")[2]
    known = ALIASES.get(wrong) or ALIASES.get(last) or OTHER_NAMES.get(last.lower())
    if known is not None and last != known.rpartition(".")[2]:
        return known
    same = [name for name in KEYS if name.rpartition(".")[2] == last]
    if same:
        return max(same, key=lambda name: _likeness(name, wrong))
    score, best = max((_similarity(name, wrong), name) for name in KEYS)
    return best if score >= 0.65 else None


def _similarity(name: str, wrong: str) -> float:
    """Mostly that of the last parts, since a misspelt key is usually in about the right section."""
    parent, _, last = short_key(name).rpartition(".")
    wrong_parent, _, wrong_last = short_key(wrong).rpartition(".")
    return 0.7 * _likeness(last, wrong_last) + 0.3 * _likeness(parent, wrong_parent)


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio() if one or other else 1.0
