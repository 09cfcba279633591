"""What a key of the recipe is: `shardtune config explain KEY`."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from shardtune.config.foreign.hints import counterpart, hint
from shardtune.config.keys import ALIASES, IN_ROWS, KEYS, OTHER_NAMES, Key, allowed, is_free_mapping
from shardtune.config.loading import ENTRY_TYPES
from shardtune.config.schema import ACTOR, ACTOR_KEYS, FORMER_KEYS, OTHER_KEYS, Recipe, long_key, present_key, short_key
from shardtune.errors import ConfigError

REFERENCE = "docs/configuration.md"
SHORT = "short for"
OF_ACTOR = re.compile(rf"\b{ACTOR}\.")
EXAMPLES = {
    "actor.model.value_head.sizes": "[256]",
    "actor.model.value_head.discount": "0.99",
    "plugins": "[my_model.py]",
    "runner.allow_changes": "[optim.lr]",
    "runner.keep_every": "1000",
    "runner.profile_steps": "[10, 12]",
    "runner.num_ranks": "8",
    "runner.master_port": "29500",
    "runner.min_ranks": "4",
    "runner.callbacks": "[my_callbacks.py:Plot]",
    "runner.on_spike": "rollback",
    "data.mixed_files": "8",
    "data.cache_limit": "200",
    "data.quarantine": "quarantine.jsonl",
    "runner.max_anomalies": "20",
    "runner.best.monitor": "eval/eval_accuracy",
    "runner.push_to_hub": "me/my-model",
    "runner.logger.experiment_name": "first",
    "runner.ray.address": "auto",
    "runner.ray.gpus_per_rank": "1",
    "runner.ray.resources": "{a100: 1}",
    "actor.max_tokens_per_micro_batch": "8192",
    "actor.fill_micro_batches": "true",
    "actor.eval_micro_batch_size": "16",
    "actor.global_batch_tokens": "65536",
    "actor.loss": "dft",
    "actor.neftune_alpha": "5.0",
    "actor.teacher.model_path": "Qwen/Qwen3-8B",
    "actor.teacher.precision": "bf16",
    "actor.teacher.top_k": "64",
    "actor.optim.ema_decay": "0.999",
    "actor.worker": "my_worker.py:MyWorker",
    "actor.model.model_path": "Qwen/Qwen3-0.6B",
    "actor.model.config_overrides": "{attention_dropout: 0.1}",
    "actor.model.adapter": "my_model.py:MyModel",
    "actor.model.options": "{width: 256}",
    "actor.model.kernels.source": "liger",
    "actor.model.kernels.parts": "[rms_norm, swiglu]",
    "actor.model.fp8.scaling": "rowwise_with_gw_hp",
    "actor.model.fp8.exclude": "[down_proj]",
    "actor.model.freeze": "[vision_tower]",
    "actor.model.vocab_size": "32000",
    "actor.model.hidden_size": "4096",
    "actor.model.image_size": "[224, 224]",
    "actor.model.action_token_len": "7",
    "actor.model.unnorm_key": "bridge_orig",
    "actor.model.action_prompt": "'What should the robot do to {instruction}?'",
    "actor.model.action_state": "text",
    "actor.model.action_statistics": "dataset_statistics.json",
    "actor.model.action_normalization_mask": "{gripper: false}",
    "actor.model.action_representation_mask": "{gripper: false}",
    "actor.model.normalization_mapping": "{STATE: MEAN_STD, ACTION: MIN_MAX}",
    "actor.model.lora.target_parameters": "[experts.down_proj]",
    "actor.model.lora.exclude_modules": "[down_proj]",
    "actor.model.lora.layers_to_transform": "[0, 1, 2]",
    "actor.model.lora.layers_pattern": "[layers]",
    "actor.model.lora.rank_pattern": "{q_proj: 8}",
    "actor.model.lora.alpha_pattern": "{q_proj: 16}",
    "actor.model.lora.modules_to_save": "[lm_head]",
    "actor.model.lora.peft": "{peft_type: IA3, feedforward_modules: [down_proj]}",
    "actor.model.lora.load_from": "runs/lora/final",
    "actor.tokenizer.tokenizer_model": "Qwen/Qwen3-0.6B",
    "actor.tokenizer.new_tokens": "[<call>, </call>]",
    "actor.optim.args": "{momentum: 0.9}",
    "actor.optim.groups": "[{pattern: embed_tokens, lr: 1.0e-6}]",
    "actor.fsdp_config.wrap": "[LlamaDecoderLayer]",
    **dict.fromkeys(("data.audit.max_dropped", "data.audit.max_truncated"), "0.05"),
    **dict.fromkeys(
        (
            "data.audit.max_without_target",
            "data.audit.max_near_empty",
            "data.audit.max_untrained_ends",
            "data.audit.max_duplicates",
            "data.audit.max_near_duplicates",
        ),
        "0.01",
    ),
    "data.audit.max_contamination": "0",
    "data.audit.min_trained_share": "0.1",
    "data.train_data_paths": "[a.jsonl, {path: b.jsonl, weight: 2}]",
    "data.eval_data_paths": "{math: a.jsonl, chat: b.jsonl}",
    "data.columns": "{question: problem, answer: solution}",
    "data.transform": "my_rows.py:clean",
    "data.chat_template": "chatml",
    "data.split_stride": "1024",
    "data.system_prompt": "'Be brief.'",
    "data.template_kwargs": "{enable_thinking: false}",
    "data.thinking": "keep",
    "data.ignored_keys": "[turn_id, language]",
    "data.image_hosts": "[images.example.com]",
    "data.cache_dir": "cache",
    "eval.answer_pattern": "'#### (.+)'",
    "eval.num_samples": "200",
    "eval.metrics": "[my_metrics.py:f1]",
    "eval.harness": "[hellaswag, gsm8k]",
    "eval.harness_options": "{limit: 100, num_fewshot: 5}",
    "eval.environment": "reach",
    "eval.environment_options": "{max_steps: 60}",
    "eval.action_steps": "4",
    "eval.temporal_ensembling": "0.01",
}
"""Values, as YAML, of the keys whose default is null or empty; the example of any other key is its default."""


def explain(name: str) -> str:
    """What a key, or each key of a group, is.

    Args:
        name: short, long or former, or another system's; the last part alone where only one key ends in it.

    Raises:
        ConfigError: there is no such key; the message has the nearest ones.
    """
    name = name.strip().strip(".")
    entry = _entry(name)
    if entry is not None:
        return entry
    key = _find(name)
    relation = _relation(name, key)
    first = "" if name in (key, short_key(key)) else f"{name} is {relation} {short_key(key)}\n\n"
    if relation == SHORT and not key.endswith(f".{name}") and first:
        first = f"there is no key {name}; {_hint(name)}\n\n"
    return first + "\n".join(_of_group(KEYS[key]) if KEYS[key].section else _of_key(KEYS[key]))


def example(key: str) -> str:
    """A valid value of a key, as YAML."""
    return EXAMPLES.get(key) or _yaml(_default(KEYS[key]))


def _find(name: str) -> str:
    """The key that a name means."""
    key = present_key(name)
    while key not in KEYS and "." in key:  # below a mapping with names of the user's choice
        parent = key.rpartition(".")[0]
        if parent in KEYS and not is_free_mapping(KEYS[parent].field):
            break
        key = parent
    if key in KEYS:
        return key
    last = name.rpartition(".")[2]
    ending = [known for known in KEYS if known.endswith(f".{name}") and known not in OTHER_KEYS]
    former = [known for known in FORMER_KEYS if known.endswith(f".{name}")]
    named = ALIASES.get(name) or IN_ROWS.get(name) or (ending[0] if len(ending) == 1 else None)
    named = named or (FORMER_KEYS[former[0]] if former and not ending else None) or OTHER_NAMES.get(name)
    named = named or counterpart(name)
    if named is not None:
        return named
    near = [short_key(known) for known in ending]
    near += [short_key(known) for known in KEYS if known.rpartition(".")[2] == last]
    near += difflib.get_close_matches(name, [short_key(known) for known in KEYS], n=5, cutoff=0.6)
    lasts = {known.rpartition(".")[2]: short_key(known) for known in KEYS}
    near += [lasts[word] for word in difflib.get_close_matches(last, lasts, n=5, cutoff=0.7)]
    raise ConfigError(
        f"there is no key {name}",
        where="shardtune config explain",
        remedy=_hint(name)
        or (f"the nearest are: {', '.join(dict.fromkeys(near))}" if near else f"{REFERENCE} lists all keys"),
    )


def _hint(name: str) -> str | None:
    """What to write for another trainer's key, in the short form of our keys; None for any other name."""
    found = hint(name) if "." not in name else None
    return found and OF_ACTOR.sub("", found)


