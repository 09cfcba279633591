"""LLaMA-Factory: its model, data and fine-tuning arguments beside transformers' TrainingArguments."""

from __future__ import annotations

from collections.abc import Mapping

from shardtune.config.foreign import llama_factory_data, rules
from shardtune.config.foreign.conversion import Conversion, Kind
from shardtune.config.foreign.table import By, Missing, NotNeeded, Table, To, each
from shardtune.config.foreign.training_arguments import TRAINING_ARGUMENTS, early_stop_metric, training_arguments
from shardtune.config.foreign.values import is_on, listed, names, whole, whole_number
from shardtune.errors import ConfigError

NAME = "LLaMA-Factory"
LENGTH = 2048
PURE = "pure_bf16"
MARKS = (
    *("stage", "finetuning_type", "cutoff_len", "template", "lora_rank", "lora_target", "dataset_dir", "mask_history"),
    *("quantization_bit", "preprocessing_num_workers", "neat_packing", "train_on_prompt", "val_size", "plot_loss"),
)
OWN_TEXT = ("default", "empty", "alpaca", "fewshot", "vicuna", "zephyr", "openchat", "starchat", "xuanyuan", "solar")
"""Templates that are the text of a data set, not of a model."""
NO_LORA_KIND = "actor.model.is_lora: true, or full training"
ATTENTION = {
    "auto": "auto",
    "disabled": "eager",
    "sdpa": "sdpa",
    "fa2": "flash_attention_2",
    "fa3": "flash_attention_3",
}
NO_METHOD = (
    "leave it out: an optimizer of a package is actor.optim.name: package.module:Class, adapters are LoRA, DoRA, "
    "rsLoRA, PiSSA, and PEFT's others by actor.model.lora.peft"
)
NEW_TOKENS = "new tokens start as the mean of the others"
COMMAND = "llamafactory-cli"
RANKS: Mapping[str, str] = {
    "nproc_per_node": "NPROC_PER_NODE",
    "nnodes": "NNODES",
    "node_rank": "NODE_RANK",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
}
"""Options of torchrun, and the variables that its command makes them of."""
_OF_HUB = (Kind.MISSING, "names are those of the Hugging Face Hub here: name a directory, or the model and data there")
VARIABLES: Mapping[str, tuple[Kind, str]] = {
    "FORCE_TORCHRUN": (Kind.NOT_NEEDED, "runner.nproc_per_node starts the processes"),
    "NNODES": (Kind.MISSING, "give --world-size N, the number of processes on all hosts"),
    "USE_MCA": (Kind.MISSING, "it trains by Megatron, which is not here: parallel has the layouts (docs/layouts.md)"),
    "USE_RAY": (Kind.MISSING, "shardtune launch starts a run on Ray (docs/launching.md)"),
    "USE_MODELSCOPE_HUB": _OF_HUB,
    "USE_OPENMIND_HUB": _OF_HUB,
    "DISABLE_VERSION_CHECK": (Kind.NOT_NEEDED, "it is for LLaMA-Factory"),
    "ALLOW_EXTRA_ARGS": (Kind.NOT_NEEDED, "it is for LLaMA-Factory"),
    "LLAMAFACTORY_VERBOSITY": (Kind.NOT_NEEDED, "it is for LLaMA-Factory"),
}
"""What becomes of the variables that it alone reads."""
V1 = (
    "peft_config",
    "train_dataset",
    "model_class",
    "dist_config",
    "batching_strategy",
    "quant_config",
    "kernel_config",
)
"""Keys that only the files of its v1 trainer have."""
DIVIDING = tuple(f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context", "expert_model"))
"""Megatron's degrees, all of which its number of rows is divided by."""
FROZEN: Mapping[str, str] = {
    "freeze_vision_tower": "vision_tower",
    "freeze_multi_modal_projector": "projector",
    "freeze_language_model": "language_model",
}
"""Its switches, and the parts of a model with images that they leave untrained."""
_DEGREE = whole_number("degrees are whole numbers >= 1")
TABLE: Table = {
    **TRAINING_ARGUMENTS,
    "model_name_or_path": To("actor.model.model_path"),
    "model_revision": Missing(
        "write the revision behind the name: model.model_path: OWNER/NAME@REVISION", (None, "main")
    ),
    "adapter_name_or_path": By("actor.model.lora.load_from: FOLDER"),
    "adapter_folder": Missing("actor.model.lora.load_from: FOLDER"),
    "trust_remote_code": To("actor.model.trust_remote_code", is_on),
    "flash_attn": To("actor.model.attn_implementation", lambda value: ATTENTION.get(str(value), str(value))),
    "stage": By("nothing: the training is supervised fine-tuning"),
    "finetuning_type": By("actor.model.is_lora: true (or false)"),
    "template": By("data.chat_template: FILE.jinja, or nothing for the tokenizer's own"),
    "dataset": By("data.train_data_paths: FILE or OWNER/NAME"),
    "eval_dataset": By("data.eval_data_paths: FILE or OWNER/NAME"),
    "dataset_dir": By("data.train_data_paths: FOLDER/FILE"),
    "media_dir": Missing("paths of images start at the folder of the data file"),
    "cutoff_len": By("data.max_length: N"),
    "train_on_prompt": By("data.train_on: all"),
    "mask_history": By("data.train_on: last_assistant"),
    "max_samples": By("data.train_data_paths: {path: FILE, max_samples: N}"),
    "val_size": By("data.eval_split: SHARE"),
    "mix_strategy": By("data.train_data_paths: [{path: FILE, weight: X}], an epoch has weight × rows of each"),
    "interleave_probs": By("data.train_data_paths: [{path: FILE, weight: X}], an epoch has weight × rows of each"),
    "preprocessing_num_workers": To("data.num_workers", lambda value: whole(value) or 0),
    "packing": By("nothing: rows are always packed, without attention between them"),
    "neat_packing": By("nothing: rows are always packed, without attention between them"),
    "default_system": To("data.system_prompt"),
    "enable_thinking": By("data.template_kwargs: {enable_thinking: false}"),
    "preserve_thinking": NotNeeded("data.thinking decides about reasoning that the chat template does not print"),
    "tool_format": Missing("tools are written by the chat template"),
    "disable_shuffling": By("data.shuffle: false"),
    "lora_rank": By("actor.model.lora.r: N"),
    "lora_alpha": By("actor.model.lora.alpha: N"),
    "lora_dropout": By("actor.model.lora.dropout: SHARE"),
    "lora_target": By("actor.model.lora.target_modules: all-linear, or [q_proj, v_proj]"),
    "additional_target": By("actor.model.lora.modules_to_save: [NAME]"),
    "use_rslora": By("actor.model.lora.use_rslora: true"),
    "use_dora": By("actor.model.lora.use_dora: true"),
    "pissa_init": By("actor.model.lora.init: pissa"),
    "pissa_iter": By("actor.model.lora.init: pissa_niter_16"),
    "pissa_convert": NotNeeded("shardtune export writes what PEFT loads"),
    "create_new_adapter": Missing("merge the first adapter (shardtune export --merge) and train a new one on it"),
    "quantization_bit": By("actor.model.lora.base_dtype: nf4 (four bits)"),
    "quantization_type": Missing("four bits are NF4 here", (None, "nf4")),
    "quantization_method": Missing("bases are NF4, made when the model is loaded", (None, "bnb", "bitsandbytes")),
    "double_quantization": NotNeeded("the scales of NF4 blocks are stored as docs/lora.md has it"),
    PURE: By("actor.model.precision: pure_bf16"),
    "upcast_layernorm": NotNeeded("weights that are trained are fp32"),
    "upcast_lmhead_output": NotNeeded("the loss is computed in fp32"),
    "disable_gradient_checkpointing": By("actor.model.gradient_checkpointing: true (or false)"),
    "add_tokens": By("actor.tokenizer.new_tokens: [TOKEN]"),
    "add_special_tokens": By("actor.tokenizer.new_tokens: [TOKEN]"),
    "new_special_tokens": By("actor.tokenizer.new_tokens: [TOKEN]"),
    "new_special_tokens_config": Missing("actor.tokenizer.new_tokens: [TOKEN], those that the file has; " + NEW_TOKENS),
    "init_special_tokens": By("nothing: " + NEW_TOKENS),
    "split_special_tokens": Missing(
        "a special token in a row's text is read as that token; data.transform: FILE.py:FUNCTION may change the text"
    ),
    "ignore_pad_token_for_loss": Missing("rows are packed, so no padding is trained: leave it out", (None, True)),
    "eval_on_each_dataset": Missing("data.eval_data_paths: {NAME: FILE} evaluates each by its name"),
    "resize_vocab": NotNeeded("the embedding is enlarged where actor.tokenizer.new_tokens need it"),
    "train_from_scratch": To("actor.model.from_scratch", is_on),
    "rope_scaling": Missing("actor.model.config_overrides: {rope_scaling: {…}}"),
    "moe_aux_loss_coef": Missing("actor.model.config_overrides: {router_aux_loss_coef: X}"),
    "freeze_trainable_layers": Missing("actor.model.freeze: patterns of the parameters that are not trained"),
    "freeze_trainable_modules": Missing("actor.model.freeze: patterns of the parameters that are not trained"),
    "freeze_extra_modules": Missing("actor.model.freeze: patterns of the parameters that are not trained"),
    "freeze_vision_tower": By("actor.model.freeze: [vision_tower]"),
    "freeze_multi_modal_projector": By("actor.model.freeze: [projector]"),
    "freeze_language_model": By("actor.model.freeze: [language_model]"),
    "loraplus_lr_ratio": Missing("actor.optim.groups: [{pattern: lora_B, lr: RATE}]"),
    "early_stopping_steps": By("runner.early_stop: {enabled: true, patience: N}"),
    "compute_accuracy": Missing("eval.generate: true for the share of right answers, or eval.metrics"),
    "use_muon": By("actor.optim.name: Muon"),
    "ray_num_workers": Missing("runner.launcher: ray and runner.num_ranks: N", (None, 1)),
    "master_port": To("runner.master_port", whole),
    "deterministic": To("runner.deterministic", is_on),
    "streaming": Missing("data.cache: by_file trains on the first files while the others are tokenised"),
    "tokenized_path": To("data.cache_dir"),
    "use_dft_loss": To("actor.loss", lambda value: "dft" if is_on(value) else None),
    "use_asft_loss": Missing("actor.loss: FILE.py:FUNCTION"),
    "use_eaft_loss": Missing("actor.loss: FILE.py:FUNCTION"),
    "enable_torch_profiler": Missing("runner.profile_steps: [FIRST, LAST]"),
    "profile_modules": NotNeeded("runner.profile_steps: [FIRST, LAST]"),
    "swanlab_project": To("runner.logger.project_name"),
    "use_swanlab": By("runner.logger.logger_backends: [jsonl, swanlab]"),
    "use_mca": NotNeeded("models are sharded with FSDP2, and divided by actor.parallel"),
    "mixture_of_depths": Missing("write an adapter: docs/add-a-model.md"),
    "shift_attn": Missing("attention is the model's own"),
    "vllm_config": NotNeeded("it is for generation"),
    **each(
        "use_llama_pro use_galore use_apollo use_badam use_adam_mini use_hyper_parallel use_kt",
        Missing(NO_METHOD),
    ),
    "tensor_model_parallel_size": To("actor.parallel.tensor", _DEGREE),
    "context_parallel_size": To("actor.parallel.sequence", _DEGREE),
    "expert_model_parallel_size": To("actor.parallel.expert", _DEGREE),
    "pipeline_model_parallel_size": Missing(
        "there is no pipeline: actor.parallel has tensor, sequence and expert", (None, 1)
    ),
    "mixed_precision": Missing("actor.model.precision: bf16 (or fp16, fp32)", (None, "bf16_mixed", "bf16-mixed")),
    "use_packed_sequences": NotNeeded("rows are packed here anyway, which changes no number"),
    "calculate_per_token_loss": Missing("a step's loss is the mean over all of its trained tokens", (None, True)),
    "megatron_pretrained_checkpoint": Missing("actor.model.model_path: FOLDER, in the format of transformers"),
    "extra_config": Missing("write what it sets by our keys; docs/coming-from.md"),
    **each(
        "sequence_parallel use_distributed_optimizer overlap_param_gather overlap_grad_reduce bias_activation_fusion "
        "apply_rope_fusion masked_softmax_fusion cross_entropy_loss_fusion moe_grouped_gemm moe_token_dispatcher_type "
        "recompute_granularity recompute_method recompute_num_layers virtual_pipeline_model_parallel_size "
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
        NotNeeded("it is how Megatron computes, and changes no number"),
    ),
    "fp8": Missing("actor.model.fp8.scaling: tensorwise; docs/fast-parts.md"),
    **each("hub_model_id export_hub_model_id", TRAINING_ARGUMENTS["hub_model_id"]),
    **each(
        "image_max_pixels image_min_pixels image_do_pan_and_scan crop_to_patches video_max_pixels video_min_pixels "
        "video_fps video_maxlen use_audio_in_video audio_sampling_rate",
        Missing("actor.model.image_size checks the size; it is set in the processor's own files"),
    ),
    **each(
        "oft_rank oft_block_size oft_target module_dropout",
        Missing("actor.model.lora.peft: {peft_type: OFT, …}, by PEFT's own keys"),
    ),
    **each("use_unsloth use_unsloth_gc", Missing("leave it out: the numbers do not depend on Unsloth's kernels")),
    **each(
        "enable_liger_kernel use_fast_tokenizer low_cpu_mem_usage use_reentrant_gc use_v1_kernels plot_loss cache_dir "
        "overwrite_cache preprocessing_batch_size buffer_size data_shared_file_system "
        "print_param_status hf_hub_token ms_hub_token om_hub_token "
        "include_effective_tokens_per_second quantization_device_map offload_folder "
        "use_kv_cache infer_backend infer_dtype eval_num_beams loraplus_lr_embedding "
        "asft_alpha eaft_alpha hyper_parallel_args ray_init_kwargs master_addr fp8_backend "
        "fp8_enable_fsdp_float8_all_gather compute_dtype device_map model_max_length block_diag_attn",
        NotNeeded("it does not arise here, or changes no number"),
    ),
    **each(
        "do_sample temperature top_p top_k num_beams max_length max_new_tokens repetition_penalty length_penalty "
        "skip_special_tokens",
        NotNeeded("generation has its own keys: eval.temperature, eval.max_new_tokens"),
    ),
}
PREFIXES = ("export_", "vllm_", "sglang_", "kt_", "galore_", "apollo_", "badam_", "swanlab_", "ray_", "profiler_")
OTHER_STAGES = ("pref_", "ppo_", "kto_", "simpo_", "dpo_", "ref_model", "reward_model", "ld_alpha")


def no_v1(where: str) -> ConfigError:
    """That the v1 trainer's files are not converted."""
    return ConfigError(
        "this is a file of LLaMA-Factory's v1 trainer, whose keys and defaults are others; it is not converted",
        where=where,
        remedy="write a recipe by the table of docs/coming-from.md (LLaMA-Factory v1), which has its keys and "
        f"defaults; files of {COMMAND} train without USE_V1=1 are converted",
    )


def _no_merge(c: Conversion) -> None:
    """Refuse a file of `llamafactory-cli export`, of its v1 trainer too: it merges an adapter and trains nothing."""
    adapter = c.tree.get("peft_config")
    of_v1 = isinstance(adapter, Mapping) and "export_dir" in adapter
    if of_v1 or ("export_dir" in c.tree and not {"dataset", "do_train", "stage", *V1} & {*c.tree}):
        raise ConfigError(
            f"this is a file of {COMMAND} export, which merges an adapter into its model; it trains nothing",
            where="peft_config.export_dir" if of_v1 else "export_dir",
            remedy="convert the file of the training; shardtune export RUN FOLDER --merge then merges what it trained",
        )


def convert(c: Conversion) -> None:
    """Read a configuration of LLaMA-Factory."""
    _no_merge(c)
    found = next((name for name in V1 if name in c.tree), None)
    if found is not None:
        raise no_v1(found)
    stage = str(c.get("stage", "sft"))
    if stage not in ("sft", "pt"):
        raise ConfigError(
            f"stage: {stage} is no supervised fine-tuning",
            where="stage",
            remedy="shardtune trains stage: sft; keep LLaMA-Factory",
        )
    c.not_needed("supervised fine-tuning is all there is" if stage == "sft" else "rows are plain text then", "stage")
    training_arguments(c, logging=500, rate=5e-5, precision="bf16")
    is_set = any(is_on(c.get(name)) for name in ("bf16", "fp16", PURE))
    if not is_set and not c.mixed_precision:
        c.notes.append("without bf16 and fp16 LLaMA-Factory computes in the model's own dtype, mostly bf16: bf16 here")
    length = whole(c.get("cutoff_len")) or LENGTH
    c.put("data.max_length", length, "cutoff_len")
    is_packed = is_on(c.get("packing", stage == "pt")) or is_on(c.get("neat_packing"))
    if stage == "sft":
        c.notes.append(
            "of a row longer than cutoff_len LLaMA-Factory shortens question and answer of a turn, of a short answer "
            "the question alone; here the first data.max_length tokens are kept (data.on_too_long has the other ways)"
        )
    rules.batch(
        c,
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        rows=8,
        packed=length if is_packed else None,
        packing=("packing", "neat_packing"),
        shared=DIVIDING,
    )
    if stage == "pt" and is_packed:
        c.put("data.on_too_long", "split", comment="stage: pt cuts the text of all documents into blocks of cutoff_len")
    if not is_packed:
        c.not_needed(rules.PACKED_ANYWAY, "packing", "neat_packing")
    elif not is_on(c.get("neat_packing")):
        c.notes.append(
            "packing without neat_packing lets packed rows attend to each other; here each attends to itself"
        )
    _training(c, stage)
    _adapter(c)
    llama_factory_data.convert(c, stage)
    for name in c.given:
        if name not in TABLE and name.startswith(PREFIXES):
            c.not_needed("it belongs to something that is not part of a recipe", name)
        elif name.startswith(OTHER_STAGES):
            c.not_needed("it is for other stages", name)


def _training(c: Conversion, stage: str) -> None:
    checkpointing = not is_on(c.get("disable_gradient_checkpointing"))
    comment = "LLaMA-Factory's default, unless disable_gradient_checkpointing; changes no number"
    c.put("actor.model.gradient_checkpointing", checkpointing, "disable_gradient_checkpointing", comment=comment)
    c.not_needed("disable_gradient_checkpointing decides", "gradient_checkpointing")
    c.put("data.shuffle", not is_on(c.get("disable_shuffling")), "disable_shuffling")
    if is_on(c.get("use_muon")):
        c.put("actor.optim.name", "Muon", "use_muon")
    if is_on(c.get("train_on_prompt")) or stage == "pt":
        c.put("data.train_on", "all", "train_on_prompt")
        c.not_needed("the prompts are trained too", "mask_history")
    else:
        c.put("data.train_on", "last_assistant" if is_on(c.get("mask_history")) else "assistant", "mask_history")
        c.record("train_on_prompt", Kind.DEFAULT, "data.train_on: assistant")
    if is_on(c.get("use_swanlab")):
        rules.loggers(c, "use_swanlab", [*listed(c.get("report_to")), "swanlab"])
    patience = whole(c.get("early_stopping_steps"))
    if patience:
        c.put("runner.early_stop.enabled", True, "early_stopping_steps")
        c.put("runner.early_stop.patience", patience, "early_stopping_steps")
        early_stop_metric(c)
    _tokens(c)
    _thinking(c, stage)
    _template(c)


_TOKENS = ("add_tokens", "add_special_tokens", "new_special_tokens")


def _tokens(c: Conversion) -> None:
    given = [name for name in _TOKENS if c.has(name)]
    if c.has("new_special_tokens_config"):
        given = [name for name in given if name != "add_special_tokens"]
        c.not_needed("new_special_tokens_config replaces it", "add_special_tokens")
    tokens = [token for name in given for token in listed(c.get(name))]
    if tokens:
        c.put("actor.tokenizer.new_tokens", tokens, *given)
    if tokens or c.has("new_special_tokens_config"):
        remedy = f"{NEW_TOKENS}, without noise; other values are set in the files of actor.model.model_path"
        c.missing(remedy, "init_special_tokens")
    else:
        c.not_needed("there are no new tokens", "init_special_tokens")


def _thinking(c: Conversion, stage: str) -> None:
    """Read whether reasoning is switched off, by a value of the chat template."""
    name, template = "enable_thinking", str(c.get("template", ""))
    if name not in c.tree:
        return
    if stage == "pt":
        c.not_needed("rows of plain text have no chat template", name)
    elif not c.has(name):
        remedy = "data.template_kwargs: {enable_thinking: false} prints an empty block of reasoning before answers"
        c.missing(remedy, name)
    elif is_on(c.get(name)):
        c.record(name, Kind.DEFAULT, "as chat templates have it without a value")
    elif template == "chatml" or template in OWN_TEXT:
        c.not_needed(f"the template {template} does not read it", name)
    else:
        c.put("data.template_kwargs", {name: False}, name, comment=f"{name}; leave it out if the template lacks it")
        c.notes.append(
            "with enable_thinking: false LLaMA-Factory also leaves out the reasoning of the rows: data.thinking: strip"
        )


def _template(c: Conversion) -> None:
    template = str(c.get("template", ""))
    if not template:
        return
    if template == "chatml":
        c.put("data.chat_template", "chatml", "template")
    elif template in OWN_TEXT:
        remedy = f"{template} is text around the rows: write it as a Jinja file, data.chat_template: FILE.jinja"
        c.missing(remedy, "template")
    else:
        c.not_needed("the tokenizer's own chat template is used; compare a row: shardtune data preview", "template")
        c.notes.append(
            f"the template {template} is LLaMA-Factory's own text, mostly the tokenizer's chat template; it may "
            "add a system prompt, or end turns otherwise: compare shardtune data preview"
        )


def _adapter(c: Conversion) -> None:
    kind = str(c.get("finetuning_type", "lora"))
    own = [name for name in TABLE if name.startswith(("lora_", "pissa_"))]
    own += ["use_rslora", "use_dora", "additional_target", "adapter_name_or_path"]
    if kind != "lora":
        c.record("finetuning_type", Kind.DEFAULT, "actor.model.is_lora: false")
        if is_on(c.get(PURE)):
            c.put("actor.model.precision", "pure_bf16", PURE)
            c.not_needed(f"{PURE} is set", "bf16", "fp16")
            if "actor.optim.state_dtype" not in c.lines:
                c.notes.append(f"with {PURE} the states of the optimizer are bf16 there: actor.optim.state_dtype: bf16")
        c.not_needed(f"finetuning_type is {kind}", *own)
        if kind == "freeze":
            c.missing("actor.model.freeze: patterns of the parameters that are not trained", "finetuning_type")
        elif kind != "full":
            c.missing(f"there is no {kind}: {NO_LORA_KIND}", "finetuning_type")
        return
    comment = "" if c.has("finetuning_type") else "LLaMA-Factory's default (finetuning_type: lora)"
    c.put("actor.model.is_lora", True, "finetuning_type", comment=comment)
    if is_on(c.get(PURE)):
        c.not_needed("the few weights of an adapter stay in fp32, which is more exact", PURE)
    adapters = listed(c.get("adapter_name_or_path"))
    if adapters:
        c.put("actor.model.lora.load_from", c.path(adapters[-1]), "adapter_name_or_path")
        c.not_needed("they are those of the adapter", *own)
        if len(adapters) > 1:
            remedy = "the last one is trained; merge those before it into the model (shardtune export --merge)"
            c.missing(remedy, "adapter_name_or_path")
    else:
        _new_adapter(c)
    bits = whole(c.get("quantization_bit"))
    if bits == 4:
        c.put("actor.model.lora.base_dtype", "nf4", "quantization_bit")
    else:
        rules.frozen_base(c, "quantization_bit" if bits else "")


def _new_adapter(c: Conversion) -> None:
    def comment(name: str, why: str = "") -> str:
        return "" if c.has(name) else f"LLaMA-Factory's default ({why or name})"

    rank = whole(c.get("lora_rank")) or 8
    c.put("actor.model.lora.r", rank, "lora_rank", comment=comment("lora_rank"))
    alpha = c.get("lora_alpha", 2 * rank)
    c.put("actor.model.lora.alpha", alpha, "lora_alpha", comment=comment("lora_alpha", "lora_alpha is twice lora_rank"))
    c.put("actor.model.lora.dropout", c.get("lora_dropout", 0.0), "lora_dropout")
    c.put("actor.model.lora.target_modules", names(c.get("lora_target", "all")), "lora_target")
    for name in ("use_rslora", "use_dora"):
        c.put(f"actor.model.lora.{name}", is_on(c.get(name)), name)
    if c.has("additional_target"):
        c.put("actor.model.lora.modules_to_save", listed(c.get("additional_target")), "additional_target")
    if is_on(c.get("pissa_init")):
        steps = whole(c.get("pissa_iter", 16)) or 0
        init = "pissa" if steps < 1 else f"pissa_niter_{steps}"
        c.put("actor.model.lora.init", init, "pissa_init", "pissa_iter", comment="pissa_init, pissa_iter")
