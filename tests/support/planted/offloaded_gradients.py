"""A plugin: gradients are rounded to bf16 on their way to host memory."""

from dataclasses import replace

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from shardtune.parallel import fsdp2

fully_shard = fsdp2.fully_shard


def rounding(module, **settings):
    if isinstance(settings["offload_policy"], CPUOffloadPolicy):
        settings["mp_policy"] = replace(settings["mp_policy"], reduce_dtype=torch.bfloat16)
    return fully_shard(module, **settings)


fsdp2.fully_shard = rounding