def _relation(name: str, key: str) -> str:
    if name not in ALIASES and key.endswith(f".{name}"):
        return "short for"
    if long_key(name) in FORMER_KEYS or any(former.endswith(f".{name}") for former in FORMER_KEYS):
        return "a former name, which goes on working, of"
    if long_key(name) in OTHER_KEYS or name in ALIASES:
        return "another name, which works too, of"
    if name in IN_ROWS:
        return "HALOs' name, in rows instead of steps, of"
    if name in OTHER_NAMES:
        return "another system's name of"
    return "below" if long_key(name).startswith(f"{key}.") else SHORT


def _of_key(key: Key) -> Iterator[str]:
    short, section = short_key(key.name), short_key(key.name).rpartition(".")[0]
    yield short
    yield f"  type        {allowed(key.field)}"
    yield f"  default     {_yaml(_default(key))}"
    yield f"  meaning     {key.field.description}"
    value, (*outer, last) = example(key.name), short.split(".")
    written = f"{last}: {value}"
    for part in reversed(outer):
        written = f"{part}: {{{written}}}"
    quoted = "'" if any(character in value for character in "{[ <'") else ""
    inside = value.replace("'", '"')
    yield f"  example     {written}"
    yield f"              shardtune train recipe.yaml {quoted}{short}={inside}{quoted}"
    if key.name.startswith(f"{ACTOR}."):
        yield f"  in full     {key.name}, which means the same"
    former = [short_key(name) for name, present in OTHER_KEYS.items() if present == key.name]
    if former:
        yield f"  formerly    {', '.join(former)}"
    halos = [name for name, ours in {**ALIASES, **IN_ROWS}.items() if ours == key.name]
    if halos:
        yield f"  in HALOs    {', '.join(halos)}"
    if key.name in ENTRY_TYPES:
        yield f"  entries     {', '.join(ENTRY_TYPES[key.name].model_fields)}; explain {short}.NAME"
    yield f"  documented  {REFERENCE}, " + (f"`{section}`" if section else "at the top")


