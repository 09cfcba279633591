"""The sections of NeMo Automodel's recipes: which keys each of them has, and numbers that its classes take."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from shardtune.config.foreign.conversion import Conversion, Kind
from shardtune.config.foreign.values import whole
from shardtune.errors import ConfigError

NAME = "NeMo Automodel"
OF_NEMO = "nemo_automodel."
_DATALOADER = (
    "_target_ collate_fn shuffle num_workers pin_memory persistent_workers prefetch_factor drop_last group_by_length "
    "shuffle_buffer_size batch_size dataloader_type dataset"
)
KEYS: Mapping[str, str] = {
    "step_scheduler": "_target_ global_batch_size local_batch_size dp_size dataloader num_epochs max_steps "
    "ckpt_every_steps save_checkpoint_every_epoch val_every_steps log_remote_every_steps loss_average_window_steps "
    "gc_every_steps start_step start_epoch preemption_signal",
    "lr_scheduler": "_target_ lr_warmup_steps lr_decay_steps lr_decay_style init_lr max_lr min_lr start_wd end_wd "
    "wd_incr_steps wd_incr_style use_checkpoint_opt_param_scheduler override_opt_param_scheduler wsd_decay_steps "
    "lr_wsd_decay_style",
    "packed_sequence": "_target_ packed_sequence_size packing_strategy split_across_pack max_packs num_proc prepacked "
    "drop_long_samples pack_size pretokenize max_length packing_ratio balance_media_tokens collate_max_length "
    "attn_implementation packing_format enabled post_tokenize_hook_fn",
    "dataloader": _DATALOADER,
    "validation_dataloader": _DATALOADER,
    "checkpoint": "_target_ enabled checkpoint_dir model_save_format model_cache_dir model_repo_id save_consolidated "
    "is_peft is_async wait_for_staging cpu_offload allow_legacy_pickle_restore dequantize_base_checkpoint "
    "original_model_root_dir skip_task_head_prefixes_for_base_model single_rank_consolidation staging_dir "
    "v4_compatible diffusers_compatible best_metric_key consolidation_timeout_minutes max_recent_checkpoints "
    "restore_from",
    "distributed": "_target_ strategy backend world_size dp_size dp_shard_size dp_replicate_size tp_size cp_size "
    "pp_size ep_size sequence_parallel tp_plan use_hf_tp_plan patch_is_packed_sequence mp_policy offload_policy "
    "autocast_dtype activation_checkpointing activation_checkpointing_scope defer_fsdp_grad_sync "
    "reshard_after_forward enable_async_tensor_parallel enable_compile enable_fsdp2_prefetch "
    "fsdp2_backward_prefetch_depth fsdp2_forward_prefetch_depth multimodal moe moe_parallel_config pipeline "
    "pipeline_config megatron_fsdp_unit_modules zero_dp_strategy init_fsdp_with_meta_device grad_reduce_in_fp32 "
    "preserve_fp32_weights overlap_grad_reduce overlap_param_gather check_for_nan_in_grad average_in_collective "
    "disable_bucketing calculate_per_token_loss report_nan_in_param_grad keep_fp8_transpose_cache nccl_ub "
    "fsdp_double_buffer broadcast_buffers find_unused_parameters static_graph bucket_cap_mb gradient_as_bucket_view",
    "clip_grad_norm": "max_norm foreach",
    "peft": "_target_ target_modules exclude_modules match_all_linear dim alpha use_dora dropout dropout_position "
    "lora_A_init lora_dtype use_memory_efficient_lora use_triton moe_rank_scaling",
    "quantization": "_target_ load_in_4bit load_in_8bit bnb_4bit_compute_dtype bnb_4bit_use_double_quant "
    "bnb_4bit_quant_type bnb_4bit_quant_storage",
    "fp8": "_target_ enabled recipe_name enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp "
    "force_recompute_fp8_weight_in_bwd filter_fqns emulate",
}
"""The keys of each section whose classes have no others."""
_MAPPINGS = (
    *KEYS,
    *("model", "dataset", "optimizer", "freeze_config", "teacher_model", "kd_loss_fn", "loss_fn", "wandb", "mlflow"),
    *("rng", "dist_env", "compile", "processor"),
)
VALIDATION = "validation_dataset"


def read_sections(c: Conversion) -> None:
    """Check that sections hold keys, and record those that are null or that no section of this name has.

    Raises:
        ConfigError: a section is no mapping, or a name with dots stands outside its section.
    """
    c.tree = {name: _plain(value) for name, value in c.tree.items()}
    for name, value in c.tree.items():
        if "." in name:
            remedy = f"write {name.rpartition('.')[2]} into the section {name.rpartition('.')[0]}"
            raise ConfigError(f"{name}: {NAME} reads no name with dots in a file", where=name, remedy=remedy)
        is_set = name == VALIDATION or name.startswith(f"{VALIDATION}_")
        if value is None:
            c.record(name, Kind.DEFAULT, "nothing is set")
        elif (name in _MAPPINGS or is_set) and not isinstance(value, Mapping):
            raise ConfigError(
                f"{name}: {value} is no section with keys", where=name, remedy=f"write its keys, as {NAME} has them"
            )
        elif value == {}:
            c.record(name, Kind.DEFAULT, f"with the defaults of {NAME}")
    for name in c.given:
        section, _, rest = name.partition(".")
        key = rest.partition(".")[0].partition("[")[0]
        known = KEYS.get(section, "").split()
        if known and key and key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            c.record(name, Kind.UNKNOWN, f"no key of {section}" + (f"; did you mean {near[0]}?" if near else ""))


def _plain(value: object) -> object:
    """A value as its loader reads it, for which the text `none` is null."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    return None if value in ("none", "None") else value


def left(c: Conversion, name: str, section: str) -> bool:
    """Whether a key of a section has no outcome yet."""
    return name.startswith(f"{section}.") and name not in c.outcomes


def is_null(c: Conversion, name: str) -> bool:
    """Whether a key is given, as null."""
    return name in c.given and c.given[name] is None


def count(c: Conversion, name: str, least: int = 1) -> int | None:
    """A whole number; None where the key is absent or null.

    Raises:
        ConfigError: it is none, or below `least`.
    """
    value = c.get(name)
    found = whole(value)
    if value is not None and (found is None or found < least):
        raise ConfigError(
            f"{name}: {value} is no whole number of at least {least}",
            where=name,
            remedy=f"{NAME} takes no other: mend it",
        )
    return found
