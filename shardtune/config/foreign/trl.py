"""TRL: SFTConfig (with transformers' TrainingArguments), ModelConfig, ScriptArguments and its mixtures of data sets."""

from __future__ import annotations

from collections.abc import Mapping

from shardtune.config.foreign import rules
from shardtune.config.foreign.conversion import Conversion, Kind, short
from shardtune.config.foreign.mixtures import mixture
from shardtune.config.foreign.rows import (
    EVAL,
    TRAIN,
    as_entries,
    entry,
    files_of,
    first_row,
    held_out,
    split_of,
    unread_files,
)
from shardtune.config.foreign.table import By, Missing, NoCounterpart, NotNeeded, Table, To, each
from shardtune.config.foreign.training_arguments import HUB, TRAINING_ARGUMENTS, training_arguments
from shardtune.config.foreign.values import as_number, is_on, names, whole
from shardtune.errors import ConfigError

NAME = "TRL"
LENGTH = 1024
MARKS = (
    *("dataset_name", "assistant_only_loss", "completion_only_loss", "dataset_text_field", "packing_strategy"),
    *("model_name_or_path", "per_device_train_batch_size", "num_train_epochs", "use_peft", "dataset_num_proc"),
)
PLAIN_LORA = "actor.model.is_lora: true"
FOUR_BITS = "actor.model.is_lora: true and actor.model.lora.base_dtype: nf4"


def _loss(value: object) -> object:
    """`loss_type` as a loss of ours."""
    if value in (None, "nll", "chunked_nll"):
        return None
    if value == "dft":
        return "dft"
    raise NoCounterpart("the losses are cross-entropy and dft; another is actor.loss: FILE.py:FUNCTION")


