"""The keys of Axolotl's schema, and of the plugins that come with it."""

from __future__ import annotations

from shardtune.config.foreign.sharding import FSDP_CONFIG
from shardtune.config.foreign.table import By, Missing, NotNeeded, Table, To, each
from shardtune.config.foreign.training_arguments import LAST_ROWS, SPLIT_BATCHES
from shardtune.config.foreign.values import as_number, clip, is_on, optimizer, whole, whole_number

HUB = "shardtune push RUN OWNER/NAME publishes final/; --public and --revision are its options"
TOKENIZER = "change the tokenizer's own files, and name them as actor.tokenizer.tokenizer_model"
GPTQ = "leave it out: docs/lora.md lists the quantised checkpoints that are read; GPTQ ones are converted first"
NO_METHOD = (
    "leave it out: an optimizer of a package is actor.optim.name: package.module:Class, adapters are LoRA, DoRA, "
    "rsLoRA, PiSSA, and PEFT's others by actor.model.lora.peft"
)
TABLE: Table = {
    "base_model": To("actor.model.model_path"),
    "base_model_config": Missing("actor.model.config_overrides: {NAME: VALUE}"),
    "tokenizer_config": To("actor.tokenizer.tokenizer_model"),
    "trust_remote_code": To("actor.model.trust_remote_code", is_on),
    "revision_of_model": Missing("write the revision behind the name: model.model_path: OWNER/NAME@REVISION"),
    "model_revision": Missing("write the revision behind the name: model.model_path: OWNER/NAME@REVISION"),
    "overrides_of_model_config": To("actor.model.config_overrides"),
    "model_config": To("actor.model.config_overrides"),
    "rope_scaling": Missing("actor.model.config_overrides: {rope_scaling: {…}}"),
    "output_dir": By("runner.logger.log_path: FOLDER and runner.logger.experiment_name: NAME"),
    "datasets": By("data.train_data_paths: [FILE, {path: OWNER/NAME, split: SPLIT}]"),
    "test_datasets": By("data.eval_data_paths: [FILE, {path: OWNER/NAME, split: SPLIT}]"),
    "pretraining_dataset": Missing(
        "data.train_data_paths names rows of plain text; data.cache: by_file begins with the first files"
    ),
    "val_set_size": By("data.eval_split: SHARE"),
    "dataset_prepared_path": To("data.cache_dir"),
    "dataset_num_proc": To("data.num_workers", lambda value: whole(value) or 0),
    "dataset_processes": To("data.num_workers", lambda value: whole(value) or 0),
    "shuffle_merged_datasets": By("data.shuffle: true (or false)"),
    "shuffle_before_merging_datasets": NotNeeded("rows of all sources are shuffled together"),
    "sample_packing_sequentially": By("data.shuffle: false"),
    "curriculum_sampling": By("data.shuffle: false"),
    "dataset_exact_deduplication": Missing("data.transform: FILE.py:FUNCTION may drop rows by returning None"),
    "streaming": Missing("data.cache: by_file trains on the first files while the others are tokenised"),
    "sequence_len": By("data.max_length: N"),
    "excess_length_strategy": By("data.on_too_long: drop (or truncate, fail)"),
    "max_packed_sequence_len": Missing("rows are limited by data.max_length, steps by actor.global_batch_tokens"),
    "eval_sequence_len": Missing("data.max_length is for evaluation too"),
    "min_sample_len": Missing("data.transform: FILE.py:FUNCTION may drop rows by returning None"),
    "max_prompt_len": Missing("rows are limited as a whole, by data.max_length"),
    "sample_packing": By("nothing: rows are always packed, without attention between them"),
    "train_on_inputs": By("data.train_on: all (or assistant)"),
    "chat_template": By("data.chat_template: FILE.jinja, or nothing for the tokenizer's own"),
    "chat_template_jinja": By("data.chat_template: FILE.jinja"),
    "chat_template_kwargs": To("data.template_kwargs"),
    "default_system_message": To("data.system_prompt"),
    "eot_tokens": NotNeeded("the end of a turn is found in the chat template, and always trained"),
    "special_tokens": By("actor.tokenizer.new_tokens: [TOKEN]; the names of tokens are those of the tokenizer's files"),
    "tokens": By("actor.tokenizer.new_tokens: [TOKEN]"),
    "added_tokens_overrides": Missing(
        "rename the tokens in the tokenizer's files, and name it in actor.tokenizer.tokenizer_model"
    ),
    "adapter": By("actor.model.is_lora: true; for qlora also actor.model.lora.base_dtype: nf4"),
    "load_in_4bit": By("actor.model.is_lora: true and actor.model.lora.base_dtype: nf4"),
    "load_in_8bit": By("actor.model.lora.base_dtype: nf4 (four bits) or bf16; there are no eight"),
    "lora_r": By("actor.model.lora.r: N"),
    "lora_alpha": By("actor.model.lora.alpha: N"),
    "lora_dropout": By("actor.model.lora.dropout: SHARE"),
    "lora_target_modules": By("actor.model.lora.target_modules: [q_proj, v_proj]"),
    "lora_target_linear": By("actor.model.lora.target_modules: all-linear"),
    "lora_target_parameters": By("actor.model.lora.target_parameters: [NAME]"),
    "lora_modules_to_save": By("actor.model.lora.modules_to_save: [NAME]"),
    "lora_model_dir": By("actor.model.lora.load_from: FOLDER"),
    "peft_use_dora": By("actor.model.lora.use_dora: true"),
    "peft_use_rslora": By("actor.model.lora.use_rslora: true"),
    "peft_init_lora_weights": By("actor.model.lora.init: pissa"),
    "lora_rank_pattern": By("actor.model.lora.rank_pattern: {NAME: RANK}"),
    "lora_alpha_pattern": By("actor.model.lora.alpha_pattern: {NAME: ALPHA}"),
    "peft_layers_to_transform": By("actor.model.lora.layers_to_transform: [0, 1]"),
    "peft_layers_pattern": By("actor.model.lora.layers_pattern: [layers]"),
    "loraplus_lr_ratio": Missing("actor.optim.groups: [{pattern: lora_B, lr: RATE}]"),
    "unfrozen_parameters": Missing("actor.model.freeze: patterns of the others, which are not trained"),
    "freeze_mm_modules": To("actor.model.freeze", lambda value: ["vision_tower", "projector"] if is_on(value) else []),
    "micro_batch_size": By("actor.micro_batch_size: N"),
    "gradient_accumulation_steps": By("actor.global_batch_size: N (rows of a step over all ranks)"),
    "batch_size": By("actor.global_batch_size: N (rows of a step over all ranks)"),
    "eval_batch_size": To("actor.eval_micro_batch_size", whole_number("a number of rows")),
    "num_epochs": By("runner.max_epochs: N"),
    "max_steps": By("runner.max_steps: N"),
    "learning_rate": To("actor.optim.lr", as_number),
    "embedding_lr": Missing("actor.optim.groups: [{pattern: embed_tokens, lr: RATE}]"),
    "embedding_lr_scale": Missing("actor.optim.groups: [{pattern: embed_tokens, lr: RATE}]"),
    "lr_groups": By("actor.optim.groups: [{pattern: NAME, lr: RATE}]"),
    "optimizer": By("actor.optim.name: AdamW", optimizer),
    "optim_args": By("actor.optim.args: {NAME: VALUE}"),
    "optim_target_modules": Missing(
        "actor.optim.name: package.module:Class is any optimizer; actor.optim.groups sets rates by name"
    ),
    "weight_decay": To("actor.optim.weight_decay", as_number, default=0.0),
    "adam_beta1": To("actor.optim.adam_beta1", as_number),
    "adam_beta2": To("actor.optim.adam_beta2", as_number),
    "adam_epsilon": To("actor.optim.adam_eps", as_number),
    "max_grad_norm": To("actor.optim.clip_grad", clip),
    "lr_scheduler": By("actor.optim.lr_scheduler: cosine (or constant, linear, wsd)"),
    "lr_scheduler_kwargs": By("actor.optim.min_lr: RATE, or actor.optim.decay_ratio: SHARE"),
    "cosine_min_lr_ratio": By("actor.optim.min_lr: RATE"),
    "cosine_constant_lr_ratio": Missing("actor.optim.lr_scheduler: wsd is constant first, and falls linearly"),
    "lr_quadratic_warmup": Missing("the warm-up is linear"),
    "warmup_steps": By("actor.optim.lr_warmup_steps: N"),
    "warmup_ratio": By("actor.optim.lr_warmup_steps_ratio: SHARE"),
    "bf16": By("actor.model.precision: bf16"),
    "fp16": By("actor.model.precision: fp16"),
    "bfloat16": By("actor.model.precision: bf16"),
    "float16": By("actor.model.precision: fp16"),
    "float32": By("actor.model.precision: fp32"),
    "torch_dtype": NotNeeded("bf16, fp16 and float32 decide it, as there"),
    "tf32": Missing("products in fp32 are exact; actor.model.precision: bf16 is the fast way", (None, False, "auto")),
    "gradient_checkpointing": By("actor.model.gradient_checkpointing: true (or selective)"),
    "selective_checkpointing": By("actor.model.gradient_checkpointing: selective"),
    "activation_offloading": Missing(
        "actor.model.gradient_checkpointing: true; actor.fsdp_config.cpu_offload is for weights"
    ),
    "layer_offloading": Missing("actor.fsdp_config.cpu_offload: true"),
    "torch_compile": To("actor.model.compile", is_on),
    "attn_implementation": To("actor.model.attn_implementation"),
    "eager_attention": By("actor.model.attn_implementation: eager"),
    **FSDP_CONFIG,
    "tensor_parallel_size": To("actor.parallel.tensor", whole_number("a number of ranks")),
    "dp_replicate_size": To("actor.parallel.data_replicate", whole_number("a number of ranks")),
    "dp_shard_size": To("actor.parallel.data_shard", whole_number("a number of ranks")),
    "context_parallel_size": To("actor.parallel.sequence", whole_number("a number of ranks")),
    "sequence_parallel_degree": To("actor.parallel.sequence", whole_number("a number of ranks")),
    "eval_steps": By("runner.eval_interval: N"),
    "evals_per_epoch": By("runner.eval_interval: N (steps), or epoch"),
    "eval_strategy": By("runner.eval_interval: N (steps), or epoch"),
    "evaluation_strategy": By("runner.eval_interval: N (steps), or epoch"),
    "save_steps": By("runner.save_interval: N"),
    "saves_per_epoch": By("runner.save_interval: N (steps), or epoch"),
    "save_strategy": By("runner.save_interval: N (steps), or epoch"),
    "save_total_limit": To("runner.keep_last", default=4),
    "save_first_step": Missing("--dry-run checks the saving of a run, before it"),
    "save_only_model": Missing("a checkpoint always holds all that continues the run; final/ is the model alone"),
    "load_best_model_at_end": By("runner.best.monitor: eval/loss, which keeps checkpoints/best"),
    "metric_for_best_model": By("runner.best.monitor: eval/loss, and runner.early_stop.monitor"),
    "greater_is_better": By("runner.best.mode: max, and runner.early_stop.mode"),
    "early_stopping_patience": By("runner.early_stop: {enabled: true, patience: N}"),
    "loss_watchdog_threshold": Missing("runner.on_spike: stop ends a run at a loss far above the last ones"),
    "logging_steps": To("runner.logger.log_interval", whole_number("a number of steps")),
    "wandb_project": By("runner.logger.project_name: NAME, with wandb in runner.logger.logger_backends"),
    "wandb_name": By("runner.logger.experiment_name: NAME"),
    "use_wandb": By("runner.logger.logger_backends: [jsonl, wandb]"),
    "use_tensorboard": By("runner.logger.logger_backends: [jsonl, tensorboard]"),
    "use_mlflow": By("runner.logger.logger_backends: [jsonl, mlflow]"),
    "use_trackio": By("runner.logger.logger_backends: [jsonl, trackio]"),
    "use_swanlab": By("runner.logger.logger_backends: [jsonl, swanlab]"),
    "mlflow_experiment_name": By("runner.logger.project_name: NAME, with mlflow in runner.logger.logger_backends"),
    "trackio_project_name": By("runner.logger.project_name: NAME, with trackio in runner.logger.logger_backends"),
    "mlflow_tracking_uri": Missing("MLFLOW_TRACKING_URI in the environment"),
    "processor_kwargs": Missing("it is set in the processor's own files; actor.model.image_size checks the size"),
    **each(
        "overrides_of_model_kwargs model_kwargs",
        Missing("actor.model.config_overrides: {NAME: VALUE} for values of the model's configuration"),
    ),
    "bnb_config_kwargs": Missing("bases are NF4, made when the model is loaded: actor.model.lora.base_dtype: nf4"),
    **each(
        "do_causal_lm_eval eval_causal_lm_metrics",
        Missing("eval.generate: true answers evaluation rows, eval.metrics has scores of yours"),
    ),
    **each("do_bench_eval bench_dataset bench_split", Missing("eval.harness: [TASK] at each evaluation of a run")),
    "wandb_entity": Missing("WANDB_ENTITY in the environment"),
    "wandb_mode": Missing("WANDB_MODE in the environment"),
    "wandb_run_id": Missing("WANDB_RUN_ID in the environment"),
    "seed": To("runner.seed"),
    "dataloader_drop_last": Missing(LAST_ROWS),
    "accelerator_config.split_batches": Missing(SPLIT_BATCHES),
    "resume_from_checkpoint": Missing(
        "the same command continues a run of shardtune; checkpoints of others are not read"
    ),
    "auto_resume_from_checkpoints": NotNeeded("the same command always continues a run"),
    "neftune_noise_alpha": To("actor.neftune_alpha", as_number, note="a row's length is its own, without padding"),
    "noisy_embedding_alpha": To("actor.neftune_alpha", as_number, note="a row's length is its own, without padding"),
    "plugins": Missing("plugins here are your own files; Axolotl's kernels are not needed for the numbers", (None,)),
    "auto_find_batch_size": Missing("a run that does not fit names what would: lower actor.micro_batch_size"),
    "trainer_cls": Missing("actor.worker: FILE.py:CLASS"),
    "generate_samples": Missing("eval.generate: true answers evaluation rows"),
    "profiler_steps": Missing("runner.profile_steps: [FIRST, LAST]"),
    "ddp_timeout": To("runner.collective_timeout", whole_number("a number of seconds")),
    "use_ray": To("runner.launcher", lambda value: "ray" if is_on(value) else "local"),
    "ray_num_workers": To("runner.num_ranks", whole_number("a number of ranks")),
    "image_size": Missing("actor.model.image_size: [HEIGHT, WIDTH] checks it; the processor's files set it"),
    "processor_type": By("actor.model.model_type: vision_language"),
    "hub_model_id": By("runner.push_to_hub: OWNER/NAME"),
    "hub_strategy": Missing(HUB),
    "hub_revision": Missing(HUB),
    "push_dataset_to_hub": Missing("tokenised rows stay in the cache; rows are uploaded with datasets"),
    "reinit_weights": To("actor.model.from_scratch", is_on),
    "activation_checkpointing": To("actor.model.gradient_checkpointing", is_on),
    "layers_to_transform": Missing("actor.model.lora.layers_to_transform: [N]; without LoRA actor.model.freeze"),
    "device": NotNeeded("runner.device: auto is CUDA where there is a GPU"),
    "is_preprocess": NotNeeded("rows are encoded when training starts, once"),
    "model_quantization_config": Missing(
        "bases are NF4, made when the model is loaded: actor.model.lora.base_dtype: nf4"
    ),
    "resize_token_embeddings_to_32x": NotNeeded("the embedding is enlarged where actor.tokenizer.new_tokens need it"),
    "gpu_memory_limit": NotNeeded("a run that does not fit names what would"),
    "expert_parallel_size": To("actor.parallel.expert", whole_number("a number of ranks")),
    "kd_trainer": Missing("actor.teacher.model_path: the teacher, whose logits are computed in training"),
    "fp8": Missing("actor.model.fp8.scaling: tensorwise; docs/fast-parts.md"),
    "lm_eval_tasks": Missing("eval.harness: [TASK] at each evaluation of a run, with the extra harness"),
    "swanlab_project": To("runner.logger.project_name"),
    "scaling_softmax": Missing("attention is the model's own"),
    "dataset_shard_num": Missing("data.train_data_paths: {path: FILE, weight: SHARE} trains a share of the rows"),
    "fix_untrained_tokens": Missing(
        "actor.tokenizer.new_tokens: embeddings of new tokens start as the mean of the others"
    ),
    "embeddings_skip_upcast": NotNeeded("weights that are trained are fp32"),
    "llama4_linearized_experts": NotNeeded("actor.model.lora.target_parameters reaches stacked experts"),
    **each(
        "use_comet use_otel_metrics",
        Missing("runner.logger.logger_backends has what there is, or a class of yours: package.module:Class"),
    ),
    **each(
        "relora lisa_step_interval lisa_n_layers jagged_restart_steps use_pose "
        "peft_layer_replication peft_trainable_token_indices peft "
        "lora_on_cpu use_mora mora spectrum_top_fraction hatchery dense_mixer grokfast_alpha "
        "shrink_embeddings",
        Missing(NO_METHOD),
    ),
    **each(
        "qat quantization llmcompressor",
        Missing("leave it out: weights are trained without quantisation and pruning, which are for final/, later"),
    ),
    **each("gptq gptq_groupsize gptq_model_v1 gptq_disable_exllama", Missing(GPTQ)),
    "quantize_moe_experts": Missing(
        "actor.model.lora.base_dtype: nf4 is for linear layers; experts that are stacked in one tensor stay as they are"
    ),
    "use_eaft": Missing("actor.loss: FILE.py:FUNCTION"),
    "diffusion": NotNeeded("the run is not of its plugin"),
    "debug": NotNeeded("it prints rows: shardtune data preview"),
    "swanlab_experiment_name": NotNeeded("the run is called like its directory"),
    **each("swanlab_description swanlab_mode swanlab_log_completions", Missing("SWANLAB_MODE in the environment")),
    "tokenizer_type": Missing(TOKENIZER, (None, False, "AutoTokenizer", "PreTrainedTokenizerFast")),
    **each("tokenizer_legacy tokenizer_use_fast tokenizer_use_mistral_common", Missing(TOKENIZER)),
    **each(
        "flash_attention sdp_attention xformers_attention flex_attention flex_attn_compile_kwargs sage_attention "
        "flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp flash_attn_d512 flash_optimum s2_attention "
        "gemma4_hybrid_attn_impl large_head_attention sdpa_varlen fused_attn_kernel experts_implementation "
        "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel chunked_cross_entropy "
        "chunked_cross_entropy_num_chunks tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp cut_cross_entropy "
        "unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o unsloth_rms_norm unsloth_rope unsloth_cross_entropy_loss "
        "liger_rope liger_rms_norm liger_rms_norm_gated liger_layer_norm liger_swiglu liger_glu_activation "
        "liger_cross_entropy liger_fused_linear_cross_entropy liger_kernel_impl use_kernels use_scattermoe "
        "use_sonicmoe torch_compile_backend torch_compile_mode torch_compile_options fp32_norms fp32_norm_classes",
        NotNeeded("attention and the loss are computed by the fastest exact way there is here"),
    ),
    **each(
        "rl_beta trl vllm ebft dpo_use_weighting dpo_label_smoothing dpo_use_liger_kernel dpo_padding_free "
        "dpo_loss_type dpo_loss_weights dpo_beta dpo_use_logits_to_keep dpo_generate_during_eval dpo_norm_loss "
        "rpo_alpha orpo_alpha simpo_gamma cpo_alpha kto_desirable_weight kto_undesirable_weight reward_model "
        "process_reward_model center_rewards_coefficient num_labels precompute_ref_log_probs rl",
        NotNeeded("it is for preferences and rewards"),
    ),
    **each(
        "sample_packing_group_size sample_packing_bin_size sample_packing_mp_start_method sample_packing_eff_est "
        "eval_sample_packing pad_to_sequence_len pad_to_multiple_of multipack_real_batches batch_flattening "
        "group_by_length pretrain_multipack_buffer_size pretrain_multipack_attn pretraining_sample_concatenation "
        "streaming_multipack_buffer_size",
        NotNeeded("rows are always packed, without padding"),
    ),
    **each(
        "strict type_of_model model_type cls_model_config tokenizer_save_jinja_files "
        "save_safetensors mean_resizing_embeddings dataset_shard_idx skip_prepare_dataset num_dataset_shards_to_save "
        "dataset_keep_in_memory dataloader_pin_memory dataloader_num_workers dataloader_prefetch_factor "
        "accelerator_config remove_unused_columns hf_use_auth_token device_map world_size "
        "local_rank ddp ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters gc_steps gc_collect_steps "
        "torch_empty_cache_steps gradient_checkpointing_kwargs deepcompile fsdp_version fsdp_final_state_dict_type "
        "heads_k_stride ring_attn_func max_memory low_cpu_mem_usage preprocess_iterable "
        "total_num_tokens total_supervised_tokens axolotl_config_path is_falcon_derived_model "
        "is_llama_derived_model is_mistral_derived_model is_qwen_derived_model experimental_skip_move_to_device "
        "qlora_sharded_model_loading lora_fan_in_fan_out peft_ensure_weight_tying "
        "peft_autocast_adapter_dtype merge_lora merge_method ple_cpu_offload use_onebitllms profiler_steps_start "
        "include_tokens_per_second include_tkps eval_table_size eval_max_new_tokens "
        "wandb_watch wandb_log_model "
        "resources_per_worker ray_run_name torchdistx_path dynamic_checkpoint image_resize_algorithm role_boundaries",
        NotNeeded("it does not arise here, or changes no number"),
    ),
    **each(
        "loss_watchdog_patience lisa_layers_attribute jagged_restart_warmup_steps jagged_restart_anneal_steps "
        "relora_prune_ratio relora_prune_method relora_cpu_offload loraplus_lr_embedding eaft_alpha eaft_k "
        "pose_split_on_token_ids pose_max_context_len pose_num_chunks lr_div_factor adam_beta3 adam_epsilon2 dion_lr "
        "dion_momentum dion_rank_fraction dion_rank_multiple_of qgalore_rank qgalore_update_proj_gap qgalore_scale "
        "qgalore_proj_type qgalore_proj_quant qgalore_proj_bits qgalore_proj_group_size qgalore_cos_threshold "
        "qgalore_gamma_proj qgalore_queue_size scaling_softmax_factor scaling_softmax_bias fp8_config "
        "fp8_enable_fsdp_float8_all_gather model_quantization_config_kwargs "
        "mlflow_run_name hf_mlflow_log_artifacts comet_api_key comet_workspace "
        "comet_project_name comet_experiment_key comet_mode comet_online comet_experiment_config "
        "trackio_run_name trackio_space_id otel_metrics_host otel_metrics_port gradio_title gradio_share "
        "gradio_server_name gradio_server_port gradio_max_new_tokens gradio_temperature num_generation_samples "
        "generation_max_new_tokens generation_temperature generation_top_p generation_top_k generation_prompt_ratio "
        "generation_do_sample",
        NotNeeded("it belongs to a method or tool that is not part of a recipe"),
    ),
}