def _of_group(group: Key) -> Iterator[str]:
    short = short_key(group.name)
    yield f"{short}: {group.field.description}"
    names = [name for name in KEYS if name.rpartition(".")[0] == group.name and name not in OTHER_KEYS]
    width = max(len(short_key(name)) for name in names)
    for name in names:
        key = KEYS[name]
        about = "a group of keys" if key.section else f"{_yaml(_default(key))} ({allowed(key.field)})"
        yield f"  {short_key(name):<{width}}  {about}"


def _entry(name: str) -> str | None:
    """What a key of an entry of a list is (`optim.groups.lr`); None for any other name."""
    key, _, last = present_key(name).rpartition(".")
    kind: type[BaseModel] | None = ENTRY_TYPES.get(key)
    if kind is None or last not in kind.model_fields:
        return None
    field = kind.model_fields[last]
    default: object = field.get_default(call_default_factory=True, validated_data={})
    return "\n".join(
        [
            f"{last}, in an entry of {short_key(key)}",
            f"  type        {allowed(field)}",
            f"  default     {'required' if default is PydanticUndefined else _yaml(default)}",
            f"  meaning     {field.description}",
            f"  documented  {REFERENCE}, An entry of `{short_key(key)}`",
        ]
    )


def groups() -> str:
    """All groups of keys, and the keys at the top."""
    found = [name for name, entry in KEYS.items() if entry.section and name != ACTOR]
    width = max(len(short_key(name)) for name in found)
    lines = [f"  {short_key(name):<{width}}  {KEYS[name].field.description}" for name in found]
    top = [name for name in (*Recipe.model_fields, *ACTOR_KEYS) if not KEYS[long_key(name)].section]
    return "\n".join(["groups of keys:", *lines, f"at the top: {', '.join(top)}", "shardtune config explain NAME"])


def _default(key: Key) -> object:
    return key.field.get_default(call_default_factory=True, validated_data={})


def _yaml(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