DTYPES = ("torch_dtype", "dtype", "model_init_kwargs.torch_dtype", "model_init_kwargs.dtype")
"""The keys with the dtype that weights are loaded in; the first that is given is used."""
TABLE: Table = {
    **TRAINING_ARGUMENTS,
    "model_name_or_path": To("actor.model.model_path"),
    "model_revision": Missing(
        "write the revision behind the name: model.model_path: OWNER/NAME@REVISION", (None, "main")
    ),
    "dtype": By("actor.model.precision: bf16; weights stay in fp32"),
    "torch_dtype": By("actor.model.precision: bf16; weights stay in fp32"),
    "attn_implementation": To("actor.model.attn_implementation"),
    "trust_remote_code": To("actor.model.trust_remote_code", is_on),
    "model_init_kwargs.attn_implementation": To("actor.model.attn_implementation"),
    "model_init_kwargs.trust_remote_code": To("actor.model.trust_remote_code", is_on),
    **dict.fromkeys(DTYPES[2:], By("actor.model.precision: bf16; weights stay in fp32")),
    "model_init_kwargs": Missing("actor.model.config_overrides: {NAME: VALUE} for values of the model's configuration"),
    "learning_rate": To("actor.optim.lr", as_number, default=2e-5),
    "gradient_checkpointing": To("actor.model.gradient_checkpointing", is_on, default=True, note="changes no number"),
    "use_peft": By(PLAIN_LORA),
    "lora_r": By("actor.model.lora.r: N"),
    "lora_alpha": By("actor.model.lora.alpha: N"),
    "lora_dropout": By("actor.model.lora.dropout: SHARE"),
    "lora_target_modules": By("actor.model.lora.target_modules: [q_proj, v_proj], or all-linear"),
    "lora_target_parameters": By("actor.model.lora.target_parameters: [NAME]"),
    "lora_modules_to_save": By("actor.model.lora.modules_to_save: [NAME]"),
    "lora_task_type": Missing("adapters are those of language models", (None, "CAUSAL_LM")),
    "use_rslora": By("actor.model.lora.use_rslora: true"),
    "use_dora": By("actor.model.lora.use_dora: true"),
    "load_in_4bit": By(FOUR_BITS),
    "load_in_8bit": By("actor.model.lora.base_dtype: nf4 (four bits) or bf16; there are no eight"),
    "bnb_4bit_quant_type": By("actor.model.lora.base_dtype: nf4"),
    "use_bnb_nested_quant": NotNeeded("the scales of NF4 blocks are stored as docs/lora.md has it"),
    "bnb_4bit_quant_storage": NotNeeded("NF4 weights are sharded as they are"),
    "dataset_name": By("data.train_data_paths: FILE or OWNER/NAME"),
    "dataset_config": By("data.train_data_paths: OWNER/NAME:CONFIG"),
    "dataset_train_split": By("data.train_data_paths: {path: OWNER/NAME, split: SPLIT}"),
    "dataset_test_split": By("data.eval_data_paths: {path: OWNER/NAME, split: SPLIT}"),
    "dataset_streaming": Missing("data.cache: by_file trains on the first files while the others are tokenised"),
    "streaming": Missing("data.cache: by_file trains on the first files while the others are tokenised"),
    "datasets": By("data.train_data_paths: [FILE, {path: OWNER/NAME, split: SPLIT}]"),
    **each(
        "dataset_mixture dataset_mixer dataset_splits dataset_configs",
        By("data.train_data_paths: [{path: OWNER/NAME, split: SPLIT, weight: SHARE}]"),
    ),
    "test_split_size": By("data.eval_split: SHARE"),
    "ignore_bias_buffers": NotNeeded("it is for DDP"),
    "chat_template_path": By("data.chat_template: FILE.jinja"),
    "dataset_text_field": By("data.columns: {text: NAME}"),
    "dataset_kwargs": Missing("rows are always prepared here; data.transform: FILE.py:FUNCTION changes them"),
    "dataset_num_proc": To("data.num_workers", lambda value: whole(value) or 0),
    "eos_token": Missing("set eos_token in the tokenizer's files; the end of a turn is the chat template's"),
    "pad_token": NotNeeded("rows are packed, not padded"),
    "max_length": By("data.max_length: N"),
    "max_seq_length": By("data.max_length: N"),
    "truncation_mode": Missing(
        "data.on_too_long: truncate keeps the start; split, drop and fail are the others", (None, "keep_start")
    ),
    "shuffle_dataset": NotNeeded(
        "rows are shuffled in every epoch, by TRL's sampler too; data.shuffle: false: they are not"
    ),
    "packing": By("nothing: rows are always packed, without attention between them"),
    "packing_strategy": By("nothing: rows are packed whole; data.on_too_long is for longer ones"),
    "eval_packing": NotNeeded("the loss of a row does not depend on packing"),
    "padding_free": NotNeeded("rows are always packed without padding"),
    "pad_to_multiple_of": NotNeeded("rows are packed, not padded"),
    "completion_only_loss": By("data.train_on: assistant (or all)"),
    "assistant_only_loss": By("data.train_on: assistant"),
    "loss_type": To("actor.loss", _loss),
    "activation_offloading": Missing(
        "actor.model.gradient_checkpointing: true saves more; actor.fsdp_config.cpu_offload is for weights"
    ),
    "router_aux_loss_coef": Missing("actor.model.config_overrides: {router_aux_loss_coef: X}"),
    "chat_template": By("data.chat_template: FILE.jinja"),
    "system_prompt": Missing("benchmarks have it there, no row has; data.system_prompt: TEXT is for rows"),
    "callbacks": Missing("runner.callbacks: [FILE.py:CLASS]"),
    "benchmarks": Missing("eval.harness: [TASK] at each evaluation of a run, with the extra harness"),
    **each("hub_model_revision push_to_hub_revision overwrite_hub_revision", Missing(HUB, (None, False, "main"))),
    "wandb_project": To("runner.logger.project_name"),
    "wandb_entity": Missing("WANDB_ENTITY in the environment"),
    "wandb_run_group": Missing("WANDB_RUN_GROUP in the environment"),
    **each("num_of_sequences chars_per_token dataset_batch_size", NotNeeded("rows are tokenised once, into a cache")),
}


