"""RLinf: most keys of its recipes for supervised fine-tuning are the same here; these are others."""

from __future__ import annotations

from collections.abc import Mapping

from shardtune.config.foreign.conversion import Conversion, Kind
from shardtune.config.foreign.table import By, Missing, NotNeeded, Table, To, each, entry_of
from shardtune.config.foreign.values import PRECISIONS, as_number, is_on, listed, whole
from shardtune.config.keys import KEYS
from shardtune.config.schema import FORMER_KEYS

NAME = "RLinf"
SECTIONS = ("cluster", "algorithm", "hydra")
"""Sections that its files have, and no recipe of ours."""
TRAIN, EVAL, SEED = "data.train_data_paths", "data.eval_data_paths", "runner.seed"
LOG_PATH, EXPERIMENT = "runner.logger.log_path", "runner.logger.experiment_name"
MODEL_TYPE, PRECISION = "actor.model.model_type", "actor.model.precision"
COMPUTED_IN = "actor.fsdp_config.mixed_precision.param_dtype"
LORA = "actor.model.lora"
BACKEND = "actor.training_backend"
SCHEDULE, SCHEDULES = "actor.optim.lr_scheduler", ("constant", "linear", "cosine", "wsd")
STEPS = "actor.optim.total_training_steps"
RESHARD = "actor.fsdp_config.reshard_after_forward"
OWN_DATA = (
    "data.columns names the columns of your rows; data.transform: FILE.py:FUNCTION makes rows of others, and writes "
    "choices into the question"
)
OWN_LOSS = "an adapter computes a loss of your own; turns with loss_weight count more or less"
CODE = "docs/add-a-model.md: a model of your own; LeRobot's policies have names (docs/policies.md)"
VIDEO = "docs/tasks.md (Speech and videos) has how rows name videos"
VALUES = {key for key in KEYS if not any(other.startswith(f"{key}.") for other in KEYS)}
"""Keys here that are no sections."""
ENTRY = {"dataset_path": "path", "path": "path", "weight": "weight", "max_samples": "max_samples"}
"""The keys of an entry of its data paths that an entry here has, too."""
TABLE: Table = {
    "data.val_data_paths": By("data.eval_data_paths: FILE"),
    "data.prompt_key": By("data.columns: {question: NAME}"),
    "data.answer_key": By("data.columns: {answer: NAME}"),
    "data.image_keys": By("data.columns: {image: NAME}; several become a list images by data.transform"),
    **each("data.choice_key data.dataset_name data.answer_separator", Missing(OWN_DATA)),
    **each("data.video_root data.data_root data.video_nframes data.video_fps data.video_max_pixels", Missing(VIDEO)),
    "data.max_prompt_length": Missing("data.max_length: N, of prompt and answer together"),
    "data.max_seq_length": To("data.max_length"),
    "data.max_samples": By("data.train_data_paths: {path: FILE, max_samples: N}"),
    "data.type": NotNeeded("what a row holds is recognised"),
    "data.append_eos": NotNeeded("the chat template ends each answer"),
    "data.packing_strategy": NotNeeded("rows are packed here anyway, which changes no number"),
    "data.train_num_workers": To("data.num_workers"),
    **each(
        "data.lazy_loading data.lazy_load data.eval_num_workers data.prefetch_factor data.persistent_workers "
        "data.pin_memory data.parquet_cache_size",
        NotNeeded("rows are encoded once, into a cache"),
    ),
    **each(
        "data.apply_chat_template data.use_chat_template",
        NotNeeded("the tokenizer's chat template is used, or data.chat_template"),
    ),
    **each("data.seed actor.seed", By("runner.seed: N")),
    "runner.experiment_name": By("runner.logger.experiment_name: NAME"),
    "runner.output_dir": By("runner.logger.log_path: FOLDER"),
    "runner.per_worker_log": NotNeeded("runner.logger.rank_logs: true writes what each of several ranks prints"),
    "runner.log_interval": To("runner.logger.log_interval"),
    "runner.task_type": NotNeeded("training is supervised here"),
    "actor.eval_batch_size": To("actor.eval_micro_batch_size"),
    "actor.model.lora_rank": By(f"{LORA}.r: N"),
    "actor.model.lora_path": To(f"{LORA}.load_from"),
    "actor.model.trainable_modules": Missing("actor.model.freeze names what is not trained"),
    "actor.model.format_ce_coef": Missing(OWN_LOSS),
    "actor.model.sample_reweight": By("turns with loss_weight"),
    **each("actor.model.openpi actor.model.openpi_data", Missing(CODE)),
    "actor.enable_offload": Missing("actor.fsdp_config.cpu_offload: true"),
    "actor.optim.num_cycles": Missing(
        "actor.optim.lr_scheduler: cosine falls once, over half a period", off=(None, 0.5)
    ),
    STEPS: NotNeeded("it follows from runner.max_epochs or runner.max_steps"),
    "actor.optim.value_lr": Missing("actor.optim.groups gives some weights another rate"),
    **each("cluster actor.group_name", NotNeeded("runner.nproc_per_node, or torchrun, starts the processes")),
    "hydra": NotNeeded("there is no Hydra here"),
    "defaults": Missing("the keys of the files that it names have to be in the recipe"),
    **each("algorithm reward critic", NotNeeded("it is not for supervised fine-tuning")),
    "actor.megatron": Missing("models are sharded with FSDP2, and by actor.parallel"),
    "actor.fsdp_config.mixed_precision": By(
        f"{PRECISION}: bf16, its param_dtype; weights and sums of gradients stay in fp32"
    ),
    "actor.fsdp_config.amp_autocast": NotNeeded(f"{PRECISION} says it, of the whole model"),
    "actor.fsdp_config.grad_scaler": NotNeeded("fp16 is trained with a loss scale anyway"),
    "actor.fsdp_config.sharding_strategy": By(f"{RESHARD}: true (false for shard_grad_op and no_shard)"),
    "actor.fsdp_config.gradient_checkpointing": To("actor.model.gradient_checkpointing"),
    "actor.fsdp_config.use_liger_kernel": Missing("actor.model.kernels: {source: liger}"),
    "actor.fsdp_config.fsdp_size": Missing("actor.parallel.data_shard: N", off=(None, -1)),
    "actor.fsdp_config.enable_gradient_accumulation": NotNeeded("a step sums over its micro-batches anyway"),
    **each(
        "actor.fsdp_config.offload_pin_memory actor.fsdp_config.forward_prefetch actor.fsdp_config.backward_prefetch "
        "actor.fsdp_config.limit_all_gathers actor.fsdp_config.gradient_checkpointing_use_reentrant",
        NotNeeded("it is chosen for the model, and changes no number"),
    ),
    "actor.fsdp_config.save_full_model_weights": NotNeeded("final/ is a whole model"),
    **each("actor.fsdp_config.strategy actor.fsdp_config.use_orig_params", NotNeeded("models are sharded with FSDP2")),
}
"""By the names in its files."""


