"""ms-swift: the arguments of `swift sft` and `swift pt` beside transformers' TrainingArguments."""

from __future__ import annotations

from collections.abc import Mapping

from shardtune.config.foreign.table import By, Missing, NotNeeded, Table, To, each
from shardtune.config.foreign.training_arguments import TRAINING_ARGUMENTS
from shardtune.config.foreign.values import as_number, is_on, optimizer, whole

NAME = "ms-swift"
SAME = NotNeeded("it does not arise here, or changes no number")
ATTENTION = {"flash_attn": "flash_attention_2"}
NO_TUNER = "actor.model.lora.peft: {peft_type: OFT, …} has PEFT's other adapters, by PEFT's own keys"
FROZEN: Mapping[str, str] = {
    "freeze_vit": "vision_tower",
    "freeze_aligner": "projector",
    "freeze_llm": "language_model",
}
"""Its switches, and the parts of a model with images that they leave untrained."""
PREFIXES = (
    *("galore_", "lora_ga_", "vera_", "boft_", "fourier_", "adalora_", "reft_", "llamapro_", "adapter_", "swanlab_"),
    *("hqq_", "vllm_", "lisa_", "ray_", "muon", "eval_"),
)
"""The beginnings of keys of what is not used, or has been named by another key."""
TABLE: Table = {
    **TRAINING_ARGUMENTS,
    "model": By("actor.model.model_path: OWNER/NAME"),
    "model_type": NotNeeded("the architecture is that of the model's config.json"),
    "model_revision": Missing(
        "write the revision behind the name: model.model_path: OWNER/NAME@REVISION", (None, "main", "master")
    ),
    "task_type": By("actor.model.model_type: causal_lm (or sequence_classifier)"),
    "torch_dtype": By("actor.model.precision: bf16; weights stay in fp32"),
    "attn_impl": To("actor.model.attn_implementation", lambda value: ATTENTION.get(str(value), value)),
    "new_special_tokens": By("actor.tokenizer.new_tokens: [TOKEN]"),
    "num_labels": NotNeeded("the classes are those of the rows"),
    "problem_type": Missing("one class for each row: docs/tasks.md; another loss is actor.loss"),
    "rope_scaling": Missing("actor.model.config_overrides: {rope_scaling: {…}}"),
    "max_model_len": Missing("actor.model.config_overrides: {max_position_embeddings: N}"),
    "model_kwargs": Missing("its values are those of the processor's own files"),
    "init_strategy": Missing("weights that the files lack are drawn by the model's own rule"),
    "router_aux_loss_coef": Missing("actor.model.config_overrides: {router_aux_loss_coef: X}", (None, 0.0, 0)),
    "external_plugins": Missing("an adapter of one file, or actor.loss: FILE.py:FUNCTION; plugins: [FILE] imports one"),
    "custom_register_path": Missing("actor.model.adapter: FILE.py:Class; plugins: [FILE] imports one"),
    "tuner_backend": Missing("LoRA is this project's own, in PEFT's format", (None, "peft")),
    "tuner_type": By("actor.model.is_lora: true (or false)"),
    **each("train_type sft_type", By("actor.model.is_lora: true (or false)")),
    "adapters": By("actor.model.lora.load_from: FOLDER"),
    "lora_rank": By("actor.model.lora.r: N"),
    "lora_alpha": By("actor.model.lora.alpha: N"),
    "lora_dropout": By("actor.model.lora.dropout: SHARE"),
    "lora_bias": Missing("actor.model.lora.peft: {bias: all}", (None, "none")),
    "lora_dtype": NotNeeded("the few weights of an adapter are fp32, which is more exact"),
    "lorap_lr_ratio": Missing("actor.optim.groups: [{pattern: lora_B, lr: RATE}]"),
    "target_modules": By("actor.model.lora.target_modules: all-linear"),
    "target_regex": By("actor.model.lora.target_modules: REGEX"),
    "target_parameters": By("actor.model.lora.target_parameters: [NAME]"),
    "modules_to_save": By("actor.model.lora.modules_to_save: [NAME]"),
    "init_weights": By("actor.model.lora.init: gaussian"),
    "use_rslora": By("actor.model.lora.use_rslora: true"),
    "use_dora": By("actor.model.lora.use_dora: true"),
    "quant_method": Missing("bases are NF4, made when the model is loaded", (None, "bnb")),
    "quant_bits": By("actor.model.lora.base_dtype: nf4 (four bits)"),
    "bnb_4bit_quant_type": Missing("four bits are NF4 here", (None, "nf4")),
    **each("bnb_4bit_compute_dtype bnb_4bit_use_double_quant bnb_4bit_quant_storage", SAME),
    **{name: By(f"actor.model.freeze: [{part}]") for name, part in FROZEN.items()},
    **each(
        "freeze_parameters freeze_parameters_regex freeze_parameters_ratio trainable_parameters "
        "trainable_parameters_regex",
        Missing("actor.model.freeze: patterns of the parameters that are not trained", (None, 0, 0.0)),
    ),
    "dataset": By("data.train_data_paths: FILE or OWNER/NAME"),
    "val_dataset": By("data.eval_data_paths: FILE or OWNER/NAME"),
    **each("cached_dataset cached_val_dataset", Missing("rows are encoded from their files, once: data.cache_dir")),
    "split_dataset_ratio": By("data.eval_split: SHARE"),
    "data_seed": NotNeeded("runner.seed is for everything"),
    "dataset_num_proc": To("data.num_workers", lambda value: whole(value) or 0),
    "dataset_shuffle": NotNeeded("the order of rows is drawn in each epoch: data.shuffle"),
    "train_dataloader_shuffle": To("data.shuffle", is_on),
    "streaming": Missing("data.cache: by_file trains on the first files while the others are tokenised"),
    "interleave_prob": Missing("data.train_data_paths: [{path: FILE, weight: X}], an epoch has weight × rows of each"),
    "columns": By("data.columns: {question: NAME, answer: NAME}"),
    "strict": By("data.on_bad_row: fail (or skip)"),
    "custom_dataset_info": Missing("data.train_data_paths names the files; data.transform makes their rows"),
    **each("model_name model_author", Missing("data.transform: FILE.py:FUNCTION writes the names into the rows")),
    "template": By("data.chat_template: FILE.jinja, or nothing for the tokenizer's own"),
    "system": By("data.system_prompt: TEXT"),
    "max_length": By("data.max_length: N"),
    "truncation_strategy": By("data.on_too_long: drop (or truncate, split)"),
    "max_pixels": Missing("actor.model.image_size checks the size; it is set in the processor's own files"),
    "agent_template": Missing("tools are written by the chat template"),
    "norm_bbox": Missing("data.transform: FILE.py:FUNCTION writes boxes as the model reads them"),
    "use_chat_template": By("data.train_on: all, for rows of plain text"),
    "padding_side": SAME,
    "padding_free": By("nothing: rows are always packed, without attention between them"),
    "packing": By("nothing: rows are always packed, without attention between them"),
    "packing_length": By("actor.max_tokens_per_micro_batch: N"),
    **each("packing_num_proc packing_strategy", NotNeeded("rows are packed whole, as they come")),
    "loss_scale": By("data.train_on: assistant (or last_assistant, all)"),
    "is_binary_loss_scale": SAME,
    "disable_ignore_empty_think": Missing(
        "an empty block of reasoning is trained as the chat template prints it", (True,)
    ),
    "preserve_thinking": NotNeeded("data.thinking decides about reasoning that the chat template does not print"),
    "add_non_thinking_prefix": Missing("the chat template writes what stands before an answer", (None, True)),
    "template_backend": NotNeeded("a chat is written by the tokenizer's template"),
    "sequence_parallel_size": To("actor.parallel.sequence", whole),
    "deepspeed_autotp_size": To("actor.parallel.tensor", whole),
    "zero_hpz_partition_size": Missing("actor.parallel.data_replicate: N, the number of hosts"),
    "learning_rate": By("actor.optim.lr: RATE"),
    "weight_decay": To("actor.optim.weight_decay", as_number, default=0.1),
    "adam_beta2": To("actor.optim.adam_beta2", as_number, default=0.95),
    "gradient_checkpointing": To("actor.model.gradient_checkpointing", is_on, default=True, note="changes no number"),
    "vit_gradient_checkpointing": NotNeeded("actor.model.gradient_checkpointing is of all layers"),
    "optimizer": By("actor.optim.name: AdamW", optimizer),
    **each("vit_lr aligner_lr", Missing("actor.optim.groups: [{pattern: NAME, lr: RATE}]")),
    **each(
        "use_galore lisa_activated_layers",
        Missing("leave it out: an optimizer of a package is actor.optim.name: package.module:Class", (None, False, 0)),
    ),
    "loss_type": Missing("actor.loss: FILE.py:FUNCTION"),
    "enable_dft_loss": By("actor.loss: dft"),
    "enable_channel_loss": Missing("data.eval_data_paths: {NAME: FILE} evaluates each by its name"),
    "eval_metric": Missing("eval.metrics names functions of outputs and targets"),
    "eval_use_evalscope": Missing("eval.harness: [TASK] at each evaluation of a run, with the extra harness"),
    "max_epochs": By("runner.max_epochs: N"),
    "early_stop_interval": By("runner.early_stop: {enabled: true, patience: N}"),
    "callbacks": Missing("runner.callbacks: [FILE.py:CLASS]"),
    "resume_only_model": By("actor.model.model_path: FOLDER"),
    "use_flash_ckpt": Missing("runner.async_save: true"),
    "swanlab_project": To("runner.logger.project_name"),
    "use_ray": Missing("runner.launcher: ray and runner.num_ranks: N"),
    "use_hf": By("nothing: names are those of the Hugging Face Hub"),
    "ddp_timeout": NotNeeded("runner.collective_timeout bounds the wait for another rank"),
    **each(
        "max_new_tokens temperature top_k top_p repetition_penalty num_beams stream stop_words logprobs top_logprobs "
        "response_prefix enable_thinking",
        NotNeeded("generation has its own keys: eval.temperature, eval.max_new_tokens"),
    ),
    **each(
        "device_map max_memory local_repo_path experts_impl enable_npu_model_patch load_args load_data_args "
        "ignore_args_error use_swift_lora lazy_tokenize load_from_cache_file val_dataset_shuffle shuffle_buffer_size "
        "stopping_strategy download_mode remove_unused_columns disable_auto_column_mapping add_version acc_strategy "
        "create_checkpoint_symlink check_model use_logits_to_keep ds3_gather_for_generation safe_serialization "
        "max_shard_size device_groups mrl_dims use_cache_dataset tuner_options",
        SAME,
    ),
}
"""By the names of its arguments."""
