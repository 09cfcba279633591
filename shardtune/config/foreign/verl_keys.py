"""verl: the keys of its two trainers for supervised fine-tuning, and the defaults of their files."""

from __future__ import annotations

from collections.abc import Mapping

from shardtune.config.foreign.table import By, Missing, NotNeeded, Table, To, each
from shardtune.config.foreign.values import clip, is_on, names, whole

NAME = "verl"
SAME = "it does not arise here, or changes no number"
PACKED = "rows are packed here anyway, which changes no number"
FSDP2 = "models are sharded with FSDP2"
OFFLOAD = "actor.fsdp_config.cpu_offload: true"
TEMPLATE = "data.chat_template: FILE.jinja, a file with the template"
NO_MTP = "heads that predict several tokens are not trained as such: an adapter's loss is"
DEFAULTS: Mapping[str, object] = {
    "data.train_batch_size": 256,
    "data.micro_batch_size_per_gpu": 4,
    "data.max_length": 1024,
    "data.truncation": "error",
    "trainer.total_epochs": 4,
    "trainer.project_name": "gsm8k-sft",
    "trainer.experiment_name": "test",
    "trainer.seed": 1,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.logger": ["console", "wandb"],
    "optim.weight_decay": 0.01,
}
"""Of both trainers."""
OF_FSDP_TRAINER: Mapping[str, object] = {
    **DEFAULTS,
    "data.prompt_key": "question",
    "data.response_key": "answer",
    "optim.lr": 1e-5,
    "optim.betas": [0.9, 0.95],
    "optim.lr_warmup_steps_ratio": 0.1,
    "optim.lr_scheduler": "cosine",
}
"""Of `fsdp_sft_trainer`."""
OF_SFT_TRAINER: Mapping[str, object] = {
    **DEFAULTS,
    "data.use_dynamic_bsz": True,
    "data.max_token_len_per_gpu": 8192,
    "data.pad_mode": "no_padding",
    "optim.lr": 1e-3,
    "optim.betas": [0.9, 0.999],
    "optim.lr_warmup_steps_ratio": 0.0,
    "optim.lr_scheduler_type": "constant",
}
"""Of `sft_trainer`, whose models have an engine."""
LAYER_UNITS = NotNeeded("a model is sharded by its layers")
TABLE: Table = {
    "data.train_files": By("data.train_data_paths: FILE"),
    "data.val_files": By("data.eval_data_paths: FILE"),
    "data.train_max_samples": By("data.train_data_paths: {path: FILE, max_samples: N}"),
    "data.val_max_samples": By("data.eval_data_paths: {path: FILE, max_samples: N}"),
    "data.train_batch_size": By("actor.global_batch_size: N"),
    "data.micro_batch_size_per_gpu": By("actor.micro_batch_size: N"),
    "data.micro_batch_size": NotNeeded("verl reads micro_batch_size_per_gpu"),
    "data.use_dynamic_bsz": By("actor.micro_batch_size: null, with actor.max_tokens_per_micro_batch: N"),
    "data.max_token_len_per_gpu": By("actor.max_tokens_per_micro_batch: N"),
    "data.prompt_key": By("data.columns: {question: NAME}"),
    "data.response_key": By("data.columns: {answer: NAME}"),
    "data.prompt_dict_keys": By("data.transform: FILE.py:FUNCTION, which makes a row {question, answer}"),
    "data.response_dict_keys": By("data.transform: FILE.py:FUNCTION, which makes a row {question, answer}"),
    "data.multiturn": By("data.columns: {messages: NAME, tools: NAME}"),
    **each("data.messages_key", By("data.columns: {messages: NAME}")),
    **each("data.tools_key", By("data.columns: {tools: NAME}")),
    **each("data.image_key", By("data.columns: {images: NAME}")),
    **each("data.video_key", By("data.columns: {videos: NAME}")),
    "data.enable_thinking_key": By("data.columns: {chat_template_kwargs: NAME}, a column of mappings"),
    "data.max_length": By("data.max_length: N"),
    "data.truncation": By("data.on_too_long: fail (or truncate)"),
    "data.shuffle": NotNeeded("verl draws the order of rows anyway, as data.shuffle: true does"),
    "data.seed": NotNeeded("verl draws no rows by it unless it takes some of them; runner.seed is for everything"),
    "data.custom_cls": Missing("data.transform: FILE.py:FUNCTION makes rows, with targets too"),
    "data.chat_template": Missing(TEMPLATE),
    "data.apply_chat_template_kwargs": By("data.template_kwargs: {enable_thinking: false}"),
    "data.ignore_input_ids_mismatch": NotNeeded("a chat is written whole by its template, which is what verl compares"),
    "data.image_patch_size": NotNeeded("the processor of the model has it"),
    **each("data.balance_dp_token data.pad_mode data.use_shm data.num_workers", NotNeeded(SAME)),
    **each("model.partial_pretrain model.path", By("actor.model.model_path: OWNER/NAME")),
    "model.tokenizer_path": To("actor.tokenizer.tokenizer_model"),
    "model.hf_config_path": Missing("the configuration is that of actor.model.model_path; config_overrides changes it"),
    "model.override_config": To("actor.model.config_overrides"),
    "model.custom_chat_template": Missing(TEMPLATE),
    "model.trust_remote_code": To("actor.model.trust_remote_code", is_on),
    "model.external_lib": By("plugins: [MODULE]"),
    "model.enable_gradient_checkpointing": To("actor.model.gradient_checkpointing", is_on, default=True),
    "model.enable_activation_offload": Missing("actor.model.gradient_checkpointing: true needs less memory, too"),
    "model.lora_rank": By("actor.model.lora.r: N"),
    "model.lora_alpha": By("actor.model.lora.alpha: N"),
    "model.target_modules": By("actor.model.lora.target_modules: all-linear"),
    "model.exclude_modules": To("actor.model.lora.exclude_modules", names),
    "model.lora_adapter_path": By("actor.model.lora.load_from: FOLDER"),
    "model.use_liger": NotNeeded("the numbers do not depend on it; actor.model.kernels.source: liger has them"),
    "model.strategy": NotNeeded(FSDP2),
    "model.fsdp_config.model_dtype": By("actor.model.precision: bf16; weights stay in fp32"),
    **each("model.fsdp_config.cpu_offload model.fsdp_config.offload_params", By(OFFLOAD)),
    **each("model.fsdp_config.wrap_policy engine.wrap_policy", LAYER_UNITS),
    "model.mtp": By("actor.model.adapter: FILE.py:Class"),
    "model.tiled_mlp": NotNeeded("actor.model.gradient_checkpointing bounds the memory of a layer"),
    **each(
        "model.use_shm model.use_remove_padding model.use_fused_kernels model.fused_kernel_options use_remove_padding",
        NotNeeded(SAME),
    ),
    "optim.optimizer": By("actor.optim.name: AdamW"),
    "optim.optimizer_impl": By("actor.optim.name: package.module:Class"),
    "optim.override_optimizer_config": By("actor.optim.args: {}"),
    "optim.lr": By("actor.optim.lr: RATE"),
    "optim.betas": By("actor.optim.adam_beta1: RATE, and adam_beta2"),
    "optim.weight_decay": By("actor.optim.weight_decay: RATE, and actor.optim.groups for norms"),
    "optim.clip_grad": To("actor.optim.clip_grad", clip, default=1.0),
    "optim.grad_clip": To("actor.optim.clip_grad", clip),
    "optim.lr_warmup_steps": By("actor.optim.lr_warmup_steps: N"),
    "optim.lr_warmup_steps_ratio": By("actor.optim.lr_warmup_steps_ratio: SHARE"),
    **each(
        "optim.lr_scheduler optim.lr_scheduler_type optim.warmup_style",
        By("actor.optim.lr_scheduler: cosine (or constant, linear, wsd)"),
    ),
    "optim.min_lr_ratio": By("actor.optim.min_lr: RATE"),
    "optim.num_cycles": Missing("actor.optim.lr_scheduler: cosine falls once, over half a period", off=(None, 0.5)),
    "optim.total_training_steps": NotNeeded("verl sets it to the steps of the run"),
    "engine.strategy": NotNeeded(FSDP2),
    "engine.fsdp_size": By("actor.parallel.data_shard: N"),
    **each("engine.ulysses_sequence_parallel_size ulysses_sequence_parallel_size", By("actor.parallel.sequence: N")),
    "engine.reshard_after_forward": To("actor.fsdp_config.reshard_after_forward", is_on),
    **each("engine.param_offload engine.optimizer_offload engine.offload_policy", By(OFFLOAD)),
    "engine.model_dtype": By("actor.model.precision: bf16; weights stay in fp32"),
    "engine.dtype": By("actor.model.precision: bf16 (or fp16)"),
    "engine.full_determinism": To("runner.deterministic", is_on),
    "engine.seed": By("runner.seed: N"),
    **each(
        "engine.forward_prefetch engine.use_orig_params engine.entropy_from_logits_with_chunking "
        "engine.use_torch_compile engine.entropy_checkpointing engine.forward_only",
        NotNeeded(SAME),
    ),
    "trainer.default_local_dir": By("runner.logger.log_path: FOLDER and runner.logger.experiment_name: NAME"),
    "trainer.default_hdfs_dir": Missing("checkpoints are written into runner.logger.log_path, a directory or a mount"),
    "trainer.project_name": By("runner.logger.project_name: NAME"),
    "trainer.experiment_name": By("runner.logger.experiment_name: NAME"),
    "trainer.total_epochs": By("runner.max_epochs: N"),
    "trainer.total_training_steps": By("runner.max_steps: N"),
    "trainer.logger": By("runner.logger.logger_backends: [jsonl, wandb]"),
    "trainer.seed": By("runner.seed: N"),
    "trainer.save_freq": By("runner.save_interval: N"),
    "trainer.test_freq": By("runner.eval_interval: N"),
    **each("trainer.nnodes trainer.n_gpus_per_node", By("runner.nproc_per_node: N")),
    "trainer.max_ckpt_to_keep": To("runner.keep_last", whole),
    "trainer.resume_mode": By("runner.resume_dir: auto (null: a run from its start)"),
    "trainer.resume_from_path": Missing("the same command continues a run; checkpoints of others are not read"),
    **each(
        "trainer.checkpoint checkpoint", NotNeeded("final/ is a whole model, and a checkpoint has all that a run needs")
    ),
    "trainer.device": NotNeeded("runner.device: auto is a GPU where there is one"),
    "trainer.profile_interval": By("runner.profile_steps: [FIRST, LAST]"),
    "profiler": NotNeeded("runner.profile_steps: [FIRST, LAST] profiles steps"),
    "ray_kwargs": NotNeeded("runner.ray has what Ray gives to a rank"),
    "global_profiler": NotNeeded("runner.profile_steps: [FIRST, LAST] profiles steps"),
    **each("hydra _target_ engine._target_ optim._target_ model._target_", NotNeeded("there is no Hydra here")),
    **each("defaults overrides", By("the keys of the files that it names, in the recipe")),
}
"""By the names in their files; the values of a file's own sections, `model` and `optim`, are read in `verl`."""
