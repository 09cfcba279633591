"""Whether another program has started several of this process, each of which trains by itself."""

from __future__ import annotations

from collections.abc import Mapping

COUNTS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun"}
"""Variables with the number of processes, and what sets them."""
ACCELERATE = "ACCELERATE_MIXED_PRECISION"
"""Set by `accelerate launch`, whatever its value."""


def alone_of_several(environment: Mapping[str, str]) -> list[str]:
    """A note for the user where several processes were requested, and this one is a run's only rank.

    Args:
        environment: of the process, before it is a rank.
    """
    if "WORLD_SIZE" in environment:  # a launcher of ranks has started it
        return []
    for variable, starter in COUNTS.items():
        count = environment.get(variable, "")
        if count.isdecimal() and int(count) > 1:
            return [
                f"{starter} has started {count} processes ({variable}), and this one trains alone: ranks of one run "
                "are started by shardtune launch, torchrun or runner.nproc_per_node"
            ]
    if ACCELERATE in environment and "MASTER_ADDR" in environment:
        return [
            "accelerate launch has started one process, though several were asked for (it needs MPI for more on CPUs): "
            "runner.nproc_per_node starts ranks"
        ]
    return []