def convert(c: Conversion) -> None:
    """Read keys that mean something together, and those that are the same here."""
    _logger(c)
    _data(c)
    _model(c)
    seed = "actor.seed" if c.has("actor.seed") else "data.seed"
    if c.has(seed):
        c.put(SEED, whole(c.get(seed)), seed, comment=seed)
    if c.has("data.seed") and seed != "data.seed":
        same = c.get("data.seed") == c.get(seed)
        c.record("data.seed", Kind.DEFAULT if same else Kind.MISSING, f"{SEED}, for everything, is that of {seed}")
    _schedule(c)
    composed = ["hydra/" in str(entry) or entry == "_self_" for entry in listed(c.get("defaults"))]
    names = ["defaults"] if all(composed) else [f"defaults[{place}]" for place, own in enumerate(composed) if own]
    c.not_needed("there is no Hydra here", *names)
    if (strategy := c.get("actor.fsdp_config.sharding_strategy")) is not None:
        whole_copies = "" if strategy != "no_shard" else f"; {BACKEND}: ddp keeps whole copies"
        kept = strategy in ("full_shard", "hybrid_shard")
        comment = f"sharding_strategy: {strategy}{whole_copies}"
        c.put(RESHARD, kept, "actor.fsdp_config.sharding_strategy", comment=comment)
    if c.get(BACKEND) == "megatron":
        c.missing("models are sharded with FSDP2, and by actor.parallel", BACKEND)
    _same_here(c)


