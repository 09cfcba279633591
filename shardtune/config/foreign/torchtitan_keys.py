"""The keys of torchtitan's JobConfig."""

from __future__ import annotations

from shardtune.config.foreign.table import By, Missing, NotNeeded, Table, To, each
from shardtune.config.foreign.values import as_number, clip, is_on, optimizer, whole, whole_number

NAME = "torchtitan"
NO_PIPELINE = "there is no pipeline: actor.parallel has tensor, sequence and expert"
SAME = "it does not arise here, or changes no number"
_DEGREE = whole_number("a number of ranks")
TABLE: Table = {
    "job.dump_folder": By("runner.logger.log_path: FOLDER and runner.logger.experiment_name: NAME"),
    "job.custom_config_module": Missing("plugins: [FILE.py]"),
    "model.name": By("actor.model.model_path: OWNER/NAME"),
    "model.flavor": By("actor.model.model_path: OWNER/NAME"),
    "model.hf_assets_path": By("actor.model.model_path: FOLDER"),
    "model.tokenizer_path": Missing("actor.tokenizer.tokenizer_model: FOLDER, in the format of transformers"),
    "model.converters": By("actor.model.fp8.scaling: tensorwise"),
    "optimizer.name": By("actor.optim.name: AdamW", optimizer),
    "optimizer.lr": To("actor.optim.lr", as_number, default=8e-4),
    "optimizer.beta1": To("actor.optim.adam_beta1", as_number, default=0.9),
    "optimizer.beta2": To("actor.optim.adam_beta2", as_number, default=0.95),
    "optimizer.eps": To("actor.optim.adam_eps", as_number, default=1e-8),
    "optimizer.weight_decay": By("actor.optim.weight_decay: RATE, and actor.optim.groups for norms"),
    "optimizer.early_step_in_backward": Missing(
        "the step follows the backward pass; actor.optim.state_dtype: int8 saves memory"
    ),
    "lr_scheduler.warmup_steps": By("actor.optim.lr_warmup_steps: N"),
    "lr_scheduler.total_steps": By("runner.max_steps: N"),
    "lr_scheduler.decay_ratio": By("actor.optim.lr_scheduler: wsd and actor.optim.decay_ratio: SHARE"),
    "lr_scheduler.decay_type": By("actor.optim.lr_scheduler: linear (or cosine, wsd)"),
    **each("lr_scheduler.min_lr_factor lr_scheduler.lr_min", By("actor.optim.min_lr: RATE")),
    "training.dataset": By("data.train_data_paths: FILE or OWNER/NAME"),
    "training.dataset_path": By("data.train_data_paths: FOLDER"),
    **each("training.local_batch_size training.batch_size", By("actor.max_tokens_per_micro_batch: N")),
    "training.global_batch_size": By("actor.global_batch_tokens: N (sequences × seq_len)"),
    "training.seq_len": By("data.max_length: N"),
    "training.max_norm": To("actor.optim.clip_grad", clip, default=1.0),
    "training.steps": By("runner.max_steps: N"),
    "training.enable_cpu_offload": To("actor.fsdp_config.cpu_offload", is_on),
    "training.dtype": By("actor.model.precision: bf16; weights stay in fp32"),
    "training.mixed_precision_param": By("actor.model.precision: bf16"),
    "training.mixed_precision_reduce": Missing("gradients are summed in fp32", (None, "float32")),
    "training.compile": To("actor.model.compile", is_on),
    "training.dataloader": NotNeeded("rows are encoded once, into a cache; data.num_workers builds it"),
    **each("training.seed debug.seed", To("runner.seed")),
    **each("training.deterministic debug.deterministic", To("runner.deterministic", is_on)),
    "debug.moe_force_load_balance": Missing("experts are chosen by the model's own router: leave it out"),
    "parallelism.data_parallel_replicate_degree": By("actor.parallel.data_replicate: N"),
    "parallelism.data_parallel_shard_degree": By("actor.parallel.data_shard: N"),
    "parallelism.fsdp_reshard_after_forward": By("actor.fsdp_config.reshard_after_forward: true"),
    "parallelism.tensor_parallel_degree": To("actor.parallel.tensor", _DEGREE),
    "parallelism.context_parallel_degree": To("actor.parallel.sequence", _DEGREE),
    "parallelism.expert_parallel_degree": To("actor.parallel.expert", _DEGREE),
    "parallelism.expert_tensor_parallel_degree": Missing("experts are sharded by actor.parallel.expert", (None, 1)),
    "parallelism.pipeline_parallel_degree": Missing(NO_PIPELINE, (None, 1)),
    "checkpoint.initial_load_path": By("actor.model.model_path: FOLDER"),
    "checkpoint.initial_load_in_hf": By("actor.model.from_scratch: false"),
    "checkpoint.initial_load_model_only": Missing(
        "the same command continues a run; checkpoints of others are not read", (None, True)
    ),
    **each("checkpoint.enable checkpoint.enable_checkpoint", By("runner.save_interval: N")),
    "checkpoint.interval": By("runner.save_interval: N"),
    "checkpoint.keep_latest_k": By("runner.keep_last: N"),
    "checkpoint.async_mode": By("runner.async_save: true"),
    "checkpoint.export_dtype": By("runner.final_dtype: fp32 (or fp64, bf16, fp16)"),
    "checkpoint.load_step": Missing(
        "the newest checkpoint of a run is continued; runner.resume_dir names one", (None, -1)
    ),
    "checkpoint.exclude_from_loading": Missing("a run is continued as a whole"),
    "checkpoint.enable_first_step_checkpoint": Missing("--dry-run checks the saving of a run, before it"),
    "checkpoint.create_seed_checkpoint": Missing("weights are drawn from runner.seed, the same on any number of ranks"),
    "checkpoint.load_only": Missing("runner.save_interval: -1"),
    "activation_checkpoint.mode": By("actor.model.gradient_checkpointing: selective (or true, false)"),
    "compile.enable": To("actor.model.compile", is_on),
    "metrics.log_freq": To("runner.logger.log_interval", lambda value: whole(value) or 1, default=10),
    "metrics.enable_tensorboard": By("runner.logger.logger_backends: [jsonl, tensorboard]"),
    "metrics.enable_wandb": By("runner.logger.logger_backends: [jsonl, wandb]"),
    "comm.train_timeout_seconds": To("runner.collective_timeout", whole_number("a number of seconds")),
    "profiling.enable_profiling": Missing("runner.profile_steps: [FIRST, LAST]"),
    "profiling.enable_memory_snapshot": Missing("runner.profile_steps: [FIRST, LAST]"),
    "fault_tolerance.enable": Missing("the same command continues a run, on another number of ranks, too"),
    "memory_estimation.enable": Missing("--dry-run prints the memory of a run"),
    "experimental.custom_import": Missing("plugins: [FILE.py]"),
    "experimental.custom_args_module": Missing("plugins: [FILE.py]"),
    "validation.enable": By("runner.eval_interval: N"),
    "validation.dataset": By("data.eval_data_paths: FILE or OWNER/NAME"),
    "validation.dataset_path": By("data.eval_data_paths: FOLDER"),
    "validation.freq": By("runner.eval_interval: N"),
    "validation.steps": By("data.eval_data_paths: {path: FILE, max_samples: N}"),
    "validation.seq_len": By("data.max_length: N"),
    **each("validation.local_batch_size validation.dataloader", NotNeeded("the loss of a row does not depend on it")),
    **each(
        "quantize.linear.float8 quantize.linear.mx quantize.grouped_mm.float8 quantize.grouped_mm.mx float8",
        By("actor.model.fp8.scaling: tensorwise"),
    ),
    **each(
        "parallelism.pipeline_parallel_schedule parallelism.pipeline_parallel_schedule_csv "
        "parallelism.pipeline_parallel_microbatch_size parallelism.pipeline_parallel_layers_per_stage "
        "parallelism.pipeline_parallel_first_stage_less_layers parallelism.pipeline_parallel_last_stage_less_layers "
        "parallelism.pipeline_parallel_split_points parallelism.module_fqns_per_model_part "
        "parallelism.pipeline_parallel_expert_parallel_overlap",
        NotNeeded("there is no pipeline"),
    ),
    **each(
        "parallelism.disable_loss_parallel parallelism.enable_async_tensor_parallel "
        "parallelism.context_parallel_rotate_method parallelism.context_parallel_load_balancer "
        "parallelism.expert_parallel_comm_backend parallelism.enable_compiled_autograd optimizer.implementation "
        "optimizer.fused model.print_after_conversion training.gc_freq training.gc_debug debug.deterministic_warn_only "
        "checkpoint.folder checkpoint.last_save_model_only checkpoint.last_save_in_hf "
        "checkpoint.initial_load_in_hf_quantized checkpoint.enable_ft_dataloader_checkpoints "
        "checkpoint.model_weights_only compile.components compile.backend metrics.disable_color_printing "
        "metrics.save_tb_folder metrics.save_for_all_ranks metrics.rank_0_only comm.init_timeout_seconds "
        "comm.trace_buf_size comm.save_traces_folder comm.save_traces_file_prefix comm.mode "
        "job.description job.print_config job.save_config_file job.config_file job.use_for_integration_test "
        "job.use_color_printing "
        "activation_checkpoint.selective_ac_option activation_checkpoint.memory_budget "
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns activation_checkpoint.early_stop "
        "activation_checkpoint.visualize_memory_budget_pareto activation_checkpoint.preserve_rng_state "
        "activation_checkpoint.determinism_check activation_checkpoint.debug profiling.save_traces_folder "
        "profiling.profile_freq profiling.profiler_active profiling.profiler_warmup "
        "profiling.save_memory_snapshot_folder memory_estimation.disable_fake_mode fault_tolerance.process_group "
        "fault_tolerance.process_group_timeout_ms fault_tolerance.replica_id fault_tolerance.group_size "
        "fault_tolerance.min_replica_size fault_tolerance.semi_sync_method fault_tolerance.sync_steps "
        "fault_tolerance.num_fragments",
        NotNeeded(SAME),
    ),
}