OTHER_METHODS = (
    *("beta", "ref_model", "reference_free", "precompute_ref_log_probs", "max_prompt_length", "max_completion_length"),
    *("f_divergence_type", "rpo_alpha", "cpo_alpha", "simpo_gamma", "desirable_weight", "undesirable_weight"),
    *("center_rewards_coefficient", "reward_funcs", "reward_weights", "reward_model_path", "num_generations"),
    *("kl_coef", "num_ppo_epochs", "rloo_k", "lmbda", "seq_kd", "teacher_model_name_or_path"),
)
"""Keys of TRL's trainers for preferences, rewards and distillation, which SFTConfig does not have."""


def convert(c: Conversion) -> None:
    """Read a configuration of TRL.

    Raises:
        ConfigError: it is for another of TRL's trainers.
    """
    other = next((name for name in OTHER_METHODS if c.has(name)), None)
    if other is not None:
        raise ConfigError(
            f"{other}: {short(c.get(other))} is no supervised fine-tuning",
            where=other,
            remedy="keep TRL for preferences, rewards and distillation, or write the method on the engine "
            "(docs/your-method.md); without such keys the file is converted",
        )
    training_arguments(c, logging=10, rate=2e-5, precision="bf16")
    length = _length(c)
    is_packed = is_on(c.get("packing"))
    rules.batch(
        c,
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        rows=8,
        packed=length if is_packed else None,
        packing=("packing",),
    )
    if not is_packed:
        c.record("packing", Kind.DEFAULT, rules.PACKED_ANYWAY)
    else:
        _packing(c)
    lora(c)
    _data(c)
    _train_on(c)


def _packing(c: Conversion) -> None:
    """How rows are packed: what is too long for a packed sequence is cut off, or is in the next ones."""
    name = "packing_strategy"
    strategy = str(c.get(name, "bfd"))
    if strategy == "bfd":
        c.not_needed("rows are packed whole, longer ones are cut", name)
    elif strategy in ("bfd_split", "bfd-requeue"):
        c.put("data.on_too_long", "split", name)
    else:
        c.put("data.on_too_long", "split", comment=f"{name}: {strategy}, which leaves no token out")
        c.missing("rows are packed whole; those longer than data.max_length are in pieces, on_too_long: split", name)


def _length(c: Conversion) -> int:
    name = "max_seq_length" if c.has("max_seq_length") else "max_length"
    if name in c.tree and c.get(name) is None:
        c.missing("rows have a limit here: data.max_length is set to 131072, more than any", name)
        c.put("data.max_length", 131072, comment=f"{name}: null, no limit")
        return LENGTH
    length = whole(c.get(name)) or LENGTH
    c.put("data.max_length", length, name, comment="" if c.has(name) else "TRL's default (max_length)")
    return length


def lora(c: Conversion) -> None:
    """Read the adapter of ModelConfig."""
    dtype = next((name for name in DTYPES if c.has(name)), "dtype")
    c.not_needed(f"{dtype} is set", *(name for name in DTYPES if name != dtype))
    own = [name for name in TABLE if name.startswith("lora_")] + ["use_rslora", "use_dora"]
    if not is_on(c.get("use_peft")):
        c.record("use_peft", Kind.DEFAULT, "actor.model.is_lora: false")
        c.not_needed("use_peft is off", *own)
        c.not_needed("nothing is quantised", "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type")
        c.missing("four bits are for the frozen base of an adapter: actor.model.is_lora", *_switched_on(c))
        _weights(c, dtype)
        return
    c.put("actor.model.is_lora", True, "use_peft")
    for name, key, default in (
        ("lora_r", "actor.model.lora.r", 16),
        ("lora_alpha", "actor.model.lora.alpha", 32),
        ("lora_dropout", "actor.model.lora.dropout", 0.05),
    ):
        c.put(key, c.get(name, default), name, comment="" if c.has(name) else f"TRL's default ({name})")
    for name in ("use_rslora", "use_dora"):
        c.put(f"actor.model.lora.{name}", is_on(c.get(name)), name)
    modules = names(c.get("lora_target_modules") or ["q_proj", "v_proj"])
    comment = "lora_target_modules" if c.has("lora_target_modules") else "PEFT's default for most models; check yours"
    if not c.has("lora_target_parameters") or c.has("lora_target_modules"):
        c.put("actor.model.lora.target_modules", modules, "lora_target_modules", comment=comment)
    for name in ("lora_target_parameters", "lora_modules_to_save"):
        if c.has(name):
            c.put(f"actor.model.lora.{name.removeprefix('lora_')}", listed_names(c.get(name)), name)
    _quantised(c, dtype)