def _logger(c: Conversion) -> None:
    """Read where a run is written: its name is the last part of RLinf's path, and is added to the path here."""
    name = c.get(EXPERIMENT, c.get("runner.experiment_name"))
    folder = c.get(LOG_PATH, c.get("runner.output_dir"))
    if name is not None:
        c.put(EXPERIMENT, name, EXPERIMENT, "runner.experiment_name", comment="its name")
    if folder is not None:
        text = str(folder).removesuffix(f"/{name}") or str(folder)
        comment = "log_path" if text == str(folder) else "without the name, which is added here"
        c.put(LOG_PATH, c.path(text), LOG_PATH, "runner.output_dir", comment=comment)


def _data(c: Conversion) -> None:
    """Read the rows and their columns."""
    most = whole(c.get("data.max_samples")) or -1
    several = isinstance(c.get(TRAIN), list) and len(listed(c.get(TRAIN))) > 1
    _rows(c, TRAIN, TRAIN, -1 if several else most)
    _rows(c, EVAL, EVAL if c.has(EVAL) else "data.val_data_paths", -1)
    if several and most > 0:
        c.missing("max_samples of an entry of data.train_data_paths is of that entry alone", "data.max_samples")
    elif c.has("data.max_samples"):
        c.record("data.max_samples", Kind.TRANSLATED if most > 0 else Kind.DEFAULT, "max_samples of the training rows")
    if EVAL not in c.lines:
        c.not_needed("there is no evaluation data", "runner.val_check_interval", "actor.eval_batch_size")
    images = [str(name) for name in listed(c.get("data.image_keys"))]
    columns = {
        "question": c.get("data.prompt_key"),
        "answer": c.get("data.answer_key"),
        "image": images[0] if len(images) == 1 else None,
    }
    found = {column: name for column, name in columns.items() if name is not None}
    if found:
        c.put("data.columns", found, "data.prompt_key", "data.answer_key", "data.image_keys")
    if c.has("data.image_keys") and not images:
        c.record("data.image_keys", Kind.DEFAULT, "nothing is set")
    if len(images) > 1:
        c.missing("several columns become a list images by data.transform: FILE.py:FUNCTION", "data.image_keys")


def _rows(c: Conversion, key: str, theirs: str, most: int) -> None:
    """Read data paths: one, several, or entries with a path and a weight."""
    given = c.get(theirs)
    if given is None:
        return
    entries: list[object] = []
    written = given if isinstance(given, list) else [given]
    for place, one in enumerate(written):
        if not isinstance(one, Mapping):
            path = c.path(one)
            entries.append({"path": path, "max_samples": most} if most > 0 else path)
            continue
        entry = {ENTRY[name]: as_number(value) for name, value in one.items() if name in ENTRY}
        entries.append({**entry, **({"path": c.path(entry["path"])} if "path" in entry else {})})
        for name in map(str, one):
            where = f"{theirs}[{place}].{name}" if isinstance(given, list) else f"{theirs}.{name}"
            if name in ENTRY:
                c.record(where, Kind.TRANSLATED, f"{ENTRY[name]} of an entry of {key}")
            else:
                c.missing("what a row holds is recognised; data.transform prepares it otherwise", where)
    is_one = len(entries) == 1 and not isinstance(given, list)
    c.put(key, entries[0] if is_one else entries, comment=theirs, always=True)
    if not any(isinstance(one, Mapping) for one in written):
        c.record(theirs, Kind.TRANSLATED, key)


