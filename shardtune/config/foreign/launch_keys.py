"""The options of accelerate, torchrun and deepspeed, and what each is here."""

from __future__ import annotations

from collections.abc import Mapping

from shardtune.config.foreign.sharding import FSDP_CONFIG
from shardtune.config.foreign.table import By, Entry, Missing, NoCounterpart, NotNeeded, Table, To, each
from shardtune.config.foreign.values import is_on, whole, whole_number

RANKS = By("runner.nproc_per_node: N")
HOSTS = NotNeeded("how hosts find each other: torchrun takes such options for shardtune, too (docs/getting-started.md)")
START = NotNeeded("how processes are started and watched, which changes no number")
OUTPUT = NotNeeded("the output of each rank: runner.logger.rank_logs, or torchrun's own options")
PROGRAM = NotNeeded("it says what the program is")
SHARDED = NotNeeded("models are sharded with FSDP2 anyway; actor.training_backend: ddp for whole copies")
RESTARTS = Missing("runner.max_restarts: N; under torchrun its own --max-restarts", (None, False, 0, "0"))
SELECTED = Missing("CUDA_VISIBLE_DEVICES in the environment selects GPUs", (None, "all"))
PORT = To("runner.master_port", lambda value: whole(value) or None)
LESS_MEMORY = Missing("a run that does not fit says what would: lower actor.micro_batch_size")
NO_TPU = Missing("runs are on CUDA, or on a CPU", (None, False, "no", "false"))
MEGATRON = Missing("actor.parallel.tensor, actor.parallel.sequence and actor.parallel.expert divide a model")


def _compiled(value: object) -> bool:
    """`dynamo_backend`: whether the model is compiled."""
    name = str(value).lower()
    if name in ("no", "false", "inductor"):
        return name == "inductor"
    raise NoCounterpart("actor.model.compile: true compiles with inductor")