def listed_names(value: object) -> list[str]:
    """A list of names that is a list, whatever it holds."""
    found = names(value)
    return found if isinstance(found, list) else [str(found)]


def _switched_on(c: Conversion) -> list[str]:
    return [name for name in ("load_in_4bit", "load_in_8bit") if is_on(c.get(name))]


def _quantised(c: Conversion, dtype: str) -> None:
    if is_on(c.get("load_in_4bit")):
        c.put("actor.model.lora.base_dtype", "nf4", "load_in_4bit", "bnb_4bit_quant_type", comment="load_in_4bit")
        if str(c.get("bnb_4bit_quant_type", "nf4")) != "nf4":
            c.missing("four bits are NF4 here", "bnb_4bit_quant_type")
        c.not_needed("the base is NF4", dtype, "load_in_8bit")
        return
    if is_on(c.get("load_in_8bit")):
        rules.frozen_base(c, "load_in_8bit")
    elif str(c.get(dtype)).removeprefix("torch.") in ("bfloat16", "bf16") and "actor.model.precision" not in c.lines:
        c.put("actor.model.lora.base_dtype", "bf16", dtype, comment=f"{dtype}: the frozen weights")
    c.not_needed("nothing is quantised", "load_in_4bit", "bnb_4bit_quant_type")
    if not is_on(c.get("load_in_8bit")):
        c.not_needed("nothing is quantised", "load_in_8bit")
    _weights(c, dtype)


def _weights(c: Conversion, dtype: str) -> None:
    """Weights that are trained are in fp32 here by default, whatever they are loaded as."""
    given = str(c.get(dtype, "float32")).removeprefix("torch.")
    if given in ("auto", "float32", "fp32"):
        c.record(dtype, Kind.DEFAULT, "weights are trained in fp32")
    elif dtype in c.outcomes:
        return
    elif "actor.model.is_lora" in c.lines:
        c.missing(
            f"the weights of an adapter are trained in fp32 here, not {given}; actor.model.lora.base_dtype: bf16 is "
            "for the frozen ones",
            dtype,
        )
    else:
        c.missing(
            f"trained weights and their optimizer states are fp32 here, not {given}: more exact, more memory; "
            "actor.model.precision: pure_bf16 and actor.optim.state_dtype: bf16 take as little as there",
            dtype,
        )


def _data(c: Conversion) -> None:
    sets = c.get("datasets")
    evaluates = str(c.get("eval_strategy", c.get("evaluation_strategy", "no"))).lower() not in ("no", "false")
    share = c.get("test_split_size")
    own = ("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split")
    if mixture(c, evaluates):
        c.not_needed("the mixture replaces it", *own)
        return
    if isinstance(sets, list) and any(isinstance(one, Mapping) for one in sets):
        found = [_mixed(c, place, one) for place, one in enumerate(sets) if isinstance(one, Mapping)]
        entries = [one for several in found for one in several]
        c.put(TRAIN, as_entries(entries), comment="datasets")
        if share is not None:
            c.put("data.eval_split", share, "test_split_size", comment="test_split_size; which rows differs")
        c.not_needed("datasets replaces it", *own)
        return
    if not c.has("dataset_name"):
        c.not_needed("no dataset_name", *own[1:])
        return
    path = c.path(c.get("dataset_name")) + (f":{c.get('dataset_config')}" if c.has("dataset_config") else "")
    share = held_out(c.get("dataset_train_split"), c.get("dataset_test_split")) if evaluates else None
    if share is not None:
        _parts_of_one(c, path, share)
        return
    train, lost = split_of(c.get("dataset_train_split"))
    c.put(TRAIN, as_entries([entry(path, **train)]), *_NAMES, "dataset_train_split")
    if lost:
        c.missing(lost, "dataset_train_split")
    if not evaluates:
        c.not_needed("eval_strategy is no", "dataset_test_split")
        return
    test, lost = split_of(c.get("dataset_test_split", "test"))
    comment = "dataset_test_split" if c.has("dataset_test_split") else "TRL's default (dataset_test_split)"
    c.put(EVAL, as_entries([entry(path, **{"split": "train", **test})]), "dataset_test_split", comment=comment)
    if lost:
        c.missing(lost, "dataset_test_split")


