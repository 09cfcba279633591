"""A plugin: on several ranks, and only there, what goes into the model and its units is rounded."""

from dataclasses import replace

from shardtune.parallel import fsdp2

fully_shard = fsdp2.fully_shard


def rounding(module, **settings):
    settings["mp_policy"] = replace(settings["mp_policy"], cast_forward_inputs=True)
    return fully_shard(module, **settings)


fsdp2.fully_shard = rounding