def _model(c: Conversion) -> None:
    """Read the kind of model, its precision and LoRA."""
    kind = str(c.get(MODEL_TYPE, ""))
    if "_vl" in kind:
        c.put(MODEL_TYPE, "vision_language", MODEL_TYPE, comment=f"{MODEL_TYPE}: {kind}")
    elif kind.startswith("qwen"):
        c.put(MODEL_TYPE, "causal_lm", MODEL_TYPE, comment=f"{MODEL_TYPE}: {kind}")
    elif kind:
        c.missing(CODE, MODEL_TYPE)
    computed = PRECISIONS.get(str(c.get(COMPUTED_IN, c.get(PRECISION, ""))))
    if computed is not None:
        c.put(PRECISION, computed, COMPUTED_IN, PRECISION, comment="that of the computation, param_dtype")
        c.not_needed("weights and sums of gradients stay in fp32", "actor.fsdp_config.mixed_precision")
    if computed is not None and PRECISIONS.get(str(c.get(PRECISION))) == "bf16":
        c.notes.append(
            f"{NAME} loads weights in bf16 and trains them so; here they and the optimizer's states are fp32, computed "
            f"with in bf16; {PRECISION}: pure_bf16 and actor.optim.state_dtype: bf16 take as little memory"
        )
    reweights = "actor.model.sample_reweight"
    if is_on(c.get(f"{reweights}.enabled")):
        c.missing(OWN_LOSS, reweights)
    else:
        c.not_needed("it is off", reweights)
    if not is_on(c.get("actor.model.is_lora")):
        c.not_needed("actor.model.is_lora is off", "actor.model.lora_rank", "actor.model.lora_path")
    elif c.has("actor.model.lora_rank") and not c.has("actor.model.lora_path"):
        rank = whole(c.get("actor.model.lora_rank"))
        c.put(f"{LORA}.r", rank, "actor.model.lora_rank")
        c.put(f"{LORA}.alpha", rank, comment=f"{NAME}'s alpha is lora_rank")
        c.put(f"{LORA}.init", "gaussian", comment=f"{NAME}'s init_lora_weights")
        c.notes.append(
            f"{NAME} adapts the layers of a list of names, of the head lm_head, too; here {LORA}.target_modules names "
            "them, all-linear unless given, without the head"
        )


def _schedule(c: Conversion) -> None:
    """Read the schedule, whose steps are those of the run here."""
    schedule, warmup = c.get(SCHEDULE), "actor.optim.lr_warmup_steps"
    if schedule is not None and schedule not in SCHEDULES:
        c.missing(f"{SCHEDULE} is {', '.join(SCHEDULES[:-1])} or {SCHEDULES[-1]}", SCHEDULE)
    if (whole(c.get(warmup)) or 0) < 0:
        c.record(warmup, Kind.DEFAULT, "none by a number of steps")
    steps, most = whole(c.get(STEPS)), whole(c.get("runner.max_steps")) or -1
    if steps is not None and most > 0 and steps != most:
        c.missing(f"the schedule ends with the run here, after {most} steps (runner.max_steps), and not {steps}", STEPS)
    elif steps is not None and most <= 0:
        c.notes.append(f"the schedule ends with the run here, whatever {STEPS} ({steps}) is")


def _same_here(c: Conversion) -> None:
    """Take over the keys that are the same here."""
    for name, value in c.given.items():
        if name in c.outcomes or entry_of(TABLE, name)[1] is not None:
            continue
        key = name.partition("[")[0]
        while key and FORMER_KEYS.get(key, key) not in VALUES:
            key = key.rpartition(".")[0]
        if key and value is None:
            c.record(name, Kind.DEFAULT, "nothing is set")
        elif key:
            c.put(FORMER_KEYS.get(key, key), as_number(c.get(key)), key, comment="as there" if key in VALUES else key)