_NAMES = ("dataset_name", "dataset_config")


def _parts_of_one(c: Conversion, path: str, share: float) -> None:
    """Write two parts of one split, `train[:95%]` and `train[95%:]`, as a share of it that is held out."""
    split = str(c.get("dataset_train_split")).partition("[")[0].strip()
    c.put(TRAIN, as_entries([entry(path, split=None if split == "train" else split)]), *_NAMES)
    both = ("dataset_train_split", "dataset_test_split")
    c.put("data.eval_split", share, *both, comment=f"{', '.join(both)}; which rows differs")


def _mixed(c: Conversion, place: int, given: Mapping[str, object]) -> list[dict[str, object]]:
    """The entries of one data set of a mixture."""
    name = f"datasets[{place}]"
    options, lost = split_of(given.get("split"))
    paths = files_of(c, given.get("path"), given.get("data_files"), given.get("split"))
    if isinstance(given.get("data_files"), Mapping):
        options.pop("split", None)
    if given.get("columns"):
        c.not_needed("columns that no row format has are ignored", f"{name}.columns")
    if given.get("data_dir"):
        paths = [c.path(f"{given.get('path')}/{given['data_dir']}")]
    options |= {"name": given.get("name"), "weight": given.get("fraction")}
    for key in given:
        if key in ("path", "data_files", "data_dir", "name", "split", "fraction"):
            c.record(f"{name}.{key}", Kind.TRANSLATED, f"{TRAIN}: an entry's path, name, split or weight")
        elif key != "columns":
            c.record(f"{name}.{key}", Kind.UNKNOWN, "no key of TRL's data sets that is known here")
    unread_files(c, f"{name}.data_files", given.get("data_files"), given.get("split"))
    if lost:
        c.missing(lost, f"{name}.split")
    return [entry(path, **options) for path in paths]


def _train_on(c: Conversion) -> None:
    column = c.get("dataset_text_field", "text")
    if column != "text":
        c.put("data.columns", {"text": column}, "dataset_text_field")
    else:
        c.record("dataset_text_field", Kind.DEFAULT, "the column is called text here too")
    if c.has("chat_template_path"):
        _template(c)
    c.missing("write it into a file: data.chat_template: FILE.jinja", *(["chat_template"] * c.has("chat_template")))
    if is_on(c.get("assistant_only_loss")) or is_on(c.get("completion_only_loss")):
        c.put("data.train_on", "assistant", "assistant_only_loss", "completion_only_loss", always=True)
        return
    completions = c.get("completion_only_loss")
    line = c.lines.get(TRAIN)
    first = line.value[0] if line and isinstance(line.value, list) else line.value if line else None
    row = first_row(c, str(first["path"] if isinstance(first, Mapping) else first)) if first else {}
    if completions is None and {"prompt", "completion"} <= row.keys():
        c.put(
            "data.train_on",
            "assistant",
            "assistant_only_loss",
            always=True,
            comment="TRL's default for prompt/completion",
        )
        return
    comment = "TRL's default: all tokens of a conversation"
    c.put("data.train_on", "all", "assistant_only_loss", "completion_only_loss", comment=comment)
    if completions is None and not row:
        c.notes.append(
            "the rows are not at hand: data.train_on is all, as TRL trains conversations without assistant_only_loss; "
            "for rows with prompt and completion TRL trains the completion: write data.train_on: assistant"
        )


def _template(c: Conversion) -> None:
    path = str(c.get("chat_template_path"))
    if path.endswith((".jinja", ".j2", ".txt")):
        c.put("data.chat_template", c.path(path), "chat_template_path")
    else:
        c.missing("name the template's file, data.chat_template: FILE.jinja, from that tokenizer", "chat_template_path")