TORCHRUN: Table = {
    **each("nproc_per_node nnodes", RANKS),
    "master_port": PORT,
    "max_restarts": RESTARTS,
    **each("rdzv_backend rdzv_endpoint rdzv_id rdzv_conf standalone node_rank master_addr local_addr", HOSTS),
    **each(
        "monitor_interval start_method event_log_handler role signals_to_handle shutdown_timeout numa_binding "
        "virtual_local_rank",
        START,
    ),
    **each(
        "log_dir redirects tee logs_specs local_ranks_filter duplicate_stdout_filters duplicate_stderr_filters "
        "log_line_prefix_template print_completion",
        OUTPUT,
    ),
    **each("module no_python run_path", PROGRAM),
}
DEEPSPEED: Table = {
    **each("num_gpus num_accelerators num_nodes include", RANKS),
    "exclude": Missing("give --world-size N, the processes that are left; CUDA_VISIBLE_DEVICES selects GPUs"),
    "master_port": PORT,
    **each("hostfile master_addr node_rank launcher launcher_args no_ssh no_ssh_check force_multi ssh_port", HOSTS),
    **each(
        "min_elastic_nodes max_elastic_nodes elastic_training", Missing("torchrun --nnodes MIN:MAX; docs/launching.md")
    ),
    **each("no_local_rank save_pid bind_cores_to_rank bind_core_list venv_script", START),
    **each("enable_each_rank_log log_level quiet", OUTPUT),
    **each("module no_python", PROGRAM),
    "autotuning": LESS_MEMORY,
}
PYTHON: Table = {"module": PROGRAM}
_PARALLEL = {
    "dp_replicate": "actor.parallel.data_replicate",
    "dp_shard": "actor.parallel.data_shard",
    "tp": "actor.parallel.tensor",
    "cp": "actor.parallel.sequence",
    "sp": "actor.parallel.sequence",
}
SHARING = tuple(f"parallelism_config_{name}_size" for name in ("tp", "cp", "sp"))
"""accelerate's options whose ranks have the same rows."""
ACCELERATE: Table = {
    **each("num_processes num_machines", RANKS),
    **each("config_file accelerate_config", By("nothing: its keys are those of a recipe")),
    "mixed_precision": By("actor.model.precision: bf16"),
    "distributed_type": By("nothing: models are sharded with FSDP2"),
    **each("multi_gpu use_fsdp use_deepspeed fsdp_config deepspeed_config parallelism_config", SHARDED),
    **{name.partition(".")[2]: entry for name, entry in FSDP_CONFIG.items() if name.startswith("fsdp_config.fsdp_")},
    "deepspeed_config_file": By("nothing: models are sharded with FSDP2, like ZeRO 3"),
    "zero_stage": NotNeeded("models are sharded with FSDP2, like ZeRO 3"),
    **each("offload_optimizer_device offload_param_device", By("actor.fsdp_config.cpu_offload: true")),
    **each(
        "offload_optimizer_nvme_path offload_param_nvme_path",
        NotNeeded("what is moved is in the memory of the host: actor.fsdp_config.cpu_offload"),
    ),
    "gradient_accumulation_steps": By("actor.global_batch_size: N (rows of a step over all ranks)"),
    "gradient_clipping": By("actor.optim.clip_grad: N"),
    **each(
        "zero3_init_flag zero3_save_16bit_model deepspeed_moe_layer_cls_names",
        NotNeeded("models are loaded and saved in shards, their layers found by their class"),
    ),
    **{
        f"parallelism_config_{name}_size": To(key, whole_number("a number of ranks")) for name, key in _PARALLEL.items()
    },
    "use_parallelism_config": NotNeeded("the sizes of parallelism_config are listed by themselves"),
    "dynamo_backend": To("actor.model.compile", _compiled),
    "dynamo_config": NotNeeded("actor.model.compile: true compiles with inductor"),
    **each("use_cpu cpu", To("runner.device", lambda value: "cpu" if is_on(value) else "auto")),
    "gpu_ids": SELECTED,
    "main_process_port": PORT,
    "max_restarts": RESTARTS,
    **each(
        "machine_rank main_process_ip same_network rdzv_backend rdzv_conf deepspeed_hostfile "
        "deepspeed_inclusion_filter deepspeed_exclusion_filter deepspeed_multinode_launcher mpirun_config "
        "mpirun_hostfile mpirun_ccl",
        HOSTS,
    ),
    **each(
        "monitor_interval role num_cpu_threads_per_process enable_cpu_affinity main_training_function debug env",
        START,
    ),
    **each("tee log_dir quiet", OUTPUT),
    **each("module no_python", PROGRAM),
    **each("tpu vm no_tpu_cluster downcast_bf16 command_file commands", NO_TPU),
    **each("use_megatron_lm megatron_lm_config", MEGATRON),
    "compute_environment": Missing("start shardtune on that machine itself", (None, "LOCAL_MACHINE")),
    "fp8_config": NotNeeded("it is for mixed_precision: fp8"),
}
PREFIXES: Mapping[str, Entry] = {
    "fsdp_": NotNeeded("FSDP2 needs no further settings here"),
    "fp8_": NotNeeded("it is for mixed_precision: fp8"),
    "dynamo_": NotNeeded("the same numbers either way"),
    "parallelism_config_": NotNeeded("the numbers are those of either actor.parallel.sequence_method"),
    "megatron_lm_": MEGATRON,
    "tpu_": NO_TPU,
    "aws_": START,
}
"""accelerate's options by the beginning of their names."""
SWITCHES = {
    "accelerate": (
        *("quiet", "cpu", "multi_gpu", "tpu", "enable_cpu_affinity", "dynamo_use_fullgraph", "dynamo_use_dynamic"),
        *("dynamo_use_regional_compilation", "use_deepspeed", "use_fsdp", "use_parallelism_config", "use_megatron_lm"),
        *("same_network", "module", "no_python", "tpu_cluster", "no_tpu_cluster", "tpu_use_sudo", "downcast_bf16"),
        "debug",
    ),
    "torchrun": ("standalone", "module", "no_python", "run_path", "virtual_local_rank"),
    "deepspeed": (
        *("module", "no_python", "no_local_rank", "no_ssh", "no_ssh_check", "force_multi", "save_pid"),
        *("elastic_training", "bind_cores_to_rank", "quiet"),
    ),
    "python": ("module", *"bBdEhiIOqsSuvVxP"),
}
"""The options of each launcher that take no value."""
SHORT = {
    "accelerate": {"m": "module", "q": "quiet", "t": "tee"},
    "torchrun": {"m": "module", "r": "redirects", "t": "tee"},
    "deepspeed": {"H": "hostfile", "i": "include", "e": "exclude", "q": "quiet"},
    "python": {"m": "module"},
}
TABLES: Mapping[str, Table] = {
    "accelerate": ACCELERATE,
    "torchrun": TORCHRUN,
    "deepspeed": DEEPSPEED,
    "python": PYTHON,
}
"""By the launcher's name."""
